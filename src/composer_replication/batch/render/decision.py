"""Which tokens of a call decide it: its tool's name, and where its arguments begin or part from the right ones.

The rest of a call follows from these: a path that was chosen is written to its end. So whether a text in the context
changes a decision is asked of these tokens, and not of the sum over a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

from composer_replication.batch.render.renderer import (
    RenderedSequence,
    Renderer,
    TurnSpan,
    token_texts,
)
from composer_replication.errors import InputError
from composer_replication.types import Conversation, ToolCall, Turn

Basis = Literal["correction", "first_argument", "name", "call", "turn"]
Stretch = tuple[int, int]
MOST_ARGUMENT_TOKENS = 12
"""Of a first argument where nothing says which of its tokens is the wrong one."""
# What templates write as it is, whether they quote a value or not.
_PLAIN = re.compile(r"[ !#-\[\]-~]{1,80}")


class CallWords(NamedTuple):
    """A tool's name, and how its first argument begins: what a call's tokens are searched for.

    The first one that is text, where there is one: some tools are told a flag first.
    """

    name: str
    argument: str

    @classmethod
    def of(cls, call: ToolCall) -> CallWords:
        values = [call.raw_arguments] if call.raw_arguments is not None else list(call.arguments.values())
        value = next((argument for argument in values if isinstance(argument, str)), values[0] if values else None)
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
        begin = _PLAIN.match(text.lstrip())
        return cls(call.name, begin[0] if begin else "")


class Decision(NamedTuple):
    """Stretches [first, end) of a sequence's tokens at which a call is decided, in order, and what they are.

    `correction`: name, and the first token that differs from the right call (in the name, where that differs).
    `first_argument`: name, and the first tokens of the first argument. `name`: the name alone. `call`, `turn`: all of
    the calls where no name is found in them, all of the turn where it has none. `depth`: by how many tokens the first
    one that differs stands behind the first of the first argument.
    """

    stretches: tuple[Stretch, ...]
    basis: Basis
    depth: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(end - first for first, end in self.stretches)


def decide(
    renderer: Renderer,
    rendered: RenderedSequence,
    span: TurnSpan,
    words: CallWords | None,
    *,
    start: int | None = None,
    most: int = MOST_ARGUMENT_TOKENS,
) -> Decision:
    """The decision of a turn's first call, or of the one that begins at token `start`."""
    if span.call_start is None or span.call_end is None:
        return Decision(((span.start, span.end),), "turn")
    whole = Decision(((span.call_start, span.call_end),), "call")
    if words is None:
        return whole
    first = span.call_start if start is None else start
    texts = _TokenTexts(token_texts(renderer.tokenizer, rendered.ids[first : span.call_end]), first)
    name = texts.find(rf"(?<!\w){re.escape(words.name)}(?!\w)", first)
    if name is None:
        return whole
    argument = texts.find(re.escape(words.argument), name[1]) if words.argument else None
    if argument is None:
        return Decision((name,), "name")
    return Decision((name, (argument[0], min(argument[1], argument[0] + most))), "first_argument")


def decide_like(
    renderer: Renderer, rendered: RenderedSequence, span: TurnSpan, words: CallWords, other: Decision
) -> Decision | None:
    """The decision of a turn's first call on as many tokens of name and argument as another's; None if it has fewer.

    Means over more or other tokens would not compare. A token deep in an argument is compared with one as deep, or with
    the last one; whole calls and turns with as much of a whole one as there is.
    """
    if other.basis in ("call", "turn"):
        whole = decide(renderer, rendered, span, None)
        ((first, end),) = whole.stretches
        return whole._replace(stretches=((first, min(end, first + other.num_tokens)),))
    own_decision = decide(renderer, rendered, span, words, most=span.end)
    have, sizes = ([end - first for first, end in decision.stretches] for decision in (own_decision, other))
    if own_decision.basis == "call" or len(have) < len(sizes) or any(map(int.__lt__, have, sizes)):
        return None
    deep = (0, min(other.depth, have[-1] - sizes[-1]))
    begins = [first + at for (first, _), at in zip(own_decision.stretches, deep, strict=False)]
    stretches = tuple((begin, begin + size) for begin, size in zip(begins, sizes, strict=False))
    return Decision(stretches, other.basis, other.depth)


