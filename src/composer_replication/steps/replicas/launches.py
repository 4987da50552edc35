"""A launch as the bucket holds it, so that another machine can watch, cancel and collect it. No secret is in it.

launch/000003/launch.json        what is asked of the replicas; creating it takes the number, which is the generation
launch/000003/replica/001.00     the handle of rank 1, first attempt
launch/000003/input/...          files of the run
launch/000003/output/001/...     what rank 1 ended with
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.canonical_json import decode_object, encode
from composer_replication.diloco.serverless.executor import ReplicaHandle
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import RunError, explain

ROOT = "launch"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What was asked for, and with which executor."""

    number: int
    bucket: str
    executor: str
    options: Mapping[str, Any]  # the executor's own, without secrets' values
    replicas: int
    commits: int | None  # of the whole run, where that is known
    started: float
    entrypoint: str
    args: Mapping[str, Any]
    gpu: str | None = None
    timeout_s: float | None = None

    def key(self, *parts: str) -> str:
        return launch_key(self.number, *parts)

    def entrypoint_args(self, **settings: Any) -> dict[str, Any]:
        """The arguments of its replicas: the launch's number is the generation of their rounds."""
        trainer = {**self.args["trainer_kwargs"], "launch": self.number}
        of_manager = {**self.args["settings"], **settings, "generation": self.number}
        return {**self.args, "trainer_kwargs": trainer, "settings": of_manager}


def launch_key(number: int, *parts: str) -> str:
    return "/".join((ROOT, f"{number:06d}", *parts))


def numbers(store: ObjectStore) -> list[int]:
    """Of all launches in the bucket."""
    parts = {key.split("/")[1] for key in store.keys(ROOT) if key.endswith("/launch.json")}
    return sorted(int(each) for each in parts if each.isdigit())


def next_number(store: ObjectStore) -> int:
    return max(numbers(store), default=-1) + 1


def create_launch(store: ObjectStore, **asked: Any) -> Launch:
    """Take the next number; of several that launch at once each gets one of its own."""
    number = next_number(store)
    while True:
        launch = Launch(number=number, started=time.time(), **asked)
        if store.create(launch.key("launch.json"), encode(asdict(launch), where="launch")):
            return launch
        number += 1


def read_launch(store: ObjectStore, number: int | None = None) -> Launch:
    """A launch of the bucket; the last one where no number is given."""
    known = numbers(store)
    if not known or (number is not None and number not in known):
        got = "no launch" if number is None or not known else f"no launch {number}"
        expected = f"one of {', '.join(map(str, known))}" if known else "one that `crf diloco launch` began"
        raise RunError(explain(store.uri, got=got, expected=expected))
    key = launch_key(known[-1] if number is None else number, "launch.json")
    try:
        return Launch(**_read(store, key))
    except (TypeError, ValueError) as error:
        raise RunError(explain(f"{key} at {store.uri}", got=str(error), expected="a launch")) from error


def note_handle(store: ObjectStore, launch: Launch, handle: ReplicaHandle) -> None:
    name = f"{handle.rank:03d}.{int(handle.metadata.get('attempt', 0)):02d}"
    store.put(launch.key("replica", name), encode(asdict(handle), where="handle"))


def read_handles(store: ObjectStore, launch: Launch) -> list[ReplicaHandle]:
    """The newest handle of every rank that was started, in rank order."""
    newest = {key.rpartition("/")[2].partition(".")[0]: key for key in store.keys(launch.key("replica"))}
    return [ReplicaHandle(**_read(store, key)) for _, key in sorted(newest.items())]


def _read(store: ObjectStore, key: str) -> dict[str, Any]:
    return decode_object(store.get(key, most_bytes=_MOST_BYTES))
