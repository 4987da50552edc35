"""A launch, and what the bucket shows of it. What is done by it stands in the operator's own file (`launch_file`).

launch/000003/launch.json        a notice for whoever looks; creating it takes the number, which is the generation
launch/000003/input/...          files of the run
launch/000003/output/001/...     what rank 1 ended with

Whoever may write to the bucket may write any of it. So nothing of it says whom to pay, whom to signal, where to send a
token or what to run; and what is shown of it is looked at first.
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
from composer_replication.errors import (
    ArtefactNotFoundError,
    InputError,
    RunError,
    explain,
)

ROOT = "launch"
EXECUTORS = {"local": "local_process.LocalProcessExecutor", "modal": "modal.ModalExecutor"} | {
    "hf_jobs": "hf_jobs.HFJobsExecutor",
    "ray": "ray.RayExecutor",
}
MAX_REPLICAS = 1000
_MAX_NUMBER, _MAX_NOTICE_BYTES, _MAX_COMMITS = 999_999, 4096, 10**9
_NOTICE_KEY = re.compile(rf"{ROOT}/(\d{{6}})/launch\.json")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class LaunchNotice:
    """What anybody may know of a launch."""

    number: int
    id: str
    executor: str
    replicas: int
    commits: int | None  # of the whole run, where that is known
    started: float

    def key(self, *parts: str) -> str:
        return launch_key(self.number, *parts)

    def notice(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(LaunchNotice)}


def launch_key(number: int, *parts: str) -> str:
    return "/".join((ROOT, f"{number:06d}", *parts))


@dataclass(frozen=True, kw_only=True)
class Launch(LaunchNotice):
    """What was asked for, and with which executor."""

    bucket: str  # as replicas name it
    place: str  # the bucket as this machine names it, see `canonical_bucket`
    options: Mapping[str, Any]  # the executor's own, without secrets' values
    entrypoint: str
    args: Mapping[str, Any]
    gpu: str | None = None
    timeout_s: float | None = None

    def entrypoint_args(self, **settings: Any) -> dict[str, Any]:
        """The arguments of its replicas: the launch's number is the generation of their rounds."""
        trainer = {**self.args["trainer_kwargs"], "launch": self.number}
        of_manager = {**self.args["settings"], **settings, "generation": self.number}
        return {**self.args, "trainer_kwargs": trainer, "settings": of_manager}


def canonical_bucket(bucket: str) -> str:
    """One name for a bucket that may be written in several ways; nobody is asked for it."""
    if scheme_of(bucket) != "file":
        return bucket.rstrip("/")
    path = Path(unquote(urlsplit(bucket).path) if "://" in bucket else bucket)
    return path.expanduser().absolute().as_uri().rstrip("/")


def list_launch_numbers(store: ObjectStore) -> list[int]:
    """Of all launches that the bucket shows."""
    matches = (_NOTICE_KEY.fullmatch(key) for key in store.keys(ROOT))
    return sorted(int(match[1]) for match in matches if match)


def next_number(store: ObjectStore, *, above: int = -1) -> int:
    return max([above, *list_launch_numbers(store)]) + 1


def create_launch(store: ObjectStore, *, above: int = -1, **asked: Any) -> Launch:
    """Take the next number; of several that launch at once each gets one of its own.

    `above` is the last one of this bucket that is known here: numbers are not used again in a bucket that was emptied.
    """
    number = next_number(store, above=above)
    while number <= _MAX_NUMBER:
        launch = Launch(
            number=number, id=uuid.uuid4().hex, place=canonical_bucket(asked["bucket"]), started=time.time(), **asked
        )
        if store.create(launch.key("launch.json"), encode(launch.notice(), where="launch")):
            return launch
        number += 1
    fix = "Take another prefix."
    raise RunError(explain(f"launches at {store.uri}", got=number - 1, expected=f"at most {_MAX_NUMBER}", fix=fix))


