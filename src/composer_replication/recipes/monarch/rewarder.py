"""What the rewarder's actor does: reward functions by the protocol of verifiers.

A function, plain or async, names in its signature what it wants to know, and is given that:

    completion  what the policy wrote         trace  the rollout: `last_reply`, `messages`, `info`
    prompt      what it answers               task   the row of the data set, its values as attributes
    info        what its world said of it     and any column of the row or of `info` by its own name (`answer`, ...)

It returns a number, or a mapping of numbers that are added up. `@vf.reward(weight=...)` is honoured where it was used;
without it a function weighs 1. verifiers itself need not be installed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from composer_replication.errors import InputError, NonFiniteError, explain
from composer_replication.messages import content_text
from composer_replication.recipes.monarch.generator import function_named
from composer_replication.teacher_replay import extract_dpo_pairs
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import ReplayOptions, replay_trace
from composer_replication.teacher_replay.teachers import to_dollars
from composer_replication.types import (
    DPOPair,
    TeacherCallResult,
    TeacherSpec,
    TraceState,
)

_WEIGHT = "_vf_weight"
"""Where verifiers 0.4's decorator keeps a reward's weight."""


@dataclass(frozen=True, kw_only=True)
class RewarderSettings:
    """Names of reward functions ("package.module:function"); a rollout's reward is their weighted sum."""

    rewards: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.rewards or isinstance(self.rewards, str):
            raise InputError(explain("rewards", got=repr(self.rewards), expected="names of reward functions"))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What of a rollout reward functions read, by the names of verifiers' own record."""

    task: Any
    last_reply: str
    messages: Sequence[Any]
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Rewarder:
    """Judges completions, one after the other."""

    def __init__(self, settings: RewarderSettings) -> None:
        self._functions = [function_named(name, what="reward") for name in settings.rewards]

    async def score(
        self, completions: Sequence[str], *, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> list[float]:
        """A reward of each completion. `rows` are what else is known of each: its columns, `info`, `messages`."""
        completion_rows = [{} for _ in completions] if rows is None else rows
        if len(completion_rows) != len(completions):
            got = f"{len(completion_rows)} rows for {len(completions)} completions"
            raise InputError(explain("rows", got=got, expected="one a completion"))
        return [
            await self._score(text, row, at)
            for at, (text, row) in enumerate(zip(completions, completion_rows, strict=True))
        ]

    async def _score(self, completion: str, row: Mapping[str, Any], at: int) -> float:
        info: Mapping[str, Any] = row.get("info") or {}
        task = SimpleNamespace(**{str(name): value for name, value in row.items()})
        messages = row.get("messages") or [{"role": "assistant", "content": completion}]
        trace = Trace(task=task, last_reply=_last_reply(messages), messages=messages, info=info)
        arguments = {**info, **row, "completion": completion, "info": info, "task": task, "trace": trace}
        total = 0.0
        for function in self._functions:
            value = await _called(function, arguments)
            total += float(getattr(function, _WEIGHT, 1.0)) * value
        if not math.isfinite(total):
            raise NonFiniteError(explain(f"reward of completion {at}", got=total, expected="a finite number"))
        return total


def _last_reply(messages: Sequence[Mapping[str, Any]]) -> str:
    """The last assistant message's text, stripped as verifiers does."""
    replies = [message for message in messages if message.get("role") == "assistant"]
    return content_text(replies[-1].get("content")).strip() if replies else ""


async def _called(function: Callable[..., Any], columns: Mapping[str, Any]) -> float:
    parameters = inspect.signature(function).parameters.values()
    named_parameters = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    missing = [
        parameter.name
        for parameter in named_parameters
        if parameter.name not in columns and parameter.default is parameter.empty
    ]
    name = getattr(function, "__name__", repr(function))
    if missing:
        fix = "Give the rows these columns, or the parameters defaults."
        got = f"asks for {missing}"
        raise InputError(explain(f"reward {name}", got=got, expected=f"some of {sorted(columns)}", fix=fix))
    value: Any = function(
        **{parameter.name: columns[parameter.name] for parameter in named_parameters if parameter.name in columns}
    )
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, Mapping):
        return sum(float(number) for number in value.values())
    if value is None or isinstance(value, str):
        raise InputError(explain(f"reward {name}", got=repr(value), expected="a number, or a mapping of numbers"))
    return float(value)


# What the teacher pool's actor does: asks teachers what they would have done, all runs of it under one budget.
#
# The cap is `teacher_replay`'s: reserved before a request is sent, kept in a store on the disk. A pool that is killed
# and started anew asks nobody twice for what was answered, and what it may have spent unseen counts as spent.


@dataclass(frozen=True, kw_only=True)
class TeacherPoolSettings:
    """Who is asked, and how much all of it may cost. Keys are looked up in the environment, never sent along."""

    folder: str
    teachers: tuple[TeacherSpec, ...]
    max_total_usd: float = 5.0
    agreement_threshold: int = 2
    max_concurrency: int = 16

    def __post_init__(self) -> None:
        if not self.teachers:
            raise InputError(explain("teachers", got="none", expected="at least one"))


class TeacherPool:
    """Teachers, and the store that holds what they said and what it cost."""

    def __init__(self, settings: TeacherPoolSettings) -> None:
        self.settings = settings
        self._store = Path(settings.folder) / "teachers.sqlite"

    async def replay(self, states: Sequence[TraceState]) -> list[TeacherCallResult]:
        """Every teacher's answer at every state; fewer where the budget ends."""
        settings = self.settings
        options = ReplayOptions(cache=self._store, max_concurrency=settings.max_concurrency)
        return await replay_trace(list(states), settings.teachers, settings.max_total_usd, options=options)

    async def pairs(self, states: Sequence[TraceState]) -> list[DPOPair]:
        """What the teachers agreed on against what the student did."""
        answers = await self.replay(states)
        return extract_dpo_pairs(states, answers, self.settings.agreement_threshold)

    async def spent(self) -> dict[str, Any]:
        """Of the one budget, over every process that ever used it."""
        with TeacherStore(self._store) as store:
            meter = store.meter()
        return {
            "spent_usd": to_dollars(meter.spent),
            "unknown_usd": to_dollars(meter.unknown),
            "max_total_usd": self.settings.max_total_usd,
        }
