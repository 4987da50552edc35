"""What came of the calls of one replay of a run, and whether the run is still the one that was asked about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.runs import RunDir
from composer_replication.types import TeacherCallResult, TraceState

T = TypeVar("T")


class Outcomes:
    """What came of the calls of this replay, by state and number of the teacher; answers are in the store."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, int], TeacherCallResult] = {}
        self._answered = set[int]()  # hashes: of a long replay there are many

    def add(self, result: TeacherCallResult, teacher: int) -> None:
        if result["message"] is None:  # pyright: ignore[reportTypedDictNotRequiredAccess]
            self.failures[result["state_id"], teacher] = result
        else:
            self._answered.add(hash((result["state_id"], teacher)))

    def was_answered(self, state: TraceState, teacher: int) -> bool:
        return hash((state["state_id"], teacher)) in self._answered


def digests_of(run: RunDir, names: Sequence[str]) -> dict[str, str]:
    return {name: run.meta(name).sha256 for name in names}


def check_unchanged(run: RunDir, as_asked: Mapping[str, str]) -> None:
    """Calls are written beside the states that were asked about, never beside others."""
    for name, digest in as_asked.items():
        if run.meta(name).sha256 != digest:
            fix = (
                "Answers so far are paid for and kept in teacher_cache.sqlite: run the same command again, and only "
                "what is new is asked."
            )
            got, expected = "a file that was changed during the replay", "the one that was asked about"
            raise StaleArtefactError(explain(str(run.path(name)), got=got, expected=expected, fix=fix))


def while_unchanged(run: RunDir, as_asked: Mapping[str, str], rows: Iterator[T]) -> Iterator[T]:
    """The rows; an error instead of their end, for which nothing is written, where their sources changed meanwhile."""
    yield from rows
    check_unchanged(run, as_asked)
