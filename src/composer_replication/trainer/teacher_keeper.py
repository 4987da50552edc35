"""Keep channel 2's teacher during a run: its weights, how they are updated, and their state in checkpoints.

    live          the student itself at every step; it drifts as the student learns
    frozen        the initial model
    ema           an average of the student's weights: teacher += ema_rate * (student - teacher) after each step
    trust_region  logits (1 - live_share) * initial model + live_share * live

Under an adapter the initial model is the model with its adapter off, so frozen and trust_region need no copy, and ema
copies the adapter only. After a warm-up, the initial model is the warmed-up one: with an adapter, a copy of the adapter
on the same base weights.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composer_replication.errors import ConfigError, InputError, StaleArtefactError, explain
from composer_replication.trainer.objective.distributed import has_adapter, is_sharded, unwrapped
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.objective.model_head import get_causal_lm
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.same_start import share_start_weights

_HALVES = (torch.bfloat16, torch.float16)
TeacherKind = Literal["live", "frozen", "ema", "trust_region"]
TEACHER_KINDS: tuple[TeacherKind, ...] = ("live", "frozen", "ema", "trust_region")
# Substrings in the names of optimizers that divide a gradient by its own magnitude.
_ADAPTIVE = ("ada", "rmsprop")


class TeacherKeeper:
    """The teacher of one run.

    Call `attach` with the initial model, pass `shares` to the loss, and call `after_step` after every step.
    """

    def __init__(self, kind: TeacherKind = "live", *, ema_rate: float = 0.05, live_share: float = 0.01) -> None:
        if kind not in TEACHER_KINDS:
            raise InputError(explain("teacher", got=repr(kind), expected=f"one of {TEACHER_KINDS}"))
        for name, value in (("ema_rate", ema_rate), ("live_share", live_share)):
            if not 0 < value < 1:
                raise InputError(explain(name, got=value, expected="a number between 0 and 1, both excluded"))
        self.kind, self.ema_rate, self.live_share = kind, ema_rate, live_share
        self._copy: nn.Module | None = None
        self._moving: list[str] = []
        self._masters: dict[str, Tensor] = {}
        self._is_below_adapter = False
        self._steps = 0
        self._start: str | None = None

    def attach(self, model: nn.Module, *, with_adapter: bool = False) -> None:
        """Store the model's current weights as the initial weights, without an adapter unless `with_adapter` is set.

        Call this once, before the model is wrapped or trained, and on all processes together: afterwards each has rank
        0's weights.
        """
        share_start_weights(model)
        start = unwrapped(model)
        is_fixed = self.kind in ("frozen", "trust_region")
        if is_fixed:
            self._start = weights_digest(start, with_adapter=with_adapter)
        self._is_below_adapter = is_fixed and has_adapter(start) and not with_adapter
        if self.kind == "live" or self._is_below_adapter:
            return
        self._moving = [name for name, parameter in start.named_parameters() if parameter.requires_grad]
        self._copy = _copy_of(start)
        if self.kind == "ema":
            weights = dict(self._copy.named_parameters())
            halves = {name: weights[name] for name in self._moving if weights[name].dtype in _HALVES}
            # Averages of half-precision weights are kept in fp32, see `settle`.
            self._masters = {name: weight.detach().float() for name, weight in halves.items()}

    @property
    def model(self) -> nn.Module | None:
        """The teacher's own copy of the model, or None. The trainer moves or shards this copy."""
        return self._copy

    def replace_model(self, model: nn.Module) -> None:
        """Replace the teacher's copy with its moved or sharded version. Call this before the first step."""
        self._copy = model
        weights = dict(unwrapped(model).named_parameters())
        self._masters = {name: weights[name].detach().float() for name in self._masters}

    def shares(self) -> list[WeightedTeacher] | None:
        """Return the value for the argument `sdpo_teachers` of `compose_loss`; None stands for the live student."""
        if self.kind == "live":
            return None
        # Without this check, an unattached teacher would silently be the live student.
        if self._copy is None and not self._is_below_adapter:
            fix = "Call attach(model) first."
            raise InputError(
                explain("teacher", got=f"{self.kind}, not attached", expected="an attached teacher", fix=fix)
            )
        teacher = WeightedTeacher(self._copy, 1.0, without_adapter=self._is_below_adapter)
        if self.kind == "trust_region":
            return [teacher._replace(coefficient=1.0 - self.live_share), WeightedTeacher(coefficient=self.live_share)]
        return [teacher]

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Move an EMA teacher towards the student. Teachers of other kinds do not change."""
        self._steps += 1
        if self.kind != "ema" or self._copy is None:
            return
        now = dict(unwrapped(model).named_parameters())
        for name, average in self._averages().items():
            # average += ema_rate * (student - average)
            average.lerp_(now[name].to(average), self.ema_rate)
        self.settle()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which contains weights only for an EMA.

        Other teachers are recreated from the initial model on resume.
        """
        return {"kind": self.kind, "steps": self._steps, "start_digest": self._start, "weights": self._averages()}

    @torch.no_grad()
    def load_state(self, tree: dict[str, Any]) -> None:
        if tree["kind"] != self.kind:
            fix = "Resume with the teacher that the run began with."
            raise StaleArtefactError(explain("teacher", got=self.kind, expected=tree["kind"], fix=fix))
        # Checkpoints from earlier versions have another key, for a digest of some values, which cannot be compared.
        if tree.get("start_digest", self._start) != self._start:
            fix = (
                "Build the trainer with the model that the run began with; the checkpoint's weights are loaded into it."
            )
            got = "different weights"
            raise StaleArtefactError(
                explain(
                    f"initial weights for teacher {self.kind}", got=got, expected="the run's initial weights", fix=fix
                )
            )
        self._steps = tree["steps"]
        averages = self._averages()
        if averages.keys() != tree["weights"].keys():
            missing = sorted(averages.keys() ^ tree["weights"].keys())[:3]
            raise StaleArtefactError(
                explain("teacher weights", got=f"a mismatch in {missing}", expected="the parameters in the checkpoint")
            )
        for name, weight in averages.items():
            weight.copy_(tree["weights"][name].to(weight))
        self.settle()

    def _averages(self) -> dict[str, Tensor]:
        """Return the averaged weights of an EMA teacher by name, or {} for other teachers.

        Frozen weights are shared with the student, and are not included.
        """
        if self.kind != "ema" or self._copy is None:
            return {}
        weights: dict[str, Tensor] = dict(unwrapped(self._copy).named_parameters())
        return {name: self._masters.get(name, weights[name]) for name in self._moving}

    @torch.no_grad()
    def settle(self) -> None:
        """Copy the fp32 averages to the half-precision weights, whose own precision is too low for small updates."""
        if self._masters and self._copy is not None:
            weights = dict(unwrapped(self._copy).named_parameters())
            for name, master in self._masters.items():
                weights[name].copy_(master.to(weights[name]))


