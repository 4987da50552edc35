"""Add channels 2 and 3 to a GRPO trainer's micro-step: loss terms, state between steps, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.tree_batch import TreeBatch
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.compose import compose_loss
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.rollouts.hint_distillation import ChannelTerm, HintDistillation, MicroStep
from composer_replication.trainer.rollouts.hint_gate import HintGate
from composer_replication.trainer.teacher_keeper import TeacherKeeper, load_local_state, local_state, reshard

if TYPE_CHECKING:
    from composer_replication.trainer.composer.logged_batches import LoggedBatch, LoggedStore


SumOver = Callable[[Tensor], Tensor]


class ComposerChannels:
    """Channels 2 and 3 in one run: their losses, the teacher, the TAID schedule and the hint gate."""

    def __init__(
        self,
        settings: ChannelSettings,
        teacher: TeacherKeeper,
        *,
        weighting: RowWeighting | None = None,
        logged: LoggedStore | None = None,
        hint_gate: HintGate | None = None,
        sum_over: SumOver,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.settings, self.teacher, self.logged, self.hint_gate = settings, teacher, logged, hint_gate
        self._weighting, self._sum_over = weighting, sum_over
        self.rollouts = HintDistillation(
            settings,
            teachers=teacher.shares,
            taid_t=self._taid_t,
            weighting=weighting,
            hint_gate=hint_gate,
            sum_over=sum_over,
            autocast=autocast,
        )
        self.taid: TAIDScheduler | None = None
        self._taid_losses: list[tuple[float, float]] = []

    def policy_and_rollout_term(
        self, model: nn.Module, inputs: Mapping[str, Any], micro_step: MicroStep, run_policy: Callable[[], Tensor]
    ) -> tuple[Tensor, ChannelTerm | None]:
        """Return GRPO's loss, and channel 2's term on the rollouts, or None if none of them has an erring turn."""
        loss, term = self.rollouts.policy_and_term(model, inputs, micro_step, run_policy)
        if term is not None and micro_step.is_training and term.items and self.rollouts.alpha(micro_step) > 0:
            # TAID's schedule follows the loss of a whole step, so micro-steps are collected until it ends.
            self._taid_losses.append((term.mean, term.items))
        return loss, term

    def logged_term(self, model: nn.Module, micro_step: MicroStep, device: torch.device) -> dict[str, ChannelTerm]:
        """Return the terms for channels 2 and 3 on the next logged batch, by channel.

        Their losses are shares of one accumulated optimizer step.
        """
        assert self.logged is not None
        batch = self.logged.next_batch(device)
        counts = counts_of(batch)
        names = list(counts)
        totals = self._sum_over(torch.tensor([float(counts[name]) for name in names], device=device)).tolist()
        shares = {
            name: total * micro_step.accumulation / micro_step.num_processes
            for name, total in zip(names, totals, strict=True)
        }
        weights = {"alpha_sdpo": self.alpha(micro_step), "beta_replay": self.settings.beta_replay}
        options: dict[str, Any] = self.settings.loss_options() | weights | {"taid_t": self._taid_t(micro_step)}
        options |= {"sdpo_teachers": self.teacher.shares(), "sdpo_weighting": self._weighting}
        denominators = {name: share for name, share in shares.items() if share}
        losses = compose_loss(model, batch, denominators=denominators, **options)
        values = {"sdpo_jsd": losses.sdpo_jsd, "trace_replay_dpo": losses.trace_replay_dpo}
        # Logged batches have no rows in channel 1, so this is exactly 0. Its backward still runs through every layer,
        # as DDP and FSDP2 need on processes whose channels have no items.
        zero = losses.lm_ce
        scale = {"sdpo_jsd": weights["alpha_sdpo"], "trace_replay_dpo": weights["beta_replay"]}
        # A channel with weight 0 was not computed, so its value of 0 must not be logged as a mean over its items.
        ran = {name: total if scale[name] > 0 else 0.0 for name, total in zip(names, totals, strict=True)}
        terms = {
            name: ChannelTerm(scale[name] * values[name] + zero, self._mean(values[name], shares[name], items), items)
            for name, items in ran.items()
        }
        if terms["sdpo_jsd"].items:
            self._taid_losses.append((terms["sdpo_jsd"].mean, terms["sdpo_jsd"].items))
        return terms

    def alpha(self, micro_step: MicroStep) -> float:
        return self.settings.alpha_at(micro_step.num_finished_steps, micro_step.total_steps)

    def after_step(self, model: nn.Module, step: int, *, ends_generation: bool = True) -> str | None:
        """Update the teacher, TAID's t and the gate after an optimizer step; return the gate's message, if any."""
        reshard(self.teacher)
        self.teacher.after_step(model)
        items = sum(count for _, count in self._taid_losses)
        if self.taid is not None and items:
            self.taid.update_t(sum(mean * count for mean, count in self._taid_losses) / items, step)
        self._taid_losses.clear()
        return (
            None if self.hint_gate is None else self.hint_gate.after_step(step, is_generation_complete=ends_generation)
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with this process's shards of the teacher."""
        return {
            "teacher": local_state(self.teacher),
            "taid": None if self.taid is None else self.taid.state_dict(),
            "logged": None if self.logged is None else self.logged.sampler.state(),
            "hints": None if self.hint_gate is None else self.hint_gate.state(),
        }

    def load_state(self, tree: Mapping[str, Any], total_steps: int) -> None:
        """Restore the state that `state` returned."""
        load_local_state(self.teacher, tree["teacher"])
        if tree["taid"] is not None:
            self.taid = self.settings.taid_schedule(total_steps)
            self.taid.load_state_dict(tree["taid"])
        if tree["logged"] is not None and self.logged is not None:
            self.logged.sampler.load_state(tree["logged"])
        # Checkpoints saved by earlier versions have no "hints".
        if self.hint_gate is not None and tree.get("hints") is not None:
            self.hint_gate.load_state(tree["hints"])

    def _taid_t(self, micro_step: MicroStep) -> float | None:
        if self.settings.sdpo_wrapper != "taid":
            return None
        # The schedule needs the number of steps, which is known only in training.
        if self.taid is None and not micro_step.is_training:
            return self.settings.taid_start
        if self.taid is None:
            self.taid = self.settings.taid_schedule(micro_step.total_steps)
        return self.taid.t

    def _mean(self, value: Tensor, share: float, total: float) -> float:
        if not total:
            return 0.0
        return float(self._sum_over(value.detach().float() * share)) / total


