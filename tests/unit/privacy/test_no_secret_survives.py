"""380 planted secrets, written by somebody who had not seen the rules, through the whole conversation model."""

from __future__ import annotations

import json

import pytest

from composer_replication.ingestion.rows import to_row
from composer_replication.ingestion.scrubbing import scrub_conversation
from composer_replication.privacy import Scrubber
from composer_replication.types import Conversation, Provenance, ToolCall, ToolResult, Turn
from data.planted_secrets import negatives, planted, survivors

HERE = Provenance(file="s.jsonl", lines=(1,))
PLANTED = planted()
OPEN_PLANTED = {
    "144-aws_presigned_url-assistant_text",
    "145-aws_presigned_url-tool_arguments",
    "169-mssql_url-tool_result",
    "220-json_field-thinking",
    "292-cookie-tool_result",
    "293-cookie-user_text",
    "312-bare_hex-path",
}
OPEN_NEGATIVES = {
    "2-git format-patch",
    "13-go.sum",
    "24-model snapshot",
    "36-session file",
    "40-ARN that names a secret",
    "66-HTML form",
    "85-path of a key",
    "100-URL of placeholders",
    "107-short values",
    "108-values of variables that every shell has",
    "110-cut image block",
}


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


def cases(found, name_of, still_open):
    """Numbered cases; those a rule is still missing for must fail, so that the list cannot outlive its reason."""
    params = []
    for number, case in enumerate(found):
        name = f"{number}-{name_of(case)}"
        reason = "no rule for this yet"
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if name in still_open else []
        params.append(pytest.param(case, id=name, marks=marks))
    return params


@pytest.mark.parametrize("case", cases(PLANTED, lambda case: f"{case.kind}-{case.place}", OPEN_PLANTED))
def test_no_planted_secret_survives_in_a_row_or_in_the_report(case):
    scope = Scrubber(env_values=case.env or {}).scope()
    row = to_row(scrub_conversation(conversation_with(case), scope))
    assert survivors(case, json.dumps(row, ensure_ascii=False)) == []
    assert survivors(case, repr(scope.report)) == []


@pytest.mark.parametrize("case", cases(negatives(), lambda case: case.why[:40], OPEN_NEGATIVES))
def test_what_is_no_secret_stays_as_it_is(case):
    assert Scrubber(env_values=case.env or {}).scope().text(case.text) == case.text
