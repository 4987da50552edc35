"""Report the progress of the work that precedes the first training step, and what an interrupt of it would lose.

This work (warm-up, hint check, reference log-probs) can take minutes.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The progress of one kind of work: `done` of `total` items are finished.

    `stored_in` is the path where the results are stored, or None if they are not stored.
    """

    name: str
    done: int
    total: int
    items: str
    stored_in: Path | None = None

    @property
    def is_over(self) -> bool:
        return self.done >= self.total

    def interrupt_message(self) -> str:
        """Return a message that says which results are kept if the work is interrupted now."""
        progress = f"interrupted during the {self.name}, after {self.done:,} of {self.total:,} {self.items}"
        if self.stored_in is None:
            return f"{progress}. No results are stored; the next run starts over."
        return f"{progress}; results are in {self.stored_in}. Run the same command to continue."


OnPhase = Callable[[Phase], None]
Say = Callable[[str], None]
OnLog = Callable[[int, int, Mapping[str, Any]], None]
_log = logging.getLogger(__name__)
# A context variable rather than an argument, because the work is many calls below the command that shows its progress.
_listener: ContextVar[OnPhase | None] = ContextVar("phase_listener", default=None)


@dataclass(frozen=True)
class TrainingCallbacks:
    """Callbacks for a training run's progress.

    `say` is called with each message, and `on_phase` with the progress of the work before the first step. `on_step` is
    called after every step with (step, total steps), and `on_log` for every line of metrics with (step, total steps,
    metrics).
    """

    say: Say = field(default_factory=lambda: _log.info)
    on_step: Callable[[int, int], None] = field(default_factory=lambda: lambda _step, _total: None)
    on_log: OnLog = field(default_factory=lambda: lambda _step, _total, _figures: None)
    on_phase: OnPhase = field(default_factory=lambda: lambda _phase: None)


def report_phase(phase: Phase) -> None:
    """Pass a phase to the callback registered by `reporting_phases`, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(phase)


class PhaseTimes:
    """A callback that forwards phases, and adds up the seconds of each phase over all runs of a training in a file.

    Each phase is written to the file as soon as it begins, so that it is recorded even if the process is killed early.
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
        # Write only at the start and the end of a phase, because every item reports its phase.
        if is_new or phase.is_over:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_json(self._path, self.seconds)
        self._on_phase(phase)


@contextmanager
def reporting_phases(on_phase: OnPhase, say: Say) -> Generator[None]:
    """Pass reported phases to `on_phase` inside the block.

    After an interrupt (Ctrl-C or SIGTERM), `say` is called with a message about which results are stored.
    """
    latest: list[Phase] = []

    def on_report(phase: Phase) -> None:
        latest[:] = [phase]
        on_phase(phase)

    token = _listener.set(on_report)
    try:
        with _sigterm_as_ctrl_c():
            yield
    except KeyboardInterrupt:
        if latest and not latest[0].is_over:
            say(latest[0].interrupt_message())
        raise
    finally:
        _listener.reset(token)


@contextmanager
def _sigterm_as_ctrl_c() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    # None: a handler that was not installed from Python and so cannot be restored.
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
