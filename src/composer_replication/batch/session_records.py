"""What a session's channels ask for, and the windows that hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from composer_replication.batch.render.renderer import TurnSpan
from composer_replication.batch.tree_batch import TreeBatch

REFERENCE_SAW_MORE = "reference_saw_more_context"
NO_WRONG_HINT = "no_wrong_hint"
WRONG_HINT = "wrong_hint:"


class SiteHint(NamedTuple):
    """An erring turn and what to say before it; a turn may have several.

    `wrong_hint` is one of a site of another kind (`batch.taught_turns.wrong_hints`), for `RowWeighting.contrast`.
    """

    span: TurnSpan
    hint: str
    wrong_hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    """Two sequences from the session's first token on: the same state, then a response from its start to the end."""

    chosen_ids: Sequence[int]
    chosen_start: int
    rejected_ids: Sequence[int]
    rejected_start: int
    references: tuple[float, float] | None = None


class Item(NamedTuple):
    """What a channel was given: the channel's name, and the number in the caller's list."""

    channel: str
    number: int


@dataclass(frozen=True, eq=False, slots=True)
class SessionWindow:
    """The tree of tokens [first, end) of the session, and what is computed there."""

    first: int
    end: int
    items: tuple[Item, ...]
    batch: TreeBatch


@dataclass(frozen=True, eq=False, slots=True)
class SessionBatches:
    """The windows, what is in none of them and why, and counts of the reasons and of everything else worth knowing.

    Besides those of `batch.windows.Plan`: `hint_makes_no_tokens`, `hint_has_no_place` (the template takes it nowhere),
    `nothing_before_it` (no row predicts its first token), `placement:<asked>-><used>`, `reference_saw_more_context`
    (pairs whose references are those of the whole session, while the window has a part of it),
    `whole_turn_without_call` (sites where only the calls are wanted, and none is known). Sites that stay, but
    without a contrast: `no_wrong_hint` (where other sites were given one) and `wrong_hint:<why it was dropped>`.
    """

    windows: tuple[SessionWindow, ...]
    dropped: Mapping[Item, str]
    counts: Counter[str]

    @property
    def batches(self) -> list[TreeBatch]:
        return [window.batch for window in self.windows]
