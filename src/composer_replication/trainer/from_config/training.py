"""From a config to trained weights: what `crf train` does, as a library.

config -> run directory, tokenizer -> sessions (or prompts) -> memory plan -> trainer -> checkpoints, weights, record
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from composer_replication.config import CrfConfig
from composer_replication.config.writer import to_toml
from composer_replication.errors import StaleArtefactError
from composer_replication.objective.fingerprint import weights_digest
from composer_replication.objective.heeding import verdict
from composer_replication.runs.lineage import channel_results
from composer_replication.sessions.dataset import LoggedSessions
from composer_replication.sessions.phases import OnPhase, PhaseTimes, Say, telling_phases
from composer_replication.trainer.from_config.inputs import Inputs, read_inputs
from composer_replication.trainer.from_config.offline import (
    SOURCES,
    check_memory,
    offline_data,
    offline_memory,
    tell_data,
)
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.plan import remarks_on
from composer_replication.trainer.from_config.renderer import unmatched_models
from composer_replication.trainer.from_config.requirements import check_extra, offline_arguments
from composer_replication.trainer.from_config.results import (
    GRPO_CHANNELS,
    OFFLINE_CHANNELS,
    TrainingResult,
    metric_names,
    named_sources,
    sources_of,
    write_record,
)
from composer_replication.trainer.replica import Replica, ReplicaSteps
from composer_replication.trainer.same_start import refuse_differences
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import diagnose
from composer_replication.trainer.watch.run_diagnosis import RunDiagnosis

__all__ = ["Progress", "run_training"]

OnLog = Callable[[int, int, Mapping[str, Any]], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Whom to tell: of sentences, of work before the first step, of every step (step, all steps), of every line of
    metrics (and the figures)."""

    say: Say = field(default_factory=lambda: _log.info)
    on_step: Callable[[int, int], None] = field(default_factory=lambda: lambda _step, _total: None)
    on_log: OnLog = field(default_factory=lambda: lambda _step, _total, _figures: None)
    on_phase: OnPhase = field(default_factory=lambda: lambda _phase: None)


def run_training(
    config: CrfConfig,
    *,
    resume: bool = False,
    must_fit: bool = True,
    progress: Progress | None = None,
    replica: Replica | None = None,
) -> TrainingResult:
    """Train as the config says, and write checkpoints, metrics, the weights and a record of where they are from.

    `resume` insists on a checkpoint to go on from; without it `train.resume` decides. A plan that does not fit the
    memory is refused if it must. SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint.
    """
    reporter = progress or Progress()
    check_extra(config.train)
    folder = TrainingFolder.of(config)
    inputs = read_inputs(folder.with_first_primary(config), replica)
    config = inputs.config
    goes_on = folder.resumes(asked=resume, wanted=config.train.resume)
    make = _make_offline if config.train.mode == "offline" else _make_grpo
    alarm = CollapseAlarm.from_config(config.train.alarm, say=reporter.say) if config.train.alarm.on else None
    mode_parts = make(inputs, folder, alarm, reporter, must_fit)
    refuse_differences({"the config": to_toml(_without_places(config))})
    used = contextlib.nullcontext() if inputs.run is None else inputs.run.used_for("training")
    with used, folder.held(is_main=mode_parts.args.process_index == 0):
        has_state = goes_on or folder.has_warmup
        changes = folder.changed_options(config) if folder.has_begun else []
        if folder.has_begun and not has_state:
            reporter.say(folder.resumption(config.train.optimiser.steps))
        for change in changes:  # before anything is compared
            reporter.say(f"set otherwise than when the run began: {change}")
        if not has_state and mode_parts.args.process_index == 0:
            folder.write_config(config)  # whoever comes after a kill before the first checkpoint compares with it
        sources = sources_of(inputs.run, SOURCES)
        if mode_parts.sessions is not None and mode_parts.args.process_index == 0:
            folder.check_made_of(
                mode_parts.sessions.digest, {source.name: source.sha256 for source in sources}, changes
            )
        times = PhaseTimes(folder.checkpoints / "seconds.json", reporter.on_phase)
        with telling_phases(times, reporter.say):
            trainer, sessions = mode_parts.build()
        phase: Mapping[str, str] = getattr(trainer, "phase", {})
        start_digest = phase.get("start_weights") or weights_digest(trainer.model)
        _connect(trainer, reporter, folder, config)
        if replica is not None:
            trainer.add_callback(ReplicaSteps(replica))
        mode_parts.before(trainer)
        _train(trainer, goes_on, changes)
        if trainer.was_finished:
            done = trainer.state.global_step
            reporter.say(
                f"all {done} steps are made; for more raise train.optimiser.steps, for a new run set train.output"
            )
        result = replace(_result(config, folder, trainer, alarm, sessions), seconds=times.seconds)
        if result.stopped_by:
            return result
        return _save(config, folder, trainer, result, [*sources, *named_sources(config)], start_digest)


