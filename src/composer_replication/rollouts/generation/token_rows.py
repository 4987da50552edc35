"""Rows of token ids as lists: which are equal, what they share, and which of them go on where another ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Tokens = list[int]


class Origin(NamedTuple):
    """The kept row that a new one goes on from: its number, and how many tokens they share."""

    row: int
    shared: int


def rows_without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tokens] | None:
    """The real tokens of each row; None where the padding is not all on the left."""
    rows: list[Tokens] = input_ids.tolist()
    if attention_mask is None:
        return rows
    real = attention_mask.bool()
    if bool((real[:, 1:] < real[:, :-1]).any()) or not bool(real[:, -1].all()):
        return None
    return [row[len(row) - count :] for row, count in zip(rows, real.sum(1).tolist(), strict=True)]


def unequal_rows(rows: Sequence[Tokens]) -> tuple[list[Tokens], list[int]]:
    """Every different row once, and for each of the given ones its number among them."""
    numbers: dict[tuple[int, ...], int] = {}
    row_numbers = [numbers.setdefault(tuple(row), len(numbers)) for row in rows]
    return [list(row) for row in numbers], row_numbers


def shared_length(first: Tokens, second: Tokens) -> int:
    """Up to where two rows are equal."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


def shared_by_all(rows: Sequence[Tokens]) -> int:
    """How many first tokens all rows have in common: the least and the greatest of them tell."""
    return shared_length(min(rows), max(rows)) if rows else 0


def origins(rows: Sequence[Tokens], kept: Sequence[Tokens], prompts: Sequence[int]) -> list[Origin | None]:
    """For each row the kept one that it shares most with, among those whose whole prompt it begins with.

    `prompts` says how many tokens of each kept row are its prompt.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, (tokens, length) in enumerate(zip(kept, prompts, strict=True)):
        by_prompt.setdefault(tuple(tokens[:length]), []).append(number)
    lengths = sorted({len(prompt) for prompt in by_prompt}, reverse=True)

    def origin(row: Tokens) -> Origin | None:
        for length in lengths:
            if candidates := by_prompt.get(tuple(row[:length])):
                return max(
                    (Origin(candidate, shared_length(kept[candidate], row)) for candidate in candidates),
                    key=lambda e: e.shared,
                )
        return None

    return [origin(row) for row in rows]
