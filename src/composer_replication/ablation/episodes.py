"""Episodes in the workspace: conversations with a model, rollouts of a GRPO training, units of an evaluation."""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from composer_replication.envs.policies import RememberingRunner
from composer_replication.envs.workspace import TOOLS, Difficulty, TestRunner, Workspace, generate_task
from composer_replication.errors import UnsupportedModelError, explain

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)
SCHEMAS = [tool["function"] for tool in TOOLS]
MOST_CALLS = 24
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)


@cache
def world_runner() -> TestRunner:
    """Of all episodes of a process: the same tests of the same files are run once."""
    return RememberingRunner()


def read_call(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """The call in a turn's text; None where there is none that can be read."""
    written = _CALL.search(text)
    try:
        call: Any = json.loads(written[1]) if written else None
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    return (call["name"], arguments) if isinstance(arguments, dict) else None


_SAID = "said here"


def after_a_turn(tokenizer: Any, tool: str, answer: str) -> str:
    """What the model's own template has between the end of a turn that called a tool and the next turn's beginning."""
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _SAID},
        {"role": "tool", "name": tool, "content": answer},
    ]
    text = tokenizer.apply_chat_template(messages, tools=list(TOOLS), add_generation_prompt=True, tokenize=False)
    before, end, after = text.partition(_SAID + tokenizer.eos_token)
    if not end or _SAID in before:
        got = "a template without it" if not end else "a template that writes an answer twice"
        raise UnsupportedModelError(explain("chat template", got=got, expected="a turn's text, then its end token"))
    return after


class Episode:
    """One task, from its prompt to the end of the session: a turn without a call that can be read ends it, too."""

    def __init__(self, tokenizer: Any, seed: int, luck: str, *, difficulty: Difficulty = "easy") -> None:
        task = generate_task(seed, difficulty=difficulty)
        self.seed, self.draw, self._tokenizer = seed, random.Random(luck), tokenizer  # noqa: S311 (luck, no secret)
        self.workspace = Workspace(task, runner=world_runner(), max_calls=MOST_CALLS)
        self.prompt: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        self.messages: list[dict[str, Any]] = []
        text = tokenizer.apply_chat_template(self.prompt, tools=list(TOOLS), add_generation_prompt=True, tokenize=False)
        self.prompt_ids: list[int] = self._encode(text)
        self.ids: list[int] = []
        self.sampled: list[int] = []
        self.failures: Counter[str] = Counter()
        self.is_unreadable = False

    def begin(self) -> list[int]:
        return self.prompt_ids

    def hear(self, said: list[int]) -> list[int] | None:
        self._add(said, 1)
        text = self._tokenizer.decode(said, skip_special_tokens=True)
        called = read_call(text)
        if called is None:
            self.messages.append({"role": "assistant", "content": text})
            self.is_unreadable = True
            return None
        name, arguments = called
        function = {"name": name, "arguments": arguments}
        words, calls = text.partition("<tool_call>")[0], [{"type": "function", "function": function}]
        self.messages.append({"role": "assistant", "content": words, "tool_calls": calls})
        outcome = self.workspace.call(name, arguments)
        if outcome.failed:
            self.failures[outcome.kind or "other"] += 1
        if self.workspace.finished:
            return None
        self.messages.append({"role": "tool", "name": name, "content": outcome.text})
        answer = self._encode(after_a_turn(self._tokenizer, name, outcome.text))
        self._add(answer, 0)
        return answer

    def _add(self, ids: Sequence[int], sampled: int) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def play_all(
    model: nn.Module,
    tokenizer: Any,
    episodes: Sequence[Episode],
    *,
    most: int,
    places: int | None = None,
    temperature: float = 1.0,
) -> None:
    """All episodes, sampled by the model as it is; one with more than `most` tokens after its prompt is over.

    At most `places` at a time; unless said, all of them on a GPU, which has room for their keys, and 48 elsewhere.
    """
    from composer_replication.objective.adapters import evaluating

    room, ends = most + max(len(episode.prompt_ids) for episode in episodes), [tokenizer.eos_token_id]
    places = places or (len(episodes) if next(model.parameters()).is_cuda else 48)
    with evaluating(model):
        sampler = _sampler_for(model, room)
        sampler(model, ends=ends, places=places, room=room, most_new=most, temperature=temperature).run(episodes)


