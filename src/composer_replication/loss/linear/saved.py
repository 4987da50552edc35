"""Records of tensors, taken apart for `save_for_backward` and put together again in the backward pass.

Autograd releases what was saved with it as soon as the graph is done, and notices when a saved tensor was changed in
between. A tensor hung on the context as an attribute would stay alive as long as anybody holds the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

from torch import Tensor

from composer_replication.loss.linear.head import LinearHead, TeacherTerm
from composer_replication.loss.linear.operands import Operands
from composer_replication.loss.linear.tile_losses import ChosenTokens, CrossEntropyTile, DivergenceTile

_RECORDS = (ChosenTokens, CrossEntropyTile, DivergenceTile, LinearHead, Operands, TeacherTerm)


@dataclass(frozen=True)
class _Slot:
    index: int


def without_tensors(record: Any, tensors: list[Tensor]) -> Any:
    """The record with every tensor moved to `tensors` and a slot left in its place."""
    if isinstance(record, Tensor):
        tensors.append(record)
        return _Slot(len(tensors) - 1)
    return _mapped(record, partial(without_tensors, tensors=tensors))


def with_tensors(record: Any, tensors: tuple[Tensor, ...]) -> Any:
    """The inverse of `without_tensors`."""
    if isinstance(record, _Slot):
        return tensors[record.index]
    return _mapped(record, partial(with_tensors, tensors=tensors))


def _mapped(record: Any, change: Callable[[Any], Any]) -> Any:
    """The record or tuple with every part changed; anything else as it is."""
    if isinstance(record, tuple):
        return tuple(change(each) for each in cast("tuple[Any, ...]", record))
    if isinstance(record, _RECORDS):
        return replace(record, **{field.name: change(getattr(record, field.name)) for field in fields(record)})
    return record
