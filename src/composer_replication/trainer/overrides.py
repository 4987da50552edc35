"""Override methods of transformers' and TRL's trainers. Each override is one line that passes on the original method.

`tests/contract/test_transformers_trainer.py` and `test_trl.py` check what these methods rely on, and
`test_overrides.py` checks that no other file overrides a private method. In a class's bases, put these classes before
the trainer.
"""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.trainer.checkpoints.run_checkpoints import RunCheckpoints
from composer_replication.trainer.teacher_keeper import TeacherKeeper, with_sharded_teacher

if TYPE_CHECKING:
    from composer_replication.trainer.grpo_step import GenerationStep, LossStep

_Trainer: Any = object


class SafeCheckpoints(_Trainer):
    """A mixin that saves complete checkpoints, as in `class MyTrainer(SafeCheckpoints, Trainer)`.

    See `checkpoints.run_checkpoints`.
    """

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    """Signals that end training after the current step, with a checkpoint; add SIGINT for Ctrl-C."""
    stopped_by: str = ""
    """The name of the signal that ended the last `train`, or ""."""
    was_finished: bool = False
    """Whether the last `train` found all steps already finished, and loaded the last checkpoint's weights."""
    resumed_from: Path | None = None
    """The checkpoint that the last `train` resumed from."""

    @functools.cached_property
    def checkpoints(self) -> RunCheckpoints:
        return RunCheckpoints(self)

    def extra_state(self) -> dict[str, Any]:
        """Return the additional state of this process that an exact resume needs, as a tree.

        Subclasses extend the tree returned by `super`.
        """
        return {}

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        """Restore the state that `extra_state` returned, before the first step.

        Subclasses must call `super`.
        """

    def resume_geometry(self) -> dict[str, Any]:
        """Return the settings that must not change on resume, as a dict that JSON can store.

        Subclasses extend the dict returned by `super`.
        """
        return {}

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoints.train(super().train, resume_from_checkpoint, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self.checkpoints.save_model(super().save_model, output_dir, _internal_call)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self.checkpoints.run_epoch(super()._run_epoch, *args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        return self.checkpoints.finalize_training(super()._finalize_training, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpoints.save_checkpoint(super()._save_checkpoint, model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self.checkpoints.save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.checkpoints.save_optimizer_and_scheduler(output_dir)

    def _save_scaler(self, output_dir: str) -> None:
        self.checkpoints.save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self.checkpoints.save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.checkpoints.load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self.checkpoints.load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.checkpoints.load_optimizer_and_scheduler(super()._load_optimizer_and_scheduler, checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        self.checkpoints.load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self.checkpoints.load_rng_state(checkpoint)


class WithTeacher(SafeCheckpoints):
    """A mixin for trainers that have a teacher for channel 2."""

    teacher: TeacherKeeper

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        return with_sharded_teacher(self.teacher, super()._prepare_for_training(*args, **options))


class TaughtRollouts(WithTeacher):
    """A mixin for GRPO trainers that run channel 2 on their rollouts."""

    sampling: GenerationStep
    channel_loss: LossStep

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        return self.sampling.generate(super()._generate, prompts)

    def _generate_single_turn(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        return self.sampling.generate_turn(super()._generate_single_turn, *args, **options)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self.sampling.score(super()._generate_and_score_completions, inputs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        return self.sampling.rewards(super()._calculate_rewards, inputs, prompts, completions, completion_ids_list)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return self.channel_loss.compute(super()._compute_loss, model, inputs)
