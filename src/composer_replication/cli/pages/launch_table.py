"""A launch of replicas as a table and as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.steps.replicas.tending import Sight

_MOST_RANKS, _LONGEST_S = 16, 1e9


def launch_table(sight: Sight) -> Table:
    """A row a replica; what the rounds are doing stands below."""
    from rich.markup import escape

    from composer_replication.cli.console import plain, table

    caption = escape(plain(round_line(sight)))
    rows = [(each.rank, each.status, each.in_round, each.attempt, each.where) for each in sight.replicas]
    columns = ("rank", "status", "in the open round", "started again", "known as")
    return table(f"Launch {sight.launch.number}", columns, rows, caption=caption or None, shrinks="known as")


def round_line(sight: Sight) -> str:
    """Rounds, members, bytes, who is waited for, and how long it takes. Whoever may write to the bucket wrote it."""
    from composer_replication.cli.pages.progress import duration

    progress = sight.progress
    if progress is None:
        return sight.trouble or ""
    total = "" if sight.launch.commits is None else f" of {sight.launch.commits}"
    parts = [f"round {progress.step}{total}"]
    if progress.rounds:
        last = progress.rounds[-1]
        seconds = duration(min(max(0.0, last.seconds), _LONGEST_S))
        parts += [f"last: rank {_ranks(sight, last.members)} in {seconds}, {_size(last.num_bytes)}"]
        if last.healed:
            parts.append(f"healed: {_ranks(sight, last.healed)}")
    if progress.stragglers:
        parts.append(f"waiting for rank {_ranks(sight, progress.stragglers)}")
    if sight.eta_s is not None and not sight.is_over:
        parts.append(f"about {duration(sight.eta_s)} left")
    return "; ".join(parts)


def _ranks(sight: Sight, ranks: Sequence[int]) -> str:
    """Ranks of this launch, as many as a line holds."""
    own = [each for each in ranks if each in range(sight.launch.replicas)]
    more = f" and {len(own) - _MOST_RANKS} more" if len(own) > _MOST_RANKS else ""
    return ", ".join(map(str, own[:_MOST_RANKS])) + more


def _size(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number = number / 1000  # pyright: ignore[reportAssignmentType]
    return f"{number:.3g} GB"
