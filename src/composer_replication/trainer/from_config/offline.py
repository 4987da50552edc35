"""`crf train` on logged sessions: their windows, the memory a step takes, the trainer, what its hint proof kept."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import set_seed

from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.config import CrfConfig, SplitConfig, TrainConfig
from composer_replication.errors import (
    ConfigError,
    InputError,
    NotEnoughMemoryError,
    explain,
)
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import Split, sides_of, split_conversations
from composer_replication.trainer.checkpoints.resume import most_anywhere
from composer_replication.trainer.from_config.inputs import (
    Inputs,
    lora_config,
    model_config,
    thinking_in_words,
    token_rows,
    weighting_of,
)
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.from_config.requirements import offline_arguments
from composer_replication.trainer.objective.distributed import is_sharded
from composer_replication.trainer.objective.hint_proof import verdict
from composer_replication.trainer.presets import channel_settings, teacher_of
from composer_replication.trainer.replica import Replica
from composer_replication.trainer.same_start import launched_processes
from composer_replication.trainer.sessions.dataset import LoggedSessions, cut_sessions, sessions_of_run
from composer_replication.trainer.sessions.phases import Say
from composer_replication.trainer.sessions.rendering import (
    LoggedSession,
    RenderedSession,
    WindowSettings,
    ids_said,
    render_session,
)
from composer_replication.trainer.start_model import prepare_model, shard_model, weight_dtype
from composer_replication.trainer.watch.memory_plan import MemoryPlan, plan_memory
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments

    from composer_replication.trainer.offline_trainer import OfflineTrainer


SOURCES = ("conversations", "tools", SPLIT, "sites", "pairs")
_BETWEEN_SHUFFLES = 1_000_003
# What sessions are held out for, by the key that asks for it.
_EVALUATIONS: dict[str, Callable[[TrainConfig], bool]] = {
    "train.eval_every": lambda train: train.eval_every > 0,
    "train.warmup.mode = until": lambda train: train.warmup.mode == "until",
}


class _OfflineData(NamedTuple):
    """Sessions to train on, and those that are held out where there are evaluations."""

    train: LoggedSessions
    held_out: LoggedSessions | None
    models: frozenset[str]
    """Names of the models that wrote the run's turns."""


def offline_data(inputs: Inputs) -> _OfflineData:
    """The windows of the run's sessions, as [train.batch] says, for the channels that have a weight."""
    config = inputs.config
    if inputs.run is None:
        raise ConfigError(explain("train.run", got="none", expected="a run directory (`crf ingest`, `crf sites`)"))
    options: dict[str, Any] = {
        **_cutting(config),
        "responses": "good" if config.train.channels.good_turns else "none",
        "work_failures": config.train.channels.work_failures,
        "use_sites": config.loss.alpha_sdpo > 0,
        "contrast": config.train.switches.contrast is not None,
    }
    if config.loss.beta_replay == 0:
        options["use_pairs"] = False
    eval_options = [key for key, is_on in _EVALUATIONS.items() if is_on(config.train)]
    known_sides = _known_sides(inputs.run, config.split, is_evaluated=bool(eval_options))
    validation = config.split.validation if eval_options else 0.0
    sessions, settings = sessions_of_run(inputs.run, **options)
    rendered: list[RenderedSession] = []

    def conversations() -> Iterator[Conversation]:
        """Rendered as they are read: the split is drawn in the same pass, and no conversation is kept."""
        for session in sessions:
            if known_sides is None or session.conversation.id not in known_sides.test:
                rendered.append(render_session(inputs.renderer, session, settings))
                yield session.conversation

    drawn = split_conversations(
        conversations(), validation=validation, test=config.split.test or 0.0, by=config.split.by
    )
    sides, replica = known_sides or drawn, inputs.replica
    learnt = (
        sides.train
        if replica is None
        else replica.part_of(sides.train & {session.conversation_id for session in rendered})
    )
    run = inputs.run if replica is None else None  # proofs and references of a part are not the run's
    train, held_out = (
        LoggedSessions(
            (session for session in rendered if session.conversation_id in side), inputs.renderer, settings, run=run
        )
        for side in (learnt, sides.validation)
    )
    if replica is not None:
        replica.weigh(len(train))
    is_held_out = bool(eval_options) if known_sides else validation > 0
    if is_held_out and not len(held_out):
        fix = f"Do without {' and '.join(eval_options)}, set a larger split.validation, or ingest more sessions."
        got = f"no target in {config.split.validation:.0%} of the sessions"
        raise InputError(explain(eval_options[0], got=got, expected="some to evaluate on", fix=fix))
    return _OfflineData(
        train, held_out if is_held_out else None, frozenset().union(*(session.models for session in rendered))
    )


def _known_sides(run: RunDir, section: SplitConfig, *, is_evaluated: bool) -> Split | None:
    """As `crf split` drew them; what is evaluated nowhere is learnt from. Options that say otherwise are refused."""
    sides = sides_of(run)
    if sides is None:
        return None
    drawn, defaults = run.meta(SPLIT).settings, SplitConfig()
    for name in vars(section):
        now = getattr(section, name)
        if now not in (getattr(defaults, name), drawn.get(name)):
            fix = f"`crf split {run.root} --set split.{name}={now}` draws it anew."
            raise ConfigError(explain(f"split.{name}", got=now, expected=f"the run's own, {drawn.get(name)}", fix=fix))
    return sides if is_evaluated else Split(sides.train | sides.validation, frozenset(), sides.test)


def why_not_taught(config: CrfConfig, renderer: Renderer, session: LoggedSession) -> str:
    """The reason that a training counts for a session's only site, where no window holds it; empty where one does.

    Whether a window holds a target depends on nothing else in the session. A hint may still fail its proof.
    """
    settings = WindowSettings(**_cutting(config), responses="none", use_pairs=False)
    rendered = render_session(renderer, session, settings)
    cut_result = cut_sessions(renderer, [rendered], settings)
    if any(window.site_ids for window in cut_result.windows):
        return ""
    return ", ".join(name.partition(": ")[2] for name in cut_result.drops)


def _cutting(config: CrfConfig) -> dict[str, Any]:
    batch = config.train.batch
    budget, overlap = batch.window
    return {"budget": budget, "overlap": overlap, "placement": batch.placement, "part": batch.part}


def offline_memory(inputs: Inputs, sessions: LoggedSessions) -> MemoryPlan:
    """Whether a step on the longest trees fits the device at hand; needs the model's config, not its weights."""
    train = inputs.config.train
    sizes = sorted((item.num_tokens for item in sessions.items), reverse=True)
    size = 2 if train.optimiser.bf16 else 4
    assert train.model is not None
    return plan_memory(
        model_config(train.model),
        longest_tree=sum(sizes[: train.optimiser.per_device]),
        device="cuda" if torch.cuda.is_available() else "cpu",
        weight_bytes=weight_dtype(bf16=train.optimiser.bf16, has_adapter=train.adapter.kind != "none").itemsize,
        compute_bytes=size,
        checkpointing=train.optimiser.checkpointing,
        lora_rank=None if train.adapter.kind == "none" else train.adapter.rank,
        four_bit=train.adapter.kind == "qlora",
        teacher=train.teacher.kind,
        warmed_up=train.warmup.mode != "off",
        accumulation=train.optimiser.accumulation,
        num_shards=launched_processes() if train.fsdp.on else 1,
    )


def check_memory(plan: MemoryPlan, say: Say, must_fit: bool) -> None:
    """Say what a step takes; one that does not fit is refused if it must."""
    if plan.fits:
        say(f"memory: {str(plan).splitlines()[-1]}")
    elif not must_fit:
        say(f"memory:\n{plan}")
    else:
        verdict = f"{plan.peak / 2**30:.2f} GiB"
        expected = f"at most nine tenths of {plan.available / 2**30:.2f} GiB"
        fix = " ".join(plan.advice)
        raise NotEnoughMemoryError(explain("memory of a step", got=verdict, expected=expected, fix=fix))


