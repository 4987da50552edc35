"""Cut a rendering at the edges of assistant turns, into the context before each turn and the turn's own text.

For turn k, let T be the template, P = T(messages before k, with the generation prompt) and Q = T(messages up to and
including k). The turn's own text is the part of Q after P, up to the end-of-turn token; if Q does not repeat the whole
header, P shrinks to their common prefix. The context of the next turn is the part of the next P after that text. If the
next P does not begin with that text, the template has rewritten history, and a new sequence begins.

Rendering every prefix would take quadratic time. Templates depend only on nearby messages, so the differences are
computed in short windows (the opening or a stand-in for it, the unit before, the last unit with thinking). Every
sequence assembled from windows is compared with the template's rendering of the whole; if they differ, every prefix is
rendered in full.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from composer_replication.batch.render.dialect import (
    Dialect,
    Outcome,
    ProtectedTokens,
    assistant,
    insert_raw,
    system,
    user,
)
from composer_replication.batch.render.messages import Chat, ChatItem
from composer_replication.batch.render.templates import ChatTemplate
from composer_replication.errors import AlignmentError, InputError, explain
from composer_replication.types import Message, Turn

# Templates add a preamble if there are tools. In a window, one short schema is enough to trigger it.
_STAND_IN_TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {}}}
_Tools = Sequence[Mapping[str, Any]] | None


@dataclass(slots=True, kw_only=True)
class TurnPiece:
    """One assistant turn in a sequence, as escaped text. Its positions count characters."""

    turn: Turn
    previous_role: str
    context: str  # from the end of the sequence's last turn up to this one's first character
    header_start: int  # in `context`
    prompt_tail: str  # the end of the generation prompt that the finished turn does not repeat
    completion: str  # the turn's own text, including `stop`
    stop: str  # the end-of-turn token; empty if there is none
    call: tuple[int, int] | None  # in `completion`
    thinking: Outcome
    has_empty_thought: bool  # the context ends with an empty thought


@dataclass(slots=True)
class _WindowStep:
    """A turn as rendered in its window. `follows` is the context of the next turn; None if the next turn's prompt
    shows this turn differently, or if no turn follows.
    """

    header_chars: int
    edge: _TurnEdge
    completion: str
    stop: str
    call: tuple[int, int] | None
    follows: str | None


class _WindowMismatchError(Exception):
    """A sequence assembled from windows differs from the template's rendering of the whole."""


