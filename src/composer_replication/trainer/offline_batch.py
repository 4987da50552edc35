"""What a data loader hands to the offline trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.batch.tree_batch import TreeBatch
from composer_replication.objective.components import CHANNELS
from composer_replication.trainer.offline_windows import side_by_side

KEY = "session_batch"


@dataclass(frozen=True, eq=False)
class SessionBatch:
    """One micro-batch: its trees side by side. Not a mapping of tensors, so that no library moves or cuts it."""

    batch: TreeBatch
    items: Mapping[str, int]


def collate(batches: Sequence[TreeBatch]) -> dict[str, SessionBatch]:
    batch = side_by_side(batches)
    return {KEY: SessionBatch(batch, batch.counts())}


def items_of(batches: Sequence[Mapping[str, SessionBatch]]) -> dict[str, int]:
    """Items of each channel in all of these."""
    total: Counter[str] = Counter()
    for each in batches:
        total.update(each[KEY].items)
    return {name: total[name] for name in CHANNELS}
