"""Run rollouts for TRL in a verifiers environment: `train.grpo.environment = "verifiers:composer-workspace"`.

verifiers runs its own loop and calls a model over HTTP; here that model is the policy being trained
(`policy_endpoint`). Rewards come from the environment. A failed episode has no reward (NaN), because the policy is not
to blame. An episode that fills its context has not failed: it ends as at any other limit in verifiers, and is judged
and trained on like every truncated rollout. Errors that the environment reports (`trace.info["sites"]`) become signals
of the rollouts; all other errors are found by rules, as in every rollout.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from composer_replication.errors import ConfigError, RunError, explain
from composer_replication.optional import require
from composer_replication.trainer.rollouts.worlds.policy_endpoint import Generate, SpokenEpisode, chat_endpoint, speak

PREFIX = "verifiers:"
MAX_TASKS = 1000
"""The maximum number of tasks taken from a taskset, which may be infinite."""
REWARD = "world_reward"
OUT_OF_ROOM = "max_total_tokens"
"""The stop condition for an episode that filled its context, which verifiers counts as truncated."""


def is_verifiers(name: str) -> bool:
    """Return whether the name refers to an environment from verifiers."""
    return name.startswith(PREFIX)


def world_reward(world_reward: Sequence[float], **_kwargs: Any) -> list[float]:
    """Return the environment's rewards, as a reward function for TRL."""
    return list(world_reward)


