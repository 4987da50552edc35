"""Look after the replicas of a launch: say how each is doing, and start those again that died before the run's end."""

from __future__ import annotations

import time
from collections.abc import Callable

from composer_replication.diloco.serverless.answers import in_brief, tried
from composer_replication.diloco.serverless.executor import Executor
from composer_replication.diloco.serverless.replica_process import REFUSED
from composer_replication.diloco.store import ObjectStore, StoreError
from composer_replication.errors import InputError
from composer_replication.steps.replicas.launch_file import LaunchFile
from composer_replication.steps.replicas.looking import Sight, Standing, look
from composer_replication.steps.replicas.replica import DONE
from composer_replication.steps.replicas.starting import start_one

_NOT_NOW = "the bucket cannot be read"
_LATE_S = 60.0  # between two looks for machines that came after their rank was started again


def tend(
    store: ObjectStore,
    file: LaunchFile,
    executor: Executor,
    *,
    relaunches: int,
    seen: Callable[[Sight], None] = lambda _sight: None,
    said: Callable[[str], None] = lambda _text: None,
    every_s: float = 2.0,
) -> Sight:
    """Watch until all have ended; one that failed is started again, `relaunches` times at most each.

    One is not started again when the run has ended without it, or it has left what it ended with: it would train on
    alone; nor when another start would only repeat its error. Nor while the bucket, by which that is known and without
    which it cannot train, is not to be read.
    """
    explained, troubled_since, next_late = set[tuple[int, int, str]](), time.monotonic(), 0.0
    while True:
        sight = look(store, file, executor)
        seen(sight)
        if sight.is_over or time.monotonic() >= next_late:
            next_late = time.monotonic() + _LATE_S
            for text in _end_late_ones(file, executor):
                said(text)
        troubled_since = troubled_since if sight.trouble else time.monotonic()
        is_pending = False
        for replica in sight.replicas:
            if replica.status != "failed":
                continue
            why = _why_it_stays(store, file, sight, replica, relaunches)
            if why is None:
                said(_start_again(file, executor, replica, relaunches))
            elif (failure := (replica.rank, replica.attempt, why)) not in explained:
                explained.add(failure)
                said(f"{about_end(replica)}; not started again: {why}")
            is_pending |= why in (None, _NOT_NOW)
        if sight.is_over and not (is_pending and time.monotonic() - troubled_since < executor.patience_s):
            return sight
        time.sleep(every_s)


def about_end(standing: Standing) -> str:
    """How a replica failed, in a line, and where its log is."""
    log = f" (log: {standing.log})" if standing.log else ""
    return f"rank {standing.rank}: {standing.error or 'failed'}{log}"


def _why_it_stays(
    store: ObjectStore, file: LaunchFile, sight: Sight, standing: Standing, relaunches: int
) -> str | None:
    """Why a replica that failed is not started again; None where it is."""
    if file.read().cancelled is not None:
        return "the launch was cancelled"
    if sight.end is not None:
        return f"the run has ended ({sight.end})"
    if standing.exit_code == REFUSED:
        return "it would be refused again"
    if standing.attempt >= relaunches:
        return f"--relaunch {relaunches} allows no more"
    if sight.trouble is not None:
        return _NOT_NOW
    try:
        is_done = store.size(sight.launch.key("output", f"{standing.rank:03d}", DONE)) is not None
    except StoreError:
        return _NOT_NOW
    return "what it ended with is in the bucket" if is_done else None


def _start_again(file: LaunchFile, executor: Executor, standing: Standing, relaunches: int) -> str:
    """Start a replica again, and say how that went; its rank is free, as nobody but who saw it end can know."""
    launch, attempt = file.read().launch, standing.attempt + 1
    _, error = tried(lambda: start_one(file, launch, executor, standing.rank, attempt, takeover=True))
    if isinstance(error, InputError):
        raise error
    if error is not None:  # the others go on; this start is looked for by its name, and made again if there is none
        return f"{about_end(standing)}; could not be started again: {in_brief(error)}"
    return f"{about_end(standing)}; started again ({attempt} of {relaunches})"


def _end_late_ones(file: LaunchFile, executor: Executor) -> list[str]:
    """End machines that came after their start was given up and their rank was started again; a line for each."""
    record, lines = file.read(), []
    for start in record.starts:
        if start.handle is not None or start == record.newest[start.rank]:
            continue
        what = f"rank {start.rank}: start {start.attempt}, which had been given up, has come after all"
        handles, _ = tried(lambda start=start: executor.find(record.launch.id, start.rank, start.attempt))
        for handle in handles or ():
            _, error = tried(lambda handle=handle: executor.cancel(handle))
            if error is None:
                file.note(handle)  # not before: what has no handle is looked for again
            ended = "; it was cancelled" if error is None else f", and could NOT be cancelled: {in_brief(error)}"
            lines.append(what + ended)
    return lines
