"""Who teaches channel 2 over a run: the weights that are not the student's own, kept, moved and saved.

    live          the student itself, at every step; it drifts with what it learns
    frozen        the start weights
    ema           an average of the student's weights: teacher += ema_rate * (student - teacher) after each step
    trust_region  logits (1 - live_share) * start weights + live_share * live

Under an adapter the start weights are the model with the adapter off, so frozen and trust_region keep no weights of
their own, and an average keeps those of the adapter alone. After a warm-up the start is the model as that left it: with
an adapter, a copy of the adapter alone on the same weights below it.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from composer_replication.errors import (
    ConfigError,
    InputError,
    StaleArtefactError,
    explain,
)
from composer_replication.trainer.objective.distributed import has_adapter, is_sharded, unwrapped
from composer_replication.trainer.objective.fingerprint import weights_digest
from composer_replication.trainer.objective.model_head import causal_lm_of
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.same_start import share_start_weights

_HALVES = (torch.bfloat16, torch.float16)
TeacherKind = Literal["live", "frozen", "ema", "trust_region"]
TEACHER_KINDS: tuple[TeacherKind, ...] = ("live", "frozen", "ema", "trust_region")
# Optimisers that divide a gradient by its own size, by parts of their names.
_ADAPTIVE = ("ada", "rmsprop")


class TeacherKeeper:
    """The teacher of one run. `attach` it to the start weights, ask for its `shares`, tell it of every step."""

    def __init__(self, kind: TeacherKind = "live", *, ema_rate: float = 0.05, live_share: float = 0.01) -> None:
        if kind not in TEACHER_KINDS:
            raise InputError(explain("teacher", got=repr(kind), expected=f"one of {TEACHER_KINDS}"))
        for name, value in (("ema_rate", ema_rate), ("live_share", live_share)):
            if not 0 < value < 1:
                raise InputError(explain(name, got=value, expected="a share between 0 and 1"))
        self.kind, self.ema_rate, self.live_share = kind, ema_rate, live_share
        self._copy: nn.Module | None = None
        self._moving: list[str] = []
        self._masters: dict[str, Tensor] = {}
        self._is_below_adapter = False
        self._steps = 0
        self._start: str | None = None

    def attach(self, model: nn.Module, *, with_adapter: bool = False) -> None:
        """Take the model as it is now for the start, below its adapter or `with_adapter`; before it is wrapped or
        trained, and once. Of several processes all attach together, and each has rank 0's weights afterwards."""
        share_start_weights(model)
        start = unwrapped(model)
        stays_as_it_began = self.kind in ("frozen", "trust_region")
        if stays_as_it_began:
            self._start = weights_digest(start, with_adapter=with_adapter)
        self._is_below_adapter = stays_as_it_began and has_adapter(start) and not with_adapter
        if self.kind == "live" or self._is_below_adapter:
            return
        self._moving = [name for name, parameter in start.named_parameters() if parameter.requires_grad]
        self._copy = _copy_of(start)
        if self.kind == "ema":
            weights = dict(self._copy.named_parameters())
            halves = {name: weights[name] for name in self._moving if weights[name].dtype in _HALVES}
            self._masters = {name: weight.detach().float() for name, weight in halves.items()}

    @property
    def model(self) -> nn.Module | None:
        """The copy that teaches, where there is one: a trainer moves it to its device, or shards it."""
        return self._copy

    def replace_model(self, model: nn.Module) -> None:
        """The same copy after it was moved or sharded, before the first step."""
        self._copy = model
        weights = dict(unwrapped(model).named_parameters())
        self._masters = {name: weights[name].detach().float() for name in self._masters}

    def shares(self) -> list[WeightedTeacher] | None:
        """What `compose_loss(sdpo_teachers=...)` takes; None is the live student."""
        if self.kind == "live":
            return None
        if self._copy is None and not self._is_below_adapter:
            raise InputError(explain("teacher", got=f"{self.kind}, not attached", expected="attach(model) first"))
        teacher = WeightedTeacher(self._copy, 1.0, without_adapter=self._is_below_adapter)
        if self.kind == "trust_region":
            return [teacher._replace(coefficient=1.0 - self.live_share), WeightedTeacher(coefficient=self.live_share)]
        return [teacher]

    @torch.no_grad()
    def after_step(self, model: nn.Module) -> None:
        """Move an average towards the student; the others stay."""
        self._steps += 1
        if self.kind != "ema" or self._copy is None:
            return
        now = dict(unwrapped(model).named_parameters())
        for name, average in self._averages().items():
            average.lerp_(now[name].to(average), self.ema_rate)
        self.settle()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: an average's own weights. Start weights come from the start model again."""
        return {"kind": self.kind, "steps": self._steps, "start_digest": self._start, "weights": self._averages()}

    @torch.no_grad()
    def load_state(self, tree: dict[str, Any]) -> None:
        if tree["kind"] != self.kind:
            fix = "Resume with the teacher the run began with."
            raise StaleArtefactError(explain("teacher", got=self.kind, expected=tree["kind"], fix=fix))
        # An earlier version kept a digest of some values, under another name: it is not compared.
        if tree.get("start_digest", self._start) != self._start:
            fix = "Make the trainer with the model the run began with; the checkpoint's weights are loaded into it."
            got = "other weights than the run began with"
            raise StaleArtefactError(
                explain(f"start weights of teacher {self.kind}", got=got, expected="those", fix=fix)
            )
        self._steps = tree["steps"]
        averages = self._averages()
        if averages.keys() != tree["weights"].keys():
            missing = sorted(averages.keys() ^ tree["weights"].keys())[:3]
            raise StaleArtefactError(explain("teacher weights", got=f"others, such as {missing}", expected="the same"))
        for name, weight in averages.items():
            weight.copy_(tree["weights"][name].to(weight))
        self.settle()

    def _averages(self) -> dict[str, Tensor]:
        """The weights that are an average's own; the frozen ones are the student's too."""
        if self.kind != "ema" or self._copy is None:
            return {}
        weights: dict[str, Tensor] = dict(unwrapped(self._copy).named_parameters())
        return {name: self._masters.get(name, weights[name]) for name in self._moving}

    @torch.no_grad()
    def settle(self) -> None:
        """Half-precision weights are averaged in fp32 and rounded: a twentieth of a small step is nothing to them."""
        if self._masters and self._copy is not None:
            weights = dict(unwrapped(self._copy).named_parameters())
            for name, master in self._masters.items():
                weights[name].copy_(master.to(weights[name]))


