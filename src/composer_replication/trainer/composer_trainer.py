"""GRPO with two more channels, inside TRL: total = GRPO + alpha_sdpo * channel 2 + beta_replay * channel 3.

Channel 2 teaches the erring turns of this batch's own rollouts, on the token ids that were sampled; error sites are
found as rollouts are generated. Channel 3, and channel 2 on logged traces, come from a store beside the rollouts.
With both weights 0 nothing of TRL's step is touched.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.batch.model_folder import resolve_model
from composer_replication.errors import InputError, explain
from composer_replication.optional import available, require
from composer_replication.trainer.composer.channels import (
    LOGGED_PAIRS,
    LOGGED_SITES,
    ComposerChannels,
    ComposerFigures,
    MicroStepLoss,
)
from composer_replication.trainer.composer.generation import Generation, answering
from composer_replication.trainer.composer.heeding import HeedWatch, HintComparison
from composer_replication.trainer.composer.logged_batches import (
    REPLAY,
    SDPO,
    LoggedStore,
    digest_of,
    load_run_state,
    prompts_of_traces,
    run_geometry,
    run_state,
    usable_channels,
    with_what_is_needed,
)
from composer_replication.trainer.metrics_file import MetricsFile, TellSteps
from composer_replication.trainer.objective.distributed import has_adapter, is_sharded
from composer_replication.trainer.objective.fingerprint import tokenizer_digest
from composer_replication.trainer.objective.model_head import causal_lm_of
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.overrides import TaughtRollouts
from composer_replication.trainer.presets import ChannelSettings
from composer_replication.trainer.rollouts.sites import RolloutOptions
from composer_replication.trainer.same_start import (
    check_is_in_group,
    refuse_differences,
    refuse_missing_weights,
    share_start_weights,
)
from composer_replication.trainer.start_model import settle_token_rows
from composer_replication.trainer.teacher_keeper import (
    TeacherKeeper,
    TeacherKind,
    attach_teacher,
    live_teacher_warning,
)
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import RunDiagnosis


class _WithoutTrl:
    """Stands where TRL's trainer would: the class can be named without it, not made."""

    def __init__(self, *_args: object, **_options: object) -> None:
        require("trl", extra="train")


_Trainer: Any = _WithoutTrl  # TRL's own types do not say what it does with them
if available("trl"):
    from trl.trainer.grpo_trainer import GRPOTrainer

    _Trainer = GRPOTrainer
__all__ = ["ComposerReplicationTrainer", "RolloutOptions"]

logger = logging.getLogger(__name__)
_KNOBS = {knob.name for knob in fields(ChannelSettings)}
_NOT_GIVEN = object()
_LOGGED_METRIC = {SDPO: LOGGED_SITES, REPLAY: LOGGED_PAIRS}


