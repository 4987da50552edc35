"""Save a run's position in its data: the states of the generators that determine the order of the data.

On resume, the training loop skips batches by drawing their indices a second time. This gives the same order only if
every generator involved has the state that it had at the start of the epoch: the samplers' generators, and the global
generator, which determines the workers' seeds and the order of samplers without their own generator. The states at the
start of the epoch are therefore saved as well as the current ones. Random numbers drawn by a data set or a collator are
not covered, since skipped batches are not collated a second time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch


def rng_tree() -> dict[str, Any]:
    """Return the states of the random number generators in Python, numpy, torch on the CPU, and every CUDA device."""
    import numpy

    # The legacy global generator, which data sets and collators use through `numpy.random`.
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": {
            "generator": str(name),
            "keys": torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)),  # torch supports few operations on uint32
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gauss": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_tree(tree: dict[str, Any]) -> None:
    """Restore the generators from `rng_tree`. CUDA devices without a saved state keep their current state."""
    import numpy

    random.setstate(tree["python"])
    old = tree["numpy"]
    keys = old["keys"].cpu().numpy().astype(numpy.uint32)
    numpy.random.set_state((old["generator"], keys, old["position"], old["has_gauss"], old["cached_gauss"]))
    torch.set_rng_state(tree["torch"].cpu())
    for device, state in enumerate(tree["cuda"][: torch.cuda.device_count() if torch.cuda.is_available() else 0]):
        torch.cuda.set_rng_state(state.cpu(), device)


# Attributes that lead from a loader, possibly wrapped by accelerate, to its samplers.
_PART_ATTRIBUTES = ("base_dataloader", "dataloader", "batch_sampler", "sampler", "dataset")


class DataCursor:
    """A record of the generator and sampler states at the start of the current epoch."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._epoch_begin: dict[str, Any] = {}

    def epoch_begins(self, loader: Any) -> None:
        self._loader = loader
        self._epoch_begin = {"rng": rng_tree(), "samplers": _sampler_states(loader)}

    def tree(self) -> dict[str, Any]:
        return {"epoch_begin": self._epoch_begin, "samplers": _sampler_states(self._loader)}

    @staticmethod
    def restore(loader: Any, tree: dict[str, Any], *, epoch: int, mid_epoch: bool) -> None:
        """Restore the states of a new loader's samplers.

        In the middle of an epoch the samplers get their states from the start of that epoch, because the training loop
        will skip batches; the global generators are restored to the start of the epoch as well, and the training loop
        later sets them to the states saved last. Between epochs the samplers get the states saved last.
        """
        states = tree["epoch_begin"]["samplers"] if mid_epoch else tree["samplers"]
        for path, part in _nested_parts(loader):
            state = states.get(path, {})
            if "generator" in state:
                # Some samplers create their generator on first use.
                part.generator = part.generator or torch.Generator()
                part.generator.set_state(state["generator"])
            if "initial_seed" in state:
                part.initial_seed = state["initial_seed"]
            # The loader's `set_epoch` does not reach samplers below two wrappers.
            if path and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if mid_epoch:
            set_rng_tree(tree["epoch_begin"]["rng"])


def _sampler_states(loader: Any) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    for path, part in _nested_parts(loader):
        state: dict[str, Any] = {}
        if isinstance(getattr(part, "generator", None), torch.Generator):
            state["generator"] = part.generator.get_state()
        # accelerate's SeedableRandomSampler derives each epoch's seed from its initial seed.
        if isinstance(getattr(part, "initial_seed", None), int):
            state["initial_seed"] = part.initial_seed
        if state:
            states[path] = state
    return states


def _nested_parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the loader and each object nested in it once, as (attribute path, object)."""
    queue, visited_ids = [("", loader)], set[int]()
    while queue:
        path, part = queue.pop(0)
        if part is None or id(part) in visited_ids:
            continue
        visited_ids.add(id(part))
        yield path, part
        queue += [(f"{path}.{name}" if path else name, getattr(part, name, None)) for name in _PART_ATTRIBUTES]
