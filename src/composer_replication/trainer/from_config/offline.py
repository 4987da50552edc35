"""Train on logged sessions with `crf train`: cut windows, estimate memory, warm up, and build the trainer."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments, set_seed

from composer_replication.batch.render.decision import find_decision
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.config import CrfConfig, SplitConfig, TrainConfig
from composer_replication.errors import ConfigError, InputError, NotEnoughMemoryError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import Split, read_split, split_conversations
from composer_replication.trainer.checkpoints.run_checkpoints import max_over_processes
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    TrainingSetup,
    lora_config,
    make_arguments,
    max_context,
    model_config,
    unmatched_models,
    weighting_of,
)
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.objective.channels import with_metric_names
from composer_replication.trainer.objective.distributed import is_sharded
from composer_replication.trainer.objective.reference import response_logprobs
from composer_replication.trainer.presets import channel_settings, teacher_from_config
from composer_replication.trainer.same_start import launched_processes
from composer_replication.trainer.sessions.dataset import LoggedSessions, cut_sessions, sessions_of_run
from composer_replication.trainer.sessions.phases import Say
from composer_replication.trainer.sessions.proof import describe_hint_check
from composer_replication.trainer.sessions.rendering import (
    LoggedSession,
    RenderedSession,
    WindowSettings,
    assistant_token_ids,
    render_session,
)
from composer_replication.trainer.start_model import choose_token_rows, loading_dtype, prepare_model, shard_model
from composer_replication.trainer.watch.collapse_alarm import CollapseAlarm
from composer_replication.trainer.watch.diagnosis import RunDiagnosis
from composer_replication.trainer.watch.memory_plan import MemoryPlan, plan_memory, shape_of
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from composer_replication.trainer.offline_trainer import OfflineTrainer


# The wording for each treatment of turns' thinking, by key in the counts.
_THINKING_TREATMENTS = {
    "thinking_target": "learned",
    "thinking_context": "shown as context",
    "thinking_left_out": "left out",
    "thinking_not_shown": "not supported by the template",
    "empty_thought_as_header": "after an empty thinking block in the header",
}
_OPERATIONS_PER_WEIGHT, _UTILIZATION = 8, 0.3
"""Operations per weight and token in a step with a teacher, and the fraction of the measured speed that the step
reaches."""
# The log-prob of tool names is measured on this many calls, each with at most this many tokens of context.
_MAX_CALLS, _MAX_CONTEXT = 8, 2048
# Large, so that seeds for shuffles do not collide with training seeds, which are usually small consecutive numbers.
_SEEDS_BETWEEN_SHUFFLES = 1_000_003
# Options that need held-out sessions, each with a test for whether a config turns it on.
_EVALUATIONS: dict[str, Callable[[TrainConfig], bool]] = {
    "train.eval_every": lambda train: train.eval_every > 0,
    "train.warmup.mode = until": lambda train: train.warmup.mode == "until",
}


def prepare_offline(
    inputs: Inputs, folder: TrainingFolder, alarm: CollapseAlarm | None, say: Say, must_fit: bool
) -> TrainingSetup:
    """Return the setup for training on logged sessions, after reporting the data and the memory that a step needs."""
    train = inputs.config.train
    # First, since this may raise an error, and reading the sessions takes long.
    args = make_arguments(TrainingArguments, train, folder.checkpoints)
    say(f"reading sessions from {train.run}")
    data = offline_data(inputs)
    for remark in unmatched_models(inputs.config.render, data.models):
        say(remark)
    data.train.require_items()
    for remark in [*_describe_data(data.train), *_data_remarks(inputs, data.train)]:
        say(remark)
    _check_memory(_estimate_memory(inputs, data.train), say, must_fit)
    # The final diagnosis is part of the result, so report only findings during the run.
    diagnosis = RunDiagnosis(every=train.diagnose_every, say=say, says_summary=False)
    callbacks: list[TrainerCallback] = [diagnosis] if alarm is None else [diagnosis, alarm]

    def build() -> tuple[OfflineTrainer, LoggedSessions]:
        trainer = _offline_trainer(inputs, data, args, folder, callbacks, say)
        return trainer, trainer.train_dataset  # after the hint check

    def report_hint_check(trainer: OfflineTrainer) -> None:
        for sentence in describe_hint_check(trainer.train_dataset.proofs, can_warm_up=not trainer.phase):
            say(sentence)

    return TrainingSetup(args=args, build=build, before=report_hint_check, sessions=data.train)


def plan_offline(inputs: Inputs) -> dict[str, Any]:
    """Return what `TrainingPlan` reports about a training on logged sessions, such as counts, memory and duration."""
    data = offline_data(inputs)
    data.train.require_items()
    pace, steps = _measure_pace(inputs, data.train), inputs.config.train.optimiser.steps
    return {
        "counts": with_metric_names(data.train.counts),
        "drops": with_metric_names(data.train.drops),
        "memory": _estimate_memory(inputs, data.train),
        "remarks": [*unmatched_models(inputs.config.render, data.models), *_data_remarks(inputs, data.train)],
        "pace": pace,
        "seconds": pace.seconds(_OPERATIONS_PER_WEIGHT * steps * pace.tokens_a_step),
    }


class _OfflineData(NamedTuple):
    """Sessions to train on, and held-out sessions if there are evaluations."""

    train: LoggedSessions
    held_out: LoggedSessions | None
    models: frozenset[str]
    """Names of the models that wrote the run's turns."""


