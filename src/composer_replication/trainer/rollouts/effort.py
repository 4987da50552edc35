"""Reward functions for TRL that charge a rollout for its effort and for its errors.

`effort_penalty_reward` is the concave length penalty from the Composer 2 report:

    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))        q = 1: log(1 + k x) / k        k = 0 or q = 0: x

x is a weighted sum of thinking tokens, tool-call tokens, tool-output tokens, final tokens, calls and turns. C(0) = 0
and C'(0) = 1, so a weight is the reward lost by the first token, call or turn of its kind; later ones cost less. The
formula is from the report; k, q and the weights are our choices.

`ErrorPenalty` charges a fixed price per error. It is the alternative to channel 2, which trains on the error sites.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from composer_replication.errors import InputError, explain
from composer_replication.messages import WrittenCall, content_text, written_calls
from composer_replication.sites.find import find_error_sites
from composer_replication.trainer.rollouts.sites import ROLLOUT_RULES, Rollout, Run, conversation_of
from composer_replication.types import Message

# "<think>Look first.</think>Done" -> "Look first."; also without the end: "<think>Look" -> "Look"
_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_THOUGHT_FIELDS = ("reasoning_content", "thinking")


class TextTokenizer(Protocol):
    """The tokenizer methods needed to count the tokens of a text."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class EffortWeights:
    """The weight of one token, call or turn of each kind in a rollout's effort x."""

    thinking: float = 1e-4
    calls_text: float = 1e-4
    tool_output: float = 1e-5
    final: float = 1e-4
    calls: float = 1e-3
    turns: float = 1e-3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(explain(f"weight of {name}", got=value, expected="a finite number of 0 or more"))


class _RolloutEffort(NamedTuple):
    """A rollout's effort: its number of tokens of each of four kinds, of tool calls, and of the model's turns."""

    thinking: int = 0
    calls_text: int = 0
    tool_output: int = 0
    final: int = 0
    calls: int = 0
    turns: int = 0

    def weighted_sum(self, weights: EffortWeights) -> float:
        """Return the weighted sum x of the tokens, calls and turns, from which the penalty is computed."""
        return math.fsum(count * getattr(weights, name) for name, count in self._asdict().items())


def _effort_cost(x: float, *, k: float, q: float) -> float:
    """Return the penalty C(x) for the effort x, accurate even for q near 1 or k near 0."""
    # With L = log(1 + kx): C = L/k * expm1((1-q) L) / ((1-q) L), which avoids cancellation.
    for name, value in (("x", x), ("k", k), ("q", q)):
        if not (math.isfinite(value) and value >= 0):
            raise InputError(explain(name, got=value, expected="a finite number of 0 or more"))
    growth = math.log1p(k * x)
    exponent = (1.0 - q) * growth
    # Both quotients tend to 1 as their divisor tends to 0.
    scale = x * (growth / (k * x)) if k * x else x
    return scale * (math.expm1(exponent) / exponent) if exponent else scale


def effort_penalty_reward(
    tokenizer: TextTokenizer, *, weights: EffortWeights | None = None, k: float = 1.0, q: float = 1.0
) -> _EffortPenalty:
    """Return a reward function for TRL that gives each rollout the reward -C(x) for its effort x, and logs the mean
    x as effort/x.
    """
    return _EffortPenalty(tokenizer, EffortWeights() if weights is None else weights, k, q)


