"""Train on logged sessions only, with all three channels, on top of `transformers.Trainer`.

    loss = lm_weight * lm_ce + alpha_sdpo * sdpo + beta_replay * replay

Each channel is a mean over all its items in an optimizer step, across micro-batches and processes. The loss therefore
does not depend on how a batch is divided into micro-batches or over processes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.batch.tree_batch import CHANNELS, TreeBatch, map_tensors, pack_batches
from composer_replication.errors import ConfigError, InactiveChannelError, InputError, StaleArtefactError, explain
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.trainer.checkpoints.manifest import check_manifest
from composer_replication.trainer.checkpoints.run_checkpoints import check_identity, model_identity
from composer_replication.trainer.checkpoints.weights import load_weights
from composer_replication.trainer.metrics_file import MetricsFile, StepCallback
from composer_replication.trainer.objective.channels import METRIC_NAMES, NO_PAIR, ChannelSettings
from composer_replication.trainer.objective.compose import LossComponents, compose_loss
from composer_replication.trainer.objective.distributed import is_sharded, unwrapped
from composer_replication.trainer.objective.fingerprint import tokenizer_digest, trained_adapter_digest, weights_digest
from composer_replication.trainer.objective.model_head import get_causal_lm
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.overrides import WithTeacher
from composer_replication.trainer.same_start import check_is_in_group, refuse_differences
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.start_model import Quantization, check_router_loss, prepare_model, shard_model
from composer_replication.trainer.teacher_keeper import (
    TeacherKeeper,
    attach_teacher,
    live_teacher_warning,
    load_local_state,
    local_state,
    reshard,
    shard_teacher,
)
from composer_replication.trainer.watch.memory_plan import MemoryPlan, free_memory, plan_memory

WARM_UP = "warm-up"
"""The name of a warm-up's training phase in the manifests of its checkpoints."""
_WEIGHT_OPTIONS: dict[str, str] = dict(zip(CHANNELS, ("lm_weight", "alpha_sdpo", "beta_replay"), strict=True))
# The key of a step's input in the dictionaries that transformers passes around.
_INPUT = "session_batch"
_log = logging.getLogger(__name__)