def offline_data(inputs: Inputs) -> _OfflineData:
    """Cut the run's sessions into windows as configured in [train.batch], with targets for the active channels."""
    config = inputs.config
    if inputs.run is None:
        fix = "Create a run with `crf ingest` and `crf sites`."
        raise ConfigError(explain("train.run", got="none", expected="a run directory", fix=fix))
    options: dict[str, Any] = {
        **_window_options(config),
        "responses": "good" if config.train.channels.good_turns else "none",
        "work_failures": config.train.channels.work_failures,
        "use_sites": config.loss.alpha_sdpo > 0,
        "contrast": config.train.switches.contrast is not None,
    }
    if config.loss.beta_replay == 0:
        options["use_pairs"] = False
    eval_options = [key for key, is_on in _EVALUATIONS.items() if is_on(config.train)]
    known_split = _training_split(inputs.run, config.split, is_evaluated=bool(eval_options))
    # Without an evaluation, a validation split would only waste sessions.
    validation = config.split.validation if eval_options else 0.0
    sessions, settings = sessions_of_run(inputs.run, **options)
    rendered: list[RenderedSession] = []

    def conversations() -> Iterator[Conversation]:
        """Render each session as it is read, and yield its conversation for the train/test split.

        Reading and splitting in one pass avoids keeping all conversations in memory.
        """
        for session in sessions:
            if known_split is None or session.conversation.id not in known_split.test:
                rendered.append(render_session(inputs.renderer, session, settings))
                yield session.conversation

    new_split = split_conversations(
        conversations(), validation=validation, test=config.split.test or 0.0, by=config.split.by
    )
    split, replica = known_split or new_split, inputs.replica
    trained_on = split.train
    if replica is not None:
        trained_on = replica.part_of(split.train & {session.conversation_id for session in rendered})
    # A replica's hint check and reference log-probs cover only some sessions, so do not store them in the run.
    run = inputs.run if replica is None else None
    train, held_out = (
        LoggedSessions(
            (session for session in rendered if session.conversation_id in session_ids),
            inputs.renderer,
            settings,
            run=run,
        )
        for session_ids in (trained_on, split.validation)
    )
    if replica is not None:
        replica.weigh(len(train))
    is_evaluated = bool(eval_options) if known_split else validation > 0
    if is_evaluated and not len(held_out):
        fix = f"Turn {' and '.join(eval_options)} off, raise split.validation, or ingest more sessions."
        got = f"no target in {config.split.validation:.0%} of the sessions"
        raise InputError(explain(eval_options[0], got=got, expected="at least one target to evaluate on", fix=fix))
    return _OfflineData(
        train, held_out if is_evaluated else None, frozenset().union(*(session.models for session in rendered))
    )


def _training_split(run: RunDir, section: SplitConfig, *, is_evaluated: bool) -> Split | None:
    """Return the split made by `crf split`, or None if there is none.

    Unless the training is evaluated, validation sessions are moved to the training sessions. Raises ConfigError if
    [split] sets an option to another value than the one that the split was made with.
    """
    split = read_split(run)
    if split is None:
        return None
    stored, defaults = run.meta(SPLIT).settings, SplitConfig()
    for name in vars(section):
        now = getattr(section, name)
        if now not in (getattr(defaults, name), stored.get(name)):
            fix = f"Run `crf split {run.root} --set split.{name}={now}` for a new split."
            raise ConfigError(
                explain(f"split.{name}", got=now, expected=f"{stored.get(name)}, as in the run's split", fix=fix)
            )
    return split if is_evaluated else Split(split.train | split.validation, frozenset(), split.test)


def why_site_is_left_out(config: CrfConfig, renderer: Renderer, session: LoggedSession) -> str:
    """Return why training would leave out the only error site of a session, or "" if a window contains the site.

    Whether a window contains a site does not depend on other sites. The site's hint may still fail the hint check.
    """
    settings = WindowSettings(**_window_options(config), responses="none", use_pairs=False)
    rendered = render_session(renderer, session, settings)
    cut_result = cut_sessions(renderer, [rendered], settings)
    if any(window.site_ids for window in cut_result.windows):
        return ""
    return ", ".join(name.partition(": ")[2] for name in cut_result.drops)


def _window_options(config: CrfConfig) -> dict[str, Any]:
    batch = config.train.batch
    budget, overlap = batch.window
    return {"budget": budget, "overlap": overlap, "placement": batch.placement, "part": batch.part}


def _estimate_memory(inputs: Inputs, sessions: LoggedSessions) -> MemoryPlan:
    """Estimate the memory of a step on the longest trees from the model's config, without loading its weights."""
    train = inputs.config.train
    # The worst case: one micro-batch contains the largest windows.
    sizes = sorted((item.num_tokens for item in sessions.items), reverse=True)
    size = 2 if train.optimiser.bf16 else 4
    assert train.model is not None
    return plan_memory(
        model_config(train.model),
        longest_tree=sum(sizes[: train.optimiser.per_device]),
        device="cuda" if torch.cuda.is_available() else "cpu",
        weight_bytes=loading_dtype(bf16=train.optimiser.bf16, has_adapter=train.adapter.kind != "none").itemsize,
        compute_bytes=size,
        checkpointing=train.optimiser.checkpointing,
        lora_rank=None if train.adapter.kind == "none" else train.adapter.rank,
        four_bit=train.adapter.kind == "qlora",
        teacher=train.teacher.kind,
        warmed_up=train.warmup.mode != "off",
        accumulation=train.optimiser.accumulation,
        num_shards=launched_processes() if train.fsdp.on else 1,
    )


def _check_memory(plan: MemoryPlan, say: Say, must_fit: bool) -> None:
    """Report the memory that a step needs. Raises NotEnoughMemoryError if it must fit but does not."""
    if plan.fits:
        say(f"memory: {str(plan).splitlines()[-1]}")
    elif not must_fit:
        say(f"memory:\n{plan}")
    else:
        got = f"{plan.peak / 2**30:.2f} GiB"
        expected = f"at most 90% of the available {plan.available / 2**30:.2f} GiB"
        raise NotEnoughMemoryError(explain("memory for a step", got=got, expected=expected, fix=" ".join(plan.advice)))


def _offline_trainer(
    inputs: Inputs,
    data: _OfflineData,
    args: TrainingArguments,
    folder: TrainingFolder,
    callbacks: list[TrainerCallback],
    say: Say,
) -> OfflineTrainer:
    """Build the trainer: warm up the model if needed, check the hints, and compute reference log-probs."""
    from composer_replication.trainer.offline_trainer import OfflineTrainer

    config = inputs.config
    model, warmed_up = _start_model(inputs, data, args, folder, say)
    channels = config.train.channels
    # Good turns may be trained on in the warm-up only.
    has_good_turns = channels.good_turns and (warmed_up is None or channels.good_turns_after_warmup)
    # A warmed-up model, or a replica's part of the sessions, needs reference log-probs of its own instead of the run's.
    references = folder.checkpoints if inputs.replica is not None else folder.warmup if warmed_up is not None else None
    # A control's shuffled hints and swapped pairs have a seed of their own; everything else uses the training seed.
    control_seed = config.train.optimiser.seed + _SEEDS_BETWEEN_SHUFFLES * (config.train.shuffle - 1)
    trainer = OfflineTrainer(
        model,
        args,
        data.train,
        settings=channel_settings(config),
        teacher=teacher_from_config(config),
        weighting=weighting_of(config),
        lm_weight=1.0 if has_good_turns else 0.0,
        eval_sessions=data.held_out if config.train.eval_every else None,
        fsdp=config.train.fsdp.on,
        warmed_up=warmed_up,
        reference_path=None if references is None else references / ARTEFACTS["ref_logprobs"].file_name,
        hint_margin=config.train.proof.margin if config.train.proof.on and config.loss.alpha_sdpo > 0 else None,
        shuffle_seed=None if config.train.control == "none" else control_seed,
        metrics_path=folder.metrics,
        callbacks=callbacks,
        processing_class=inputs.tokenizer,
    )
    if args.world_size > 1:
        say(_describe_sharding(trainer.model, args.world_size))
    return trainer


