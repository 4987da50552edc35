"""What the smaller formats share: turns collected in order, calls parsed, and the outline of a JSON file's head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any, cast

import orjson

from composer_replication.ingestion.reading.json_text import as_utf8
from composer_replication.ingestion.reading.source import (
    MAX_COUNT,
    TOO_DEEP,
    IngestReport,
    Record,
    as_text,
    check_depth,
)
from composer_replication.types import Provenance, ToolCall, ToolResult, Turn, Usage

ORPHAN = "tool result without its call"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]:,"]', re.DOTALL)
_MAX_OUTLINE_DEPTH = 4
_SUFFIXES = (".json", ".jsonl", ".traj", ".eval")


class TurnList:
    """Turns of one conversation: ids made unique, results of one assistant turn in one turn, orphans counted."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self.turns: list[Turn] = []
        self._file, self._report = file, report
        self._ids: set[str] = set()
        self._caller_of: dict[str, int] = {}
        self._answered: set[str] = set()

    def add(self, turn: Turn) -> Turn:
        turn = replace(turn, id=unique(turn.id, self._ids))
        for call in turn.calls:
            self._caller_of[call.id] = len(self.turns)
            self._answered.discard(call.id)
        for result in turn.results:
            self._see(result, turn.provenance.lines[0])
        self.turns.append(turn)
        return turn

    def add_calls(self, index: int, calls: tuple[ToolCall, ...]) -> None:
        """More calls of an assistant turn whose records are spread over the file."""
        self.turns[index] = replace(self.turns[index], calls=self.turns[index].calls + calls)
        self._caller_of.update({call.id: index for call in calls})

    def add_result(
        self,
        result: ToolResult,
        *,
        id: str,
        line: int,
        timestamp: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        caller, last = self._caller_of.get(result.call_id), self.turns[-1] if self.turns else None
        if caller is not None and last is not None and last.results and self._caller(last) == caller:
            self._see(result, line)
            lines = last.provenance.lines
            where = replace(last.provenance, lines=lines if line in lines else (*lines, line))
            merged = with_images(last.extra, extra or {})
            self.turns[-1] = replace(last, results=(*last.results, result), provenance=where, extra=merged)
            return
        where = Provenance(file=self._file, lines=(line,))
        self.add(
            Turn(
                id=id,
                role="tool",
                origin="tool",
                results=(result,),
                timestamp=timestamp,
                provenance=where,
                extra=extra or {},
            )
        )

    def open_calls(self) -> list[str]:
        """Ids of the last assistant turn's calls that nothing has answered yet."""
        last = next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)
        return [] if last is None else [call.id for call in last.calls if call.id not in self._answered]

    def _caller(self, turn: Turn) -> int | None:
        return self._caller_of.get(turn.results[0].call_id)

    def _see(self, result: ToolResult, line: int) -> None:
        self._answered.add(result.call_id)
        if result.call_id not in self._caller_of:
            self._report.skip(ORPHAN, self._file, line)


def with_images(before: Mapping[str, Any], more: Mapping[str, Any]) -> Record:
    """Both extras of a turn that grows; images add up."""
    images = before.get("images", 0) + more.get("images", 0)
    return {**before, **more, **({"images": images} if images else {})}


def unique(id: str, taken: set[str]) -> str:
    """The id, with a number behind it if it is taken; the answer is taken from then on."""
    free, number = id, 2
    while free in taken:
        free, number = f"{id}#{number}", number + 1
    taken.add(free)
    return free


def parse_call(id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call with its arguments as a dict; what is no JSON object stays as text in `raw_arguments`.

    Text nested beyond reason stays text too; objects nested so raise RecursionError, for the caller to count.
    """
    given = arguments
    if isinstance(given, str):
        try:
            given = orjson.loads(given) if given.strip() else {}
            check_depth(given)
        except (orjson.JSONDecodeError, RecursionError):
            given = None
    else:
        check_depth(given)
    is_object = isinstance(given, dict) or arguments is None
    return ToolCall(
        id="" if id is None else as_text(id),
        name="" if name is None else as_text(name),
        arguments=cast("Record", given) if isinstance(given, dict) else {},
        raw_arguments=None if is_object else arguments if isinstance(arguments, str) else as_text(arguments),
    )


def openai_calls(message: Record, file: str, line: int, report: IngestReport) -> tuple[ToolCall, ...]:
    """The `tool_calls` of a message in the OpenAI shape; a broken one is counted and costs no other."""
    calls: list[ToolCall] = []
    for index, entry in enumerate(as_list(message.get("tool_calls"))):
        function = entry.get("function") if isinstance(entry, dict) else None
        if isinstance(function, str):  # Inspect's flat shape
            function = {"name": function, "arguments": entry.get("arguments")}
        if not isinstance(function, dict):
            report.skip("broken tool call", file, line)
            continue
        id = entry.get("id")
        calls.append(parse_call(id or f"call-{line}-{index}", function.get("name"), function.get("arguments")))
    return tuple(calls)


def openai_usage(given: Any) -> Usage | None:
    """Usage in the OpenAI shape, where the prompt's count holds the cached tokens too; ours are disjoint."""
    if not isinstance(given, dict):
        return None
    details = given.get("prompt_tokens_details")
    cached = count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    return Usage(
        input_tokens=max(count(given.get("prompt_tokens")) - cached, 0),
        output_tokens=count(given.get("completion_tokens")),
        cache_read_tokens=cached,
    )


def count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else 0


def kept_fields(fields: Mapping[str, Any], file: str, line: int, report: IngestReport) -> Record:
    """Fields to keep beside a turn or conversation, without those nested beyond reason and without a forged agent."""
    kept: Record = {}
    for key, value in fields.items():
        try:
            check_depth(value)
        except RecursionError:
            report.skip(TOO_DEEP, file, line)
            continue
        # Sub-agents are looked up by it.
        if key == "agent_id" and isinstance(value, dict | list):
            report.skip("broken agent_id", file, line)
        else:
            kept[key] = value
    return kept


def as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def as_record(value: Any) -> Record:
    return cast("Record", value) if isinstance(value, dict) else {}


def as_string(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def stem(name: str) -> str:
    """The file's name without folders and without the endings of session files."""
    base = PurePath(name).name
    while (path := PurePath(base)).suffix in _SUFFIXES and path.stem:
        base = path.stem
    return base


@lru_cache(maxsize=2)
def outline(head: bytes) -> frozenset[str]:
    """Where the keys of a JSON text stand, as in `history[].role`, read from its beginning even if it is cut off."""
    paths: set[str] = set()
    stack: list[str] = []  # the path of every open container
    key, text = "", b""
    for match in _TOKEN.finditer(as_utf8(head)):
        token = match.group()
        if token == b'"':  # a string that the end of the head cuts off
            break
        if token in (b"{", b"["):
            base = stack[-1] if stack else ""
            here = f"{base}.{key}" if key and base else key or base
            # Below the depth that is looked at, paths would only grow longer with every bracket.
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
