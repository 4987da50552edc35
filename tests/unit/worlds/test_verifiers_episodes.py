"""Episodes of verifiers as rollouts: which task is played, what becomes of one that broke. Its library is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sys
import urllib.request
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from composer_replication.errors import ConfigError, InputError, RunError
from composer_replication.trainer.grpo_step import GenerationStep
from composer_replication.trainer.rollouts.sites import RolloutOptions
from composer_replication.trainer.rollouts.worlds.policy_endpoint import SpokenEpisode
from composer_replication.trainer.rollouts.worlds.verifiers import VerifiersWorld
from refusals import refusal

PROMPT = "Fix the failing test."


class Environment:
    """Three tasks with one prompt; `turns` and `is_broken` say what an episode of it does."""

    def __init__(self) -> None:
        tasks = [
            SimpleNamespace(number=each, data=SimpleNamespace(prompt=PROMPT, system_prompt="")) for each in range(3)
        ]
        self.taskset = SimpleNamespace(load=lambda: tasks)
        self.turns, self.is_broken, self.models = 1, False, list[str]()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(self, task: Any, context: Any, **_callbacks: Any) -> Any:
        self.models.append(context.model)
        for _ in range(self.turns):
            body = {"model": context.model, "messages": [{"role": "user", "content": PROMPT}]}
            await asyncio.to_thread(ask, context.client.base_url, body)
        errors = [SimpleNamespace(type="SandboxError", message="no sandbox")] if self.is_broken else []
        trace = SimpleNamespace(reward=float(task.number), has_error=self.is_broken, errors=errors, info={})
        return SimpleNamespace(traces=[trace], errors=[])


def ask(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert json.load(reply)["choices"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Environment:
    environment, library = Environment(), ModuleType("verifiers.v1")
    library.__dict__.update(
        resolve_env_config=lambda config: config,
        load_environment=lambda _config: environment,
        EvalClientConfig=SimpleNamespace,
        ModelContext=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)
    return environment


class Letters:
    """A tokenizer, as far as an episode of one turn needs it."""

    eos_token, eos_token_id = "<e>", 0

    def apply_chat_template(self, messages: list[dict[str, Any]], **_options: Any) -> str:
        return "".join(each["content"] for each in messages)

    def __call__(self, text: str, **_options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) for each in text]}

    def decode(self, ids: list[int], **_options: Any) -> str:
        return "".join(map(chr, ids))


def trainer_of(rows: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(
        accelerator=SimpleNamespace(num_processes=1),
        sampling=SimpleNamespace(rows=rows),
        train_dataset=rows,
        chat_template_kwargs={},
        max_completion_length=8,
        processing_class=Letters(),
        use_vllm=False,
        _generate_single_turn=lambda ids, *_given: ([[72, 105]] * len(ids), None),
    )


def play(rows: list[dict[str, Any]], world: VerifiersWorld) -> dict[str, Any]:
    return world([row["prompt"] for row in rows], trainer_of(rows))


@pytest.mark.usefixtures("environment")
def test_tasks_with_one_prompt_are_all_played() -> None:
    world = VerifiersWorld("verifiers:x")
    rows = [row for row in world.rows() for _ in range(2)]
    assert len({str(row["prompt"]) for row in rows}) == 1
    assert play(rows, world)["world_reward"] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.usefixtures("environment")
def test_rows_without_their_task_are_refused() -> None:
    world = VerifiersWorld("verifiers:x")
    with refusal(ConfigError, what="environment x", fix="VerifiersWorld.rows()") as caught:
        play([{"prompt": row["prompt"]} for row in world.rows()], world)
    assert re.findall(r"\d+", caught.value.got) == ["0", "3"]  # tasks and prompts


def test_names_of_episodes_cannot_be_guessed(environment: Environment) -> None:
    world = VerifiersWorld("verifiers:x")
    for _ in range(2):
        play(world.rows(), world)
    assert len(set(environment.models)) == 6
    assert all(re.fullmatch(r"policy-[0-9a-f]{32}", each) for each in environment.models)


def test_an_episode_that_broke_is_not_judged(environment: Environment) -> None:
    environment.is_broken = True
    world = VerifiersWorld("verifiers:x")
    played = play(world.rows(), world)
    assert all(map(math.isnan, played["world_reward"]))
    assert played["completion_ids"] == [[72, 105]] * 3


@pytest.mark.parametrize("is_broken", [True, False])
def test_an_episode_in_which_the_policy_never_spoke_is_no_rollout(environment: Environment, is_broken: bool) -> None:
    environment.turns, environment.is_broken = 0, is_broken
    world = VerifiersWorld("verifiers:x")
    with refusal(RunError, what="environment x", got="turn") as caught:
        play(world.rows(), world)
    assert ("SandboxError: no sandbox" in caught.value.got) == is_broken


def sampling() -> GenerationStep:
    trainer = SimpleNamespace(
        reward_func_names=["world_reward", "error_penalty"],
        reward_weights=torch.ones(2),
        model=SimpleNamespace(training=True),
        mode=lambda: "train",
        sum_over=lambda values: values,
    )
    figures: Any = SimpleNamespace(add=lambda *_given: None)
    options = RolloutOptions(fast_generation="off")
    return GenerationStep(trainer, options, figures, wants_sites=False, hint_gate=None)


def test_a_rollout_that_broke_gets_no_reward_of_a_penalty_alone() -> None:
    rows = [{"world_reward": 1.0}, {"world_reward": math.nan}, {}]
    given = torch.tensor([[1.0, -0.5], [math.nan, -0.5], [0.0, 0.0]])
    rewards = sampling().rewards(lambda *_given: given.clone(), rows, [], [], [])
    assert rewards.isnan().tolist() == [[False, False], [True, True], [False, False]]
    with refusal(InputError, what="rewards", got="world_reward, error_penalty") as caught:
        sampling().rewards(lambda *_given: given[1:2].clone(), rows[1:2], [], [], [])
    assert re.findall(r"\d+", caught.value.got) == ["1"]  # rollouts


def test_a_rollout_function_can_read_the_rows_that_it_plays() -> None:
    generation, rows = sampling(), [{"prompt": PROMPT, "task": 2}]
    seen: list[Any] = []

    def original(_inputs: Any) -> dict[str, Any]:
        seen.append(generation.rows)
        return {"advantages": torch.zeros(1)}

    generation.score(original, rows)
    assert seen == [rows]


@pytest.mark.parametrize(("budget", "reason"), [(100, "stop"), (3, "length")])
def test_only_a_turn_without_room_for_more_is_cut_by_its_length(budget: int, reason: str) -> None:
    tokenizer: Any = Letters()
    episode = SpokenEpisode(tokenizer, {}, budget)
    assert episode.take({"messages": [{"role": "user", "content": "go"}]})
    episode.hear([ord(letter) for letter in "yes!"], None)  # its end token is another one, or was dropped
    assert episode.finish_reason == reason
