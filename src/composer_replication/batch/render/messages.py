"""Convert a conversation to chat-template messages; whatever the template's dialect cannot express becomes text."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.batch.render.dialect import (
    Dialect,
    Outcome,
    ProtectedTokens,
    ThinkingRules,
    raw_marker,
    system,
    user,
)
from composer_replication.types import Conversation, Message, ToolCall, ToolResult, Turn

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
WRAPPERS = CALL_OPEN + CALL_CLOSE + RESULT_OPEN + RESULT_CLOSE
"""The markers around calls and results that are written as text. A log must not forge them as tokens."""
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class ChatItem:
    """One chat message. An assistant message has its `turn`; if the turn has calls, `bare` is the message without them.

    `thinking` says how the turn's thinking is treated; the message contains the thinking only for `target` and
    `context`.
    """

    message: Message
    turn: Turn | None = None
    bare: Message | None = None
    thinking: Outcome = "none"

    @property
    def role(self) -> str:
        """The message's role."""
        return str(self.message["role"])


@dataclass(slots=True)
class Chat:
    """The escaped messages of a conversation. `notes` counts what the template cannot show in its original form."""

    items: list[ChatItem] = field(default_factory=list[ChatItem])
    # Texts that replace the raw markers in a rendering (`dialect.insert_raw`).
    raw: list[str] = field(default_factory=list[str])
    notes: Counter[str] = field(default_factory=Counter[str])


def to_chat(
    conversation: Conversation,
    dialect: Dialect,
    protected: ProtectedTokens,
    *,
    thinking: ThinkingRules,
    tools: Sequence[Mapping[str, Any]] | None,
) -> Chat:
    """Convert the turns to chat messages; `tools` are the schemas to write as text, because the template does not
    show them.
    """
    writer = _MessageWriter(dialect, protected, thinking)
    writer.add_system(tools or (), conversation.turns)
    for turn in conversation.turns:
        writer.add(turn)
    return writer.chat


