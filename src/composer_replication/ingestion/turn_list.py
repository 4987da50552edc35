"""Helpers for the format modules: collect turns in order, read messages and calls, and outline the head of a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any, cast

from composer_replication.errors import InputError
from composer_replication.ingestion.source_files import (
    MAX_COUNT,
    TOO_DEEP,
    IngestReport,
    Record,
    as_text,
    as_utf8,
    check_depth,
    image_count,
)
from composer_replication.messages import THINKING_KEYS, tool_call, written_calls
from composer_replication.types import Conversation, Origin, Provenance, Role, ToolCall, ToolResult, Turn, Usage

# Reasons for skipping something, which sidecars store.
ORPHAN = "tool result without its call"
NO_OBJECT = "message is no object"
NO_CALL = "tool call of unknown shape"
# A whole string or one character of structure: b'"a"', b'{', b':'; of b'"cut off' only the quote.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]:,"]', re.DOTALL)
# Deeper keys are not needed to recognize any format.
_MAX_OUTLINE_DEPTH = 4
# File endings of session logs, which may be combined: "run.traj.json".
_SUFFIXES = (".json", ".jsonl", ".traj", ".eval")
# "developer" is OpenAI's newer name for "system".
_ROLE_AND_ORIGIN: dict[Any, tuple[Role, Origin]] = {
    "system": ("system", "meta"),
    "developer": ("system", "meta"),
    "user": ("user", "human"),
    "assistant": ("assistant", "model"),
}


class TurnList:
    """The turns of one conversation, collected in order.

    Ids are made unique, the results for one assistant turn are collected in one turn, and results without a call are
    counted.
    """

    def __init__(self, file: str, report: IngestReport) -> None:
        self.turns: list[Turn] = []
        self.report = report
        self._file = file
        self._ids: set[str] = set()
        self._turn_of_call: dict[str, int] = {}
        self._answered_call_ids: set[str] = set()

    def skip(self, reason: str, line: int) -> None:
        self.report.skip(reason, self._file, line)

    def storable_fields(self, fields: Mapping[str, Any], line: int = 0) -> Record:
        return storable_fields(fields, self._file, line, self.report)

    def for_each_object(self, entries: Iterable[Any], add: Callable[[Record, int], object]) -> None:
        """Call `add` with every object in a list and its position. Invalid or too deeply nested entries are counted."""
        for position, entry in enumerate(entries, start=1):
            if not isinstance(entry, dict):
                self.skip(NO_OBJECT, position)
                continue
            try:
                add(cast("Record", entry), position)
            except RecursionError:
                self.skip(TOO_DEEP, position)

    def conversation(self, id: str, format: str, **fields: Any) -> Iterator[Conversation]:
        """Yield the conversation, if it has any turns."""
        if self.turns:
            yield Conversation(id=id, format=format, turns=tuple(self.turns), **fields)

    def add(self, turn: Turn) -> Turn:
        """Add a turn, with a new id if its id is already in use, and return the added turn."""
        turn = replace(turn, id=make_unique(turn.id, self._ids))
        for call in turn.calls:
            self._turn_of_call[call.id] = len(self.turns)
            # Some agents reuse the same call ids in every turn.
            self._answered_call_ids.discard(call.id)
        for result in turn.results:
            self._record_answer(result, turn.provenance.lines[0])
        self.turns.append(turn)
        return turn

    def add_turn(self, id: str, role: Role, origin: Origin, line: int, text: str = "", **fields: Any) -> Turn:
        """Add a turn that was read from a single line."""
        where = Provenance(file=self._file, lines=(line,))
        return self.add(Turn(id=id, role=role, origin=origin, text=text, provenance=where, **fields))

    def add_message(self, message: Record, id: str, line: int, **overrides: Any) -> bool:
        """Add a system, user or assistant message in the OpenAI format; `overrides` replace fields of the turn.

        Returns False without adding anything for a message with another role.
        """
        writer = as_string(message.get("role"))
        if writer not in _ROLE_AND_ORIGIN:
            return False
        (role, origin), content = _ROLE_AND_ORIGIN[writer], message.get("content")
        fields: Record = {"origin": origin, "extra": image_count(content)}
        if "text" not in overrides:
            fields["text"] = as_text(content)
        if role == "assistant":
            # The first key with a nonempty text counts.
            thoughts = (as_text(message.get(key)) for key in THINKING_KEYS)
            fields |= {"thinking": next((text for text in thoughts if text), "")}
            fields |= {} if "calls" in overrides else {"calls": self.read_calls(message, line)}
        self.add_turn(id, role, line=line, **fields | overrides)
        return True

    def read_calls(self, message: Record, line: int, new_id: str = "") -> tuple[ToolCall, ...]:
        """Return the calls in a message in the OpenAI format. Invalid calls are counted and skipped."""
        calls: list[ToolCall] = []
        for number, written in enumerate(written_calls(message)):
            if written.name is None and written.arguments is None:
                self.skip(NO_CALL, line)
                continue
            generated_id = f"{new_id or f'call-{line}-'}{number}"
            calls.append(make_call(written.id or generated_id, written.name, written.arguments))
        # `written_calls` skips null, which means "no call" in tables. In a log it means that a call was lost.
        for _ in range(as_list(message.get("tool_calls")).count(None)):
            self.skip(NO_CALL, line)
        return tuple(calls)

    def add_calls(self, index: int, calls: tuple[ToolCall, ...]) -> None:
        """Add calls to an assistant turn whose records are spread over the file."""
        self.turns[index] = replace(self.turns[index], calls=self.turns[index].calls + calls)
        self._turn_of_call.update({call.id: index for call in calls})

    def extend_last(self, line: int, *, id: str | None = None, **fields: Any) -> None:
        """Extend the last turn with fields from another line, and replace its id if one is passed."""
        last = self.turns[-1]
        lines = last.provenance.lines if line in last.provenance.lines else (*last.provenance.lines, line)
        name = last.id if id is None else make_unique(id, self._ids)
        self.turns[-1] = replace(last, id=name, provenance=Provenance(file=self._file, lines=lines), **fields)

    def add_result(
        self,
        call_id: str,
        text: str,
        is_error: bool | None,
        *,
        id: str,
        line: int,
        origin: Origin = "tool",
        **more: Any,
    ) -> None:
        """Add the result of a call to the turn with the other results for the same assistant turn, or as a new turn."""
        result = ToolResult(call_id=call_id, text=text, is_error=is_error)
        caller, last = self._turn_of_call.get(call_id), self.turns[-1] if self.turns else None
        # A result joins the last turn if that turn holds results for the same assistant turn.
        of_last = self._turn_of_call.get(last.results[0].call_id) if last is not None and last.results else None
        if last is not None and caller is not None and of_last == caller:
            self._record_answer(result, line)
            self.extend_last(
                line, results=(*last.results, result), extra=_merge_extra(last.extra, more.get("extra", {}))
            )
            return
        self.add_turn(id, "tool", origin, line, results=(result,), **more)

    def unanswered_calls(self) -> list[ToolCall]:
        """Return the calls of the last assistant turn that have no result yet."""
        last = next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)
        return [] if last is None else [call for call in last.calls if call.id not in self._answered_call_ids]

    def _record_answer(self, result: ToolResult, line: int) -> None:
        self._answered_call_ids.add(result.call_id)
        if result.call_id not in self._turn_of_call:
            self.skip(ORPHAN, line)


def _merge_extra(before: Mapping[str, Any], more: Mapping[str, Any]) -> Record:
    """Merge the `extra` fields of a turn and an extension of it, adding up their numbers of images."""
    images = before.get("images", 0) + more.get("images", 0)
    return {**before, **more, **({"images": images} if images else {})}


def make_unique(id: str, used_ids: set[str]) -> str:
    """Return the id, with a number appended if it is in use, and add it to the used ids."""
    unused_id, number = id, 2
    while unused_id in used_ids:
        unused_id, number = f"{id}#{number}", number + 1
    used_ids.add(unused_id)
    return unused_id


def make_call(id: Any, name: Any, arguments: Any) -> ToolCall:
    """Return a call for any id and name in a log. Raises RecursionError for arguments nested too deeply."""
    try:
        return tool_call("" if id is None else as_text(id), "" if name is None else as_text(name), arguments)
    except InputError as error:
        raise RecursionError(TOO_DEEP) from error


def read_usage(
    fields: Any, input: str, output: str, cached: str, created: str = "", *, is_disjoint: bool = False
) -> Usage | None:
    """Return the token counts in `fields`, given the format's names for them, or None if there are none.

    `a.b` is the key `b` within `a`; `a b` means the sum of two keys. `Usage` counts cached tokens separately
    (`is_disjoint`), while most formats include them in the prompt tokens.
    """
    if not isinstance(fields, dict):
        return None
    total, read, written = (valid_count(_value_at(fields, path)) for path in (input, cached, created))
    return Usage(
        input_tokens=total if is_disjoint else max(total - read - written, 0),
        output_tokens=sum(valid_count(_value_at(fields, path)) for path in output.split()),
        cache_read_tokens=read,
        cache_creation_tokens=written,
    )


def _value_at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = as_record(value).get(key)
    return value


def read_openai_usage(fields: Any) -> Usage | None:
    """Return the token counts of an OpenAI response, or None if it has none."""
    return read_usage(fields, "prompt_tokens", "completion_tokens", "prompt_tokens_details.cached_tokens")


def valid_count(value: Any) -> int:
    """Return a token count, or 0 for an invalid value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else 0


