"""Drawn actions: the same for the same weights and seed, read as calls, judged by what the session had shown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from evaluation_runs import TIMES, config

from composer_replication.errors import ConfigError
from composer_replication.evaluation import sampling
from composer_replication.evaluation.evaluate import evaluate
from composer_replication.evaluation.figures import NATS
from composer_replication.evaluation.questions import _is_right
from composer_replication.evaluation.sampling import SampledText, State, sampled_rows, sampled_values
from composer_replication.evaluation.scored_calls import HeldOut, HeldOutSession
from composer_replication.runs.files import read_rows, tool_table
from composer_replication.sites.judge.judged_calls import earlier_sessions
from composer_replication.trainer.sessions.rendering import LoggedSession, RenderedSession
from composer_replication.types import ToolCall
from session_pieces import Session

FEW = "samples = 2\nstates = 3\nnew_tokens = 6\n"
TOOLS = [
    {"name": name, "format": "claude_code", "parameters": {}, "source": "inferred", "num_calls": 1}
    for name in ("Read", "Edit", "Bash")
]


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def moment():
    """A session that reads a file, fails to edit it, and would have been right with another text."""
    session = Session().user("Rename x in /repo/a.py.")
    session.call("Read", "     1→x = 1\n     2→y = 2\n", file_path="/repo/a.py")
    session.call("Edit", "not found", is_error=True, file_path="/repo/a.py", old_string="z = 1", new_string="q = 1")
    conversation = session.conversation()
    right = ToolCall(
        id="r", name="Edit", arguments={"file_path": "/repo/a.py", "old_string": "x = 1", "new_string": "q = 1"}
    )
    logged = LoggedSession(conversation=conversation, corrections={"site": right})
    rendered = RenderedSession(conversation_id=conversation.id, models=frozenset(), sequences=[])
    held = HeldOut(sessions=[HeldOutSession("s", "test", logged, rendered)])
    turn = conversation.turns[3]
    return held, State("site:erring", conversation.id, "s", 3, turn.id, "erring", "site", "edit_no_match", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            called("Edit", file_path="/repo/a.py", old_string="z = 1", new_string="q = 1"),
            ("fails", "no_match", True, None),
        ),
        (
            called("Edit", file_path="/repo/a.py", old_string="x = 1", new_string="q = 1"),
            ("ok", "found_in_whole_file", None, True),
        ),
        (
            called("Edit", file_path="/repo/b.py", old_string="x = 1", new_string="q = 1"),
            ("fails", "not_read", None, None),
        ),
        (called("Grep", pattern="x"), ("fails", "unknown_tool", None, None)),
        ("I would rather not.", ("unknown", "no_call", None, None)),
        ("<tool_call>\n{nonsense</tool_call>", ("unknown", "unparsed", None, None)),
    ],
)
def test_a_drawn_action_is_judged_by_what_the_session_had_shown(text, expected):
    held, state = moment()
    (row,) = sampled_rows(held, tool_table(TOOLS), [state], {"before": [[SampledText(text, 9, True)]]})
    verdict, rule, is_logged, is_right_call = expected
    assert (row["verdict"], row["rule"]) == (verdict, rule)
    assert row["same_as_logged"] is bool(is_logged)
    assert row["same_as_correction"] is bool(is_right_call)
    assert row["parsed"] is (rule != "unparsed")
    assert row["known_tool"] is (rule != "unknown_tool")


def of_day(day, conversation):
    """The same in a folder, at a time."""
    turns = tuple(replace(turn, timestamp=f"2026-01-{day:02}T10:00:00Z") for turn in conversation.turns)
    return replace(conversation, turns=turns, cwd="/repo")


@pytest.mark.parametrize(("day", "expected"), [(1, ("ok", "seen_in_earlier_session")), (9, ("unknown", "unseen"))])
def test_a_drawn_action_is_judged_by_what_earlier_sessions_of_the_project_knew_and_not_later_ones(day, expected):
    held, state = moment()
    (session,) = held.sessions
    now = of_day(5, session.conversation)
    held = HeldOut(sessions=[session._replace(logged=replace(session.logged, conversation=now))])
    other = Session("other").user("Look.")
    for name in "abcd":
        other.call("Read", "     1→x = 1\n", file_path=f"/repo/src/{name}.py")
    earlier = earlier_sessions([of_day(day, other.conversation()), now])
    drawn = {"before": [[SampledText(called("Read", file_path="/repo/src/c.py"), 9, True)]]}
    (row,) = sampled_rows(held, tool_table(TOOLS), [state], drawn, earlier)
    assert (row["verdict"], row["rule"]) == expected


def test_a_call_that_was_cut_off_is_no_broken_one():
    held, state = moment()
    draws = {"before": [[SampledText('<tool_call>\n{"name": "Wri', 9, False)]]}
    (row,) = sampled_rows(held, tool_table(TOOLS), [state], draws)
    assert (row["parsed"], row["rule"]) == (False, "cut_off")


def test_figures_are_changes_of_means_per_1000():
    held, state = moment()
    wrong = SampledText(called("Edit", file_path="/repo/a.py", old_string="z = 1", new_string="q = 1"), 10, True)
    good = SampledText(called("Edit", file_path="/repo/a.py", old_string="x = 1", new_string="q = 1"), 6, True)
    draws = {"before": [[wrong, wrong, wrong, good]], "after": [[good, good, good, wrong]]}
    values = sampled_values(sampled_rows(held, tool_table(TOOLS), [state], draws), [state])
    changes = {name: [value.change["after"] for value in several] for name, several in values.items()}
    assert changes["sampled_failures"] == [-500.0]
    assert changes["sampled_corrected"] == [500.0]
    assert changes["sampled_agreement"] == []  # no good state
    assert changes["sampled_length"] == [-2.0]


def test_calls_that_cannot_be_read_are_failures_and_no_call_is_counted_by_itself():
    """A model that draws nothing but broken calls is not one that never fails."""
    held, state = moment()
    wrong = SampledText(called("Edit", file_path="/repo/a.py", old_string="z = 1", new_string="q = 1"), 10, True)
    broken, cut = (
        SampledText("<tool_call>\n{nonsense</tool_call>", 5, True),
        SampledText('<tool_call>\n{"name": "Wri', 9, False),
    )
    draws = {"before": [[wrong] * 4], "after": [[broken, cut, cut, SampledText("I would rather not.", 4, True)]]}
    values = sampled_values(sampled_rows(held, tool_table(TOOLS), [state], draws), [state])
    changes = {name: several[0].change["after"] for name, several in values.items() if several}
    assert changes["sampled_failures"] == -250.0
    assert changes["sampled_unparsed"] == 750.0
    assert changes["sampled_no_call"] == 250.0


def test_the_same_weights_draw_the_same_and_an_interrupt_loses_one_batch(run, folder, other, monkeypatch):
    names = {"before": str(folder / "model"), "after": str(other)}
    whole = evaluate(config(FEW), run, **names)
    rows = list(read_rows(run, "sampled"))
    assert len(rows) == 2 * 2 * whole["sampled"]["n_states"]
    assert {row["state"] for row in rows} == {"erring", "good"}
    assert max(row["tokens"] for row in rows) <= 6
    monkeypatch.setattr(sampling, "_MAX_BATCH_STATES", 1)
    calls, real = [], sampling._TransformersSampler.__call__

    def cut(self, prompts):
        calls.append(len(prompts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, prompts)

    monkeypatch.setattr(sampling._TransformersSampler, "__call__", cut)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(FEW), run, **names)
    again = evaluate(config(FEW), run, **names)
    assert len(calls) == 2 * whole["sampled"]["n_states"] + 1
    once = evaluate(config(FEW), run, **names)
    assert {**once, **TIMES} == {**again, **TIMES}
    same = evaluate(config(FEW), run, before=names["before"], after=names["before"])
    assert {each["estimate"] for each in same["figures"]} == {0.0}


def test_losses_gaps_and_files_are_measured_where_they_are_asked_for(run, folder, other, tmp_path):
    sums, code = tmp_path / "sums.jsonl", tmp_path / "code.jsonl"
    sums.write_text('{"question": "What is 2 + 2?", "answer": "4\\n#### 4"}\n')
    code.write_text('{"prompt": "Add two numbers.", "canonical_solution": "def add(a, b): return a + b"}\n')
    more = f"good_turns = 3\ntoken_gaps = 9\ngsm8k = '{sums}'\ncode = '{code}'\n"
    record = evaluate(config(more), run, before=str(folder / "model"), after=str(other))
    damage = {each["name"]: each for each in record["damage"]}
    assert damage["loss_good_turns"]["before"] > 0
    assert damage["loss_code"]["unit"] == NATS
    assert damage["gsm8k"]["before"] in (0.0, 100.0)
    loss = next(each for each in record["figures"] if each["name"] == "loss_good_turns")
    change = damage["loss_good_turns"]["after"] - damage["loss_good_turns"]["before"]
    assert (loss["n"], loss["estimate"]) == (3, pytest.approx(change))
    gaps = list(read_rows(run, "token_gaps"))
    assert len(gaps) == 9
    assert {row["side"] for row in gaps} == {"train", "test"}
    assert all(len(row["tokens"]) == len(row["before"]) == len(row["after"]) for row in gaps)
    assert any(row["before"] != row["after"] for row in gaps)
    assert set(record["not_run"]) == {"control", "corrections", "sampled"}


@pytest.mark.parametrize("text", ["", "{", '{"question": "a"}'])
def test_a_file_that_is_no_set_of_questions_is_a_sentence(run, folder, tmp_path, text):
    place = tmp_path / "sums.jsonl"
    place.write_text(text)
    with pytest.raises(ConfigError, match=r"evaluation\.gsm8k"):
        evaluate(config(f"gsm8k = '{place}'\n"), run, before=str(folder / "model"), after=str(folder / "model"))


def test_a_sum_is_right_by_its_number():
    assert _is_right("so 1,000 it is\n#### 1,000", "7 * 10 = 70\n#### 1000")
    assert _is_right("The answer is 42.", "#### 42")
    assert not _is_right("#### 41", "#### 42")
    assert not _is_right("no idea", "#### 42")


def test_rows_have_the_fields_that_the_reference_names(run, folder, other):
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "reference"))
    import sentences

    few = "samples = 1\nstates = 1\nnew_tokens = 1\ntoken_gaps = 1\n"
    evaluate(config(few), run, before=str(folder / "model"), after=str(other))
    for name in ("evaluated", "sampled", "token_gaps"):
        record = sentences.RECORDS[name]
        meta = run.meta(name)
        assert (meta.schema, meta.version) == (record.schema, record.version)
        assert sorted(meta.keys) == sorted(field for field, _ in record.more)
