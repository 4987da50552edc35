"""Convert a conversation to chat-template messages, and locate each assistant turn in a rendering.

`to_chat` writes the messages; whatever the template's dialect cannot express becomes text. `EdgeFinder` then finds
where the text of an assistant turn begins in the rendering, and what ends its context.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from composer_replication.batch.render.dialect import (
    Dialect,
    Outcome,
    ProtectedTokens,
    ThinkingRules,
    assistant,
    raw_marker,
    system,
    user,
)
from composer_replication.errors import AlignmentError, explain
from composer_replication.types import Conversation, Message, ToolCall, ToolResult, Turn

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
WRAPPERS = CALL_OPEN + CALL_CLOSE + RESULT_OPEN + RESULT_CLOSE
"""The markers around calls and results that are written as text. A log must not forge them as tokens."""
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class ChatItem:
    """One chat message. Assistant messages have their `turn`; if one has calls, `bare` is the message without them.

    `thinking` is the decision about the turn's thinking, which the message contains only for `target` and `context`.
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
    """Write the turns as messages; `tools` are the schemas that the template itself does not show."""
    writer = _MessageWriter(dialect, protected, thinking)
    writer.add_system(tools or (), conversation.turns)
    for turn in conversation.turns:
        writer.add(turn)
    return writer.chat


