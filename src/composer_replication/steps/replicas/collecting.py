"""What a launch ended with: the trained weights, which are the same at every replica, and what each of them printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json, atomic_write_text
from composer_replication.canonical_json import decode_object
from composer_replication.diloco.serverless.executor import Executor
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ArtefactCorruptError, explain
from composer_replication.steps.replicas.bucket_files import download
from composer_replication.steps.replicas.launches import Launch, read_handles
from composer_replication.steps.replicas.replica import DONE

_MOST_BYTES = 1 << 20
_LINES = 100_000


@dataclass(frozen=True)
class Collected:
    """What was brought, and where it is."""

    folder: Path
    weights: Path | None  # None where no replica has left any
    files: int
    from_rank: int | None
    outcomes: list[dict[str, Any]]
    answers: dict[str, Any]  # what the trainer returned, by rank


def collect(
    store: ObjectStore, launch: Launch, executor: Executor | None, folder: Path, *, timeout_s: float | None = None
) -> Collected:
    """Bring weights and logs; wait for the replicas as long as `timeout_s` says."""
    handles = read_handles(store, launch)
    outcomes = [] if executor is None else executor.collect(handles, timeout=timeout_s)
    folder.mkdir(parents=True, exist_ok=True)
    for handle in handles if executor is not None else ():
        assert executor is not None
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        atomic_write_text(logs / f"rank-{handle.rank:03d}.txt", executor.stream_logs(handle, n_lines=_LINES) + "\n")
    done = _done(store, launch)
    atomic_write_json(
        folder / "outcomes.json",
        {
            "launch": launch.number,
            "outcomes": outcomes,
            "answers": {str(rank): each["answer"] for rank, each in done.items()},
        },
    )
    answers = {str(rank): each["answer"] for rank, each in done.items()}
    weighty = {rank: each["files"] for rank, each in done.items() if each["files"]}
    if not weighty:
        return Collected(folder, None, 0, None, outcomes, answers)
    first = min(weighty)
    _check_equal(store, weighty)
    download(store, launch.key("output", f"{first:03d}"), weighty[first], folder / "weights")
    return Collected(folder, folder / "weights", len(weighty[first]), first, outcomes, answers)


def _done(store: ObjectStore, launch: Launch) -> dict[int, dict[str, Any]]:
    keys = [key for key in store.keys(launch.key("output")) if key.endswith(f"/{DONE}")]
    return {int(key.split("/")[-2]): decode_object(store.get(key, most_bytes=_MOST_BYTES)) for key in keys}


def _check_equal(store: ObjectStore, weighty: dict[int, dict[str, str]]) -> None:
    """Replicas of one run end with the same weights, bit for bit; where they do not, none is the run's."""
    weights = {
        rank: {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
        for rank, files in weighty.items()
    }
    first = min(weights)
    if other := [rank for rank, files in weights.items() if files != weights[first]]:
        got = f"other weights at rank {', '.join(map(str, other))} than at rank {first}"
        fix = "One of them ended without the last round: look at its log, and launch again."
        raise ArtefactCorruptError(explain(f"weights at {store.uri}", got=got, expected="the same", fix=fix))