class _MessageWriter:
    """Converts turns to chat messages, one at a time and in order."""

    def __init__(self, dialect: Dialect, protected: ProtectedTokens, thinking: ThinkingRules) -> None:
        self._dialect, self._protected, self._thinking = dialect, protected, thinking
        self.chat = Chat()
        self._names: dict[str, str] = {}
        self._preamble = ""

    def add_system(self, tools: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> None:
        """Add tool schemas that the template does not show to the system prompt as text."""
        if not tools:
            return
        self.chat.notes["tools_as_text"] += 1
        schemas = (json.dumps(self._protected.escape_tree(tool), ensure_ascii=False) for tool in tools)
        preamble = "\n".join(["# Tools", "", *schemas])
        # A conversation has one system prompt: if its first turn is one, the schemas are appended to that.
        if turns and turns[0].role == "system":
            self._preamble = _SEPARATOR + preamble
        else:
            self._add_system_text(preamble)

    def add(self, turn: Turn) -> None:
        """Convert the next turn to a chat message."""
        if turn.role == "assistant":
            self._add_assistant(turn)
        elif turn.role == "tool":
            self._add_results(turn.results)
        elif turn.role == "system":
            self._add_system_text(self._protected.escape(turn.text) + self._preamble)
            self._preamble = ""
        else:
            self._add_user(self._protected.escape(turn.text))

    def _add_system_text(self, text: str) -> None:
        is_shown = self._dialect.system_later if self.chat.items else self._dialect.system_first
        if is_shown:
            self.chat.items.append(ChatItem(system(text)))
        else:
            self.chat.notes["system_as_user"] += 1
            self._add_user(text)

    def _add_user(self, text: str) -> None:
        items = self.chat.items
        if items and items[-1].role == "user" and not self._dialect.users_in_a_row:
            self.chat.notes["merged_messages"] += 1
            items[-1] = ChatItem(user(f"{items[-1].message['content']}{_SEPARATOR}{text}"))
        else:
            items.append(ChatItem(user(text)))

    def _add_results(self, results: Sequence[ToolResult]) -> None:
        for result in results:
            text = self._protected.escape(result.text)
            if self._dialect.results:
                fields = {"tool_call_id": self._call_id(result.call_id), "name": self._names.get(result.call_id, "")}
                self.chat.items.append(ChatItem({"role": "tool", "content": text, **fields}))
            else:
                self.chat.notes["results_as_text"] += 1
                self._add_user(f"{RESULT_OPEN}\n{text}\n{RESULT_CLOSE}")

    def _add_assistant(self, turn: Turn) -> None:
        self._make_room_for_assistant()
        bare: Message = {"role": "assistant", "content": self._protected.escape(turn.text)}
        thinking = self._decide_thinking(turn)
        if thinking in ("target", "context"):
            bare["reasoning_content"] = self._protected.escape(turn.thinking)
        for call in turn.calls:
            self._names[call.id] = self._protected.escape(call.name)
        message = self._with_calls(bare, turn.calls) if turn.calls else bare
        self.chat.items.append(ChatItem(message, turn, bare if turn.calls else None, thinking))

    def _decide_thinking(self, turn: Turn) -> Outcome:
        """Decide what to do with the turn's thinking."""
        if not turn.thinking.strip():
            return "none"
        if not self._dialect.thinking:
            return "not_shown"
        # Sampled ids are used as they are, and they contain the thought.
        if turn.token_ids:
            return "target"
        # If the template tells the model not to think, the model must not be trained to think.
        return "left_out" if self._dialect.thought.is_off else self._thinking.treatment(turn)

    def _make_room_for_assistant(self) -> None:
        """Insert an empty user message if the template requires one before an assistant turn."""
        # Merging two assistant turns instead would lose the end-of-turn token of the first.
        last_roles = [item.role for item in self.chat.items[-1:] if item.role != "system"]
        needs_user = not self._dialect.assistants_in_a_row if last_roles == ["assistant"] else not last_roles
        if needs_user and (last_roles or not self._dialect.assistant_first):
            self.chat.notes["empty_user_inserted"] += 1
            self.chat.items.append(ChatItem(user("")))

    def _with_calls(self, bare: Message, calls: Sequence[ToolCall]) -> Message:
        if self._dialect.calls and (len(calls) == 1 or self._dialect.parallel_calls):
            if bare["content"] and not self._dialect.text_beside_calls:
                self.chat.notes["text_beside_call_not_shown"] += 1
            return {**bare, "tool_calls": [self._structured_call(call) for call in calls]}
        self.chat.notes["calls_as_text"] += len(calls)
        texts = [str(bare["content"])] if bare["content"] else []
        return {**bare, "content": "\n".join([*texts, *map(self._call_text, calls)])}

    def _structured_call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = self._protected.escape_tree(dict(call.arguments))
        if call.raw_arguments is not None:
            arguments = self._wrap_raw_arguments(call.raw_arguments)
        elif self._dialect.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self._protected.escape(call.name), "arguments": arguments}
        return {"id": self._call_id(call.id), "type": "function", "function": function}

    def _wrap_raw_arguments(self, text: str) -> object:
        """Return a placeholder for arguments that are not valid JSON, so that they are rendered unchanged and
        without quotes.
        """
        if not self._dialect.raw_arguments:
            self.chat.notes["raw_arguments_wrapped"] += 1
            return {"raw_arguments": self._protected.escape(text)}
        self.chat.raw.append(self._protected.escape(text))
        return raw_marker(len(self.chat.raw) - 1)

    def _call_text(self, call: ToolCall) -> str:
        if call.raw_arguments is not None:
            arguments = self._protected.escape(call.raw_arguments)
        else:
            arguments = json.dumps(self._protected.escape_tree(dict(call.arguments)), ensure_ascii=False)
        name = json.dumps(self._protected.escape(call.name), ensure_ascii=False)
        return f'{CALL_OPEN}{{"name": {name}, "arguments": {arguments}}}{CALL_CLOSE}'

    def _call_id(self, identity: str) -> str:
        # Nine hexadecimal digits satisfy templates that accept only short ids (Mistral).
        short = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:9]
        return short if self._dialect.short_ids else self._protected.escape(identity)