class Cutter:
    """Splits conversations that are rendered by one template into assistant turns and their contexts."""

    def __init__(self, template: ChatTemplate, dialect: Dialect, protected: ProtectedTokens, tools: _Tools) -> None:
        self._template, self._dialect, self._tools = template, dialect, tools
        # An edge of a token or a line: "<|im_start|>" and "\n" in "<|im_start|>user\n"; not "user".
        self._edges = _EdgeFinder(dialect, re.compile(f"{protected.pattern.pattern}|\n"), template.name)
        self._stand_in_tools = [_STAND_IN_TOOL] if tools else None

    def cut(self, chat: Chat) -> list[list[TurnPiece]]:
        """Return the turns of each sequence, in order; every assistant turn is in exactly one sequence."""
        units = _TurnUnits(chat)
        if not units.starts:
            return []
        for has_short_opening in (True, False):
            windows, tools = (
                units.windows(has_short_opening),
                self._stand_in_tools if has_short_opening else self._tools,
            )
            try:
                return self._assemble(units, [self._step(units, n, window, tools) for n, window in enumerate(windows)])
            # The template may reject a window or treat it specially, although it can render the whole conversation.
            except (_WindowMismatchError, InputError):
                continue
        chat.notes["rendered_every_prefix"] += 1
        try:
            prefixes = (units.messages(number) for number in range(len(units.starts)))
            return self._assemble(
                units, [self._step(units, n, before, self._tools) for n, before in enumerate(prefixes)]
            )
        except _WindowMismatchError as error:
            got = "two renderings of the same messages that differ"
            raise InputError(explain("chat template", got=got, expected="the same text every time")) from error

    def _assemble(self, units: _TurnUnits, steps: list[_WindowStep]) -> list[list[TurnPiece]]:
        """Assemble sequences of pieces, each of them checked against a rendering of the whole sequence."""
        sequences: list[list[TurnPiece]] = []
        context: str | None = None
        for number, step in enumerate(steps):
            # At the start, and after a turn that is rewritten by the next one, the context has to be rendered in full.
            # If it still begins with the last sequence, the window was wrong about the rewriting.
            if context is None:
                context = self._render(units, units.messages(number), self._tools, prompt=True)
                prefix = "".join(piece.context + piece.completion for piece in sequences[-1]) if sequences else ""
                if sequences and context.startswith(prefix):
                    context = context[len(prefix) :]
                else:
                    if sequences:
                        self._check(units, number - 1, sequences[-1], steps[number - 1].edge)
                    sequences.append([])
            sequences[-1].append(_turn_piece(units, number, step, context))
            context = step.follows
        self._check(units, len(steps) - 1, sequences[-1], steps[-1].edge)
        return sequences

    def _check(self, units: _TurnUnits, number: int, pieces: list[TurnPiece], edge: _TurnEdge) -> None:
        """Raise unless the template renders exactly this sequence up to its last turn, or up to the prompt of that
        turn.
        """
        text = "".join(piece.context + piece.completion for piece in pieces)
        whole = self._render(units, units.messages(number, with_turn=True), self._tools)
        matches = whole.startswith(text)
        if edge.is_rewritten:
            prompt = self._render(units, units.messages(number), self._tools, prompt=True)
            completion = pieces[-1].completion
            matches = prompt.startswith(text.removesuffix(completion).removesuffix(edge.added)) and completion in whole
        if not matches:
            raise _WindowMismatchError

    def _step(self, units: _TurnUnits, number: int, before: list[Message], tools: _Tools) -> _WindowStep:
        """Render turn `number` after the messages `before` it in a window, and find the parts of its text."""
        item = units.item(number)
        prompt = self._render(units, before, tools, prompt=True)
        whole = self._render(units, [*before, item.message], tools)
        edge = self._edges.find(item, self._renderings(units, item, before, tools, prompt, whole))
        start = edge.start
        completion, stop = self._cut_after_stop(whole[start:])
        prefix, follows = whole[:start] + completion, None
        if not units.is_last(number) and not edge.is_rewritten:
            next_prompt = self._render(units, [*before, *units.unit(number)], tools, prompt=True)
            follows = next_prompt[len(prefix) :] if next_prompt.startswith(prefix) else None
        call = None
        if item.bare is not None:
            call_start = self._call_token_start(item, completion)
            if call_start is None:
                bare = self._render(units, [*before, item.bare], tools)
                call_start = self._call_start(bare[start:] if bare.startswith(whole[:start]) else "", completion, stop)
            call = call_start, len(completion) - len(stop)
        header = self._dialect.header if prompt.endswith(self._dialect.header) else ""
        header_chars = max(0, len(header) - len(edge.dropped)) + len(edge.added)
        return _WindowStep(header_chars, edge, completion, stop, call, follows)

    def _renderings(
        self, units: _TurnUnits, item: ChatItem, before: list[Message], tools: _Tools, prompt: str, whole: str
    ) -> _Renderings:
        def with_message(message: Message) -> str:
            return self._render(units, [*before, message], tools)

        def render_if_accepted(messages: list[Message]) -> str | None:
            try:
                return self._render(units, messages, tools)
            # A template may parse its input, for example a result as JSON, or require that the last message is an
            # answer.
            except InputError:
                return None

        marked = [units.marked(message) for message in before]
        return _Renderings(
            prompt,
            whole,
            with_message,
            render_if_accepted([*marked, item.message]),
            lambda is_marked: render_if_accepted(marked if is_marked else before),
        )

    def _cut_after_stop(self, text: str) -> tuple[str, str]:
        """Return the text up to and including the end-of-turn token, and that token; the whole text if it contains
        no such token.
        """
        end, stop = max(((text.rfind(stop), stop) for stop in self._dialect.stops), default=(-1, ""))
        return (text[: end + len(stop)], stop) if end >= 0 else (text, "")

    def _call_token_start(self, item: ChatItem, completion: str) -> int | None:
        """Return the position of the token that opens the calls, or None. Only the template can write this token."""
        token = self._dialect.call_token if "tool_calls" in item.message else None
        start = completion.find(token) if token else -1
        return start if start >= 0 else None

    def _call_start(self, bare: str, completion: str, stop: str) -> int:
        """Return where the calls begin: where the turn first differs from the same turn without calls."""
        text = self._cut_after_stop(bare)[0].removesuffix(stop)
        start = len(text) if completion.startswith(text) else 0
        return start + len(completion[start:]) - len(completion[start:].lstrip())

    def _render(self, units: _TurnUnits, messages: list[Message], tools: _Tools, *, prompt: bool = False) -> str:
        return insert_raw(self._template.render(messages, prompt=prompt, tools=tools), units.chat.raw)


