"""`crf replay` with its gate, and `crf pairs`: the same pairs as asking everyone, filters, an export."""

from __future__ import annotations

import json
import sqlite3

import pytest
from crf import crf, must
from test_cli_replay import SLUGS, write_chats

from fault_server import FaultServer
from output_facts import lines_with


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
            states = "--set=replay.states=all"
            said = must("replay", "run", "--teachers", "teachers.json", states, *options, "--json", cwd=folder)
            must("pairs", "run", "--no-filter", "--where-it-worked", cwd=folder)
            found[name] = (folder, server.requests()["num_chat"], json.loads(said)["report"]["counts"])
    return found


def test_the_exact_gate_asks_less_and_gives_the_same_pairs(asked, note):
    full, exact = asked["full"], asked["exact"]
    assert full[1] == 180
    assert exact[1] < full[1]
    assert pairs_of(exact[0]) == pairs_of(full[0])
    assert len(pairs_of(full[0])) >= 5
    assert exact[2]["calls saved"] == full[1] - exact[1]
    note(f"exact gate: {exact[1]} of {full[1]} calls for the same {len(pairs_of(full[0]))} pairs")


def test_the_rule_of_thumb_says_what_it_may_lose(asked):
    folder, num_calls, counts = asked["agree"]
    assert num_calls <= asked["exact"][1]
    assert pairs_of(folder) <= pairs_of(asked["full"][0])
    if num_calls < asked["exact"][1]:
        assert counts["pairs that may be lost"] > 0


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
    assert lines_with(by_default.stderr, "pairs", "--where-it-worked")
    assert {row[0].rpartition("::")[2] for row in pairs_of(folder)} == {"0000"}  # the call that failed
    report = json.loads(must("pairs", "run", "--json", cwd=folder))["report"]
    assert report["agreement"]
    assert "rejected_action_worked" in report["drops"]
    tables = {" ".join(line.split()) for line in by_default.stdout.splitlines()}
    assert {f"{why} {number}" for why, number in report["drops"].items()} <= tables
    for kind, agreement in report["agreement"].items():
        (row,) = [line for line in tables if line.startswith(f"{kind} {agreement['num_states']} ")]
        assert row.split()[2] == str(agreement["num_consensus"])


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
    assert lines_with(own.stderr, "crf replay RUN")
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


def plan_of_replay(folder):
    """What asking everyone about every state would take now."""
    options = ("--teachers", "teachers.json", "--set=replay.states=all", "--full", "--dry-run", "--json")
    return json.loads(must("replay", "run", *options, cwd=folder))


def test_forgetting_a_session_takes_its_calls_pairs_and_answers_and_nobody_else_s(tmp_path):
    with FaultServer(agreement=0.9, seed=2) as server:
        folder = tmp_path / "x"
        gone = forgettable(folder, server)
        num_chat = server.requests()["num_chat"]
        said = json.loads(must("forget", gone, "--run", "run", "--yes", "--json", cwd=folder))
        assert said["answers"] == {"num_removed": 6, "num_kept": 174, "num_unowned": 0}
        for name in ("conversations", "teacher_calls", "pairs"):
            text = (folder / "run" / f"{name}.jsonl").read_text()
            assert gone not in text
            assert text
        plan = plan_of_replay(folder)
        assert (plan["num_calls"], plan["num_cached"]) == (0, 174)
        assert plan["spent_usd"] > 0
        must("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--full", cwd=folder)
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
        assert lines_with(refused.stderr, 180, "teacher_cache.sqlite", "--discard-answers")
        assert gone in (folder / "run" / "conversations.jsonl").read_text()
        must("replay", "run", "--teachers", "teachers.json", "--set=replay.states=all", "--full", cwd=folder)
        assert server.requests()["num_chat"] == 180
        said = must("forget", gone, "--run", "run", "--yes", cwd=folder)
        assert lines_with(said, "answers", 6, 174, "teacher_cache.sqlite")
        assert "180" not in said  # of nobody known


def test_answers_of_nobody_known_go_when_that_is_asked_for(tmp_path):
    with FaultServer(agreement=0.9, seed=2) as server:
        folder = tmp_path / "x"
        gone = forgettable(folder, server)
        connection = sqlite3.connect(folder / "run" / "teacher_cache.sqlite", isolation_level=None)
        connection.execute("DELETE FROM reply_owners")
        connection.close()
        said = json.loads(must("forget", gone, "--run", "run", "--yes", "--discard-answers", "--json", cwd=folder))
        assert said["answers"]["num_unowned"] == 180
        plan = plan_of_replay(folder)
        assert plan["num_cached"] == 0
        assert plan["spent_usd"] > 0


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