class _MessageWriter:
    """Writes turns as messages, one at a time and in order."""

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
        """Write the next turn."""
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
        """Return a stand-in for arguments that are not valid JSON, so that they are rendered unchanged and without
        quotes.
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


# Probe words: no template contains them.
_PROBE_WORD, _MARK = "Zqword", "Zqmark"
# An upper bound: templates write at most a few words between a prompt and a turn.
_MAX_LEAD_CHARS = 256
# A position in a rendering is recognized by this many characters before it.
_COMPARED_CHARS = 1024


class TurnEdge(NamedTuple):
    """Where a turn's own text begins in its rendering (`start`), and how its context differs from the prompt.

    The context is the prompt with `dropped` removed from its end and `added` appended. With `is_rewritten`, the
    rendering of the finished turn shows a different context. With `has_thought`, the turn's own text or `added`
    contains its thought; with `has_empty_thought`, the context ends with an empty thought.
    """

    start: int
    dropped: str = ""
    added: str = ""
    is_rewritten: bool = False
    has_thought: bool = False
    has_empty_thought: bool = False


class Renderings(NamedTuple):
    """Renderings of one turn and its context.

    `prompt` is the context with the generation prompt, `whole` the context with the turn. `with_message` renders the
    context with another message in place of the turn. `marked` is `whole` with a mark inside every other message.
    `before` renders the context alone, with or without marks. `marked` and the result of `before` are None if the
    template rejects the messages.
    """

    prompt: str
    whole: str
    with_message: Callable[[Message], str]
    marked: str | None
    before: Callable[[bool], str | None]


class EdgeFinder:
    """Finds where the text of a turn begins in renderings of one template.

    The rendering with the turn either continues the prompt or differs from it: in the header, or earlier if the
    template rewrites the context once the turn is finished. The turn's own text, which is trained on, must contain no
    text of the context. So all other messages are marked, and only text after the last mark can be the turn's own.
    """

    def __init__(self, dialect: Dialect, edge: re.Pattern[str], template_name: str) -> None:
        self._dialect, self._edge, self._template_name = dialect, edge, template_name

    def find(self, item: ChatItem, texts: Renderings) -> TurnEdge:
        """Return the edge of the turn. Raises AlignmentError if its text would contain text of another message."""
        # The common suffix of both renderings contains no mark, so the turn's text begins there or later.
        lowest = 0 if texts.marked is None else len(texts.whole) - _common_suffix_length(texts.whole, texts.marked)
        edge = self._edge_of_own_text(item, texts, lowest)
        thought = str(item.message.get("reasoning_content", "")).strip()
        if thought and thought in texts.whole[edge.start :]:
            edge = edge._replace(has_thought=True)
        if not _is_sampled(item) and not edge.has_thought:
            edge = self._skip_empty_thought(texts, edge)
        elif not _is_sampled(item) and item.thinking == "context":
            edge = self._edge_after_thought(item, texts, edge)
        if edge.start < lowest:
            raise self._foreign_text_error(item, texts.whole[edge.start :])
        return edge

    def _edge_of_own_text(self, item: ChatItem, texts: Renderings, lowest: int) -> TurnEdge:
        start, tail = self._find_start(texts.prompt, texts.whole)
        if start is not None:
            return TurnEdge(start, tail)
        start, tail = self._find_rewritten_start(item, texts, lowest)
        return TurnEdge(start, tail, is_rewritten=True)

    def _find_start(self, prompt: str, whole: str) -> tuple[int | None, str]:
        """Return where a turn begins in its rendering, and the end of the prompt that is not repeated there.

        The start is None if the two texts differ before the header, that is, if the template rewrites the context once
        the turn is finished.
        """
        if whole.startswith(prompt):
            return len(prompt), ""
        shared = prompt[: common_prefix_length(prompt, whole)]
        # Cut at the edge of a token or line: `<think>` and `<tool>` have "<t" in common, but no token.
        edge = max((match.end() for match in self._edge.finditer(shared)), default=0)
        # An edge at the end of the rendering would leave no text for the turn.
        if edge < len(prompt) - len(self._dialect.header) or edge == len(whole):
            return None, ""
        return edge, prompt[edge:]

    def _find_rewritten_start(self, item: ChatItem, texts: Renderings, lowest: int) -> tuple[int, str]:
        """Do the same as `_find_start` for a template that rewrites the context once the turn is finished.

        Among all positions up to the turn's text, choose the one before which the rendering matches the end of the
        prompt best.
        """
        prompt, whole = texts.prompt, texts.whole
        thought = {key: value for key, value in item.message.items() if key == "reasoning_content"}
        # Another text in the same place begins where the turn's text does, so the turn begins there at the latest.
        example = texts.with_message({**assistant(_PROBE_WORD), **thought})
        latest = min(example.rfind(_PROBE_WORD), common_prefix_length(whole, example))
        earliest = max(0, latest - _MAX_LEAD_CHARS - len(str(thought)), self._end_of_last_message(texts, lowest))
        header_start = len(prompt) - len(self._dialect.header)
        edges = [match.end() for match in self._edge.finditer(prompt, max(0, header_start))]
        ends = [*edges, header_start, len(prompt)] if prompt.endswith(self._dialect.header) else [len(prompt)]
        positions = range(earliest, latest + 1)
        shared = (
            (_common_suffix_length(_tail(prompt, end), _tail(whole, at)), end, at) for end in ends for at in positions
        )
        # An overlap without a whole token or line is a coincidence. If there is no better one, use the latest start.
        best = max(
            (overlap for overlap in shared if self._edge.search(prompt, overlap[1] - overlap[0], overlap[1])),
            default=None,
        )
        _, end, start = best or (0, len(prompt), latest)
        return start, prompt[end:]

    def _end_of_last_message(self, texts: Renderings, lowest: int) -> int:
        """Return where the template's text after the last message ends; the turn cannot begin before that."""
        before, marked = texts.before(False), texts.before(True)
        if not lowest or before is None or marked is None:
            return lowest
        closing = before[len(before) - _common_suffix_length(before, marked) :]
        shared = closing[: common_prefix_length(texts.whole[lowest : lowest + len(closing)], closing)]
        return lowest + max((match.end() for match in self._edge.finditer(shared)), default=0)

    def _skip_empty_thought(self, texts: Renderings, edge: TurnEdge) -> TurnEdge:
        """Return the edge with an empty thought at the end of the context, where a thinking model would begin one."""
        header, (quiet_header, empty, _) = self._dialect.header, self._dialect.thought
        if quiet_header is None or not texts.prompt.endswith(header):
            return edge
        # The plain header becomes the quiet one: what they do not share is dropped and added.
        context = texts.prompt.removesuffix(header) + quiet_header
        num_shared = common_prefix_length(header, quiet_header)
        dropped, added = header[num_shared:], quiet_header[num_shared:]
        if texts.whole.startswith(context):
            return TurnEdge(len(context), dropped, added, has_empty_thought=True)
        # The template shows finished turns without an empty thought, or with one in another form: skip that.
        start = edge.start + (len(empty) if texts.whole.startswith(empty, edge.start) else 0)
        return TurnEdge(start, dropped, added, is_rewritten=True, has_empty_thought=True)

    def _edge_after_thought(self, item: ChatItem, texts: Renderings, edge: TurnEdge) -> TurnEdge:
        """Return the edge of a turn whose thought is context: its own text begins after the thought."""
        bare = {key: value for key, value in item.message.items() if key != "tool_calls"}
        example = texts.with_message({**bare, "content": _PROBE_WORD})
        start = example.rfind(_PROBE_WORD)
        if start < edge.start or texts.whole[:start] != example[:start]:
            got = "a thought whose rendering depends on the text after it"
            raise AlignmentError(explain("thinking as context", got=got, expected="the same rendering before any text"))
        return edge._replace(start=start, added=texts.whole[edge.start : start])

    def _foreign_text_error(self, item: ChatItem, text: str) -> AlignmentError:
        turn = "" if item.turn is None else f" {item.turn.id}"
        got = f"text from another message, such as {text[:60]!r}"
        fix = "Use a template that separates results from turns: set render.chat_template, or chat_template= in Python."
        what = f"turn{turn} as {self._template_name} renders it"
        return AlignmentError(explain(what, got=got, expected="only text that the model wrote", fix=fix))


