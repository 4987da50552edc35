"""Supervise a launch: watch it and restart failed replicas (`supervise`), download results (`collect`), and run a
replica (`train`).
"""

from __future__ import annotations

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
from composer_replication.cli.replicas.launch_status import (
    UNREACHABLE,
    LaunchStatus,
    ReplicaStatus,
    read_launch_status,
    start_replica,
)
from composer_replication.cli.replicas.launches import Launch, LaunchFile, Start, launch_key, refuse_other_launch
from composer_replication.cli.replicas.request import (
    CONFIG,
    download,
    hash_files,
    refuse_unsafe_names,
    trained_files,
    upload,
)
from composer_replication.diloco.serverless.executor import Executor, in_brief, tried
from composer_replication.diloco.serverless.replica_process import REFUSED
from composer_replication.diloco.store import ObjectStore, StoreError, open_store
from composer_replication.errors import ArtefactCorruptError, InputError, explain
from composer_replication.optional import load_function

_BUCKET_UNREADABLE = "the bucket cannot be read"
_LATE_CHECK_S = 60.0  # interval between checks for machines that appeared after their rank was restarted


def supervise(
    store: ObjectStore,
    file: LaunchFile,
    executor: Executor,
    *,
    relaunches: int,
    on_status: Callable[[LaunchStatus], None] = lambda _status: None,
    on_message: Callable[[str], None] = lambda _text: None,
    every_s: float = 2.0,
) -> LaunchStatus:
    """Watch a launch until all replicas have ended. Each failed replica is restarted up to `relaunches` times.

    A replica is not restarted if the run has ended or the replica's result is in the bucket, because it would train
    alone; if it failed with a refusal, because it would be refused again; or while the bucket cannot be read.
    """
    explained, troubled_since, next_late = set[tuple[int, int, str]](), time.monotonic(), 0.0
    while True:
        launch_status = read_launch_status(store, file, executor)
        on_status(launch_status)
        if launch_status.is_over or time.monotonic() >= next_late:
            next_late = time.monotonic() + _LATE_CHECK_S
            for text in _cancel_late_starts(file, executor):
                on_message(text)
        troubled_since = troubled_since if launch_status.trouble else time.monotonic()
        is_pending = False
        for replica in launch_status.replicas:
            if replica.status != "failed":
                continue
            why = _reason_not_to_restart(store, file, launch_status, replica, relaunches)
            if why is None:
                on_message(_restart(file, executor, replica, relaunches))
            elif (failure := (replica.rank, replica.attempt, why)) not in explained:
                explained.add(failure)
                on_message(f"{describe_failure(replica)}; not restarted: {why}")
            is_pending |= why in (None, _BUCKET_UNREADABLE)
        if launch_status.is_over and not (is_pending and time.monotonic() - troubled_since < executor.patience_s):
            return launch_status
        time.sleep(every_s)


def describe_failure(replica: ReplicaStatus) -> str:
    """Describe in one line how a replica failed, and where its log is."""
    log = f" (log: {replica.log})" if replica.log else ""
    return f"rank {replica.rank}: {replica.error or 'failed'}{log}"


def _reason_not_to_restart(
    store: ObjectStore, file: LaunchFile, launch_status: LaunchStatus, replica: ReplicaStatus, relaunches: int
) -> str | None:
    """Return why a failed replica should not be restarted, or None if it should be."""
    if file.read().cancelled is not None:
        return "the launch was canceled"
    if launch_status.end is not None:
        return f"the run has ended ({launch_status.end})"
    if replica.exit_code == REFUSED:
        return "it would be refused again"
    if replica.attempt >= relaunches:
        return f"--relaunch {relaunches} allows no more"
    if launch_status.trouble is not None:
        return _BUCKET_UNREADABLE
    try:
        is_done = store.size(launch_status.launch.key("output", f"{replica.rank:03d}", DONE)) is not None
    except StoreError:
        return _BUCKET_UNREADABLE
    return "its result is in the bucket" if is_done else None


def _restart(file: LaunchFile, executor: Executor, replica: ReplicaStatus, relaunches: int) -> str:
    """Restart a replica, and return a one-line message that describes the failure and the restart."""
    # With `takeover` the new replica need not wait for the lease to expire, because the old one is known to have ended.
    launch, attempt = file.read().launch, replica.attempt + 1
    _, error = tried(lambda: start_replica(file, launch, executor, replica.rank, attempt, takeover=True))
    if isinstance(error, InputError):
        raise error
    if error is not None:  # it may run nevertheless: `read_launch_status` searches for it by its name
        return f"{describe_failure(replica)}; could not be restarted: {in_brief(error)}"
    return f"{describe_failure(replica)}; restarted ({attempt} of {relaunches})"


def _cancel_late_starts(file: LaunchFile, executor: Executor) -> list[str]:
    """Cancel machines that appeared only after a newer start of their rank was requested. Returns one message per
    machine.
    """
    record, lines = file.read(), []
    for start in record.starts:
        if start.handle is not None or start == record.latest_starts[start.rank]:
            continue
        what = f"rank {start.rank}: a machine of start {start.attempt}, which had been given up, has appeared"
        handles, _ = tried(lambda start=start: executor.find(record.launch.id, start.rank, start.attempt))
        for handle in handles or ():
            _, error = tried(lambda handle=handle: executor.cancel(handle))
            if error is None:
                file.note(handle)  # only now, because starts with a handle are not searched for again
            outcome = "; it was canceled" if error is None else f" and could NOT be canceled: {in_brief(error)}"
            lines.append(what + outcome)
    return lines


# Collecting the results: the weights, which are the same at every replica, and the logs.

_MAX_BYTES = 1 << 20
# a SHA-256 in hex: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_LOG_LINES = 100_000


@dataclass(frozen=True)
class Collected:
    """The downloaded results of a launch."""

    folder: Path
    weights: Path | None  # None if no replica has uploaded weights
    files: int
    from_rank: int | None
    outcomes: list[dict[str, Any]]
    answers: dict[str, Any]  # what the trainer returned, by rank

    @property
    def running(self) -> list[int]:
        """The ranks that had not ended when the timeout expired."""
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
    """Download weights and logs after waiting up to `timeout_s` seconds (default: without limit) for the replicas to
    end.
    """
    record = file.read()
    refuse_other_launch(store, record.launch)
    folder.mkdir(parents=True, exist_ok=True)
    if timeout_s != 0 and (running_ranks := _ranks_still_running(executor, record.latest_starts.values())):
        limit = "" if timeout_s is None else f" up to {timeout_s:g} s"
        ranks = ", ".join(map(str, running_ranks))
        on_message(
            f"waiting{limit} for rank {ranks}. Ctrl-C stops waiting, not the replicas; --timeout 0 does not wait"
        )
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    outcomes = [_fetch_outcome(executor, start, deadline, folder / "logs") for start in record.latest_starts.values()]
    done = _read_outputs(store, record.launch)
    answers = {str(rank): output["answer"] for rank, output in done.items()}
    written = {"launch": record.launch.number, "outcomes": outcomes, "answers": answers}
    # Answers come from the bucket. ASCII output escapes control characters, so the file is safe to print.
    atomic_write_text(folder / "outcomes.json", json.dumps(written, indent=2, ensure_ascii=True) + "\n")
    digests_by_rank = {rank: output["files"] for rank, output in done.items() if output["files"]}
    if not digests_by_rank:
        return Collected(folder, None, 0, None, outcomes, answers)
    first = min(digests_by_rank)
    _check_equal(store, digests_by_rank)
    download(store, record.launch.key("output", f"{first:03d}"), digests_by_rank[first], folder / "weights")
    return Collected(folder, folder / "weights", len(digests_by_rank[first]), first, outcomes, answers)


def _ranks_still_running(executor: Executor | None, starts: Iterable[Start]) -> list[int]:
    if executor is None:
        return []
    handles = [start.handle for start in starts if start.handle is not None and executor.reaches(start.handle)]
    return [handle.rank for handle in handles if tried(partial(executor.poll, handle))[0] in ("pending", "running")]


def _fetch_outcome(executor: Executor | None, start: Start, deadline: float | None, logs: Path) -> dict[str, Any]:
    """Save the log of a replica, and return how the replica ended. The status is "unknown" if the replica cannot be
    reached.
    """
    unknown = {"rank": start.rank, "status": UNREACHABLE, "exit_code": None}
    if executor is None or start.handle is None or not executor.reaches(start.handle):
        return {**unknown, "error": "it cannot be reached from here"}
    handle, remaining_s = start.handle, None if deadline is None else max(0.0, deadline - time.monotonic())
    outcome_and_log, error = tried(
        lambda: (
            executor.collect([handle], timeout=remaining_s)[0],
            executor.stream_logs(handle, n_lines=_MAX_LOG_LINES),
        )
    )
    if isinstance(error, InputError):
        raise error
    if outcome_and_log is None or error is not None:
        return {**unknown, "error": "" if error is None else in_brief(error)}
    outcome, text = outcome_and_log
    logs.mkdir(exist_ok=True)
    atomic_write_text(logs / f"rank-{start.rank:03d}.txt", text + "\n")
    return outcome


