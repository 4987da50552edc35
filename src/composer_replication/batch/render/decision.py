"""Find the tokens that decide a call: the tool's name, and the tokens where its arguments begin or become wrong.

The rest of a call follows from these tokens: once a path is chosen, only its spelling remains. So the effect of a hint
on a decision is measured on these tokens rather than summed over the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

from composer_replication.batch.render.pieces import common_prefix_length
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan, token_texts
from composer_replication.errors import InputError
from composer_replication.types import Conversation, ToolCall, Turn

Basis = Literal["correction", "first_argument", "name", "call", "turn"]
Stretch = tuple[int, int]
MAX_ARGUMENT_TOKENS = 12
"""How many tokens of a first argument count if it is unknown which of them is wrong."""
# Printable ASCII without '"' and "\", which templates escape when they quote a value:
# 'src/app.py' -> 'src/app.py'; 'echo "hi"' -> 'echo '; not '"hi"'
_UNESCAPED_START = re.compile(r"[ !#-\[\]-~]{1,80}")


class CallWords(NamedTuple):
    """The text to search for in a call's tokens: the tool's name, and the beginning of its first argument.

    If any arguments are strings, the first string counts as the first argument, because some tools take a flag before
    it.
    """

    name: str
    argument: str

    @classmethod
    def from_call(cls, call: ToolCall) -> CallWords:
        """Return the text to search for in a logged call."""
        values = [call.raw_arguments] if call.raw_arguments is not None else list(call.arguments.values())
        value = next((argument for argument in values if isinstance(argument, str)), values[0] if values else None)
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
        match = _UNESCAPED_START.match(text.lstrip())
        return cls(call.name, match[0] if match else "")


class Decision(NamedTuple):
    """The tokens that decide a call: ranges [first, end) of a sequence, in order.

    `basis` says which tokens these are. `correction`: the name, and the first token that differs from the right call
    (only the name if the names differ). `first_argument`: the name, and the first tokens of the first argument. `name`:
    only the name. `call`: all calls, because the name was not found in them. `turn`: the whole turn, which has no
    calls. `depth` is the number of tokens from the start of the first argument to the first token that differs.
    """

    stretches: tuple[Stretch, ...]
    basis: Basis
    depth: int = 0

    @property
    def num_tokens(self) -> int:
        """The total number of tokens."""
        return sum(end - first for first, end in self.stretches)


def find_decision(
    renderer: Renderer,
    rendered: RenderedSequence,
    span: TurnSpan,
    words: CallWords | None,
    *,
    start: int | None = None,
    max_argument_tokens: int = MAX_ARGUMENT_TOKENS,
) -> Decision:
    """Find the tokens that decide a turn's first call, or the call that begins at token `start`."""
    if span.call_start is None or span.call_end is None:
        return Decision(((span.start, span.end),), "turn")
    whole = Decision(((span.call_start, span.call_end),), "call")
    if words is None:
        return whole
    first = span.call_start if start is None else start
    texts = _TokenTexts(token_texts(renderer.tokenizer, rendered.ids[first : span.call_end]), first)
    # The name as a whole word: "read" in '{"name": "read"', not in "read_file".
    name = texts.find(rf"(?<!\w){re.escape(words.name)}(?!\w)", first)
    if name is None:
        return whole
    argument = texts.find(re.escape(words.argument), name[1]) if words.argument else None
    if argument is None:
        return Decision((name,), "name")
    end = min(argument[1], argument[0] + max_argument_tokens)
    return Decision((name, (argument[0], end)), "first_argument")


def find_matching_decision(
    renderer: Renderer, rendered: RenderedSequence, span: TurnSpan, words: CallWords, reference: Decision
) -> Decision | None:
    """Find the tokens that decide a turn's first call, as many as `reference` has; return None if the call has too few.

    Means over different numbers or kinds of tokens would not be comparable. A token deep in an argument is matched by
    the token at the same depth, or by the last one if the argument is shorter. A whole call or turn is matched by as
    many of its tokens as exist.
    """
    if reference.basis in ("call", "turn"):
        whole = find_decision(renderer, rendered, span, None)
        ((first, end),) = whole.stretches
        return whole._replace(stretches=((first, min(end, first + reference.num_tokens)),))
    # No argument reaches this limit, so the whole argument is returned.
    available = find_decision(renderer, rendered, span, words, max_argument_tokens=span.end)
    available_sizes, sizes = ([end - first for first, end in decision.stretches] for decision in (available, reference))
    if available.basis == "call" or len(available_sizes) < len(sizes) or any(map(int.__lt__, available_sizes, sizes)):
        return None
    offsets = (0, min(reference.depth, available_sizes[-1] - sizes[-1]))
    begins = [first + offset for (first, _), offset in zip(available.stretches, offsets, strict=False)]
    stretches = tuple((begin, begin + size) for begin, size in zip(begins, sizes, strict=False))
    return Decision(stretches, reference.basis, reference.depth)


