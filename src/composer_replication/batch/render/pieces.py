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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.batch.render.dialect import Dialect, Outcome, ProtectedTokens, insert_raw, system, user
from composer_replication.batch.render.messages import Chat, ChatItem, EdgeFinder, Renderings, TurnEdge, mark_message
from composer_replication.batch.render.templates import ChatTemplate
from composer_replication.errors import InputError, explain
from composer_replication.types import Message, Turn

# Templates add a preamble if there are tools. In a window, one short schema is enough to trigger it.
_STAND_IN_TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {}}}
_Tools = Sequence[Mapping[str, Any]] | None


@dataclass(slots=True, kw_only=True)
class TurnPiece:
    """One assistant turn in a sequence, as escaped text; positions are characters."""

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
    """A turn as rendered in its window. `follows` is the context of the next turn; None if that rewrites this turn."""

    header_chars: int
    edge: TurnEdge
    completion: str
    stop: str
    call: tuple[int, int] | None
    follows: str | None


class _WindowMismatchError(Exception):
    """A sequence assembled from windows differs from the template's rendering of the whole."""


class Cutter:
    """Cuts conversations that are rendered by one template."""

    def __init__(self, template: ChatTemplate, dialect: Dialect, protected: ProtectedTokens, tools: _Tools) -> None:
        self._template, self._dialect, self._tools = template, dialect, tools
        # An edge of a token or a line: "<|im_start|>" and "\n" in "<|im_start|>user\n"; not "user".
        self._edges = EdgeFinder(dialect, re.compile(f"{protected.pattern.pattern}|\n"), template.name)
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

    def _check(self, units: _TurnUnits, number: int, pieces: list[TurnPiece], edge: TurnEdge) -> None:
        """Raise unless the template renders exactly this sequence up to its last turn, or up to that turn's prompt."""
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
        """Render turn `number` after the messages of a window."""
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
    ) -> Renderings:
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
        return Renderings(
            prompt,
            whole,
            with_message,
            render_if_accepted([*marked, item.message]),
            lambda is_marked: render_if_accepted(marked if is_marked else before),
        )

    def _cut_after_stop(self, text: str) -> tuple[str, str]:
        """Return the text up to and including the end-of-turn token, and the token; without a token, the whole text."""
        end, stop = max(((text.rfind(stop), stop) for stop in self._dialect.stops), default=(-1, ""))
        return (text[: end + len(stop)], stop) if end >= 0 else (text, "")

    def _call_token_start(self, item: ChatItem, completion: str) -> int | None:
        """Return the position of the token that opens the calls, which only the template can write."""
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
    """The messages of a chat in units: an assistant turn and all messages up to the next one."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._messages = [item.message for item in chat.items]
        self.starts = [index for index, item in enumerate(chat.items) if item.turn is not None]
        self._last_with_thinking = self._last_units_with_thinking()
        # By `id(message)`. Holding the message as well keeps its id from being reused.
        self._marked: dict[int, tuple[Message, Message]] = {}

    def marked(self, message: Message) -> Message:
        """Return the message with marks in its texts, from a cache."""
        if id(message) not in self._marked:
            self._marked[id(message)] = message, mark_message(message)
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
        """Yield for each turn the few messages before it on which a template can be expected to depend.

        Short windows use a stand-in for the opening. That fails for templates that repeat the system prompt or the
        tools later on, so windows with the real opening are tried next.
        """
        opening = self._stand_in_opening() if has_short_opening else self.messages(0)
        for number in range(len(self.starts)):
            thoughtful = self._last_with_thinking[number - 1] if number else None
            thoughtful_unit = self.unit(thoughtful) if thoughtful is not None else []
            yield [*opening, *thoughtful_unit, *(self.unit(number - 1) if number else [])]

    def previous_role(self, number: int) -> str:
        """Return the role of the message before a turn; empty if there is none."""
        start = self.starts[number]
        return self.chat.items[start - 1].role if start else ""

    def _stand_in_opening(self) -> list[Message]:
        """Return minimal messages with the same roles as the opening."""
        roles = {item.role for item in self.chat.items[: self.starts[0]]}
        opening = [system("s")] if "system" in roles else []
        return opening + ([user("u")] if roles - {"system"} else [])

    def _last_units_with_thinking(self) -> list[int | None]:
        """Return for each unit the last unit before it with thinking, which a template may remove later."""
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
