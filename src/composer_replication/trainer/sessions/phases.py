"""Work before the first step, which can take minutes: what it is, how far it is, and what an interrupt would keep."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object


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


class PhaseTimes:
    """Passes phases on, and adds up the seconds of each by its name, in a file: a run may take several calls.

    A phase is in the file from its beginning: killed between its last item and the file's next writing, it was made.
    """

    def __init__(self, path: Path, on_phase: OnPhase) -> None:
        self._path, self._on_phase = path, on_phase
        earlier: dict[str, Any] = decode_object(path.read_bytes()) if path.exists() else {}
        self._earlier: dict[str, float] = earlier
        self._began: dict[str, float] = {}
        self.seconds = dict(self._earlier)

    def __call__(self, phase: Phase) -> None:
        now, is_new = time.monotonic(), phase.name not in self._began
        took = now - self._began.setdefault(phase.name, now)
        self.seconds[phase.name] = round(self._earlier.get(phase.name, 0.0) + took, 1)
        if is_new or phase.is_over:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_json(self._path, self.seconds)
        self._on_phase(phase)


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
