"""A launch of replicas as a table and as a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.steps.replicas.tending import Sight


def launch_table(sight: Sight) -> Table:
    """A row a replica; what the rounds are doing stands below."""
    from composer_replication.cli.console import table

    rows = [(each.rank, each.status, each.in_round, each.attempt, each.where) for each in sight.replicas]
    columns = ("rank", "status", "in the open round", "started again", "known as")
    return table(f"Launch {sight.launch.number}", columns, rows, caption=round_line(sight) or None, shrinks="known as")


def round_line(sight: Sight) -> str:
    """Rounds, members, bytes, who is waited for, and how long it takes."""
    from composer_replication.cli.pages.progress import duration

    progress = sight.progress
    if progress is None:
        return ""
    total = "" if sight.launch.commits is None else f" of {sight.launch.commits}"
    parts = [f"round {progress.step}{total}"]
    if progress.rounds:
        last = progress.rounds[-1]
        members = ", ".join(map(str, last.members))
        parts += [f"last: rank {members} in {duration(last.seconds)}, {_size(last.num_bytes)}"]
        if last.healed:
            parts.append(f"healed: {', '.join(map(str, last.healed))}")
    if progress.stragglers:
        parts.append(f"waiting for rank {', '.join(map(str, progress.stragglers))}")
    if sight.eta_s is not None and not sight.is_over:
        parts.append(f"about {duration(sight.eta_s)} left")
    return "; ".join(parts)


def _size(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number = number / 1000  # pyright: ignore[reportAssignmentType]
    return f"{number:.3g} GB"
