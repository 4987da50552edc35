"""What the formats share: turns collected in order, messages and calls read, and the outline of a JSON file's head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any, cast

from composer_replication.errors import InputError
from composer_replication.ingestion.source import (
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
from composer_replication.types import (
    Conversation,
    Origin,
    Provenance,
    Role,
    ToolCall,
    ToolResult,
    Turn,
    Usage,
)

ORPHAN = "tool result without its call"
NO_OBJECT = "message is no object"
NO_CALL = "tool call of unknown shape"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]:,"]', re.DOTALL)
_MAX_OUTLINE_DEPTH = 4
_SUFFIXES = (".json", ".jsonl", ".traj", ".eval")
_WRITERS: dict[Any, tuple[Role, Origin]] = {
    "system": ("system", "meta"),
    "developer": ("system", "meta"),
    "user": ("user", "human"),
    "assistant": ("assistant", "model"),
}


class TurnList:
    """Turns of one conversation: ids made unique, results of one assistant turn in one turn, orphans counted."""

    def __init__(self, file: str, report: IngestReport) -> None:
        self.turns: list[Turn] = []
        self.report = report
        self._file = file
        self._ids: set[str] = set()
        self._caller_of: dict[str, int] = {}
        self._answered: set[str] = set()

    def skip(self, reason: str, line: int) -> None:
        self.report.skip(reason, self._file, line)

    def kept(self, fields: Mapping[str, Any], line: int = 0) -> Record:
        return kept_fields(fields, self._file, line, self.report)

    def each(self, items: Iterable[Any], add: Callable[[Record, int], object]) -> None:
        """`add` with each object of a list and its position; what is none, or nested too deeply, is counted."""
        for position, item in enumerate(items, start=1):
            if not isinstance(item, dict):
                self.skip(NO_OBJECT, position)
                continue
            try:
                add(cast("Record", item), position)
            except RecursionError:
                self.skip(TOO_DEEP, position)

    def conversation(self, id: str, format: str, **fields: Any) -> Iterator[Conversation]:
        """The conversation, if there is a turn in it."""
        if self.turns:
            yield Conversation(id=id, format=format, turns=tuple(self.turns), **fields)

    def add(self, turn: Turn) -> Turn:
        turn = replace(turn, id=unique(turn.id, self._ids))
        for call in turn.calls:
            self._caller_of[call.id] = len(self.turns)
            self._answered.discard(call.id)
        for result in turn.results:
            self._see(result, turn.provenance.lines[0])
        self.turns.append(turn)
        return turn

    def say(self, id: str, role: Role, origin: Origin, line: int, text: str = "", **fields: Any) -> Turn:
        """A turn that stands in one line."""
        where = Provenance(file=self._file, lines=(line,))
        return self.add(Turn(id=id, role=role, origin=origin, text=text, provenance=where, **fields))

    def add_message(self, message: Record, id: str, line: int, **given: Any) -> bool:
        """A system's, user's or assistant's message in the OpenAI shape; `given` goes before what it says.

        False where it is another's.
        """
        writer = as_string(message.get("role"))
        if writer not in _WRITERS:
            return False
        (role, origin), content = _WRITERS[writer], message.get("content")
        fields: Record = {"origin": origin, "extra": image_count(content)}
        if "text" not in given:
            fields["text"] = as_text(content)
        if role == "assistant":
            thoughts = (as_text(message.get(key)) for key in THINKING_KEYS)
            fields |= {"thinking": next((text for text in thoughts if text), "")}
            fields |= {} if "calls" in given else {"calls": self.calls(message, line)}
        self.say(id, role, line=line, **fields | given)
        return True

    def calls(self, message: Record, line: int, new_id: str = "") -> tuple[ToolCall, ...]:
        """The calls of a message in the OpenAI shape; a broken one is counted and costs no other."""
        calls: list[ToolCall] = []
        for number, written in enumerate(written_calls(message)):
            if written.name is None and written.arguments is None:
                self.skip(NO_CALL, line)
                continue
            made_up = f"{new_id or f'call-{line}-'}{number}"
            calls.append(logged_call(written.id or made_up, written.name, written.arguments))
        for _ in range(as_list(message.get("tool_calls")).count(None)):
            self.skip(NO_CALL, line)
        return tuple(calls)

    def add_calls(self, index: int, calls: tuple[ToolCall, ...]) -> None:
        """More calls of an assistant turn whose records are spread over the file."""
        self.turns[index] = replace(self.turns[index], calls=self.turns[index].calls + calls)
        self._caller_of.update({call.id: index for call in calls})

    def grow(self, line: int, *, id: str | None = None, **fields: Any) -> None:
        """The last turn with more in it, of which this line is a part, and perhaps under another id."""
        last = self.turns[-1]
        lines = last.provenance.lines if line in last.provenance.lines else (*last.provenance.lines, line)
        name = last.id if id is None else unique(id, self._ids)
        self.turns[-1] = replace(last, id=name, provenance=Provenance(file=self._file, lines=lines), **fields)

    def answer(
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
        """What came back for a call: with the other results of its turn, or in a turn of its own."""
        result = ToolResult(call_id=call_id, text=text, is_error=is_error)
        caller, last = self._caller_of.get(call_id), self.turns[-1] if self.turns else None
        of_last = self._caller_of.get(last.results[0].call_id) if last is not None and last.results else None
        if last is not None and caller is not None and of_last == caller:
            self._see(result, line)
            self.grow(line, results=(*last.results, result), extra=_with_images(last.extra, more.get("extra", {})))
            return
        self.say(id, "tool", origin, line, results=(result,), **more)

    def open_calls(self) -> list[ToolCall]:
        """The last assistant turn's calls that nothing has answered yet."""
        last = next((turn for turn in reversed(self.turns) if turn.role == "assistant"), None)
        return [] if last is None else [call for call in last.calls if call.id not in self._answered]

    def _see(self, result: ToolResult, line: int) -> None:
        self._answered.add(result.call_id)
        if result.call_id not in self._caller_of:
            self.skip(ORPHAN, line)


def _with_images(before: Mapping[str, Any], more: Mapping[str, Any]) -> Record:
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


def logged_call(id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call with whatever a log has for its id and name; RecursionError where its arguments are nested too deeply."""
    try:
        return tool_call("" if id is None else as_text(id), "" if name is None else as_text(name), arguments)
    except InputError as error:
        raise RecursionError(TOO_DEEP) from error


def usage_of(
    given: Any, input: str, output: str, cached: str, created: str = "", *, is_disjoint: bool = False
) -> Usage | None:
    """Token counts under a format's names: `a.b` is within `a`, `a b` are added.

    Ours are disjoint; most formats count cached tokens within those of the prompt.
    """
    if not isinstance(given, dict):
        return None
    total, read, written = (count(_at(given, path)) for path in (input, cached, created))
    return Usage(
        input_tokens=total if is_disjoint else max(total - read - written, 0),
        output_tokens=sum(count(_at(given, path)) for path in output.split()),
        cache_read_tokens=read,
        cache_creation_tokens=written,
    )


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = as_record(value).get(key)
    return value


def openai_usage(given: Any) -> Usage | None:
    return usage_of(given, "prompt_tokens", "completion_tokens", "prompt_tokens_details.cached_tokens")


def count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else 0


def kept_fields(fields: Mapping[str, Any], file: str, line: int, report: IngestReport) -> Record:
    """Fields to keep beside a turn or conversation, without those nested beyond reason and without a forged agent."""
    record: Record = {}
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
            record[key] = value
    return record


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
