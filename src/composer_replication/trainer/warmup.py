"""Warm up with channel 1 only: a model that does not know the harness first learns from good turns.

    warm-up -> hint check, reference log-probs -> all channels; teacher and reference have the warmed-up weights

A warm-up is a separate run with its own checkpoints, which are marked as warm-up checkpoints. When it is finished,
`warmup.json` next to the checkpoints names the final one. `OfflineTrainer(warmed_up=...)` starts from that checkpoint,
in this process or a later one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from torch import nn
from transformers import PrinterCallback, TrainerCallback, TrainerState, TrainingArguments

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object
from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.trainer.checkpoints.manifest import check_manifest, newest_complete
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.fingerprint import trained_adapter_digest, weights_digest
from composer_replication.trainer.offline_trainer import WARM_UP
from composer_replication.trainer.sessions.dataset import HINTED_CORRECTIONS, LoggedSessions
from composer_replication.trainer.sessions.phases import Phase, report_phase

FINISHED = "warmup.json"
_SCHEMA, _VERSION = "composer_replication.warmup", 2
_FIX = "Train in another folder (train.output), or move the warm-up out of this one."
# The training arguments that a warm-up's weights depend on.
_ARGUMENTS = (
    *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type"),
    *("warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("seed", "data_seed", "bf16", "fp16", "world_size"),
)
_ORIGIN_DIGESTS = ("start_weights", "start_adapter")
_EVAL_LOSS, _TRAIN_LOSS = "eval_lm_ce", "loss/lm_ce"


@dataclass(frozen=True, kw_only=True)
class FinishedWarmUp:
    """A finished warm-up: its final checkpoint, its number of steps, and the held-out losses on good turns by step.

    `start_weights` is the digest of the initial weights, and `start_adapter` the digest of a previously trained
    adapter, if any. `settings` are the arguments that the warm-up's weights depend on.
    """

    checkpoint: str
    steps: int
    held_out: Sequence[Sequence[float]]
    start_weights: str
    settings: Mapping[str, Any]
    start_adapter: str | None = None
    learnt: Sequence[float] = ()
    """The training loss on good turns in the first and the last line of the metrics."""

    @classmethod
    def read(cls, folder: Path) -> FinishedWarmUp | None:
        """Return the finished warm-up in this folder, or None."""
        try:
            fields: dict[str, Any] = decode_object((folder / FINISHED).read_bytes())
        except FileNotFoundError:
            return None
        if (fields.pop("schema", None), fields.pop("version", None)) != (_SCHEMA, _VERSION):
            fix = "Delete it; the warm-up then continues from its last checkpoint."
            got = "another schema or version"
            raise StaleArtefactError(
                explain(str(folder / FINISHED), got=got, expected=f"{_SCHEMA} {_VERSION}", fix=fix)
            )
        return cls(**fields)

    def describe(self) -> str:
        losses = [loss for _, loss in self.held_out]
        change = f"; loss on good turns {self.learnt[0]:.3f} -> {self.learnt[-1]:.3f}" if self.learnt else ""
        change += f"; held-out loss on good turns {losses[0]:.3f} -> {min(losses):.3f}" if losses else ""
        return f"warm-up: {self.steps} steps of channel 1, using the weights from {self.checkpoint}{change}"


def warm_up(
    model: nn.Module,
    args: TrainingArguments,
    sessions: LoggedSessions,
    *,
    held_out: LoggedSessions | None = None,
    patience: int | None = None,
    on_held_out: Callable[[int, float], None] | None = None,
    hinted_corrections: bool = False,
    **options: Any,
) -> FinishedWarmUp:
    """Train `args.max_steps` steps of channel 1 on the sessions' good turns, with checkpoints in `args.output_dir`.

    An unfinished warm-up in this folder is resumed, and a finished one is returned.

    Args:
        model: The model to train.
        args: The training arguments. With `patience`, every evaluation needs a checkpoint.
        sessions: The sessions with the good turns.
        held_out: The sessions to evaluate on.
        patience: Early stopping: the number of evaluations without a new minimum of the held-out loss. The weights at
            the minimum are used.
        on_held_out: Called with (step, loss) after each evaluation.
        hinted_corrections: Also train on the action that worked after an erring turn, in the context with the hint.
        options: Passed to `OfflineTrainer`.

    Raises:
        KeyboardInterrupt: A signal stopped the warm-up; a checkpoint was saved.
    """
    # Only channel 1 is trained, so sites and pairs are dropped from the sessions.
    folder, data = Path(args.output_dir or ""), sessions.only_responses(hinted_corrections=hinted_corrections)
    if hinted_corrections and not data.counts[HINTED_CORRECTIONS]:
        fix = "Run `crf pairs`, or set train.warmup.hinted_corrections = false."
        expected = "sites with a known correction"
        raise InputError(explain("hinted corrections", got=f"none; {dict(data.drops)}", expected=expected, fix=fix))
    outcome, origin = FinishedWarmUp.read(folder), _collect_origin(model, args, patience)
    if outcome is not None:
        _check_same_origin(folder, outcome, origin)
        _check_same_data(folder / outcome.checkpoint, data, origin)
        return outcome
    evaluated = None if patience is None or held_out is None else held_out.only_responses()
    if patience is not None and (evaluated is None or args.save_steps != args.eval_steps):
        got = (
            "no held-out sessions"
            if evaluated is None
            else f"save_steps {args.save_steps}, eval_steps {args.eval_steps}"
        )
        raise InputError(
            explain(
                "warm-up with patience", got=got, expected="held-out sessions, and a checkpoint with each evaluation"
            )
        )
    newest = newest_complete(folder)
    state = None if newest is None else TrainerState.load_from_json(str(newest / "trainer_state.json"))
    # A warm-up may have been killed after its last step, but before `warmup.json` was written.
    if state is None or not _is_over(state, args.max_steps, patience):
        options |= {"callbacks": [_WarmUpCallback(patience, on_held_out)], "eval_sessions": evaluated}
        phase = {"phase": WARM_UP, **{name: origin[name] for name in _ORIGIN_DIGESTS if origin[name] is not None}}
        state = _run_steps(model, args, data, phase, is_resumed=newest is not None, **options)
    losses = _held_out_losses(state.log_history)
    end = f"checkpoint-{_lowest_loss_step(losses) if losses else state.global_step}"
    _check_same_data(folder / end, data, origin)
    learnt = [float(line[_TRAIN_LOSS]) for line in state.log_history if _TRAIN_LOSS in line]
    outcome = FinishedWarmUp(
        checkpoint=end,
        steps=state.global_step,
        held_out=[[*evaluation] for evaluation in losses],
        learnt=[learnt[0], learnt[-1]] if learnt else [],
        **origin,
    )
    if args.should_save:
        atomic_write_json(folder / FINISHED, {"schema": _SCHEMA, "version": _VERSION, **asdict(outcome)})
    return outcome


def _run_steps(
    model: nn.Module,
    args: TrainingArguments,
    data: LoggedSessions,
    phase: Mapping[str, str],
    *,
    is_resumed: bool,
    **options: Any,
) -> TrainerState:
    from composer_replication.trainer.offline_trainer import OfflineTrainer

    channel_1 = ChannelSettings(alpha_sdpo=0.0, beta_replay=0.0)
    trainer = OfflineTrainer(model, args, data, settings=channel_1, **options)
    trainer.phase, trainer.stop_signals = phase, (SIGTERM, SIGINT)
    # PrinterCallback would print the raw metrics to stdout.
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=is_resumed)
    if trainer.stopped_by:
        raise KeyboardInterrupt
    return trainer.state


class _WarmUpCallback(TrainerCallback):
    """A callback that reports progress, marks the checkpoint with the lowest held-out loss, and stops early."""

    def __init__(self, patience: int | None, on_held_out: Callable[[int, float], None] | None) -> None:
        self._patience, self._on_held_out = patience, on_held_out

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del control
        self._report_progress(args, state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del control
        self._report_progress(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = _held_out_losses(state.log_history)
        if self._on_held_out is not None and losses and state.is_world_process_zero:
            self._on_held_out(int(losses[-1][0]), losses[-1][1])
        # Rotation never deletes the best checkpoint.
        state.best_model_checkpoint = str(Path(args.output_dir) / f"checkpoint-{_lowest_loss_step(losses)}")
        if _is_over(state, state.max_steps, self._patience):
            control.should_training_stop = True

    @staticmethod
    def _report_progress(args: Any, state: Any) -> None:
        folder = Path(args.output_dir)
        report_phase(
            Phase(name="warm-up", done=state.global_step, total=args.max_steps, items="steps", stored_in=folder)
        )


def _is_over(state: Any, max_steps: int, patience: int | None) -> bool:
    """Return whether a warm-up is finished.

    This depends only on the checkpointed state, so that a resumed warm-up ends at the same step.
    """
    losses = [loss for _, loss in _held_out_losses(state.log_history)]
    # Patience counts the evaluations since the lowest loss.
    num_since_lowest = len(losses) - 1 - losses.index(min(losses)) if losses else 0
    return state.global_step >= max_steps or (patience is not None and num_since_lowest >= patience)


def _held_out_losses(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(int(line["step"]), float(line[_EVAL_LOSS])) for line in history if _EVAL_LOSS in line]


def _lowest_loss_step(losses: Sequence[tuple[int, float]]) -> int:
    """Return the step with the lowest loss, or the earliest of several such steps."""
    return min(losses, key=lambda evaluation: evaluation[1])[0]


def _collect_origin(model: nn.Module, args: TrainingArguments, patience: int | None) -> dict[str, Any]:
    """Return what a warm-up's weights depend on: digests of the initial weights and adapter, and training arguments."""
    settings = {name: getattr(args, name) for name in _ARGUMENTS}
    if patience is not None:
        settings |= {"patience": patience, "eval_steps": args.eval_steps}
    return {
        "start_weights": weights_digest(model),
        "start_adapter": trained_adapter_digest(model),
        # Round-trip through JSON, as in the file: enums become text.
        "settings": json.loads(json.dumps(settings, default=str)),
    }


def _check_same_origin(folder: Path, finished: FinishedWarmUp, now: Mapping[str, Any]) -> None:
    """Raise StaleArtefactError, naming the differences, if a finished warm-up began with other weights or settings."""
    before, after = (
        {name: str(origin[name])[:12] for name in _ORIGIN_DIGESTS} | origin["settings"]
        for origin in (asdict(finished), now)
    )
    different = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if different:
        got, expected = (", ".join(f"{name} {values.get(name)}" for name in different) for values in (before, after))
        raise StaleArtefactError(explain(str(folder / FINISHED), got=got, expected=expected, fix=_FIX))


def _check_same_data(checkpoint: Path, data: LoggedSessions, origin: Mapping[str, Any]) -> None:
    about = check_manifest(checkpoint)["about"]["data"]
    for name, now in {"sessions": data.digest, **{name: origin[name] for name in _ORIGIN_DIGESTS}}.items():
        if about.get(name) != now:
            got = f"a warm-up with {name} {str(about.get(name))[:12]}"
            raise StaleArtefactError(explain(str(checkpoint), got=got, expected=f"{name} {str(now)[:12]}", fix=_FIX))
