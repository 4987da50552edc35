"""Implement TRL's generation step and loss for `ComposerReplicationTrainer`, with the metrics of both.

TRL has no hook between sampling and its buffer of micro-batches, so `trainer.overrides` passes TRL's private methods to
this module. `original` is always TRL's own method.

    GenerationStep    locates error sites in rollouts, resamples groups with equal rewards, and penalizes KL divergence
    ComposerChannels  computes the loss terms of channels 2 and 3, and holds their state between steps
    LossStep          adds these terms to the GRPO loss of a micro-step
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.tree_batch import TreeBatch
from composer_replication.errors import InputError, explain
from composer_replication.loss.grpo import group_advantages
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.optional import require
from composer_replication.trainer.logged_batches import LoggedBatch, LoggedStore
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.compose import compose_loss
from composer_replication.trainer.objective.distributed import adapter_disabled
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.hint_distillation import (
    ITEMS,
    SITES,
    ChannelTerm,
    ErringTurnFinder,
    ErringTurns,
    HintDistillation,
    MicroStep,
)
from composer_replication.trainer.rollouts.hint_gate import HintGate
from composer_replication.trainer.rollouts.resample import ImagesBySample, ResampledBatch, resample, rows_of_groups
from composer_replication.trainer.rollouts.sites import RolloutOptions, ToolRecord, gather_rollouts
from composer_replication.trainer.rollouts.unrelated_hints import add_unrelated_hints, replace_by_unrelated_hints
from composer_replication.trainer.rollouts.worlds.verifiers import REWARD as WORLD_REWARD
from composer_replication.trainer.teacher_keeper import TeacherKeeper, load_local_state, local_state, reshard

_Batch = dict[str, Any]


@dataclass(eq=False)
class _GenerationCall:
    """Intermediate results that TRL's methods produce in one call of `_generate_and_score_completions`."""

    rows: list[dict[str, Any]]
    """The data set row for each rollout; TRL passes only the prompts to a rollout function."""
    is_resampling: bool
    prompts: list[Any] = field(default_factory=list[Any])
    generated: tuple[Any, ...] = ()
    """The return value of TRL's `_generate`."""
    tool_records: list[ToolRecord] | None = None
    rewards: Tensor | None = None
    """The weighted sum of the rewards of each rollout on all processes; NaN if no function judged it."""