class VerifiersWorld:
    """An environment from verifiers. It provides its tasks as prompts, and a rollout function that runs them."""

    def __init__(self, name: str) -> None:
        self._vf = require("verifiers.v1", extra="verifiers")
        self.id = name.removeprefix(PREFIX)
        try:
            config = self._vf.resolve_env_config({"taskset": {"id": self.id}})
            self._env = self._vf.load_environment(config)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            got = f"{type(error).__name__}: {error}"
            expected = "the id of an installed environment"
            raise ConfigError(explain(f"train.grpo.environment {name}", got=got, expected=expected)) from error
        self._tasks = list(itertools.islice(self._env.taskset.load(), MAX_TASKS))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of a data set: the prompt and number of each task."""
        rows = [{"prompt": _chat(task.data), "task": number} for number, task in enumerate(self._tasks)]
        if not all(row["prompt"] for row in rows):
            raise ConfigError(
                explain(f"environment {self.id}", got="a task without a prompt", expected="a prompt for every task")
            )
        return rows

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Return the fields that TRL expects from its `rollout_func` for these prompts."""
        if trainer.accelerator.num_processes > 1:
            got = f"{trainer.accelerator.num_processes} processes"
            # All processes generate together, but the loops of engines differ in their number of rounds.
            expected = "one process"
            raise ConfigError(explain(f"train.grpo.environment {PREFIX}{self.id}", got=got, expected=expected))
        numbers = self._numbers(prompts, trainer)
        template = dict(trainer.chat_template_kwargs or {})
        # TRL's own training template, if it replaced that of the tokenizer.
        if getattr(trainer, "chat_template", None):
            template["chat_template"] = trainer.chat_template

        def generate(ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]] | None]:
            return trainer._generate_single_turn(ids, None, {}, 1)

        longest, context = trainer.max_completion_length, _context_length(trainer)
        episodes = [SpokenEpisode(trainer.processing_class, template, longest, context=context) for _ in prompts]
        traces = self.play(numbers, episodes, generate)
        has_logprobs = trainer.use_vllm
        # Truncated at the limit, because the last request may have added more messages than there was room for.
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.ids[: episode.limit] for episode in episodes],
            "env_mask": [episode.sampled[: episode.limit] for episode in episodes],
            "logprobs": [episode.logprobs[: episode.limit] for episode in episodes] if has_logprobs else None,
            "messages": [episode.messages for episode in episodes],
            "tools": [[_function(tool) for tool in episode.tools] for episode in episodes],
            "signals": [list(trace.info.get("sites") or ()) for trace in traces],
            REWARD: [self._reward(trace, episode) for trace, episode in zip(traces, episodes, strict=True)],
        }

    def _numbers(self, prompts: Sequence[Any], trainer: Any) -> list[int]:
        """Return the task numbers of the sampled rows, since two tasks may have the same prompt."""
        rows = getattr(getattr(trainer, "sampling", None), "rows", ())
        numbers = [int(row["task"]) for row in rows if "task" in row]
        if len(numbers) != len(prompts):
            got = f"{len(numbers)} rows with a task, {len(prompts)} prompts"
            fix = "Use ComposerReplicationTrainer, and VerifiersWorld.rows() with all their columns."
            raise ConfigError(explain(f"environment {self.id}", got=got, expected="one task per prompt", fix=fix))
        return numbers

    def _reward(self, trace: Any, episode: SpokenEpisode) -> float:
        """Return the environment's reward, or NaN (not judged) for an episode that failed after its first turn.

        Raises RunError for an episode without any turn of the model.
        """
        if not any(episode.sampled):
            if episode.is_full:
                got = f"a prompt of {len(episode.prompt_ids):,} tokens, which leaves no room for a turn"
                fix = "Use a model with a longer context, or an environment with shorter prompts."
                expected = "a prompt shorter than the model's context"
                raise RunError(explain(f"environment {self.id}", got=got, expected=expected, fix=fix))
            got = f"an episode that ended before its first turn, {_last_error(trace)}"
            expected = "an episode with at least one assistant turn"
            raise RunError(explain(f"environment {self.id}", got=got, expected=expected))
        return math.nan if trace.has_error else float(trace.reward)

    def play(self, tasks: Sequence[int], episodes: Sequence[SpokenEpisode], generate: Generate) -> list[Any]:
        """Run these tasks with the policy, and return their traces."""
        # Random names, because any local process could send requests for an episode whose name it guesses.
        names = {f"policy-{secrets.token_hex(16)}": episode for episode in episodes}
        with chat_endpoint(names) as url, ThreadPoolExecutor(max_workers=1) as executor:
            client = self._vf.EvalClientConfig(base_url=url, api_key_var="CRF_NO_KEY")
            traces = executor.submit(self._run_all, tasks, names, client)
            try:
                speak(episodes, generate)
            finally:  # after an error here, episodes that wait for an answer would wait forever
                for episode in episodes:
                    episode.answers.put(None)
            return [self._trace(episode) for episode in traces.result()]

    def _run_all(self, tasks: Sequence[int], names: Mapping[str, SpokenEpisode], client: Any) -> list[Any]:
        """Run all tasks, and mark all episodes as over afterwards, even if an error occurs. This is called in a
        separate thread.
        """
        try:
            return asyncio.run(self._run(tasks, list(names.items()), client))
        finally:
            for episode in names.values():
                episode.requests.put(None)

    async def _run(self, tasks: Sequence[int], names: Sequence[tuple[str, SpokenEpisode]], client: Any) -> list[Any]:
        async def run_task(task: int, name: str, episode: SpokenEpisode) -> Any:
            def stop_when_full(trace: Any) -> None:
                episode.on_full = lambda: trace.stop(OUT_OF_ROOM)

            context = self._vf.ModelContext(model=name, client=client)
            try:
                return await self._env.run_episode(self._tasks[task], context, on_trace=stop_when_full)
            finally:
                episode.requests.put(None)

        async with self._env.serving():
            return await asyncio.gather(*(run_task(task, *pair) for task, pair in zip(tasks, names, strict=True)))

    def _trace(self, episode: Any) -> Any:
        if len(episode.traces) != 1:
            got = f"{len(episode.traces)} traces in an episode, {_last_error(episode)}"
            raise RunError(explain(f"environment {self.id}", got=got, expected="one trace (a single agent)"))
        return episode.traces[0]


@cache
def verifiers_world(name: str) -> VerifiersWorld:
    """Return the environment with this name. Repeated calls return the same object."""
    return VerifiersWorld(name)


def _context_length(trainer: Any) -> int | None:
    """Return the maximum number of tokens in a rollout, determined as in TRL's own tool loop, or None if it is
    unknown.
    """
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    config: Any = getattr(getattr(trainer, "model", None), "config", None)
    if hasattr(config, "get_text_config"):  # multimodal models nest the config of their text model
        config = config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _chat(data: Any) -> list[dict[str, Any]]:
    """Return the prompt of a task as messages."""
    prompt = data.prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [
        *system,
        *(dict(message) if isinstance(message, Mapping) else message.model_dump() for message in prompt or ()),
    ]


def _last_error(record: Any) -> str:
    """Return a text that describes the last error recorded in a trace or an episode."""
    errors = getattr(record, "errors", None) or ()
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "without an error"


def _function(tool: Any) -> Mapping[str, Any]:
    return tool.get("function", tool)
