"""A conversation as the messages a chat template takes, in the words its dialect has."""

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
from composer_replication.types import (
    Conversation,
    Message,
    ToolCall,
    ToolResult,
    Turn,
)

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"
WRAPPERS = CALL_OPEN + CALL_CLOSE + RESULT_OPEN + RESULT_CLOSE
"""What we write around calls and results ourselves; where these are tokens, a log may not forge them."""
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class ChatItem:
    """A message; `turn` is set on assistant turns, `bare` is the message without its calls where it has any.

    `thinking` is what the rules make of the turn's; the message has it where that is `target` or `context`.
    """

    message: Message
    turn: Turn | None = None
    bare: Message | None = None
    thinking: Outcome = "none"

    @property
    def role(self) -> str:
        return str(self.message["role"])


@dataclass(slots=True)
class Chat:
    """The messages of a conversation, escaped, and what had to be said in another way (`notes`, counted)."""

    items: list[ChatItem] = field(default_factory=list[ChatItem])
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
    """Messages of every turn; `tools` are schemas that the template itself would not show."""
    writer = _MessageWriter(dialect, protected, thinking)
    writer.add_system(tools or (), conversation.turns)
    for turn in conversation.turns:
        writer.add(turn)
    return writer.chat


class _MessageWriter:
    def __init__(self, dialect: Dialect, protected: ProtectedTokens, thinking: ThinkingRules) -> None:
        self._dialect, self._protected, self._thinking = dialect, protected, thinking
        self.chat = Chat()
        self._names: dict[str, str] = {}
        self._preamble = ""

    def add_system(self, tools: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> None:
        """Schemas that the template does not show go into the system prompt, as text."""
        if not tools:
            return
        self.chat.notes["tools_as_text"] += 1
        schemas = (json.dumps(self._protected.escape_tree(tool), ensure_ascii=False) for tool in tools)
        preamble = "\n".join(["# Tools", "", *schemas])
        if turns and turns[0].role == "system":
            self._preamble = _BETWEEN + preamble
        else:
            self._add_system_text(preamble)

    def add(self, turn: Turn) -> None:
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
            items[-1] = ChatItem(user(f"{items[-1].message['content']}{_BETWEEN}{text}"))
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
        thinking = self._outcome(turn)
        if thinking in ("target", "context"):
            bare["reasoning_content"] = self._protected.escape(turn.thinking)
        for call in turn.calls:
            self._names[call.id] = self._protected.escape(call.name)
        message = self._with_calls(bare, turn.calls) if turn.calls else bare
        self.chat.items.append(ChatItem(message, turn, bare if turn.calls else None, thinking))

    def _outcome(self, turn: Turn) -> Outcome:
        """What becomes of the turn's thinking; a model that the template tells not to think has none to learn."""
        if not turn.thinking.strip():
            return "none"
        if not self._dialect.thinking:
            return "not_shown"
        if turn.token_ids:  # ids that were sampled are what they are, the thought among them
            return "target"
        return "left_out" if self._dialect.thought.is_off else self._thinking.treatment(turn)

    def _make_room_for_assistant(self) -> None:
        """An empty user message where the template wants one: merging two turns would lose the end of the first."""
        spoken = [item.role for item in self.chat.items[-1:] if item.role != "system"]
        needs_user = not self._dialect.assistants_in_a_row if spoken == ["assistant"] else not spoken
        if needs_user and (spoken or not self._dialect.assistant_first):
            self.chat.notes["empty_user_inserted"] += 1
            self.chat.items.append(ChatItem(user("")))

    def _with_calls(self, bare: Message, calls: Sequence[ToolCall]) -> Message:
        if self._dialect.calls and (len(calls) == 1 or self._dialect.parallel_calls):
            if bare["content"] and not self._dialect.text_beside_calls:
                self.chat.notes["text_beside_call_not_shown"] += 1
            return {**bare, "tool_calls": [self._structured(call) for call in calls]}
        self.chat.notes["calls_as_text"] += len(calls)
        texts = [str(bare["content"])] if bare["content"] else []
        return {**bare, "content": "\n".join([*texts, *map(self._call_text, calls)])}

    def _structured(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = self._protected.escape_tree(dict(call.arguments))
        if call.raw_arguments is not None:
            arguments = self._raw(call.raw_arguments)
        elif self._dialect.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": self._protected.escape(call.name), "arguments": arguments}
        return {"id": self._call_id(call.id), "type": "function", "function": function}

    def _raw(self, text: str) -> object:
        """Arguments that are no JSON go in as they are, past any quoting the template does."""
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
        short = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:9]
        return short if self._dialect.short_ids else self._protected.escape(identity)


# Where an assistant turn's own text begins in its rendering, and with what its context ends.
#
# The rendering with the turn (`whole`) goes on where the prompt ends, or parts from it: in the header, or before it
# where the template shows another context once the turn is finished. Nothing before the turn's own text may be
# learned, and nothing in it may be another's. Both are found by experiment: `marked` is the same rendering with a
# word put into every other message, and what follows the last such word is all that can be the turn's.

_WORD, _MARK, _MAX_LEAD = "Zqword", "Zqmark", 256  # no template writes more between a prompt and a turn
_COMPARED = 1024  # characters of a text's end that say where it is


class TurnEdge(NamedTuple):
    """The turn's own text begins at `start` of its rendering.

    Its context is the prompt without `dropped` at its end, and with `added` there. `is_rewritten`: the rendering with
    the turn shows another context than that. The turn's thought is in its own text or in `added` (`has_thought`), or
    the context ends with an empty one.
    """

    start: int
    dropped: str = ""
    added: str = ""
    is_rewritten: bool = False
    has_thought: bool = False
    has_empty_thought: bool = False


class Renderings(NamedTuple):
    """One turn's renderings. `with_message` is that of the same context with another message in the turn's place.

    `before` is the context alone, with marks or without; None, as `marked`, where the template refuses that.
    """

    prompt: str
    whole: str
    with_message: Callable[[Message], str]
    marked: str | None
    before: Callable[[bool], str | None]


class EdgeFinder:
    """Finds the edges of one template's turns."""

    def __init__(self, dialect: Dialect, edge: re.Pattern[str], template_name: str) -> None:
        self._dialect, self._edge, self._template_name = dialect, edge, template_name

    def find(self, item: ChatItem, texts: Renderings) -> TurnEdge:
        """The edge of the turn; AlignmentError where its text would hold another message's."""
        lowest = 0 if texts.marked is None else len(texts.whole) - _num_common(texts.whole, texts.marked)
        edge = self._plain_edge(item, texts, lowest)
        thought = str(item.message.get("reasoning_content", "")).strip()
        if thought and thought in texts.whole[edge.start :]:
            edge = edge._replace(has_thought=True)
        if not _is_sampled(item) and not edge.has_thought:
            edge = self._without_thought(texts, edge)
        elif not _is_sampled(item) and item.thinking == "context":
            edge = self._behind_thought(item, texts, edge)
        if edge.start < lowest:
            raise self._foreign_text(item, texts.whole[edge.start :])
        return edge

    def _plain_edge(self, item: ChatItem, texts: Renderings, lowest: int) -> TurnEdge:
        start, tail = self._begin(texts.prompt, texts.whole)
        if start is not None:
            return TurnEdge(start, tail)
        start, tail = self._begin_after_rewriting(item, texts, lowest)
        return TurnEdge(start, tail, is_rewritten=True)

    def _begin(self, prompt: str, whole: str) -> tuple[int | None, str]:
        """Where a turn begins in its rendering, and what of its prompt is not repeated there.

        The two may part in the header, at the edge of a token or line (`<think>` and `<tool>` share nothing). Where
        they part before it, the template shows another context once the turn is finished: None.
        """
        if whole.startswith(prompt):
            return len(prompt), ""
        same = prompt[: num_same(prompt, whole)]
        edge = max((match.end() for match in self._edge.finditer(same)), default=0)
        if edge < len(prompt) - len(self._dialect.header) or edge == len(whole):  # or else nothing would be the turn's
            return None, ""
        return edge, prompt[edge:]

    def _begin_after_rewriting(self, item: ChatItem, texts: Renderings, lowest: int) -> tuple[int, str]:
        """The same where the contexts differ: the place before the turn's text that looks most like the prompt's end.

        Of the same context with another text in the same place: the turn begins where, at the latest, that does. Places
        that share no token and no line with the prompt's end say nothing: then it is the latest.
        """
        prompt, whole = texts.prompt, texts.whole
        thought = {key: value for key, value in item.message.items() if key == "reasoning_content"}
        example = texts.with_message({**assistant(_WORD), **thought})
        latest = min(example.rfind(_WORD), num_same(whole, example))
        earliest = max(0, latest - _MAX_LEAD - len(str(thought)), self._behind_last_message(texts, lowest))
        header_start = len(prompt) - len(self._dialect.header)
        edges = [match.end() for match in self._edge.finditer(prompt, max(0, header_start))]
        ends = [*edges, header_start, len(prompt)] if prompt.endswith(self._dialect.header) else [len(prompt)]
        positions = range(earliest, latest + 1)
        shared = ((_num_common(_end(prompt, end), _end(whole, at)), end, at) for end in ends for at in positions)
        best = max(
            (overlap for overlap in shared if self._edge.search(prompt, overlap[1] - overlap[0], overlap[1])),
            default=None,
        )
        _, end, start = best or (0, len(prompt), latest)
        return start, prompt[end:]

    def _behind_last_message(self, texts: Renderings, lowest: int) -> int:
        """Where what a template writes behind the last message's text is over: it is not the turn's."""
        before, marked = texts.before(False), texts.before(True)
        if not lowest or before is None or marked is None:
            return lowest
        closing = before[len(before) - _num_common(before, marked) :]
        same = closing[: num_same(texts.whole[lowest : lowest + len(closing)], closing)]
        return lowest + max((match.end() for match in self._edge.finditer(same)), default=0)

    def _without_thought(self, texts: Renderings, edge: TurnEdge) -> TurnEdge:
        """The context ends with an empty thought where a model that thinks would begin one."""
        header, (quiet, empty, _) = self._dialect.header, self._dialect.thought
        if quiet is None or not texts.prompt.endswith(header):
            return edge
        context = texts.prompt.removesuffix(header) + quiet
        same = num_same(header, quiet)
        dropped, added = header[same:], quiet[same:]
        if texts.whole.startswith(context):
            return TurnEdge(len(context), dropped, added, has_empty_thought=True)
        start = edge.start + (len(empty) if texts.whole.startswith(empty, edge.start) else 0)
        return TurnEdge(start, dropped, added, is_rewritten=True, has_empty_thought=True)

    def _behind_thought(self, item: ChatItem, texts: Renderings, edge: TurnEdge) -> TurnEdge:
        """The thought is context: the turn's own text begins behind it."""
        bare = {key: value for key, value in item.message.items() if key != "tool_calls"}
        example = texts.with_message({**bare, "content": _WORD})
        start = example.rfind(_WORD)
        if start < edge.start or texts.whole[:start] != example[:start]:
            got = "a template that shows a thought in another way beside another text"
            raise AlignmentError(explain("thinking as context", got=got, expected="the same block before any text"))
        return edge._replace(start=start, added=texts.whole[edge.start : start])

    def _foreign_text(self, item: ChatItem, text: str) -> AlignmentError:
        turn = "" if item.turn is None else f" {item.turn.id}"
        got = f"text of another message in it, such as {text[:60]!r}"
        fix = "Give a template that writes results and turns apart: render.chat_template, or chat_template= in Python."
        what = f"turn{turn} as {self._template_name} renders it"
        return AlignmentError(explain(what, got=got, expected="what the model itself wrote", fix=fix))


def marked_message(message: Message) -> Message:
    """The message with a word inside each of its texts; roles, names and ids stay.

    An empty text has none, but that of a result: where templates write results into the next turn, empty ones are too.
    """
    marked = {
        key: _marked(value) if key in ("content", "reasoning_content") else value for key, value in message.items()
    }
    if message.get("role") == "tool" and message.get("content") == "":
        marked["content"] = _MARK
    if "tool_calls" in marked:
        marked["tool_calls"] = [_marked_call(call) for call in cast("list[dict[str, Any]]", marked["tool_calls"])]
    return marked


def _marked_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    is_table = isinstance(function["arguments"], Mapping)  # a mark in JSON text could make it no JSON
    return {**call, "function": {**function, "arguments": _marked(function["arguments"])}} if is_table else call


def _marked(value: Any) -> Any:
    """In the middle: templates trim texts, and look at how they begin and end."""
    if isinstance(value, str):
        middle = len(value) // 2
        return f"{value[:middle]}{_MARK}{value[middle:]}" if value else value
    if isinstance(value, Mapping):
        return {key: _marked(member) for key, member in cast("Mapping[str, Any]", value).items()}
    return [_marked(element) for element in cast("list[Any]", value)] if isinstance(value, list) else value


def _is_sampled(item: ChatItem) -> bool:
    """Sampled ids follow the whole generation prompt, and are what they are."""
    return item.turn is not None and bool(item.turn.token_ids)


def _end(text: str, position: int) -> str:
    return text[max(0, position - _COMPARED) : position]


def num_same(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How much two texts, or lists, share at their beginnings; by halves, as whole ones are compared fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _num_common(left_text: str, right: str) -> int:
    """How many characters two texts share at their ends."""
    return num_same(left_text[::-1], right[::-1])