def live_teacher_warning(kind: str, alpha_sdpo: float, trainer: Any) -> str | None:
    """Return a warning if channel 2's teacher is the live student and the optimizer is adaptive, otherwise None.

    `trainer` is a `transformers.Trainer`. Before it has an optimizer, the one named in its arguments is checked.
    """
    class_and_kwargs: Any = getattr(trainer, "optimizer_cls_and_kwargs", None)
    configured_name = (
        class_and_kwargs[0].__name__
        if class_and_kwargs
        else str(getattr(trainer.args.optim, "value", trainer.args.optim))
    )
    name = configured_name if trainer.optimizer is None else type(trainer.optimizer).__name__
    if kind != "live" or not alpha_sdpo > 0 or not any(part in name.lower() for part in _ADAPTIVE):
        return None
    return (
        f"teacher live with {name}: an adaptive optimizer turns the small effect of any text in the context into full"
        " steps. Measured with AdamW, a shuffled hint lowered the erring call by 2.95 nats and the right one by 4.77;"
        ' with teacher "trust_region", by -0.01 and 4.25. Use "trust_region" (train.teacher.kind, or teacher=)'
    )


def _copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model in eval mode that shares the model's frozen weights."""
    shared = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    # The memo makes `deepcopy` reuse the frozen weights instead of copying them.
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    causal_lm = get_causal_lm(twin)
    # A patched `forward` is bound to the original model and would use that model's weights.
    causal_lm.__dict__.pop("forward", None)
    frozen = {id(parameter) for parameter in shared}
    for parameter in twin.parameters():
        if id(parameter) not in frozen:
            parameter.requires_grad_(False)
            parameter.grad = None
    return twin.eval()