def refuse_other_launch(store: ObjectStore, launch: Launch) -> None:
    """RunError where the bucket shows another launch under this number: it was emptied, or somebody wrote there."""
    notice = read_notice(store, launch.number)
    if notice is not None and notice.id != launch.id:
        got = "another one than the launch file's"
        fix = "Somebody emptied the bucket and launched again, or wrote to it: look at who may."
        raise RunError(explain(f"launch {launch.number} at {store.uri}", got=got, expected=launch.id[:12], fix=fix))


def read_notice(store: ObjectStore, number: int) -> LaunchNotice | None:
    """What the bucket shows of a launch; None where it shows none, RunError where it is no notice."""
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


# A launch as the operator's own machine holds it: what was asked, which replicas were begun, and who they are.
#
# `watch`, `cancel` and `collect` act by this file and by nothing in the bucket. Every start stands in it before it is
# asked for, and its handle as soon as there is one: whoever is killed in between leaves a file by which all is ended.
# It holds no secret, is read by its owner alone (0600), and is written whole or not at all.
#
#     ~/.local/state/composer-replication/launches/BUCKET/000003.json       or below $XDG_STATE_HOME

FORMAT = 1
_MAX_BYTES = 16 << 20
_LOCK_S, _POLL_S = 30.0, 0.05


@dataclass(frozen=True)
class Start:
    """One start of one replica; without a handle it was asked for, and nobody knows what came of it."""

    rank: int
    attempt: int
    begun: float
    handle: ReplicaHandle | None = None
    asked_until: float | None = None  # when the asking ended without a handle; None where whoever asked was killed


@dataclass(frozen=True)
class Record:
    """A launch file's content."""

    launch: Launch
    starts: tuple[Start, ...] = ()
    cancelled: float | None = None  # when; nothing is started after that
    ended: float | None = None  # when a cancel had ended every start

    @property
    def latest_starts(self) -> dict[int, Start]:
        """The last start of every rank that was begun, in rank order."""
        return {start.rank: start for start in sorted(self.starts, key=lambda start: (start.rank, start.attempt))}


@dataclass(frozen=True)
class LaunchFile:
    """The file, for any number of processes at once."""

    path: Path

    @classmethod
    def create(cls, path: Path, launch: Launch) -> LaunchFile:
        """Begin a launch's file; one that is there stays as it is."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = cls(path)
        with file._locked("lock"):
            refuse_existing_file(path)
            file._write(Record(launch))
        return file

    def read(self) -> Record:
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
        """Note a start that is about to be asked for; refused where the launch is over, or somebody was quicker."""

        def begun(record: Record) -> Record:
            if record.cancelled is not None:
                raise RunError(explain(f"rank {rank}", got="a launch that was cancelled", expected="one that goes on"))
            last = record.latest_starts.get(rank)
            if attempt != (0 if last is None else last.attempt + 1):
                got = f"start {attempt} of a rank whose last is {'none' if last is None else last.attempt}"
                fix = "Another process looks after this launch: let it."
                raise RunError(explain(f"rank {rank}", got=got, expected="the next one", fix=fix))
            return replace(record, starts=(*record.starts, Start(rank, attempt, time.time())))

        self._change(begun)

    def note(self, handle: ReplicaHandle) -> Record:
        """Note whom a start has become."""

        def noted(record: Record) -> Record:
            mine = (handle.rank, handle.attempt)
            starts = [
                replace(start, handle=handle) if (start.rank, start.attempt) == mine else start
                for start in record.starts
            ]
            return replace(record, starts=tuple(starts))

        return self._change(noted)

    def end_asking(self, rank: int, attempt: int, when: float) -> Record:
        """Note when a start's asking ended without a handle; the first note stays."""

        def ended(record: Record) -> Record:
            starts = [
                replace(start, asked_until=start.asked_until or when)
                if (start.rank, start.attempt) == (rank, attempt)
                else start
                for start in record.starts
            ]
            return replace(record, starts=tuple(starts))

        return self._change(ended)

    def withdraw(self, rank: int, attempt: int) -> Record:
        """Forget a start that was refused: nothing came of it."""

        def withdrawn(record: Record) -> Record:
            remaining_starts = [start for start in record.starts if (start.rank, start.attempt) != (rank, attempt)]
            return replace(record, starts=tuple(remaining_starts))

        return self._change(withdrawn)

    def mark_cancelled(self) -> Record:
        return self._change(lambda record: replace(record, cancelled=record.cancelled or time.time()))

    def mark_ended(self) -> Record:
        """Note that a cancel has ended every start: nobody has to be asked about them."""
        return self._change(lambda record: replace(record, ended=record.ended or time.time()))

    @contextlib.contextmanager
    def starting(self) -> Generator[None]:
        """Held from the note of a start until that of its handle; it is free again when its process is killed."""
        with self._locked("start"):
            yield

    def is_starting(self) -> bool:
        """Whether another process is between those two notes."""
        try:
            descriptor = os.open(self._lock_path("start"), os.O_RDWR)
        except FileNotFoundError:  # nobody ever was; who looks leaves nothing behind
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
            deadline = time.monotonic() + _LOCK_S
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    got = f"held by another process for {_LOCK_S:g} s"
                    raise RunError(explain(str(self.path), got=got, expected="it free", fix="Wait for it, and repeat."))
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _check_owner(self, status: os.stat_result) -> None:
        """Whoever writes this file says what is paid for and run: nobody else may."""
        if not hasattr(os, "getuid"):  # Windows, whose files have no such owner
            return
        is_open = bool(status.st_mode & 0o022)
        if status.st_uid != os.getuid() or is_open:
            got = "a file that others may write" if is_open else f"a file of user {status.st_uid}"
            fix = "Where it is right as it is, copy it, and `chmod 600` the copy."
            raise InputError(explain(str(self.path), got=got, expected="your own, written by you alone", fix=fix))


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


