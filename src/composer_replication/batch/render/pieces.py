"""A rendering cut at the edges of assistant turns: what stands before a turn, and what the turn itself says.

For turn k, with T = the template's text: P = T(messages before k, with the generation prompt), Q = T(messages up to and
with k). The turn's own text is what Q has beyond P, up to the end-of-turn token; where Q does not repeat the whole
header, P shrinks to what they share. The text up to the next turn is what the next P has beyond it; where the next P
does not begin with it, the template has rewritten history, and a new sequence begins.

Rendering every prefix would be quadratic. A template looks at neighbours, so the differences are taken in short
windows (the opening or a stand-in for it, the unit before, the last unit with thinking), and every sequence put
together from them is compared with the template's own rendering of the whole. Where that differs, the prefixes are
rendered in full after all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.batch.render.dialect import (
    Dialect,
    Outcome,
    ProtectedTokens,
    insert_raw,
    system,
    user,
)
from composer_replication.batch.render.messages import (
    Chat,
    ChatItem,
    EdgeFinder,
    Renderings,
    TurnEdge,
    marked_message,
)
from composer_replication.batch.render.templates import ChatTemplate
from composer_replication.errors import InputError, explain
from composer_replication.types import Message, Turn

_STAND_IN_TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {}}}
_Tools = Sequence[Mapping[str, Any]] | None


@dataclass(slots=True, kw_only=True)
class TurnPiece:
    """One assistant turn in a sequence, as escaped text; positions are characters."""

    turn: Turn
    previous_role: str
    context: str  # from the end of the sequence's last turn up to this one's first character
    header_start: int  # in `context`
    prompt_tail: str  # of the generation prompt, not repeated by the finished turn
    completion: str
    stop: str
    call: tuple[int, int] | None  # in `completion`
    thinking: Outcome
    has_empty_thought: bool  # the context ends with one


@dataclass(slots=True)
class _WindowStep:
    """A turn seen through a window; `follows` is None where what comes next rewrites it."""

    header_chars: int
    edge: TurnEdge
    completion: str
    stop: str
    call: tuple[int, int] | None
    follows: str | None


class _WindowsMisleadError(Exception):
    """A sequence put together from windows is not what the template renders."""


class Cutter:
    """Cuts the conversations of one template."""

    def __init__(self, template: ChatTemplate, dialect: Dialect, protected: ProtectedTokens, tools: _Tools) -> None:
        self._template, self._dialect, self._tools = template, dialect, tools
        self._edges = EdgeFinder(dialect, re.compile(f"{protected.pattern.pattern}|\n"), template.name)
        self._few_tools = [_STAND_IN_TOOL] if tools else None

    def cut(self, chat: Chat) -> list[list[TurnPiece]]:
        """The turns of each sequence, in order; every assistant turn is in exactly one."""
        view = _TurnUnits(chat)
        if not view.starts:
            return []
        for is_short in (True, False):
            windows, tools = view.windows(is_short), self._few_tools if is_short else self._tools
            try:
                return self._assemble(view, [self._step(view, n, window, tools) for n, window in enumerate(windows)])
            except (_WindowsMisleadError, InputError):  # a template may refuse a window, or go wrong in it alone
                continue
        chat.notes["rendered_every_prefix"] += 1
        try:
            prefixes = (view.messages(number) for number in range(len(view.starts)))
            return self._assemble(view, [self._step(view, n, before, self._tools) for n, before in enumerate(prefixes)])
        except _WindowsMisleadError as error:
            got = "two renderings of the same messages that differ"
            raise InputError(explain("chat template", got=got, expected="always the same text")) from error

    def _assemble(self, view: _TurnUnits, steps: list[_WindowStep]) -> list[list[TurnPiece]]:
        sequences: list[list[TurnPiece]] = []
        context: str | None = None
        for number, step in enumerate(steps):
            if context is None:
                context = self._render(view, view.messages(number), self._tools, prompt=True)
                prefix = "".join(piece.context + piece.completion for piece in sequences[-1]) if sequences else ""
                if sequences and context.startswith(prefix):
                    context = context[len(prefix) :]
                else:
                    if sequences:
                        self._check(view, number - 1, sequences[-1], steps[number - 1].edge)
                    sequences.append([])
            sequences[-1].append(_piece(view, number, step, context))
            context = step.follows
        self._check(view, len(steps) - 1, sequences[-1], steps[-1].edge)
        return sequences

    def _check(self, view: _TurnUnits, number: int, pieces: list[TurnPiece], edge: TurnEdge) -> None:
        """A sequence must be what the template renders up to its last turn, or else the prompt of that turn."""
        text = "".join(piece.context + piece.completion for piece in pieces)
        whole = self._render(view, view.messages(number, with_turn=True), self._tools)
        is_right = whole.startswith(text)
        if edge.is_rewritten:
            prompt = self._render(view, view.messages(number), self._tools, prompt=True)
            completion = pieces[-1].completion
            is_right = prompt.startswith(text.removesuffix(completion).removesuffix(edge.added)) and completion in whole
        if not is_right:
            raise _WindowsMisleadError

    def _step(self, view: _TurnUnits, number: int, before: list[Message], tools: _Tools) -> _WindowStep:
        item = view.item(number)
        prompt = self._render(view, before, tools, prompt=True)
        whole = self._render(view, [*before, item.message], tools)
        edge = self._edges.find(item, self._renderings(view, item, before, tools, prompt, whole))
        start = edge.start
        completion, stop = self._up_to_stop(whole[start:])
        prefix, follows = whole[:start] + completion, None
        if not view.is_last(number) and not edge.is_rewritten:
            coming = self._render(view, [*before, *view.unit(number)], tools, prompt=True)
            follows = coming[len(prefix) :] if coming.startswith(prefix) else None
        call = None
        if item.bare is not None:
            call_start = self._call_token_start(item, completion)
            if call_start is None:
                bare = self._render(view, [*before, item.bare], tools)
                call_start = self._call_start(bare[start:] if bare.startswith(whole[:start]) else "", completion, stop)
            call = call_start, len(completion) - len(stop)
        header = self._dialect.header if prompt.endswith(self._dialect.header) else ""
        header_chars = max(0, len(header) - len(edge.dropped)) + len(edge.added)
        return _WindowStep(header_chars, edge, completion, stop, call, follows)

    def _renderings(
        self, view: _TurnUnits, item: ChatItem, before: list[Message], tools: _Tools, prompt: str, whole: str
    ) -> Renderings:
        def with_message(message: Message) -> str:
            return self._render(view, [*before, message], tools)

        def checked(messages: list[Message]) -> str | None:
            try:
                return self._render(view, messages, tools)
            except InputError:  # it reads what it is given, a result as JSON say, or wants an answer last
                return None

        marked = [view.marked(message) for message in before]
        return Renderings(
            prompt,
            whole,
            with_message,
            checked([*marked, item.message]),
            lambda is_marked: checked(marked if is_marked else before),
        )

    def _up_to_stop(self, text: str) -> tuple[str, str]:
        """The turn with its end-of-turn token; without one, with everything the template writes after it."""
        end, stop = max(((text.rfind(stop), stop) for stop in self._dialect.stops), default=(-1, ""))
        return (text[: end + len(stop)], stop) if end >= 0 else (text, "")

    def _call_token_start(self, item: ChatItem, completion: str) -> int | None:
        """Where the token stands that opens calls, which only the template can write."""
        token = self._dialect.call_token if "tool_calls" in item.message else None
        start = completion.find(token) if token else -1
        return start if start >= 0 else None

    def _call_start(self, bare: str, completion: str, stop: str) -> int:
        """The call is what a turn has beyond the same turn without it."""
        text = self._up_to_stop(bare)[0].removesuffix(stop)
        start = len(text) if completion.startswith(text) else 0
        return start + len(completion[start:]) - len(completion[start:].lstrip())

    def _render(self, view: _TurnUnits, messages: list[Message], tools: _Tools, *, prompt: bool = False) -> str:
        return insert_raw(self._template.render(messages, prompt=prompt, tools=tools), view.chat.raw)


class _TurnUnits:
    """The messages by assistant turns: a unit is such a turn with everything up to the next one."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._messages = [item.message for item in chat.items]
        self.starts = [index for index, item in enumerate(chat.items) if item.turn is not None]
        self._thoughtful = self._last_units_with_thinking()
        self._marked: dict[int, tuple[Message, Message]] = {}  # the message itself too: its id must stay its own

    def marked(self, message: Message) -> Message:
        """The message with marks in its texts, made once."""
        if id(message) not in self._marked:
            self._marked[id(message)] = message, marked_message(message)
        return self._marked[id(message)][1]

    def item(self, number: int) -> ChatItem:
        return self.chat.items[self.starts[number]]

    def is_last(self, number: int) -> bool:
        return number == len(self.starts) - 1

    def messages(self, number: int, *, with_turn: bool = False) -> list[Message]:
        """Everything before a turn."""
        return self._messages[: self.starts[number] + int(with_turn)]

    def unit(self, number: int) -> list[Message]:
        end = None if self.is_last(number) else self.starts[number + 1]
        return self._messages[self.starts[number] : end]

    def windows(self, is_short: bool) -> Iterator[list[Message]]:
        """For each turn a stand-in for the messages before it: what a template can be expected to look at.

        A short one stands in for the opening too; some templates repeat the system prompt or the tools later on.
        """
        opening = self._stand_in() if is_short else self.messages(0)
        for number in range(len(self.starts)):
            thoughtful = self._thoughtful[number - 1] if number else None
            far = self.unit(thoughtful) if thoughtful is not None else []
            yield [*opening, *far, *(self.unit(number - 1) if number else [])]

    def previous_role(self, number: int) -> str:
        start = self.starts[number]
        return self.chat.items[start - 1].role if start else ""

    def _stand_in(self) -> list[Message]:
        roles = {item.role for item in self.chat.items[: self.starts[0]]}
        opening = [system("s")] if "system" in roles else []
        return opening + ([user("u")] if roles - {"system"} else [])

    def _last_units_with_thinking(self) -> list[int | None]:
        """For each unit, the last one before it that has thinking: a template may take it back later."""
        last, last_units = None, list[int | None]()
        for number in range(len(self.starts)):
            last_units.append(last)
            if "reasoning_content" in self.item(number).message:
                last = number
        return last_units


def _piece(view: _TurnUnits, number: int, step: _WindowStep, context: str) -> TurnPiece:
    edge, item = step.edge, view.item(number)
    if not context.endswith(edge.dropped):
        raise _WindowsMisleadError
    context = context[: len(context) - len(edge.dropped)] + edge.added
    assert item.turn is not None
    return TurnPiece(
        turn=item.turn,
        previous_role=view.previous_role(number),
        context=context,
        header_start=len(context) - step.header_chars,
        prompt_tail=edge.dropped,
        completion=step.completion,
        stop=step.stop,
        call=step.call,
        thinking=item.thinking if edge.has_thought or item.thinking not in ("target", "context") else "not_shown",
        has_empty_thought=edge.has_empty_thought,
    )