def mark_message(message: Message) -> Message:
    """Put a mark inside each text of a message; roles, names and ids stay unchanged."""
    marked = {
        key: _mark_strings(value) if key in ("content", "reasoning_content") else value
        for key, value in message.items()
    }
    # Empty texts get no mark, except results: some templates write even empty results into the next turn.
    if message.get("role") == "tool" and message.get("content") == "":
        marked["content"] = _MARK
    if "tool_calls" in marked:
        marked["tool_calls"] = [_mark_call(call) for call in cast("list[dict[str, Any]]", marked["tool_calls"])]
    return marked


def _mark_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    # A mark inside arguments as JSON text could make them invalid.
    if not isinstance(function["arguments"], Mapping):
        return call
    return {**call, "function": {**function, "arguments": _mark_strings(function["arguments"])}}


def _mark_strings(value: Any) -> Any:
    """Put a mark inside every non-empty string of a JSON value."""
    # The mark goes into the middle, because templates trim texts and check how they begin and end.
    if isinstance(value, str):
        middle = len(value) // 2
        return f"{value[:middle]}{_MARK}{value[middle:]}" if value else value
    if isinstance(value, Mapping):
        return {key: _mark_strings(member) for key, member in cast("Mapping[str, Any]", value).items()}
    return [_mark_strings(element) for element in cast("list[Any]", value)] if isinstance(value, list) else value


def _is_sampled(item: ChatItem) -> bool:
    """Whether the turn has sampled ids, which follow the complete generation prompt and are never changed."""
    return item.turn is not None and bool(item.turn.token_ids)


def _tail(text: str, position: int) -> str:
    return text[max(0, position - _COMPARED_CHARS) : position]


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two texts or lists."""
    # Bisection: comparing slices is far faster in Python than comparing elements.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _common_suffix_length(first: str, second: str) -> int:
    """Return the length of the longest common suffix of two texts."""
    return common_prefix_length(first[::-1], second[::-1])
