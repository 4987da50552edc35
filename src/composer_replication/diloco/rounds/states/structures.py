"""What registered functions save, as a structure of dicts, lists and plain values, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from composer_replication.diloco.rounds.records import RecordError, items, whole
from composer_replication.errors import InputError, explain

MOST_TENSORS, MOST_DEPTH = 10**7, 64
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Flat:
    """A state as its structure and its tensors."""

    structure: Any
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def outline(self) -> Outline:
        spec = [[list(tensor.shape), str(tensor.dtype)] for tensor in self.tensors]
        return Outline(self.structure, spec, self.num_bytes)


@dataclass(frozen=True)
class Outline:
    """A state without its numbers."""

    structure: Any
    spec: list[list[Any]]
    num_bytes: int


def flatten(state: Any) -> Flat:
    tensors: list[Tensor] = []
    return Flat(_structure(state, tensors), tuple(tensors))


def unflatten(structure: Any, tensors: Sequence[Tensor]) -> Any:
    (tag, content), *rest = structure.items()
    if rest:
        raise RecordError(f"a structure with the tags {sorted(structure)}")
    if tag == "tensor":
        return tensors[content]
    if tag == "dict":
        return {key: unflatten(value, tensors) for key, value in content}
    if tag == "list":
        return [unflatten(value, tensors) for value in content]
    if tag == "tuple":
        return tuple(unflatten(value, tensors) for value in content)
    return content


def _structure(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {"dict": [[_key(key), _structure(inner, tensors)] for key, inner in items]}
    if isinstance(value, list | tuple):
        tag = "list" if isinstance(value, list) else "tuple"
        return {tag: [_structure(inner, tensors) for inner in cast("Sequence[object]", value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    expected = "tensors, dicts, lists and plain values"
    raise InputError(explain("state of a registered function", got=type(value).__name__, expected=expected))


def _key(key: object) -> int | str:
    if isinstance(key, int | str) and not isinstance(key, bool):
        return key
    raise InputError(explain("key of a state", got=repr(key), expected="text or an integer"))


def tensors_in(structure: Any, depth: int = MOST_DEPTH) -> Iterator[int]:
    """The numbers of a structure's tensors; ValueError where it holds anything else than `flatten` makes."""
    if not depth or not isinstance(structure, dict) or len(structure) != 1:
        raise ValueError(f"{str(structure)[:40]!r} in a structure, or one too deep")
    ((tag, content),) = structure.items()
    if tag == "tensor":
        yield whole(content, below=MOST_TENSORS)
    elif tag == "dict":
        for key, inner in (items(pair, 2) for pair in items(content, MOST_TENSORS)):
            _key(key)
            yield from tensors_in(inner, depth - 1)
    elif tag in ("list", "tuple"):
        for inner in items(content, MOST_TENSORS):
            yield from tensors_in(inner, depth - 1)
    elif tag != "value" or not isinstance(content, _PLAIN):
        raise ValueError(f"the tag {str(tag)[:40]!r} in a structure")
