"""The workspace in verifiers: its own rollout loop, against a model server on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.scripted_episodes import MAX_CALLS, Script, played_alone, record, recorded, scripts
from adapters.scripted_model import serving

vf = pytest.importorskip("verifiers.v1")
from composer_replication.envs import verifiers_environment as adapter  # noqa: E402
from composer_replication.envs.workspace import Workspace, generate_task  # noqa: E402

pytestmark = [pytest.mark.envs, pytest.mark.filterwarnings("ignore")]
SCRIPTS = scripts()
CALLS_PER_TURN = 2


def turns_of(script: Script) -> list[list[tuple[str, str]]]:
    spoken = [(name, json.dumps(arguments)) for name, arguments in script.calls]
    size = CALLS_PER_TURN if script.seed % 2 else 1
    return [spoken[at : at + size] for at in range(0, len(spoken), size)]


async def run(env, tasks, url, models):
    client = vf.EvalClientConfig(base_url=url, api_key_var="NO_SUCH_KEY")
    async with env.serving():
        runs = [
            env.run_episode(task, vf.ModelContext(model=model, client=client))
            for task, model in zip(tasks, models, strict=True)
        ]
        return await asyncio.gather(*runs)


def play(spoken: dict, *, difficulty="easy", first_seed=0, max_calls=MAX_CALLS):
    """One episode for each model, of the seeds from `first_seed` on."""
    env = adapter.load_environment(difficulty=difficulty, first_seed=first_seed, max_calls=max_calls)
    with serving(spoken) as url:
        return asyncio.run(run(env, list(env.taskset.take(len(spoken))), url, list(spoken)))


@pytest.fixture(scope="module")
def traces():
    found = {}
    models = {script.name: turns_of(script) for script in SCRIPTS}
    with serving(models) as url:
        for difficulty in ("easy", "medium", "hard"):
            chosen = {script.seed: script for script in SCRIPTS if script.difficulty == difficulty}
            env = adapter.load_environment(difficulty=difficulty, first_seed=0, max_calls=MAX_CALLS)
            tasks = [task for task in env.taskset.take(len(SCRIPTS)) if task.data.seed in chosen]
            names = [chosen[task.data.seed].name for task in tasks]
            episodes = asyncio.run(run(env, tasks, url, names))
            found |= {name: episode.traces[0] for name, episode in zip(names, episodes, strict=True)}
    return found


@pytest.mark.parametrize("number", range(len(SCRIPTS)), ids=[script.name for script in SCRIPTS])
def test_an_episode_has_the_calls_and_the_reward_that_it_has_without_verifiers(traces, number):
    script, trace = SCRIPTS[number], traces[SCRIPTS[number].name]
    assert trace.errors == []
    calls = [{**call, "arguments": json.loads(call["arguments"])} for call in trace.info["calls"]]
    assert record(script, calls, trace.reward) == recorded()[number]
    assert trace.metrics["calls"] == len(script.calls)


def test_the_trace_shows_the_model_what_the_world_said(traces):
    script = next(each for each in SCRIPTS if each.style == "breaker")
    calls, _ = played_alone(script)
    messages = traces[script.name].branches[-1].messages
    assert messages[0].content == generate_task(script.seed, difficulty=script.difficulty).prompt
    assert [each.content for each in messages if each.role == "tool"] == [call["text"] for call in calls]
    assert messages[-1].content == "I am done."


def test_what_no_tool_server_would_let_through_is_answered_by_the_world():
    broken = ["{", "[]", "", "null", "[" * 100, "9" * 10_000, '{"path": "/workspace"}', '{"file_path": NaN}']
    half = '{"file_path": "/workspace/\\ud800", "content": "\\ud800\\u0000"}'
    spoken = [("Reed", "{}"), *(("Read", each) for each in broken), ("Write", half), ("Glob", '{"pattern": "*"}')]
    (episode,) = play({"wild": [spoken]})
    workspace = Workspace(generate_task(0))
    expected = [workspace.call(name, adapter._parse_arguments(text)).text for name, text in spoken]
    calls = json.loads(episode.model_dump_json())["traces"][0]["info"]["calls"]
    assert [call["text"] for call in calls] == expected
    assert [call["arguments"] for call in calls] == [text for _, text in spoken]
    assert [call["kind"] for call in calls][: len(broken)] == ["tool_not_found"] + ["input_validation"] * 7
    deep = "[" * 100_000  # verifiers' own parser gives up on it before we are asked
    assert adapter._parse_arguments(deep) is deep


def test_an_episode_that_verifiers_stops_is_worth_what_its_files_are():
    script = next(each for each in SCRIPTS if each.style == "expert" and each.difficulty == "easy")
    solved = [[each] for turn in turns_of(script) for each in turn][:-1]
    env = adapter.load_environment(first_seed=script.seed)
    env.config.agent.max_turns = len(solved)
    with serving({"cut": [*solved, solved[0], solved[0]]}) as url:
        (episode,) = asyncio.run(run(env, list(env.taskset.take(1)), url, ["cut"]))
    (trace,) = episode.traces
    assert trace.stop_condition == "max_turns"
    assert (trace.ok, trace.reward, trace.metrics["calls"]) == (True, 1.0, len(solved))


@pytest.mark.parametrize("is_solved", [True, False])
def test_an_episode_that_fills_a_server_s_context_is_worth_what_its_files_are(is_solved):
    script = next(each for each in SCRIPTS if each.style == "expert" and each.difficulty == "easy")
    turns = [[each] for turn in turns_of(script) for each in turn][:-1] if is_solved else []
    (episode,) = play({"full": [*turns, None]}, first_seed=script.seed)
    (trace,) = episode.traces
    assert (trace.ok, trace.is_truncated, trace.reward) == (True, True, float(is_solved))
    assert trace.metrics["calls"] == len(turns)


def test_a_model_server_that_fails_is_an_error_and_no_reward():
    async def unreachable():
        env = adapter.load_environment()
        assert env.taskset.config.first_seed == 10_000, "seeds 0 to 999 are for cards and evaluation"
        return await run(env, list(env.taskset.take(1)), "http://127.0.0.1:9/v1", ["nobody"])

    (episode,) = asyncio.run(unreachable())
    assert not episode.ok
    assert episode.traces[0].rewards == {}


def test_the_command_line_finds_the_environment_by_its_name(tmp_path):
    script = next(each for each in SCRIPTS if each.style == "expert" and each.difficulty == "easy")
    with serving({script.name: turns_of(script)}) as url:
        options = ["-n", "1", "--no-push", "--no-rich", "-m", script.name, "--client.base-url", url]
        options += ["--env.taskset.first-seed", str(script.seed), "-o", str(tmp_path), "--run.name", "mine"]
        command = [str(Path(sys.executable).with_name("vf-eval")), adapter.ID, *options]
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "mine" / "traces.jsonl").read_text().splitlines()
    (trace,) = json.loads(line)["traces"]
    assert (trace["rewards"]["workspace"]["score"], trace["info"]["calls"][-1]["name"]) == (1.0, "Finish")
