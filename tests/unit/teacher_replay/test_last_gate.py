"""The last look before the network: a request or an export with a secret in it stays here, and says where and why."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from unittest.mock import ANY

import pytest
from replay_pieces import KEY, TEACHERS, collect, options_for, states
from test_hint_writer import RULE, message

from composer_replication.cli.export import export_atif
from composer_replication.cli.sites import write_sites
from composer_replication.config import SitesConfig
from composer_replication.errors import InputError, RunError
from composer_replication.hint_generator.teacher_hints import _build_prompt, write_hints
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.pairs.export import export_preferences
from composer_replication.privacy import Scrubber
from composer_replication.privacy import outgoing as last_gate
from composer_replication.privacy.outgoing import LastGate, OpenGate, outgoing_gate
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_sites
from composer_replication.sites import find_error_sites
from composer_replication.teacher_replay.ask_and_retry import HELD_BACK, NOT_SENT
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from composer_replication.teacher_replay.teachers import read_teachers
from cpu_time import cpu_seconds, least_cpu_seconds
from fault_server import FaultServer
from refusals import refusal
from session_pieces import Session

TOKEN = "ghp_" + "a1B2" * 9
WORDS = "tulip harvest oven 42"
ENVIRONMENT = {"DEPLOY_PASSWORD": WORDS}


def with_secret(secret, num_sessions=2):
    """States of which the second session reads a secret in its first result."""
    found = list(states(num_sessions))
    for state in found:
        if state["state_id"].startswith("s1::"):
            shown = [each for each in state["messages"] if each["role"] == "tool"]
            if shown:
                shown[0]["content"] = f"the file says {secret} and more"
    return found


def body_of(messages, tools=None):
    (teacher,) = read_teachers(TEACHERS[1:2], environment={}, api_key=KEY, base_url="http://127.0.0.1:1/v1")
    return RequestBuilder(teacher, RequestSettings()).build(messages, tools, "s", label="state s::0001").body


@pytest.mark.parametrize(
    ("secret", "environment", "kind"), [(TOKEN, {}, "GITHUB_TOKEN"), (WORDS, ENVIRONMENT, "ENV_SECRET")]
)
def test_a_request_with_a_secret_is_not_sent_and_the_others_are(secret, environment, kind):
    with FaultServer() as server:
        options = options_for(server, environment=environment)
        found, report = asyncio.run(collect(with_secret(secret), options, teachers=TEACHERS[1:2]))
        assert server.requests()["num_chat"] == 4
    errors = {number: result["error"] for (number, _), result in found.items() if result["error"]}
    assert sorted(errors) == [4, 5]  # the states of the second session that show the result
    assert errors[4].startswith(NOT_SENT)
    assert re.search(rf"\bs1::0001\b.*\bmessage 4 \(tool\).*\b{kind}\b", errors[4])
    assert secret not in json.dumps(found[4, 0])
    assert report.counts[HELD_BACK] == 2
    assert report.spent_usd > 0


def test_nothing_of_it_is_spent_or_reserved(tmp_path):
    with FaultServer() as server:
        options = options_for(server, cache=tmp_path / "s.sqlite")
        asked = [state for state in with_secret(TOKEN) if state["state_id"] > "s1::0000"]
        _, report = asyncio.run(collect(asked, options, teachers=TEACHERS[1:2]))
        assert server.requests()["num_chat"] == 0
    assert (report.spent_usd, report.unknown_billed_usd) == (0.0, 0.0)


def test_an_allowed_text_goes_through_and_another_one_does_not():
    asked = [{"role": "user", "content": f"{TOKEN} is an example"}, {"role": "user", "content": f"{TOKEN} is not"}]
    first, second = LastGate({}).in_request(body_of(asked), "state s")
    for find, number in ((first, 2), (second, 3)):
        assert find.location.startswith("state s")
        assert f"message {number} (user)" in find.location
    (left,) = LastGate({}, allowed=[first.id]).in_request(body_of(asked), "state s")
    assert left == second
    # A text may be a password and no more: its id must not be a plain hash, and one guess must cost something.
    plain = hashlib.sha256(json.dumps(json.loads(body_of(asked))["messages"][1], separators=(",", ":")).encode())
    assert first.digest == plain.digest()
    assert first.id not in plain.hexdigest()
    assert str(first.digest) not in repr(first)
    assert OpenGate().in_request(body_of(asked), "state s") == []


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": f"use {TOKEN}"}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {}}]}],
    ],
)
def test_every_part_of_a_message_is_looked_at(messages):
    if messages[0]["role"] == "assistant":
        messages[0]["tool_calls"][0]["function"] = {"name": "bash", "arguments": json.dumps({"token": TOKEN})}
    assert len(LastGate({}).in_request(body_of(messages), "x")) == 1


def test_ids_and_settings_are_random_words_and_no_finds():
    call = {"id": "call_9fKz2LqXw8Rt4VbN7mYp3Hs6", "type": "function", "function": {"name": "b", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"},
    ]
    assert LastGate({}).in_request(body_of(messages), "x") == []
    body = json.loads(body_of(messages)) | {"model": "accounts/me/deployments/9fKz2LqXw8Rt4VbN7mYp3Hs6"}
    assert LastGate({}).in_request(json.dumps(body).encode(), "x") == []
    messages[0]["tool_calls"] = [{**call, "id": TOKEN}]
    assert len(LastGate({}).in_request(body_of(messages), "x")) == 1


def test_a_text_that_stands_in_many_requests_is_looked_at_once(monkeypatch):
    gate, looked_at, whole = LastGate({}), [], last_gate.LastGate._kinds

    def noting(self, part, is_text):
        looked_at.append(part)
        return whole(self, part, is_text)

    monkeypatch.setattr(last_gate.LastGate, "_kinds", noting)
    for state in states(1, 20):
        gate.in_request(body_of(state["messages"], state["tools"]), state["state_id"])
    # 2 messages to begin with, 2 more for each of 19 steps, of which all calls but one differ; tools; parameters
    assert len(looked_at) <= 2 + 2 * 19 + 2
    assert len(looked_at) == len({json.dumps(part) for part in looked_at})


def test_a_known_request_of_100_kb_costs_little(note):
    lines = [f"src/module_{n}.py:{n}: def handler_{n}(request): return render(request, page={n})" for n in range(1300)]
    messages = [{"role": "user", "content": "\n".join(lines[at : at + 50])} for at in range(0, 1300, 50)]
    gate, body = LastGate({}), body_of(messages)
    assert len(body) > 95_000
    first = cpu_seconds(lambda: gate.in_request(body, "x"))
    again = least_cpu_seconds(lambda: gate.in_request(body, "x"), enough=0.005)
    note(f"gate on {len(body):,} bytes: {first * 1e3:.1f} ms at first sight, {again * 1e3:.2f} ms when known")
    assert again < 0.005


def hinted(sites, environment, **changes):
    with FaultServer() as server:
        server.script([message(RULE)] * 3)
        options = options_for(server, **changes)
        found = asyncio.run(
            write_hints(sites, TEACHERS[1], max_total_usd=1.0, api_key=KEY, options=options, environment=environment)
        )
        return found, server.requests()["num_chat"]


def test_a_hint_is_not_asked_for_with_a_secret_in_the_question():
    session = Session()
    session.user("Fix the parser.")
    error = f"<tool_use_error>File does not exist. {WORDS}</tool_use_error>"
    session.call("Read", error, is_error=True, file_path="/repo/parser.py")
    conversation = session.conversation()
    (site,) = [each for each in find_error_sites(conversation) if each.is_kept]
    found, num_sent = hinted([(site, conversation)], ENVIRONMENT)
    assert num_sent == 0
    assert dict(found.counts) == {"refused: no answer": 1}
    assert list(found.held_back) == [site.id]
    assert re.search(rf"\b{site.id}\b.*\bmessage 2 \(user\).*\bENV_SECRET\b", found.held_back[site.id])
    assert hinted([(site, conversation)], {}) == ((ANY, {"written": 1}, {}, 0.00095), 1)


@pytest.mark.parametrize("num_shown", [8, 12, 20])
@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_secret_that_the_question_would_cut_in_two_stays_here_whole(num_shown, is_in_call):
    """Shown are 2,000 characters of the call and of the result: the first part of a password looks like a word."""
    session = Session()
    session.user("Fix the parser.")
    begin = "<tool_use_error>File does not exist. "
    path = "/repo/" + "x/" * 960
    if is_in_call:
        path += " " * (2000 - num_shown - len(path) - len('{"file_path":"')) + WORDS
        session.call("Read", f"{begin}</tool_use_error>", is_error=True, file_path=path)
    else:
        error = begin + "." * (2000 - num_shown - len(begin) - 1) + f" {WORDS}</tool_use_error>"
        session.call("Read", error, is_error=True, file_path="/repo/parser.py")
    conversation = session.conversation()
    (site,) = [each for each in find_error_sites(conversation) if each.is_kept]
    shown = json.dumps(_build_prompt(site, conversation))
    assert WORDS[: num_shown - 1] in shown
    assert WORDS not in shown
    found, num_sent = hinted([(site, conversation)], ENVIRONMENT)
    assert num_sent == 0
    assert re.search(r"\bmessage 2 \(user\).*\bENV_SECRET\b", found.held_back[site.id])


# ---- runs and exports


def a_run(tmp_path, text, *, scrub):
    function = {"name": "bash", "arguments": '{"command": "pytset -q"}'}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c0", "content": "bash: pytset: command not found"},
        {"role": "assistant", "content": "Done."},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    run = RunDir.create(tmp_path / "run")
    ingest_into(run, [tmp_path / "chats.jsonl"], scrub=scrub)
    return run


def test_a_run_made_without_scrubbing_needs_the_word_once_more(tmp_path):
    run = a_run(tmp_path, "hi", scrub=None)
    parts = {"what": str(run.root), "got": "--no-scrub"}
    with refusal(RunError, **parts, fix="--no-scrub"):
        outgoing_gate(run, {}, no_scrub=False)
    assert isinstance(outgoing_gate(run, {}, no_scrub=True), OpenGate)
    with refusal(RunError, **parts):
        export_atif(run, tmp_path / "atif")
    assert not (tmp_path / "atif").exists()
    section = SitesConfig(min_confidence=0.2, writer=str(tmp_path / "teachers.json"))
    with FaultServer() as server:
        (tmp_path / "teachers.json").write_text(json.dumps([{**TEACHERS[1], "base_url": server.base_url}]))
        with refusal(RunError, **parts):
            write_sites(section, run)
        assert server.requests()["num_chat"] == 0
        server.script([message(RULE)])
        assert dict(write_sites(section, run, no_scrub=True).writer_outcomes) == {"written": 1}
        assert dict(write_sites(section, run, no_scrub=True).writer_outcomes) == {"written": 1}  # from the store
        assert server.requests()["num_chat"] == 1
    assert [(hint.source, hint.text) for _, hint in read_sites(run) if hint] == [("writer", RULE)]


def test_an_export_with_a_secret_writes_nothing_and_names_the_step(tmp_path):
    run = a_run(tmp_path, f"the word is {WORDS}", scrub=ScrubSettings())
    with refusal(InputError, what="ATIF", got="ENV_SECRET x1", fix="step 1: ENV_SECRET x1 (id ") as error:
        export_atif(run, tmp_path / "atif", gate=outgoing_gate(run, ENVIRONMENT, no_scrub=False))
    assert re.match(r"1\b", error.value.got)
    assert WORDS not in str(error.value)
    assert not (tmp_path / "atif").exists()
    allowed = error.value.fix.partition("(id ")[2][:12]
    gate = outgoing_gate(run, ENVIRONMENT, no_scrub=False, allowed=[allowed])
    assert len(export_atif(run, tmp_path / "atif", gate=gate)) == 1


def test_pairs_with_a_secret_are_not_exported(tmp_path, monkeypatch):
    pair = {
        "state_id": "s::0001",
        "state_messages": [{"role": "user", "content": "go"}],
        "chosen": f'[TOOL_USE] name=Bash input={{"command":"deploy --key {TOKEN}"}}',
        "rejected": "no",
        "n_teachers_agreeing": 2,
    }
    path = tmp_path / "p.jsonl"
    with refusal(InputError, what=str(path), got="GITHUB_TOKEN x1", fix="chosen message 1: GITHUB_TOKEN x1") as error:
        export_preferences([pair], path)
    assert "s::0001" in error.value.fix
    assert not path.exists()
    assert export_preferences([pair], path, gate=OpenGate()) == 1
    monkeypatch.setenv("DEPLOY_PASSWORD", WORDS)
    with refusal(InputError, got="ENV_SECRET x1", fix="rejected message 1: ENV_SECRET x1"):
        export_preferences([{**pair, "chosen": "yes", "rejected": f"say {WORDS}"}], path)


def test_what_was_scrubbed_passes(tmp_path):
    """Twice through the same rules: a gate that stops what the ingest has let through stops everybody's work."""
    from data.planted_secrets import planted

    scope = Scrubber().scope()
    for number, case in enumerate(case for case in planted() if not case.env):
        text = scope.text(case.text)
        asked = [{"role": "tool", "tool_call_id": "c", "content": text}]
        assert LastGate({}).in_request(body_of(asked), str(number)) == [], (case.kind, case.place)


def test_the_gate_of_options_is_used_and_shows_nothing():
    options = options_for(None, last_gate=LastGate(ENVIRONMENT))
    assert WORDS not in repr(options)
    asked = [state for state in with_secret(WORDS) if state["state_id"] == "s1::0001"]
    with FaultServer() as server:
        ways = {"given": options, "made": options_for(None), "open": options_for(None, last_gate=OpenGate())}
        found = {
            name: asyncio.run(collect(asked, replace(each, base_url=server.base_url), teachers=TEACHERS[1:2]))[0][0, 0]
            for name, each in ways.items()
        }
    assert [name for name, result in found.items() if result["error"]] == ["given"]
