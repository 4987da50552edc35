"""The program that renders chat templates for `templates`, under limits that the operating system enforces.

It runs as a script and imports nothing from this package. A request is `REQUEST` (two lengths, and a limit in seconds),
followed by the arguments that many renderings share and by the messages, both as JSON. An answer is `ANSWER` (kind,
length, and CPU seconds used), followed by the text.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

if sys.platform != "win32":
    import resource

REQUEST, ANSWER = struct.Struct(">QQd"), struct.Struct(">cQd")
TEXT, REFUSED, TOO_LARGE = b"T", b"R", b"L"
# Memory that a rendering may use in addition to the program's own: a constant, and an amount per byte of the request.
SPARE_BYTES, BYTES_PER_BYTE = 256 * 2**20, 32
# The maximum length of the text: templates repeat and indent their input, and add some text of their own.
SPARE_CHARS, CHARS_PER_BYTE = 2 * 2**20, 8
_MAX_REASON_CHARS = 2000


def main() -> None:
    """Answer requests until stdin is closed."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Answers use a copy of stdout. Output of libraries goes to stderr instead, so that it cannot corrupt an answer.
    os.dup2(2, 1)
    # Imported here, because the parent process imports this module for its constants.
    from transformers.utils.chat_template_utils import render_jinja_template

    start_bytes = _address_space()
    common_text, common = b"", {}
    while header := requests.read(REQUEST.size):
        num_common, num_messages, seconds = REQUEST.unpack(header)
        size = num_common + num_messages
        _limit(start_bytes, size, seconds)
        start_s = time.process_time()
        text = requests.read(num_common)
        # Most requests have the same template and tools as the previous one.
        if text != common_text:
            common_text, common = text, json.loads(text)
        kind, answer = _render(render_jinja_template, common, json.loads(requests.read(num_messages)), size)
        # 0 switches the timer off while the answer is written.
        _limit(start_bytes, size, 0.0)
        _answer(answers, kind, answer, time.process_time() - start_s)


def _render(render: Any, common: dict[str, Any], messages: list[Any], size: int) -> tuple[bytes, bytes]:
    """Return the kind of the answer, and the rendering or the reason why there is none."""
    try:
        try:
            text: str = render([messages], **common)[0][0]
        except MemoryError:
            return TOO_LARGE, b""
        # A template refuses messages by raising, and it can raise anything.
        except Exception as error:
            return REFUSED, f"{type(error).__name__} ({error})"[:_MAX_REASON_CHARS].encode("utf-8", "surrogatepass")
        if len(text) > SPARE_CHARS + CHARS_PER_BYTE * size:
            return TOO_LARGE, b""
        return TEXT, text.encode("utf-8", "surrogatepass")
    # Memory may also run out while the reason is formatted or the text encoded.
    except MemoryError:
        return TOO_LARGE, b""


def _answer(answers: BinaryIO, kind: bytes, answer: bytes, seconds: float) -> None:
    answers.write(ANSWER.pack(kind, len(answer), seconds))
    answers.write(answer)
    answers.flush()


def _limit(start_bytes: int, size: int, seconds: float) -> None:
    """Limit the memory and CPU time of one rendering; 0 seconds means no time limit.

    Above the memory limit Python raises MemoryError; at the time limit SIGPROF ends the process.
    """
    # Windows has neither call.
    if sys.platform == "win32":
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if start_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit_bytes = start_bytes + SPARE_BYTES + BYTES_PER_BYTE * size
        resource.setrlimit(
            resource.RLIMIT_AS, (limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard), hard)
        )


def _address_space() -> int:
    """Return the virtual memory size of this process in bytes; 0 if unknown, in which case no limit is set."""
    # The first number of Linux's statm is the virtual memory in pages, which is what RLIMIT_AS limits.
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (pathlib is not needed here)
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
