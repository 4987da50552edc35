"""What the shape of a part would hide from the last gate: names twice, texts in pieces, schemas, great depth."""

from __future__ import annotations

import json
import re

import pytest

from composer_replication.errors import InputError
from composer_replication.pairs.export import export_preferences
from composer_replication.privacy.outgoing import LastGate
from refusals import refusal

TOKEN = "ghp_" + "a1B2" * 9
WORDS = "tulip harvest oven 42"
PASSWORD = "hunter2hunter2X"


def found_in(messages, tools=None, *, gate=None):
    """The kinds that are found, part by part."""
    body = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
    gate = gate or LastGate({"DEPLOY_PASSWORD": WORDS})
    return [sorted(find.kinds) for find in gate.in_request(json.dumps(body).encode(), "x")]


def call(arguments):
    function = {"name": "bash", "arguments": arguments}
    return [{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}]


def tool(**properties):
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "login", "parameters": parameters}}]


def user(content, **more):
    return [{"role": "user", "content": content, **more}]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (f'{{"command": "{TOKEN}", "command": "ls"}}', "GITHUB_TOKEN"),
        (f'{{"a": [{{"x": "{WORDS}", "x": 1, "x": null}}]}}', "ENV_SECRET"),
        (f'{{"password": "{PASSWORD}", "password": "none"}}', "PASSWORD"),
    ],
)
def test_a_name_that_stands_twice_hides_no_value(arguments, kind):
    assert found_in(call(arguments)) == [[kind]]
    assert found_in(call('{"command": "cd /", "command": "ls"}')) == []


@pytest.mark.parametrize("name", ["logprobs", "prompt_token_ids", "completion_token_ids"])
def test_a_field_for_numbers_is_passed_over_where_it_holds_numbers(name):
    for value in (TOKEN, [0.5, TOKEN], {"token": TOKEN}, [{"token": TOKEN, "logprob": -0.1}]):
        assert found_in(user("hi", **{name: value})) == [["GITHUB_TOKEN"]], value
    assert found_in(user("hi", **{name: [17, -0.25] * 10})) == []


@pytest.mark.parametrize(("secret", "kind"), [(TOKEN, "GITHUB_TOKEN"), (WORDS, "ENV_SECRET")])
def test_a_secret_across_the_pieces_of_a_content_is_found(secret, kind):
    pieces = [{"type": "text", "text": each} for each in (f"say {secret[:9]}", secret[9:15], f"{secret[15:]} now")]
    assert found_in(user(pieces)) == [[kind]]
    assert found_in(user([{"type": "tool_result", "content": pieces}])) == [[kind]]
    words = [{"type": "text", "text": each} for each in ("src/handlers/", "a8Kd02LsmQ", "7xYt3Bv9ZcNw5Rj1")]
    assert found_in(user(words)) == []  # glued they look random; nobody wrote them so


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [PASSWORD]},
        {"const": PASSWORD},
        {"examples": ["", PASSWORD]},
        {"anyOf": [{"type": "null"}, {"const": PASSWORD}]},
        {"type": "array", "items": {"enum": [PASSWORD]}},
    ],
)
def test_a_value_that_a_schema_shows_is_looked_at_by_its_propertys_name(schema):
    assert found_in(user("hi"), tool(password=schema)) == [["PASSWORD"]]
    inner = {"type": "object", "properties": {"password": schema}}
    assert found_in(user("hi"), tool(account=inner)) == [["PASSWORD"]]
    assert found_in(user("hi"), tool(name=schema)) == []


def test_schemas_as_they_are_pass():
    plain = tool(
        key={"type": "string", "enum": ["Enter", "Escape", "ArrowLeft"], "examples": ["Control+Shift+P"]},
        token_type={"enum": ["bearer", "basic"]},
        password={"type": "string", "default": "", "description": "The password to type"},
        secret={"type": "boolean", "default": False},
        max_tokens={"type": "integer", "default": 4096},
        auth={"enum": ["password", "token", "none"]},
    )
    assert found_in(user("hi"), plain) == []


@pytest.mark.parametrize("depth", [120, 300, 600, 1000, 3000])
def test_depth_hides_nothing_and_stops_nothing(depth):
    def nested(core):
        return '{"a":' * depth + core + "}" * depth

    gate = LastGate({})
    assert found_in(call(nested(json.dumps(TOKEN))), gate=gate) == [["GITHUB_TOKEN"]]
    assert found_in(call(nested(f'{{"password":"{PASSWORD}"}}')), gate=gate) == [["PASSWORD"]]
    assert found_in(call(nested('"plain text that is long"')), gate=gate) == []


@pytest.mark.parametrize("depth", [200, 600])
def test_a_message_that_is_nested_itself_is_looked_at(depth):
    value = TOKEN
    for _ in range(depth):
        value = {"a": [value]}
    part = {"role": "user", "content": "x", "extra": value}
    assert LastGate({}).look(part, "x").kinds == {"GITHUB_TOKEN": 1}


def test_the_name_of_a_pair_is_looked_at_and_not_told(tmp_path):
    pair = {
        "state_id": TOKEN,
        "state_messages": [{"role": "user", "content": "go"}],
        "chosen": f"say {TOKEN}",
        "rejected": "no",
        "n_teachers_agreeing": 2,
    }
    fine = pair | {"state_id": "s::0001", "chosen": "yes"}
    with refusal(InputError, what="p.jsonl", got="GITHUB_TOKEN x2") as error:
        export_preferences([fine, pair], tmp_path / "p.jsonl")
    assert re.search(r"\bpair 1\b.*\bstate_id: GITHUB_TOKEN", error.value.fix)
    assert re.search(r"\bpair 1\b.*\bchosen message 1: GITHUB_TOKEN", error.value.fix)
    assert TOKEN not in str(error.value)
    assert not (tmp_path / "p.jsonl").exists()
