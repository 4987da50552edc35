"""Train from a config: what `crf train` does, as a library.

config -> run directory, tokenizer -> sessions (or prompts) -> memory plan -> trainer -> checkpoints, weights, record
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from composer_replication.atomic import atomic_write_json
from composer_replication.config import CrfConfig
from composer_replication.config.values import config_hash, to_toml
from composer_replication.errors import StaleArtefactError
from composer_replication.runs.artefacts import Source, now
from composer_replication.runs.lineage import RECORD, ChannelResult, channel_results
from composer_replication.trainer.from_config.grpo import NamedSource, named_sources, prepare_grpo
from composer_replication.trainer.from_config.inputs import check_training_extra, read_inputs
from composer_replication.trainer.from_config.offline import (
    prepare_offline,
)
from composer_replication.trainer.from_config.output_folder import TrainingFolder, current_sources
from composer_replication.trainer.objective.channels import with_metric_names
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.objective.hint_proof import verdict
from composer_replication.trainer.replica import Replica, ReplicaSteps
from composer_replication.trainer.same_start import refuse_differences
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.phases import (
    PhaseTimes,
    TrainingCallbacks,
    reporting_phases,
)
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import diagnose
from composer_replication.version import __version__

__all__ = ["TrainingCallbacks", "run_training"]


_SCHEMA, _VERSION = "composer_replication.training", 2
# The channels that a run may have, by its mode, under their names in metrics.
_OFFLINE_CHANNELS = ("lm_ce", "sdpo_kl", "trace_replay_dpo")
_GRPO_CHANNELS = ("grpo", "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo")

_log = logging.getLogger(__name__)


def run_training(
    config: CrfConfig,
    *,
    resume: bool = False,
    must_fit: bool = True,
    progress: TrainingCallbacks | None = None,
    replica: Replica | None = None,
) -> TrainingResult:
    """Train according to the config, and write checkpoints, metrics, the weights and a record of their sources.

    SIGTERM and Ctrl-C end the run after the current step, with a checkpoint.

    Args:
        config: The whole config.
        resume: Require a checkpoint to resume from. If false, `train.resume` decides.
        must_fit: Raise an error, instead of only warning, if a step does not fit into memory.
        progress: Callbacks for the training run's progress.
        replica: Train on this replica's part of the data, and exchange weights with the other replicas.
    """
    callbacks = progress or TrainingCallbacks()
    check_training_extra(config.train)
    folder = TrainingFolder.of(config)
    inputs = read_inputs(folder.with_first_primary(config), replica)
    config = inputs.config
    is_resumed = folder.resumes(is_required=resume, is_allowed=config.train.resume)
    say = callbacks.say
    alarm = CollapseAlarm.from_config(config.train.alarm, say=say) if config.train.alarm.on else None
    if config.train.mode == "offline":
        setup = prepare_offline(inputs, folder, alarm, say, must_fit)
    else:
        setup = prepare_grpo(inputs, folder, alarm, say)
    # Processes with different configs would otherwise train different things without an error. Paths may differ between
    # machines; the contents of the files are compared elsewhere.
    shared_config = replace(config, train=replace(config.train, model=None, run=None, output=None))
    refuse_differences({"the config": to_toml(shared_config)})
    used = contextlib.nullcontext() if inputs.run is None else inputs.run.used_for("training")
    with used, folder.held(is_main=setup.args.process_index == 0):
        has_state = is_resumed or folder.has_warmup
        changes = folder.changed_options(config) if folder.has_begun else []
        if folder.has_begun and not has_state:
            say(folder.resumption(config.train.optimiser.steps))
        # Report changes first, as they may explain why a checkpoint is refused below.
        for change in changes:
            say(f"changed since the run began: {change}")
        if not has_state and setup.args.process_index == 0:
            # Even after a kill before the first checkpoint, the next run can tell which options changed.
            folder.write_config(config)
        sources = current_sources(inputs.run)
        if setup.sessions is not None and setup.args.process_index == 0:
            folder.check_sources(setup.sessions.digest, {source.name: source.sha256 for source in sources}, changes)
        times = PhaseTimes(folder.checkpoints / "seconds.json", callbacks.on_phase)
        with reporting_phases(times, callbacks.say):
            trainer, sessions = setup.build()
        phase: Mapping[str, str] = getattr(trainer, "phase", {})
        # After a warm-up the model has other weights, but the phase has the digest of the initial weights.
        start_digest = phase.get("start_weights") or weights_digest(trainer.model)
        # PrinterCallback would print the raw metrics to stdout.
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_ReportingCallback(callbacks, folder, config, lambda: trainer.resumed_from))
        trainer.stop_signals = (signal.SIGTERM, signal.SIGINT)
        if replica is not None:
            trainer.add_callback(ReplicaSteps(replica))
        setup.before(trainer)
        _run_steps(trainer, is_resumed, changes)
        if trainer.was_finished:
            say(
                f"all {trainer.state.global_step} steps are already finished: raise train.optimiser.steps to "
                "continue, or set train.output for a new run"
            )
        result = replace(_build_result(config, folder, trainer, alarm, sessions), seconds=times.seconds)
        if result.stopped_by:
            return result
        return _save_weights(config, folder, trainer, result, [*sources, *named_sources(config)], start_digest)


class _ReportingCallback(TrainerCallback):
    """Passes steps and metrics on to the training's callbacks.

    It also writes the config when the training begins, because a checkpoint to resume from has passed its checks by
    then.
    """

    def __init__(
        self,
        callbacks: TrainingCallbacks,
        folder: TrainingFolder,
        config: CrfConfig,
        resumed_from: Callable[[], Path | None],
    ) -> None:
        self._callbacks, self._folder, self._config, self._resumed_from = callbacks, folder, config, resumed_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if not state.is_world_process_zero:
            return
        if (folder := self._resumed_from()) is not None:
            self._callbacks.say(f"resuming from {folder.name} in {folder.parent}")
        self._folder.write_config(self._config)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.is_world_process_zero:
            self._callbacks.on_step(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.is_world_process_zero and logs:
            self._callbacks.on_log(state.global_step, state.max_steps, logs)


def _run_steps(trainer: Any, is_resumed: bool, changes: Sequence[str]) -> None:
    """Train. If a checkpoint is rejected as stale, add the options that have changed to the error message.

    The changed options may explain the error: a channel whose weight is now 0, for example, no longer has targets.
    """
    try:
        trainer.train(resume_from_checkpoint=is_resumed)
    except StaleArtefactError as error:
        if not changes:
            raise
        raise StaleArtefactError(f"{error} Changed since the run began: {'; '.join(changes)}.") from error


def _build_result(
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
    names, phase = _OFFLINE_CHANNELS if is_offline else _GRPO_CHANNELS, getattr(trainer, "phase", {})
    if "windows" in counts:
        # Including repetitions; a number below the number of windows means less than one full pass.
        args = trainer.args
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        windows_seen = {"windows_seen": state.global_step * per_step}
    else:
        windows_seen = {}
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
            *_hint_check_findings(sessions, can_warm_up=not phase),
        ),
        alarms=tuple(f"step {event.step}: {event.describe()}" for event in (alarm.alarms if alarm else ())),
        counts=with_metric_names(counts) | windows_seen,
        drops=with_metric_names(drops),
        warmup_steps=int(phase.get("warmup_steps", 0)),
    )


def _hint_check_findings(sessions: LoggedSessions | None, *, can_warm_up: bool) -> Iterator[str]:
    """Yield a summary of the hint check if the model does not react to hints, since no metric would show that."""
    if sessions is not None and sessions.proofs and (heed_verdict := verdict(sessions.proofs)).heeds is False:
        yield heed_verdict.summary(can_warm_up=can_warm_up)


def _save_weights(
    config: CrfConfig,
    folder: TrainingFolder,
    trainer: Any,
    result: TrainingResult,
    sources: Sequence[Any],
    start_digest: str,
) -> TrainingResult:
    """Save the weights and their record in a temporary folder, then rename the folder to its final name."""
    is_adapter = config.train.adapter.kind != "none"
    destination = folder.trained(is_adapter=is_adapter)
    finished = replace(result, saved=destination)
    temporary = destination.with_name(f".{destination.name}.making")
    # Only the main process writes files, but saving sharded weights is a collective operation.
    if trainer.args.should_save:
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.save_model(str(temporary))
    if trainer.args.should_save:
        _write_record(temporary, config, finished, sources, start_digest)
        folder.replace_trained(temporary, is_adapter=is_adapter)
    return finished


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of `run_training`, with the paths of its files.

    `saved` is the folder with the trained weights, or None if not all steps are done.
    """

    steps: int
    total_steps: int
    stopped_by: str
    saved: Path | None
    checkpoints: Path
    metrics: Path
    channels: tuple[ChannelResult, ...]
    diagnosis: tuple[str, ...]
    alarms: tuple[str, ...]
    counts: Mapping[str, int]
    drops: Mapping[str, int]
    warmup_steps: int = 0
    """The number of steps of the warm-up before the first step."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """The duration of each phase before the first step (warm-up, hint check, reference log-probs)."""

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}


def _write_record(
    folder: Path,
    config: CrfConfig,
    result: TrainingResult,
    sources: Sequence[Source | NamedSource],
    start_digest: str,
) -> None:
    """Write `training.json` for the weights in this folder: their sources and settings, and what each channel did.

    `start_digest` is the `weights_digest` of the model before its first step: a digest of all base weights.
    """
    record = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "tool_version": __version__,
        "created": now(),
        "config_hash": config_hash(config),
        "start_weights": config.train.model,
        "start_digest": start_digest,
        "mode": config.train.mode,
        "sources": [{"kind": source.kind, "name": source.name, "sha256": source.sha256} for source in sources],
        "warmup_steps": result.warmup_steps,
        "steps": result.steps,
        "channels": [asdict(channel) for channel in result.channels],
        "diagnosis": list(result.diagnosis),
        "alarms": list(result.alarms),
        "counts": dict(result.counts),
        "drops": dict(result.drops),
        "seconds": dict(result.seconds),
    }
    atomic_write_json(folder / RECORD, record)