# ---- where the files are


def launch_folder(place: str) -> Path:
    """Where this machine keeps the launches of a bucket."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = state if state.is_absolute() else Path.home() / ".local" / "state"
    readable = re.sub(r"[^A-Za-z0-9]+", "-", place)[-40:].strip("-")
    return base / "composer-replication" / "launches" / f"{readable}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"


def local_launch_numbers(place: str) -> list[int]:
    """The launches of a bucket whose files this machine has."""
    names = [path.stem for path in launch_folder(place).glob("*.json")]
    return sorted(int(name) for name in names if name.isdigit())


def refuse_existing_file(path: Path) -> None:
    if path.exists():
        fix = "Name another file, or move that one away: by it, and by nothing else, its replicas are ended."
        raise RunError(explain(str(path), got="a file that is there", expected="a free name", fix=fix))


def launch_path(place: str, number: int) -> Path:
    return launch_folder(place) / f"{number:06d}.json"


def find_launch_file(bucket: str, number: int | None, given: Path | None) -> LaunchFile | None:
    """The file of a launch of this bucket: the one that was given, or this machine's; None where it has none."""
    location = canonical_bucket(bucket)
    if given is None:
        list_launch_numbers = local_launch_numbers(location)
        requested_number = list_launch_numbers[-1] if number is None and list_launch_numbers else number
        return (
            LaunchFile(launch_path(location, requested_number))
            if requested_number is not None and requested_number in list_launch_numbers
            else None
        )
    file = LaunchFile(given)
    launch = file.read().launch
    if launch.place != location:
        raise InputError(explain(str(given), got=f"a launch of {launch.place}", expected=f"one of {location}"))
    if number is not None and launch.number != number:
        raise InputError(explain(str(given), got=f"launch {launch.number}", expected=f"launch {number}"))
    return file


def missing_file_error(bucket: str, number: int | None) -> RunError:
    """What is said where a launch file is needed and none is here."""
    which = "" if number is None else f" {number}"
    fix = (
        "The bucket does not say who the replicas are: whoever may write to it could name others. Bring the file that "
        "`crf diloco launch` wrote on the machine where it ran, and name it: --launch-file FILE."
    )
    got = f"no launch{which} of it in {launch_folder(canonical_bucket(bucket))}"
    return RunError(explain(bucket, got=got, expected="the file of a launch that began on this machine", fix=fix))
