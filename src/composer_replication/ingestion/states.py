"""Conversations as the states teachers are asked about: the messages so far, and what the student did next.

The messages are all of them, or as many as a limit leaves. Without the task a question about its tenth step has no
answer. What was said before the first answer therefore always stays (the system prompt, the first user message), with
the latest word of the user and the newest turn; of the others the oldest go first. A short message at each gap says how
many turns it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from composer_replication.action_text import action_text, arguments_text
from composer_replication.errors import InputError, explain
from composer_replication.messages import ToolSchemas, tool_rows
from composer_replication.runs import RunDir
from composer_replication.runs.files import TOOLS_SCHEMA, TOOLS_VERSION
from composer_replication.types import (
    Conversation,
    Message,
    TraceState,
    Turn,
)

# The key of a user's message that says "tool" where a program wrote it. It is for us: no request holds it.
ORIGIN = "origin"
SYSTEM_PROMPT = (
    "You are a senior software engineer working as a coding agent in a terminal. You read and change files and run "
    "commands through the tools you are given, one step at a time, and you check your work."
)
# Text in these logs runs at about four bytes a token; the limit is on what is sent, so an estimate is enough.
_BYTES_PER_TOKEN = 4
_NOT_SAID = ("meta", "tool")  # origins of user messages that no person wrote


def states(
    conversation: Conversation,
    *,
    system_prompt: str = SYSTEM_PROMPT,
    strip_thinking: bool = True,
    max_history_tokens: int | None = None,
) -> Iterator[tuple[list[Message], Turn]]:
    """(messages before it, turn) for every assistant turn; message objects are shared between states, not copied."""
    system: Message = {"role": "system", "content": system_prompt}
    history = _MessageHistory(max_history_tokens)
    for turn in conversation.turns:
        if turn.role == "assistant":
            yield [system, *history.messages()], turn
        history.add(turn, list(_messages(turn, strip_thinking)))


def trace_state(state_id: str, messages: list[Message], turn: Turn) -> TraceState:
    return TraceState(state_id=state_id, messages=messages, student_action=action_text(turn))


def _messages(turn: Turn, strip_thinking: bool) -> Iterator[Message]:
    if turn.role == "tool":
        for result in turn.results:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
        return
    message: Message = {"role": turn.role, "content": turn.text}
    if turn.role == "user" and turn.origin == "tool":  # what a program printed, in a user's message
        message[ORIGIN] = turn.origin
    if turn.thinking and not strip_thinking:
        message["reasoning_content"] = turn.thinking
    if turn.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments_text(c)}}
            for c in turn.calls
        ]
    yield message


@dataclass(slots=True)
class _Unit:
    """What may not be torn apart: an assistant turn with all up to the results of its calls, or one other turn."""

    messages: list[Message]
    call_ids: set[str]
    size: int = 0
    num_turns: int = 1
    stays: bool = False
    is_users_word: bool = False

    def take(self, other: _Unit) -> None:
        self.messages += other.messages
        self.call_ids |= other.call_ids
        self.size += other.size
        self.num_turns += other.num_turns
        self.stays |= other.stays
        self.is_users_word |= other.is_users_word


class _MessageHistory:
    """Turns are added in order; `messages` are those before the next one, at most `max_tokens` where that is given."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens
        self._units: list[_Unit] = []
        self._is_answered = self._is_asked = False

    def add(self, turn: Turn, messages: list[Message]) -> None:
        size = 0 if self._max_tokens is None else sum(len(orjson.dumps(message)) for message in messages)
        is_users_word = turn.role == "user" and turn.origin not in _NOT_SAID
        is_first_word = turn.role == "user" and not self._is_asked
        is_opening = not self._is_answered and (turn.role == "system" or is_users_word)
        unit = _Unit(messages, {call.id for call in turn.calls}, size)
        unit.stays, unit.is_users_word = is_opening or is_first_word, is_users_word
        self._is_asked |= turn.role == "user"
        self._is_answered |= turn.role == "assistant"
        self._units.append(unit)
        if turn.role == "tool":
            self._join({result.call_id for result in turn.results})

    def messages(self) -> Iterator[Message]:
        left_out = 0
        kept_indices = self._kept()
        for number, unit in enumerate(self._units):
            if number not in kept_indices:
                left_out += unit.num_turns
                continue
            if left_out:
                yield _mark(left_out)
                left_out = 0
            yield from unit.messages

    def _join(self, call_ids: set[str]) -> None:
        """The newest unit, made of results, with the one that holds their calls and whatever stands between."""
        last = len(self._units) - 1
        home, unanswered = last, call_ids
        for at in reversed(range(last)):  # from the newest: some logs give every turn's calls the same ids
            if self._units[at].call_ids & unanswered:
                home, unanswered = at, unanswered - self._units[at].call_ids
            if not unanswered:
                break
        for unit in self._units[home + 1 :]:
            self._units[home].take(unit)
        del self._units[home + 1 :]

    def _kept(self) -> set[int] | range:
        units = self._units
        if self._max_tokens is None or not units:
            return range(len(units))
        latest = next((at for at in reversed(range(len(units))) if units[at].is_users_word), None)
        kept_indices = {at for at, unit in enumerate(units) if unit.stays} | {len(units) - 1}
        kept_indices |= set() if latest is None else {latest}
        room = self._max_tokens * _BYTES_PER_TOKEN - sum(units[at].size for at in kept_indices)
        for at in reversed(range(len(units))):
            if at in kept_indices:
                continue
            room -= units[at].size
            if room < 0:
                break
            kept_indices.add(at)
        return kept_indices