def live_teacher_warning(kind: str, alpha_sdpo: float, trainer: Any) -> str | None:
    """What was measured where the student teaches itself and the optimiser is adaptive; None where that is not so.

    `trainer` is a `transformers.Trainer`: its optimiser where it was given one, the one that its arguments name if not.
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
        f"teacher live with {name}: an adaptive optimiser makes whole steps of what little any text in the context"
        " changes. Measured with AdamW, a shuffled hint lowered the erring call by 2.95 nats where the right one did by"
        ' 4.77; with the teacher "trust_region" by -0.01 and 4.25. Take that one (train.teacher.kind, or teacher=)'
    )


def _copy_of(model: nn.Module) -> nn.Module:
    """A second model in eval mode whose trainable weights are its own; frozen ones are those of the first."""
    shared = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    causal_lm = causal_lm_of(twin)
    causal_lm.__dict__.pop("forward", None)  # a forward patched onto the first model would run the first one's weights
    frozen = {id(parameter) for parameter in shared}
    for parameter in twin.parameters():
        if id(parameter) not in frozen:
            parameter.requires_grad_(False)
            parameter.grad = None
    return twin.eval()


def attach_teacher(teacher: TeacherKeeper, model: nn.Module, *, with_adapter: bool = False) -> None:
    """Attach it if nobody has; weights that are spread already cannot be copied."""
    if teacher.model is not None:
        share_start_weights(teacher.model, what="weights of the teacher")
        return
    is_whole = with_adapter or not has_adapter(unwrapped(model))
    needs_copy = teacher.kind == "ema" or (teacher.kind != "live" and is_whole)
    if needs_copy and is_sharded(model):
        fix = "Call teacher.attach(model) before sharding the model."
        got = "a sharded model to copy"
        raise ConfigError(explain(f"teacher {teacher.kind}", got=got, expected="a whole one", fix=fix))
    teacher.attach(model, with_adapter=with_adapter)


def shard_teacher(teacher: TeacherKeeper, model: nn.Module) -> None:
    """Where the model is sharded and the teacher has weights of its own that are not yet, shard them alike."""
    copy = teacher.model
    if copy is not None and is_sharded(model) and not is_sharded(copy):
        teacher.replace_model(_shard_like(copy, model))


def with_sharded_teacher(teacher: TeacherKeeper, prepared: tuple[Any, Any]) -> tuple[Any, Any]:
    """What a trainer's `_prepare_for_training` gave (model, loader), its teacher sharded as the model now is."""
    shard_teacher(teacher, prepared[0])
    return prepared


def _shard_like(copy: nn.Module, model: nn.Module) -> nn.Module:
    """The copy, each of its modules sharded where the model's is, over the same mesh and in the same precision."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    plain = dict(unwrapped(copy).named_modules())
    sharded = [(name, module) for name, module in unwrapped(model).named_modules() if isinstance(module, FSDPModule)]
    for name, module in reversed(sharded):  # the inner ones first, as the root takes what they leave
        state: Any = module._get_fsdp_state()  # pyright: ignore[reportCallIssue]
        options: dict[str, Any] = {"mp_policy": state._mp_policy}
        group = state._fsdp_param_group
        if group is not None:
            options |= {"mesh": group.mesh_info.mesh, "offload_policy": group.offload_policy}
        fully_shard(plain[name], **options)
    return copy


def reshard(teacher: TeacherKeeper) -> None:
    """After a pass without gradient a root's weights stay whole; whoever reads or moves them wants the shards."""
    if teacher.model is not None and is_sharded(teacher.model):
        for module in unwrapped(teacher.model).modules():
            if hasattr(module, "reshard"):
                module.reshard()


def local_state(teacher: TeacherKeeper) -> dict[str, Any]:
    """The teacher's state with the shards of this process."""
    reshard(teacher)
    state = teacher.state()
    return state | {"weights": {name: _local(weight) for name, weight in state["weights"].items()}}


@torch.no_grad()
def load_local_state(teacher: TeacherKeeper, tree: dict[str, Any]) -> None:
    """The inverse of `local_state`."""
    if teacher.model is None or not is_sharded(teacher.model):
        teacher.load_state(tree)
        return
    reshard(teacher)
    weights: dict[str, Tensor] = teacher.state()["weights"]
    teacher.load_state(tree | {"weights": weights})  # what else there is to check and to take
    for name, weight in weights.items():
        _local(weight).copy_(tree["weights"][name])
    teacher.settle()


def _local(weight: Any) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight
