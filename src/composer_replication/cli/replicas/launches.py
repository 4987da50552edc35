"""Manage a launch of replicas: its notice in the bucket, and the launch file on the operator's machine.

In the bucket:

    launch/000003/launch.json        the notice; creating it reserves the number, which is the generation of the rounds
    launch/000003/input/...          files of the run
    launch/000003/output/001/...     the result of rank 1

Anybody with write access to the bucket can change these objects. They therefore never decide which service is paid,
which process is signaled, where a token is sent or what is run, and they are validated before they are shown. `watch`,
`cancel` and `collect` rely on the launch file instead (`LaunchFile`).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from composer_replication.atomic import staged, try_lock
from composer_replication.canonical_json import decode_object, encode, encode_as_written
from composer_replication.diloco.serverless.executor import ReplicaHandle
from composer_replication.diloco.store import MissingObject, ObjectStore
from composer_replication.diloco.store.opening import scheme_of
from composer_replication.errors import ArtefactNotFoundError, InputError, RunError, explain

ROOT = "launch"
EXECUTORS = {"local": "local_process.LocalProcessExecutor", "modal": "modal.ModalExecutor"} | {
    "hf_jobs": "hf_jobs.HFJobsExecutor",
    "ray": "ray.RayExecutor",
}
MAX_REPLICAS = 1000
_MAX_NUMBER, _MAX_NOTICE_BYTES, _MAX_COMMITS = 999_999, 4096, 10**9
# "launch/000003/launch.json" -> "000003"; not "launch/3/launch.json"
_NOTICE_KEY = re.compile(rf"{ROOT}/(\d{{6}})/launch\.json")
# "0123456789abcdef0123456789abcdef", the hex form of a UUID
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class LaunchNotice:
    """The public part of a launch. The field names are those of launch.json."""

    number: int
    id: str
    executor: str
    replicas: int
    commits: int | None  # outer steps of the whole run, if known
    started: float

    def key(self, *parts: str) -> str:
        return launch_key(self.number, *parts)

    def notice(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(LaunchNotice)}


def launch_key(number: int, *parts: str) -> str:
    return "/".join((ROOT, f"{number:06d}", *parts))


@dataclass(frozen=True, kw_only=True)
class Launch(LaunchNotice):
    """A launch with all the information needed to start its replicas. The field names are those of the launch file."""

    bucket: str  # its address for the replicas
    place: str  # its address on this machine, see `canonical_bucket`
    options: Mapping[str, Any]  # of the executor; with the names of secrets, but not their values
    entrypoint: str
    args: Mapping[str, Any]
    gpu: str | None = None
    timeout_s: float | None = None

    def entrypoint_args(self, **settings: Any) -> dict[str, Any]:
        """Return the arguments of the entrypoint. The number of the launch is also the number under which its rounds
        are stored (their generation).
        """
        trainer_kwargs = {**self.args["trainer_kwargs"], "launch": self.number}
        manager_settings = {**self.args["settings"], **settings, "generation": self.number}
        return {**self.args, "trainer_kwargs": trainer_kwargs, "settings": manager_settings}


def canonical_bucket(bucket: str) -> str:
    """Return the canonical address of a bucket without contacting it: "s3://b/x/" -> "s3://b/x", "run" ->
    "file:///...".
    """
    if scheme_of(bucket) != "file":
        return bucket.rstrip("/")
    path = Path(unquote(urlsplit(bucket).path) if "://" in bucket else bucket)
    return path.expanduser().absolute().as_uri().rstrip("/")


def list_launch_numbers(store: ObjectStore) -> list[int]:
    """Return the numbers of all launches that have a notice in the bucket."""
    matches = (_NOTICE_KEY.fullmatch(key) for key in store.keys(ROOT))
    return sorted(int(match[1]) for match in matches if match)


def next_number(store: ObjectStore, *, above: int = -1) -> int:
    return max([above, *list_launch_numbers(store)]) + 1


def create_launch(store: ObjectStore, *, above: int = -1, **settings: Any) -> Launch:
    """Reserve the next launch number by creating a notice in the bucket, and return the launch.

    If several launches compete for a number, only one of them can create its notice, so all of them get different
    numbers. `above` is the last number that this machine has used in this bucket, so that numbers are not reused even
    if the bucket was emptied.
    """
    number = next_number(store, above=above)
    while number <= _MAX_NUMBER:
        launch = Launch(
            number=number,
            id=uuid.uuid4().hex,
            place=canonical_bucket(settings["bucket"]),
            started=time.time(),
            **settings,
        )
        if store.create(launch.key("launch.json"), encode(launch.notice(), where="launch")):
            return launch
        number += 1
    fix = "Use another prefix in the bucket."
    raise RunError(explain(f"launches at {store.uri}", got=number - 1, expected=f"at most {_MAX_NUMBER}", fix=fix))


def refuse_other_launch(store: ObjectStore, launch: Launch) -> None:
    """Raise RunError if the bucket contains a different launch with the same number."""
    notice = read_notice(store, launch.number)
    if notice is not None and notice.id != launch.id:
        got = "a launch with another id than in the launch file"
        fix = "The bucket was emptied and used again, or somebody wrote to it: check who has access."
        raise RunError(explain(f"launch {launch.number} at {store.uri}", got=got, expected=launch.id[:12], fix=fix))


def read_notice(store: ObjectStore, number: int) -> LaunchNotice | None:
    """Return the notice of a launch, or None if it does not exist. Raises RunError if the notice is invalid."""
    key = launch_key(number, "launch.json")
    try:
        content = decode_object(store.get(key, most_bytes=_MAX_NOTICE_BYTES))
    except MissingObject:
        return None
    except ValueError as error:
        raise RunError(explain(f"{key} at {store.uri}", got=type(error).__name__, expected="a notice")) from None
    checks = {
        "number": content.get("number") == number,
        "id": isinstance(content.get("id"), str) and _ID.fullmatch(str(content["id"])) is not None,
        "executor": content.get("executor") in [*EXECUTORS],
        "replicas": _is_int_between(content.get("replicas"), 1, MAX_REPLICAS),
        "commits": content.get("commits") is None or _is_int_between(content["commits"], 0, _MAX_COMMITS),
        "started": isinstance(content.get("started"), float) and math.isfinite(content["started"]),  # pyright: ignore
    }
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        what = f"{key} at {store.uri}"
        raise RunError(explain(what, got=f"no usable {', '.join(wrong)}", expected="a notice of a launch"))
    return LaunchNotice(**{name: content[name] for name in checks})  # pyright: ignore[reportArgumentType] (looked at above)


def _is_int_between(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


# The launch file: what was requested, which replicas were started, and their handles.
#
#     ~/.local/state/composer-replication/launches/BUCKET/000003.json       or below $XDG_STATE_HOME
#
# Every start is recorded before it is requested, and its handle as soon as it is known. So every replica can be found
# and stopped even if the process is killed in between. The file contains no secret, only its owner can read it (0600),
# and it is written atomically.

FORMAT = 1
_MAX_BYTES = 16 << 20
_LOCK_TIMEOUT_S, _POLL_S = 30.0, 0.05


@dataclass(frozen=True)
class Start:
    """One start of a replica. If it has no handle, it is unknown whether the executor has started the replica."""

    rank: int
    attempt: int
    begun: float
    handle: ReplicaHandle | None = None
    asked_until: float | None = None  # when the request failed without a handle; None if its process was killed


@dataclass(frozen=True)
class Record:
    """The content of a launch file."""

    launch: Launch
    starts: tuple[Start, ...] = ()
    cancelled: float | None = None  # the time of a cancel, after which nothing is started
    ended: float | None = None  # the time at which a cancel had stopped all replicas

    @property
    def latest_starts(self) -> dict[int, Start]:
        """The latest start of each rank, ordered by rank."""
        return {start.rank: start for start in sorted(self.starts, key=lambda start: (start.rank, start.attempt))}


@dataclass(frozen=True)
class LaunchFile:
    """A launch file. Several processes may read and change it at the same time."""

    path: Path

    @classmethod
    def create(cls, path: Path, launch: Launch) -> LaunchFile:
        """Create the file of a launch. Raises RunError if the file already exists."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = cls(path)
        with file._locked("lock"):
            refuse_existing_file(path)
            file._write(Record(launch))
        return file

    def read(self) -> Record:
        """Return the content of the file. Raises InputError if other users can write the file, and RunError if it is
        invalid.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise ArtefactNotFoundError(
                explain(str(self.path), got="no such file", expected="the file of a launch")
            ) from None
        with os.fdopen(descriptor, "rb") as file:
            self._check_owner(os.fstat(descriptor))
            data = file.read(_MAX_BYTES)
        try:
            return _parse_record(decode_object(data))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(explain(str(self.path), got=f"{error}", expected="the file of a launch")) from error

    def begin(self, rank: int, attempt: int) -> None:
        """Record that a start is about to be requested.

        Raises RunError if the launch was canceled, or if another process has started this rank in the meantime.
        """

        def add_start(record: Record) -> Record:
            if record.cancelled is not None:
                raise RunError(explain(f"rank {rank}", got="a canceled launch", expected="an active launch"))
            last = record.latest_starts.get(rank)
            if attempt != (0 if last is None else last.attempt + 1):
                got = f"start {attempt} after start {'none' if last is None else last.attempt}"
                fix = "Another process is watching this launch: leave the restarts to it."
                raise RunError(explain(f"rank {rank}", got=got, expected="the next start", fix=fix))
            return replace(record, starts=(*record.starts, Start(rank, attempt, time.time())))

        self._change(add_start)

    def note(self, handle: ReplicaHandle) -> Record:
        """Record the handle of a start."""

        def add_handle(record: Record) -> Record:
            key = (handle.rank, handle.attempt)
            starts = [
                replace(start, handle=handle) if (start.rank, start.attempt) == key else start
                for start in record.starts
            ]
            return replace(record, starts=tuple(starts))

        return self._change(add_handle)

    def end_asking(self, rank: int, attempt: int, when: float) -> Record:
        """Record when a request to start a replica ended without a handle. A time recorded earlier is kept."""

        def set_asked_until(record: Record) -> Record:
            starts = [
                replace(start, asked_until=start.asked_until or when)
                if (start.rank, start.attempt) == (rank, attempt)
                else start
                for start in record.starts
            ]
            return replace(record, starts=tuple(starts))

        return self._change(set_asked_until)

    def withdraw(self, rank: int, attempt: int) -> Record:
        """Remove a start that the executor has refused and that therefore has no replica."""

        def remove_start(record: Record) -> Record:
            remaining_starts = [start for start in record.starts if (start.rank, start.attempt) != (rank, attempt)]
            return replace(record, starts=tuple(remaining_starts))

        return self._change(remove_start)

    def mark_cancelled(self) -> Record:
        return self._change(lambda record: replace(record, cancelled=record.cancelled or time.time()))

    def mark_ended(self) -> Record:
        """Record that a cancellation has stopped all replicas, so that the executor need not be queried again."""
        return self._change(lambda record: replace(record, ended=record.ended or time.time()))

    @contextlib.contextmanager
    def starting(self) -> Generator[None]:
        """Hold a lock while a replica is being started and its handle recorded. The lock is released if the process
        dies.
        """
        with self._locked("start"):
            yield

    def is_starting(self) -> bool:
        """Return whether another process is starting a replica, that is, holds the lock of `starting`."""
        try:
            descriptor = os.open(self._lock_path("start"), os.O_RDWR)
        except FileNotFoundError:  # nothing was ever started, and this must not create the lock file
            return False
        try:
            return not try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _change(self, change: Callable[[Record], Record]) -> Record:
        with self._locked("lock"):
            record = change(self.read())
            self._write(record)
            return record

    def _write(self, record: Record) -> None:
        content = {"format": FORMAT, "launch": asdict(record.launch)}
        content |= {"starts": [asdict(start) for start in record.starts], "cancelled": record.cancelled}
        content |= {"ended": record.ended}
        with staged(self.path) as stage:
            if hasattr(os, "fchmod"):
                os.fchmod(stage.file.fileno(), 0o600)
            stage.file.write(encode_as_written(content, where=str(self.path), indent=True) + b"\n")
            stage.commit()

    def _lock_path(self, name: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{name}")

    @contextlib.contextmanager
    def _locked(self, name: str) -> Generator[None]:
        descriptor = os.open(self._lock_path(name), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT_S
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    got = f"locked by another process for {_LOCK_TIMEOUT_S:g} s"
                    fix = "Wait for it, then run the same command again."
                    raise RunError(explain(str(self.path), got=got, expected="an unlocked file", fix=fix))
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _check_owner(self, status: os.stat_result) -> None:
        """Raise InputError unless only this user can write the file, because it decides what is run and paid for."""
        if not hasattr(os, "getuid"):  # Windows has no numeric owners
            return
        is_open = bool(status.st_mode & 0o022)
        if status.st_uid != os.getuid() or is_open:
            got = "a file that others may write" if is_open else f"a file of user {status.st_uid}"
            fix = "If you trust its content, copy it and `chmod 600` the copy."
            raise InputError(explain(str(self.path), got=got, expected="a file that only you can write", fix=fix))


def _parse_record(content: dict[str, Any]) -> Record:
    if content.get("format") != FORMAT:
        raise ValueError(f"format {content.get('format')!r}, this version reads {FORMAT}")
    launch = Launch(**content["launch"])
    if launch.executor not in EXECUTORS:
        raise ValueError(f"executor {launch.executor!r}")
    starts = []
    for entry in content["starts"]:
        handle = None if entry["handle"] is None else ReplicaHandle(**entry["handle"])
        asked_until = None if entry.get("asked_until") is None else float(entry["asked_until"])
        starts.append(Start(int(entry["rank"]), int(entry["attempt"]), float(entry["begun"]), handle, asked_until))
    return Record(launch, tuple(starts), content["cancelled"], content.get("ended"))


def _launch_folder(bucket_address: str) -> Path:
    """Return the folder that contains the launch files of a bucket."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = state if state.is_absolute() else Path.home() / ".local" / "state"
    # The hash distinguishes buckets whose readable parts are equal.
    readable = re.sub(r"[^A-Za-z0-9]+", "-", bucket_address)[-40:].strip("-")
    return (
        base
        / "composer-replication"
        / "launches"
        / f"{readable}-{hashlib.sha256(bucket_address.encode()).hexdigest()[:12]}"
    )