def _describe_sharding(model: Any, num_processes: int) -> str:
    """Describe the kind of parallelism (DDP or FSDP2), and how many of the weights this process holds."""
    local_tensors = [
        parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()
    ]
    here, total = (sum(tensor.numel() for tensor in tensors) for tensors in (local_tensors, model.parameters()))
    kind = "FSDP2" if is_sharded(model) else "DDP"
    return f"{kind} on {num_processes} processes: {here:,} of {total:,} weights on this process"


def _describe_data(sessions: LoggedSessions) -> Iterator[str]:
    """Yield how the turns' thinking was treated, and how many turns are imitated (channel 1) or left out."""
    phrases = [
        f"{sessions.counts[name]} {words}" for name, words in _THINKING_TREATMENTS.items() if sessions.counts.get(name)
    ]
    if phrases:
        yield f"thinking of turns: {', '.join(phrases)}"
    if "good_turns" in sessions.counts:
        left_out = sorted((name, n) for name, n in sessions.drops.items() if name.startswith("lm_ce: "))
        why = ", ".join(f"{name.removeprefix('lm_ce: ').replace('_', ' ')} {n}" for name, n in left_out)
        num_good, num_turns = sessions.counts["good_turns"], sessions.counts["model_turns"]
        # A turn that is good but in no window is counted both as good and as left out.
        num_both = sum(n for _, n in left_out) - (num_turns - num_good)
        why += f" ({num_both} of these are good turns that do not fit in any window)" if num_both > 0 else ""
        yield f"good turns (channel 1): {num_good} of {num_turns}" + (f"; left out: {why}" if why else "")


def _start_model(
    inputs: Inputs, data: _OfflineData, args: TrainingArguments, folder: TrainingFolder, say: Say
) -> tuple[nn.Module, Path | None]:
    """Return the initial model with its adapter, and the final checkpoint of the warm-up, or None without a warm-up.

    The trainer loads the weights from that checkpoint, whether this process or an earlier one ran the warm-up.
    """
    from composer_replication.trainer.warmup import FinishedWarmUp, warm_up

    train = inputs.config.train
    # A control starts with the same warmed-up weights as the training that it is compared with.
    if train.control != "none" and args.should_save and not folder.warmup.exists():
        real = TrainingFolder.of(replace(inputs.config, train=replace(train, control="none")))
        if FinishedWarmUp.read(real.warmup) is not None:
            folder.copy_warmup(real)
    model = _load_model(inputs, data, args, say)
    needs_warm_up = _needs_warm_up(inputs, data, args, folder, model, say)
    # The model was sharded only for scoring, but the trainer expects an unsharded model.
    if is_sharded(model):
        del model
        model = _load_model(inputs, data, args, lambda _again: None)
    if not needs_warm_up:
        return model, None
    is_new = FinishedWarmUp.read(folder.warmup) is None
    if is_new and not folder.has_warmup and args.should_save:
        folder.write_config(inputs.config)
    finished = warm_up(
        model,
        make_arguments(TrainingArguments, train, folder.warmup, **_warm_up_arguments(train)),
        data.train,
        held_out=data.held_out,
        patience=train.warmup.patience if train.warmup.mode == "until" else None,
        on_held_out=lambda step, loss: say(f"warm-up step {step}: held-out loss on good turns {loss:.4f}"),
        hinted_corrections=train.warmup.hinted_corrections,
        processing_class=inputs.tokenizer,
        fsdp=train.fsdp.on,
    )
    say(finished.describe())
    # The warm-up has changed the model, so load the initial weights again.
    if is_new:
        del model
        # Free this model before loading it again; otherwise both copies would have to fit into memory.
        gc.collect()
        torch.cuda.empty_cache()
        model = _load_model(inputs, data, args, lambda _again: None)
    return model, folder.warmup / finished.checkpoint


