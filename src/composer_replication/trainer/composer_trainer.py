"""GRPO with two more channels, on top of TRL: total = GRPO + alpha_sdpo * channel 2 + beta_replay * channel 3.

Channel 2 trains on the erring turns in the batch's own rollouts, with exactly the token ids that were sampled; error
sites are located when rollouts are generated. Channel 3, and channel 2 on logged traces, take their batches from a
store of logged data. With both weights 0, TRL's step is unchanged.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.batch.model_folder import resolve_model
from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.optional import available, require
from composer_replication.trainer.grpo_step import (
    LOGGED_PAIRS,
    LOGGED_SITES,
    ChannelMetrics,
    ComposerChannels,
    GenerationStep,
    LossStep,
)
from composer_replication.trainer.logged_batches import (
    REPLAY,
    SDPO,
    LoggedStore,
    digest_of,
    prompts_of_traces,
    usable_channels,
    with_what_is_needed,
)
from composer_replication.trainer.metrics_file import MetricsFile, StepCallback
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.distributed import has_adapter, is_sharded
from composer_replication.trainer.objective.fingerprint import tokenizer_digest, weights_digest
from composer_replication.trainer.objective.model_head import get_causal_lm
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.overrides import TaughtRollouts
from composer_replication.trainer.rollouts.hint_distillation import SITES, ErringTurn
from composer_replication.trainer.rollouts.hint_gate import HintComparison, HintGate
from composer_replication.trainer.rollouts.sites import RolloutOptions
from composer_replication.trainer.same_start import (
    check_is_in_group,
    refuse_differences,
    refuse_missing_weights,
    share_start_weights,
)
from composer_replication.trainer.start_model import repair_token_rows
from composer_replication.trainer.teacher_keeper import TeacherKeeper, TeacherKind, attach_teacher, live_teacher_warning
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import RunDiagnosis


class _WithoutTrl:
    """A placeholder for TRL's trainer if TRL is not installed. It can be subclassed, but not instantiated."""

    def __init__(self, *_args: object, **_options: object) -> None:
        require("trl", extra="train")


# `Any`, since this class also overrides private methods, which TRL does not type.
_Trainer: Any = _WithoutTrl
if available("trl"):
    from trl.trainer.grpo_trainer import GRPOTrainer

    _Trainer = GRPOTrainer
__all__ = ["ComposerReplicationTrainer", "RolloutOptions"]

logger = logging.getLogger(__name__)
_KNOBS = {knob.name for knob in fields(ChannelSettings)}
_NO_DEFAULT = object()
_LOGGED_METRIC = {SDPO: LOGGED_SITES, REPLAY: LOGGED_PAIRS}


