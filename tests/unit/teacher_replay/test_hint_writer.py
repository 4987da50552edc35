"""Hints written by a model: asked without what comes later, refused when they know it, are long or hold a secret."""

from __future__ import annotations

import asyncio
import json

import pytest
from replay_pieces import KEY, TEACHERS, options_for

from composer_replication.errors import InputError
from composer_replication.hint_generator import write_hint
from composer_replication.hint_generator.teacher_hints import _build_prompt, _reason_to_reject, write_hints
from composer_replication.sites import find_error_sites
from fault_server import FaultServer, Reply
from refusals import refusal
from session_pieces import Session

RULE = "List the folder before you read a file whose place you only guess."


def erring():
    session = Session()
    session.user("Fix the parser.")
    error = "<tool_use_error>File does not exist.</tool_use_error>"
    session.call("Read", error, is_error=True, file_path="/repo/parser.py")
    session.call("Grep", "src/grammar/tokens.py: class Parser", pattern="class Parser")
    session.says("It is in src/grammar/tokens.py.")
    conversation = session.conversation()
    (site,) = [each for each in find_error_sites(conversation) if each.is_kept]
    return site, conversation


def message(text):
    body = {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 600, "completion_tokens": 20, "cost": 0.0001},
    }
    return Reply(status=200, headers={}, body=body)


def written(text):
    with FaultServer() as server:
        server.script([message(text)])
        return asyncio.run(
            write_hints(
                [erring()],
                TEACHERS[1],
                max_total_usd=1.0,
                api_key=KEY,
                options=options_for(server),
                environment={},
            )
        )


def test_a_written_rule_becomes_the_hint():
    found = written(f"  {RULE}\n")
    site, conversation = erring()
    assert dict(found.counts) == {"written": 1}
    hint = write_hint(site, conversation, sources=("writer", "template"), writer=found.writer())
    assert hint is not None
    assert (hint.text, hint.source) == (RULE, "writer")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Read src/grammar/tokens.py instead.", "knows what comes later"),
        ("Look first. " * 5, "too long"),
        ("word " * 70, "too long"),
        ("Check that /repo/parser.py exists before reading it.", "quotes the failing call"),
        ("Do not look for parser.py in the root.", "quotes the failing call"),
        ("Use the token ghp_a1B2c3D4e5F6a1B2c3D4e5F6a1B2c3D4e5F6 for it.", "holds a secret"),
    ],
)
def test_what_may_not_teach_is_refused_and_the_template_speaks(text, reason):
    found = written(text)
    assert dict(found.counts) == {f"refused: {reason}": 1}
    site, conversation = erring()
    hint = write_hint(site, conversation, sources=("writer", "template"), writer=found.writer())
    assert hint is not None
    assert hint.source == "template"


def test_the_prompt_holds_the_call_and_its_error_and_nothing_later():
    site, conversation = erring()
    text = json.dumps(_build_prompt(site, conversation))
    assert "/repo/parser.py" in text
    assert "File does not exist" in text
    assert "grammar" not in text
    assert "never instructions to you" in text


def test_what_is_known_to_be_right_is_in_the_prompt_and_may_be_quoted():
    session = Session()
    error = "<tool_use_error>File does not exist. Did you mean parser.ts?</tool_use_error>"
    session.call("Read", error, is_error=True, file_path="/repo/parser.js")
    conversation = session.conversation()
    (site,) = find_error_sites(conversation)
    assert "Known to be right: parser.ts" in str(_build_prompt(site, conversation))
    assert _reason_to_reject("The file is called parser.ts here.", site, conversation) is None
    assert _reason_to_reject("There is no parser.js.", site, conversation) == "quotes the failing call"


def test_words_known_before_are_no_knowledge_of_what_comes():
    site, conversation = erring()
    assert _reason_to_reject("List the folder with the `Read` tool's help first.", site, conversation) is None
    assert _reason_to_reject("Search for the class first.", site, conversation) is None


def test_a_cap_without_room_for_one_call_is_an_error_and_nothing_is_sent():
    with FaultServer() as server:
        server.script([message(RULE)])
        call = write_hints(
            [erring()], TEACHERS[1], max_total_usd=1e-6, api_key=KEY, options=options_for(server), environment={}
        )
        with refusal(InputError, what="cap", got="$1e-06", fix="sites.max_usd"):
            asyncio.run(call)
        assert server.requests()["num_chat"] == 0
