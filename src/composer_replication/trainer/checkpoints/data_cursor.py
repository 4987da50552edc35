"""Where a run is in its data: the generators that decide the order, as they were when the epoch began and as they are.

The training loop skips the batches it has seen by drawing their indices again. That gives the same order only if every
generator that is drawn from stands where it stood at the beginning of the epoch: those of samplers, and the global one,
from which a sampler without a generator and the loader's own seed for its workers are drawn.
A data set or collator that draws random numbers itself is beyond this: its draws for skipped batches are not redone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
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


_PARTS = ("base_dataloader", "dataloader", "batch_sampler", "sampler", "dataset")


class DataCursor:
    """Keeps the state at the beginning of the current epoch and tells the state now."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._epoch_begin: dict[str, Any] = {}

    def epoch_begins(self, loader: Any) -> None:
        self._loader = loader
        self._epoch_begin = {"rng": rng_tree(), "samplers": _sampler_states(loader)}

    def tree(self) -> dict[str, Any]:
        return {"epoch_begin": self._epoch_begin, "samplers": _sampler_states(self._loader)}


def restore_samplers(loader: Any, tree: dict[str, Any], *, epoch: int, mid_epoch: bool) -> None:
    """Put a new loader where the saved one was: at the beginning of the epoch whose batches will be skipped, or now.

    In the first case the global generators go there too; the loop sets them to where they were at the save, afterwards.
    """
    states = tree["epoch_begin"]["samplers"] if mid_epoch else tree["samplers"]
    for path, part in _parts(loader):
        state = states.get(path, {})
        if "generator" in state:
            part.generator = part.generator or torch.Generator()  # some make theirs when they are first asked
            part.generator.set_state(state["generator"])
        if "initial_seed" in state:
            part.initial_seed = state["initial_seed"]
        if path and hasattr(part, "set_epoch"):  # the loader's own set_epoch does not reach samplers below two wrappers
            part.set_epoch(epoch)
    if mid_epoch:
        set_rng_tree(tree["epoch_begin"]["rng"])


def _sampler_states(loader: Any) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for path, part in _parts(loader):
        state: dict[str, Any] = {}
        if isinstance(getattr(part, "generator", None), torch.Generator):
            state["generator"] = part.generator.get_state()
        if isinstance(
            getattr(part, "initial_seed", None), int
        ):  # an accelerate sampler's; every epoch is seeded from it
            state["initial_seed"] = part.initial_seed
        if state:
            states[path] = state
    return states


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """The loader and what it is made of, each once, with the path to it."""
    waiting, seen_ids = [("", loader)], set[int]()
    while waiting:
        path, part = waiting.pop(0)
        if part is None or id(part) in seen_ids:
            continue
        seen_ids.add(id(part))
        yield path, part
        waiting += [(f"{path}.{name}" if path else name, getattr(part, name, None)) for name in _PARTS]
