"""What services say: in time or not at all, and as text that a terminal does not act upon."""

from __future__ import annotations

import queue
import re
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from composer_replication.diloco.serverless.replica_process import REFUSED, TIMED_OUT
from composer_replication.errors import RunError, explain

Answer = TypeVar("Answer")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST_WORDS, _MOST_WORDS_OF_AN_ERROR = 300, 600
_MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")  # before the name of an error
_TRACEBACK = "Traceback (most recent call last):"


def within(seconds: float, what: str, ask: Callable[[], Answer]) -> Answer:
    """What `ask` returns or raises; RunError where it says nothing for so long.

    Clients of services may wait for ever (huggingface_hub's has no time limit). The question is left to its thread,
    which ends with this process; whatever it asked for may have happened.
    """
    answers: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def asking() -> None:
        answers.put(tried(ask))

    threading.Thread(target=asking, name="crf-asks", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise RunError(explain(what, got=f"no answer within {seconds:g} s", expected="one")) from None
    if error is not None:
        raise error
    return answer  # pyright: ignore[reportReturnType] (None only where `ask` returns it)


def tried(ask: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    """What `ask` returns, or the error it raises: those of services' clients have no class in common."""
    try:
        return ask(), None
    except Exception as error:
        return None, error


def harmless(text: str) -> str:
    """Lines of a log without what a terminal would act upon: a replica prints what it was sent, too."""
    plain_text = _COLOUR.sub("", text)
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in plain_text
    )


def in_brief(error: BaseException) -> str:
    """An error of somebody else's in one line."""
    lines = str(error).strip().splitlines()
    return harmless(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)[:_MOST_WORDS]


def how_it_ended(code: int | None) -> str:
    """An exit status in words; 128 + n is what shells and containers make of signal n."""
    if code is None:
        return "failed, with no exit status from the service"
    number = -code if code < 0 else code - 128
    if number in {known_signal.value for known_signal in signal.Signals}:
        name = signal.Signals(number).name
        return f"killed by signal {number} ({name})" + (", by hand or out of memory" if name == "SIGKILL" else "")
    if code == REFUSED:
        return f"refused (exit status {code})"
    return "out of time" if code == TIMED_OUT else f"exit status {code}"


def about_failure(code: int | None, log: str) -> str:
    """How a replica ended, and what it said last: the error of its last traceback, and its last line as no more than
    that, since one that was killed did not know it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    parts = [how_it_ended(code)]
    error = _error_in(log) if code in (None, 1, REFUSED) else None
    if error is not None:
        parts.append(_MODULES.sub("", error)[:_MOST_WORDS_OF_AN_ERROR])
    if lines and lines[-1] != error:
        parts.append(f"its last line: {lines[-1][:_MOST_WORDS]}")
    return "; ".join(parts)


def _error_in(log: str) -> str | None:
    """What the last traceback ends with; its message may have more lines."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    after = lines[starts[-1] + 1 :] if starts else []
    return next((line.strip() for line in after if line.strip() and not line[0].isspace()), None)