def storable_fields(fields: Mapping[str, Any], file: str, line: int, report: IngestReport) -> Record:
    """Return the fields of a log that can be stored with a turn or conversation.

    Values nested too deeply and an `agent_id` that is not a plain value are skipped and counted.
    """
    record: Record = {}
    for key, value in fields.items():
        try:
            check_depth(value)
        except RecursionError:
            report.skip(TOO_DEEP, file, line)
            continue
        # `agent_id` is a dict key for finding subagents, so it must be hashable.
        if key == "agent_id" and isinstance(value, dict | list):
            report.skip("broken agent_id", file, line)
        else:
            record[key] = value
    return record


def as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def as_record(value: Any) -> Record:
    return cast("Record", value) if isinstance(value, dict) else {}


def as_string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def session_name(name: str) -> str:
    """Return the file name without its folder and without the endings of session logs."""
    base = PurePath(name).name
    while (path := PurePath(base)).suffix in _SUFFIXES and path.stem:
        base = path.stem
    return base


@lru_cache(maxsize=2)
def key_paths(head: bytes) -> frozenset[str]:
    """Return the paths of all keys in a JSON text, such as `history[].role`.

    The text may be truncated.
    """
    paths: set[str] = set()
    stack: list[str] = []  # the path of every open container
    key, text = "", b""
    for match in _TOKEN.finditer(as_utf8(head)):
        token = match.group()
        if token == b'"':  # a truncated string
            break
        if token in (b"{", b"["):
            base = stack[-1] if stack else ""
            here = f"{base}.{key}" if key and base else key or base
            # Beyond the maximum depth, paths would grow with every bracket and use a lot of memory.
            stack.append("" if len(stack) > _MAX_OUTLINE_DEPTH else f"{here}[]" if token == b"[" else here)
            key = ""
        elif token in (b"}", b"]"):
            if stack:
                stack.pop()
            key = ""
        elif token == b":":
            key = text[1:-1].decode("utf-8", "replace")
            if len(stack) <= _MAX_OUTLINE_DEPTH:
                base = stack[-1] if stack else ""
                paths.add(f"{base}.{key}" if base else key)
        elif token == b",":
            key = ""
        else:
            text = token
    return frozenset(paths)
