"""Work before the first step, which can take minutes: what it is, how far it is, and what an interrupt would keep."""

from __future__ import annotations

import signal
import threading
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
Say = Callable[[str], None]
_listener: ContextVar[OnPhase | None] = ContextVar("phase_listener", default=None)


def tell_phase(phase: Phase) -> None:
    """To whoever listens; nobody has to."""
    listener = _listener.get()
    if listener is not None:
        listener(phase)


@contextmanager
def telling_phases(on_phase: OnPhase, say: Say) -> Generator[None]:
    """Pass phases on. SIGTERM is heard as Ctrl-C is, and either ends the work with a sentence about what is kept."""
    latest: list[Phase] = []

    def hear(phase: Phase) -> None:
        latest[:] = [phase]
        on_phase(phase)

    token = _listener.set(hear)
    try:
        with _sigterm_as_ctrl_c():
            yield
    except KeyboardInterrupt:
        if latest and not latest[0].is_over:
            say(latest[0].when_interrupted())
        raise
    finally:
        _listener.reset(token)


@contextmanager
def _sigterm_as_ctrl_c() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can hear signals
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