def _mark(num_turns: int) -> Message:
    subject = "1 turn of this session is" if num_turns == 1 else f"{num_turns} turns of this session are"
    return {"role": "user", "content": f"[{subject} left out here]"}


# `tools.jsonl`: schemas inferred from the calls of sessions, or read from a file the user has.


def load_tool_schemas(path: Path) -> dict[str, dict[str, Any]]:
    """Tool name -> schema from a JSON list of tools, as the OpenAI, Anthropic or MCP interfaces write them."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(explain(str(path), got=error, expected="a JSON file with a list of tools")) from error
    tools = cast("dict[str, Any]", value).get("tools") if isinstance(value, dict) else value
    if not isinstance(tools, list) or not tools:
        got = "an empty list" if isinstance(tools, list) else "no list" if tools is None else type(tools).__name__
        fix = 'Write the schemas of the tools: [{"name": ..., "parameters": ...}], or leave --tools out.'
        expected = "a list with tools in it, or an object with one"
        raise InputError(explain(str(path), got=got, expected=expected, fix=fix))
    return dict(_named_schema(tool, f"{path}, tool {number}") for number, tool in enumerate(cast("list[Any]", tools)))


def write_tools(
    run: RunDir, inferred: ToolSchemas, given: Mapping[str, Mapping[str, Any]], *, is_scrubbed: bool
) -> None:
    """`tools.jsonl`, after the conversations it was inferred from."""
    rows, settings = tool_rows(inferred, given), {"scrubbed": is_scrubbed}
    run.write_jsonl(
        "tools", rows, schema=TOOLS_SCHEMA, version=TOOLS_VERSION, sources=["conversations"], settings=settings
    )


def _named_schema(tool: Any, where: str) -> tuple[str, dict[str, Any]]:
    body = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = body.get("name") if isinstance(body, dict) else None
    keys = ("parameters", "input_schema", "inputSchema")
    schema = next((body[key] for key in keys if isinstance(body.get(key), dict)), None) if name else None
    if not isinstance(name, str) or schema is None:
        raise InputError(explain(where, got=f"{tool!r:.80}", expected=f"a name and one of {', '.join(keys)}"))
    return name, schema
