"""Where an assistant turn's own text begins in its rendering, and with what its context ends.

The rendering with the turn (`whole`) goes on where the prompt ends, or parts from it: in the header, or before it where
the template shows another context once the turn is finished. Nothing before the turn's own text may be learned, and
nothing in it may be another's. Both are found by experiment: `marked` is the same rendering with a word put into every
other message, and what follows the last such word is all that can be the turn's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from composer_replication.batch.render.dialect import Dialect, assistant
from composer_replication.batch.render.messages import ChatItem
from composer_replication.errors import AlignmentError, explain
from composer_replication.types import Message

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
