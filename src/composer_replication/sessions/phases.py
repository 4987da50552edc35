"""Work before the first step, which can take minutes: what it is, how far it is, and what an interrupt would keep."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Phase:
    """`done` of `total` items of the work called `name`; those that are done lie at `kept_in`, if anywhere."""

    name: str
    done: int
    total: int
    items: str
    kept_in: Path | None = None

    @property
    def is_over(self) -> bool:
        return self.done >= self.total

    def when_interrupted(self) -> str:
        """What is kept, in a sentence."""
        far = f"interrupted in the {self.name}, after {self.done:,} of {self.total:,} {self.items}"
        if self.kept_in is None:
            return f"{far}; they are kept nowhere, and the next run begins them again"
        return f"{far}, which are kept in {self.kept_in}; the same command takes them from there"


OnPhase = Callable[[Phase], None]
_listener: ContextVar[OnPhase | None] = ContextVar("phase_listener", default=None)


@contextmanager
def phases_told_to(listener: OnPhase) -> Generator[None]:
    """Whoever works inside tells this listener how far it is."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell_phase(phase: Phase) -> None:
    """To whoever listens; nobody has to."""
    listener = _listener.get()
    if listener is not None:
        listener(phase)
