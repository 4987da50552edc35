"""A language-model server that says what a script says, and verl's agent loop on it with the workshop's tools."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap, _agent_loop_registry
from verl.tools.function_tool import FunctionTool, _build_schema_from_fn
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

import composer_replication.recipes.verl as recipe
from composer_replication.envs.student import student_folder
from composer_replication.recipes.verl.agent_loop import NAME
from rollouts.tiny_policy import Turn, turn_ids
from rollouts.workshop import Workshop

CONFIGS = Path(recipe.__file__).parent / "configs"


def load_config(name: str, *overrides: str) -> Any:
    """As verl's own command line composes it: our file over its `ppo_trainer.yaml`."""
    searched = "hydra.searchpath=[pkg://verl.trainer.config]"
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose(name, overrides=[searched, *overrides])


@cache
def student_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(student_folder())


class ScriptedServer:
    """Stands where verl's client of its servers stands."""

    def __init__(self, turns: Sequence[Turn], most: int | None = None) -> None:
        self.turns, self.asked, self._most = list(turns), [], most

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_named: Any) -> Any:
        assert request_id
        assert sampling_params is not None
        self.asked.append(list(prompt_ids))
        said = turn_ids(student_tokenizer(), self.turns[len(self.asked) - 1])
        return TokenOutput(token_ids=said[: self._most], log_probs=[-0.5] * len(said[: self._most]))


def workshop_tools(workshop: Workshop) -> list[FunctionTool]:
    methods = [
        each
        for name, each in inspect.getmembers(workshop, inspect.ismethod)
        if not name.startswith("_") and name != "reset"
    ]
    return [
        FunctionTool(
            name=each.__name__,
            fn=each,
            tool_schema=_build_schema_from_fn(each, each.__name__),
            is_async=inspect.iscoroutinefunction(each),
        )
        for each in methods
    ]


def run_loop(turns: Sequence[Turn], question: str, *, response_length: int = 2048, most: int | None = None) -> Any:
    """One rollout, as verl's agent worker makes it."""
    config = load_config(
        "composer_1_gpu",
        f"data.max_response_length={response_length}",
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=4",
    )
    OmegaConf.resolve(config.data)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        agent = hydra.utils.instantiate(
            _agent_loop_registry[NAME],
            trainer_config=DictConfigWrap(config),
            server_manager=ScriptedServer(turns, most),
            tokenizer=student_tokenizer(),
            processor=None,
            hf_model_type="qwen3",
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
            tools=ToolListWrap(workshop_tools(Workshop())),
        )
        prompt = [{"role": "user", "content": question}]
        return loop.run_until_complete(agent.run({"temperature": 1.0}, raw_prompt=prompt))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def sites_of(output: Any) -> list[dict[str, Any]]:
    return json.loads(output.extra_fields["sdpo_sites"])
