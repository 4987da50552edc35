"""Pairs made of recorded rollouts, as a column of their batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.recipes.verl.columns import PAIRS, write_pairs
from recipes.recorded_steps import Batch
from recipes.verl.cpu_engine import data_proto


def pairs_of(batch: Batch) -> list[tuple[PairIds, tuple[float, float]]]:
    """At each site: another site's turn preferred to the erring one; references a little off the start weights'."""
    turns = [batch.row_ids(site.row)[site.start : site.end] for site in batch.sites]
    pairs = []
    for number, site in enumerate(batch.sites):
        context = batch.row_ids(site.row)[: site.start]
        sides = [ResponseIds([*context, *turn], site.start) for turn in (turns[number - 1], turns[number])]
        pairs.append((PairIds(*sides), (-20.0 - number, -12.5 + number)))
    return pairs


def with_pairs(batch: Batch, pairs: list[tuple[PairIds, Any]], rows: Sequence[int] = (1, 4, 6)) -> Any:
    """Two of them, one, and the rest, on rows that have nothing else to do with them; other rows have none."""
    proto = data_proto(batch)
    on_rows: dict[int, list[Any]] = {}
    for row, some in zip(rows, (pairs[:2], pairs[2:3], pairs[3:]), strict=True):
        on_rows.setdefault(row, []).extend(some)
    texts = [write_pairs(on_rows[row]) if row in on_rows else "" for row in range(len(proto))]
    proto.non_tensor_batch[PAIRS] = np.array(texts, dtype=object)
    return proto


def on_all_rollouts(batch: Batch, pairs: list[tuple[PairIds, Any]]) -> Any:
    """As verl copies a prompt's columns: each prompt has a part of them, and all its rollouts have the whole part."""
    proto = data_proto(batch)
    names = sorted(set(batch.group.tolist()))
    parts = {name: write_pairs(pairs[place :: len(names)]) for place, name in enumerate(names)}
    proto.non_tensor_batch[PAIRS] = np.array([parts[name] for name in batch.group.tolist()], dtype=object)
    return proto