def find_decision_against(
    renderer: Renderer,
    rendered: RenderedSequence,
    span: TurnSpan,
    turn: Turn,
    number: int,
    *,
    format_name: str,
    right: ToolCall | None = None,
) -> Decision:
    """Find the tokens that decide call `number` of a turn: those where it first differs from the right call, if that is
    known.

    The right call is rendered by the same template. If the template would write the turn with other tokens (a rollout
    has sampled ids), the two calls cannot be compared, and the decision is found without the right call.
    """
    calls, start = turn.calls, span.call_start
    if start is None or not calls:
        return find_decision(renderer, rendered, span, None)
    turn_ids, isolated_turn = rendered.ids[start : span.call_end], _IsolatedTurn(renderer, turn, format_name)
    if number or right is not None:
        if isolated_turn.call_ids(calls) != turn_ids:
            return find_decision(renderer, rendered, span, None if number else CallWords.from_call(calls[0]))
        # A later call begins about where the turn differs from a copy in which that call has another name.
        if number:
            start += common_prefix_length(
                isolated_turn.call_ids(_replace_call(calls, number, _rename_call(calls[number]))), turn_ids
            )
    decision = find_decision(renderer, rendered, span, CallWords.from_call(calls[number]), start=start)
    if right is None or decision.basis == "call":
        return decision
    right_ids = isolated_turn.call_ids(_replace_call(calls, number, right))
    first_difference = (span.call_start or 0) + common_prefix_length(right_ids, turn_ids)
    if right_ids == turn_ids or first_difference >= (span.call_end or 0):
        return decision
    name, argument = decision.stretches[0], decision.stretches[1:]
    if first_difference < name[1]:
        return Decision((name,), "correction")
    depth = max(0, first_difference - argument[0][0]) if argument else 0
    return Decision((name, (first_difference, first_difference + 1)), "correction", depth)


class _TokenTexts:
    """Maps matches of a pattern in the text of consecutive tokens to those tokens."""

    def __init__(self, texts: Sequence[str], first: int) -> None:
        self._text, self._first = "".join(texts), first
        self._ends = list(accumulate(map(len, texts)))

    def find(self, pattern: str, after: int) -> Stretch | None:
        """Return the tokens of the first match at or after token `after`; None if there is no match."""
        begin = 0 if after == self._first else self._ends[after - self._first - 1]
        # Callers search for literal names: "bash" in '"name": "bash"', not in "bashrc".
        match = re.compile(pattern).search(self._text, begin)
        if match is None or match.end() == match.start():
            return None
        first = next(index for index, end in enumerate(self._ends) if end > match.start())
        last = next(index for index, end in enumerate(self._ends) if end >= match.end())
        return self._first + first, self._first + last + 1


class _IsolatedTurn:
    """Renders a turn after a single short user message, to show how the template writes the turn's calls."""

    def __init__(self, renderer: Renderer, turn: Turn, format_name: str) -> None:
        self._renderer, self._turn, self._format = renderer, turn, format_name

    def call_ids(self, calls: Sequence[ToolCall]) -> list[int]:
        """Return the token ids of `calls` in place of the turn's own calls; an empty list if the template rejects
        them or shows no calls.
        """
        turn = replace(self._turn, calls=tuple(calls), token_ids=None, logprobs=None)
        question = Turn(id=f"{turn.id}:asked", role="user", origin="human", text="u", provenance=turn.provenance)
        try:
            rendered = self._renderer.render(Conversation(id=turn.id, format=self._format, turns=(question, turn)))[-1]
        except InputError:
            return []
        span = rendered.spans[-1]
        return [] if span.call_start is None else rendered.ids[span.call_start : span.call_end]


def _replace_call(calls: Sequence[ToolCall], number: int, call: ToolCall) -> list[ToolCall]:
    return [*calls[:number], call, *calls[number + 1 :]]


def _rename_call(call: ToolCall) -> ToolCall:
    """Return the call with a tool name that begins with another letter, so that the calls first differ in the name."""
    return replace(call, name="z" if not call.name.startswith("z") else "q")
