"""`crf split`: written down once; what is learnt or chosen afterwards does not know the sessions of the test."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from claude_records import Log, call, text
from run_pieces import ingested

from composer_replication.cli.forget import forget
from composer_replication.cli.main import main
from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.replay import RunStates
from composer_replication.cli.sites import write_sites
from composer_replication.cli.split import write_split
from composer_replication.config import PairsConfig, ReplayConfig, SitesConfig, SplitConfig
from composer_replication.errors import InputError, StaleArtefactError
from composer_replication.runs.files import read_sites, read_tools
from composer_replication.runs.split import read_split, read_split_rows, read_test_ids
from composer_replication.sites.verdict_revision import Refusal, repeated_refusals
from composer_replication.trainer.sessions.rendering import read_sessions
from refusals import refusal

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
HOOK = "PreToolUse:Bash hook error: code is not formatted, run the formatter first"
SAID = "The user doesn't want to proceed with this tool use. To tell you how to proceed, the user said:\n"
OTHER = "always run the marker first"


def session(folder, name, day, *, task="fix the cart", rule="always pull with rebase first", acts=1, tool=None):
    """A file that was edited unread, a gate and a rule of the user's; `acts` edits that were right at once.

    `tool` is one that it calls and no other session does.
    """
    log = Log(session=name)
    log.user(f"{task} of /repo/{name}.py")
    edit = {"file_path": f"/repo/{name}.py", "old_string": "return 1", "new_string": f"return {day}"}
    log.assistant("m1", call("c1", "Edit", **edit))
    log.result("c1", NOT_READ, is_error=True)
    log.assistant("m2", call("c2", "Read", file_path=f"/repo/{name}.py"))
    log.result("c2", "     1→return 1")
    for at in range(acts):
        log.assistant(f"e{at}", call(f"e{at}", "Edit", **edit))
        log.result(f"e{at}", "The file has been updated.")
    log.assistant("m3", call("c3", "Bash", command=f"deploy /repo/{name}"))
    log.result("c3", HOOK, is_error=True)
    log.assistant("m4", call("c4", "Bash", command="git push"))
    log.result("c4", SAID + rule, is_error=True)
    if tool is not None:
        log.assistant("m5", call("c5", tool, place="harbour"))
        log.result("c5", "ok")
    log.assistant("last", text("Done."))
    records = [{**each, "timestamp": f"2026-02-{day:02}T10:00:00.000Z"} for each in log.records]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


@pytest.fixture
def made(tmp_path):
    def make(name="run", *, newest=None):
        """Five sessions, the last of which, `e`, is the newest."""
        logs = tmp_path / f"{name}-logs"
        logs.mkdir()
        for letter, day in zip("abcde", (3, 4, 5, 6, 9), strict=True):
            session(logs, letter, day, **((newest or {}) if letter == "e" else {}))
        return ingested(tmp_path / name, logs)[0]

    return make


def all_steps(run):
    write_split(SplitConfig(), run)
    write_sites(SitesConfig(), run)
    write_pairs(PairsConfig(), run)
    return run


def rows_of(run, name):
    rows = map(json.loads, run.path(name).read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["conversation_id"] not in read_test_ids(run)]


def test_it_is_written_in_the_order_of_the_conversations_and_read_back(made, capsys):
    run = made()
    assert read_split(run) is None
    assert read_test_ids(run) == frozenset()
    assert main(["split", str(run.root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(each["side"], each["sessions"]) for each in said["sides"]] == [
        ("train", 3),
        ("validation", 1),
        ("test", 1),
    ]
    rows = read_split_rows(run)
    assert [(row.conversation_id, row.side) for row in rows] == [
        *((name, "train") for name in "abc"),
        ("d", "validation"),
        ("e", "test"),
    ]
    assert (rows[0].session, rows[0].began, rows[0].project) == ("a", "2026-02-03T10:00:00+00:00", "/repo")
    assert run.meta("split").settings == {"by": "time", "validation": 0.1, "test": 0.2}


def test_states_of_the_test_that_training_sessions_hold_too_are_named(made):
    """The same task but for names and numbers: every state before the user's own words; then none."""
    run = made()
    done = write_split(SplitConfig(), run)
    assert (done.num_test_states, done.num_near_duplicates) == (6, 6)
    other = made("other", newest={"task": "write a poem", "rule": OTHER})
    assert write_split(SplitConfig(), other).num_near_duplicates == 0


