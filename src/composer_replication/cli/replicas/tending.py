"""Look after the replicas of a launch: say how each is doing, and start those again that died before the run's end."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_text
from composer_replication.canonical_json import decode_object, encode
from composer_replication.cli.replicas.asking import (
    CONFIG,
    download,
    hash_files,
    refuse_odd_names,
    trained_files,
    upload,
)
from composer_replication.cli.replicas.launches import (
    Launch,
    LaunchFile,
    Start,
    launch_key,
    refuse_other_launch,
)
from composer_replication.cli.replicas.looking import (
    UNREACHABLE,
    LaunchStatus,
    ReplicaStatus,
    read_launch_status,
    start_replica,
)
from composer_replication.diloco.serverless.executor import Executor, in_brief, tried
from composer_replication.diloco.serverless.replica_process import REFUSED
from composer_replication.diloco.store import ObjectStore, StoreError, open_store
from composer_replication.errors import ArtefactCorruptError, InputError, explain

_BUCKET_UNREADABLE = "the bucket cannot be read"
_LATE_CHECK_S = 60.0  # between two looks for machines that came after their rank was started again


def tend(
    store: ObjectStore,
    file: LaunchFile,
    executor: Executor,
    *,
    relaunches: int,
    on_status: Callable[[LaunchStatus], None] = lambda _sight: None,
    on_message: Callable[[str], None] = lambda _text: None,
    every_s: float = 2.0,
) -> LaunchStatus:
    """Watch until all have ended; one that failed is started again, `relaunches` times at most each.

    One is not started again when the run has ended without it, or it has left what it ended with: it would train on
    alone; nor when another start would only repeat its error. Nor while the bucket, by which that is known and without
    which it cannot train, is not to be read.
    """
    explained, troubled_since, next_late = set[tuple[int, int, str]](), time.monotonic(), 0.0
    while True:
        sight = read_launch_status(store, file, executor)
        on_status(sight)
        if sight.is_over or time.monotonic() >= next_late:
            next_late = time.monotonic() + _LATE_CHECK_S
            for text in _cancel_late_starts(file, executor):
                on_message(text)
        troubled_since = troubled_since if sight.trouble else time.monotonic()
        is_pending = False
        for replica in sight.replicas:
            if replica.status != "failed":
                continue
            why = _reason_not_to_restart(store, file, sight, replica, relaunches)
            if why is None:
                on_message(_restart(file, executor, replica, relaunches))
            elif (failure := (replica.rank, replica.attempt, why)) not in explained:
                explained.add(failure)
                on_message(f"{describe_failure(replica)}; not started again: {why}")
            is_pending |= why in (None, _BUCKET_UNREADABLE)
        if sight.is_over and not (is_pending and time.monotonic() - troubled_since < executor.patience_s):
            return sight
        time.sleep(every_s)


def describe_failure(standing: ReplicaStatus) -> str:
    """How a replica failed, in a line, and where its log is."""
    log = f" (log: {standing.log})" if standing.log else ""
    return f"rank {standing.rank}: {standing.error or 'failed'}{log}"


def _reason_not_to_restart(
    store: ObjectStore, file: LaunchFile, sight: LaunchStatus, standing: ReplicaStatus, relaunches: int
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
        return _BUCKET_UNREADABLE
    try:
        is_done = store.size(sight.launch.key("output", f"{standing.rank:03d}", DONE)) is not None
    except StoreError:
        return _BUCKET_UNREADABLE
    return "what it ended with is in the bucket" if is_done else None


def _restart(file: LaunchFile, executor: Executor, standing: ReplicaStatus, relaunches: int) -> str:
    """Start a replica again, and say how that went; its rank is free, as nobody but who saw it end can know."""
    launch, attempt = file.read().launch, standing.attempt + 1
    _, error = tried(lambda: start_replica(file, launch, executor, standing.rank, attempt, takeover=True))
    if isinstance(error, InputError):
        raise error
    if error is not None:  # the others go on; this start is looked for by its name, and made again if there is none
        return f"{describe_failure(standing)}; could not be started again: {in_brief(error)}"
    return f"{describe_failure(standing)}; started again ({attempt} of {relaunches})"


def _cancel_late_starts(file: LaunchFile, executor: Executor) -> list[str]:
    """End machines that came after their start was given up and their rank was started again; a line for each."""
    record, lines = file.read(), []
    for start in record.starts:
        if start.handle is not None or start == record.latest_starts[start.rank]:
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


# What a launch ended with: the trained weights, which are the same at every replica, and what each of them printed.

_MAX_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_LOG_LINES = 100_000


@dataclass(frozen=True)
class Collected:
    """What was brought, and where it is."""

    folder: Path
    weights: Path | None  # None where no replica has left any
    files: int
    from_rank: int | None
    outcomes: list[dict[str, Any]]
    answers: dict[str, Any]  # what the trainer returned, by rank

    @property
    def running(self) -> list[int]:
        """Ranks that had not ended when the time was up."""
        return [outcome["rank"] for outcome in self.outcomes if outcome["status"] in ("pending", "running")]


def collect(
    store: ObjectStore,
    file: LaunchFile,
    executor: Executor | None,
    folder: Path,
    *,
    timeout_s: float | None = None,
    on_message: Callable[[str], None] = lambda _text: None,
) -> Collected:
    """Bring weights and logs; wait for the replicas as long as `timeout_s` says."""
    record = file.read()
    refuse_other_launch(store, record.launch)
    folder.mkdir(parents=True, exist_ok=True)
    if timeout_s != 0 and (waited_for := _ranks_still_running(executor, record.latest_starts.values())):
        until = "to the end" if timeout_s is None else f"for {timeout_s:g} s at most"
        ranks = ", ".join(map(str, waited_for))
        on_message(f"waiting {until} for rank {ranks}; Ctrl-C ends the waiting, not them; --timeout 0 waits for nobody")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    outcomes = [_outcome(executor, start, deadline, folder / "logs") for start in record.latest_starts.values()]
    done = _read_outputs(store, record.launch)
    answers = {str(rank): output["answer"] for rank, output in done.items()}
    written = {"launch": record.launch.number, "outcomes": outcomes, "answers": answers}
    # Answers come from the bucket: in ASCII nothing in them is acted upon by whoever shows the file.
    atomic_write_text(folder / "outcomes.json", json.dumps(written, indent=2, ensure_ascii=True) + "\n")
    weighty = {rank: output["files"] for rank, output in done.items() if output["files"]}
    if not weighty:
        return Collected(folder, None, 0, None, outcomes, answers)
    first = min(weighty)
    _check_equal(store, weighty)
    download(store, record.launch.key("output", f"{first:03d}"), weighty[first], folder / "weights")
    return Collected(folder, folder / "weights", len(weighty[first]), first, outcomes, answers)


def _ranks_still_running(executor: Executor | None, starts: Iterable[Start]) -> list[int]:
    """Ranks that would be waited for."""
    if executor is None:
        return []
    handles = [start.handle for start in starts if start.handle is not None and executor.reaches(start.handle)]
    return [handle.rank for handle in handles if tried(partial(executor.poll, handle))[0] in ("pending", "running")]


def _outcome(executor: Executor | None, start: Start, deadline: float | None, logs: Path) -> dict[str, Any]:
    """How a replica ended, and its log; one that cannot be asked about keeps nobody from the weights."""
    unknown = {"rank": start.rank, "status": UNREACHABLE, "exit_code": None}
    if executor is None or start.handle is None or not executor.reaches(start.handle):
        return {**unknown, "error": "it cannot be asked about from here"}
    handle, remaining_s = start.handle, None if deadline is None else max(0.0, deadline - time.monotonic())
    brought, error = tried(
        lambda: (
            executor.collect([handle], timeout=remaining_s)[0],
            executor.stream_logs(handle, n_lines=_MAX_LOG_LINES),
        )
    )
    if isinstance(error, InputError):
        raise error
    if brought is None or error is not None:
        return {**unknown, "error": "" if error is None else in_brief(error)}
    outcome, text = brought
    logs.mkdir(exist_ok=True)
    atomic_write_text(logs / f"rank-{start.rank:03d}.txt", text + "\n")
    return outcome


def _read_outputs(store: ObjectStore, launch: Launch) -> dict[int, dict[str, Any]]:
    """What replicas say they ended with, by rank; what is no such word is an error, whoever wrote it."""
    done = {}
    for rank in range(launch.replicas):
        key = launch.key("output", f"{rank:03d}", DONE)
        if store.size(key) is None:
            continue
        try:
            content = decode_object(store.get(key, most_bytes=_MAX_BYTES))
            files, answer = content["files"], content["answer"]
            if not isinstance(files, dict) or not all(_DIGEST.fullmatch(str(digest)) for digest in files.values()):
                raise ValueError("files without sums")
        except (KeyError, ValueError) as error:
            fix = "Somebody wrote to the bucket: look at who may."
            where = f"{key} at {store.uri}"
            raise ArtefactCorruptError(explain(where, got=in_brief(error), expected="files", fix=fix)) from None
        refuse_odd_names(store, key, files)
        done[rank] = {"files": files, "answer": answer}
    return done


def _check_equal(store: ObjectStore, weighty: dict[int, dict[str, str]]) -> None:
    """Replicas of one run end with the same weights, bit for bit; where they do not, none is the run's."""
    weights = {
        rank: {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
        for rank, files in weighty.items()
    }
    first = min(weights)
    if other_ranks := [rank for rank, files in weights.items() if files != weights[first]]:
        got = f"other weights at rank {', '.join(map(str, other_ranks))} than at rank {first}"
        fix = "One of them ended without the last round: look at its log, and launch again."
        raise ArtefactCorruptError(explain(f"weights at {store.uri}", got=got, expected="the same", fix=fix))


# What every replica of `crf diloco` runs: it gets the run's files, trains, and leaves the outcome in the bucket.

DONE = "done.json"
FOLDER_VARIABLE = "CRF_REPLICA_FOLDER"


def train(
    *,
    manager: Any,
    rank: int,
    world_size: int,
    bucket: str,
    launch: int,
    module: str,
    function: str,
    arguments: Mapping[str, Any],
    files: Mapping[str, str],
) -> dict[str, Any]:
    """Call the trainer; the folder that its answer names as `saved` goes to the bucket."""
    store = open_store(bucket)
    trainer_arguments = dict(arguments)
    with tempfile.TemporaryDirectory(prefix=f"crf-replica-{rank}-") as folder:
        os.environ[FOLDER_VARIABLE] = folder  # where a trainer may write what is needed no longer than this
        if files:
            download(store, launch_key(launch, "input"), files, Path(folder))
            trainer_arguments |= {"config": str(Path(folder) / CONFIG), "overrides": _overrides(folder)}
        value = _trainer(module, function, trainer_arguments)(
            **trainer_arguments, manager=manager, rank=rank, world_size=world_size
        )
        answer = dict(value) if isinstance(value, Mapping) else {"value": value}
        saved = answer.pop("saved", None)
        prefix = launch_key(launch, "output", f"{rank:03d}")
        weights = trained_files(Path(saved)) if saved else {}
        upload(store, prefix, weights)
        # Last, so that who sees it sees all of it.
        store.put(
            f"{prefix}/{DONE}", encode({"files": hash_files(weights), "answer": answer}, where="a replica's answer")
        )
        return answer


def _trainer(module: str, function: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The trainer; InputError where it is not there or does not take what it is given, which no other start mends."""
    trainer = getattr(importlib.import_module(module), function, None)
    if trainer is None:
        raise InputError(explain(f"--trainer-fn {function}", got="no such function", expected=f"one of {module}"))
    try:
        # Its own, not that of what it wraps: a decorator may supply arguments.
        inspect.signature(trainer, follow_wrapped=False).bind(**arguments, manager=None, rank=0, world_size=1)
    except ValueError:  # one that does not say what it takes, such as a built-in: the call will
        return trainer
    except TypeError as error:
        fix = "Its arguments are those of --trainer-kwargs-json, and what --round says of the outer loop."
        expected = "arguments that it takes, with manager, rank and world_size"
        raise InputError(
            explain(f"trainer {module}.{function}", got=str(error).removeprefix("got "), expected=expected, fix=fix)
        ) from None
    return trainer


def _overrides(folder: str) -> list[str]:
    """Where this machine has the run, and the model that comes with the package."""
    from composer_replication.batch.model_folder import STUDENT, resolve_model
    from composer_replication.config.presets import load_with_preset

    overrides = [f"train.run={folder}", f"train.output={folder}"]
    is_student = load_with_preset(Path(folder) / CONFIG).train.model == STUDENT
    return [*overrides, f"train.model={resolve_model(STUDENT)}"] if is_student else overrides
