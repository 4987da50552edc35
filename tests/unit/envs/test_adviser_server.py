"""Advisers behind an address: the expert is right, others err as often as their name says, and a replay asks them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from composer_replication.cli.main import main
from composer_replication.envs.adviser_server import AdviserServer, _HttpRefusal, _ScriptedTeachers
from composer_replication.envs.logs import to_conversation
from composer_replication.envs.policies import CARELESS, EXPERT, RememberingRunner, play
from composer_replication.envs.workspace import Workspace, generate_task
from composer_replication.ingestion.states import states
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_pairs
from composer_replication.teacher_replay.requests import _fence_results

RUNNER = RememberingRunner()
SEEDS = range(12)


@pytest.fixture(scope="module")
def advisers():
    return _ScriptedTeachers(SEEDS)


def asked(model, messages):
    return {"model": model, "messages": messages, "max_tokens": 1024, "temperature": 0.0}


def call_in(answer):
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("difficulty", ["medium", "hard"])
def test_the_expert_goes_on_where_an_episode_stands(advisers, difficulty):
    for seed in SEEDS:
        episode = play(generate_task(seed, difficulty=difficulty), EXPERT, seed, runner=RUNNER)
        for number, (messages, _) in enumerate(states(to_conversation(episode))):
            answer = advisers.answer(asked("world-expert", _fence_results(messages, "session")))
            name, arguments = call_in(answer)
            move = episode.turns[number].move
            assert name == move.tool or {name, move.tool} == {"LS", "Glob"}
            if name == move.tool:
                assert arguments == dict(move.arguments)
            usage = answer["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["cost"] > 0
            assert answer.keys() >= {"id", "created"}, "verifiers refuses an answer without them"


def test_an_adviser_errs_as_often_as_its_name_says(advisers):
    failed = {"world-expert": [], "world-flawed-0.3": [], "world-flawed-1": []}
    for seed in SEEDS:
        task = generate_task(seed)
        episode = play(task, CARELESS, seed, runner=RUNNER)
        for number, (messages, _) in enumerate(states(to_conversation(episode))):
            if episode.turns[number].move.tool == "Finish":  # where no mistake can be made
                continue
            for model, outcomes in failed.items():
                workspace = Workspace(task, runner=RUNNER)
                for turn in episode.turns[:number]:
                    workspace.call(turn.move.tool, turn.move.arguments)
                answer = advisers.answer(asked(model, messages))
                assert answer == advisers.answer(asked(model, messages))
                outcomes.append(workspace.call(*call_in(answer)).failed)
    assert sum(failed["world-expert"]) == 0
    assert all(failed["world-flawed-1"])
    share = sum(failed["world-flawed-0.3"]) / len(failed["world-flawed-0.3"])
    assert 0.1 < share < 0.5


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "gpt"}, "'gpt'.*world-expert"),
        ({"model": "world-flawed-7", "messages": []}, "'world-flawed-7'.*world-expert"),
        ({"model": "world-expert"}, "messages"),
        ({"model": "world-expert", "messages": [{"role": "user", "content": "Hello"}]}, "task"),
        ({"model": "world-expert", "messages": [], "stream": True}, "stream"),
        ({"model": "world-expert", "messages": [{"role": "assistant", "tool_calls": [3]}]}, "tool_calls"),
        ({"model": "world-expert", "messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls"),
    ],
)
def test_what_has_no_answer_is_refused_with_a_reason(advisers, body, said):
    with pytest.raises(_HttpRefusal, match=said) as refused:
        advisers.answer(body)
    assert refused.value.status == 400


def test_arguments_nested_too_deeply_are_no_arguments(advisers):
    messages = [{"role": "user", "content": generate_task(0).prompt}]
    calls = [{"id": "1", "function": {"name": "Read", "arguments": text}} for text in ("[" * 10**5, "not JSON")]
    deep, unread = ([*messages, {"role": "assistant", "tool_calls": [call]}] for call in calls)
    answer = advisers.answer(asked("world-expert", deep))
    assert call_in(answer) == call_in(advisers.answer(asked("world-expert", unread)))


def test_the_server_is_on_this_machine_and_refuses_in_json():
    with AdviserServer(range(2)) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        for path, data, status in [("/nothing", None, 404), ("/chat/completions", b"[1", 400), ("/models", b"", 404)]:
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(server.base_url + path, data=data, timeout=10)
            assert refused.value.code == status
            assert "error" in json.loads(refused.value.read())
            refused.value.close()


def test_a_replay_asks_them_and_makes_pairs_of_their_answers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with AdviserServer(range(8), ["easy"]) as server:
        assert main(["world", "logs", "-n", "8", "--seed", "0", "-o", "logs"]) == 0
        assert main(["ingest", "logs", "-o", "run"]) == 0
        assert main(["sites", "run"]) == 0
        slugs = ["--slug", "world-expert", "--slug", "world-flawed-0.1"]
        assert main(["teachers", *slugs, "--base-url", server.base_url, "-o", "teachers.json"]) == 0
        assert main(["replay", "run", "--teachers", "teachers.json", "--max-usd", "1", "--failed"]) == 0
        assert main(["pairs", "run"]) == 0
    capsys.readouterr()
    pairs = [pair for _, pair in read_pairs(RunDir.open(tmp_path / "run")) if pair.source == "teachers"]
    assert len(pairs) >= 3
    assert all(pair.action is not None and len(pair.action.calls) == 1 for pair in pairs)