def _load_model(inputs: Inputs, data: _OfflineData, args: TrainingArguments, say: Say) -> nn.Module:
    train, written_ids = inputs.config.train, assistant_token_ids(data.train.rendered)
    assert train.model is not None
    # The adapter is initialized before the trainer sets the seed.
    set_seed(train.optimiser.seed)
    why_not = "with FSDP" if args.fsdp or train.fsdp.on else ""
    quantization = "4bit" if train.adapter.kind == "qlora" else "none"
    return prepare_model(
        train.model,
        args,
        peft_config=lora_config(train.adapter),
        quantization=quantization,
        token_rows=lambda model: choose_token_rows(
            train.adapter.token_rows, model, inputs.tokenizer, written_ids, say, why_not=why_not
        ),
    )


def _needs_warm_up(
    inputs: Inputs, data: _OfflineData, args: TrainingArguments, folder: TrainingFolder, model: nn.Module, say: Say
) -> bool:
    """Return whether the training needs a warm-up.

    A mode other than "auto" decides this directly. With "auto", a resumed training run keeps its earlier decision, and
    a new training run needs a warm-up if the model assigns a low probability to the tool names in the logs.
    """
    warmup, items = inputs.config.train.warmup, data.train.channels
    if warmup.mode != "auto":
        if warmup.mode != "off" and not items[CHANNELS[0]]:
            fix = 'Set train.channels.good_turns = true, or train.warmup.mode = "off".'
            raise ConfigError(explain("train.warmup.mode", got=warmup.mode, expected="good turns to train on", fix=fix))
        return warmup.mode != "off"
    if folder.has_warmup or folder.newest_step() is not None:
        return folder.has_warmup
    # Without good turns a warm-up has no data, and without the other channels it has no purpose.
    if not items[CHANNELS[0]] or not any(items[name] for name in CHANNELS[1:]) or args.fsdp:
        return False
    # The model is only used for scoring here, but unsharded it may not fit on one device.
    if inputs.config.train.fsdp.on and args.world_size > 1:
        shard_model(model, args)
    elif not getattr(model, "is_quantized", False):
        model.to(args.device)
    logprob = _tool_name_logprob(model, data.train)
    # Log-probs may differ slightly between processes, so warm up if any of them is low.
    is_low = bool(max_over_processes(int(logprob is not None and logprob < warmup.below), args.device))
    if is_low:
        say(
            f"log-prob of logged calls up to their tool's name: {logprob:.1f} nats, below {warmup.below:g}. This model"
            f" does not know the logs' harness, so it is warmed up with {warmup.steps} steps of channel 1"
            ' (train.warmup.mode = "off" turns this off)'
        )
    return is_low


def _warm_up_arguments(train: TrainConfig) -> dict[str, Any]:
    """Return the training arguments that differ in a warm-up, such as its number of steps and its schedule."""
    warmup, is_until = train.warmup, train.warmup.mode == "until"
    # With mode "until", the steps are only an upper bound: the warm-up ends when patience runs out.
    steps = warmup.most if is_until else warmup.steps
    rising = min(train.optimiser.warmup, steps - 1)
    every = warmup.every if is_until else train.save.every
    return {
        "max_steps": steps,
        "lr_scheduler_type": "constant_with_warmup" if rising else "constant",
        "warmup_steps": rising,
        "eval_strategy": "steps" if is_until else "no",
        "eval_steps": warmup.every if is_until else None,
        "per_device_eval_batch_size": train.optimiser.per_device,
        "save_steps": every,
        "report_to": "none",
    }


