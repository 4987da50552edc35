"""A service that costs money, as files: a replica runs as long as its file says so, whoever is killed meanwhile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.cli.replicas import launch_status as starting
from composer_replication.cli.replicas.launches import Launch, LaunchFile
from composer_replication.diloco.serverless.executor import (
    Executor,
    ReplicaHandle,
    ReplicaJob,
    ReplicaStatus,
    start_name,
)

ID = "ab" * 16


class ServiceDown(Exception):
    """What a client raises for a 500."""


class Denied(Exception):
    """What a client raises for a 403."""


class PaidExecutor(Executor):
    """`trouble` says what happens at a start, by rank, or at a cancel or poll."""

    backend_name = "paid"
    supports_inter_replica_network = False
    by_hand = "Look for {launch} at paid.example."
    poll_interval_s = 0.01

    def __init__(self, folder: Path, **trouble: Any) -> None:
        super().__init__()
        self.folder, self.trouble = folder, trouble
        self.cancelled: list[str] = []
        folder.mkdir(exist_ok=True)

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        if (on_status := self.trouble.get("seen")) is not None:
            on_status(job)
        if job.rank == self.trouble.get("refused"):
            raise ServiceDown("500 at the start")
        if job.rank == self.trouble.get("denied"):
            raise Denied("403: no such hardware for you")
        (self.folder / job.name).write_text("running")
        if job.rank == self.trouble.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if job.rank == self.trouble.get("interrupted"):
            raise KeyboardInterrupt
        if job.rank == self.trouble.get("unanswered"):
            raise ServiceDown("504 after the start")
        return {"job": job.name}

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        if handle.rank in self.trouble.get("silent", ()):
            raise ServiceDown("500 at a question")
        return (self.folder / handle.metadata["job"]).read_text()  # pyright: ignore[reportReturnType]

    def cancel(self, handle: ReplicaHandle) -> None:
        if handle.rank in self.trouble.get("unending", ()):
            raise ServiceDown("500 at the end")
        path = self.folder / handle.metadata["job"]
        if path.read_text() == "running":
            self.cancelled.append(path.name)
            path.write_text("cancelled")

    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        if rank in self.trouble.get("unlisting", ()):
            raise ServiceDown("500 at a list")
        name = start_name(launch, rank, attempt)
        return [self._handle(launch, rank, attempt, {"job": name})] if (self.folder / name).exists() else []

    def was_refused(self, error: BaseException) -> bool:
        return isinstance(error, Denied) or super().was_refused(error)

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        return self.shown("its last words", n_lines)

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        return {"succeeded": 0, "failed": 1}.get(self.poll(handle))

    def says(self, rank: int, status: str, attempt: int = 0) -> None:
        (self.folder / start_name(ID, rank, attempt)).write_text(status)

    @property
    def running(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.read_text() == "running")


def launch_file(folder: Path, *, replicas: int = 3, commits: int | None = 4) -> LaunchFile:
    launch = Launch(
        number=0,
        id=ID,
        executor="local",
        replicas=replicas,
        commits=commits,
        started=0.0,
        bucket=str(folder / "bucket"),
        place=(folder / "bucket").as_uri(),
        options={},
        entrypoint="nobody.calls_it",
        args={"trainer_kwargs": {}, "settings": {}},
    )
    return LaunchFile.create(folder / "launch.json", launch)


def names(*ranks: int, attempt: int = 0) -> list[str]:
    return [start_name(ID, rank, attempt) for rank in ranks]


def main(arguments: Mapping[str, str]) -> None:
    """A launcher of its own, which its service's client takes with it."""
    folder = Path(arguments["folder"])
    starting.start_replicas(
        LaunchFile(folder / "launch.json"), PaidExecutor(folder / "paid", killed=int(arguments["killed"]))
    )


if __name__ == "__main__":
    main({"folder": sys.argv[1], "killed": sys.argv[2]})