def _read_outputs(store: ObjectStore, launch: Launch) -> dict[int, dict[str, Any]]:
    """Return the content of each existing done.json, keyed by the rank of its replica. Raises ArtefactCorruptError
    if one of these files is invalid.
    """
    done = {}
    for rank in range(launch.replicas):
        key = launch.key("output", f"{rank:03d}", DONE)
        if store.size(key) is None:
            continue
        try:
            content = decode_object(store.get(key, most_bytes=_MAX_BYTES))
            files, answer = content["files"], content["answer"]
            if not isinstance(files, dict) or not all(_DIGEST.fullmatch(str(digest)) for digest in files.values()):
                raise ValueError("files without checksums")
        except (KeyError, ValueError) as error:
            fix = "Somebody wrote to the bucket: check who has access."
            where = f"{key} at {store.uri}"
            raise ArtefactCorruptError(
                explain(where, got=in_brief(error), expected="the result of a replica", fix=fix)
            ) from None
        refuse_unsafe_names(store, key, files)
        done[rank] = {"files": files, "answer": answer}
    return done


def _check_equal(store: ObjectStore, digests_by_rank: dict[int, dict[str, str]]) -> None:
    """Raise ArtefactCorruptError unless all replicas have bit-identical weights."""
    weights = {
        rank: {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
        for rank, digests in digests_by_rank.items()
    }
    first = min(weights)
    if different := [rank for rank, digests in weights.items() if digests != weights[first]]:
        got = f"other weights at rank {', '.join(map(str, different))} than at rank {first}"
        fix = "One of them has missed the last round: check its log, and launch again."
        raise ArtefactCorruptError(
            explain(f"weights at {store.uri}", got=got, expected="equal weights at all replicas", fix=fix)
        )


# The program of every replica: download the run's files, train, and upload the result.

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
    """Call the trainer, upload the folder that it returns as `saved`, and return the rest of its answer."""
    store = open_store(bucket)
    trainer_arguments = dict(arguments)
    with tempfile.TemporaryDirectory(prefix=f"crf-replica-{rank}-") as folder:
        os.environ[FOLDER_VARIABLE] = folder  # trainers may use it for temporary files
        if files:
            download(store, launch_key(launch, "input"), files, Path(folder))
            trainer_arguments |= {"config": str(Path(folder) / CONFIG), "overrides": _overrides(folder)}
        value = _find_trainer(module, function, trainer_arguments)(
            **trainer_arguments, manager=manager, rank=rank, world_size=world_size
        )
        answer = dict(value) if isinstance(value, Mapping) else {"value": value}
        saved = answer.pop("saved", None)
        prefix = launch_key(launch, "output", f"{rank:03d}")
        weights = trained_files(Path(saved)) if saved else {}
        upload(store, prefix, weights)
        # Written last, so that done.json shows that the other files are complete.
        store.put(
            f"{prefix}/{DONE}", encode({"files": hash_files(weights), "answer": answer}, where="a replica's answer")
        )
        return answer


def _find_trainer(module: str, function: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the trainer function. Raises InputError if it does not exist or does not accept the arguments.

    A replica that fails with an InputError is not restarted, because it would fail again.
    """
    trainer = load_function(module, function, what="--trainer-fn")
    try:
        # The signature of the function itself, not of one that it wraps, because a decorator may supply arguments.
        inspect.signature(trainer, follow_wrapped=False).bind(**arguments, manager=None, rank=0, world_size=1)
    except ValueError:  # a built-in has no signature; the call itself will fail then
        return trainer
    except TypeError as error:
        fix = "It gets the arguments of --trainer-kwargs-json, and the outer-loop settings of --round."
        expected = "arguments that it accepts, with manager, rank and world_size"
        raise InputError(
            explain(f"trainer {module}.{function}", got=str(error).removeprefix("got "), expected=expected, fix=fix)
        ) from None
    return trainer


def _overrides(folder: str) -> list[str]:
    """Return the config overrides that set the paths of the run and of the embedded student model on this machine."""
    from composer_replication.batch.model_folder import STUDENT, resolve_model
    from composer_replication.config.presets import load_with_preset

    overrides = [f"train.run={folder}", f"train.output={folder}"]
    is_student = load_with_preset(Path(folder) / CONFIG).train.model == STUDENT
    return [*overrides, f"train.model={resolve_model(STUDENT)}"] if is_student else overrides
