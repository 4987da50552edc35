"""Write Claude Code logs of any size for the ingestion benchmark: copies of real fixtures, or synthetic logs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "sessions" / "claude_code" / "projects"
_UUID = re.compile(rb"[0-9a-f]{4}([0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")
_ID = re.compile(rb"\b(msg_|toolu_)")
_WORDS = [f"{stem}{number}" for stem in ("value", "return", "import", "path", "self.") for number in range(40)]


def write_log(path: Path, num_bytes: int, *, first_copy: int = 0) -> str:
    """Write at least `num_bytes` of complete lines, and return a description of them. Copies differ in all ids."""
    real = sorted(FIXTURES.glob("*/*.jsonl")) if FIXTURES.is_dir() else []
    sources = [each.read_bytes().splitlines(keepends=True) for each in real]
    copy, written = first_copy, 0
    with path.open("wb") as out:
        while written < num_bytes:
            lines = _renamed(sources[copy % len(sources)], copy) if sources else _synthetic(copy)
            for line in lines:
                written += out.write(line)
                if written >= num_bytes:
                    break
            copy += 1
    return "copies of real logs" if sources else "synthetic logs"


def _renamed(lines: list[bytes], copy: int) -> Iterator[bytes]:
    """Yield the lines of a real log with new ids, because the reader skips records with a repeated uuid."""
    mark = f"{copy:04x}".encode()
    for line in lines:
        yield _ID.sub(rb"\g<1>" + mark, _UUID.sub(mark + rb"\g<1>", line))


def _synthetic(copy: int, num_steps: int = 150) -> Iterator[bytes]:
    """Yield the records up to a compaction. As in real logs, a call has four progress records and a result of 7 kB."""
    rng = random.Random(copy)
    session = _Session(copy)
    if copy:
        yield session.line("system", parentUuid=None, subtype="compact_boundary", logicalParentUuid=None)
    yield session.line("user", message={"role": "user", "content": _text(rng, 400)}, isCompactSummary=copy > 0)
    for step in range(num_steps):
        name, call = f"msg_{copy:04x}{step:06x}", f"toolu_{copy:04x}{step:06x}"
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": _text(rng, 300), "signature": "c2ln" * 60},
            {"type": "text", "text": _text(rng, 200)},
            {
                "type": "tool_use",
                "id": call,
                "name": "Read",
                "input": {"file_path": "/repo/a.py", "text": _text(rng, 500)},
            },
        ]
        for block in blocks[step % 2 :]:
            yield session.line("assistant", message=_message(name, block))
        for _ in range(4):
            yield session.line("progress", data={"type": "hook_progress", "command": _text(rng, 450)})
        output = _text(rng, rng.randrange(500, 6000))
        result = {"type": "tool_result", "tool_use_id": call, "content": output}
        details = {"file": {"filePath": "/repo/a.py", "content": output}}
        yield session.line("user", message={"role": "user", "content": [result]}, toolUseResult=details)


class _Session:
    """Builds records, each with the previous one as its parent."""

    def __init__(self, copy: int) -> None:
        self._copy, self._number, self._last = copy, 0, None

    def line(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        uuid = f"{self._copy:04x}{self._number:04x}-0000-4000-8000-000000000000"
        record = {"parentUuid": self._last, "isSidechain": False, "userType": "external", "cwd": "/home/USER/repo"}
        record |= {"sessionId": "0f" * 16, "version": "2.1.39", "gitBranch": "main", "type": kind, "uuid": uuid}
        self._last = uuid
        return json.dumps(record | {"timestamp": "2026-01-01T00:00:00.000Z"} | fields).encode() + b"\n"


def _message(name: str, block: dict[str, Any]) -> dict[str, Any]:
    usage = {
        "input_tokens": 9,
        "cache_creation_input_tokens": 900,
        "cache_read_input_tokens": 90000,
        "output_tokens": 7,
    }
    return {"id": name, "type": "message", "role": "assistant", "model": "claude-x", "content": [block], "usage": usage}


def _text(rng: random.Random, length: int) -> str:
    """Return text like code with short words, quotes and newlines, so that escapes are as frequent as in real logs."""
    words = rng.choices(_WORDS, k=length // 8 + 1)
    return "\n".join(" ".join(words[at : at + 8]) + ' "x"' for at in range(0, len(words), 8))[:length]
