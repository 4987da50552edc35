"""Convert conversations into states for teachers: the messages so far, and what the student did next.

With a token limit, old messages are dropped. The messages before the first answer (the system prompt and the user's
first message) always stay, since a question about the tenth step makes no sense without the task. The user's latest
message and the newest turn stay as well. Among the others the oldest are dropped first, and a short message at each gap
says how many turns it replaces.
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
from composer_replication.types import Conversation, Message, TraceState, Turn

# Key for user messages that a program wrote; its value is "tool". It is internal to this package and never sent.
ORIGIN = "origin"
SYSTEM_PROMPT = (
    "You are a senior software engineer working as a coding agent in a terminal. You read and change files and run "
    "commands through the tools you are given, one step at a time, and you check your work."
)
# These logs have about four bytes of text per token. The limit applies to requests, so an estimate is enough.
_BYTES_PER_TOKEN = 4
_MACHINE_ORIGINS = ("meta", "tool")  # of user messages that no person wrote


def states(
    conversation: Conversation,
    *,
    system_prompt: str = SYSTEM_PROMPT,
    strip_thinking: bool = True,
    max_history_tokens: int | None = None,
) -> Iterator[tuple[list[Message], Turn]]:
    """Yield a pair for every assistant turn: the messages before the turn, and the turn itself.

    Message objects are shared between states, not copied.
    """
    system: Message = {"role": "system", "content": system_prompt}
    history = _MessageHistory(max_history_tokens)
    for turn in conversation.turns:
        if turn.role == "assistant":
            yield [system, *history.messages()], turn
        history.add(turn, list(_turn_messages(turn, strip_thinking)))


def trace_state(state_id: str, messages: list[Message], turn: Turn) -> TraceState:
    """Return a state as a `TraceState` for the public interface."""
    return TraceState(state_id=state_id, messages=messages, student_action=action_text(turn))


def _turn_messages(turn: Turn, strip_thinking: bool) -> Iterator[Message]:
    if turn.role == "tool":
        for result in turn.results:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
        return
    message: Message = {"role": turn.role, "content": turn.text}
    if turn.role == "user" and turn.origin == "tool":  # output of a program in a user message
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
class _MessageGroup:
    """Messages that must not be separated: an assistant turn with the results of its calls, or a single other turn."""

    messages: list[Message]
    call_ids: set[str]
    size: int = 0
    num_turns: int = 1
    is_required: bool = False
    is_from_user: bool = False

    def append(self, group: _MessageGroup) -> None:
        self.messages += group.messages
        self.call_ids |= group.call_ids
        self.size += group.size
        self.num_turns += group.num_turns
        self.is_required |= group.is_required
        self.is_from_user |= group.is_from_user


class _MessageHistory:
    """The messages before the next turn, limited to `max_tokens`; turns are added in order."""

    def __init__(self, max_tokens: int | None) -> None:
        self._max_tokens = max_tokens
        self._groups: list[_MessageGroup] = []
        self._has_answer = self._has_user_message = False

    def add(self, turn: Turn, messages: list[Message]) -> None:
        """Add a turn. Results join the group of their calls."""
        # Without a limit, sizes are not needed, and encoding every message takes time.
        size = 0 if self._max_tokens is None else sum(len(orjson.dumps(message)) for message in messages)
        is_from_user = turn.role == "user" and turn.origin not in _MACHINE_ORIGINS
        is_first_message = turn.role == "user" and not self._has_user_message
        is_opening = not self._has_answer and (turn.role == "system" or is_from_user)
        group = _MessageGroup(messages, {call.id for call in turn.calls}, size)
        group.is_required, group.is_from_user = is_opening or is_first_message, is_from_user
        self._has_user_message |= turn.role == "user"
        self._has_answer |= turn.role == "assistant"
        self._groups.append(group)
        if turn.role == "tool":
            self._merge_with_calls({result.call_id for result in turn.results})

    def messages(self) -> Iterator[Message]:
        """Yield the messages that fit, with a placeholder message for every gap."""
        num_dropped = 0
        kept_indices = self._kept_indices()
        for number, group in enumerate(self._groups):
            if number not in kept_indices:
                num_dropped += group.num_turns
                continue
            if num_dropped:
                yield _gap_message(num_dropped)
                num_dropped = 0
            yield from group.messages

    def _merge_with_calls(self, call_ids: set[str]) -> None:
        """Merge the newest group, which holds results, with the group of their calls and all groups in between."""
        last = len(self._groups) - 1
        home, unanswered = last, call_ids
        for at in reversed(range(last)):  # the newest first: some logs reuse the same call ids in every turn
            if self._groups[at].call_ids & unanswered:
                home, unanswered = at, unanswered - self._groups[at].call_ids
            if not unanswered:
                break
        for group in self._groups[home + 1 :]:
            self._groups[home].append(group)
        del self._groups[home + 1 :]

    def _kept_indices(self) -> set[int] | range:
        """Return the indices of the groups within the limit; required groups are always included."""
        groups = self._groups
        if self._max_tokens is None or not groups:
            return range(len(groups))
        latest = next((at for at in reversed(range(len(groups))) if groups[at].is_from_user), None)
        kept_indices = {at for at, group in enumerate(groups) if group.is_required} | {len(groups) - 1}
        kept_indices |= set() if latest is None else {latest}
        remaining_bytes = self._max_tokens * _BYTES_PER_TOKEN - sum(groups[at].size for at in kept_indices)
        for at in reversed(range(len(groups))):
            if at in kept_indices:
                continue
            remaining_bytes -= groups[at].size
            # Stop at the first group that does not fit: with gaps in the middle, a conversation is hard to follow.
            if remaining_bytes < 0:
                break
            kept_indices.add(at)
        return kept_indices


def _gap_message(num_turns: int) -> Message:
    subject = "1 turn of this session is" if num_turns == 1 else f"{num_turns} turns of this session are"
    return {"role": "user", "content": f"[{subject} left out here]"}


# `tools.jsonl`: schemas inferred from the calls in sessions, or read from the user's file.


def load_tool_schemas(path: Path) -> dict[str, dict[str, Any]]:
    """Return the schemas by tool name from a JSON list of tools in the OpenAI, Anthropic or MCP format."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(explain(str(path), got=error, expected="a readable JSON file with a list of tools")) from error
    tools = cast("dict[str, Any]", value).get("tools") if isinstance(value, dict) else value
    if not isinstance(tools, list) or not tools:
        got = (
            "an empty list" if isinstance(tools, list) else "no `tools` list" if tools is None else type(tools).__name__
        )
        fix = 'Provide the tool schemas as [{"name": ..., "parameters": ...}], or omit --tools.'
        expected = "a non-empty list of tools, or an object with one under `tools`"
        raise InputError(explain(str(path), got=got, expected=expected, fix=fix))
    return dict(_named_schema(tool, f"{path}, tool {number}") for number, tool in enumerate(cast("list[Any]", tools)))


def write_tools(
    run: RunDir, inferred: ToolSchemas, user_schemas: Mapping[str, Mapping[str, Any]], *, is_scrubbed: bool
) -> None:
    """Write `tools.jsonl`. The conversations from which the schemas were inferred must be written first."""
    rows, settings = tool_rows(inferred, user_schemas), {"scrubbed": is_scrubbed}
    run.write_jsonl(
        "tools", rows, schema=TOOLS_SCHEMA, version=TOOLS_VERSION, sources=["conversations"], settings=settings
    )


def _named_schema(tool: Any, where: str) -> tuple[str, dict[str, Any]]:
    body = tool.get("function", tool) if isinstance(tool, dict) else {}
    name = body.get("name") if isinstance(body, dict) else None
    # The key of the schema in the APIs of OpenAI, Anthropic and MCP.
    keys = ("parameters", "input_schema", "inputSchema")
    schema = next((body[key] for key in keys if isinstance(body.get(key), dict)), None) if name else None
    if not isinstance(name, str) or schema is None:
        raise InputError(
            explain(where, got=f"{tool!r:.80}", expected=f"an object with a name and one of the keys {', '.join(keys)}")
        )
    return name, schema