class GenerationStep:
    """A wrapper of a trainer's sampling that locates error sites, resamples groups, penalizes KL and logs metrics.

    Args:
        trainer: The TRL trainer.
        options: How to generate rollouts and treat their error sites.
        channel_metrics: The sums to which this class adds its metrics.
        wants_sites: Whether to locate error sites.
        hint_gate: Channel 2's gate, which requests comparisons with an unrelated hint; None if there is no gate.
        start_model: The initial model, if the trainer itself does not hold the initial weights.
    """

    def __init__(
        self,
        trainer: Any,
        options: RolloutOptions,
        channel_metrics: ChannelMetrics,
        *,
        wants_sites: bool,
        hint_gate: HintGate | None,
        start_model: nn.Module | None = None,
    ) -> None:
        self._trainer, self.options = trainer, options
        self._channel_metrics, self.start_model = channel_metrics, start_model
        self._hint_gate = hint_gate
        self.known_hints: dict[str, str] = {}
        """The latest hint for each kind of error, used as unrelated hints if rollouts contain only one kind."""
        self._finder = self._make_finder() if wants_sites else None
        self.site_counts: Counter[str] = Counter()
        self.num_rollouts = 0
        self._call: _GenerationCall | None = None
        self.fast = RolloutGenerator(batch=options.generation_batch) if options.fast_generation == "auto" else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The data set row for each rollout that is being generated."""
        return [] if self._call is None else self._call.rows

    def generate(self, original: Callable[..., tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        """Replace TRL's `_generate`, and record its result and failed tool calls for locating error sites."""
        if self.fast is None or self._trainer.use_vllm:
            return self._generate_watched(original, prompts)
        before = Counter(self.fast.counts)
        with self.fast.rollout(budget=self._trainer.max_completion_length, keep=bool(self._trainer.tools)):
            generated = self._generate_watched(original, prompts)
        self._count_generated(self.fast.counts - before, self.fast.counts["cache_bytes"])
        return generated

    def _count_generated(self, counts: Counter[str], cache_bytes: int) -> None:
        """Log the share of calls to the fast generator, the share of prompt tokens it read, and its cache's size."""
        names = ("fast_calls", "usual_calls", "read_tokens", "prompt_tokens")
        # The last 1.0 counts the processes, so that memory can be logged as a mean over processes.
        numbers = [float(counts[name]) for name in names] + [cache_bytes / 2**30, 1.0]
        summed = self._trainer.sum_over(torch.tensor(numbers, device=self._trainer.accelerator.device))
        fast, usual, read, prompt, gib, processes = summed.tolist()
        # Both are 0 if a rollout function or vLLM generated instead of the model.
        if fast + usual:
            self._add_metric("generation/fast_calls", fast, fast + usual)
        if fast:
            self._add_metric("generation/read_share", read, prompt)
            self._add_metric("generation/cache_gib", gib, processes)

    def generate_turn(self, original: Callable[..., tuple[Any, Any]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Replace TRL's `_generate_single_turn`: call it while the fast generator replaces `model.generate`."""
        if self.fast is None or self._trainer.use_vllm:
            return original(*args, **kwargs)
        with self.fast.replace_generate(self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)):
            return original(*args, **kwargs)

    def _generate_watched(self, original: Callable[..., tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        trainer, call = self._trainer, self._call
        if self._finder is None or call is None:
            return original(prompts)
        # TRL has just created one dict of tool functions per rollout; wrap the functions to record their errors.
        if trainer.tools:
            call.tool_records = [ToolRecord() for _ in prompts]
            for kind in (trainer._sync_tool_dicts, trainer._async_tool_dicts):
                kind[:] = [record.wrap_tools(tools) for record, tools in zip(call.tool_records, kind, strict=True)]
        call.prompts, call.generated = prompts, original(prompts)
        return call.generated

    def score(self, original: Callable[..., _Batch], inputs: list[dict[str, Any]]) -> _Batch:
        """Replace TRL's `_generate_and_score_completions`: locate error sites, resample groups, penalize KL."""
        batch, rewards = self._score_and_add_turns(original, inputs)
        if self.options.max_resamples and self._trainer.model.training:
            batch = self._resample_equal_groups(original, batch, rewards, inputs)
        if self.options.k1_coefficient:
            batch["advantages"] = self._advantages_minus_k1(batch)
        advantages = batch["advantages"]
        # TRL does not log advantages, but the diagnosis needs them, since nothing is learned if all advantages are 0.
        sizes = torch.stack([advantages.abs().sum(), advantages.new_tensor(float(advantages.numel()))])
        self._add_metric("advantages/mean_abs", *self._trainer.sum_over(sizes).tolist())
        if self._finder is not None:
            # Channel 2's loss is divided by the number of tokens in all erring turns on all processes.
            items = sum(turn.end - turn.start for turns in batch[SITES] for turn in turns)
            device = self._trainer.accelerator.device
            batch[ITEMS] = self._trainer.sum_over(torch.tensor(float(items), device=device))
        return batch

    def rewards(self, original: Callable[..., Tensor], inputs: list[dict[str, Any]], *args: Any) -> Tensor:
        """Replace TRL's `_calculate_rewards`, and log for each reward function the share of rollouts without a reward.

        TRL silently ignores a missing reward. A rollout whose environment broke gets no reward from any function.

        Raises:
            InputError: No reward function returned a number for any rollout.
        """
        rewards, names = original(inputs, *args), self._trainer.reward_func_names
        if broken := [number for number, row in enumerate(inputs) if math.isnan(row.get(WORLD_REWARD, 0.0))]:
            # Otherwise a penalty, such as the overlong penalty, could be the only reward for a broken rollout.
            rewards[broken] = torch.nan
        missing = rewards.isnan()
        for column, name in enumerate(names):
            self._add_metric(f"rewards/{name}/unjudged", float(missing[:, column].sum()), missing.shape[0])
        call = self._call
        if bool(missing.all()) and not (call and call.is_resampling):
            fix = "Return a number for at least one rollout; None means that the function does not judge the rollout."
            got = f"NaN or None from {', '.join(names)} for all {rewards.shape[0]} rollouts"
            raise InputError(explain("rewards", got=got, expected="numbers", fix=fix))
        summed = (rewards * self._trainer.reward_weights.to(rewards.device)).nansum(1)
        if call is not None:
            call.rewards = summed.masked_fill(missing.all(1), torch.nan)
        return rewards

    def _score_and_add_turns(
        self, original: Callable[..., _Batch], inputs: list[dict[str, Any]], *, is_resampling: bool = False
    ) -> tuple[_Batch, Tensor | None]:
        """Return TRL's batch, to which the rollouts' erring turns are added, and the rewards on all processes."""
        call = self._call = _GenerationCall(inputs, is_resampling)
        try:
            batch = original(inputs)
        finally:
            self._call = None
        if self._finder is None:
            return batch, call.rewards
        rollouts = self._find_turns(self._finder, call)
        # TRL masks truncated rollouts out with the attention mask, so channel 2 cannot use their turns.
        _drop_turns_where(rollouts, batch["completion_mask"].sum(1) == 0, "masked_by_trl")
        if self.options.only_failed_rollouts:
            _drop_turns_where(rollouts, batch["advantages"] > 0, "better_than_its_group")
        seed = f"{self._trainer.args.seed}:{self._trainer.state.global_step}"
        # Taken before own hints are replaced, which gives turns hints for other kinds of errors in a control run.
        own_hints = {turn.kind: turn.hint for rollout in rollouts for turn in rollout.turns}
        if self.options.hints == "other_kind":
            replace_by_unrelated_hints(self._finder, rollouts, seed)
        step, is_training = self._trainer.state.global_step, self._trainer.model.training
        if self._hint_gate is not None and self._hint_gate.wants_comparisons(step, is_training=is_training):
            add_unrelated_hints(self._finder, rollouts, seed, self.known_hints)
        self.known_hints |= own_hints
        batch[SITES] = [rollout.turns for rollout in rollouts]
        self._count_sites(rollouts)
        return batch, call.rewards

    def _find_turns(self, finder: ErringTurnFinder, call: _GenerationCall) -> list[ErringTurns]:
        trainer = self._trainer
        environments, names = trainer.environments, getattr(trainer, "_batch_environments", None)

        def tools_of(number: int) -> Sequence[Any]:
            return trainer.tools if environments is None or names is None else trainer._env_tools[names[number]]

        rollouts = gather_rollouts(
            call.prompts,
            call.generated,
            name=f"step-{trainer.state.global_step}",
            environments=environments,
            tools_of=tools_of,
            raised=call.tool_records,
        )
        return [finder.find(rollout) for rollout in rollouts]

    def _count_sites(self, rollouts: Sequence[ErringTurns]) -> None:
        trainer = self._trainer
        counts = sum((rollout.counts for rollout in rollouts), Counter[str]())
        self.site_counts.update(counts)
        numbers = [counts[name] for name in ("turns", "sites", "without_contrast")]
        numbers += [sum(len(rollout.turns) for rollout in rollouts), len(rollouts)]
        local_sums = torch.tensor(numbers, dtype=torch.float32, device=trainer.accelerator.device)
        num_turns, num_sites, num_plain, num_trained, num_rollouts = trainer.sum_over(local_sums).tolist()
        self._add_metric("sites/per_100_turns", 100.0 * num_sites, num_turns)
        self._add_metric("sites/taught_per_rollout", num_trained, num_rollouts)
        if num_trained and self._hint_gate is not None and self._hint_gate.has_contrast:
            self._add_metric("sites/without_contrast", num_plain, num_trained)
        self.num_rollouts += int(num_rollouts)
        trainer._metrics[trainer.mode()]["rollouts/total"] = [float(self.num_rollouts)]

    def _resample_equal_groups(
        self, original: Callable[..., _Batch], batch: _Batch, rewards: Tensor | None, inputs: list[dict[str, Any]]
    ) -> _Batch:
        """Return the batch after replacing groups with equal rewards by new samples for the same prompts.

        In an equal-reward group all advantages are 0, so the group contributes nothing to the gradient.
        """
        trainer = self._trainer
        assert rewards is not None

        def draw(groups: list[int]) -> ResampledBatch:
            rewards_logged: list[float] = trainer._metrics["train"]["reward"]
            num_first_rewards = len(rewards_logged)
            rows = rows_of_groups(inputs, groups, trainer.num_generations)
            new_batch, new_rewards = self._score_and_add_turns(original, rows, is_resampling=True)
            # Only prompts with equal rewards are resampled, so logging these rewards would bias the mean reward.
            del rewards_logged[num_first_rewards:]
            assert new_rewards is not None
            return ResampledBatch(new_batch, new_rewards)

        images = require("trl.trainer.utils", extra="train")
        merged, rewards, report = resample(
            batch,
            rewards,
            draw,
            num_generations=trainer.num_generations,
            max_resamples=self.options.max_resamples,
            pad_id=int(trainer._tokenizer.pad_token_id),
            num_processes=trainer.accelerator.num_processes,
            rank=trainer.accelerator.process_index,
            total=trainer.sum_over,
            images=ImagesBySample(images.split_pixel_values_by_grid, images.unsplit_pixel_values_by_grid),
        )
        for name, value in report.metrics().items():
            trainer._metrics["train"][name].append(value)
        if report.rounds and trainer.scale_rewards == "batch":
            # "batch" divides by the standard deviation over all rewards, which resampling has changed.
            all_advantages = group_advantages(rewards, trainer.num_generations, "batch")
            size = merged["prompt_ids"].shape[0]
            merged["advantages"] = all_advantages[size * trainer.accelerator.process_index :][:size]
        return merged

    @torch.no_grad()
    def _advantages_minus_k1(self, batch: _Batch) -> Tensor:
        """Return advantages per token (B, T), reduced by the KL penalty.

        The penalty is `k1_coefficient` * (log p - log p under the initial model).
        """
        trainer = self._trainer
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        count, size = batch["completion_ids"].shape[1], trainer.args.per_device_train_batch_size

        def logprobs(model: nn.Module) -> Tensor:
            return trainer._get_per_token_logps_and_entropies(model, ids, mask, count, batch_size=size)[0]

        # TRL stores these log-probs only if the weights have changed since the rollouts were sampled.
        now = batch.get("old_per_token_logps")
        now = logprobs(trainer.model) if now is None else now
        start = self.start_model or trainer.ref_model or trainer.model
        with self._initial_weights(start):
            initial = logprobs(start)
        sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
        k1 = (now - initial) * sampled
        self._add_metric("kl_to_start", *trainer.sum_over(torch.stack([k1.sum(), sampled.sum().to(k1)])).tolist())
        advantages = batch["advantages"]
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        return advantages - self.options.k1_coefficient * k1

    def _initial_weights(self, start: nn.Module) -> AbstractContextManager[Any]:
        trainer = self._trainer
        return adapter_disabled(trainer.accelerator.unwrap_model(start)) if start is trainer.model else nullcontext()

    def _make_finder(self) -> ErringTurnFinder:
        trainer = self._trainer
        template = trainer.chat_template or trainer._tokenizer.chat_template
        renderer = Renderer(trainer._tokenizer, chat_template=template, template_options=trainer.chat_template_kwargs)
        return ErringTurnFinder(renderer, self.options)

    def _add_metric(self, name: str, total: float, items: float) -> None:
        self._channel_metrics.add(self._trainer.mode(), name, total, items)


def _drop_turns_where(rollouts: Sequence[ErringTurns], is_dropped: Tensor, reason: str) -> None:
    for rollout, drop in zip(rollouts, is_dropped.tolist(), strict=True):
        if drop and rollout.turns:
            rollout.counts[f"dropped:{reason}"] += len(rollout.turns)
            rollout.turns.clear()


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
        sum_over: Callable[[Tensor], Tensor],
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
        """Return GRPO's loss, and channel 2's term on the rollouts (None if no rollout has an erring turn)."""
        loss, term = self.rollouts.policy_and_term(model, inputs, micro_step, run_policy)
        if term is not None and micro_step.is_training and term.items and self.rollouts.alpha(micro_step) > 0:
            # TAID's schedule follows the loss of a whole step, so micro-steps are collected until it ends.
            self._taid_losses.append((term.mean, term.items))
        return loss, term

    def logged_term(self, model: nn.Module, micro_step: MicroStep, device: torch.device) -> dict[str, ChannelTerm]:
        """Return the terms for channels 2 and 3 on the next logged batch, by channel.

        Each loss is divided by the number of micro-steps in an optimizer step, over which gradients accumulate.
        """
        assert self.logged is not None
        batch = self.logged.next_batch(device)
        counts = _item_counts(batch)
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
        """Update the teacher, the TAID schedule and the hint gate after an optimizer step.

        Returns the gate's message, or None.
        """
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
        """Return the state for a checkpoint; of the teacher's weights, only this process's shards are included."""
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


def _item_counts(batch: LoggedBatch) -> dict[str, int]:
    """Return a batch's number of target rows for channel 2, and its number of pairs for channel 3."""
    if isinstance(batch, TreeBatch):
        counts = batch.counts(hints=True, pairs=True)
        return {name: counts.get(name, 0) for name in ("sdpo_jsd", "trace_replay_dpo")}
    rows, pairs = batch.get("sdpo_student_index"), batch.get("dpo_chosen_input_ids")
    return {
        "sdpo_jsd": 0 if rows is None else int(rows.shape[0]),
        "trace_replay_dpo": 0 if pairs is None else int(pairs.shape[0]),
    }


_ROLLOUT_SITES, LOGGED_SITES, LOGGED_PAIRS = "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo"
"""The channels' names in metrics."""


class _Weights(NamedTuple):
    """The weights of channels 2 and 3 in a micro-step; `rollout_alpha` is 0 if the gate is closed."""

    alpha: float
    beta: float
    rollout_alpha: float

    def of(self, name: str) -> float:
        return {_ROLLOUT_SITES: self.rollout_alpha, LOGGED_SITES: self.alpha, LOGGED_PAIRS: self.beta}[name]


class ChannelMetrics:
    """Sums of the channels' losses for each mode ("train", "eval"), and which channels ran in the current step.

    TRL logs the mean of all values appended since the last log line. Micro-steps have different numbers of items, so
    the mean of their means would differ from the mean over the whole step. Sums and counts are kept instead.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, tuple[float, float]]] = {"train": {}, "eval": {}}
        self._ran: dict[str, bool] = {}

    def add(self, mode: str, name: str, total: float, items: float) -> None:
        """Add `items` items of the metric `name`, summed over all processes, to its running sum."""
        before, count = self._sums[mode].get(name, (0.0, 0.0))
        self._sums[mode][name] = (before + total, count + items)

    def add_terms(
        self, metrics: Any, terms: Mapping[str, ChannelTerm | None], weights: _Weights, micro_step: MicroStep
    ) -> None:
        """Add the channels' terms from one micro-step, and append their weights and item counts to TRL's `metrics`.

        A term is None if its channel was not computed. A channel without items does not change its mean. A channel ran
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
        """Append, to TRL's metrics, whether each channel ran in the optimizer step that has just ended."""
        for name, ran in self._ran.items():
            metrics[f"ran/{name}"].append(float(ran))
        self._ran.clear()

    def take(self, mode: str) -> dict[str, float]:
        """Return the mean of each metric over all items since the last call, and reset the sums."""
        means = {name: total / max(items, 1.0) for name, (total, items) in self._sums[mode].items()}
        self._sums[mode].clear()
        return means

    def state(self) -> dict[str, Any]:
        return {mode: {name: list(pair) for name, pair in sums.items()} for mode, sums in self._sums.items()}

    def load_state(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        self._sums = {mode: {name: (pair[0], pair[1]) for name, pair in sums.items()} for mode, sums in tree.items()}


class LossStep:
    """The loss of a trainer's micro-steps: the GRPO loss plus the terms of channels 2 and 3."""

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
        """Append a micro-step's losses and other metrics to TRL's metrics."""
        metrics = self._trainer._metrics["train" if micro_step.is_training else "eval"]
        # TRL's losses are already divided by the accumulation, so multiplying makes the logged mean that of a step.
        both = self._trainer.sum_over(torch.stack([policy.detach(), total.detach()]).float()) / micro_step.num_processes
        metrics["loss/grpo"].append(float(both[0]) * micro_step.accumulation)
        metrics["loss/total"].append(float(both[1]) * micro_step.accumulation)
        terms: dict[str, ChannelTerm | None] = {_ROLLOUT_SITES: hints} if self._wants_sites else {}
        logged_terms = {LOGGED_SITES: logged.get("sdpo_jsd"), LOGGED_PAIRS: logged.get("trace_replay_dpo")}
        terms |= logged_terms if logged else {}
        channels = self._channels
        weights = _Weights(
            channels.alpha(micro_step), channels.settings.beta_replay, channels.rollouts.alpha(micro_step)
        )
        self._channel_metrics.add_terms(metrics, terms, weights, micro_step)
