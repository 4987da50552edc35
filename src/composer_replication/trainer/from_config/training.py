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

import torch
from transformers import PrinterCallback, TrainerCallback, set_seed

from composer_replication.config import CrfConfig
from composer_replication.config.train import GRPOSection
from composer_replication.config.values import to_toml
from composer_replication.errors import (
    ComposerError,
    ConfigError,
    StaleArtefactError,
    explain,
)
from composer_replication.optional import require
from composer_replication.runs.lineage import channel_results
from composer_replication.runs.split import held_out_of
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
    tell_data,
    tell_proof,
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
from composer_replication.trainer.sessions.phases import (
    OnPhase,
    PhaseTimes,
    Say,
    telling_phases,
)
from composer_replication.trainer.start_model import adapter_refused, prepare_model, with_token_rows
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import RunDiagnosis, diagnose

__all__ = ["TrainingCallbacks", "run_training"]


OnLog = Callable[[int, int, Mapping[str, Any]], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingCallbacks:
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
    progress: TrainingCallbacks | None = None,
    replica: Replica | None = None,
) -> TrainingResult:
    """Train as the config says, and write checkpoints, metrics, the weights and a record of where they are from.

    `resume` insists on a checkpoint to go on from; without it `train.resume` decides. A plan that does not fit the
    memory is refused if it must. SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint.
    """
    reporter = progress or TrainingCallbacks()
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
        self,
        told: TrainingCallbacks,
        folder: TrainingFolder,
        config: CrfConfig,
        resumed_from: Callable[[], Path | None],
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


def _connect(trainer: Any, reporter: TrainingCallbacks, folder: TrainingFolder, config: CrfConfig) -> None:
    """To those who are told of steps, and to signals that end it."""
    trainer.remove_callback(PrinterCallback)  # it prints dictionaries
    trainer.add_callback(_Reports(reporter, folder, config, lambda: trainer.resumed_from))
    trainer.stop_signals = (signal.SIGTERM, signal.SIGINT)


def _make_offline(
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, reporter: TrainingCallbacks, must_fit: bool
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
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, reporter: TrainingCallbacks, must_fit: bool
) -> _Made:

    del must_fit  # what rollouts take depends on their lengths, which nobody knows
    args = _grpo_arguments_of(inputs, folder)
    train = inputs.config.train
    length, say = train.grpo.max_completion_length, _while_it_runs(reporter.say)
    diagnosis = RunDiagnosis(every=train.diagnose_every, max_completion_length=length, say=say)
    return _Made(
        args=args,
        build=lambda: grpo_trainer(inputs, args, folder, alarm, diagnosis, reporter.say),
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


# `crf train` with rollouts: prompts, rewards and environment by name, and the trainer.


def _grpo_arguments_of(inputs: Inputs, folder: TrainingFolder) -> Any:
    """A `trl.GRPOConfig`; what TRL refuses is told in its own words."""
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
    """The trainer, and the run's logged sessions that it has beside its rollouts, where a run is named."""
    config, grpo = inputs.config, inputs.config.train.grpo
    rewards, environment, rollouts = rewards_and_world(grpo)
    prompts, held_out = prompts_of(inputs)
    set_seed(config.train.optimiser.seed)
    model, adapter = _model(inputs, args, say)
    logged = _logged(inputs, model, say)
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
        of_adapter = adapter is not None and "target modules" in str(error).lower()
        raise adapter_refused(error, model) if of_adapter else refused(error, config.train) from error
    return trainer, logged


def rewards_and_world(grpo: GRPOSection) -> tuple[list[Any], Any | None, Any | None]:
    """The reward functions, and what makes environments or rollouts: ours, an OpenEnv server's, or verifiers'."""
    rewards = [named_object(path, "train.grpo.rewards") for path in grpo.rewards]
    rollouts = None if grpo.rollouts is None else named_object(grpo.rollouts, "train.grpo.rollouts")
    environment = _environment(grpo.environment)
    if environment is not None and rollouts is not None:
        fix = "A rollout function has its own environment: TRL would play a second time."
        raise ConfigError(explain("train.grpo", got="environment and rollouts", expected="one of the two", fix=fix))
    if isinstance(environment, VerifiersWorld):
        return rewards or [world_reward], None, environment
    if not rewards and environment is None:
        expected = "one as module:function, or an environment with get_reward"
        raise ConfigError(explain("train.grpo.rewards", got="none", expected=expected))
    return rewards, environment, rollouts


def _environment(name: str | None) -> Any | None:
    """By what its name is: a server's address, an id of verifiers, or a callable."""
    if name is None:
        return None
    if is_address(name):
        return openenv_environment(name)
    return verifiers_world(name) if is_verifiers(name) else named_object(name, "train.grpo.environment")


def _model(inputs: Inputs, args: Any, say: Say) -> tuple[Any, Any | None]:
    """The start weights, and the adapter that the trainer puts on; weights in 4 bits have theirs already."""
    adapter, name = lora_config(inputs.config.train.adapter), inputs.config.train.model
    assert name is not None
    source, protected_ids = inputs.renderer.template.source, inputs.renderer.protected.ids
    # TRL hands vLLM the weights by names that wrapped layers do not have.
    why_not = "with FSDP" if args.fsdp else "with vLLM" if args.use_vllm else ""

    def rows(model: Any) -> list[int]:
        said_ids = [number for text, number in protected_ids.items() if text in source]
        return token_rows(inputs, model, said_ids, say, why_not=why_not)

    if inputs.config.train.adapter.kind == "qlora":
        return prepare_model(name, args, peft_config=adapter, quantization="4bit", token_rows=rows), None
    model = prepare_model(name, args, peft_config=None, quantization="none", adapter_follows=adapter is not None)
    return model, None if adapter is None else with_token_rows(adapter, model, rows(model))


def _logged(inputs: Inputs, model: Any, say: Say) -> LoggedSessions | None:
    """Sites and pairs of the run directory, where there is one with some."""
    config, run = inputs.config, inputs.run
    if run is None:
        return None
    use_sites = config.train.channels.logged_sites and config.loss.alpha_sdpo > 0 and run.path("sites").exists()
    use_pairs = config.loss.beta_replay > 0 and run.path("pairs").exists()
    if not (use_sites or use_pairs):
        return None
    budget, overlap = config.train.batch.window
    held_out = held_out_of(run)
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
        with torch.autocast(device, torch.bfloat16, enabled=config.train.optimiser.bf16):  # as the steps are
            sessions = sessions.prove(model, config.train.proof.margin)
        tell_proof(sessions, say, can_warm_up=False)
    sessions.require_items()
    return sessions
