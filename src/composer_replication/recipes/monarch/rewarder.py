"""Compute rewards with the protocol of verifiers, and query a pool of teachers.

A reward function is plain or async. It receives those of these arguments that its parameters name:

    completion  the text that the policy wrote         trace  the rollout: `last_reply`, `messages`, `info`
    prompt      the prompt of the completion           task   the row of the data set, its values as attributes
    info        the report of the environment          or any column of the row or of `info` by name (`answer`, ...)

It returns a number, or a mapping of numbers, which are summed. Its weight is set with `@vf.reward(weight=...)` and
defaults to 1. verifiers itself need not be installed.
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
from composer_replication.recipes.monarch.generator import load_function
from composer_replication.teacher_replay import extract_dpo_pairs
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import ReplayOptions, replay_trace
from composer_replication.teacher_replay.teachers import to_dollars
from composer_replication.types import DPOPair, TeacherCallResult, TeacherSpec, TraceState

_WEIGHT = "_vf_weight"
"""The attribute in which the decorator of verifiers 0.4 stores a reward's weight."""


@dataclass(frozen=True, kw_only=True)
class RewarderSettings:
    """The names of the reward functions ("package.module:function"). The reward of a rollout is the weighted sum of
    their results.
    """

    rewards: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.rewards or isinstance(self.rewards, str):  # a string would be iterated letter by letter
            raise InputError(
                explain("rewards", got=repr(self.rewards), expected="a tuple of names of reward functions")
            )


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """A rollout in the form that reward functions receive, with the same field names as verifiers' own record."""

    task: Any
    last_reply: str
    messages: Sequence[Any]
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Rewarder:
    """Computes the rewards of completions, one completion at a time."""

    def __init__(self, settings: RewarderSettings) -> None:
        self._functions = [load_function(name, what="reward") for name in settings.rewards]

    async def score(
        self, completions: Sequence[str], *, rows: Sequence[Mapping[str, Any]] | None = None
    ) -> list[float]:
        """Return the reward of each completion. Each of the `rows` holds the data set's columns for one completion,
        and its `info` and `messages` if they are known.
        """
        completion_rows = [{} for _ in completions] if rows is None else rows
        if len(completion_rows) != len(completions):
            got = f"{len(completion_rows)} rows for {len(completions)} completions"
            raise InputError(explain("rows", got=got, expected="one row per completion"))
        return [
            await self._score(text, row, index)
            for index, (text, row) in enumerate(zip(completions, completion_rows, strict=True))
        ]

    async def _score(self, completion: str, row: Mapping[str, Any], index: int) -> float:
        info: Mapping[str, Any] = row.get("info") or {}
        # verifiers passes the task as an object, so that reward functions can use `task.answer`.
        task = SimpleNamespace(**{str(name): value for name, value in row.items()})
        # Without messages, the completion is taken as the only answer of the conversation.
        messages = row.get("messages") or [{"role": "assistant", "content": completion}]
        trace = _Trace(task=task, last_reply=_last_reply(messages), messages=messages, info=info)
        # Later entries win, so that a column named `info` or `trace` cannot replace an argument of the protocol.
        arguments = {**info, **row, "completion": completion, "info": info, "task": task, "trace": trace}
        total = 0.0
        for function in self._functions:
            value = await _call_reward(function, arguments)
            # Plain functions have no such attribute.
            total += float(getattr(function, _WEIGHT, 1.0)) * value
        if not math.isfinite(total):
            raise NonFiniteError(explain(f"reward of completion {index}", got=total, expected="a finite number"))
        return total


def _last_reply(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last assistant message, stripped as verifiers does."""
    replies = [message for message in messages if message.get("role") == "assistant"]
    return content_text(replies[-1].get("content")).strip() if replies else ""


async def _call_reward(function: Callable[..., Any], columns: Mapping[str, Any]) -> float:
    parameters = inspect.signature(function).parameters.values()
    # `*args` and `**kwargs` name no column.
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
        fix = "Add these columns to the rows, or give the parameters default values."
        got = f"parameters without a column: {missing}"
        raise InputError(explain(f"reward {name}", got=got, expected=f"parameters among {sorted(columns)}", fix=fix))
    value: Any = function(
        **{parameter.name: columns[parameter.name] for parameter in named_parameters if parameter.name in columns}
    )
    # A plain function may return a coroutine too.
    if inspect.isawaitable(value):
        value = await value
    if isinstance(value, Mapping):
        return sum(float(number) for number in value.values())
    # float("1.5") would work, but a string is most likely a bug of the reward function.
    if value is None or isinstance(value, str):
        raise InputError(explain(f"reward {name}", got=repr(value), expected="a number, or a mapping of numbers"))
    return float(value)


@dataclass(frozen=True, kw_only=True)
class TeacherPoolSettings:
    """The settings of a teacher pool: the teachers to query, and their shared spending cap. API keys are read from
    the environment and never passed on.
    """

    folder: str
    teachers: tuple[TeacherSpec, ...]
    max_total_usd: float = 5.0
    agreement_threshold: int = 2
    max_concurrency: int = 16

    def __post_init__(self) -> None:
        if not self.teachers:
            raise InputError(explain("teachers", got="none", expected="at least one"))


class TeacherPool:
    """A pool of teachers with one shared spending cap, which is enforced across restarts.

    Costs are reserved on disk before a request is sent, and stored with the answers (`teacher_replay`). A pool that was
    killed and restarted does not request any answer twice, and counts requests that were in flight as spent.
    """

    def __init__(self, settings: TeacherPoolSettings) -> None:
        self.settings = settings
        self._store = Path(settings.folder) / "teachers.sqlite"

    async def replay(self, states: Sequence[TraceState]) -> list[TeacherCallResult]:
        """Return the answer of every teacher in every state, or fewer answers if the spending cap is reached."""
        settings = self.settings
        options = ReplayOptions(cache=self._store, max_concurrency=settings.max_concurrency)
        return await replay_trace(list(states), settings.teachers, settings.max_total_usd, options=options)

    async def pairs(self, states: Sequence[TraceState]) -> list[DPOPair]:
        """Return DPO pairs: the chosen answer is one on which enough teachers agree, and the rejected answer is the
        student's.
        """
        answers = await self.replay(states)
        return extract_dpo_pairs(states, answers, self.settings.agreement_threshold)

    async def spent(self) -> dict[str, Any]:
        """Return the total costs, in US dollars, of all processes that have used this store."""
        with TeacherStore(self._store) as store:
            meter = store.meter()
        return {
            # `spent` was billed; `unknown` was reserved for requests whose cost is unknown.
            "spent_usd": to_dollars(meter.spent),
            "unknown_usd": to_dollars(meter.unknown),
            "max_total_usd": self.settings.max_total_usd,
        }
