"""What a run with rollouts logs of its channels: means over items, and shares and counts of optimiser steps.

TRL takes the mean of what was appended since the last line. Micro-steps hold different numbers of items, so a mean of
their means would be another figure than that of the same step in one piece; sums and counts are kept instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.trainer.composer.channels import Clock, Term

ROLLOUT_SITES, LOGGED_SITES, LOGGED_PAIRS = "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo"
"""The channels as metrics call them."""


class ComposerFigures:
    """Sums of figures by mode ("train", "eval"), and which channels ran in the optimiser step at hand."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, tuple[float, float]]] = {"train": {}, "eval": {}}
        self._ran: dict[str, bool] = {}

    def add(self, mode: str, name: str, total: float, items: float) -> None:
        """A sum over so many items, on all processes."""
        before, count = self._sums[mode].get(name, (0.0, 0.0))
        self._sums[mode][name] = (before + total, count + items)

    def add_terms(
        self, metrics: Any, terms: Mapping[str, Term | None], alpha: float, beta: float, clock: Clock
    ) -> None:
        """A micro-step's channels, by the names of metrics, into `metrics`; None is a channel that had nothing.

        A channel without items adds nothing to its mean. It ran in a step where it had items and a weight.
        """
        mode = "train" if clock.is_training else "eval"
        metrics["loss/alpha_sdpo"].append(alpha)
        metrics["loss/beta_replay"].append(beta)
        for name, term in terms.items():
            items = 0.0 if term is None else term.items
            ran = items > 0 and (beta if name == LOGGED_PAIRS else alpha) > 0
            metrics[f"items/{name}"].append(items * clock.accumulation)  # the mean of these is that of a whole step
            if clock.is_training:
                self._ran[name] = self._ran.get(name, False) or ran
            else:
                metrics[f"ran/{name}"].append(float(ran))
            if term is not None and items:
                self.add(mode, f"loss/{name}", term.mean * items, items)

    def end_step(self, metrics: Any) -> None:
        """After an optimiser step: which channels ran in it, in any of its micro-steps."""
        for name, ran in self._ran.items():
            metrics[f"ran/{name}"].append(float(ran))
        self._ran.clear()

    def take(self, mode: str) -> dict[str, float]:
        """The means since the last call."""
        found = {name: total / max(items, 1.0) for name, (total, items) in self._sums[mode].items()}
        self._sums[mode].clear()
        return found

    def state(self) -> dict[str, Any]:
        return {mode: {name: list(each) for name, each in sums.items()} for mode, sums in self._sums.items()}

    def load_state(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        self._sums = {mode: {name: (each[0], each[1]) for name, each in sums.items()} for mode, sums in tree.items()}
