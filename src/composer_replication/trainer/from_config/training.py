"""Train from a config: what `crf train` does, as a library.

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

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_replication.config import CrfConfig
from composer_replication.config.train import GRPOSection
from composer_replication.config.values import to_toml
from composer_replication.errors import ComposerError, ConfigError, StaleArtefactError, explain
from composer_replication.optional import require
from composer_replication.runs.lineage import channel_results
from composer_replication.runs.split import read_test_ids
from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    lora_config,
    named_object,
    prompts_of,
    read_inputs,
    token_rows,
    unmatched_models,
    weighting_of,
)
from composer_replication.trainer.from_config.offline import (
    SOURCES,
    check_memory,
    offline_data,
    offline_memory,
    report_data,
    report_hint_check,
)
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.plan import (
    GRPO_CHANNELS,
    OFFLINE_CHANNELS,
    TrainingResult,
    metric_names,
    named_sources,
    remarks_on,
    sources_of,
    write_record,
)
from composer_replication.trainer.from_config.requirements import (
    check_extra,
    make_arguments,
    offline_arguments,
    refused,
)
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.objective.hint_proof import verdict
from composer_replication.trainer.presets import (
    channel_settings,
    grpo_arguments,
    preset_rewards,
    rollout_options,
    teacher_of,
    training_arguments,
)
from composer_replication.trainer.replica import Replica, ReplicaSteps
from composer_replication.trainer.rollouts.worlds.openenv import is_address, openenv_environment
from composer_replication.trainer.rollouts.worlds.verifiers import (
    VerifiersWorld,
    is_verifiers,
    verifiers_world,
    world_reward,
)
from composer_replication.trainer.same_start import refuse_differences
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.phases import OnPhase, PhaseTimes, Say, reporting_phases
from composer_replication.trainer.start_model import adapter_refused, prepare_model, with_token_rows
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import RunDiagnosis, diagnose

__all__ = ["TrainingCallbacks", "run_training"]


OnLog = Callable[[int, int, Mapping[str, Any]], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingCallbacks:
    """Callbacks for a training's progress.

    `say` gets messages, `on_phase` the progress before the first step, `on_step` every step (step, total steps), and
    `on_log` every line of metrics (step, total steps, metrics).
    """

    say: Say = field(default_factory=lambda: _log.info)
    on_step: Callable[[int, int], None] = field(default_factory=lambda: lambda _step, _total: None)
    on_log: OnLog = field(default_factory=lambda: lambda _step, _total, _figures: None)
    on_phase: OnPhase = field(default_factory=lambda: lambda _phase: None)


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
        progress: Callbacks for the training's progress.
        replica: Train on this replica's part of the data, and exchange weights with the other replicas.
    """
    callbacks = progress or TrainingCallbacks()
    check_extra(config.train)
    folder = TrainingFolder.of(config)
    inputs = read_inputs(folder.with_first_primary(config), replica)
    config = inputs.config
    is_resumed = folder.resumes(is_required=resume, is_allowed=config.train.resume)
    make = _prepare_offline if config.train.mode == "offline" else _prepare_grpo
    alarm = CollapseAlarm.from_config(config.train.alarm, say=callbacks.say) if config.train.alarm.on else None
    mode_parts = make(inputs, folder, alarm, callbacks, must_fit)
    # Processes with different configs would otherwise train different things without an error.
    refuse_differences({"the config": to_toml(_without_paths(config))})
    used = contextlib.nullcontext() if inputs.run is None else inputs.run.used_for("training")
    with used, folder.held(is_main=mode_parts.args.process_index == 0):
        has_state = is_resumed or folder.has_warmup
        changes = folder.changed_options(config) if folder.has_begun else []
        if folder.has_begun and not has_state:
            callbacks.say(folder.resumption(config.train.optimiser.steps))
        # Report changes first, as they may explain why a checkpoint is refused below.
        for change in changes:
            callbacks.say(f"changed since the run began: {change}")
        if not has_state and mode_parts.args.process_index == 0:
            # Even after a kill before the first checkpoint, the next run can tell which options changed.
            folder.write_config(config)
        sources = sources_of(inputs.run, SOURCES)
        if mode_parts.sessions is not None and mode_parts.args.process_index == 0:
            folder.check_sources(
                mode_parts.sessions.digest, {source.name: source.sha256 for source in sources}, changes
            )
        times = PhaseTimes(folder.checkpoints / "seconds.json", callbacks.on_phase)
        with reporting_phases(times, callbacks.say):
            trainer, sessions = mode_parts.build()
        phase: Mapping[str, str] = getattr(trainer, "phase", {})
        # After a warm-up the model has other weights, but the phase has the digest of the initial weights.
        start_digest = phase.get("start_weights") or weights_digest(trainer.model)
        _add_reporting(trainer, callbacks, folder, config)
        if replica is not None:
            trainer.add_callback(ReplicaSteps(replica))
        mode_parts.before(trainer)
        _train(trainer, is_resumed, changes)
        if trainer.was_finished:
            callbacks.say(
                f"all {trainer.state.global_step} steps are already finished: raise train.optimiser.steps to "
                "continue, or "
                "set train.output for a new run"
            )
        result = replace(_result(config, folder, trainer, alarm, sessions), seconds=times.seconds)
        if result.stopped_by:
            return result
        return _save(config, folder, trainer, result, [*sources, *named_sources(config)], start_digest)


