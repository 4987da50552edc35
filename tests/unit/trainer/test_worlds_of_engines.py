"""`train.grpo.environment` by an address: a server's tools in TRL's own loop. The client here is a stand-in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOTrainer

from composer_replication.config.train import GRPOSection
from composer_replication.envs.workspace import TOOLS, Workspace, generate_task
from composer_replication.errors import ConfigError, MissingExtraError
from composer_replication.trainer.from_config.grpo import _rewards_and_environment
from refusals import refusal
from rollouts.tiny_policy import ScriptedGeneration, save_policy
from rollouts.trainers import make, quick_config, spy

URL = "http://127.0.0.1:8000"


@dataclass
class Result:
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class Client:
    """As OpenEnv's `GenericEnvClient`: the workspace behind it, in this process."""

    def __init__(self, base_url: str) -> None:
        assert base_url == URL

    def sync(self) -> Client:
        return self

    def connect(self) -> None:
        self.workspace: Workspace | None = None

    def close(self) -> None:
        self.workspace = None

    def reset(self, seed: int = 0, **_row: Any) -> Result:
        self.workspace = Workspace(generate_task(seed))
        about = {"tools": list(TOOLS), "end": {"name": "Finish", "arguments": {}}}
        return Result({"text": self.workspace.task.prompt, "metadata": about})

    def step(self, action: dict[str, Any]) -> Result:
        assert self.workspace is not None
        outcome = self.workspace.call(action["name"], action["arguments"])
        is_over = self.workspace.finished
        return Result({"text": outcome.text}, self.workspace.reward().value if is_over else None, is_over)


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = ModuleType("openenv.core")
    core.GenericEnvClient = Client
    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", core)


@pytest.mark.usefixtures("openenv")
def test_a_server_s_tools_are_called_in_trl_s_own_loop(tmp_path: Any) -> None:
    rewards, environment, rollouts = _rewards_and_environment(GRPOSection(environment=URL))
    assert (rewards, rollouts) == ([], None)
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    asked = call % ("Read", '{"file_path": "/workspace/nowhere.py"}')
    rows = [{"prompt": [{"role": "user", "content": "Fix it."}], "seed": 7}] * 2
    config = quick_config(
        tmp_path, per_device_train_batch_size=2, num_generations=2, max_completion_length=4000, max_steps=1
    )
    trainer = make(
        GRPOTrainer,
        save_policy(tmp_path / "policy"),
        config,
        reward_funcs=None,
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment,
    )
    trainer.model.config.max_position_embeddings = config.max_completion_length
    ScriptedGeneration(trainer, {"Fix it.": [[asked, "I am done."]]})
    generated, rewarded = spy(trainer, "_generate"), spy(trainer, "_calculate_rewards")
    trainer._generate_and_score_completions(rows)
    messages = generated[0][2][3][0]
    alone = Workspace(generate_task(7))
    wanted = alone.call("Read", {"file_path": "/workspace/nowhere.py"}).text
    assert [each["content"] for each in messages if each["role"] == "tool"] == [wanted]
    assert rewarded[0][2][:, 0].tolist() == [0.0, 0.0]


def test_without_its_library_an_engine_s_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openenv", "verifiers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="openenv"):
        _rewards_and_environment(GRPOSection(environment=URL))
    with pytest.raises(MissingExtraError, match="verifiers"):
        _rewards_and_environment(GRPOSection(environment="verifiers:composer-workspace"))


@pytest.mark.usefixtures("openenv")
def test_a_server_beside_a_rollout_function_is_refused() -> None:
    both = GRPOSection(environment=URL, rollouts="composer_replication.evaluation.ablation.workspace:rollouts")
    with refusal(ConfigError, what="train.grpo", got="environment") as refused:
        _rewards_and_environment(both)
    assert "rollouts" in refused.value.got
