"""Work inside the forward of a model that is wrapped for several processes.

DDP watches its module's forward, and FSDP2 has whole weights only inside it; hidden rows and the head's product on
selected rows are neither. So the wrapper is called as always, and in the place of the model's own forward the work is
done. A plain model needs none of this, and gets none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn

from composer_replication.errors import UnsupportedModelError, explain

T = TypeVar("T")
_inside: WeakSet[nn.Module] = WeakSet()


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP and torch.compile."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = getattr(model, "_orig_mod")  # noqa: B009
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            break
    if type(model).__name__ == "FullyShardedDataParallel":
        fix = "Shard with torch.distributed.fsdp.fully_shard (FSDP2)."
        raise UnsupportedModelError(explain("model", got="FSDP1", expected="a plain, DDP or FSDP2 model", fix=fix))
    return model


def inside_forward(model: nn.Module, causal_lm: nn.Module, work: Callable[[], T]) -> T:
    """What `work` returns: tensors, or tuples of them, which the wrapper then watches."""
    entry = _entry(model, causal_lm)
    if entry is None or causal_lm in _inside:
        return work()
    before = causal_lm.__dict__.get("forward")
    called = False

    def instead(*_args: object, **_options: object) -> T:
        nonlocal called
        called = True
        put_back()  # what the work asks of the model itself is the model's own
        return work()

    def put_back() -> None:
        if before is not None:
            causal_lm.__dict__["forward"] = before
        else:
            causal_lm.__dict__.pop("forward", None)

    causal_lm.__dict__["forward"] = instead
    _inside.add(causal_lm)
    try:
        result = entry()
    finally:
        _inside.discard(causal_lm)
        put_back()
    if not called:
        got = f"{type(entry).__name__}, which does not call the forward of {type(causal_lm).__name__}"
        raise UnsupportedModelError(explain("wrapped model", got=got, expected="DDP or FSDP2 around it"))
    return result


def agreed_most(model: nn.Module, causal_lm: nn.Module, counts: list[int]) -> list[int]:
    """Of each count the most on any process that holds a part of the weights: they must run as many passes."""
    if not is_sharded(model, causal_lm):
        return counts
    device = next(causal_lm.parameters()).device
    agreed = torch.tensor(counts, device=device)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
    return agreed.tolist()


def is_sharded(model: nn.Module, causal_lm: nn.Module) -> bool:
    kind = _sharded_kind()
    return kind is not None and any(isinstance(each, kind) for each in (unwrapped(model), *causal_lm.modules()))


def _entry(model: nn.Module, causal_lm: nn.Module) -> nn.Module | None:
    """The outermost wrapper that has to be called, if any."""
    bare = getattr(model, "_orig_mod", model)
    if isinstance(bare, nn.parallel.DistributedDataParallel):
        return bare
    kind = _sharded_kind()
    chain = (bare, getattr(bare, "base_model", None), causal_lm)
    return next((each for each in chain if kind is not None and isinstance(each, kind)), None)


def _sharded_kind() -> type[nn.Module] | None:
    """FSDP2's class, without loading it: a model can only be one if it is loaded."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    return None if loaded is None else loaded.FSDPModule