def offline_trainer(
    inputs: Inputs,
    data: _OfflineData,
    args: TrainingArguments,
    folder: TrainingFolder,
    callbacks: list[TrainerCallback],
    say: Say,
) -> OfflineTrainer:
    """The trainer, its model warmed up where that is wanted, with hints proved and reference log-probs there."""
    from composer_replication.trainer.offline_trainer import OfflineTrainer

    config = inputs.config
    model, warmed_up = start_model(inputs, data, args, folder, say)
    channels = config.train.channels
    has_good_turns = channels.good_turns and (warmed_up is None or channels.good_turns_after_warmup)
    trainer = OfflineTrainer(
        model,
        args,
        data.train,
        settings=channel_settings(config),
        teacher=teacher_of(config),
        weighting=weighting_of(config),
        lm_weight=1.0 if has_good_turns else 0.0,
        eval_sessions=data.held_out if config.train.eval_every else None,
        fsdp=config.train.fsdp.on,
        warmed_up=warmed_up,
        reference_path=_references(folder, warmed_up, inputs.replica),
        hint_margin=config.train.proof.margin if _has_proof(inputs) else None,
        shuffle_seed=None if config.train.control == "none" else shuffle_seed(config.train),
        metrics_path=folder.metrics,
        callbacks=callbacks,
        processing_class=inputs.tokenizer,
    )
    if args.world_size > 1:
        say(_where_weights_are(trainer.model, args.world_size))
    return trainer


def _where_weights_are(model: Any, num_processes: int) -> str:
    """Say how many weights this process holds of how many, so that nobody takes DDP for FSDP2."""
    local_tensors = [
        parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters()
    ]
    here, total = (sum(tensor.numel() for tensor in tensors) for tensors in (local_tensors, model.parameters()))
    kind = "FSDP2" if is_sharded(model) else "DDP"
    return f"{kind} on {num_processes} processes: {here:,} of {total:,} weights on this one"


def _references(folder: TrainingFolder, warmed_up: Path | None, replica: Replica | None) -> Path | None:
    """The run's own, unless they are of other weights or of a part of its sessions."""
    parent = folder.checkpoints if replica is not None else folder.warmup if warmed_up is not None else None
    return None if parent is None else parent / ARTEFACTS["ref_logprobs"].file_name


def shuffle_seed(train: TrainConfig) -> int:
    """Of which a control's hints and turned pairs are drawn; everything else is drawn as in the real training."""
    return train.optimiser.seed + _BETWEEN_SHUFFLES * (train.shuffle - 1)


def tell_data(sessions: LoggedSessions, say: Say) -> None:
    """What was done with thinking, and how many turns channel 1 has of how many."""
    if words := thinking_in_words(sessions.counts):
        say(words)
    if "good_turns" in sessions.counts:
        left_out = sorted((name, n) for name, n in sessions.drops.items() if name.startswith("lm_ce: "))
        why = ", ".join(f"{name.removeprefix('lm_ce: ').replace('_', ' ')} {n}" for name, n in left_out)
        good, every = sessions.counts["good_turns"], sessions.counts["model_turns"]
        both = sum(n for _, n in left_out) - (every - good)
        why += f" ({both} of these are good turns that no window holds)" if both > 0 else ""
        summary = f"good turns (channel 1): {good} of {every}"
        say(f"{summary}; left out: {why}" if why else summary)


def tell_proof(sessions: LoggedSessions, say: Say, *, can_warm_up: bool = True) -> None:
    """What the hint proof kept, and whether the model heeds hints at all, in a line each."""
    if sessions.proofs is None:
        return
    reasons = Counter(proof.reason for proof in sessions.proofs)
    num_kept = reasons.pop("kept", 0)
    dropped = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in sorted(reasons.items()))
    say(f"hint proof: {num_kept} of {len(sessions.proofs)} sites teach{f'; dropped: {dropped}' if dropped else ''}")
    say(verdict(sessions.proofs).in_words(can_warm_up=can_warm_up))


def _has_proof(inputs: Inputs) -> bool:
    return inputs.config.train.proof.on and inputs.config.loss.alpha_sdpo > 0


# The warm-up of `crf train`: whether there is one, and the model that the other steps begin with.
#
# `train.warmup.mode` decides; on "auto" the start weights do, by how well they know the names of tools in the logs.


