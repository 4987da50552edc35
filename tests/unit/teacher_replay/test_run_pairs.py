"""Pairs of a run: by default where the student's action failed or was refused, and without thinking on either side."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call, text, thinking
from run_pieces import ingested, run_states

from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.replay import SCHEMA, VERSION
from composer_replication.cli.sites import write_sites
from composer_replication.config import PairsConfig, SitesConfig
from composer_replication.runs.files import PAIRS_SCHEMA as PAIR_SCHEMA
from composer_replication.runs.files import PAIRS_VERSION as PAIR_VERSION
from composer_replication.trainer.sessions.rendering import read_sessions
from composer_replication.types import Action, ToolCall

REFUSED = "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit)."
RESULTS = (
    ("<tool_use_error>File does not exist.</tool_use_error>", True, "file_not_found"),
    (REFUSED, True, "user_rejected"),
    ("contents of the file", False, None),
    ("=== FAILED tests/test_cart.py::test_total\n1 failed, 3 passed in 0.10s", True, "test_failure"),
)
COMMANDS = ("cat a.py", "rm -rf build", "cat b.py", "pytest -q")
SETTINGS = {"teachers": "x/a, x/b", "gate": "none", "threshold": "2", "tools": "not sent", "max_history_tokens": ""}


@pytest.fixture
def run(tmp_path):
    """Four calls and a last word: missing, refused, worked, failing tests; two teachers agree on another thing."""
    log = Log(session="s-1")
    log.user("fix the cart")
    for number, (result, is_error, kind) in enumerate(RESULTS):
        name = "Read" if kind == "file_not_found" else "Bash"
        given = {"file_path": "/repo/a.py"} if name == "Read" else {"command": COMMANDS[number]}
        log.assistant(
            f"m{number}", thinking(f"secret thought {number}"), text("so:"), call(f"c{number}", name, **given)
        )
        log.result(f"c{number}", result, is_error=is_error)
    log.assistant("last", thinking("done, I think"), text("All is well."))
    (tmp_path / "s-1.jsonl").write_bytes(log.lines())
    run, _ = ingested(tmp_path / "run", tmp_path / "s-1.jsonl")
    rows = [answer(state, slug) for state in run_states(run, send_tools=False) for slug in ("x/a", "x/b")]
    run.write_jsonl("teacher_calls", rows, schema=SCHEMA, version=VERSION, sources=["conversations"], settings=SETTINGS)
    return run


def answer(state, slug):
    return {
        "state_id": state["state_id"],
        "teacher_slug": slug,
        "response_text": "<think>\nhm\n</think>\n\nI list the folder first.",
        "message": None,
        "latency_s": 0.1,
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "cost_usd": 0.0,
        "error": None,
        "conversation_id": "s-1",
    }


def rows_of(run):
    return {row["turn_number"]: row for row in run.read_jsonl("pairs", schema=PAIR_SCHEMA, version=PAIR_VERSION)}


def make(run, export=None, **choices):
    return write_pairs(PairsConfig(filters="none", **choices), run, export=export)


def test_pairs_are_made_where_the_action_failed_or_was_refused(run):
    found = make(run)
    rows = rows_of(run)
    assert sorted(rows) == [0, 1]
    assert [rows[at]["metadata"]["rejected_failures"] for at in (0, 1)] == [["file_not_found"], ["user_rejected"]]
    assert not any(row["metadata"]["rejected_action_worked"] for row in rows.values())
    assert found.report.drops["rejected_action_worked"] == 3
    assert found.report.to_dict()["rejected_action_worked"] == 3
    assert found.report.num_pairs == 2
    assert run.meta("pairs").drops["rejected_action_worked"] == 3
    assert run.meta("pairs").counts["rejected_action_worked"] == 0


def test_where_it_worked_pairs_are_made_on_request_and_counted(run):
    found = make(run, where_it_worked=True)
    worked = {at: row["metadata"]["rejected_action_worked"] for at, row in rows_of(run).items()}
    assert worked == {0: False, 1: False, 2: True, 3: True, 4: True}
    assert rows_of(run)[3]["metadata"]["rejected_failures"] == ["test_failure"]  # the work itself: the call did its job
    assert found.report.num_rejected_worked == 3
    assert "rejected_action_worked" not in found.report.drops
    assert run.meta("pairs").counts["rejected_action_worked"] == 3
    assert run.meta("pairs").settings["where_it_worked"] is True


def test_the_pairs_are_the_same_with_and_without_sites(run):
    make(run)
    without = rows_of(run)
    assert [each.name for each in run.meta("pairs").sources] == ["conversations", "teacher_calls"]
    write_sites(SitesConfig(), run)
    make(run)
    assert [each.name for each in run.meta("pairs").sources] == ["conversations", "teacher_calls", "sites"]
    assert rows_of(run) == without
    assert run.lineage("pairs").stale == ()


def test_without_words_calls_are_compared_with_calls_and_words_with_words(run):
    call_text = '[TOOL_USE] name=Read input={"file_path":"/repo/b.py"}'
    rows = [
        answer(state, slug) | {"response_text": f"I look at it.\n{call_text}"}
        for state in run_states(run, send_tools=False)
        for slug in ("x/a", "x/b")
    ]
    run.write_jsonl("teacher_calls", rows, schema=SCHEMA, version=VERSION, sources=["conversations"], settings=SETTINGS)
    make(run, where_it_worked=True)
    assert rows_of(run)[0]["chosen"] == f"I look at it.\n{call_text}"
    make(run, where_it_worked=True, words=False)
    without = rows_of(run)
    assert (without[0]["chosen"], without[0]["rejected"]) == (call_text, call_text.replace("b.py", "a.py"))
    assert without[0]["rejected_action"]["text"] == without[0]["chosen_action"]["text"] == ""
    assert (without[4]["chosen"], without[4]["rejected"]) == (f"I look at it.\n{call_text}", "All is well.")
    assert run.meta("pairs").settings["words"] is False


def test_thinking_is_on_neither_side(run, tmp_path):
    make(run, export=tmp_path / "out.jsonl", where_it_worked=True)
    for at, row in rows_of(run).items():
        assert row["chosen"] == "I list the folder first."
        assert row["rejected"].startswith("so:\n[TOOL_USE] name=" if at < 4 else "All is well.")
    written = [run.path("pairs").read_text(), (tmp_path / "out.jsonl").read_text()]
    for text_of_file in written:
        for word in ("[THINKING]", "secret thought", "<think>", "reasoning_content", "hm\\n"):
            assert word not in text_of_file


def test_what_was_chosen_stands_in_its_row_as_an_action_too(run):
    """Its text alone would read as a thought and a call of Bash, without the words between them."""
    words = "As the log says:\n[THINKING] hm\nso"
    entry = {"id": "t", "type": "function", "function": {"name": "Glob", "arguments": '{"pattern":"*","path":"/repo"}'}}
    message = {"role": "assistant", "content": words, "tool_calls": [entry]}
    calls = [
        {**row, "message": message, "response_text": f"{words}\n[TOOL_USE] name=Glob input={{}}"}
        for row in run.read_jsonl("teacher_calls", schema=SCHEMA, version=VERSION)
    ]
    run.write_jsonl(
        "teacher_calls", calls, schema=SCHEMA, version=VERSION, sources=["conversations"], settings=SETTINGS
    )
    make(run)
    row = rows_of(run)[0]
    arguments = {"pattern": "*", "path": "/repo"}
    call_row = {"id": "t", "name": "Glob", "arguments": arguments, "raw_arguments": None}
    assert row["chosen_action"] == {"text": words, "calls": [call_row]}
    (session,) = read_sessions(run, with_sites=False, with_pairs=True)
    assert session.pairs[0].action == Action(text=words, calls=(ToolCall(**call_row),))


def test_thinking_stays_where_it_is_asked_for(run, tmp_path):
    make(run, export=tmp_path / "out.jsonl", thinking=True)
    row = rows_of(run)[0]
    assert row["rejected"].startswith("[THINKING] secret thought 0\nso:\n[TOOL_USE] name=Read")
    assert row["chosen"].startswith("<think>")
    exported = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    for side in ("chosen", "rejected"):  # an export has it on both sides or on neither
        assert "reasoning_content" not in exported[side][0]
        assert "<think>" not in exported[side][0]["content"]


def test_a_replay_can_ask_about_just_those_states(run):
    asked = [state["state_id"] for state in run_states(run, states="failed")]
    assert asked == ["s-1::0000", "s-1::0001"]


def test_settings_are_values_in_the_sidecar_and_those_of_earlier_versions_are_read_too(run):
    assert run.meta("teacher_calls").settings == SETTINGS  # all of it text, as it was written before
    make(run)
    earlier = rows_of(run)
    calls = list(run.read_jsonl("teacher_calls", schema=SCHEMA, version=VERSION))
    settings = {
        "teachers": ["x/a", "x/b"],
        "gate": "none",
        "threshold": 2,
        "send_tools": False,
        "max_history_tokens": None,
    }
    run.write_jsonl("teacher_calls", calls, schema=SCHEMA, version=VERSION, settings=settings)
    make(run)
    assert rows_of(run) == earlier
    assert run.meta("pairs").settings["threshold"] == 2