def local_launch_numbers(bucket_address: str) -> list[int]:
    """Return the numbers of a bucket's launches that have a launch file on this machine."""
    names = [path.stem for path in _launch_folder(bucket_address).glob("*.json")]
    return sorted(int(name) for name in names if name.isdigit())


def refuse_existing_file(path: Path) -> None:
    if path.exists():
        fix = "Choose another name, or move that file, but keep it: replicas can only be stopped with it."
        raise RunError(explain(str(path), got="an existing file", expected="a new file", fix=fix))


def launch_path(bucket_address: str, number: int) -> Path:
    return _launch_folder(bucket_address) / f"{number:06d}.json"


def find_launch_file(bucket: str, number: int | None, path: Path | None) -> LaunchFile | None:
    """Return the launch file at `path`, or this machine's file for launch `number` (default: the last) of a bucket.

    Returns None if this machine has no such file. Raises InputError if the file at `path` belongs to another bucket or
    launch.
    """
    address = canonical_bucket(bucket)
    if path is None:
        numbers = local_launch_numbers(address)
        number = numbers[-1] if number is None and numbers else number
        return LaunchFile(launch_path(address, number)) if number is not None and number in numbers else None
    file = LaunchFile(path)
    launch = file.read().launch
    if launch.place != address:
        raise InputError(explain(str(path), got=f"a launch of {launch.place}", expected=f"a launch of {address}"))
    if number is not None and launch.number != number:
        raise InputError(explain(str(path), got=f"launch {launch.number}", expected=f"launch {number}"))
    return file


def missing_file_error(bucket: str, number: int | None) -> RunError:
    """Return the error for a command that needs a launch file and cannot find it."""
    which = "" if number is None else f" {number}"
    fix = (
        "The bucket cannot be trusted to identify the replicas, because others may write to it. Copy the file that "
        "`crf diloco launch` wrote on the machine where it ran, and pass it with --launch-file FILE."
    )
    got = f"no file of launch{which} in {_launch_folder(canonical_bucket(bucket))}"
    return RunError(explain(bucket, got=got, expected="the file of a launch from this machine", fix=fix))
