"""Episodes of verifiers that fill their context: in GRPO they are rollouts that were cut by their length.

The library is a fake that does with a refused request what verifiers 0.4 does: a trace that was stopped is scored, and
one whose harness failed on the refusal has an error and no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from composer_replication.errors import RunError
from composer_replication.trainer.rollouts.worlds.verifiers import VerifiersWorld, world_reward
from refusals import refusal
from rollouts.tiny_policy import save_policy
from rollouts.trainers import changed, make, quick_config, spy, trainer_named, weights

PROMPT, BUDGET = "Fix the failing test.", 8


class Trace:
    """A trace as far as its end and its reward go."""

    def __init__(self, reward: float) -> None:
        self.stop_condition: str | None = None
        self.reward, self.ok, self.errors, self.info = reward, True, list[Any](), dict[str, Any]()

    @property
    def has_error(self) -> bool:
        return not self.ok

    def stop(self, condition: str) -> None:
        self.stop_condition = self.stop_condition or condition


class Environment:
    """Its harness asks until it is refused, and then fails. Later episodes are worth more."""

    def __init__(self) -> None:
        task = SimpleNamespace(data=SimpleNamespace(prompt=PROMPT, system_prompt=""))
        self.taskset = SimpleNamespace(load=lambda: [task])
        self.traces: list[Trace] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(
        self, _task: Any, context: Any, *, on_trace: Callable[[Trace], None] = lambda _trace: None
    ) -> Any:
        trace = Trace(reward=float(len(self.traces)))
        self.traces.append(trace)
        on_trace(trace)
        messages = [{"role": "user", "content": PROMPT}]
        for _ in itertools.count():
            body = {"model": context.model, "messages": messages}
            status, reply = await asyncio.to_thread(ask, context.client.base_url, body)
            if status != 200:
                break
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        trace.ok = trace.stop_condition is not None
        return SimpleNamespace(traces=[trace], errors=[])


def ask(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> VerifiersWorld:
    environment, library = Environment(), ModuleType("verifiers.v1")
    library.__dict__.update(
        resolve_env_config=lambda config: config,
        load_environment=lambda _config: environment,
        EvalClientConfig=SimpleNamespace,
        ModelContext=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)
    return VerifiersWorld("verifiers:x")


def trainer_in(folder: Path, world: VerifiersWorld) -> Any:
    return make(
        trainer_named("ComposerReplicationTrainer"),
        save_policy(folder / "policy"),
        quick_config(folder, max_completion_length=BUDGET),
        reward_funcs=[world_reward],
        train_dataset=Dataset.from_list(world.rows() * 2),
        rollout_func=world,
    )


def test_a_rollout_that_filled_its_context_is_judged_and_trained(tmp_path: Path, world: VerifiersWorld) -> None:
    trainer = trainer_in(tmp_path, world)
    scored, before = spy(trainer, "_generate_and_score_completions"), weights(trainer)
    trainer.train()
    (batch,) = (result for _, _, result in scored)
    traces: list[Trace] = world._env.traces
    assert [trace.stop_condition for trace in traces] == ["max_total_tokens"] * 3
    assert batch["completion_mask"].sum(1).tolist() == [BUDGET] * 3
    assert batch["advantages"].isfinite().all()
    assert batch["advantages"].unique().numel() == 3, "each reward counts"
    assert changed(before, trainer), "the step learned from rollouts that were all cut"
    logged = [line for line in trainer.state.log_history if "rewards/world_reward/mean" in line]
    assert [line["rewards/world_reward/mean"] for line in logged] == [pytest.approx(1.0)]
    assert all(line.get("rewards/world_reward/unjudged", 0.0) == 0.0 for line in logged)


def test_a_prompt_that_fills_the_model_s_context_is_an_error(tmp_path: Path, world: VerifiersWorld) -> None:
    trainer = trainer_in(tmp_path, world)
    trainer.model.config.max_position_embeddings = 4
    with refusal(RunError, what="environment", fix="context") as caught:
        trainer.train()
    assert re.search(r"\b\d+ tokens\b", caught.value.got)
