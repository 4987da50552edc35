"""The program that renders chat templates for `template_process`, under limits that the system enforces.

It is run as a file, and loads nothing of this package. A request is three numbers (`REQUEST`), then what is common to
renderings and the messages, both as JSON; an answer is its kind, its length and the seconds it took (`ANSWER`).
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
# What a rendering may need beyond what the program has when it begins, and for each byte of the request.
SPARE_BYTES, BYTES_PER_BYTE = 256 * 2**20, 32
# How long the text may be. Templates repeat and indent what they are given, and add some text of their own.
SPARE_CHARS, CHARS_PER_BYTE = 2 * 2**20, 8
_MAX_REASON = 2000


def main() -> None:
    """Answer requests until whoever asks is gone."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    from transformers.utils.chat_template_utils import render_jinja_template

    start_bytes = _address_space()
    common_text, common = b"", {}
    while header := requests.read(REQUEST.size):
        num_common, num_messages, seconds = REQUEST.unpack(header)
        size = num_common + num_messages
        _limit(start_bytes, size, seconds)
        began = time.process_time()
        text = requests.read(num_common)
        if text != common_text:
            common_text, common = text, json.loads(text)
        kind, answer = _render(render_jinja_template, common, json.loads(requests.read(num_messages)), size)
        _limit(start_bytes, size, 0.0)
        _answer(answers, kind, answer, time.process_time() - began)


def _render(render: Any, common: dict[str, Any], messages: list[Any], size: int) -> tuple[bytes, bytes]:
    try:
        try:
            text: str = render([messages], **common)[0][0]
        except MemoryError:
            return TOO_LARGE, b""
        except Exception as error:  # whatever a template raises is its refusal
            return REFUSED, f"{type(error).__name__} ({error})"[:_MAX_REASON].encode("utf-8", "surrogatepass")
        if len(text) > SPARE_CHARS + CHARS_PER_BYTE * size:
            return TOO_LARGE, b""
        return TEXT, text.encode("utf-8", "surrogatepass")
    except MemoryError:  # of a reason, or of the bytes of the text
        return TOO_LARGE, b""


def _answer(answers: BinaryIO, kind: bytes, answer: bytes, seconds: float) -> None:
    answers.write(ANSWER.pack(kind, len(answer), seconds))
    answers.write(answer)
    answers.flush()


def _limit(start_bytes: int, size: int, seconds: float) -> None:
    """Let one rendering have so much memory and processor time, 0 for any; beyond it the system ends the process."""
    if sys.platform == "win32":
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if start_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = start_bytes + SPARE_BYTES + BYTES_PER_BYTE * size
        resource.setrlimit(
            resource.RLIMIT_AS, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard)
        )


def _address_space() -> int:
    """Return the size of this process in bytes; 0 where the system does not say, and would not limit it either."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (pathlib is not needed here)
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
