"""Perform the checks of `crf diloco launch` and its `--dry-run`, before anything is uploaded or started.

Most of these checks look for an earlier launch in the same bucket that is still running, because a second one costs
money and is usually a mistake.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from composer_replication.cli.replicas.launch_status import is_settled
from composer_replication.cli.replicas.launches import (
    Launch,
    LaunchFile,
    Record,
    Start,
    canonical_bucket,
    launch_key,
    launch_path,
    list_launch_numbers,
    local_launch_numbers,
    read_notice,
    refuse_existing_file,
)
from composer_replication.cli.replicas.request import LaunchRequest, refuse_secret_values
from composer_replication.cli.replicas.supervision import DONE
from composer_replication.diloco.serverless.executor import Executor, in_brief, tried, within
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ComposerError, RunError, explain

MAX_CHECK_S = 30.0  # for all requests about earlier launches together
_LOOKUP_OPTIONS = ("namespace", "app_name", "address")  # executor options that must be equal to find a lost start


def check_launch(
    store: ObjectStore, request: LaunchRequest, executor: Executor, path: Path | None, *, beside: bool
) -> list[str]:
    """Raise an error for a request that cannot be launched; otherwise, return a list of warnings. Nothing is
    written.
    """
    executor.secret_values()
    refuse_secret_values(request)
    executor.job(request.entrypoint, request.entrypoint_args, gpu=request.gpu, timeout_s=request.timeout_s)
    if path is not None:
        refuse_existing_file(path)
    keys = set(store.keys("launch"))
    bucket_uri = canonical_bucket(request.bucket)
    running, lines = _EarlierLaunches(request, executor, keys, time.monotonic() + MAX_CHECK_S).find_newest_running(
        bucket_uri
    )
    if running is None:
        return [*lines, *_warn_of_unknown_launch(store, bucket_uri, keys)]
    number, ranks = running
    what = f"launch {number} at {store.uri}"
    if not beside:
        got = f"a running launch (rank {', '.join(map(str, ranks))})"
        fix = (
            f"Watch it with `crf diloco watch {request.bucket} --launch {number}`, stop it with `crf diloco cancel "
            f"{request.bucket} --launch {number}`, or start another one in parallel with --beside."
        )
        raise RunError(explain(what, got=got, expected="no running launch", fix=fix))
    return [*lines, f"{what} is running, too; add `--launch {number}` to watch, cancel or collect that one"]


class _RunningLaunch(NamedTuple):
    """The number of a running launch, and the ranks that are running."""

    number: int
    ranks: list[int]


class _EarlierLaunches:
    """Determines which of the launches from this machine are running.

    Only the executor of the new launch is queried, because creating another executor could have side effects: Ray
    starts a cluster if it finds none.
    """

    def __init__(self, request: LaunchRequest, executor: Executor, keys: Collection[str], deadline: float) -> None:
        self._request, self._executor, self._keys, self._deadline = request, executor, keys, deadline

    def find_newest_running(self, bucket_uri: str) -> tuple[_RunningLaunch | None, list[str]]:
        """Return the newest launch that is known to be running, and warnings about newer launches that may also be
        running.
        """
        unknown = dict[str, list[int]]()
        running = None
        for number in reversed(local_launch_numbers(bucket_uri)):
            ranks, error = tried(partial(self._running_ranks, LaunchFile(launch_path(bucket_uri, number))))
            if error is not None:
                why = str(error) if isinstance(error, ComposerError) else in_brief(error)
                unknown.setdefault(why, []).append(number)
            elif ranks:
                running = _RunningLaunch(number, ranks)
                break
        unknown_launches = (
            (", ".join(map(str, reversed(launch_numbers))), why) for why, launch_numbers in unknown.items()
        )
        return running, [
            f"launch {which} may run, and could not be asked about: {why}" for which, why in unknown_launches
        ]

    def _running_ranks(self, file: LaunchFile) -> list[int]:
        """Return the ranks that the executor reports as running. Raises an error if the executor cannot tell whether
        any rank is running.
        """
        record = file.read()
        unended = list(self._unended(record))
        if any(start.handle is None for start in unended) and file.is_starting():
            return [start.rank for start in unended if start.handle is None]
        if unended and record.launch.executor != self._request.executor:
            expected, fix = (
                f"{self._request.executor}, as here",
                f"`crf diloco watch {self._request.bucket} --launch N` asks.",
            )
            raise RunError(explain("executor of the launch", got=record.launch.executor, expected=expected, fix=fix))
        ranks, errors = list[int](), list[Exception]()
        for start in unended:
            is_running, error = tried(partial(self._is_running_in_time, record.launch, start))
            ranks += [start.rank] if is_running else []
            errors += [] if error is None else [error]
        if errors and not ranks:
            raise errors[0]
        return ranks

    def _unended(self, record: Record) -> Iterator[Start]:
        """Yield the latest start of each rank that has no result in the bucket. If a cancellation has stopped the
        launch, yield nothing.
        """
        for start in record.latest_starts.values() if record.ended is None else ():
            if record.launch.key("output", f"{start.rank:03d}", DONE) not in self._keys:
                yield start

    def _is_running_in_time(self, launch: Launch, start: Start) -> bool:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            got = "no answer yet"
            raise RunError(
                explain("earlier launches", got=got, expected=f"the state of all of them within {MAX_CHECK_S:g} s")
            )
        what = f"rank {start.rank}"
        return within(max(0.1, round(left_s, 1)), what, partial(self._is_running, what, launch, start))

    def _is_running(self, what: str, launch: Launch, start: Start) -> bool:
        handles, executor = [start.handle] if start.handle else [], self._executor
        if start.handle is None:  # the requesting process was killed, or the answer was lost
            if changed_options := [
                option for option in _LOOKUP_OPTIONS if launch.options.get(option) != self._request.options.get(option)
            ]:
                got = f"no reply to a start request that had another {', '.join(changed_options)}"
                raise RunError(explain(what, got=got, expected="a start request with the options of this launch"))
            # Decide this before searching, so that a replica that appears in between is found.
            may_come = not is_settled(None, start, executor)
            handles = executor.find(launch.id, start.rank, start.attempt)
            if not handles and may_come:
                got, fix = "no reply to its start request", "The machine may still appear: try again in a few minutes."
                raise RunError(explain(what, got=got, expected="a replica in the service's list", fix=fix))
        for handle in handles:
            if not executor.reaches(handle):
                raise RunError(
                    explain(
                        what,
                        got="a replica on another machine or cluster",
                        expected="a replica that can be polled from here",
                    )
                )
        return any(executor.poll(handle) in ("running", "pending") for handle in handles)


def _warn_of_unknown_launch(store: ObjectStore, bucket_uri: str, keys: Collection[str]) -> list[str]:
    """Return a warning about the newest launch from another machine, unless all of its replicas have finished."""
    foreign_numbers = set(list_launch_numbers(store)) - set(local_launch_numbers(bucket_uri))
    if not foreign_numbers:
        return []
    number = max(foreign_numbers)
    if (notice := tried(lambda: read_notice(store, number))[0]) is None:  # an invalid notice is ignored
        return []
    done = [launch_key(number, "output", f"{rank:03d}", DONE) in keys for rank in range(notice.replicas)]
    what = f"launch {number} at {store.uri} is from another machine; {sum(done)} of {len(done)} replicas have finished"
    return [] if all(done) else [f"{what}, the others may be running (use `crf diloco watch` on that machine)"]
