"""A launch of replicas as a table and as lines: before it starts, while it runs, and when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.steps.replicas.asking import Asked
    from composer_replication.steps.replicas.collecting import Collected
    from composer_replication.steps.replicas.looking import Sight

_MOST_RANKS, _LONGEST_S = 16, 1e9


def launch_table(sight: Sight) -> Table:
    """A row a replica; what the rounds are doing stands below."""
    from rich.markup import escape

    from composer_replication.cli.console import plain, table

    caption = escape(plain(round_line(sight)))
    rows = [
        (replica.rank, replica.status, _exit(replica.exit_code), replica.in_round, replica.attempt, replica.where)
        for replica in sight.replicas
    ]
    columns = ("rank", "status", "exit", "in the open round", "started again", "known as")
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
    if sight.stalled_s is not None and sight.pace is not None:
        usual_s = sight.pace.usual_s
        usual = "below a second" if usual_s < 1 else f"about {duration(min(usual_s, _LONGEST_S))}"
        parts.append(f"stalled for {duration(sight.stalled_s)} (a round takes {usual})")
    if sight.eta_s is not None and not sight.is_over:
        parts.append(f"about {duration(sight.eta_s)} left")
    return "; ".join(parts)


def end_lines(sight: Sight, bucket: str, *, is_said: bool) -> list[str]:
    """Why replicas failed, a line each unless that `is_said` already, and how to see more."""
    from composer_replication.steps.replicas.tending import about_end

    failed = [replica for replica in sight.replicas if replica.error]
    lines = [] if is_said else [about_end(replica) for replica in failed]
    if failed:
        words = f"{bucket} --launch {sight.launch.number}"
        lines.append(f"all that they printed: `crf diloco collect {words} --timeout 0 -o DIR`, in DIR/logs")
    return lines


def show_sight(sight: Sight, bucket: str, *, as_json: bool, is_said: bool = False) -> int:
    """0 unless a replica failed for good."""
    from composer_replication.cli.console import print_json, say, show

    if as_json:
        commits = 0 if sight.progress is None else sight.progress.step
        counts = {"launch": sight.launch.number, "commits": commits, "of": sight.launch.commits}
        replicas = [replica._asdict() for replica in sight.replicas]
        pace = {"eta_s": sight.eta_s, "stalled_s": sight.stalled_s}
        print_json({**counts, **pace, "trouble": sight.trouble, "replicas": replicas})
    else:
        show(launch_table(sight))
        for line in end_lines(sight, bucket, is_said=is_said):
            say(line)
    return 1 if any(replica.status == "failed" for replica in sight.replicas) else 0


def show_asked(asked: Asked, number: int, uri: str, *, as_json: bool) -> None:
    """What a launch would send and start."""
    from composer_replication.cli.console import print_json, say, show, table

    files = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in asked.files.items()}
    if as_json:
        print_json({"launch": number, "replicas": asked.replicas, "executor": asked.executor, "files": files})
        return
    rows = [*files.items(), ("all files", asked.num_bytes)]
    show(table("Into the bucket", ("file", "bytes"), rows, last_is_total=True))
    exchanges = "" if asked.commits is None else f", {asked.commits} exchanges"
    say(f"launch {number} at {uri}: {asked.replicas} replicas by {asked.executor}{exchanges}")
    say("nothing was sent, and nothing started; whether the bucket can be written was not tried")


def show_collected(collected: Collected, number: int, bucket: str, *, as_json: bool) -> None:
    """What replicas ended with, and who has not ended."""
    from composer_replication.cli.console import print_json, say, show, table

    outcomes, running = collected.outcomes, collected.running
    if as_json:
        weights = str(collected.weights or "")
        print_json({"launch": number, "weights": weights, "still_running": running, "outcomes": outcomes})
        return
    rows = [
        (outcome["rank"], outcome["status"], _exit(outcome["exit_code"]), outcome["error"] or "")
        for outcome in outcomes
    ]
    show(table(f"Launch {number}", ("rank", "status", "exit", "error"), rows, shrinks="error"))
    weights = collected.weights
    what = "no weights were left in the bucket" if weights is None else f"{weights}: the trained weights"
    say(f"{what}; {collected.folder / 'logs'}: what the replicas printed")
    if running:
        words = f"{bucket} --launch {number}"
        say(
            f"still running: rank {', '.join(map(str, running))}; wait (`crf diloco watch {words}`) and collect again, "
            f"or end them (`crf diloco cancel {words}`)"
        )


def _exit(code: int | None) -> str:
    """An exit status, and nothing where there is none."""
    return "" if code is None else str(code)


def _ranks(sight: Sight, ranks: Sequence[int]) -> str:
    """Ranks of this launch, as many as a line holds."""
    own_ranks = [rank for rank in ranks if rank in range(sight.launch.replicas)]
    more = f" and {len(own_ranks) - _MOST_RANKS} more" if len(own_ranks) > _MOST_RANKS else ""
    return ", ".join(map(str, own_ranks[:_MOST_RANKS])) + more


def _size(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number = number / 1000  # pyright: ignore[reportAssignmentType]
    return f"{number:.3g} GB"
