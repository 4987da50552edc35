"""The states of every random number generator of a process, as a tree, and back."""

from __future__ import annotations

import random
from typing import Any

import torch


def rng_tree() -> dict[str, Any]:
    """Python's, numpy's and torch's generators, the CPU's and every CUDA device's."""
    import numpy

    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "generator": str(name),
            "keys": torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)),  # torch does little with uint32
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_tree(tree: dict[str, Any]) -> None:
    """Put every generator where `rng_tree` found it; devices that were not there then stay as they are."""
    import numpy

    random.setstate(tree["python"])
    old = tree["numpy"]
    keys = old["keys"].cpu().numpy().astype(numpy.uint32)
    numpy.random.set_state((old["generator"], keys, old["position"], old["has_gauss"], old["cached_gauss"]))
    torch.set_rng_state(tree["torch"].cpu())
    for device, state in enumerate(tree["cuda"][: torch.cuda.device_count() if torch.cuda.is_available() else 0]):
        torch.cuda.set_rng_state(state.cpu(), device)
