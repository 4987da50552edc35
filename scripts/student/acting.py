"""The student at work: an episode as a talk with the model, and its error sites as the pipeline finds them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from composer_replication.batch.render.renderer import Renderer
from composer_replication.envs.workspace import TOOLS, Difficulty, Outcome, Task, TestRunner, Workspace, generate_task
from composer_replication.trainer.rollouts.hint_distillation import ErringTurnFinder, ErringTurns
from composer_replication.trainer.rollouts.sites import Rollout
from composer_replication.trainer.rollouts.unrelated_hints import add_unrelated_hints
from composer_replication.types import Message

SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
MOST_CALLS = 24
_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)


class Step(NamedTuple):
    """A call of the student's, and what came back."""

    name: str
    arguments: Mapping[str, Any]
    outcome: Outcome


def read_call(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """The call in a turn's text; None where there is none that can be read."""
    found = _CALL.search(text)
    try:
        call = json.loads(found[1]) if found else None
    except ValueError:
        return None
    is_call = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)
    return (call["name"], call["arguments"]) if is_call else None


def answer_ids(tokenizer: PreTrainedTokenizerBase, outcome: Outcome) -> list[int]:
    """What stands between a turn and the next one."""
    text = f"\n<|im_start|>tool\n{outcome.text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass(eq=False)
class Acting:
    """One episode: a turn without a call that can be read ends it, as it does in TRL."""

    tokenizer: PreTrainedTokenizerBase
    runner: TestRunner
    seed: int
    difficulty: Difficulty
    draw: random.Random
    steps: list[Step] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    is_malformed: bool = False

    def __post_init__(self) -> None:
        self.task: Task = generate_task(self.seed, difficulty=self.difficulty)
        self.workspace = Workspace(self.task, runner=self.runner, max_calls=MOST_CALLS)
        self.prompt: list[Message] = [{"role": "user", "content": self.task.prompt}]

    def begin(self) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            self.prompt, tools=list(TOOLS), add_generation_prompt=True, tokenize=False
        )
        self.prompt_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(self.prompt_ids)

    def hear(self, said: list[int]) -> list[int] | None:
        self._add(said, 1)
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        called = read_call(text)
        if called is None:
            self.is_malformed = True
            self.messages.append({"role": "assistant", "content": text})
            return None
        name, arguments = called
        function = {"name": name, "arguments": arguments}
        self.messages.append(
            {
                "role": "assistant",
                "content": text.partition("<tool_call>")[0],
                "tool_calls": [{"type": "function", "function": function}],
            }
        )
        outcome = self.workspace.call(name, arguments)
        self.steps.append(Step(name, arguments, outcome))
        self.messages.append({"role": "tool", "name": name, "content": outcome.text})
        if self.workspace.finished:
            return None
        answer = answer_ids(self.tokenizer, outcome)
        self._add(answer, 0)
        return answer

    def rollout(self) -> Rollout:
        """The episode as a trainer would hand it over."""
        return Rollout(
            rollout_id=f"{self.difficulty}-{self.seed}",
            prompt_ids=self.prompt_ids,
            completion_ids=self.ids,
            sampled=self.sampled,
            prompt=self.prompt,
            messages=self.messages,
            raised=[step.outcome.failed for step in self.steps],
            tools=SCHEMAS,
        )

    def state_before(self, turn: int) -> Workspace:
        """The workspace as it was before a turn."""
        workspace = Workspace(self.task, runner=self.runner, max_calls=MOST_CALLS)
        for step in self.steps[:turn]:
            workspace.call(step.name, step.arguments)
        return workspace

    def _add(self, ids: Sequence[int], sampled: int) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)


@dataclass(eq=False)
class Retrial:
    """One turn once more, from a context with or without a hint, and what follows from it: `most_calls` in all.

    `kinds` are what the calls failed with; None of one that worked.
    """

    tokenizer: PreTrainedTokenizerBase
    context: list[int]
    state: Workspace
    draw: random.Random
    most_calls: int
    kinds: list[str | None] = field(default_factory=list)

    def begin(self) -> list[int]:
        return list(self.context)

    def hear(self, said: list[int]) -> list[int] | None:
        called = read_call(self.tokenizer.decode(said, skip_special_tokens=True))
        if called is None:
            self.kinds.append("malformed")
            return None
        outcome = self.state.call(*called)
        self.kinds.append((outcome.kind or "other") if outcome.failed else None)
        is_over = self.state.finished or len(self.kinds) == self.most_calls
        return None if is_over else answer_ids(self.tokenizer, outcome)


def hinted_sites(tokenizer: PreTrainedTokenizerBase, episodes: Sequence[Acting]) -> list[ErringTurns]:
    """The sites of these episodes with their hints, and with hints of other kinds for contrast: as GRPO finds them."""
    finder = ErringTurnFinder(Renderer(tokenizer, tools=list(TOOLS)))
    found = [finder.find(episode.rollout()) for episode in episodes]
    add_unrelated_hints(finder, found, "card")
    return found
