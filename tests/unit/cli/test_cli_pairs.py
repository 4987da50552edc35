"""`crf replay` with its gate, and `crf pairs`: the same pairs as asking everyone, filters, an export."""

from __future__ import annotations

import json
import sqlite3

import pytest
from crf import crf, must
from test_cli_replay import SLUGS, write_chats

from fault_server import FaultServer


def prepared(folder, server):
    folder.mkdir()
    write_chats(folder / "chats.jsonl", num_sessions=30)
    must("ingest", "chats.jsonl", "-o", "run", cwd=folder)
    slugs = [word for slug in SLUGS for word in ("--slug", slug)]
    must("teachers", *slugs, "--base-url", server.base_url, "-o", "teachers.json", cwd=folder)
    return folder


def pairs_of(folder):
    rows = [json.loads(line) for line in (folder / "run" / "pairs.jsonl").read_text().splitlines()]
    return {(row["state_id"], row["chosen"], row["rejected"], row["chosen_by"]) for row in rows}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A folder where everyone was asked, one with the exact gate, one with the rule of thumb; and the calls of each."""
    found = {}
    for name, options in (("full", ["--full"]), ("exact", []), ("agree", ["--gate", "agree"])):
        with FaultServer(agreement=0.6, seed=2) as server:
            folder = prepared(tmp_path_factory.mktemp("runs") / name, server)
            done = crf("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", *options, cwd=folder)
            assert done.returncode == 0, done.stderr
            must("pairs", "run", "--no-filter", "--where-it-worked", cwd=folder)
            found[name] = (folder, server.requests()["num_chat"], done.stdout)
    return found


def test_the_exact_gate_asks_less_and_gives_the_same_pairs(asked, note):
    full, exact = asked["full"], asked["exact"]
    assert full[1] == 180
    assert exact[1] < full[1]
    assert pairs_of(exact[0]) == pairs_of(full[0])
    assert len(pairs_of(full[0])) >= 5
    assert f"calls saved {full[1] - exact[1]}" in " ".join(exact[2].split())
    note(f"exact gate: {exact[1]} of {full[1]} calls for the same {len(pairs_of(full[0]))} pairs")


def test_the_rule_of_thumb_says_what_it_may_lose(asked):
    folder, num_calls, said = asked["agree"]
    assert num_calls <= asked["exact"][1]
    assert pairs_of(folder) <= pairs_of(asked["full"][0])
    if num_calls < asked["exact"][1]:
        assert "pairs that may be lost" in said


def test_rows_refer_to_their_state_and_say_who_agreed(asked):
    folder = asked["full"][0]
    rows = [json.loads(line) for line in (folder / "run" / "pairs.jsonl").read_text().splitlines()]
    for row in rows:
        assert "state_messages" not in row
        assert row["state_id"] == f"{row['conversation_id']}::{row['turn_number']:04d}"
        assert row["n_teachers_agreeing"] == len(row["teachers"]) >= 2
        assert row["chosen_by"] == row["teachers"][0]
        assert row["chosen"] != row["rejected"]


def test_filters_count_what_they_drop_and_the_export_is_self_contained(asked):
    folder = asked["full"][0]
    done = crf("pairs", "run", "--export", "preferences.jsonl", "--json", "--where-it-worked", cwd=folder)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert sum(said["filters"].values()) == said["report"]["num_pairs"]
    kept = said["filters"]["kept"]
    exported = [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]
    assert len(exported) == len(pairs_of(folder)) == kept > 0
    assert {"prompt", "chosen", "rejected", "tools"} <= set(exported[0])
    assert exported[0]["prompt"][-1]["role"] in ("user", "tool")
    by_default = crf("pairs", "run", cwd=folder)
    shown = by_default.stdout
    assert "pairs would reject an action that worked: they are none; --where-it-worked" in by_default.stderr
    assert "rejected_action_worked" in shown
    assert {row[0].rpartition("::")[2] for row in pairs_of(folder)} == {"0000"}  # the call that failed
    assert "Agreement" in shown
    assert "States without a pair" in shown


def test_a_threshold_nobody_reaches_gives_no_pairs_and_says_why(asked):
    folder = asked["full"][0]
    said = json.loads(must("pairs", "run", "--threshold", "4", "--json", cwd=folder))
    assert said["report"]["num_pairs"] == 0
    assert said["report"]["drops"]["below_threshold"] > 0


def test_without_calls_the_pairs_are_the_sessions_own_unless_those_are_not_wanted(tmp_path):
    write_chats(tmp_path / "chats.jsonl")
    must("ingest", "chats.jsonl", "-o", "run", cwd=tmp_path)
    own = crf("pairs", "run", cwd=tmp_path)
    assert own.returncode == 0
    assert "no replay in this run: all pairs are the sessions' own" in own.stderr
    done = crf("pairs", "run", "--no-corrections", cwd=tmp_path)
    assert done.returncode == 1
    assert "crf replay" in done.stderr


def forgettable(folder, server):
    """A folder with replies of 30 sessions and pairs of them; the id of the first session."""
    prepared(folder, server)
    must("sites", "run", cwd=folder)
    must("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--full", cwd=folder)
    must("pairs", "run", "--no-filter", "--where-it-worked", cwd=folder)
    rows = [json.loads(line) for line in (folder / "run" / "conversations.jsonl").read_text().splitlines()]
    return rows[0]["id"]


def test_forgetting_a_session_takes_its_calls_pairs_and_answers_and_nobody_else_s(tmp_path):
    with FaultServer(agreement=0.9, seed=2) as server:
        folder = tmp_path / "x"
        gone = forgettable(folder, server)
        num_chat = server.requests()["num_chat"]
        said = must("forget", gone, "--run", "run", "--yes", cwd=folder)
        assert "Removed 6 paid answers of theirs from teacher_cache.sqlite; 174 of other sessions stay" in said
        for name in ("conversations", "teacher_calls", "pairs"):
            text = (folder / "run" / f"{name}.jsonl").read_text()
            assert gone not in text
            assert text
        done = crf("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--full", cwd=folder)
        assert "0 calls to send, 174 answered before" in done.stderr
        assert "$0.0000 of the cap" not in done.stderr
        assert server.requests()["num_chat"] == num_chat


def test_answers_of_an_old_store_are_not_thrown_away_unasked(tmp_path):
    with FaultServer(agreement=0.9, seed=2) as server:
        folder = tmp_path / "x"
        gone = forgettable(folder, server)
        connection = sqlite3.connect(folder / "run" / "teacher_cache.sqlite", isolation_level=None)
        connection.execute("DROP TABLE reply_owners")
        connection.execute("PRAGMA user_version = 1")
        connection.close()
        refused = crf("forget", gone, "--run", "run", "--yes", cwd=folder)
        assert refused.returncode == 1
        assert "180 answers of which it does not say for whom they were asked" in refused.stderr
        assert "--discard-answers" in refused.stderr
        assert gone in (folder / "run" / "conversations.jsonl").read_text()
        must("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--full", cwd=folder)
        assert server.requests()["num_chat"] == 180
        said = must("forget", gone, "--run", "run", "--yes", cwd=folder)
        assert "174 of other sessions stay" in said


def test_answers_of_nobody_known_go_when_that_is_asked_for(tmp_path):
    with FaultServer(agreement=0.9, seed=2) as server:
        folder = tmp_path / "x"
        gone = forgettable(folder, server)
        connection = sqlite3.connect(folder / "run" / "teacher_cache.sqlite", isolation_level=None)
        connection.execute("DELETE FROM reply_owners")
        connection.close()
        said = must("forget", gone, "--run", "run", "--yes", "--discard-answers", cwd=folder)
        assert "180 of nobody known" in said
        done = crf(
            "replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--full", "--dry-run", cwd=folder
        )
        assert "0 answered before" in done.stderr
        assert "$0.0000 of the cap" not in done.stderr


def test_a_threshold_that_was_not_gated_for_is_refused(asked):
    done = crf("pairs", "run", "--threshold", "3", cwd=asked["exact"][0])
    assert done.returncode == 1
    assert "--full" in done.stderr


def test_when_every_call_fails_the_status_says_so(tmp_path):
    with FaultServer(faults={"key_limit": 1.0}) as server:
        folder = prepared(tmp_path / "x", server)
        done = crf(
            "replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--limit", "2", cwd=folder
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
