"""Pairs of logged sessions: the student's thought is learned where it is its own, and compared where both have one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from render_checks import decode

from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import Renderer
from composer_replication.runs.files import LoggedPair
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.rendering import LoggedSession
from composer_replication.types import Action, ToolCall
from session_pieces import Session
from tokenizer_assets import load

RULES = {
    "left out": ThinkingRules(),
    "own": ThinkingRules(student_models=("student",)),
    "context": ThinkingRules(others="context"),
    "own as context": ThinkingRules(own="context", student_models=("student",)),
}


def logged(chosen):
    """One question, and an answer with a thought, against which a pair stands."""
    conversation = Session().user("Well?").says("No.", thinking="Zorro says no.", model="student").conversation()
    return LoggedSession(conversation=conversation, pairs=[LoggedPair("s::0", 0, chosen)])


def sides(renderer, sessions):
    ((pair,),) = (window.pair_ids() for window in sessions.windows)
    return [(decode(renderer, ids[:start]), decode(renderer, ids[start:])) for ids, start in pair]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("family", ["thinker", "qwen3"])
def test_a_thought_that_the_rejected_side_alone_has_is_not_compared(family, name):
    renderer = Renderer(load(family), thinking=RULES[name])
    found = LoggedSessions.from_sessions([logged("Yes.")], renderer, budget=512, responses="all")
    (before, yes), (same, no) = sides(renderer, found)
    assert before == same
    assert (yes.startswith("Yes."), no.startswith("No.")) == (True, True)
    unpaired = replace(logged("Yes."), pairs=[])  # what a pair rejects is no target of channel 1
    (batch,) = LoggedSessions.from_sessions([unpaired], renderer, budget=512, responses="all").batches()
    learned = decode(renderer, batch.response.targets.tolist())
    assert learned.startswith("No.") == (name != "own")
    assert ("Zorro" in learned) == (name == "own")


def test_thoughts_of_both_sides_are_compared_where_both_may_be_learned():
    renderer = Renderer(load("thinker"), thinking=ThinkingRules(student_models=("*",)))
    found = LoggedSessions.from_sessions([logged("[THINKING] Zorro says yes.\nYes.")], renderer, budget=512)
    (before, yes), (same, no) = sides(renderer, found)
    assert before == same
    assert yes == "Zorro says yes.\n</think>\n\nYes.<|end|>"
    assert no == "Zorro says no.\n</think>\n\nNo.<|end|>"


def test_an_action_is_rendered_as_it_is_and_not_as_its_text_would_be_read():
    renderer = Renderer(load("thinker"), thinking=ThinkingRules(student_models=("*",)))
    said = "[THINKING] is how the log marks it.\nYes."
    session = logged(said)
    (pair,) = session.pairs
    session = replace(session, pairs=[pair._replace(action=Action(text=said, calls=()))])
    found = LoggedSessions.from_sessions([session], renderer, budget=512)
    assert sides(renderer, found)[0][1].endswith(f"{said}<|end|>")


def test_a_rejected_action_stands_for_the_logged_turn_and_both_sides_are_written_alike():
    renderer = Renderer(load("qwen3"))
    calls = [Action(text="", calls=(ToolCall(id="c1", name="read", arguments={"path": name}),)) for name in "ab"]
    pair = LoggedPair("s::0000.1", 0, "", calls[0], calls[1], "correction")
    session = replace(logged("Yes."), pairs=[pair])
    (before, chosen), (same, rejected) = sides(renderer, LoggedSessions.from_sessions([session], renderer, budget=512))
    assert before == same
    assert chosen.replace('"a"', '"b"') == rejected
    assert chosen != rejected
    assert "No." not in rejected