class _TurnUnits:
    """The messages of a chat, grouped into units: an assistant turn and all messages up to the next one."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._messages = [item.message for item in chat.items]
        self.starts = [index for index, item in enumerate(chat.items) if item.turn is not None]
        self._last_with_thinking = self._last_units_with_thinking()
        # By `id(message)`. Holding the message as well keeps its id from being reused.
        self._marked: dict[int, tuple[Message, Message]] = {}

    def marked(self, message: Message) -> Message:
        """Return a copy of the message with a mark inside each of its texts. Copies are cached."""
        if id(message) not in self._marked:
            self._marked[id(message)] = message, _mark_message(message)
        return self._marked[id(message)][1]

    def item(self, number: int) -> ChatItem:
        """Return the message of a turn."""
        return self.chat.items[self.starts[number]]

    def is_last(self, number: int) -> bool:
        """Whether this is the last turn."""
        return number == len(self.starts) - 1

    def messages(self, number: int, *, with_turn: bool = False) -> list[Message]:
        """Return the messages before a turn, optionally with the turn itself."""
        return self._messages[: self.starts[number] + int(with_turn)]

    def unit(self, number: int) -> list[Message]:
        """Return a turn's message and all messages up to the next turn."""
        end = None if self.is_last(number) else self.starts[number + 1]
        return self._messages[self.starts[number] : end]

    def windows(self, has_short_opening: bool) -> Iterator[list[Message]]:
        """Yield for each turn the few preceding messages on which a template can be expected to depend.

        Short windows use a stand-in for the opening of the chat. It does not work for templates that repeat the system
        prompt or the tools later, so windows with the real opening are tried next.
        """
        opening = self._stand_in_opening() if has_short_opening else self.messages(0)
        for number in range(len(self.starts)):
            thoughtful = self._last_with_thinking[number - 1] if number else None
            thoughtful_unit = self.unit(thoughtful) if thoughtful is not None else []
            yield [*opening, *thoughtful_unit, *(self.unit(number - 1) if number else [])]

    def previous_role(self, number: int) -> str:
        """Return the role of the message before a turn; an empty string if the turn is the first message."""
        start = self.starts[number]
        return self.chat.items[start - 1].role if start else ""

    def _stand_in_opening(self) -> list[Message]:
        """Return minimal messages with the same roles as the messages that open the chat."""
        roles = {item.role for item in self.chat.items[: self.starts[0]]}
        opening = [system("s")] if "system" in roles else []
        return opening + ([user("u")] if roles - {"system"} else [])

    def _last_units_with_thinking(self) -> list[int | None]:
        """Return for each unit the index of the last earlier unit with thinking, which a template may remove from
        later prompts.
        """
        last, last_units = None, list[int | None]()
        for number in range(len(self.starts)):
            last_units.append(last)
            if "reasoning_content" in self.item(number).message:
                last = number
        return last_units


def _turn_piece(units: _TurnUnits, number: int, step: _WindowStep, context: str) -> TurnPiece:
    edge, item = step.edge, units.item(number)
    if not context.endswith(edge.dropped):
        raise _WindowMismatchError
    context = context[: len(context) - len(edge.dropped)] + edge.added
    assert item.turn is not None
    return TurnPiece(
        turn=item.turn,
        previous_role=units.previous_role(number),
        context=context,
        header_start=len(context) - step.header_chars,
        prompt_tail=edge.dropped,
        completion=step.completion,
        stop=step.stop,
        call=step.call,
        thinking=item.thinking if edge.has_thought or item.thinking not in ("target", "context") else "not_shown",
        has_empty_thought=edge.has_empty_thought,
    )