class _EffortPenalty:
    """The reward function that `effort_penalty_reward` returns.

    Tokens that the chat template adds around messages are not counted.
    """

    __name__ = "effort_penalty"  # TRL logs a reward function under this name

    def __init__(self, tokenizer: TextTokenizer, weights: EffortWeights, k: float, q: float) -> None:
        _effort_cost(0.0, k=k, q=q)  # raises for an invalid k or q before any rollout is generated
        self.tokenizer, self.weights, self.k, self.q = tokenizer, weights, k, q

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **kwargs: Any
    ) -> list[float]:
        """Return the rewards. TRL also passes prompts and data set columns as keyword arguments."""
        spent = [self.effort(completion, ids) for completion, ids in zip(completions, completion_ids, strict=True)]
        weighted_sums = [effort.weighted_sum(self.weights) for effort in spent]
        log_metric = kwargs.get("log_metric")
        if log_metric is not None and weighted_sums:
            log_metric("effort/x", math.fsum(weighted_sums) / len(weighted_sums))
        return [-_effort_cost(x, k=self.k, q=self.q) for x in weighted_sums]

    def effort(self, completion: str | Sequence[Mapping[str, Any]], ids: Sequence[int]) -> _RolloutEffort:
        """Return the effort of one rollout. For plain text, `ids` are counted; for messages, the tokens of their
        contents.
        """
        if isinstance(completion, str):
            thinking = self._count(_thoughts_and_rest(completion)[0])
            return _RolloutEffort(thinking=thinking, final=max(0, len(ids) - thinking), turns=1)
        parts = [self._of_message(message) for message in completion]
        return _RolloutEffort(*(sum(counts) for counts in zip(*parts, strict=True))) if parts else _RolloutEffort()

    def _of_message(self, message: Mapping[str, Any]) -> _RolloutEffort:
        text = content_text(message.get("content"), separator="")
        if message.get("role") == "tool":
            return _RolloutEffort(tool_output=self._count(text))
        if message.get("role") != "assistant":
            return _RolloutEffort()
        calls = written_calls(message)
        inline, final = _thoughts_and_rest(text)
        return _RolloutEffort(
            thinking=self._count(
                "".join(content_text(message.get(name), separator="") for name in _THOUGHT_FIELDS) + inline
            ),
            calls_text=sum(self._count(_call_text(call)) for call in calls),
            final=self._count(final),
            calls=len(calls),
            turns=1,
        )

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0


def _thoughts_and_rest(text: str) -> tuple[str, str]:
    """Return the text inside think tags, and the remaining text."""
    # Some templates write the opening tag into the prompt.
    if text.find("<think>") < 0 <= text.find("</think>"):
        text = f"<think>{text}"
    return "".join(_THOUGHT.findall(text)), _THOUGHT.sub("", text)


def _call_text(call: WrittenCall) -> str:
    arguments = {} if call.arguments is None else call.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{call.name or ''}{text}"


class ErrorPenalty:
    """A reward function that subtracts `price` for each failed call blamed on the model, and logs the mean count.

    Failed calls are found in TRL's completion messages, or in `messages` if a rollout function returned them.
    """

    __name__ = "error_penalty"  # TRL logs a reward function under this name

    def __init__(self, price: float) -> None:
        if not (math.isfinite(price) and price > 0):
            raise InputError(explain("price of an error", got=price, expected="a finite number above 0"))
        self.price = price

    def __call__(self, completions: Sequence[Any], messages: Sequence[Any] | None = None, **kwargs: Any) -> list[float]:
        """Return the rewards. TRL also passes data set columns and rollout fields as keyword arguments."""
        counts = [_errors_in(rollout) for rollout in (completions if messages is None else messages)]
        log_metric = kwargs.get("log_metric")
        if log_metric is not None and counts:
            log_metric("errors/per_rollout", sum(counts) / len(counts))
        return [-self.price * count for count in counts]


def _errors_in(messages: str | Sequence[Message]) -> int:
    """Return the number of failed calls in a rollout for which the model is to blame."""
    if isinstance(messages, str):
        return 0
    # The rules need only messages, so every assistant turn gets an empty run of sampled tokens.
    runs = [Run(0, 0)] * sum(message.get("role") == "assistant" for message in messages)
    rollout = Rollout(rollout_id="", prompt_ids=(), completion_ids=(), sampled=None, prompt=(), messages=list(messages))
    return sum(site.is_kept for site in find_error_sites(conversation_of(rollout, runs), extra_rules=ROLLOUT_RULES))