class ComposerReplicationTrainer(TaughtRollouts, _Trainer):
    """`trl.GRPOTrainer` with channels 2 and 3. All of its arguments are passed on; those below are new.

    Args:
        model: as TRL takes it; `student` is the tiny model that comes with the package, as on the command line.
        alpha_sdpo, beta_replay: weights of channels 2 and 3; 0 turns a channel off. A channel with a weight and no data
            is skipped, and one message says so.
        sdpo_jsd_beta, sdpo_temperature, sdpo_token_clip, replay_dpo_beta: as in `compose_loss`; the other knobs of
            `ChannelSettings` (sdpo_wrapper, dpo_variant, anneal, ...) are taken too, or all of them as `settings`.
        teacher: "live", "frozen", "ema", "trust_region", or a `TeacherKeeper` with settings of its own.
        rollouts: how sites of rollouts are found and taught.
        sdpo_weighting: which of the erring tokens count more (`RowWeighting`).
        heed_gate: let channel 2 rest on rollouts until the model is seen to heed hints, as is measured on them.
        trace_dataset, data_collator: logged traces and what makes batches of them (`ComposerDataCollator`). Without a
            `trace_dataset` the rows of `train_dataset` have to be TraceExamples: they are the logged traces, and those
            without a `prompt` get one, the messages before the agent's first turn.
        logged_sessions: sessions of a run directory (`LoggedSessions`) instead of those two.
        logged_batch_size: logged items per process and micro-step.
        measure_channels: compute channel 2 even where its weight is 0, to look at it.
        alarm: watches for collapse and keeps the best checkpoint; the default one says so and does not stop the run.
        diagnosis: says why a run cannot learn; the default one looks every 50 steps and at the end.
        metrics_path: where everything that is logged goes, besides `report_to`; `metrics.jsonl` in the output folder.
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
        arguments = locals()
        knobs = {name: arguments[name] for name in _DEFAULTS}
        knobs |= {name: kwargs.pop(name) for name in sorted(_KNOBS & kwargs.keys())}
        self.settings, self.figures = _settings_of(knobs, settings), ComposerFigures()
        self.wants_sites = self.settings.alpha_sdpo > 0 or measure_channels
        if available("trl"):  # else the base class raises
            kwargs, args = _by_name(args, kwargs), ()
            if isinstance(name := kwargs.get("model"), str):
                kwargs["model"] = resolve_model(name)
            if data_collator is not None and trace_dataset is None and logged_sessions is None:
                trace_dataset = kwargs.get("train_dataset")
                kwargs["train_dataset"] = prompts_of_traces(trace_dataset)
                if not (self.settings.alpha_sdpo > 0 or self.settings.beta_replay > 0):
                    trace_dataset = data_collator = None  # GRPO alone: the channels that read traces are off
        super().__init__(*args, **kwargs)
        self._check_all_processes(logged_sessions, trace_dataset)
        settle_token_rows(self.model)
        self.usable = usable_channels(self.settings, trace_dataset, data_collator, logged_sessions)
        self.settings = self.usable.settings
        options = rollouts or RolloutOptions()
        self._check_arguments(options)
        self.reward_funcs = list(map(answering, self.reward_func_names, self.reward_funcs))
        self.teacher = teacher if isinstance(teacher, TeacherKeeper) else TeacherKeeper(teacher)
        contrast = sdpo_weighting is not None and sdpo_weighting.contrast is not None
        watch = self._make_watch(gates=heed_gate, has_contrast=contrast)
        self.sampling = Generation(self, options, self.figures, wants_sites=self.wants_sites, watch=watch)
        self.channels = ComposerChannels(
            self.settings,
            self.teacher,
            weighting=sdpo_weighting,
            logged=self._make_store(trace_dataset, data_collator, logged_sessions, logged_batch_size),
            watch=watch,
            sum_over=self.sum_over,
            autocast=self.accelerator.autocast,
        )
        self.channel_loss = MicroStepLoss(self, self.channels, self.figures, wants_sites=self.wants_sites)
        self._attach_teacher(self.teacher)
        self.sampling.start_model = self._make_start_model(options)
        self.alarm = alarm or CollapseAlarm()
        self._add_callbacks(diagnosis, metrics_path)
        self._tell_channels()

    def _tell_channels(self) -> None:
        """Log at WARNING, so that it shows without any logging configuration."""
        if not self.accelerator.is_main_process:
            return
        for remark in self.usable.skipped.values():
            logger.warning(remark)
        logger.warning("channels on: %s", ", ".join(self.channels_on()))
        if warning := live_teacher_warning(self.teacher.kind, self.settings.alpha_sdpo, self):
            logger.warning(warning)

    def _check_all_processes(self, sessions: Any, traces: Sequence[Any] | None) -> None:
        """Raise where a process is alone, or begins with another tokenizer, logged data, weights or reference."""
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
            share_start_weights(self.ref_model, what="weights of TRL's reference model")
            fix = (
                "Set fsdp_cpu_ram_efficient_loading: false, or train an adapter, whose base weights are the reference."
            )
            refuse_missing_weights(self.ref_model, what="weights of TRL's reference model", fix=fix)

    def _check_arguments(self, options: RolloutOptions) -> None:
        if is_sharded(self.model):  # by hand: tells the base class to leave the wrapping to whoever did it
            self.is_distributed_loading_by_transformers = True
        if options.max_resamples and self.multi_objective_aggregation != "sum_then_normalize":
            expected = "'sum_then_normalize': the other one scales by a batch that is no longer the same"
            raise InputError(
                explain("aggregation with max_resamples", got=self.multi_objective_aggregation, expected=expected)
            )

    def _add_callbacks(self, diagnosis: RunDiagnosis | None, metrics_path: str | Path | None) -> None:
        self.add_callback(TellSteps(self))
        self.add_callback(MetricsFile(metrics_path or Path(self.args.output_dir or "", "metrics.jsonl")))
        self.add_callback(self.alarm)
        self.add_callback(diagnosis or RunDiagnosis(max_completion_length=self.max_completion_length))

    def channels_on(self) -> list[str]:
        """The channels that this run computes, by name."""
        names = ["grpo"]
        if self.wants_sites:
            names.append("sdpo on rollouts" if self.settings.alpha_sdpo > 0 else "sdpo on rollouts, measured only")
        names += ["sdpo on logged traces"] * (SDPO in self.usable.logged)
        names += [REPLAY] * (REPLAY in self.usable.logged)
        return names

    # A step

    def before_steps(self) -> None:
        """TAID's schedule is made where it is first asked for."""

    def after_step(self) -> None:
        """After an optimiser step, before anything is logged or saved."""
        per_generation = self.args.steps_per_generation or 1
        micro_step = self._step % (per_generation * self.num_iterations)  # of the micro-step that comes next
        whole = micro_step == 0 or micro_step >= per_generation
        warning = self.channels.after_step(self.model, self.state.global_step, ends_generation=whole)
        if warning and self.accelerator.is_main_process:
            logger.warning("step %d: %s", self.state.global_step, warning)
        watch = self.channels.watch
        self._metrics["train"].update({name: [value] for name, value in (watch.metrics() if watch else {}).items()})
        self.figures.end_step(self._metrics["train"])

    def mode(self) -> str:
        """As TRL's metrics are kept."""
        return "train" if self.model.training else "eval"

    def sum_over(self, values: Tensor) -> Tensor:
        """Added up over all processes."""
        return values if self.accelerator.num_processes == 1 else self.accelerator.reduce(values, reduction="sum")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self.mode()
        self._metrics[mode].update({name: [mean] for name, mean in self.figures.take(mode).items()})
        self._metrics[mode].update({f"ran/{_LOGGED_METRIC[name]}": [0.0] for name in self.usable.skipped})
        super().log(logs, start_time)

    def resume_geometry(self) -> dict[str, Any]:
        return {**super().resume_geometry(), **run_geometry(self)}

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "composer": run_state(self)}

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        load_run_state(self, tree["composer"])

    # Parts

    def _make_watch(self, *, gates: bool, has_contrast: bool) -> HeedWatch | None:
        """Where rollouts are taught, and either a gate or a contrast wants another kind's hint beside their own."""
        gates = gates and self.settings.alpha_sdpo > 0
        if not self.wants_sites or not (gates or has_contrast):
            return None
        return HeedWatch(gates=gates, has_contrast=has_contrast, gather=self._from_all_processes)

    def _from_all_processes(self, values: list[HintComparison]) -> list[HintComparison]:
        """Those of every process, on every process: as text in tensors, since objects would be pickled."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return values
        text = json.dumps(values).encode()
        padded = accelerator.pad_across_processes(torch.tensor([list(text)], device=accelerator.device), dim=1)
        rows = accelerator.gather(padded).tolist()
        return [HintComparison(*comparison) for row in rows for comparison in json.loads(bytes(row).rstrip(b"\0"))]

    def _make_start_model(self, options: RolloutOptions) -> nn.Module | None:
        """A copy of the start weights for k1, where neither an adapter nor TRL's reference model has them."""
        if not options.k1_coefficient or self.ref_model is not None or has_adapter(self.model):
            return None
        from trl.trainer.utils import add_fused_lm_head

        keeper = TeacherKeeper("frozen")
        self._attach_teacher(keeper)
        assert keeper.model is not None
        cast = self.args.cast_lm_head_to_fp32
        add_fused_lm_head(causal_lm_of(keeper.model), temperature=self.temperature, cast_lm_head_to_fp32=cast)
        return keeper.model

    def _make_store(self, traces: Any, collator: Any, sessions: Any, batch_size: int) -> LoggedStore | None:
        if self.usable.is_empty or (traces is None and collator is None and sessions is None):
            return None
        with self.accelerator.autocast():  # references are compared with what is computed under it
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
    """Return all arguments of TRL's trainer by name; TypeError where they do not fit."""
    bound = inspect.signature(_Trainer.__init__).bind_partial(None, *args, **kwargs).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def _settings_of(knobs: dict[str, Any], settings: ChannelSettings | None) -> ChannelSettings:
    """From single knobs or all at once; both ways together would leave one of them unheard."""
    if settings is None:
        return ChannelSettings(**knobs)
    changed_knobs = [name for name, value in knobs.items() if value != _DEFAULTS.get(name, _NOT_GIVEN)]
    if changed_knobs:
        raise InputError(
            explain("channel knobs", got=f"settings and {', '.join(changed_knobs)}", expected="one of the two")
        )
    return settings


_SIGNATURE = inspect.signature(ComposerReplicationTrainer.__init__).parameters
_DEFAULTS = {name: parameter.default for name, parameter in _SIGNATURE.items() if name in _KNOBS}