def _without_paths(config: CrfConfig) -> CrfConfig:
    """Return the config without paths, which may differ between machines; file contents are compared elsewhere."""
    return replace(config, train=replace(config.train, model=None, run=None, output=None))


@dataclass(frozen=True, kw_only=True)
class _ModeParts:
    """The parts of a training that depend on its mode.

    `args` are the training arguments, `build` returns the trainer and its logged sessions, and `before` reports on the
    trainer just before the first step. `sessions` are an offline training's sessions before the hint check.
    """

    args: Any
    build: Callable[[], tuple[Any, LoggedSessions | None]]
    before: Callable[[Any], None]
    sessions: LoggedSessions | None = None


class _ReportingCallback(TrainerCallback):
    """Passes steps and metrics on to the callbacks.

    It also writes the config, but only after a checkpoint to resume from has passed its checks.
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


def _add_reporting(trainer: Any, callbacks: TrainingCallbacks, folder: TrainingFolder, config: CrfConfig) -> None:
    """Add the reporting callback to the trainer, and let SIGTERM and Ctrl-C stop it."""
    # PrinterCallback would print the raw metrics to stdout.
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_ReportingCallback(callbacks, folder, config, lambda: trainer.resumed_from))
    trainer.stop_signals = (signal.SIGTERM, signal.SIGINT)


def _prepare_offline(
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, callbacks: TrainingCallbacks, must_fit: bool
) -> _ModeParts:
    from composer_replication.trainer.from_config import offline as run_offline

    # First, since this may raise an error, and reading the sessions takes long.
    args = offline_arguments(inputs.config.train, folder.checkpoints)
    callbacks.say(f"reading sessions from {inputs.config.train.run}")
    data = offline_data(inputs)
    for remark in unmatched_models(inputs.config.render, data.models):
        callbacks.say(remark)
    data.train.require_items()
    report_data(data.train, callbacks.say)
    for remark in remarks_on(inputs, data.train):
        callbacks.say(remark)
    check_memory(offline_memory(inputs, data.train), callbacks.say, must_fit)
    # The final diagnosis is part of the result, so report only findings during the run.
    diagnosis = RunDiagnosis(every=inputs.config.train.diagnose_every, say=callbacks.say, says_summary=False)
    trainer_callbacks: list[TrainerCallback] = [diagnosis] if alarm is None else [diagnosis, alarm]
    parts = inputs, data, args, folder, trainer_callbacks, callbacks.say
    return _ModeParts(
        args=args,
        build=lambda: ((trainer := run_offline.offline_trainer(*parts)), trainer.train_dataset),  # after the hint check
        before=lambda trainer: run_offline.report_hint_check(
            trainer.train_dataset, callbacks.say, can_warm_up=not trainer.phase
        ),
        sessions=data.train,
    )


def _prepare_grpo(
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, callbacks: TrainingCallbacks, must_fit: bool
) -> _ModeParts:

    # The memory of rollouts depends on their lengths, which are not known in advance.
    del must_fit
    args = _grpo_arguments_of(inputs, folder)
    train = inputs.config.train
    diagnosis = RunDiagnosis(
        every=train.diagnose_every,
        max_completion_length=train.grpo.max_completion_length,
        say=callbacks.say,
        says_summary=False,
    )
    return _ModeParts(
        args=args,
        build=lambda: grpo_trainer(inputs, args, folder, alarm, diagnosis, callbacks.say),
        before=lambda trainer: callbacks.say(f"channels: {', '.join(trainer.channels_on())}"),
    )


def _train(trainer: Any, is_resumed: bool, changes: Sequence[str]) -> None:
    """Train. If a checkpoint is refused, add the changed options to the error message.

    They may explain the error: with a weight of 0, for example, the sessions have different targets.
    """
    try:
        trainer.train(resume_from_checkpoint=is_resumed)
    except StaleArtefactError as error:
        if not changes:
            raise
        raise StaleArtefactError(f"{error} Changed since the run began: {'; '.join(changes)}.") from error


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
            *_hint_check_findings(sessions, can_warm_up=not phase),
        ),
        alarms=tuple(f"step {event.step}: {event.describe()}" for event in (alarm.alarms if alarm else ())),
        counts=metric_names(counts) | _windows_seen(counts, trainer),
        drops=metric_names(drops),
        warmup_steps=int(phase.get("warmup_steps", 0)),
    )


def _windows_seen(counts: Mapping[str, int], trainer: Any) -> dict[str, int]:
    """Return how many windows the steps have seen, including repetitions; less than the total means no full pass."""
    args = trainer.args
    at_once = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {"windows_seen": trainer.state.global_step * at_once} if "windows" in counts else {}


def _hint_check_findings(sessions: LoggedSessions | None, *, can_warm_up: bool) -> Iterator[str]:
    """Yield the hint check's verdict if the model does not react to hints, which no metric shows."""
    if sessions is not None and sessions.proofs and (heed_verdict := verdict(sessions.proofs)).heeds is False:
        yield heed_verdict.summary(can_warm_up=can_warm_up)


