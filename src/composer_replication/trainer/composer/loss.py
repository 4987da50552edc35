"""A micro-step's loss, GRPO's with both channels' terms, and what is logged of them: means over items, shares, counts.

TRL takes the mean of what was appended since the last line. Micro-steps hold different numbers of items, so a mean of
their means would be another figure than that of the same step in one piece; sums and counts are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.trainer.composer.channels import Clock, ComposerChannels, Term

ROLLOUT_SITES, LOGGED_SITES, LOGGED_PAIRS = "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo"
"""The channels as metrics call them."""


class Weights(NamedTuple):
    """What the channels count for in a micro-step: channels 2 and 3, and channel 2 on rollouts, which may rest."""

    alpha: float
    beta: float
    rollout_alpha: float

    def of(self, name: str) -> float:
        return {ROLLOUT_SITES: self.rollout_alpha, LOGGED_SITES: self.alpha, LOGGED_PAIRS: self.beta}[name]


class ComposerFigures:
    """Sums of figures by mode ("train", "eval"), and which channels ran in the optimiser step at hand."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, tuple[float, float]]] = {"train": {}, "eval": {}}
        self._ran: dict[str, bool] = {}

    def add(self, mode: str, name: str, total: float, items: float) -> None:
        """A sum over so many items, on all processes."""
        before, count = self._sums[mode].get(name, (0.0, 0.0))
        self._sums[mode][name] = (before + total, count + items)

    def add_terms(self, metrics: Any, terms: Mapping[str, Term | None], weights: Weights, clock: Clock) -> None:
        """A micro-step's channels, by the names of metrics, into `metrics`; None is a channel that had nothing.

        A channel without items adds nothing to its mean. It ran in a step where it had items and a weight.
        """
        mode = "train" if clock.is_training else "eval"
        metrics["loss/alpha_sdpo"].append(weights.alpha)
        metrics["loss/beta_replay"].append(weights.beta)
        for name, term in terms.items():
            items = 0.0 if term is None else term.items
            ran = items > 0 and weights.of(name) > 0
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
        means = {name: total / max(items, 1.0) for name, (total, items) in self._sums[mode].items()}
        self._sums[mode].clear()
        return means

    def state(self) -> dict[str, Any]:
        return {mode: {name: list(pair) for name, pair in sums.items()} for mode, sums in self._sums.items()}

    def load_state(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        self._sums = {mode: {name: (pair[0], pair[1]) for name, pair in sums.items()} for mode, sums in tree.items()}


class ChannelLoss:
    """The loss of one trainer's micro-steps; `original` is TRL's own."""

    def __init__(
        self, trainer: Any, channels: ComposerChannels, figures: ComposerFigures, *, wants_sites: bool
    ) -> None:
        self._trainer, self._channels, self._figures, self._wants_sites = trainer, channels, figures, wants_sites

    def compute(self, original: Callable[..., Tensor], model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        channels = self._channels
        if not self._wants_sites and channels.logged is None:
            return original(model, inputs)
        clock, accelerator = self.clock(), self._trainer.accelerator
        hints: Term | None = None
        if self._wants_sites:
            policy, hints = channels.rollout_term(model, inputs, clock, lambda: original(model, inputs))
        else:
            policy = original(model, inputs)
        total = policy if hints is None else policy + hints.loss
        terms: dict[str, Term] = {}
        if channels.logged is not None and clock.is_training:
            with accelerator.autocast():
                terms = channels.logged_term(model, clock, accelerator.device)
            for term in terms.values():
                total = total + term.loss
        self._log(policy, total, hints, terms, clock)
        return total

    def clock(self) -> Clock:
        trainer = self._trainer
        is_training, per_generation = trainer.model.training, trainer.args.steps_per_generation or 1
        return Clock(
            step=trainer.state.global_step,
            total_steps=trainer.state.max_steps,
            accumulation=trainer.current_gradient_accumulation_steps if is_training else 1,
            num_processes=trainer.accelerator.num_processes,
            steps_per_generation=per_generation,
            is_training=is_training,
            temperature=trainer.temperature,
            is_first_pass=trainer._step % (per_generation * trainer.num_iterations) < per_generation,
        )

    def _log(self, policy: Tensor, total: Tensor, hints: Term | None, logged: dict[str, Term], clock: Clock) -> None:
        """Under the names users know."""
        metrics = self._trainer._metrics["train" if clock.is_training else "eval"]
        both = self._trainer.sum_over(torch.stack([policy.detach(), total.detach()]).float()) / clock.num_processes
        metrics["loss/grpo"].append(float(both[0]) * clock.accumulation)
        metrics["loss/total"].append(float(both[1]) * clock.accumulation)
        terms: dict[str, Term | None] = {ROLLOUT_SITES: hints} if self._wants_sites else {}
        logged_terms = {LOGGED_SITES: logged.get("sdpo_jsd"), LOGGED_PAIRS: logged.get("trace_replay_dpo")}
        terms |= logged_terms if logged else {}
        channels = self._channels
        weights = Weights(channels.alpha(clock), channels.settings.beta_replay, channels.rollout_alpha(clock))
        self._figures.add_terms(metrics, terms, weights, clock)
