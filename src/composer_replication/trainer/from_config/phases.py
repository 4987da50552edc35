"""What `crf train` does before its first step, told while it is done; a signal in it says what is kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

from composer_replication.sessions.phases import OnPhase, Phase, phases_told_to
from composer_replication.trainer.from_config.parts import Say


@contextmanager
def telling_phases(on_phase: OnPhase, say: Say) -> Generator[None]:
    """Pass phases on. SIGTERM is heard as Ctrl-C is, and either ends the work with a sentence about what is kept."""
    latest: list[Phase] = []

    def hear(phase: Phase) -> None:
        latest[:] = [phase]
        on_phase(phase)

    try:
        with phases_told_to(hear), _sigterm_as_ctrl_c():
            yield
    except KeyboardInterrupt:
        if latest and not latest[0].is_over:
            say(latest[0].when_interrupted())
        raise


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