def _data_remarks(inputs: Inputs, sessions: LoggedSessions) -> list[str]:
    """Return remarks on the number of passes over the windows, on windows without errors, and on overlong windows."""
    config = inputs.config
    optimiser, channels = config.train.optimiser, config.train.channels
    windows_per_step = optimiser.per_device * optimiser.accumulation * launched_processes()
    num_with_errors = sum(
        any(window.site_ids or window.state_ids for window in item.windows) for item in sessions.items
    )
    # If only the warm-up trains on good turns, the other steps skip windows without an error or a pair.
    skips_good_turns = config.train.warmup.mode in ("steps", "until") and not channels.good_turns_after_warmup
    windows = num_with_errors if skips_good_turns and num_with_errors else len(sessions)
    remarks = [
        f"{optimiser.steps:,} steps see each of {windows:,} windows "
        f"{optimiser.steps * windows_per_step / windows:.2g} times"
        f" on average; for one pass, set train.optimiser.steps = {math.ceil(windows / windows_per_step)}"
    ]
    if channels.good_turns and 0 < num_with_errors < windows / 2:
        remarks.append(
            f"only {num_with_errors:,} of {windows:,} windows contain an error or a pair; to train on these only,"
            " set train.channels.good_turns = false"
        )
    too_long = _context_warning(config, max_context(config.train.model or "", inputs.tokenizer))
    return [*remarks, *([too_long] if too_long else [])]


def _context_warning(config: CrfConfig, context_limit: int | None) -> str:
    """Return a warning if windows are longer than the model's context, or ""."""
    budget, _ = config.train.batch.window
    if not context_limit or budget <= context_limit or config.train.mode != "offline":
        return ""
    return (
        f"train.batch.budget is {budget:,} tokens, but this model was trained on contexts of up to {context_limit:,}: "
        "beyond that its output is noise. Leave train.batch.budget and train.batch.overlap unset to use the model's"
        " limit"
    )


def _measure_pace(inputs: Inputs, sessions: LoggedSessions) -> TrainingPace:
    """Measure how fast this machine multiplies matrices, and count the model's weights and the tokens per window."""
    optimiser, size, number = inputs.config.train.optimiser, 1024, 8
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if optimiser.bf16 else torch.float32)
    # The first multiplication loads kernels and is not timed.
    (matrix @ matrix).sum().item()
    start_time = time.monotonic()
    for _ in range(number):
        (matrix @ matrix).sum().item()
    return TrainingPace(
        speed=number * 2 * size**3 / (time.monotonic() - start_time),
        weights=shape_of(model_config(inputs.config.train.model or "")).num_weights,
        tokens=sum(item.num_tokens for item in sessions.items) / len(sessions),
        windows_a_step=optimiser.per_device * optimiser.accumulation,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingPace:
    """The measurements from which a training run's duration is estimated.

    `speed` is in operations per second, `weights` is the number of weights in the model, and `tokens` is the mean
    number of tokens in a window.
    """

    speed: float
    weights: int
    tokens: float
    windows_a_step: int

    @property
    def tokens_a_step(self) -> float:
        return self.tokens * self.windows_a_step

    def seconds(self, passes: float) -> float:
        """Return the estimated duration, in seconds, of work that takes `passes` operations per weight.

        For example, 8 operations per weight and token on 1,000 tokens are 8,000 operations per weight.
        """
        return passes * self.weights / (_UTILIZATION * self.speed)


def _tool_name_logprob(model: nn.Module, sessions: LoggedSessions) -> float | None:
    """Return the log-prob of a call's first tokens, up to the end of the tool's name, averaged over a few good calls.

    A model that knows the harness predicts the beginning of a call almost with certainty, and only has to choose
    between a few names. The calls are spread evenly over the sessions, and are the same in every run. Returns None if
    there are no calls.
    """
    calls = [call for session in sessions.rendered for call in session.good_calls]
    chosen = [calls[n * len(calls) // _MAX_CALLS] for n in range(_MAX_CALLS)] if len(calls) > _MAX_CALLS else calls
    logprobs: list[float] = []
    for call in chosen:
        span = call.span
        decision = find_decision(sessions.renderer, call.rendered, span, call.words)
        # Without a tool name to find, the decision is the whole call or turn.
        if span.call_start is None or decision.basis in ("call", "turn"):
            continue
        first = max(0, span.call_start - _MAX_CONTEXT)
        ids = call.rendered.ids[first : decision.stretches[0][1]]
        logprobs += response_logprobs(model, [(ids, span.call_start - first)]).tolist()
    return fmean(logprobs) if logprobs else None