class OfflineTrainer(WithTeacher, Trainer):
    """A trainer for any or all of the three channels on `LoggedSessions`.

    A micro-batch is `per_device_train_batch_size` items of `sessions`, side by side in one tree batch.

    Args:
        model: A loaded model, a folder, a hub name, or `student`, the tiny model that comes with the package. Weights
            to train are kept in full precision: without an adapter, a name is loaded in fp32, and `bf16` is the
            precision of autocast.
        args: The `transformers.TrainingArguments`.
        sessions: The sessions to train on.
        settings: Settings for channels 2 and 3.
        teacher: Channel 2's teacher; a trust region by default.
        weighting: How much each token of an erring turn counts.
        lm_weight: Weight of channel 1.
        eval_sessions: The sessions to evaluate on.
        peft_config: The config of an adapter to add.
        quantization: "4bit" loads the base weights in four bits; only an adapter is then trained.
        fsdp: Shard the weights over the processes (FSDP2).
        warmed_up: The last checkpoint of a warm-up (`trainer.warmup`). Its weights are loaded, and the hint check, the
            reference log-probs and the teacher start from them.
        hint_margin: If given, train only on sites that pass the hint check with this margin.
        shuffle_seed: Makes the run a control: the same sites get hints for other kinds of errors, and half of the pairs
            are swapped.
        reference_path: The file for the pairs' reference log-probs, by default in the run directory. Missing log-probs
            are computed from the initial model, in the precision of the training steps.
        metrics_path: The file for metrics, which also go to `report_to`; default `metrics.jsonl` in `output_dir`.
        callbacks: Additional callbacks.
        options: More arguments for `transformers.Trainer`, such as `optimizers` and `processing_class`.
    """

    # The loss needs no division by the number of micro-batches: each channel is divided by the items of the whole step.
    loss_is_scaled_for_ga = True
    _step_items: Mapping[str, int] = {}
    _step_tokens = 0
    _taid: TAIDScheduler | None = None
    _taid_state: Mapping[str, float | None] | None = None
    _evaluation: Tensor | None = None
    phase: Mapping[str, str] = {}
    """The training phase, if there is a warm-up. A run resumes only from checkpoints saved in its own phase."""

    def __init__(
        self,
        model: str | nn.Module,
        args: TrainingArguments,
        sessions: LoggedSessions,
        *,
        settings: ChannelSettings | None = None,
        teacher: TeacherKeeper | None = None,
        weighting: RowWeighting | None = None,
        lm_weight: float = 1.0,
        eval_sessions: LoggedSessions | None = None,
        peft_config: Any | None = None,
        quantization: Quantization = "none",
        fsdp: bool = False,
        warmed_up: str | Path | None = None,
        hint_margin: float | None = None,
        shuffle_seed: int | None = None,
        reference_path: str | Path | None = None,
        metrics_path: str | Path | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        if not lm_weight >= 0:
            raise InputError(explain("lm_weight", got=lm_weight, expected="0 or more"))
        _check_arguments(args)
        refuse_differences({"tokenizer": tokenizer_digest(sessions.renderer.tokenizer), "sessions": sessions.digest})
        self.settings, self.lm_weight = settings or ChannelSettings(), lm_weight
        # Only channel 2 uses a teacher, so without it no copy of the initial model is needed.
        self.teacher = teacher or TeacherKeeper("trust_region" if self.settings.alpha_sdpo > 0 else "live")
        self.weighting, self.channel_log = weighting, _ChannelLog()
        metrics = MetricsFile(metrics_path or Path(args.output_dir or "", "metrics.jsonl"))
        start = prepare_model(model, args, peft_config=peft_config, quantization=quantization)
        if is_sharded_here := fsdp and args.world_size > 1 and not is_sharded(start):
            self._shard(start, args, warmed_up)
        super().__init__(
            model=start,
            args=args,
            data_collator=_collate,
            train_dataset=sessions,
            eval_dataset=eval_sessions,
            callbacks=[*callbacks, StepCallback(self), metrics],
            **options,
        )
        model = self._start_model
        # This flag keeps the base class from wrapping the model again.
        if is_sharded(model):
            self.is_distributed_loading_by_transformers = True
        if not is_sharded_here and warmed_up is not None:
            self.phase = _load_warmed_up(model, Path(warmed_up))
        # Training steps compare their log-probs with these, so both must be rounded in the same way.
        with self.accelerator.autocast():
            shared_options = {"settings": self.settings, "lm_weight": lm_weight, "with_adapter": bool(self.phase)}
            proof = {"hint_margin": hint_margin, "shuffle_seed": shuffle_seed}
            self.train_dataset = _prepare_sessions(sessions, model, reference_path, **proof, **shared_options)
            if eval_sessions is not None:
                self.eval_dataset = _prepare_sessions(eval_sessions, model, reference_path, **shared_options)
        for warning in _startup_warnings(self, model, self._train_sessions):
            self._warn(warning)
        if not is_sharded_here:
            attach_teacher(self.teacher, model, with_adapter=bool(self.phase))
        self._num_weights = sum(parameter.numel() for parameter in self._start_model.parameters())

    def _shard(self, model: nn.Module, args: TrainingArguments, warmed_up: str | Path | None) -> None:
        """Load a warm-up's weights, if any, attach the teacher, and shard both models over all processes."""
        if warmed_up is not None:
            self.phase = _load_warmed_up(model, Path(warmed_up))
        attach_teacher(self.teacher, model, with_adapter=bool(self.phase))
        shard_model(model, args)
        shard_teacher(self.teacher, model)

    def plan(self) -> MemoryPlan:
        """Return a memory estimate for the largest step, with advice on what to change if it does not fit."""
        args, model, bare = self.args, self._start_model, unwrapped(self._start_model)
        adapters: Mapping[str, Any] = getattr(bare, "peft_config", None) or {}
        sizes = sorted((item.num_tokens for item in self._train_sessions.items), reverse=True)
        # From the first floating-point weight, since 4-bit weights are packed into integers.
        weight_bytes = next(
            (parameter.element_size() for parameter in bare.parameters() if parameter.is_floating_point()), 4
        )
        local_tensors = (
            parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in bare.parameters()
        )
        # The model is already loaded, so the memory that it occupies counts as available.
        model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in local_tensors)
        optim = str(getattr(args.optim, "value", args.optim))
        return plan_memory(
            get_causal_lm(model).config,
            longest_tree=sum(sizes[: args.per_device_train_batch_size]),
            available=free_memory(args.device) + model_bytes,
            device=args.device,
            weight_bytes=weight_bytes,
            compute_bytes=2 if args.bf16 or args.fp16 else weight_bytes,
            checkpointing=args.gradient_checkpointing,
            lora_rank=max((adapter.r for adapter in adapters.values() if hasattr(adapter, "r")), default=None),
            # bitsandbytes packs two 4-bit weights into a uint8.
            four_bit=any(parameter.dtype == torch.uint8 for parameter in bare.parameters()),
            teacher=self.teacher.kind,
            warmed_up=bool(self.phase),
            optimizer="adamw_8bit" if "8bit" in optim else "sgd" if optim == "sgd" else "adamw",
            accumulation=args.gradient_accumulation_steps,
            num_shards=args.world_size if args.fsdp or is_sharded(model) else 1,
        )

    # ---- one step

    def weights(self) -> dict[str, float]:
        """Return the weight of each channel in the next step."""
        alpha = self.settings.alpha_at(self.state.global_step, self.state.max_steps)
        return dict(zip(CHANNELS, (self.lm_weight, alpha, self.settings.beta_replay), strict=True))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches for one optimizer step, and each channel's number of items over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        trees = [batch[_INPUT].trees for batch in batches]
        counts = [tree_batch.counts() for tree_batch in trees]
        local_items = [sum(batch_counts[name] for batch_counts in counts) for name in CHANNELS]
        local_tokens = sum(tree_batch.tree.input_ids.numel() for tree_batch in trees)
        *num_items, num_tokens = self._sum_over_processes(torch.tensor([*local_items, local_tokens])).tolist()
        self._step_items = dict(zip(CHANNELS, num_items, strict=True))
        self._step_tokens = num_tokens
        return batches, self._step_items

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this micro-batch's share of the step's loss.

        The share is multiplied by the number of processes, because DDP and FSDP average the gradients instead of
        summing them.
        """
        weights = self.weights()
        components = self._components(model, inputs[_INPUT].trees, weights, num_items_in_batch)
        # `compose_loss` always gives channel 1 weight 1.
        loss = components.total if weights[CHANNELS[0]] == 1.0 else _weighted_sum(components, weights)
        if num_items_in_batch is not None:
            self.channel_log.add(components)
            loss = loss * self.accelerator.num_processes
        return (loss, components) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Add an evaluation batch to the sums for the evaluation, and return the batch's loss."""
        del prediction_loss_only, ignore_keys  # the loss is the only output
        weights = self.weights()
        # At the end of annealing channel 2's weight may be 0, but its loss is then of most interest.
        measured = {**weights, CHANNELS[1]: weights[CHANNELS[1]] or self.settings.alpha_sdpo}
        with torch.no_grad():
            components = self._components(model, inputs[_INPUT].trees, measured, None)
        if self._evaluation is not None:
            items = torch.tensor([components.counts.get(name, 0) for name in CHANNELS], dtype=torch.float64)
            losses = torch.stack([getattr(components, name).detach() for name in CHANNELS]).double().cpu()
            self._evaluation += torch.stack([losses * items, items])
        return _weighted_sum(components, weights).detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Evaluate as transformers does, and add each channel's mean loss; `loss` is their weighted sum."""
        # Loss sums and item counts, so that losses are means over all items instead of means of means.
        self._evaluation = torch.zeros(2, len(CHANNELS), dtype=torch.float64)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        sums, items = self._sum_over_processes(self._evaluation).cpu().double().tolist()
        self._evaluation, weights = None, self.weights()
        means = {name: total / count for name, total, count in zip(CHANNELS, sums, items, strict=True) if count}
        metrics = {METRIC_NAMES[name]: mean for name, mean in means.items()}
        metrics["loss"] = sum(weights[name] * mean for name, mean in means.items())
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _components(
        self, model: nn.Module, trees: TreeBatch, weights: Mapping[str, float], items: Mapping[str, int] | None
    ) -> LossComponents:
        options = self.settings.loss_options()
        if self.settings.sdpo_wrapper == "taid":
            options["taid_t"] = self.taid.t
        # Accelerate enables autocast in the model's `forward`, but only the model's body is called here.
        with self.accelerator.autocast():
            return compose_loss(
                model,
                map_tensors(trees, lambda tensor: tensor.to(self.args.device)),
                alpha_sdpo=weights[CHANNELS[1]],
                beta_replay=weights[CHANNELS[2]],
                denominators=items,
                sdpo_teachers=self.teacher.shares(),
                sdpo_weighting=self.weighting,
                **options,
            )

    # ---- after a step

    @property
    def taid(self) -> TAIDScheduler:
        """The TAID schedule for this run; a schedule at its initial value until the number of steps is known."""
        return self._taid or self.settings.taid_schedule(1)

    def before_steps(self) -> None:
        """Create the TAID schedule, since the number of steps is now known, and restore its state, if any."""
        self._taid = self.settings.taid_schedule(self.state.max_steps)
        if self._taid_state is not None:
            self._taid.load_state_dict(self._taid_state)
        self._taid_state = None

    def after_step(self) -> None:
        """Log the step's losses over all processes, and update TAID's schedule and the teacher."""
        values = self._sum_over_processes(self.channel_log.take_step())
        num_steps = self.state.global_step
        # The weight in the step that just finished; `weights` returns those for the next step.
        alpha = self.settings.alpha_at(num_steps - 1, self.state.max_steps)
        weights = {**self.weights(), CHANNELS[1]: alpha}
        self.channel_log.finish_step(values, self._step_items, weights, tokens=self._step_tokens)
        if self.settings.sdpo_wrapper == "taid" and alpha > 0 and self._step_items[CHANNELS[1]]:
            self.taid.update_t(values[1], num_steps)
        if not self.accelerator.optimizer_step_was_skipped:
            reshard(self.teacher)
            self.teacher.after_step(self.model_wrapped)

    def _sum_over_processes(self, local: Tensor) -> Tensor:
        """Return the sum of `local` over all processes."""
        if self.accelerator.num_processes == 1:
            return local
        total: Any = self.accelerator.reduce(local.to(self.args.device), reduction="sum")
        return total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the channels' metrics to every log line with a loss, and how often each ran to the run's last line."""
        if "loss" in logs:
            logs |= self.channel_log.take()
            if self.settings.sdpo_wrapper == "taid":
                logs["loss/taid_t"] = self.taid.t
        if "train_runtime" in logs:
            logs |= {f"ran_steps/{METRIC_NAMES[name]}": self.channel_log.ran_steps[name] for name in CHANNELS}
            self._warn_about_idle_channels()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the estimated number of operations: 6 per weight and token (forward pass 2, backward pass 4)."""
        return 6 * self._num_weights * len(inputs[_INPUT].trees.tree)

    def resume_geometry(self) -> dict[str, Any]:
        """Return the settings that must not change on resume, with a digest of the sessions.

        The number of items is not enough, since different sessions may have the same number.
        """
        return {**super().resume_geometry(), "sessions": self._train_sessions.digest, **self.phase}

    def extra_state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides weights, optimizer and random number generators."""
        taid = self.taid.state_dict() if self.settings.sdpo_wrapper == "taid" else None
        state = {"teacher": local_state(self.teacher), "taid": taid, "channels": self.channel_log.state()}
        return super().extra_state() | state

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        shard_teacher(self.teacher, self.model_wrapped)
        load_local_state(self.teacher, tree["teacher"])
        self._taid_state = tree["taid"]
        self.channel_log.load_state(tree["channels"])

    # ---- before the first step

    @property
    def _start_model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _warn_about_idle_channels(self) -> None:
        # A warm-up trains channel 1 only.
        if self.phase.get("phase") == WARM_UP:
            return
        log, items = self.channel_log, self._train_sessions.channels
        for name in (name for name in CHANNELS if not log.ran_steps.get(name, 0)):
            coverage = f"{log.seen_items[name]:,} of its {items[name]:,} items in them"
            weight = f"{_WEIGHT_OPTIONS[name]} {log.top_weights[name]:g}"
            self._warn(f"channel {name} never ran in {log.num_steps} steps: {coverage}, {weight}")

    def _warn(self, message: str) -> None:
        if self.is_world_process_zero():
            _log.warning(message)

    @property
    def _train_sessions(self) -> LoggedSessions:
        assert isinstance(self.train_dataset, LoggedSessions)
        return self.train_dataset


def _check_arguments(args: Any) -> None:
    """Raise ConfigError if a process has several devices, trains alone, or may get fewer micro-batches than others."""
    check_is_in_group(args.world_size)
    if args.n_gpu > 1:
        fix = "Start one process per GPU: `torchrun --nproc-per-node N` or `accelerate launch`."
        raise ConfigError(explain("GPUs in this process", got=args.n_gpu, expected=1, fix=fix))
    if args.world_size > 1 and not args.accelerator_config.even_batches:
        fix = "Set even_batches to True, since a process with fewer micro-batches would leave the others waiting."
        raise ConfigError(explain("accelerator_config.even_batches", got=False, expected=True, fix=fix))


def _prepare_sessions(
    sessions: LoggedSessions,
    model: nn.Module,
    reference_path: str | Path | None = None,
    *,
    settings: ChannelSettings,
    lm_weight: float,
    hint_margin: float | None = None,
    with_adapter: bool = False,
    shuffle_seed: int | None = None,
) -> LoggedSessions:
    """Return the sessions to train on, after the hint check and a control's shuffling if requested.

    Reference log-probs are added if needed. Call this under the same autocast as the training steps.
    """
    if hint_margin is not None:
        sessions = sessions.prove(model, hint_margin, with_adapter=with_adapter)
    # After the hint check, so that a control has the same sites as the real training.
    if shuffle_seed is not None:
        sessions = sessions.shuffled(shuffle_seed)
    sessions.require_items()
    # Other variants of DPO need no reference log-probs.
    needs_references = settings.beta_replay > 0 and settings.dpo_variant == "dpo"
    if needs_references and sessions.has_references:
        sessions.check_references(model)
    elif needs_references:
        sessions = sessions.with_references(model, reference_path, with_adapter=with_adapter)
    return sessions if lm_weight > 0 else sessions.without_responses()


def _load_warmed_up(model: nn.Module, checkpoint: Path) -> dict[str, str]:
    """Load a warm-up's final weights into the model, and return the training phase that follows the warm-up.

    Raises StaleArtefactError if the checkpoint was not written by a warm-up, or if that warm-up began with other
    weights.
    """
    manifest = check_manifest(checkpoint)
    if manifest["about"]["data"].get("phase") != WARM_UP:
        fix = "Pass the folder of the `checkpoint` that `trainer.warmup.warm_up` returns."
        got = "a checkpoint from another training phase"
        raise StaleArtefactError(explain(str(checkpoint), got=got, expected="a checkpoint from a warm-up", fix=fix))
    # Compared before anything is loaded, so that a refused checkpoint leaves the model unchanged.
    check_identity(manifest["about"]["model"], model_identity(model), checkpoint)
    start_weights, origin = weights_digest(model), manifest["about"]["data"]
    start = {"start_weights": start_weights, "start_adapter": trained_adapter_digest(model)}
    for name, now in start.items():
        if (before := origin.get(name)) != now:
            fix = "Use the model that the warm-up began with, or run a warm-up of this model in another folder."
            got, expected = f"{name} {str(before)[:12]}", f"{name} {str(now)[:12]}, as in this model"
            raise StaleArtefactError(explain(str(checkpoint), got=got, expected=expected, fix=fix))
    load_weights(model, checkpoint)
    return {
        "phase": "after a warm-up",
        "warmup_steps": str(manifest["step"]),
        "start_weights": start_weights,
        "warmed_up_weights": weights_digest(model, with_adapter=True),
    }


def _startup_warnings(trainer: Any, model: nn.Module, sessions: LoggedSessions) -> list[str]:
    """Return the warnings to log before the first step. Raises an error if the run cannot work at all."""
    cannot_run = _warnings_about_channels(sessions.channels, trainer.weights())
    live_teacher = live_teacher_warning(trainer.teacher.kind, trainer.settings.alpha_sdpo, trainer)
    plan: MemoryPlan = trainer.plan()
    too_large = None if plan.fits else f"the largest step may not fit into memory:\n{plan}"
    return [warning for warning in (*cannot_run, live_teacher, check_router_loss(model), too_large) if warning]


def _warnings_about_channels(items: Mapping[str, int], weights: Mapping[str, float]) -> list[str]:
    """Return a warning for each channel that has a weight but no items.

    Raises InactiveChannelError if no channel can run.
    """
    if not any(items[name] and weights[name] > 0 for name in CHANNELS):
        got = ", ".join(f"{_WEIGHT_OPTIONS[name]} {weights[name]:g} with {items[name]} items" for name in CHANNELS)
        fix = "Set the weight of a channel that has items, or add sites and pairs to the sessions."
        raise InactiveChannelError(
            explain("channels", got=got, expected="a weight above 0 for a channel with items", fix=fix)
        )
    return [
        NO_PAIR.format(weights[name])
        if name == CHANNELS[2]
        else f"channel {name} cannot run: {_WEIGHT_OPTIONS[name]} is {weights[name]:g}, but it has no items"
        for name in CHANNELS
        if weights[name] > 0 and not items[name]
    ]


class _ChannelLog:
    """A record of the channels' metrics since the last log line: means over items, and how often each channel ran.

    Micro-batches are summed into steps, and steps are averaged. Values stay on their device until they are logged. For
    the whole run, each channel has its `ran_steps`, its `seen_items` (including items in steps where its weight was 0)
    and its largest weight in `top_weights`.
    """

    def __init__(self) -> None:
        self.ran_steps: Counter[str] = Counter()
        self.seen_items: Counter[str] = Counter()
        self.top_weights: dict[str, float] = dict.fromkeys(CHANNELS, 0.0)
        self.num_steps = 0
        self._open: Tensor | None = None
        self._reset()

    def add(self, components: LossComponents) -> None:
        """Add a micro-batch's losses, each of which is already divided by its channel's items in the whole step."""
        values = torch.stack([getattr(components, name).detach().float() for name in CHANNELS])
        self._open = values if self._open is None else self._open + values

    def take_step(self) -> Tensor:
        """Return this process's losses in the finished step, of shape (3,), and begin the next step."""
        values = torch.zeros(len(CHANNELS)) if self._open is None else self._open
        self._open = None
        return values

    def finish_step(
        self, values: Tensor, items: Mapping[str, int], weights: Mapping[str, float], *, tokens: int = 0
    ) -> None:
        """Add a step's losses, summed over all processes. A channel ran if it had items and a weight above 0.

        `tokens` is the number of tokens in all trees of the step.
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
        # Multiply means by item counts to get sums, so that steps with more items have more weight.
        self._sums = self._sums + means * torch.tensor([items.get(name, 0) for name in CHANNELS], dtype=torch.float64)
        self._total += float((means * torch.tensor([weights[name] for name in CHANNELS], dtype=torch.float64)).sum())
        self._weights = dict(weights)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, and reset them.

        For a channel that never ran, the metric under `ran/` is 0, and there is no loss.
        """
        if not self._steps:
            return {}
        metrics: dict[str, float] = {"loss/total": self._total / self._steps, "tokens": self._tokens / self._steps}
        for index, name in enumerate(CHANNELS):
            label = METRIC_NAMES[name]
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
        # Checkpoints written by earlier versions have no token count.
        self._tokens = since.get("tokens", 0)
        self._sums = torch.tensor(since["sums"], dtype=torch.float64)
        self._total, self._weights = since["total"], dict(since["weights"])

    def _reset(self) -> None:
        self._steps, self._tokens, self._total = 0, 0, 0.0
        self._ran: Counter[str] = Counter()
        self._items: Counter[str] = Counter()
        self._sums = torch.zeros(len(CHANNELS), dtype=torch.float64)
        self._weights: dict[str, float] = dict.fromkeys(CHANNELS, 0.0)


def _weighted_sum(components: LossComponents, weights: Mapping[str, float]) -> Tensor:
    """Return the sum of the channels' losses with these weights, which may differ from those in `compose_loss`."""
    return sum((weights[name] * getattr(components, name) for name in CHANNELS), start=components.lm_ce.new_zeros(()))


@dataclass(frozen=True, eq=False)
class _MicroBatch:
    """A wrapper of a tree batch, so that no library mistakes it for a mapping of tensors to be moved or sliced."""

    trees: TreeBatch


def _collate(batches: Sequence[TreeBatch]) -> dict[str, _MicroBatch]:
    return {_INPUT: _MicroBatch(pack_batches(batches))}