def _without_places(config: CrfConfig) -> CrfConfig:
    """Return the config without paths: they may differ between machines, and what they hold is compared elsewhere."""
    return replace(config, train=replace(config.train, model=None, run=None, output=None))


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A mode's own parts: its arguments, what builds its trainer and the logged sessions in it, what to say before.

    `sessions` are those that it learns from before any proof, where it learns from nothing else.
    """

    args: Any
    build: Callable[[], tuple[Any, LoggedSessions | None]]
    before: Callable[[Any], None]
    sessions: LoggedSessions | None = None


class _Reports(TrainerCallback):
    """Passes steps and lines of metrics on. The config is written once a checkpoint to go on from was found to fit."""

    def __init__(
        self, told: Progress, folder: TrainingFolder, config: CrfConfig, resumed_from: Callable[[], Path | None]
    ) -> None:
        self._told, self._folder, self._config, self._resumed_from = told, folder, config, resumed_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if not state.is_world_process_zero:
            return
        if (folder := self._resumed_from()) is not None:
            self._told.say(f"going on from {folder.name} in {folder.parent}")
        self._folder.write_config(self._config)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.is_world_process_zero:
            self._told.on_step(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.is_world_process_zero and logs:
            self._told.on_log(state.global_step, state.max_steps, logs)


def _connect(trainer: Any, reporter: Progress, folder: TrainingFolder, config: CrfConfig) -> None:
    """To those who are told of steps, and to signals that end it."""
    trainer.remove_callback(PrinterCallback)  # it prints dictionaries
    trainer.add_callback(_Reports(reporter, folder, config, lambda: trainer.resumed_from))
    trainer.stop_signals = (signal.SIGTERM, signal.SIGINT)


def _make_offline(
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, reporter: Progress, must_fit: bool
) -> _Made:
    from composer_replication.trainer.from_config import offline as run_offline

    args = offline_arguments(inputs.config.train, folder.checkpoints)  # first: what is refused here takes no reading
    reporter.say(f"reading the sessions of {inputs.config.train.run}")
    data = offline_data(inputs)
    for remark in unmatched_models(inputs.config.render, data.models):
        reporter.say(remark)
    data.train.require_items()
    tell_data(data.train, reporter.say)
    for remark in remarks_on(inputs, data.train):
        reporter.say(remark)
    check_memory(offline_memory(inputs, data.train), reporter.say, must_fit)
    diagnosis = RunDiagnosis(every=inputs.config.train.diagnose_every, say=_while_it_runs(reporter.say))
    callbacks: list[TrainerCallback] = [diagnosis] if alarm is None else [diagnosis, alarm]
    parts = inputs, data, args, folder, callbacks, reporter.say
    return _Made(
        args=args,
        build=lambda: ((trainer := run_offline.offline_trainer(*parts)), trainer.train_dataset),  # what a proof left
        before=lambda trainer: run_offline.tell_proof(
            trainer.train_dataset, reporter.say, can_warm_up=not trainer.phase
        ),
        sessions=data.train,
    )


def _make_grpo(
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, reporter: Progress, must_fit: bool
) -> _Made:
    from composer_replication.trainer.from_config import grpo as run_grpo

    del must_fit  # what rollouts take depends on their lengths, which nobody knows
    args = run_grpo.grpo_arguments_of(inputs, folder)
    train = inputs.config.train
    length, say = train.grpo.max_completion_length, _while_it_runs(reporter.say)
    diagnosis = RunDiagnosis(every=train.diagnose_every, max_completion_length=length, say=say)
    return _Made(
        args=args,
        build=lambda: run_grpo.grpo_trainer(inputs, args, folder, alarm, diagnosis, reporter.say),
        before=lambda trainer: reporter.say(f"channels: {', '.join(trainer.channels_on())}"),
    )


def _train(trainer: Any, goes_on: bool, changes: Sequence[str]) -> None:
    """Where the checkpoint is refused, the error names the options that changed: a weight of 0 makes other sessions."""
    try:
        trainer.train(resume_from_checkpoint=goes_on)
    except StaleArtefactError as error:
        if not changes:
            raise
        raise StaleArtefactError(f"{error} Set otherwise than when the run began: {'; '.join(changes)}.") from error


def _while_it_runs(say: Say) -> Say:
    """Without the sentences of the end, which are part of the result."""
    return lambda text: None if text.startswith("The whole run: ") else say(text)


def _result(
    config: CrfConfig,
    folder: TrainingFolder,
    trainer: Any,
    alarm: CollapseAlarm | None,
    sessions: LoggedSessions | None,
) -> TrainingResult:
    state, is_offline = trainer.state, config.train.mode == "offline"
    weights = {"alpha_sdpo": config.loss.alpha_sdpo, "beta_replay": config.loss.beta_replay}
    if is_offline:
        weights["lm_ce"] = trainer.lm_weight
    counts, drops = ({}, {}) if sessions is None else (sessions.counts, sessions.drops)
    names, phase = OFFLINE_CHANNELS if is_offline else GRPO_CHANNELS, getattr(trainer, "phase", {})
    length = None if is_offline else config.train.grpo.max_completion_length
    return TrainingResult(
        steps=state.global_step,
        total_steps=state.max_steps,
        stopped_by=trainer.stopped_by,
        saved=None,
        checkpoints=folder.checkpoints,
        metrics=folder.metrics,
        channels=channel_results(names, state.log_history, weights),
        diagnosis=(
            *diagnose(state.log_history, max_completion_length=length, items=counts),
            *_unheeded(sessions, can_warm_up=not phase),
        ),
        alarms=tuple(
            f"step {raised_alarm.step}: {raised_alarm.in_words()}" for raised_alarm in (alarm.alarms if alarm else ())
        ),
        counts=metric_names(counts) | _windows_seen(counts, trainer),
        drops=metric_names(drops),
        warmup_steps=int(phase.get("warmup_steps", 0)),
    )


def _windows_seen(counts: Mapping[str, int], trainer: Any) -> dict[str, int]:
    """How many windows the steps saw, some of them more than once: fewer than there are is less than a pass."""
    args = trainer.args
    at_once = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {"windows_seen": trainer.state.global_step * at_once} if "windows" in counts else {}


def _unheeded(sessions: LoggedSessions | None, *, can_warm_up: bool) -> Iterator[str]:
    """What the hint proof found against this model, which no line of metrics shows."""
    if sessions is not None and sessions.proofs and (heed_verdict := verdict(sessions.proofs)).heeds is False:
        yield heed_verdict.in_words(can_warm_up=can_warm_up)


def _save(
    config: CrfConfig,
    folder: TrainingFolder,
    trainer: Any,
    result: TrainingResult,
    sources: Sequence[Any],
    start_digest: str,
) -> TrainingResult:
    """The weights under a temporary name, then the record, then both in their place."""
    is_adapter = config.train.adapter.kind != "none"
    destination = folder.trained(is_adapter=is_adapter)
    finished = replace(result, saved=destination)
    making = destination.with_name(f".{destination.name}.making")
    if trainer.args.should_save:
        shutil.rmtree(making, ignore_errors=True)
    trainer.save_model(str(making))
    if trainer.args.should_save:
        write_record(making, config, finished, sources, start_digest)
        folder.replace_trained(making, is_adapter=is_adapter)
    return finished