def test_nothing_that_is_learnt_or_chosen_changes_with_the_test_sessions(made):
    """Another task, another rule, more calls: what is learnt from, and the file of rules, stay byte for byte."""
    plain, marked = (
        all_steps(made(name, newest=newest))
        for name, newest in (("plain", None), ("marked", {"task": "marker", "rule": OTHER, "acts": 5}))
    )
    assert read_split(plain) == read_split(marked)
    assert plain.path("conversations").read_bytes() != marked.path("conversations").read_bytes()
    for name in ("sites", "pairs"):
        assert rows_of(plain, name) == rows_of(marked, name) != []
    assert plain.path("conventions").read_bytes() == marked.path("conventions").read_bytes()
    assert "marker" not in marked.path("conventions").read_text()
    asked = [[each.state for each in RunStates(ReplayConfig(states="all"), run).read()] for run in (plain, marked)]
    assert asked[0] == asked[1]
    assert {state["session_id"] for state in asked[0]} == set("abcd")


def test_tools_that_only_the_test_calls_are_shown_to_nobody_who_learns(made):
    """The judge of drawn calls knows them: they are there."""
    plain, marked = made(), made("marked", newest={"tool": "Steer"})
    assert "Steer" in read_tools(marked).schemas("claude_code")
    for run in (plain, marked):
        write_split(SplitConfig(), run)
    assert read_tools(plain).by_format == read_tools(marked).by_format
    assert set(read_tools(marked).schemas("claude_code")) == {"Edit", "Read"}
    assert "Steer" in read_tools(marked, with_test=True).schemas("claude_code")


def test_without_a_split_a_rule_and_a_gate_of_the_newest_session_are_heard(made):
    """So the test above can fail."""
    run = made(newest={"rule": OTHER})
    write_sites(SitesConfig(), run)
    assert OTHER in run.path("conventions").read_text()


@pytest.mark.parametrize(("held_out", "later"), [("", "ey"), ("x", "e"), ("y", "ey"), ("xy", "y")])
def test_a_gate_that_a_held_out_session_met_first_teaches_no_other(made, held_out, later):
    """Three sessions of a project met a gate, `x` first: without it `y` was the first."""
    write_sites(SitesConfig(), run := made())
    site = next(site for site, _ in read_sites(run) if site.kind == "hook_blocked")
    refusals = [
        Refusal("/repo", "gate", f"2026-01-0{day}", replace(site, id=name, conversation_id=name))
        for day, name in enumerate("xye", start=1)
    ]
    assert "".join(sorted(repeated_refusals(refusals, held_out=set(held_out)))) == later


def test_kept_rules_that_only_the_test_named_are_not_used(made):
    run = made(newest={"rule": OTHER})
    write_sites(SitesConfig(), run)
    path = run.path("conventions")
    path.write_text(path.read_text().replace(f"[ ] {OTHER}", f"[x] {OTHER}"))
    write_split(SplitConfig(), run)
    write_sites(SitesConfig(), run)
    assert not [row for row in rows_of(run, "sites") if row["hint"] and OTHER in row["hint"]["text"]]


def test_what_was_made_before_the_split_or_of_another_one_is_refused(made):
    run = made()
    write_sites(SitesConfig(), run)
    write_split(SplitConfig(), run)
    with refusal(StaleArtefactError, what="sites.jsonl", got="split", fix="`crf sites`"):
        list(read_sessions(run, with_sites=True, with_pairs=False))
    write_sites(SitesConfig(), run)
    write_pairs(PairsConfig(), run)
    list(read_sessions(run, with_sites=True, with_pairs=True))
    write_split(SplitConfig(), run)  # the same again: nothing is older than it
    list(read_sessions(run, with_sites=True, with_pairs=True))
    write_split(SplitConfig(test=0.4), run)
    with refusal(StaleArtefactError, what="sites.jsonl", got="split", fix=f"`crf sites {run.root}`"):
        list(read_sessions(run, with_sites=True, with_pairs=True))


def test_a_split_of_other_conversations_is_refused_and_forgetting_leaves_a_split(made, tmp_path):
    run = all_steps(made())
    forget(run, ["b"])
    assert [row.conversation_id for row in read_split_rows(run)] == ["a", "c", "d", "e"]
    list(read_sessions(run, with_sites=True, with_pairs=True))
    session(tmp_path, "f", 20)
    ingested(run.root, tmp_path / "f.jsonl")
    with refusal(StaleArtefactError, what="split.jsonl", got="conversations", fix=f"`crf split {run.root}`"):
        read_split(run)


def test_pairs_that_are_handed_out_are_those_to_learn_from(made, tmp_path):
    run = all_steps(made())
    assert main(["pairs", str(run.root), "--export", str(tmp_path / "out.jsonl"), "--no-filter"]) == 0
    exported = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(exported) == len(rows_of(run, "pairs"))


def test_one_session_alone_is_refused_in_words(tmp_path):
    session(tmp_path, "only", 1)
    run, _ = ingested(tmp_path / "run", tmp_path / "only.jsonl")
    with refusal(InputError, got="1 session", fix="`--set split.test=0 --set split.validation=0`"):
        write_split(SplitConfig(), run)
    assert not run.path("split").exists()
