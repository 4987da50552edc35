"""A launch, and what the bucket shows of it. What is done by it stands in the operator's own file (`launch_file`).

launch/000003/launch.json        a notice for whoever looks; creating it takes the number, which is the generation
launch/000003/input/...          files of the run
launch/000003/output/001/...     what rank 1 ended with

Whoever may write to the bucket may write any of it. So nothing of it says whom to pay, whom to signal, where to send a
token or what to run; and what is shown of it is looked at first.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from composer_replication.canonical_json import decode_object, encode
from composer_replication.diloco.store import MissingObject, ObjectStore
from composer_replication.diloco.store.opening import scheme_of
from composer_replication.errors import RunError, explain

ROOT = "launch"
EXECUTORS = {"local": "local_process.LocalProcessExecutor", "modal": "modal.ModalExecutor"} | {
    "hf_jobs": "hf_jobs.HFJobsExecutor",
    "ray": "ray.RayExecutor",
}
MOST_REPLICAS = 1000
_MOST_NUMBER, _MOST_NOTICE_BYTES, _MOST_COMMITS = 999_999, 4096, 10**9
_NOTICE_KEY = re.compile(rf"{ROOT}/(\d{{6}})/launch\.json")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Notice:
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
        return {field.name: getattr(self, field.name) for field in fields(Notice)}


@dataclass(frozen=True, kw_only=True)
class Launch(Notice):
    """What was asked for, and with which executor."""

    bucket: str  # as replicas name it
    place: str  # the bucket as this machine names it, see `place_of`
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


def launch_key(number: int, *parts: str) -> str:
    return "/".join((ROOT, f"{number:06d}", *parts))


def place_of(bucket: str) -> str:
    """One name for a bucket that may be written in several ways; nobody is asked for it."""
    if scheme_of(bucket) != "file":
        return bucket.rstrip("/")
    path = Path(unquote(urlsplit(bucket).path) if "://" in bucket else bucket)
    return path.expanduser().absolute().as_uri().rstrip("/")


def numbers(store: ObjectStore) -> list[int]:
    """Of all launches that the bucket shows."""
    matches = (_NOTICE_KEY.fullmatch(key) for key in store.keys(ROOT))
    return sorted(int(match[1]) for match in matches if match)


def next_number(store: ObjectStore, *, above: int = -1) -> int:
    return max([above, *numbers(store)]) + 1


def create_launch(store: ObjectStore, *, above: int = -1, **asked: Any) -> Launch:
    """Take the next number; of several that launch at once each gets one of its own.

    `above` is the last one of this bucket that is known here: numbers are not used again in a bucket that was emptied.
    """
    number = next_number(store, above=above)
    while number <= _MOST_NUMBER:
        launch = Launch(
            number=number, id=uuid.uuid4().hex, place=place_of(asked["bucket"]), started=time.time(), **asked
        )
        if store.create(launch.key("launch.json"), encode(launch.notice(), where="launch")):
            return launch
        number += 1
    fix = "Take another prefix."
    raise RunError(explain(f"launches at {store.uri}", got=number - 1, expected=f"at most {_MOST_NUMBER}", fix=fix))


def refuse_another(store: ObjectStore, launch: Launch) -> None:
    """RunError where the bucket shows another launch under this number: it was emptied, or somebody wrote there."""
    notice = read_notice(store, launch.number)
    if notice is not None and notice.id != launch.id:
        got = "another one than the launch file's"
        fix = "Somebody emptied the bucket and launched again, or wrote to it: look at who may."
        raise RunError(explain(f"launch {launch.number} at {store.uri}", got=got, expected=launch.id[:12], fix=fix))


def read_notice(store: ObjectStore, number: int) -> Notice | None:
    """What the bucket shows of a launch; None where it shows none, RunError where it is no notice."""
    key = launch_key(number, "launch.json")
    try:
        content = decode_object(store.get(key, most_bytes=_MOST_NOTICE_BYTES))
    except MissingObject:
        return None
    except ValueError as error:
        raise RunError(explain(f"{key} at {store.uri}", got=type(error).__name__, expected="a notice")) from None
    checks = {
        "number": content.get("number") == number,
        "id": isinstance(content.get("id"), str) and _ID.fullmatch(str(content["id"])) is not None,
        "executor": content.get("executor") in [*EXECUTORS],
        "replicas": _is_count(content.get("replicas"), 1, MOST_REPLICAS),
        "commits": content.get("commits") is None or _is_count(content["commits"], 0, _MOST_COMMITS),
        "started": isinstance(content.get("started"), float) and math.isfinite(content["started"]),  # pyright: ignore
    }
    if wrong := [name for name, is_right in checks.items() if not is_right]:
        what = f"{key} at {store.uri}"
        raise RunError(explain(what, got=f"no usable {', '.join(wrong)}", expected="a notice of a launch"))
    return Notice(**{name: content[name] for name in checks})  # pyright: ignore[reportArgumentType] (looked at above)


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
