"""With which tools teachers were asked about a session, so that what was paid for once is found again.

A request holds the tools of the session's agent, and these are inferred from all its sessions: one more session may
add a tool, or see an argument first that came second before. The answers to the others' requests would then be found
no more, and paid for anew. So a session is asked about with the tools of its first time, as long as it calls no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, cast

from composer_replication.canonical_json import decode, encode_as_written
from composer_replication.runs.directory import RunDir
from composer_replication.runs.journal import Journal
from composer_replication.types import Conversation

_NAME = "asked_tools"
Tool = dict[str, Any]


class AskedTools:
    """Those of a run; `keep` adds to them."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._lists: dict[str, list[Tool]] = {}
        self._digest_of: dict[str, str] = {}
        for row in _rows(run):
            digest, text = str(row["digest"]), row["tools"]
            if isinstance(text, str):
                self._lists[digest] = cast("list[Tool]", decode(text.encode()))
            self._digest_of[str(row["conversation_id"])] = digest

    def of(self, conversation: Conversation, current: list[Tool]) -> list[Tool]:
        """The tools to ask about a session with: those of the first time, or the current ones."""
        first_tools = self._lists.get(self._digest_of.get(conversation.id, ""))
        if first_tools is None:
            return current
        called = {call.name for turn in conversation.turns for call in turn.calls}
        return first_tools if called & _names(current) <= _names(first_tools) else current

    def keep(self, conversation_id: str, tools: list[Tool]) -> None:
        """Write down what a session is asked about with, before it is."""
        text = encode_as_written(tools, where="tools").decode()
        digest = sha256(text.encode()).hexdigest()
        if self._digest_of.get(conversation_id) == digest:
            return
        is_new = digest not in self._lists
        with self._run.append_jsonl(_NAME) as journal:
            journal.append({"conversation_id": conversation_id, "digest": digest, "tools": text if is_new else None})
        self._lists[digest], self._digest_of[conversation_id] = tools, digest


def forget_asked(run: RunDir, gone: Iterable[str]) -> None:
    """Take sessions out, and the tools that no other was asked about with."""
    gone, rows = set(gone), _rows(run)
    texts = {row["digest"]: row["tools"] for row in rows if row["tools"] is not None}
    last = {row["conversation_id"]: row["digest"] for row in rows if row["conversation_id"] not in gone}
    path = run.path(_NAME)
    if not last:
        path.unlink(missing_ok=True)
        return
    # Beside it and then over it: a crash between the two must not cost the answers of those who stay.
    beside = path.with_name(f".{path.name}.tmp")
    beside.unlink(missing_ok=True)
    with Journal(beside) as journal:
        for name, digest in last.items():
            journal.append({"conversation_id": name, "digest": digest, "tools": texts.pop(digest, None)})
    beside.replace(path)


def _rows(run: RunDir) -> list[dict[str, object]]:
    return run.read_journal(_NAME).rows if run.path(_NAME).exists() else []


def _names(tools: Iterable[Tool]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}
