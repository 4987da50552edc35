"""A price of errors, as a reward function of TRL: the other way to make use of the sites that channel 2 teaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.rollouts.conversation import Rollout, Run, conversation_of
from composer_replication.rollouts.failure_rules import ROLLOUT_RULES
from composer_replication.sites.find import find_error_sites
from composer_replication.types import Message


class ErrorPenalty:
    """Takes `price` off a rollout's reward for each call that failed by the model's doing; logs how many there were.

    What failed is read from the messages: TRL's own, or those that a rollout function returned as `messages`.
    """

    __name__ = "error_penalty"  # TRL logs a reward function by this

    def __init__(self, price: float) -> None:
        if not (math.isfinite(price) and price > 0):
            raise InputError(explain("price of an error", got=price, expected="a finite number above 0"))
        self.price = price

    def __call__(self, completions: Sequence[Any], messages: Sequence[Any] | None = None, **given: Any) -> list[float]:
        """TRL passes everything by name: the columns of the data set and of a rollout function come too."""
        counts = [errors_in(rollout) for rollout in (completions if messages is None else messages)]
        log_metric = given.get("log_metric")
        if log_metric is not None and counts:
            log_metric("errors/per_rollout", sum(counts) / len(counts))
        return [-self.price * count for count in counts]


def errors_in(messages: str | Sequence[Message]) -> int:
    """Calls of a rollout that failed, where that is the model's doing."""
    if isinstance(messages, str):
        return 0
    runs = [Run(0, 0)] * sum(message.get("role") == "assistant" for message in messages)
    rollout = Rollout(rollout_id="", prompt_ids=(), completion_ids=(), sampled=None, prompt=(), messages=list(messages))
    return sum(site.is_kept for site in find_error_sites(conversation_of(rollout, runs), extra_rules=ROLLOUT_RULES))
