"""What a launch ended with: the trained weights, which are the same at every replica, and what each of them printed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_text
from composer_replication.canonical_json import decode_object
from composer_replication.diloco.serverless.answers import in_brief, tried
from composer_replication.diloco.serverless.executor import Executor
from composer_replication.diloco.store import ObjectStore
from composer_replication.errors import ArtefactCorruptError, InputError, explain
from composer_replication.steps.replicas.bucket_files import download, refuse_odd_names
from composer_replication.steps.replicas.launch_file import LaunchFile, Start
from composer_replication.steps.replicas.launches import Launch, refuse_another
from composer_replication.steps.replicas.looking import UNREACHABLE
from composer_replication.steps.replicas.replica import DONE

_MOST_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
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
    said: Callable[[str], None] = lambda _text: None,
) -> Collected:
    """Bring weights and logs; wait for the replicas as long as `timeout_s` says."""
    record = file.read()
    refuse_another(store, record.launch)
    folder.mkdir(parents=True, exist_ok=True)
    if timeout_s != 0 and (waited_for := _running(executor, record.newest.values())):
        until = "to the end" if timeout_s is None else f"for {timeout_s:g} s at most"
        ranks = ", ".join(map(str, waited_for))
        said(f"waiting {until} for rank {ranks}; Ctrl-C ends the waiting, not them; --timeout 0 waits for nobody")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    outcomes = [_outcome(executor, start, deadline, folder / "logs") for start in record.newest.values()]
    done = _done(store, record.launch)
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


def _running(executor: Executor | None, starts: Iterable[Start]) -> list[int]:
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
        lambda: (executor.collect([handle], timeout=remaining_s)[0], executor.stream_logs(handle, n_lines=_LINES))
    )
    if isinstance(error, InputError):
        raise error
    if brought is None or error is not None:
        return {**unknown, "error": "" if error is None else in_brief(error)}
    outcome, text = brought
    logs.mkdir(exist_ok=True)
    atomic_write_text(logs / f"rank-{start.rank:03d}.txt", text + "\n")
    return outcome


def _done(store: ObjectStore, launch: Launch) -> dict[int, dict[str, Any]]:
    """What replicas say they ended with, by rank; what is no such word is an error, whoever wrote it."""
    done = {}
    for rank in range(launch.replicas):
        key = launch.key("output", f"{rank:03d}", DONE)
        if store.size(key) is None:
            continue
        try:
            content = decode_object(store.get(key, most_bytes=_MOST_BYTES))
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
