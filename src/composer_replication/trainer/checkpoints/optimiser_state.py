"""The optimiser's state as a tree: by number of parameter where the model is whole, by name where it is sharded."""

from __future__ import annotations

from typing import Any

from torch import nn

from composer_replication.objective.wrapped import is_sharded


def optimiser_tree(model: nn.Module, optimiser: Any) -> dict[str, Any]:
    """Of an FSDP2 model the whole state, gathered: on process 0, and empty elsewhere; every process has to call it."""
    if not is_sharded(model):
        return optimiser.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_optimizer_state_dict(model, _inner(optimiser), options=options))


def load_optimiser_tree(model: nn.Module, optimiser: Any, tree: dict[str, Any]) -> None:
    """What `optimiser_tree` gave; every process gives the same tree."""
    if not is_sharded(model):
        optimiser.load_state_dict(tree)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, _inner(optimiser), tree, options=options)


def _inner(optimiser: Any) -> Any:
    """The optimiser inside accelerate's wrapper."""
    return getattr(optimiser, "optimizer", optimiser)
