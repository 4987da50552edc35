"""Training on logged sessions alone: tree batches of windows, three channels, on `transformers.Trainer`.

    loss = lm_weight * lm_ce + alpha_sdpo * sdpo + beta_replay * replay

Each channel is a mean over all its items of an optimiser step, in all micro-batches and on all processes: how a batch
is cut into micro-batches or spread over processes changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import InputError, explain
from composer_replication.loss.taid import TAIDScheduler
from composer_replication.trainer.metrics_file import MetricsFile, TellSteps
from composer_replication.trainer.objective.compose import LossComponents, compose_loss
from composer_replication.trainer.objective.distributed import is_sharded
from composer_replication.trainer.objective.fingerprint import tokenizer_digest
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.offline_checks import (
    NAMES,
    WARM_UP,
    ChannelLog,
    EvaluationSums,
    channels_that_never_ran,
    check_arguments,
    plan_run,
    ready_sessions,
    take_warmed_up,
    weighted_sum,
    weighted_total,
    what_cannot_work,
)
from composer_replication.trainer.overrides import WithTeacher
from composer_replication.trainer.presets import ChannelSettings
from composer_replication.trainer.same_start import refuse_differences
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.sessions.stored_windows import (
    KEY,
    TOKENS,
    SessionBatch,
    collate,
    items_of,
    moved,
)
from composer_replication.trainer.start_model import Quantization, prepare_model, shard_model
from composer_replication.trainer.teacher_keeper import (
    TeacherKeeper,
    attach_teacher,
    load_local_state,
    local_state,
    reshard,
    shard_teacher,
)
from composer_replication.trainer.watch.memory_plan import MemoryPlan

_log = logging.getLogger(__name__)


class OfflineTrainer(WithTeacher, Trainer):
    """Trains a model on `LoggedSessions`.

    `model` is one that is loaded, a folder, a hub name, or `student`, the tiny model that comes with the package.
    A micro-batch is `per_device_train_batch_size` items of `sessions`, side by side in one tree batch. Pairs without
    reference log-probs get them here, from the model as it is given and in the precision of its steps
    (`reference_path`, or the run directory, keeps them). With `hint_margin` sites have to pass the hint proof first.
    Without a `teacher` that of channel 2 is a trust region. `peft_config` puts an adapter on; `quantization="4bit"`
    loads the weights below it in four bits. Weights that are trained are whole: without an adapter a name is loaded in
    fp32, and `bf16` is what autocast computes in. Figures go to `metrics.jsonl` in `output_dir`, besides `report_to`.
    `warmed_up` is the checkpoint that a warm-up ended with (`trainer.warmup`): its weights are taken, and proof,
    references and teacher begin with them. With `fsdp` the weights are spread over the processes (FSDP2).
    `shuffle_seed` makes it a control: at the same sites the hints of other kinds, and half of the pairs turned round.
    `options` are those of `transformers.Trainer`: optimizers, processing_class and the like.
    """

    loss_is_scaled_for_ga = True  # every channel is divided by the items of the whole optimiser step
    _step_items: Mapping[str, int] = {}
    _step_tokens = 0
    _taid: TAIDScheduler | None = None
    _taid_state: Mapping[str, float | None] | None = None
    _evaluation: EvaluationSums | None = None
    phase: Mapping[str, str] = {}
    """What part of a training with a warm-up this is; its checkpoints say so, and others are not gone on from."""

    def __init__(
        self,
        model: str | nn.Module,
        args: TrainingArguments,
        sessions: LoggedSessions,
        *,
        settings: ChannelSettings | None = None,
        teacher: TeacherKeeper | None = None,
        weighting: RowWeighting | None = None,
        lm_weight: float = 1.0,
        eval_sessions: LoggedSessions | None = None,
        peft_config: Any | None = None,
        quantization: Quantization = "none",
        fsdp: bool = False,
        warmed_up: str | Path | None = None,
        hint_margin: float | None = None,
        shuffle_seed: int | None = None,
        reference_path: str | Path | None = None,
        metrics_path: str | Path | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        if not lm_weight >= 0:
            raise InputError(explain("lm_weight", got=lm_weight, expected="0 or more"))
        check_arguments(args)
        refuse_differences({"tokenizer": tokenizer_digest(sessions.renderer.tokenizer), "sessions": sessions.digest})
        self.settings, self.lm_weight = settings or ChannelSettings(), lm_weight
        # A copy of the start weights is of use to channel 2 alone.
        self.teacher = teacher or TeacherKeeper("trust_region" if self.settings.alpha_sdpo > 0 else "live")
        self.weighting, self.channel_log = weighting, ChannelLog()
        metrics = MetricsFile(metrics_path or Path(args.output_dir or "", "metrics.jsonl"))
        start = prepare_model(model, args, peft_config=peft_config, quantization=quantization)
        if spreads := fsdp and args.world_size > 1 and not is_sharded(start):
            self._spread(start, args, warmed_up)
        super().__init__(
            model=start,
            args=args,
            data_collator=collate,
            train_dataset=sessions,
            eval_dataset=eval_sessions,
            callbacks=[*callbacks, TellSteps(self), metrics],
            **options,
        )
        model = self._start_model
        if is_sharded(model):  # tells the base class to leave the wrapping to whoever did it
            self.is_distributed_loading_by_transformers = True
        if not spreads and warmed_up is not None:
            self.phase = take_warmed_up(model, Path(warmed_up))
        with self.accelerator.autocast():  # as the steps compute: what is compared has to be rounded alike
            shared_options = {"settings": self.settings, "lm_weight": lm_weight, "with_adapter": bool(self.phase)}
            proof = {"hint_margin": hint_margin, "shuffle_seed": shuffle_seed}
            self.train_dataset = ready_sessions(sessions, model, reference_path, **proof, **shared_options)
            if eval_sessions is not None:
                self.eval_dataset = ready_sessions(eval_sessions, model, reference_path, **shared_options)
        for sentence in what_cannot_work(self, model, self._train_sessions):
            self._say(sentence)
        if not spreads:
            attach_teacher(self.teacher, model, with_adapter=bool(self.phase))
        self._num_weights = sum(parameter.numel() for parameter in model.parameters())

    def _spread(self, model: nn.Module, args: TrainingArguments, warmed_up: str | Path | None) -> None:
        """Spread model and teacher over all processes, once a warm-up's weights are taken and the teacher's copied."""
        if warmed_up is not None:
            self.phase = take_warmed_up(model, Path(warmed_up))
        attach_teacher(self.teacher, model, with_adapter=bool(self.phase))
        shard_model(model, args)
        shard_teacher(self.teacher, model)

    def plan(self) -> MemoryPlan:
        """Whether the largest step fits into the memory at hand, and what to change if not; an estimate."""
        model, sessions = self._start_model, self._train_sessions
        return plan_run(model, self.args, sessions, self.teacher.kind, warmed_up=bool(self.phase))

    # ---- what a step is made of

    def weights(self) -> dict[str, float]:
        """What each channel is multiplied by at the step that comes next."""
        alpha = self.settings.alpha_at(self.state.global_step, self.state.max_steps)
        return dict(zip(CHANNELS, (self.lm_weight, alpha, self.settings.beta_replay), strict=True))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of an optimiser step, and the items of each channel in them on all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        mine = items_of(batches)
        everywhere = self._everywhere(torch.tensor([mine[name] for name in (*CHANNELS, TOKENS)])).tolist()
        self._step_items = dict(zip(CHANNELS, everywhere[:-1], strict=True))
        self._step_tokens = everywhere[-1]
        return batches, self._step_items

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This micro-batch's share of the step's loss; processes' shares add up, where wrappers take the mean."""
        weights = self.weights()
        components = self._components(model, inputs[KEY], weights, num_items_in_batch)
        loss = weighted_total(components, weights)
        if num_items_in_batch is not None:
            self.channel_log.add(components)
            loss = loss * self.accelerator.num_processes
        return (loss, components) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        del prediction_loss_only, ignore_keys  # there is nothing but a loss
        weights = self.weights()
        # What a channel has come to is asked most of all at the end, where its weight may have fallen to 0.
        measured = {**weights, CHANNELS[1]: weights[CHANNELS[1]] or self.settings.alpha_sdpo}
        with torch.no_grad():
            components = self._components(model, inputs[KEY], measured, None)
        if self._evaluation is not None:
            self._evaluation.add(components)
        return weighted_sum(components, weights).detach(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """As always, with the channels' losses over all items, and `loss` as their weighted sum."""
        self._evaluation = EvaluationSums()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **options)
        metrics = EvaluationSums.metrics(self._everywhere(self._evaluation.both()), self.weights())
        self._evaluation = None
        metrics["loss"] = metrics.pop("total")
        assert output.metrics is not None
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _components(
        self, model: nn.Module, batch: SessionBatch, weights: Mapping[str, float], items: Mapping[str, int] | None
    ) -> LossComponents:
        options = self.settings.loss_options()
        if self.settings.sdpo_wrapper == "taid":
            options["taid_t"] = self.taid.t
        # The model's body is called without its own forward, where mixed precision would have been switched on.
        with self.accelerator.autocast():
            return compose_loss(
                model,
                moved(batch.batch, self.args.device),
                alpha_sdpo=weights[CHANNELS[1]],
                beta_replay=weights[CHANNELS[2]],
                denominators=items,
                sdpo_teachers=self.teacher.shares(),
                sdpo_weighting=self.weighting,
                **options,
            )

    # ---- what happens after a step

    @property
    def taid(self) -> TAIDScheduler:
        """TAID's schedule over the steps of this run; before a run, which alone knows their number, where it begins."""
        return self._taid or self.settings.taid_schedule(1)

    def before_steps(self) -> None:
        """A schedule over the run's steps, from where a checkpoint left it if one was loaded."""
        self._taid = self.settings.taid_schedule(self.state.max_steps)
        if self._taid_state is not None:
            self._taid.load_state_dict(self._taid_state)
        self._taid_state = None

    def after_step(self) -> None:
        """After the optimiser's step: figures of all processes, TAID's schedule, the teacher."""
        values = self._everywhere(self.channel_log.take_step())
        done = self.state.global_step
        alpha = self.settings.alpha_at(done - 1, self.state.max_steps)
        weights = {**self.weights(), CHANNELS[1]: alpha}
        self.channel_log.finish_step(values, self._step_items, weights, tokens=self._step_tokens)
        if self.settings.sdpo_wrapper == "taid" and alpha > 0 and self._step_items[CHANNELS[1]]:
            self.taid.update_t(values[1], done)
        if not self.accelerator.optimizer_step_was_skipped:
            reshard(self.teacher)
            self.teacher.after_step(self.model_wrapped)

    def _everywhere(self, mine: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.accelerator.num_processes == 1:
            return mine
        total: Any = self.accelerator.reduce(mine.to(self.args.device), reduction="sum")
        return total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.channel_log.take()
            if self.settings.sdpo_wrapper == "taid":
                logs["loss/taid_t"] = self.taid.t
        if "train_runtime" in logs:
            logs |= {f"ran_steps/{NAMES[name]}": self.channel_log.ran_steps[name] for name in CHANNELS}
            self._say_what_never_ran()
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Two a weight and token forward, four backward."""
        return 6 * self._num_weights * len(inputs[KEY].batch.tree)

    def resume_geometry(self) -> dict[str, Any]:
        """The sessions themselves: as many others are other data."""
        return {**super().resume_geometry(), "sessions": self._train_sessions.digest, **self.phase}

    def extra_state(self) -> dict[str, Any]:
        """What a resumed run needs besides weights, optimiser and random numbers."""
        taid = self.taid.state_dict() if self.settings.sdpo_wrapper == "taid" else None
        own_state = {"teacher": local_state(self.teacher), "taid": taid, "channels": self.channel_log.state()}
        return super().extra_state() | own_state

    def load_extra_state(self, tree: dict[str, Any]) -> None:
        super().load_extra_state(tree)
        shard_teacher(self.teacher, self.model_wrapped)
        load_local_state(self.teacher, tree["teacher"])
        self._taid_state = tree["taid"]
        self.channel_log.load_state(tree["channels"])

    # ---- before the first step

    @property
    def _start_model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _say_what_never_ran(self) -> None:
        never_ran = channels_that_never_ran(self.channel_log, self._train_sessions.channels)
        for sentence in () if self.phase.get("phase") == WARM_UP else never_ran:
            self._say(sentence)

    def _say(self, message: str) -> None:
        if self.is_world_process_zero():
            _log.warning(message)

    @property
    def _train_sessions(self) -> LoggedSessions:
        assert isinstance(self.train_dataset, LoggedSessions)
        return self.train_dataset