def start_model(
    inputs: Inputs, data: _OfflineData, args: TrainingArguments, folder: TrainingFolder, say: Say
) -> tuple[nn.Module, Path | None]:
    """The start weights, with their adapter; and the checkpoint of the warm-up, where there is one.

    Whoever trains puts the checkpoint's weights in, after a warm-up of this process as after one of an earlier one.
    """
    from composer_replication.trainer.warmup import finished_warm_up, warm_up

    train = inputs.config.train
    if train.control != "none" and args.should_save and not folder.warmup.exists():
        real = TrainingFolder.of(replace(inputs.config, train=replace(train, control="none")))
        if finished_warm_up(real.warmup) is not None:
            folder.take_warmup(real)
    model = _load(inputs, data, args, say)
    is_wanted = _is_wanted(inputs, data, args, folder, model, say)
    if is_sharded(model):  # to be scored; what begins is whole
        del model
        model = _load(inputs, data, args, lambda _again: None)
    if not is_wanted:
        return model, None
    is_new = finished_warm_up(folder.warmup) is None
    if is_new and not folder.has_warmup and args.should_save:
        folder.write_config(inputs.config)
    done = warm_up(
        model,
        offline_arguments(train, folder.warmup, **_changes(train)),
        data.train,
        held_out=data.held_out,
        patience=train.warmup.patience if train.warmup.mode == "until" else None,
        on_held_out=lambda step, loss: say(f"warm-up step {step}: held-out loss of good turns {loss:.4f}"),
        hinted_corrections=train.warmup.hinted_corrections,
        processing_class=inputs.tokenizer,
        fsdp=train.fsdp.on,
    )
    say(done.in_words())
    if is_new:  # the steps were made in it
        del model
        gc.collect()
        torch.cuda.empty_cache()
        model = _load(inputs, data, args, lambda _again: None)
    return model, folder.warmup / done.checkpoint


def _load(inputs: Inputs, data: _OfflineData, args: TrainingArguments, say: Say) -> nn.Module:
    train, said_ids = inputs.config.train, ids_said(data.train.rendered)
    assert train.model is not None
    set_seed(train.optimiser.seed)  # the adapter's first values are drawn before the trainer sets it
    why_not = "with FSDP" if args.fsdp or train.fsdp.on else ""
    quantization = "4bit" if train.adapter.kind == "qlora" else "none"
    return prepare_model(
        train.model,
        args,
        peft_config=lora_config(train.adapter),
        quantization=quantization,
        token_rows=lambda model: token_rows(inputs, model, said_ids, say, why_not=why_not),
    )


def _is_wanted(
    inputs: Inputs, data: _OfflineData, args: TrainingArguments, folder: TrainingFolder, model: nn.Module, say: Say
) -> bool:
    """An explicit mode wins; a training that has begun goes on as it began."""
    from composer_replication.trainer.warmup import name_logprob

    warmup, items = inputs.config.train.warmup, data.train.channels
    if warmup.mode != "auto":
        if warmup.mode != "off" and not items[CHANNELS[0]]:
            fix = 'Set train.channels.good_turns = true, or train.warmup.mode = "off".'
            raise ConfigError(explain("train.warmup.mode", got=warmup.mode, expected="good turns to learn", fix=fix))
        return warmup.mode != "off"
    if folder.has_warmup or folder.newest_step() is not None:
        return folder.has_warmup
    # Without good turns it has nothing to learn from, without the other channels nothing to come before.
    if not items[CHANNELS[0]] or not any(items[name] for name in CHANNELS[1:]) or args.fsdp:
        return False
    if inputs.config.train.fsdp.on and args.world_size > 1:
        shard_model(model, args)
    elif not getattr(model, "is_quantized", False):
        model.to(args.device)
    logprob = name_logprob(model, data.train)
    is_low = bool(most_anywhere(int(logprob is not None and logprob < warmup.below), args.device))
    if is_low:
        say(
            f"log-prob of logged calls up to their tool's name: {logprob:.1f} nats, below {warmup.below:g}: this model"
            f" does not speak the logs' harness yet, and {warmup.steps} steps of channel 1 come first"
            ' (train.warmup.mode = "off" for none)'
        )
    return is_low


def _changes(train: TrainConfig) -> dict[str, Any]:
    """What a warm-up does otherwise than the steps after it: as many steps as its own keys say, at a constant rate."""
    warmup, is_until = train.warmup, train.warmup.mode == "until"
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
