"""Claude Code records written by hand in the documented shapes."""

from __future__ import annotations

import json
from itertools import count


class Log:
    """Builds a log record by record; every record's parent is the one before it unless said otherwise."""

    def __init__(self, session="s-1", version="2.1.39"):
        self.records, self._session, self._version = [], session, version
        self._numbers = count(1)
        self.last = None

    def add(self, kind, *, parent="previous", uuid=None, **fields):
        uuid = uuid or f"u{next(self._numbers)}"
        parent = self.last if parent == "previous" else parent
        base = {"type": kind, "uuid": uuid, "parentUuid": parent, "isSidechain": False, "sessionId": self._session}
        self.records.append(
            {**base, "cwd": "/repo", "version": self._version, "timestamp": "2026-01-01T00:00:00Z", **fields}
        )
        self.last = uuid
        return uuid

    def user(self, text, **fields):
        return self.add("user", message={"role": "user", "content": text}, **fields)

    def assistant(self, message_id, *blocks, usage=None, **fields):
        message = {"id": message_id, "role": "assistant", "model": "claude-x", "content": list(blocks)}
        if usage:
            message["usage"] = usage
        return self.add("assistant", message=message, **fields)

    def result(self, call_id, text="ok", *, is_error=None, **fields):
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        if is_error is not None:
            block["is_error"] = is_error
        return self.add("user", message={"role": "user", "content": [block]}, **fields)

    def lines(self):
        return b"".join(json.dumps(record).encode() + b"\n" for record in self.records)


def text(content):
    return {"type": "text", "text": content}


def thinking(content):
    return {"type": "thinking", "thinking": content}


def call(call_id, name="Read", **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