# ---- the edge of a turn: where its own text begins in a rendering, and what ends its context

# Probe words: no template contains them.
_PROBE_WORD, _MARK = "Zqword", "Zqmark"
# An upper bound: templates write at most a few words between a prompt and a turn.
_MAX_LEAD_CHARS = 256
# A position in a rendering is recognized by this many characters before it.
_COMPARED_CHARS = 1024


class _TurnEdge(NamedTuple):
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


class _Renderings(NamedTuple):
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


class _EdgeFinder:
    """Finds where the text of a turn begins in renderings of one template.

    The rendering with the turn either continues the prompt or differs from it: in the header, or earlier if the
    template rewrites the context once the turn is finished. The turn's own text, which is trained on, must contain no
    text of the context. So all other messages are marked, and only text after the last mark can be the turn's own.
    """

    def __init__(self, dialect: Dialect, edge: re.Pattern[str], template_name: str) -> None:
        self._dialect, self._edge, self._template_name = dialect, edge, template_name

    def find(self, item: ChatItem, texts: _Renderings) -> _TurnEdge:
        """Return where the turn's own text begins. Raises AlignmentError if that text would contain text of another
        message.
        """
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

    def _edge_of_own_text(self, item: ChatItem, texts: _Renderings, lowest: int) -> _TurnEdge:
        start, tail = self._find_start(texts.prompt, texts.whole)
        if start is not None:
            return _TurnEdge(start, tail)
        start, tail = self._find_rewritten_start(item, texts, lowest)
        return _TurnEdge(start, tail, is_rewritten=True)

    def _find_start(self, prompt: str, whole: str) -> tuple[int | None, str]:
        """Return where a turn begins in its rendering, and the part of the prompt's end that the rendering does not
        repeat.

        The start is None if the prompt and the rendering differ before the header, that is, if the template rewrites
        the context once the turn is finished.
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

    def _find_rewritten_start(self, item: ChatItem, texts: _Renderings, lowest: int) -> tuple[int, str]:
        """Find a turn's start like `_find_start`, for a template that rewrites the context once the turn is finished.

        Among all positions up to the turn's text, choose the one where the preceding text best matches the end of the
        prompt.
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

    def _end_of_last_message(self, texts: _Renderings, lowest: int) -> int:
        """Return where the template's text after the last message ends; the turn cannot begin before that."""
        before, marked = texts.before(False), texts.before(True)
        if not lowest or before is None or marked is None:
            return lowest
        closing = before[len(before) - _common_suffix_length(before, marked) :]
        shared = closing[: common_prefix_length(texts.whole[lowest : lowest + len(closing)], closing)]
        return lowest + max((match.end() for match in self._edge.finditer(shared)), default=0)

    def _skip_empty_thought(self, texts: _Renderings, edge: _TurnEdge) -> _TurnEdge:
        """Return the turn's edge with an empty thought added to the context, at the place where a thinking model
        would begin its thought.
        """
        header, (quiet_header, empty, _) = self._dialect.header, self._dialect.thought
        if quiet_header is None or not texts.prompt.endswith(header):
            return edge
        # The plain header becomes the quiet one: what they do not share is dropped and added.
        context = texts.prompt.removesuffix(header) + quiet_header
        num_shared = common_prefix_length(header, quiet_header)
        dropped, added = header[num_shared:], quiet_header[num_shared:]
        if texts.whole.startswith(context):
            return _TurnEdge(len(context), dropped, added, has_empty_thought=True)
        # The template shows finished turns without an empty thought, or with one in another form: skip that.
        start = edge.start + (len(empty) if texts.whole.startswith(empty, edge.start) else 0)
        return _TurnEdge(start, dropped, added, is_rewritten=True, has_empty_thought=True)

    def _edge_after_thought(self, item: ChatItem, texts: _Renderings, edge: _TurnEdge) -> _TurnEdge:
        """Return the edge of a turn whose thought belongs to the context, so that the turn's own text begins after
        the thought.
        """
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


def _mark_message(message: Message) -> Message:
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