def decide_against(
    renderer: Renderer,
    rendered: RenderedSequence,
    span: TurnSpan,
    turn: Turn,
    number: int,
    *,
    format_name: str,
    right: ToolCall | None = None,
) -> Decision:
    """The decision of call `number` of a turn; with a right call to compare it with, where they part.

    A right call is written by the same template behind the same opening; where the turn's tokens are not those that the
    template writes (a rollout's own), it cannot be compared.
    """
    calls, start = turn.calls, span.call_start
    if start is None or not calls:
        return decide(renderer, rendered, span, None)
    own_ids, alone = rendered.ids[start : span.call_end], _LoneTurn(renderer, turn, format_name)
    if number or right is not None:
        if alone.call_ids(calls) != own_ids:
            return decide(renderer, rendered, span, None if number else CallWords.of(calls[0]))
        start += _num_same(alone.call_ids(_with(calls, number, _renamed(calls[number]))), own_ids) if number else 0
    decision = decide(renderer, rendered, span, CallWords.of(calls[number]), start=start)
    if right is None or decision.basis == "call":
        return decision
    other_ids = alone.call_ids(_with(calls, number, right))
    parting = (span.call_start or 0) + _num_same(other_ids, own_ids)
    if other_ids == own_ids or parting >= (span.call_end or 0):
        return decision
    name, argument = decision.stretches[0], decision.stretches[1:]
    if parting < name[1]:
        return Decision((name,), "correction")
    depth = max(0, parting - argument[0][0]) if argument else 0
    return Decision((name, (parting, parting + 1)), "correction", depth)


class _TokenTexts:
    """What tokens say, and which of them a stretch of the text is in."""

    def __init__(self, texts: Sequence[str], first: int) -> None:
        self._text, self._first = "".join(texts), first
        self._ends = list(accumulate(map(len, texts)))

    def find(self, pattern: str, after: int) -> Stretch | None:
        """The tokens of the first match that begins at token `after` or behind it."""
        begin = 0 if after == self._first else self._ends[after - self._first - 1]
        match = re.compile(pattern).search(self._text, begin)
        if match is None or match.end() == match.start():
            return None
        first = next(at for at, end in enumerate(self._ends) if end > match.start())
        last = next(at for at, end in enumerate(self._ends) if end >= match.end())
        return self._first + first, self._first + last + 1


class _LoneTurn:
    """A turn's calls as the template writes them behind one short message, whatever the session is."""

    def __init__(self, renderer: Renderer, turn: Turn, format_name: str) -> None:
        self._renderer, self._turn, self._format = renderer, turn, format_name

    def call_ids(self, calls: Sequence[ToolCall]) -> list[int]:
        turn = replace(self._turn, calls=tuple(calls), token_ids=None, logprobs=None)
        question = Turn(id=f"{turn.id}:asked", role="user", origin="human", text="u", provenance=turn.provenance)
        try:
            rendered = self._renderer.render(Conversation(id=turn.id, format=self._format, turns=(question, turn)))[-1]
        except InputError:  # the template refuses it
            return []
        span = rendered.spans[-1]
        return [] if span.call_start is None else rendered.ids[span.call_start : span.call_end]


def _with(calls: Sequence[ToolCall], number: int, call: ToolCall) -> list[ToolCall]:
    return [*calls[:number], call, *calls[number + 1 :]]


def _renamed(call: ToolCall) -> ToolCall:
    """With a name of another first letter: what differs begins where the name does."""
    return replace(call, name="z" if not call.name.startswith("z") else "q")


def _num_same(left_ids: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that two sequences begin with alike."""
    shorter = min(len(left_ids), len(right))
    return next((at for at in range(shorter) if left_ids[at] != right[at]), shorter)