def attach_teacher(teacher: TeacherKeeper, model: nn.Module, *, with_adapter: bool = False) -> None:
    """Attach the teacher unless it is already attached. Raises ConfigError if it would have to copy sharded weights."""
    if teacher.model is not None:
        share_start_weights(teacher.model, what="teacher weights")
        return
    is_whole = with_adapter or not has_adapter(unwrapped(model))
    needs_copy = teacher.kind == "ema" or (teacher.kind != "live" and is_whole)
    if needs_copy and is_sharded(model):
        fix = "Call teacher.attach(model) before sharding the model."
        got = "a sharded model"
        raise ConfigError(explain(f"teacher {teacher.kind}", got=got, expected="an unsharded model to copy", fix=fix))
    teacher.attach(model, with_adapter=with_adapter)


def shard_teacher(teacher: TeacherKeeper, model: nn.Module) -> None:
    """Shard the teacher's own copy like the model, if the model is sharded and the copy is not."""
    copy = teacher.model
    if copy is not None and is_sharded(model) and not is_sharded(copy):
        teacher.replace_model(_shard_like(copy, model))


def with_sharded_teacher(teacher: TeacherKeeper, prepared: tuple[Any, Any]) -> tuple[Any, Any]:
    """Shard the teacher like the model, and return `prepared`, the model and loader from `_prepare_for_training`."""
    shard_teacher(teacher, prepared[0])
    return prepared


def _shard_like(copy: nn.Module, model: nn.Module) -> nn.Module:
    """Shard those modules of the copy whose counterparts in the model are sharded, with the same mesh and precision."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    plain = dict(unwrapped(copy).named_modules())
    sharded = [(name, module) for name, module in unwrapped(model).named_modules() if isinstance(module, FSDPModule)]
    # Inner modules first, since the root takes all remaining weights.
    for name, module in reversed(sharded):
        state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
        options: dict[str, Any] = {"mp_policy": state._mp_policy}
        group = state._fsdp_param_group
        if group is not None:
            options |= {"mesh": group.mesh_info.mesh, "offload_policy": group.offload_policy}
        fully_shard(plain[name], **options)
    return copy


def reshard(teacher: TeacherKeeper) -> None:
    """Reshard the teacher, because FSDP2 leaves the root's weights unsharded after a pass without gradient."""
    if teacher.model is not None and is_sharded(teacher.model):
        for module in unwrapped(teacher.model).modules():
            if hasattr(module, "reshard"):
                module.reshard()


def local_state(teacher: TeacherKeeper) -> dict[str, Any]:
    """Return the teacher's state with only this process's shards of its weights."""
    reshard(teacher)
    state = teacher.state()
    return state | {"weights": {name: _local(weight) for name, weight in state["weights"].items()}}


@torch.no_grad()
def load_local_state(teacher: TeacherKeeper, tree: dict[str, Any]) -> None:
    """Restore the state that `local_state` returned."""
    if teacher.model is None or not is_sharded(teacher.model):
        teacher.load_state(tree)
        return
    reshard(teacher)
    weights: dict[str, Tensor] = teacher.state()["weights"]
    # `load_state` expects whole weights, so give it the current ones, and restore the shards below.
    teacher.load_state(tree | {"weights": weights})
    for name, weight in weights.items():
        _local(weight).copy_(tree["weights"][name])
    teacher.settle()


def _local(weight: Any) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight
