"""A teacher's own weights under FSDP2: spread over the processes as those of the student are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.errors import ConfigError, explain
from composer_replication.objective.adapters import has_adapter
from composer_replication.objective.wrapped import is_sharded, unwrapped
from composer_replication.trainer.teachers import TeacherKeeper


def attach_teacher(teacher: TeacherKeeper, model: nn.Module) -> None:
    """Attach it if nobody has; weights that are spread already cannot be copied."""
    if teacher.model is not None:
        return
    needs_copy = teacher.kind == "ema" or (teacher.kind != "live" and not has_adapter(unwrapped(model)))
    if needs_copy and is_sharded(model):
        fix = "Call teacher.attach(model) before sharding the model."
        got = "a sharded model to copy"
        raise ConfigError(explain(f"teacher {teacher.kind}", got=got, expected="a whole one", fix=fix))
    teacher.attach(model)


def shard_teacher(teacher: TeacherKeeper, model: nn.Module) -> None:
    """Where the model is sharded and the teacher has weights of its own that are not yet, shard them alike."""
    copy = teacher.model
    if copy is not None and is_sharded(model) and not is_sharded(copy):
        teacher.replace_model(shard_like(copy, model))


def shard_like(copy: nn.Module, model: nn.Module) -> nn.Module:
    """The copy, each of its modules sharded where the model's is, over the same mesh and in the same precision."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    plain = dict(unwrapped(copy).named_modules())
    sharded = [(name, each) for name, each in unwrapped(model).named_modules() if isinstance(each, FSDPModule)]
    for name, each in reversed(sharded):  # the inner ones first, as the root takes what they leave
        state: Any = each._get_fsdp_state()  # pyright: ignore[reportCallIssue]
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
    own: dict[str, Tensor] = teacher.state()["weights"]
    teacher.load_state(tree | {"weights": own})  # what else there is to check and to take
    for name, weight in own.items():
        _local(weight).copy_(tree["weights"][name])
    teacher.settle()


def _local(weight: Any) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight
