"""Compute the reference log-probs of preference pairs once, with the initial model, and store them with the data.

A DPO step compares the model with the initial model. Reference log-probs depend on the initial weights, the tokenizer,
the template and the precision. They are stored with a fingerprint of all four, and a file with any other fingerprint is
rejected as stale, as is a file from an older version that has no precision. If the model has an adapter, the initial
model is the model with the adapter off.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer_replication.atomic import atomic_write_bytes, directory_lock
from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.tree import SharedPrefixes
from composer_replication.batch.tree_batch import TreeBatch
from composer_replication.errors import ArtefactCorruptError, InputError, StaleArtefactError, explain
from composer_replication.tensor_file import read_tensors
from composer_replication.trainer.objective.distributed import adapter_disabled, has_adapter, max_over_shards, unwrapped
from composer_replication.trainer.objective.fingerprint import Fingerprint, compute_fingerprint, has_no_weights
from composer_replication.trainer.objective.reference import pair_logprobs, response_logprobs
from composer_replication.trainer.sessions.phases import Phase, report_phase

__all__ = ["ReferenceLogprobs", "precompute_ref_logprobs"]

_SCHEMA = "composer_replication.ref_logprobs"
_VERSION = "1"
# In these dtypes the log-probs from passes over different tokens agree to 1e-5 nats.
_EXACT_DTYPES = ("float32", "float64")


class ReferenceLogprobs:
    """Summed log-probs of responses, keyed by a digest of their token ids, and the fingerprint of the model.

    `of_steps` says whether they were computed by the same passes as in training steps, which matters in half precision.
    """

    def __init__(
        self, fingerprint: Fingerprint, values: dict[bytes, float] | None = None, *, of_steps: bool = False
    ) -> None:
        self.fingerprint, self.of_steps = fingerprint, of_steps
        self._values = dict(values or {})

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, response: ResponseIds) -> bool:
        return _response_key(*response) in self._values

    def lookup(
        self, chosen_ids: Sequence[int], chosen_start: int, rejected_ids: Sequence[int], rejected_start: int
    ) -> tuple[float, float]:
        """Return the log-probs of both sides of a pair. Raises InputError if they have not been computed."""
        return self._value(chosen_ids, chosen_start), self._value(rejected_ids, rejected_start)

    def add(self, response: ResponseIds, value: float) -> None:
        """Store the log-prob of a response."""
        self._values[_response_key(*response)] = value

    def take_over(self, other: ReferenceLogprobs) -> None:
        """Add the log-probs of another store with the same fingerprint; existing values are kept."""
        self._values = other._values | self._values

    def save(self, path: str | Path) -> None:
        """Write the log-probs to a safetensors file, atomically."""
        from safetensors.torch import save

        keys = sorted(self._values)
        tensors = {
            # reshape() gives the tensor its width even if there are no rows.
            "keys": torch.tensor([list(key) for key in keys], dtype=torch.uint8).reshape(-1, 32),
            "logprobs": torch.tensor([self._values[key] for key in keys], dtype=torch.float64),
        }
        passes = "steps" if self.of_steps else "trees"
        about = {"schema": _SCHEMA, "version": _VERSION, "passes": passes, **self.fingerprint._asdict()}
        atomic_write_bytes(path, save(tensors, metadata=about))

    @classmethod
    def load(cls, path: str | Path, expected: Fingerprint) -> ReferenceLogprobs:
        """Return the contents of a file written by `save`. Raises StaleArtefactError if its fingerprint differs."""
        about, tensors = _read(Path(path))
        # A field missing from an older file is "", and therefore differs.
        fingerprint = Fingerprint(*(about.get(name, "") for name in Fingerprint._fields))
        if different := fingerprint.differences(expected):
            fix = "Delete the file to compute them again, or use the model and settings that it was computed with."
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # The processes of one run disagree with each other, so deleting the file would not help.
                fix = f"Start rank {torch.distributed.get_rank()} with the same settings as the rank that wrote them."
            got = f"a mismatch in {' and '.join(different)}"
            raise StaleArtefactError(
                explain(f"reference log-probs in {path}", got=got, expected="the same fingerprint", fix=fix)
            )
        keys, values = (tensors[name].tolist() for name in ("keys", "logprobs"))
        logprobs = {bytes(key): value for key, value in zip(keys, values, strict=True)}
        return cls(fingerprint, logprobs, of_steps=about.get("passes") == "steps")

    def _value(self, ids: Sequence[int], start: int) -> float:
        value = self._values.get(_response_key(ids, start))
        if value is None:
            got = f"no value for a response of {len(ids) - start} tokens after {start} context tokens"
            fix = "Run precompute_ref_logprobs on these pairs, with the renderer of the batches."
            raise InputError(explain("reference log-prob", got=got, expected="a precomputed value", fix=fix))
        return value


def precompute_ref_logprobs(
    model: nn.Module,
    renderer: Renderer,
    pairs: Iterable[PairIds],
    *,
    path: str | Path | None = None,
    max_tree_tokens: int = 32_768,
    with_adapter: bool = False,
) -> ReferenceLogprobs:
    """Return the log-probs of both sides of every pair under the initial model.

    Call this before the first optimizer step. The initial model is the model without its adapter. With `with_adapter`,
    which is for use after a warm-up, it includes the adapter.

    The context that several responses share is computed once, in a tree of at most `max_tree_tokens` tokens (a longer
    response gets a tree of its own). With a `path`, stored log-probs are reused, only missing ones are computed, and
    the results of each pass are stored at once; StaleArtefactError is raised if the stored fingerprint does not match.
    Call this under the same autocast as the training, as the trainers do. Otherwise the precision of the reference
    log-probs differs from that of the trained model.
    """
    if max_tree_tokens < 1:
        raise InputError(explain("max_tree_tokens", got=max_tree_tokens, expected="1 or more"))
    # Pairs may share responses, each of which is computed only once.
    by_key = {_response_key(*response): response for pair in pairs for response in pair}

    def groups_of(store: ReferenceLogprobs) -> list[_ReferencePass]:
        missing = [response for response in by_key.values() if response not in store]
        groups = _group_by_prefix(missing, max_tree_tokens)
        return [_ReferencePass(group, partial(_tree_logprobs, model, group)) for group in groups]

    return _complete_store(model, renderer, groups_of, len(by_key), path=path, with_adapter=with_adapter)


def reference_logprobs_of_batches(
    model: nn.Module,
    renderer: Renderer,
    batches: Iterable[tuple[Sequence[PairIds], Callable[[], TreeBatch | Mapping[str, Tensor]]]],
    *,
    path: str | Path | None = None,
    with_adapter: bool = False,
) -> ReferenceLogprobs:
    """Return the log-probs of all pairs, computed by the same passes as in training steps.

    Each batch is given as its pairs and a function that builds it. In half precision, a log-prob depends on the other
    tokens in its pass. A step on one of these batches with the initial model gives exactly the same log-probs, so its
    DPO loss is ln 2.
    """
    listed = [([response for pair in pairs for response in pair], make) for pairs, make in batches]

    def batches_of(store: ReferenceLogprobs) -> list[_ReferencePass]:
        return [
            _ReferencePass(responses, partial(_batch_logprobs, model, make))
            for responses, make in listed
            if any(response not in store for response in responses)
        ]

    total = sum(len(responses) for responses, _ in listed)
    return _complete_store(model, renderer, batches_of, total, path=path, with_adapter=with_adapter, of_steps=True)


class _ReferencePass(NamedTuple):
    """One forward pass: its responses, and a function that computes their log-probs in the same order."""

    responses: list[ResponseIds]
    compute: Callable[[], list[float]]


def _tree_logprobs(model: nn.Module, group: list[ResponseIds]) -> list[float]:
    return response_logprobs(model, group).tolist()


def _batch_logprobs(model: nn.Module, make: Callable[[], TreeBatch | Mapping[str, Tensor]]) -> list[float]:
    return [value for pair in pair_logprobs(model, make()) for value in pair]


def _complete_store(
    model: nn.Module,
    renderer: Renderer,
    passes_of: Callable[[ReferenceLogprobs], list[_ReferencePass]],
    total: int,
    *,
    path: str | Path | None,
    with_adapter: bool,
    of_steps: bool = False,
) -> ReferenceLogprobs:
    """Return the store at `path`, or a new store, after computing the log-probs that it lacks."""
    if has_no_weights(model):
        fix = (
            "FSDP's cpu_ram_efficient_loading leaves all ranks but 0 without weights until the model is sharded. Pass"
            " the pairs to the trainer, which loads the weights on every rank first, or switch that option off."
        )
        got = "a model whose weights are all zeros"
        raise InputError(explain("reference log-probs", got=got, expected="loaded initial weights", fix=fix))
    fingerprint = compute_fingerprint(model, renderer, with_adapter=with_adapter)
    store_path = None if path is None else Path(path)
    is_stored = store_path is not None and store_path.exists()
    store = ReferenceLogprobs(fingerprint, of_steps=of_steps)
    if store_path and is_stored:
        store = ReferenceLogprobs.load(store_path, fingerprint)
        if of_steps and not store.of_steps and fingerprint.precision not in _EXACT_DTYPES:
            got = "log-probs from other passes (by precompute_ref_logprobs or an earlier version)"
            fix = "Delete the file to compute them again."
            expected = "log-probs from the passes of training steps"
            raise StaleArtefactError(
                explain(f"reference log-probs in {store_path}", got=got, expected=expected, fix=fix)
            )
    passes = passes_of(store)
    # The initial model is the model without its adapter, if it has one.
    includes_adapter = with_adapter or not has_adapter(unwrapped(model))
    with nullcontext() if includes_adapter else adapter_disabled(model):
        _compute(model, store, passes, total, store_path)
    # Nothing to compute and no file yet: a data set without pairs still gets its artifact.
    if store_path is not None and not passes and not is_stored:
        _save_merged(store, store_path)
    return store


def _compute(
    model: nn.Module, store: ReferenceLogprobs, groups: list[_ReferencePass], total: int, path: Path | None
) -> None:
    """Run the passes, storing the results of each before the next begins, so that an interrupt loses at most one."""

    def report_progress(remaining: int) -> None:
        report_phase(
            Phase(name="reference log-probs", done=total - remaining, total=total, items="responses", stored_in=path)
        )

    (passes,) = max_over_shards([model], [len(groups)])
    num_remaining = sum(len(group.responses) for group in groups)
    for group in groups:
        report_progress(num_remaining)
        for response, value in zip(group.responses, group.compute(), strict=True):
            store.add(response, value)
        if path is not None:
            _save_merged(store, path)
        num_remaining -= len(group.responses)
    # Another process of a sharded model has more passes, and all processes have to take part in them.
    for _ in range(passes - len(groups)):
        response_logprobs(model, [([0, 0], 1)])
    if groups:
        report_progress(num_remaining)


def _save_merged(store: ReferenceLogprobs, path: Path) -> None:
    """Write the log-probs to the file, merged with those that other processes have written to it in the meantime."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with directory_lock(path.parent, exclusive=True):
        if path.exists():
            store.take_over(ReferenceLogprobs.load(path, store.fingerprint))
        store.save(path)


def _group_by_prefix(responses: list[ResponseIds], max_tree_tokens: int) -> Iterator[list[ResponseIds]]:
    """Yield groups of responses that each fit into one tree.

    The responses are sorted first, so that neighbors share the longest prefixes.
    """
    if not responses:
        return
    prefixes = SharedPrefixes([torch.tensor(response.ids) for response in responses])
    group: list[ResponseIds] = []
    size = 0
    for number, shared in prefixes.in_sorted_order():
        response = responses[number]
        # The first response in a tree pays for its whole context.
        new = len(response.ids) - (shared if group else 0)
        if group and size + new > max_tree_tokens:
            yield group
            group, size, new = [], 0, len(response.ids)
        group.append(response)
        size += new
    yield group


def _response_key(ids: Sequence[int], start: int) -> bytes:
    # The start is part of the key, because responses of one sequence may begin at different tokens.
    return hashlib.sha256(array("q", [start, *ids]).tobytes()).digest()


def _read(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    tensors, about = read_tensors(path, fix="Delete the file to recompute it.")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    number = shapes.get("logprobs", (0,))[0]
    expected_shapes = {"keys": (number, 32), "logprobs": (number,)}
    if (about.get("schema"), about.get("version")) != (_SCHEMA, _VERSION) or shapes != expected_shapes:
        got = f"schema {about.get('schema')} version {about.get('version')}, {shapes}"
        raise ArtefactCorruptError(
            explain(str(path), got=got, expected=f"{_SCHEMA} version {_VERSION}, {expected_shapes}")
        )
    return about, tensors
