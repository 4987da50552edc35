"""What the channels did since the last log: means over the items of the steps on which each ran, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.objective.components import LossComponents

NAMES: dict[str, str] = dict(zip(CHANNELS, ("lm_ce", "sdpo_kl", "trace_replay_dpo"), strict=True))
"""The channels as metrics call them."""


class ChannelLog:
    """Sums of micro-batches become steps, and steps become means. A value stays on its device until it is logged.

    Over the whole run: `ran_steps`, `seen_items` (also where a weight was 0) and `top_weights`, the largest each had.
    """

    def __init__(self) -> None:
        self.ran_steps: Counter[str] = Counter()
        self.seen_items: Counter[str] = Counter()
        self.top_weights: dict[str, float] = dict.fromkeys(CHANNELS, 0.0)
        self.num_steps = 0
        self._open: Tensor | None = None
        self._reset()

    def add(self, components: LossComponents) -> None:
        """One micro-batch, each channel already divided by what the whole batch holds."""
        values = torch.stack([getattr(components, name).detach().float() for name in CHANNELS])
        self._open = values if self._open is None else self._open + values

    def take_step(self) -> Tensor:
        """(3,): this process's part of the step that ends here."""
        values = torch.zeros(len(CHANNELS)) if self._open is None else self._open
        self._open = None
        return values

    def finish_step(
        self, values: Tensor, items: Mapping[str, int], weights: Mapping[str, float], *, tokens: int = 0
    ) -> None:
        """Values of the whole step, over all processes; a channel ran where it had items and a weight.

        `tokens` are those of all trees that the step has read.
        """
        ran = [name for name in CHANNELS if items.get(name, 0) and weights[name] > 0]
        self.ran_steps.update(ran)
        self._ran.update(ran)
        self.seen_items.update({name: items.get(name, 0) for name in CHANNELS})
        self.top_weights = {name: max(self.top_weights[name], weights[name]) for name in CHANNELS}
        self.num_steps += 1
        self._steps += 1
        self._tokens += tokens
        self._items.update({name: items[name] for name in ran})
        means = values.double().cpu()
        self._sums = self._sums + means * torch.tensor([items.get(name, 0) for name in CHANNELS], dtype=torch.float64)
        self._total += float((means * torch.tensor([weights[name] for name in CHANNELS], dtype=torch.float64)).sum())
        self._weights = dict(weights)

    def take(self) -> dict[str, float]:
        """The metrics since the last call: a channel that never ran has a 0 under `ran/` and no loss."""
        if not self._steps:
            return {}
        metrics: dict[str, float] = {"loss/total": self._total / self._steps, "tokens": self._tokens / self._steps}
        for index, name in enumerate(CHANNELS):
            label = NAMES[name]
            metrics[f"ran/{label}"] = self._ran[name] / self._steps
            metrics[f"items/{label}"] = self._items[name] / self._steps
            if self._ran[name]:
                metrics[f"loss/{label}"] = float(self._sums[index]) / self._items[name]
        metrics["loss/alpha_sdpo"], metrics["loss/beta_replay"] = (self._weights[name] for name in CHANNELS[1:])
        self._reset()
        return metrics

    def state(self) -> dict[str, Any]:
        return {
            "ran_steps": dict(self.ran_steps),
            "seen_items": dict(self.seen_items),
            "top_weights": dict(self.top_weights),
            "num_steps": self.num_steps,
            "since_log": {
                "steps": self._steps,
                "tokens": self._tokens,
                "ran": dict(self._ran),
                "items": dict(self._items),
                "sums": self._sums.tolist(),
                "total": self._total,
                "weights": dict(self._weights),
            },
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        self.ran_steps, self.num_steps = Counter(tree["ran_steps"]), tree["num_steps"]
        self.seen_items, self.top_weights = Counter(tree["seen_items"]), dict(tree["top_weights"])
        since = tree["since_log"]
        self._steps, self._ran, self._items = since["steps"], Counter(since["ran"]), Counter(since["items"])
        self._tokens = since.get("tokens", 0)
        self._sums = torch.tensor(since["sums"], dtype=torch.float64)
        self._total, self._weights = since["total"], dict(since["weights"])

    def _reset(self) -> None:
        self._steps, self._tokens, self._total = 0, 0, 0.0
        self._ran: Counter[str] = Counter()
        self._items: Counter[str] = Counter()
        self._sums = torch.zeros(len(CHANNELS), dtype=torch.float64)
        self._weights: dict[str, float] = dict.fromkeys(CHANNELS, 0.0)


class EvaluationSums:
    """Sums over an evaluation, so that its losses are those of all items and not means of means."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(CHANNELS), dtype=torch.float64)
        self._items = torch.zeros(len(CHANNELS), dtype=torch.float64)

    def add(self, components: LossComponents) -> None:
        items = torch.tensor([components.counts.get(name, 0) for name in CHANNELS], dtype=torch.float64)
        values = torch.stack([getattr(components, name).detach() for name in CHANNELS]).double().cpu()
        self._sums += values * items
        self._items += items

    def both(self) -> Tensor:
        """(2, 3), to be added up over processes."""
        return torch.stack([self._sums, self._items])

    @staticmethod
    def metrics(both: Tensor, weights: Mapping[str, float]) -> dict[str, float]:
        """`total` and each channel that had items."""
        sums, items = both.cpu().double().tolist()
        means = {name: total / count for name, total, count in zip(CHANNELS, sums, items, strict=True) if count}
        total = sum(weights[name] * value for name, value in means.items())
        return {"total": total, **{NAMES[name]: value for name, value in means.items()}}


def weighted_total(components: LossComponents, weights: Mapping[str, float]) -> Tensor:
    """The loss that is trained on; `compose_loss` itself gives channel 1 a weight of 1."""
    return components.total if weights[CHANNELS[0]] == 1.0 else weighted_sum(components, weights)


def weighted_sum(components: LossComponents, weights: Mapping[str, float]) -> Tensor:
    """The same from the channels alone, whatever weights they were computed with."""
    return sum((weights[name] * getattr(components, name) for name in CHANNELS), start=components.lm_ce.new_zeros(()))
