"""380 planted secrets, written by somebody who had not seen the rules, through the whole conversation model."""

from __future__ import annotations

import json

import pytest

from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.privacy import Scrubber
from composer_replication.runs.files import conversation_to_row
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from data.planted_secrets import negatives, planted, survivors

HERE = Provenance(file="s.jsonl", lines=(1,))
PLANTED = planted()
# The one person of the planted texts. A home directory is pseudonymised, which is wanted and no redaction: see
# docs/decisions/0003-scrubbing.md.
PERSON = "ada"


def conversation_with(case):
    """The planted text where its place says it was: in a message, a thought, an argument, a result or a path."""
    turn = {"id": "t", "role": "assistant", "origin": "model", "provenance": HERE}
    if case.place == "user_text":
        turn |= {"role": "user", "origin": "human", "text": case.text}
    elif case.place == "assistant_text":
        turn |= {"text": case.text}
    elif case.place == "thinking":
        turn |= {"thinking": case.text}
    elif case.place == "tool_arguments":
        turn |= {"calls": (ToolCall(id="c", name="Bash", arguments={"command": case.text, "more": [case.text]}),)}
    elif case.place == "path":
        turn |= {"calls": (ToolCall(id="c", name="Read", arguments={"file_path": case.text}),)}
    else:
        result = ToolResult(call_id="c", text=case.text, is_error=False)
        turn |= {"role": "tool", "origin": "tool", "results": (result,)}
    return Conversation(id="s", format="claude_code", turns=(Turn(**turn),))


def cases(found, name_of):
    """Numbered, because many have the same name."""
    return [pytest.param(case, id=f"{number}-{name_of(case)}") for number, case in enumerate(found)]


@pytest.mark.parametrize("case", cases(PLANTED, lambda case: f"{case.kind}-{case.place}"))
def test_no_planted_secret_survives_in_a_row_or_in_the_report(case):
    scope = Scrubber(env_values=case.env or {}).scope()
    row = conversation_to_row(scrub_conversation(conversation_with(case), scope))
    assert survivors(case, json.dumps(row, ensure_ascii=False)) == []
    assert survivors(case, repr(scope.report)) == []


@pytest.mark.parametrize("case", cases(negatives(), lambda case: case.why[:40]))
def test_what_is_no_secret_stays_as_it_is(case):
    scope = Scrubber(env_values=case.env or {}).scope()
    scrubbed = scope.text(case.text)
    assert scrubbed.replace("USER_1", PERSON) == case.text
    assert set(scope.report.counts) <= {"USER"}
