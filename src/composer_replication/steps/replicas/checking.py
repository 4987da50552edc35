"""What a launch refuses before anything is sent or started; a dry run refuses the same."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from composer_replication.diloco.serverless.answers import tried
from composer_replication.diloco.serverless.executor import Executor
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import RunError, explain
from composer_replication.steps.replicas.asking import Asked, refuse_values
from composer_replication.steps.replicas.launch_file import (
    LaunchFile,
    Record,
    known_numbers,
    path_of,
    refuse_a_taken_name,
)
from composer_replication.steps.replicas.launches import launch_key, numbers, place_of, read_notice
from composer_replication.steps.replicas.replica import DONE
from composer_replication.steps.replicas.starting import make_executor


def check_launch(store: ObjectStore, asked: Asked, executor: Executor, path: Path | None, *, beside: bool) -> list[str]:
    """Refuse what cannot be launched; what is worth knowing of what can be, a line each. Nothing is written."""
    executor.secret_values()
    refuse_values(asked)
    executor.job(asked.entrypoint, asked.entrypoint_args, gpu=asked.gpu, timeout_s=asked.timeout_s)
    if path is not None:
        refuse_a_taken_name(path)
    keys = set(store.keys("launch"))
    place = place_of(asked.bucket)
    if running := _running_here(place, keys):
        number, ranks = next(iter(running.items()))
        what = f"launch {number} at {store.uri}"
        if not beside:
            got = f"one that runs (rank {', '.join(map(str, ranks))})"
            fix = (
                f"See how it does: `crf diloco watch {asked.bucket} --launch {number}`; end it: `crf diloco cancel "
                f"{asked.bucket} --launch {number}`; or start another one beside it, with rounds of its own: --beside."
            )
            raise RunError(explain(what, got=got, expected="none that runs", fix=fix))
        return [f"{what} runs too; `--launch {number}` behind watch, cancel and collect means that one"]
    return _perhaps_elsewhere(store, place, keys)


def _running_here(place: str, keys: Collection[str]) -> dict[int, list[int]]:
    """Launches of this bucket that this machine knows of and that run, newest first, with their ranks that do."""
    running, executors = dict[int, list[int]](), dict[str, Executor | None]()
    for number in reversed(known_numbers(place)):
        file = LaunchFile(path_of(place, number))
        record = file.read()
        if record.cancelled is None and (ranks := _ranks_that_run(file, record, keys, executors)):
            running[number] = ranks
    return running


def _ranks_that_run(
    file: LaunchFile, record: Record, keys: Collection[str], executors: dict[str, Executor | None]
) -> list[int]:
    """By their service's word; one that has left what it ended with is not asked about."""
    launch = record.launch
    unended = [each for each in record.newest.values() if launch.key("output", f"{each.rank:03d}", DONE) not in keys]
    if not unended:
        return []
    which = json.dumps([launch.executor, dict(launch.options)], sort_keys=True)
    if which not in executors:
        executors[which] = tried(lambda: make_executor(launch.executor, launch.options))[0]
    executor, ranks = executors[which], list[int]()
    for each in unended:
        if each.handle is None:
            is_running = file.is_starting()
        else:
            status, _ = tried(lambda handle=each.handle: executor.poll(handle) if executor is not None else None)
            is_running = status in ("running", "pending")
        if is_running:
            ranks.append(each.rank)
    return ranks


def _perhaps_elsewhere(store: ObjectStore, place: str, keys: Collection[str]) -> list[str]:
    """The newest launch whose file is not here, where not all of its replicas have left what they ended with."""
    others = set(numbers(store)) - set(known_numbers(place))
    if not others:
        return []
    number = max(others)
    if (notice := tried(lambda: read_notice(store, number))[0]) is None:  # one that is none says nothing
        return []
    done = [launch_key(number, "output", f"{rank:03d}", DONE) in keys for rank in range(notice.replicas)]
    what = f"launch {number} at {store.uri}, whose file is not here, has {sum(done)} of {len(done)} replicas at the end"
    return [] if all(done) else [f"{what}: the others may still run (`crf diloco watch`, where it was launched)"]