def _sampler_for(model: Any, room: int) -> Any:
    """On a GPU recorded passes, where the model can be recorded; else all rows side by side, as they are."""
    import torch

    from composer_replication.objective.adapters import has_adapter
    from composer_replication.rollouts.generation.recorded_talks import RecordedTalking
    from composer_replication.rollouts.generation.suitability import why_not_kept
    from composer_replication.rollouts.generation.talks import Talking

    if model.device.type == "cuda":
        with torch.no_grad():
            reason = why_not_kept(model, room)
        if reason is None:
            return RecordedTalking
        logger.warning("conversations are not sampled from kept keys: %s", reason)
    if has_adapter(model):
        fix = "Merge it into the weights first (`crf export RUN --to DIR`), or train without one."
        raise UnsupportedModelError(explain("model", got="an adapter", expected="plain weights, off a GPU", fix=fix))
    return Talking


def rollouts(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
    """A rollout function of TRL (`train.grpo.rollouts`): what the workspace's tools would make, without TRL's waiting.

    A row of the data set names its task by seed and difficulty. The luck of a rollout is its run's, step's and place's.
    """
    import torch

    tokenizer, longest, step = trainer.processing_class, trainer.max_completion_length, trainer.state.global_step
    rows = _rows_by_prompt(trainer)
    episodes = [
        Episode(
            tokenizer,
            int(row["seed"]),
            f"{trainer.args.seed}:{step}:{position}",
            difficulty=row.get("difficulty", "easy"),
        )
        for position, row in enumerate(rows[prompt[-1]["content"]] for prompt in prompts)
    ]
    model = trainer.accelerator.unwrap_model(trainer.model)
    play_all(model, tokenizer, episodes, most=longest, places=len(episodes), temperature=trainer.temperature)
    rewards = [episode.workspace.reward() for episode in episodes]
    figures = {
        "solved": [float(reward.solved) for reward in rewards],
        "calls": [float(episode.workspace.calls) for episode in episodes],
        "failing_calls": [float(episode.failures.total()) for episode in episodes],
        "tokens": [float(len(episode.prompt_ids) + len(episode.ids)) for episode in episodes],
    }
    metrics = trainer._metrics[trainer.mode()]
    for name, values in figures.items():
        metrics[f"world/{name}"].append(sum(values) / len(values))
    # TRL's own name for it, which the alarm watches: of all processes, or they would not decide alike.
    counts = [sum(figures["calls"]), float(len(episodes))]
    calls, number = trainer.sum_over(torch.tensor(counts, device=trainer.accelerator.device)).tolist()
    metrics["tools/call_frequency"].append(calls / number)
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.ids[:longest] for episode in episodes],
        "env_mask": [episode.sampled[:longest] for episode in episodes],
        "logprobs": None,
        "messages": [episode.messages for episode in episodes],
        "tools": [SCHEMAS for _ in episodes],
        "files_worth": [reward.value for reward in rewards],
    }


_rows: WeakKeyDictionary[Any, dict[str, Mapping[str, Any]]] = WeakKeyDictionary()


def _rows_by_prompt(trainer: Any) -> dict[str, Mapping[str, Any]]:
    """A rollout function is told the prompts alone; the prompt of an easy task says which one it is."""
    if trainer not in _rows:
        _rows[trainer] = {row["prompt"][-1]["content"]: row for row in trainer.train_dataset}
    return _rows[trainer]


def files_worth(files_worth: Sequence[float], **_given: Any) -> list[float]:
    """A reward function: 1 where all tests pass, else half the share of the broken ones that do now."""
    return list(files_worth)
