"""What a launch refuses before anything is sent or started; a dry run refuses the same."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from composer_replication.cli.replicas.asking import LaunchRequest, refuse_secret_values
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
from composer_replication.cli.replicas.looking import is_settled
from composer_replication.cli.replicas.tending import DONE
from composer_replication.diloco.serverless.executor import (
    Executor,
    in_brief,
    tried,
    within,
)
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ComposerError, RunError, explain

MAX_CHECK_S = 30.0  # for all questions about earlier launches together
_LOOKUP_OPTIONS = ("namespace", "app_name", "address")  # options by which a start that was lost is looked for


def check_launch(
    store: ObjectStore, asked: LaunchRequest, executor: Executor, path: Path | None, *, beside: bool
) -> list[str]:
    """Refuse what cannot be launched; what is worth knowing of what can be, a line each. Nothing is written."""
    executor.secret_values()
    refuse_secret_values(asked)
    executor.job(asked.entrypoint, asked.entrypoint_args, gpu=asked.gpu, timeout_s=asked.timeout_s)
    if path is not None:
        refuse_existing_file(path)
    keys = set(store.keys("launch"))
    bucket_uri = canonical_bucket(asked.bucket)
    running, lines = _EarlierLaunches(asked, executor, keys, time.monotonic() + MAX_CHECK_S).find_newest_running(
        bucket_uri
    )
    if running is None:
        return [*lines, *_warn_of_unknown_launch(store, bucket_uri, keys)]
    number, ranks = running
    what = f"launch {number} at {store.uri}"
    if not beside:
        got = f"one that runs (rank {', '.join(map(str, ranks))})"
        fix = (
            f"See how it does: `crf diloco watch {asked.bucket} --launch {number}`; end it: `crf diloco cancel "
            f"{asked.bucket} --launch {number}`; or start another one beside it, with rounds of its own: --beside."
        )
        raise RunError(explain(what, got=got, expected="none that runs", fix=fix))
    return [*lines, f"{what} runs too; `--launch {number}` behind watch, cancel and collect means that one"]


class _RunningLaunch(NamedTuple):
    """A launch that runs, and its ranks that do."""

    number: int
    ranks: list[int]


class _EarlierLaunches:
    """Questions about launches that began on this machine, to the executor of the new one and to no other.

    Making another could start something: a cluster of Ray, where none is to be reached.
    """

    def __init__(self, asked: LaunchRequest, executor: Executor, keys: Collection[str], deadline: float) -> None:
        self._request, self._executor, self._keys, self._deadline = asked, executor, keys, deadline

    def find_newest_running(self, place: str) -> tuple[_RunningLaunch | None, list[str]]:
        """With a line about those before it that may run, for every reason why nobody knows."""
        unknown = dict[str, list[int]]()
        running = None
        for number in reversed(local_launch_numbers(place)):
            ranks, error = tried(partial(self._ranks_that_run, LaunchFile(launch_path(place, number))))
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
        """By their service's word; an error where none is known to run and one may."""
        record = file.read()
        unended = list(self._unended(record))
        if any(start.handle is None for start in unended) and file.is_starting():
            return [start.rank for start in unended if start.handle is None]
        if unended and record.launch.executor != self._request.executor:
            expected, fix = (
                f"{self._asked.executor}, as here",
                f"`crf diloco watch {self._asked.bucket} --launch N` asks.",
            )
            raise RunError(explain("its executor", got=record.launch.executor, expected=expected, fix=fix))
        ranks, errors = list[int](), list[Exception]()
        for start in unended:
            is_running, error = tried(partial(self._answer, record.launch, start))
            ranks += [start.rank] if is_running else []
            errors += [] if error is None else [error]
        if errors and not ranks:
            raise errors[0]
        return ranks

    def _unended(self, record: Record) -> Iterator[Start]:
        """Those that neither left what they ended with nor were ended by a cancel that ended all."""
        for start in record.latest_starts.values() if record.ended is None else ():
            if record.launch.key("output", f"{start.rank:03d}", DONE) not in self._keys:
                yield start

    def _is_running_in_time(self, launch: Launch, start: Start) -> bool:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            got = "no answer yet"
            raise RunError(explain("earlier launches", got=got, expected=f"all of them within {MAX_CHECK_S:g} s"))
        what = f"rank {start.rank}"
        return within(max(0.1, round(left_s, 1)), what, partial(self._is_running, what, launch, start))

    def _is_running(self, what: str, launch: Launch, start: Start) -> bool:
        handles, executor = [start.handle] if start.handle else [], self._executor
        if start.handle is None:  # whoever asked for it was killed, or the answer was lost
            if changed_options := [
                option for option in _LOOKUP_OPTIONS if launch.options.get(option) != self._request.options.get(option)
            ]:
                got = f"a start whose answer was lost, with another {', '.join(changed_options)}"
                raise RunError(explain(what, got=got, expected="the options of this launch"))
            may_come = not is_settled(None, start, executor)  # before it is looked for: what comes in between is seen
            handles = executor.find(launch.id, start.rank, start.attempt)
            if not handles and may_come:
                got = "a start whose answer was lost, and which may come yet"
                raise RunError(explain(what, got=got, expected="its machine"))
        for handle in handles:
            if not executor.reaches(handle):
                raise RunError(explain(what, got="one of another machine or cluster", expected="one of this"))
        return any(executor.poll(handle) in ("running", "pending") for handle in handles)


def _warn_of_unknown_launch(store: ObjectStore, bucket_uri: str, keys: Collection[str]) -> list[str]:
    """The newest launch whose file is not here, where not all of its replicas have left what they ended with."""
    other_numbers = set(list_launch_numbers(store)) - set(local_launch_numbers(bucket_uri))
    if not other_numbers:
        return []
    number = max(other_numbers)
    if (notice := tried(lambda: read_notice(store, number))[0]) is None:  # one that is none says nothing
        return []
    done = [launch_key(number, "output", f"{rank:03d}", DONE) in keys for rank in range(notice.replicas)]
    what = f"launch {number} at {store.uri}, whose file is not here, has {sum(done)} of {len(done)} replicas at the end"
    return [] if all(done) else [f"{what}: the others may still run (`crf diloco watch`, where it was launched)"]