def _save(
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
        write_record(temporary, config, finished, sources, start_digest)
        folder.replace_trained(temporary, is_adapter=is_adapter)
    return finished


def _grpo_arguments_of(inputs: Inputs, folder: TrainingFolder) -> Any:
    """Return a `trl.GRPOConfig`. Errors quote TRL's own message."""
    trl = require("trl", extra="train")
    train = inputs.config.train
    return make_arguments(
        trl.GRPOConfig,
        train,
        output_dir=str(folder.checkpoints),
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        per_device_eval_batch_size=train.grpo.num_generations,
        chat_template_kwargs=dict(inputs.config.render.template_variables) or None,
        **training_arguments(train),
        **grpo_arguments(train),
    )


def grpo_trainer(
    inputs: Inputs, args: Any, folder: TrainingFolder, alarm: CollapseAlarm | None, diagnosis: RunDiagnosis, say: Say
) -> tuple[ComposerReplicationTrainer, LoggedSessions | None]:
    """Return the trainer, and the logged sessions that it also trains on, if the config names a run."""
    config, grpo = inputs.config, inputs.config.train.grpo
    rewards, environment, rollouts = rewards_and_environment(grpo)
    prompts, held_out = prompts_of(inputs)
    set_seed(config.train.optimiser.seed)
    model, adapter = _model(inputs, args, say)
    logged = _logged_sessions(inputs, model, say)
    try:
        trainer = ComposerReplicationTrainer(
            model=model,
            args=args,
            reward_funcs=[*rewards, *preset_rewards(config.train, inputs.tokenizer)],
            train_dataset=prompts,
            eval_dataset=held_out,
            processing_class=inputs.tokenizer,
            peft_config=adapter,
            environment_factory=environment,
            rollout_func=rollouts,
            settings=channel_settings(config),
            teacher=teacher_of(config),
            sdpo_weighting=weighting_of(config),
            rollouts=rollout_options(config),
            heed_gate=grpo.heed_gate,
            logged_sessions=logged,
            alarm=alarm or CollapseAlarm(()),
            diagnosis=diagnosis,
            metrics_path=folder.metrics,
        )
    except ComposerError:
        raise
    except ValueError as error:
        # PEFT raises ValueError for unknown layers, and TRL raises it for invalid arguments.
        of_adapter = adapter is not None and "target modules" in str(error).lower()
        raise adapter_refused(error, model) if of_adapter else refused(error, config.train) from error
    return trainer, logged


def rewards_and_environment(grpo: GRPOSection) -> tuple[list[Any], Any | None, Any | None]:
    """Return the reward functions, and either an environment factory or a rollout function, if any."""
    rewards = [named_object(path, "train.grpo.rewards") for path in grpo.rewards]
    rollouts = None if grpo.rollouts is None else named_object(grpo.rollouts, "train.grpo.rollouts")
    environment = _environment(grpo.environment)
    if environment is not None and rollouts is not None:
        fix = "A rollout function has its own environment, so TRL would run every episode twice."
        raise ConfigError(explain("train.grpo", got="environment and rollouts", expected="only one of them", fix=fix))
    # A verifiers environment runs whole episodes, so it is used as the rollout function.
    if isinstance(environment, VerifiersWorld):
        return rewards or [world_reward], None, environment
    if not rewards and environment is None:
        expected = "a reward function as module:function, or an environment with get_reward"
        raise ConfigError(explain("train.grpo.rewards", got="none", expected=expected))
    return rewards, environment, rollouts


def _environment(name: str | None) -> Any | None:
    """Return the environment for a name: a server's address, a verifiers id, or `module:function`."""
    if name is None:
        return None
    if is_address(name):
        return openenv_environment(name)
    return verifiers_world(name) if is_verifiers(name) else named_object(name, "train.grpo.environment")


def _model(inputs: Inputs, args: Any, say: Say) -> tuple[Any, Any | None]:
    """Return the initial model, and the adapter for the trainer to add; a 4-bit model already has its adapter."""
    adapter, name = lora_config(inputs.config.train.adapter), inputs.config.train.model
    assert name is not None
    source, protected_ids = inputs.renderer.template.source, inputs.renderer.protected.ids
    # TRL copies weights to vLLM by parameter name, but layers with trainable rows have other names.
    why_not = "with FSDP" if args.fsdp else "with vLLM" if args.use_vllm else ""

    def rows(model: Any) -> list[int]:
        template_ids = [token for text, token in protected_ids.items() if text in source]
        return token_rows(inputs, model, template_ids, say, why_not=why_not)

    if inputs.config.train.adapter.kind == "qlora":
        return prepare_model(name, args, peft_config=adapter, quantization="4bit", token_rows=rows), None
    model = prepare_model(name, args, peft_config=None, quantization="none", adapter_follows=adapter is not None)
    return model, None if adapter is None else with_token_rows(adapter, model, rows(model))


def _logged_sessions(inputs: Inputs, model: Any, say: Say) -> LoggedSessions | None:
    """Return the run's sessions with the sites and pairs that this training uses, or None if it uses none."""
    config, run = inputs.config, inputs.run
    if run is None:
        return None
    use_sites = config.train.channels.logged_sites and config.loss.alpha_sdpo > 0 and run.path("sites").exists()
    use_pairs = config.loss.beta_replay > 0 and run.path("pairs").exists()
    if not (use_sites or use_pairs):
        return None
    budget, overlap = config.train.batch.window
    # Held-out sessions are for evaluation only.
    held_out = read_test_ids(run)
    sessions = LoggedSessions.from_run(
        run,
        inputs.renderer,
        budget=budget,
        overlap=overlap,
        placement=config.train.batch.placement,
        part=config.train.batch.part,
        responses="none",
        use_sites=use_sites,
        use_pairs=use_pairs,
        contrast=config.train.switches.contrast is not None,
        only=lambda conversation: conversation.id not in held_out,
    )
    for remark in unmatched_models(config.render, sessions.models):
        say(remark)
    if use_sites and config.train.proof.on:
        device = next(model.parameters()).device.type
        # Use the precision of training steps, which run under autocast.
        with torch.autocast(device, torch.bfloat16, enabled=config.train.optimiser.bf16):
            sessions = sessions.prove(model, config.train.proof.margin)
        report_hint_check(sessions, say, can_warm_up=False)
    sessions.require_items()
    return sessions