class ComposerReplicationTrainer(TaughtRollouts, _Trainer):
    """`trl.GRPOTrainer` with channels 2 and 3. It accepts all of TRL's arguments and the following.

    Args:
        model: As in TRL; `student` is the tiny model that comes with the package, as on the command line.
        alpha_sdpo, beta_replay: Weights of channels 2 and 3; 0 turns a channel off. A channel that has a
            weight but no data is skipped with a warning.
        sdpo_jsd_beta, sdpo_temperature, sdpo_token_clip, replay_dpo_beta: As in `compose_loss`. The other fields of
            `ChannelSettings` (sdpo_wrapper, dpo_variant, anneal, ...) are accepted as well, or all of them as
            `settings`.
        teacher: "live", "frozen", "ema", "trust_region", or a `TeacherKeeper` with other settings.
        rollouts: How to generate rollouts and locate their error sites.
        sdpo_weighting: How much each token of an erring turn counts (`RowWeighting`).
        heed_gate: Keep channel 2 off on rollouts until the model is measured to react to hints.
        trace_dataset, data_collator: Logged traces, and a `ComposerDataCollator` that collates them. Without a
            `trace_dataset`, the rows of `train_dataset` must be TraceExamples: these are the logged traces, and rows
            without a `prompt` get the messages before the agent's first turn as their prompt.
        logged_sessions: Sessions from a run directory (`LoggedSessions`), instead of traces and a collator.
        logged_batch_size: Logged items per process and micro-step.
        measure_channels: Compute channel 2 even if its weight is 0, for its metrics.
        alarm: Warns of a collapse and keeps the best checkpoint. The default alarm does not stop the run.
        diagnosis: Explains why a run cannot learn. By default it runs every 50 steps and at the end.
        metrics_path: The file for all metrics, which also go to `report_to`; default `metrics.jsonl` in the output
            folder.
    """

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: float = 0.0,
        beta_replay: float = 0.0,
        sdpo_jsd_beta: float = 0.5,
        sdpo_temperature: float = 1.0,
        sdpo_token_clip: float | None = None,
        replay_dpo_beta: float = 0.1,
        settings: ChannelSettings | None = None,
        teacher: TeacherKind | TeacherKeeper = "live",
        rollouts: RolloutOptions | None = None,
        sdpo_weighting: RowWeighting | None = None,
        heed_gate: bool = False,
        trace_dataset: Sequence[Any] | None = None,
        data_collator: Any = None,
        logged_sessions: Any = None,
        logged_batch_size: int = 1,
        measure_channels: bool = False,
        alarm: CollapseAlarm | None = None,
        diagnosis: RunDiagnosis | None = None,
        metrics_path: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        # Must stay the first statement, so that `locals()` contains only the arguments.
        arguments = locals()
        knobs = {name: arguments[name] for name in _DEFAULTS}
        knobs |= {name: kwargs.pop(name) for name in sorted(_KNOBS & kwargs.keys())}
        self.settings, self.channel_metrics = _settings_of(knobs, settings), ChannelMetrics()
        self.wants_sites = self.settings.alpha_sdpo > 0 or measure_channels
        # Without TRL, the constructor of the base class raises below.
        if available("trl"):
            # Bind arguments by name, so that the model and the data set can be replaced even if passed by position.
            kwargs, args = _by_name(args, kwargs), ()
            if isinstance(name := kwargs.get("model"), str):
                kwargs["model"] = resolve_model(name)
            if data_collator is not None and trace_dataset is None and logged_sessions is None:
                trace_dataset = kwargs.get("train_dataset")
                kwargs["train_dataset"] = prompts_of_traces(trace_dataset)
                if not (self.settings.alpha_sdpo > 0 or self.settings.beta_replay > 0):
                    # Plain GRPO: both channels that read traces are off.
                    trace_dataset = data_collator = None
        super().__init__(*args, **kwargs)
        self._check_all_processes(logged_sessions, trace_dataset)
        repair_token_rows(self.model)
        self.usable = usable_channels(self.settings, trace_dataset, data_collator, logged_sessions)
        self.settings = self.usable.settings
        options = rollouts or RolloutOptions()
        self._check_arguments(options)
        self.reward_funcs = list(map(_with_none_check, self.reward_func_names, self.reward_funcs))
        self.teacher = teacher if isinstance(teacher, TeacherKeeper) else TeacherKeeper(teacher)
        contrast = sdpo_weighting is not None and sdpo_weighting.contrast is not None
        hint_gate = self._make_hint_gate(is_gated=heed_gate, has_contrast=contrast)
        self.sampling = GenerationStep(
            self, options, self.channel_metrics, wants_sites=self.wants_sites, hint_gate=hint_gate
        )
        self.channels = ComposerChannels(
            self.settings,
            self.teacher,
            weighting=sdpo_weighting,
            logged=self._make_store(trace_dataset, data_collator, logged_sessions, logged_batch_size),
            hint_gate=hint_gate,
            sum_over=self.sum_over,
            autocast=self.accelerator.autocast,
        )
        self.channel_loss = LossStep(self, self.channels, self.channel_metrics, wants_sites=self.wants_sites)
        self._attach_teacher(self.teacher)
        self.sampling.start_model = self._make_start_model(options)
        self.alarm = alarm or CollapseAlarm()
        self._add_callbacks(diagnosis, metrics_path)
        self._log_channels()

    def _log_channels(self) -> None:
        """Log which channels are on. The level is WARNING, so that the message is shown by default."""
        if not self.accelerator.is_main_process:
            return
        for remark in self.usable.skipped.values():
            logger.warning(remark)
        logger.warning("channels on: %s", ", ".join(self.channels_on()))
        if warning := live_teacher_warning(self.teacher.kind, self.settings.alpha_sdpo, self):
            logger.warning(warning)

    def _check_all_processes(self, sessions: Any, traces: Sequence[Any] | None) -> None:
        """Raise an error if processes train separately, or differ in tokenizer, logged data or weights."""
        check_is_in_group(self.args.world_size)
        if self.args.world_size > 1:
            tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
            refuse_differences(
                {
                    "tokenizer": tokenizer_digest(tokenizer),
                    "logged sessions": "none" if sessions is None else sessions.digest,
                    "logged traces": "none" if traces is None else digest_of(traces),
                }
            )
        share_start_weights(self.model)
        if self.ref_model is not None:
            # The reference model is loaded separately, so its weights can be missing or different as well.
            share_start_weights(self.ref_model, what="weights of TRL's reference model")
            fix = (
                "Set fsdp_cpu_ram_efficient_loading: false, or train an adapter, whose base weights are the reference."
            )
            refuse_missing_weights(self.ref_model, what="weights of TRL's reference model", fix=fix)

    def _check_arguments(self, options: RolloutOptions) -> None:
        # The caller has already sharded the model; this flag keeps transformers from wrapping it again.
        if is_sharded(self.model):
            self.is_distributed_loading_by_transformers = True
        if options.max_resamples and self.multi_objective_aggregation != "sum_then_normalize":
            expected = "'sum_then_normalize', since the alternative normalizes over the batch, which resampling changes"
            raise InputError(
                explain(
                    "multi_objective_aggregation with max_resamples",
                    got=self.multi_objective_aggregation,
                    expected=expected,
                )
            )

    def _add_callbacks(self, diagnosis: RunDiagnosis | None, metrics_path: str | Path | None) -> None:
        self.add_callback(StepCallback(self))
        self.add_callback(MetricsFile(metrics_path or Path(self.args.output_dir or "", "metrics.jsonl")))
        self.add_callback(self.alarm)
        self.add_callback(diagnosis or RunDiagnosis(max_completion_length=self.max_completion_length))

    def channels_on(self) -> list[str]:
        """Return the names of the channels that this run computes."""
        names = ["grpo"]
        if self.wants_sites:
            names.append("sdpo on rollouts" if self.settings.alpha_sdpo > 0 else "sdpo on rollouts, measured only")
        names += ["sdpo on logged traces"] * (SDPO in self.usable.logged)
        names += [REPLAY] * (REPLAY in self.usable.logged)
        return names

    # ---- the optimizer step

    def before_steps(self) -> None:
        """Do nothing: the TAID schedule is created when it is first needed."""

    def after_step(self) -> None:
        """Update the channels after an optimizer step, before metrics or checkpoints are written."""
        per_generation = self.args.steps_per_generation or 1
        # `_step` counts micro-steps. The first pass over a generation takes `per_generation` micro-steps.
        next_micro_step = self._step % (per_generation * self.num_iterations)
        is_whole = next_micro_step == 0 or next_micro_step >= per_generation
        message = self.channels.after_step(self.model, self.state.global_step, ends_generation=is_whole)
        if message and self.accelerator.is_main_process:
            logger.warning("step %d: %s", self.state.global_step, message)
        hint_gate = self.channels.hint_gate
        self._metrics["train"].update(
            {name: [value] for name, value in (hint_gate.metrics() if hint_gate else {}).items()}
        )
        self.channel_metrics.end_step(self._metrics["train"])

    def mode(self) -> str:
        """Return "train" or "eval", the key under which TRL stores metrics of the current mode."""
        return "train" if self.model.training else "eval"

    def sum_over(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all processes."""
        return values if self.accelerator.num_processes == 1 else self.accelerator.reduce(values, reduction="sum")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the channels' metrics together with TRL's; a skipped channel has the metric `ran/...` with value 0."""
        mode = self.mode()
        self._metrics[mode].update({name: [mean] for name, mean in self.channel_metrics.take(mode).items()})
        self._metrics[mode].update({f"ran/{_LOGGED_METRIC[name]}": [0.0] for name in self.usable.skipped})
        super().log(logs, start_time)

    def resume_geometry(self) -> dict[str, Any]:
        """Return the settings and digests that must not change on resume.

        A saved rollout buffer contains error sites and therefore depends on whether these are located.
        """
        logged = self.channels.logged
        is_stream = not hasattr(self.train_dataset, "__len__")
        return {
            **super().resume_geometry(),
            "sites": self.wants_sites,
            "logged": None if logged is None else logged.digest,
            "prompts": None if is_stream else digest_of(self.train_dataset),
        }

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "composer": _run_state(self)}

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        _load_run_state(self, tree["composer"])

    # ---- parts of the constructor

    def _make_hint_gate(self, *, is_gated: bool, has_contrast: bool) -> HintGate | None:
        """Return a hint gate if channel 2 runs on rollouts, and the gate or the contrast is on; otherwise None."""
        is_gated = is_gated and self.settings.alpha_sdpo > 0
        if not self.wants_sites or not (is_gated or has_contrast):
            return None
        return HintGate(enabled=is_gated, has_contrast=has_contrast, gather=self._gather_comparisons)

    def _gather_comparisons(self, values: list[HintComparison]) -> list[HintComparison]:
        """Return the comparisons from all processes; every process gets all of them.

        They are sent as text in tensors, because accelerate would pickle objects.
        """
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return values
        text = json.dumps(values).encode()
        padded = accelerator.pad_across_processes(torch.tensor([list(text)], device=accelerator.device), dim=1)
        rows = accelerator.gather(padded).tolist()
        # Shorter texts are padded with zeros.
        return [HintComparison(*comparison) for row in rows for comparison in json.loads(bytes(row).rstrip(b"\0"))]

    def _make_start_model(self, options: RolloutOptions) -> nn.Module | None:
        """Return a copy of the initial model for the KL penalty (k1), or None if no copy is needed.

        With an adapter or TRL's reference model, the initial weights are available without a copy.
        """
        if not options.k1_coefficient or self.ref_model is not None or has_adapter(self.model):
            return None
        from trl.trainer.utils import add_fused_lm_head

        keeper = TeacherKeeper("frozen")
        self._attach_teacher(keeper)
        assert keeper.model is not None
        cast = self.args.cast_lm_head_to_fp32
        add_fused_lm_head(get_causal_lm(keeper.model), temperature=self.temperature, cast_lm_head_to_fp32=cast)
        return keeper.model

    def _make_store(self, traces: Any, collator: Any, sessions: Any, batch_size: int) -> LoggedStore | None:
        if self.usable.is_empty or (traces is None and collator is None and sessions is None):
            return None
        # The steps compute under autocast, so reference log-probs must as well.
        with self.accelerator.autocast():
            sessions = with_what_is_needed(self.model, self.settings, traces, collator, sessions)
        return LoggedStore(
            traces=traces,
            collator=collator,
            sessions=sessions,
            batch_size=batch_size,
            seed=self.args.seed,
            process=self.accelerator.process_index,
            num_processes=self.accelerator.num_processes,
        )

    def _attach_teacher(self, keeper: TeacherKeeper) -> None:
        attach_teacher(keeper, self.model)
        if keeper.model is not None and not is_sharded(keeper.model):
            keeper.replace_model(keeper.model.to(self.accelerator.device))


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments for TRL's trainer as a dict. Raises TypeError if they do not fit its signature."""
    bound = inspect.signature(_Trainer.__init__).bind_partial(None, *args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def _settings_of(knobs: dict[str, Any], settings: ChannelSettings | None) -> ChannelSettings:
    """Return `settings`, or settings made from individual arguments. Raises InputError if both are given."""
    if settings is None:
        return ChannelSettings(**knobs)
    changed_knobs = [name for name, value in knobs.items() if value != _DEFAULTS.get(name, _NO_DEFAULT)]
    if changed_knobs:
        raise InputError(
            explain(
                "channel knobs", got=f"settings and {', '.join(changed_knobs)}", expected="settings or single knobs"
            )
        )
    return settings


# The constructor's single knobs with their defaults, so that `_settings_of` can tell which knobs were set.
_SIGNATURE = inspect.signature(ComposerReplicationTrainer.__init__).parameters
_DEFAULTS = {name: parameter.default for name, parameter in _SIGNATURE.items() if name in _KNOBS}


def _with_none_check(name: str, reward: Any) -> Any:
    """Wrap a reward function so that it raises InputError instead of returning None.

    Models and async functions are returned unchanged.
    """
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    if isinstance(reward, nn.Module) or is_async:
        return reward

    @functools.wraps(reward, updated=())
    def checked_reward(*args: Any, **kwargs: Any) -> Any:
        rewards = reward(*args, **kwargs)
        if rewards is None:
            fix = "Add a `return` statement. In the list, use None for a rollout that the function cannot judge."
            expected = "a list with one number per rollout"
            raise InputError(explain(f"reward function {name}", got="None", expected=expected, fix=fix))
        return rewards

    return checked_reward


def _run_state(trainer: Any) -> dict[str, Any]:
    """Return the state that an exact resume of a GRPO run needs besides weights, optimizer and random number
    generators.

    It consists of the buffered rollouts and the position in them, the channels' schedules and teacher, the states of
    stateful environments, the collapse alarm, and sums that have not been logged yet.
    """
    sampling, start = trainer.sampling, trainer.sampling.start_model
    return {
        "micro_step": trainer._step,
        "rollouts": _encoded_turns(trainer._buffered_inputs),
        "channels": trainer.channels.state(),
        "entropy": [trainer.entropy_coef, trainer._last_world_entropy] if trainer._entropy_bonus_enabled else None,
        "metrics": {mode: dict(values) for mode, values in trainer._metrics.items()},
        "figures": trainer.channel_metrics.state(),
        "site_counts": dict(sampling.site_counts),
        "num_rollouts": sampling.num_rollouts,
        "known_hints": dict(sampling.known_hints),
        "alarm": trainer.alarm.state(),
        "start_digest": None if start is None else weights_digest(start),
        "environments": _environment_states(trainer),
    }


def _load_run_state(trainer: Any, tree: dict[str, Any]) -> None:
    """Restore the state that `_run_state` returned."""
    sampling, start, buffer = trainer.sampling, trainer.sampling.start_model, tree["rollouts"]
    trainer._step = tree["micro_step"]
    device = trainer.accelerator.device
    # TRL trains on slices of a generation, so a checkpoint may lie between two slices.
    trainer._buffered_inputs = (
        None if buffer is None else [_on_device(_decoded_turns(batch), device) for batch in buffer]
    )
    trainer.channels.load_state(tree["channels"], trainer.state.max_steps)
    if tree["entropy"] is not None:
        trainer.entropy_coef, trainer._last_world_entropy = tree["entropy"]
    for mode, values in tree["metrics"].items():
        trainer._metrics[mode].update({name: list(series) for name, series in values.items()})
    trainer.channel_metrics.load_state(tree["figures"])
    sampling.site_counts, sampling.num_rollouts = Counter(tree["site_counts"]), tree["num_rollouts"]
    # Checkpoints saved by earlier versions have no "known_hints".
    sampling.known_hints = dict(tree.get("known_hints", {}))
    trainer.alarm.load_state(tree["alarm"])
    # Checkpoints from earlier versions have another key, for a digest of only some values, which cannot be compared.
    if start is not None and "start_digest" in tree and tree["start_digest"] != weights_digest(start):
        fix = "Build the trainer with the model that the run began with; the checkpoint's weights are loaded into it."
        raise StaleArtefactError(
            explain("initial weights for k1", got="different weights", expected="the run's initial weights", fix=fix)
        )
    _load_environment_states(trainer, tree["environments"])


def _environment_states(trainer: Any) -> list[list[Any]]:
    """Return the states of all environments, as a list per pool.

    A state is the result of the environment's method `_state()`, or None if it has no such method.
    """
    pools: dict[Any, list[Any]] = getattr(trainer, "_environment_pool", {})
    return [
        [environment._state() if hasattr(environment, "_state") else None for environment in pool]
        for pool in pools.values()
    ]


def _load_environment_states(trainer: Any, states: list[list[Any]]) -> None:
    """Create as many environments as were saved, and restore each one's state with its method `_load_state`."""
    pools: dict[Any, list[Any]] = getattr(trainer, "_environment_pool", {})
    for (name, pool), saved in zip(pools.items(), states, strict=True):
        # The pool grows on demand, so a resumed process may have fewer environments than were saved.
        pool.extend(trainer.environment_factories[name]() for _ in range(len(saved) - len(pool)))
        for environment, state in zip(pool, saved, strict=False):
            if state is not None:
                environment._load_state(state)


def _encoded_turns(buffer: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the buffered batches with erring turns as dicts, because checkpoints cannot store the original type."""
    if buffer is None:
        return None
    return [
        batch | {SITES: [[turn._asdict() for turn in turns] for turns in batch[SITES]]} if SITES in batch else batch
        for batch in buffer
    ]


def _decoded_turns(batch: dict[str, Any]) -> dict[str, Any]:
    if SITES not in batch:
        return batch
    return batch | {SITES: [[ErringTurn(**turn) for turn in turns] for turns in batch[SITES]]}


def _on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
