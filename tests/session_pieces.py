"""Conversations made of calls and what came back, for the tests of sites and hints."""

from __future__ import annotations

import re

from composer_replication.types import Conversation, Link, Provenance, ToolCall, ToolResult, Turn

HERE = Provenance(file="s.jsonl", lines=(1,))


def quoted(text):
    """What a hint's text has in backticks, in its order: the names that it states, whatever its words are."""
    return re.findall(r"`([^`]*)`", text)


class Session:
    """Builds a conversation turn by turn; every call gets an assistant turn of its own unless said otherwise."""

    def __init__(self, identity="s", format="claude_code", parent=None):
        self._turns, self._identity, self._format, self._parent = [], identity, format, parent

    def user(self, text, **fields):
        return self._add(role="user", origin="human", text=text, **fields)

    def says(self, text, **fields):
        return self._add(role="assistant", origin="model", text=text, **fields)

    def call(self, tool, text, *, is_error=None, origin="model", raw=None, words="", **arguments):
        """One call and its result, after a few words; returns the id of the call."""
        (identity,) = self.calls([(tool, arguments, text, is_error, raw)], origin=origin, words=words)
        return identity

    def calls(self, several, *, origin="model", words=""):
        """Several calls of one turn, and their results in one turn after it."""
        ids = [f"c{len(self._turns)}-{number}" for number in range(len(several))]
        made = tuple(
            ToolCall(id=identity, name=tool, arguments=arguments, raw_arguments=raw)
            for identity, (tool, arguments, _, _, raw) in zip(ids, several, strict=True)
        )
        self._add(role="assistant", origin=origin, text=words, calls=made)
        results = tuple(
            ToolResult(call_id=identity, text=text, is_error=flag)
            for identity, (_, _, text, flag, _) in zip(ids, several, strict=True)
            if text is not None
        )
        if results:
            self._add(role="tool", origin="tool", results=results)
        return ids

    def add(self, turn):
        self._turns.append(turn)

    def conversation(self):
        return Conversation(id=self._identity, format=self._format, turns=tuple(self._turns), parent=self._parent)

    def _add(self, **fields):
        self._turns.append(Turn(id=f"t{len(self._turns)}", provenance=HERE, **fields))
        return self


def branch():
    return Link(kind="branch", conversation_id="other", turn_id="t0")