def counts_of(batch: LoggedBatch) -> dict[str, int]:
    """Return the number of target rows for channel 2 and the number of pairs for channel 3 in a batch."""
    if isinstance(batch, TreeBatch):
        counts = batch.counts(hints=True, pairs=True)
        return {name: counts.get(name, 0) for name in ("sdpo_jsd", "trace_replay_dpo")}
    rows, pairs = batch.get("sdpo_student_index"), batch.get("dpo_chosen_input_ids")
    return {
        "sdpo_jsd": 0 if rows is None else int(rows.shape[0]),
        "trace_replay_dpo": 0 if pairs is None else int(pairs.shape[0]),
    }


ROLLOUT_SITES, LOGGED_SITES, LOGGED_PAIRS = "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo"
"""The channels' names in metrics."""


class Weights(NamedTuple):
    """The weights of channels 2 and 3 in a micro-step; `rollout_alpha` is 0 if the gate is closed."""

    alpha: float
    beta: float
    rollout_alpha: float

    def of(self, name: str) -> float:
        return {ROLLOUT_SITES: self.rollout_alpha, LOGGED_SITES: self.alpha, LOGGED_PAIRS: self.beta}[name]


class ChannelMetrics:
    """Sums of the channels' losses by mode ("train", "eval"), and which channels ran in the current optimizer step.

    TRL logs the mean of all values appended since the last log line. Micro-steps have different numbers of items, so a
    mean of their means would differ from the mean over the whole step. Sums and counts are kept instead.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, tuple[float, float]]] = {"train": {}, "eval": {}}
        self._ran: dict[str, bool] = {}

    def add(self, mode: str, name: str, total: float, items: float) -> None:
        """Add the metric `name` as a sum over `items` items on all processes."""
        before, count = self._sums[mode].get(name, (0.0, 0.0))
        self._sums[mode][name] = (before + total, count + items)

    def add_terms(
        self, metrics: Any, terms: Mapping[str, ChannelTerm | None], weights: Weights, micro_step: MicroStep
    ) -> None:
        """Add the channels' terms from one micro-step, and append their weights and item counts to TRL's `metrics`.

        A term is None if its channel was not computed; a channel without items adds nothing to its mean. A channel ran
        in a step if it had items and a weight above 0.
        """
        mode = "train" if micro_step.is_training else "eval"
        metrics["loss/alpha_sdpo"].append(weights.alpha)
        metrics["loss/beta_replay"].append(weights.beta)
        for name, term in terms.items():
            items = 0.0 if term is None else term.items
            ran = items > 0 and weights.of(name) > 0
            # TRL logs the mean over micro-steps, so this factor makes the metric a count per step.
            metrics[f"items/{name}"].append(items * micro_step.accumulation)
            if micro_step.is_training:
                self._ran[name] = self._ran.get(name, False) or ran
            else:
                metrics[f"ran/{name}"].append(float(ran))
            if term is not None and items:
                self.add(mode, f"loss/{name}", term.mean * items, items)

    def end_step(self, metrics: Any) -> None:
        """Append, for the optimizer step that has just ended, which channels ran in any of its micro-steps."""
        for name, ran in self._ran.items():
            metrics[f"ran/{name}"].append(float(ran))
        self._ran.clear()

    def take(self, mode: str) -> dict[str, float]:
        """Return the mean of every metric since the last call, and reset the sums."""
        means = {name: total / max(items, 1.0) for name, (total, items) in self._sums[mode].items()}
        self._sums[mode].clear()
        return means

    def state(self) -> dict[str, Any]:
        return {mode: {name: list(pair) for name, pair in sums.items()} for mode, sums in self._sums.items()}

    def load_state(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        self._sums = {mode: {name: (pair[0], pair[1]) for name, pair in sums.items()} for mode, sums in tree.items()}


class MicroStepLoss:
    """Computes a trainer's loss in a micro-step: the GRPO loss plus the terms of channels 2 and 3."""

    def __init__(
        self, trainer: Any, channels: ComposerChannels, channel_metrics: ChannelMetrics, *, wants_sites: bool
    ) -> None:
        self._trainer, self._channels, self._channel_metrics, self._wants_sites = (
            trainer,
            channels,
            channel_metrics,
            wants_sites,
        )

    def compute(self, original: Callable[..., Tensor], model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return a micro-step's total loss; `original` is TRL's own `_compute_loss`."""
        channels = self._channels
        if not self._wants_sites and channels.logged is None:
            return original(model, inputs)
        micro_step, accelerator = self.current_step(), self._trainer.accelerator
        hints: ChannelTerm | None = None
        if self._wants_sites:
            policy, hints = channels.policy_and_rollout_term(model, inputs, micro_step, lambda: original(model, inputs))
        else:
            # Without sites, TRL's loss is unchanged, and only the loss on logged batches is added.
            policy = original(model, inputs)
        total = policy if hints is None else policy + hints.loss
        terms: dict[str, ChannelTerm] = {}
        if channels.logged is not None and micro_step.is_training:
            with accelerator.autocast():
                terms = channels.logged_term(model, micro_step, accelerator.device)
            for term in terms.values():
                total = total + term.loss
        self._log(policy, total, hints, terms, micro_step)
        return total

    def current_step(self) -> MicroStep:
        """Return the position of the current micro-step."""
        trainer = self._trainer
        is_training, per_generation = trainer.model.training, trainer.args.steps_per_generation or 1
        return MicroStep(
            num_finished_steps=trainer.state.global_step,
            total_steps=trainer.state.max_steps,
            accumulation=trainer.current_gradient_accumulation_steps if is_training else 1,
            num_processes=trainer.accelerator.num_processes,
            steps_per_generation=per_generation,
            is_training=is_training,
            temperature=trainer.temperature,
            is_first_pass=trainer._step % (per_generation * trainer.num_iterations) < per_generation,
        )

    def _log(
        self,
        policy: Tensor,
        total: Tensor,
        hints: ChannelTerm | None,
        logged: dict[str, ChannelTerm],
        micro_step: MicroStep,
    ) -> None:
        """Append a micro-step's metrics under their documented names."""
        metrics = self._trainer._metrics["train" if micro_step.is_training else "eval"]
        # TRL's losses are already divided by the accumulation, so multiplying makes the logged mean that of a step.
        both = self._trainer.sum_over(torch.stack([policy.detach(), total.detach()]).float()) / micro_step.num_processes
        metrics["loss/grpo"].append(float(both[0]) * micro_step.accumulation)
        metrics["loss/total"].append(float(both[1]) * micro_step.accumulation)
        terms: dict[str, ChannelTerm | None] = {ROLLOUT_SITES: hints} if self._wants_sites else {}
        logged_terms = {LOGGED_SITES: logged.get("sdpo_jsd"), LOGGED_PAIRS: logged.get("trace_replay_dpo")}
        terms |= logged_terms if logged else {}
        channels = self._channels
        weights = Weights(
            channels.alpha(micro_step), channels.settings.beta_replay, channels.rollouts.alpha(micro_step)
        )
        self._channel_metrics.add_terms(metrics, terms, weights, micro_step)
