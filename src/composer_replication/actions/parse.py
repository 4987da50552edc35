"""What an assistant turn did, read back from the text of a state's `student_action`.

The text is the turn's blocks in order, joined by newlines: thinking as `[THINKING] …`, a call as one line
`[TOOL_USE] name=Read input={…json…}`, text as it is. What is not exactly that stays plain text. Two things the text
does not say and that are decided here:

* Where thinking ends and text begins. Blocks are joined by one newline and paragraphs by two, so the newline that
  stands alone is the join: the last such one where a call follows (a short remark before it), else the first.
* Where arguments end that are no JSON. They begin with `{` and run up to the next block that is marked, or to the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from composer_replication.actions.calls import json_value, tool_call
from composer_replication.types import Action, Provenance, ToolCall, Turn

_MARK = re.compile(r"^\[(?:THINKING|TOOL_USE)\] ", re.MULTILINE)
_CALL = re.compile(r"\[TOOL_USE\] name=(?P<name>[^\n]*?) input=(?P<input>[^\n]*)")
_THINKING = "[THINKING] "
_JOIN = re.compile(r"(?<!\n)\n(?!\n)")

Block = list[str | int]
"""[kind, size]: characters of a thinking or text block, the number of a call."""


class ParsedAction(NamedTuple):
    """The action and its thinking; `blocks` is their order, as `Turn.extra["blocks"]` keeps it."""

    action: Action
    thinking: str
    blocks: list[Block]


def parse_action_text(text: str) -> ParsedAction:
    """Calls, text and thinking of an action; ids of calls are not in the text and are made up."""
    blocks = _Blocks()
    at = 0  # where the next block begins
    for mark, call in _marked(text):
        if mark < at:
            continue
        blocks.add_text(text[at : mark - 1] if mark > at else None, call_follows=call is not None)
        if call is None:
            blocks.open_thinking()
            at = mark + len(_THINKING)
        else:
            blocks.add_call(call)
            at = call.end + 1
    blocks.add_text(text[at:] if at <= len(text) else None, call_follows=False)
    return ParsedAction(
        Action(text="\n".join(blocks.texts), calls=tuple(blocks.calls)), "\n".join(blocks.thoughts), blocks.blocks
    )


def answer_turn(text: str, *, turn_id: str) -> Turn:
    """An assistant turn that does what the text says."""
    action, thinking, blocks = parse_action_text(text)
    return Turn(
        id=turn_id,
        role="assistant",
        origin="model",
        text=action.text,
        thinking=thinking,
        calls=action.calls,
        provenance=Provenance(file=turn_id, lines=(1,)),
        extra={"blocks": blocks},
    )


class _Call(NamedTuple):
    name: str
    arguments: str
    end: int


def _marked(text: str) -> list[tuple[int, _Call | None]]:
    """Where marked blocks begin: a call with its end, or None for thinking. A mark that opens no call is plain text."""
    blocks: list[tuple[int, _Call | None]] = []
    marks = [match.start() for match in _MARK.finditer(text)]
    for number, start in enumerate(marks):
        if text.startswith(_THINKING, start):
            blocks.append((start, None))
            continue
        after = marks[number + 1] - 1 if number + 1 < len(marks) else len(text)
        call = _call_at(text, start, after)
        if call is not None:
            blocks.append((start, call))
    return blocks


def _call_at(text: str, start: int, next_mark: int) -> _Call | None:
    match = _CALL.match(text, start)
    if match is None:
        return None
    name, input_text = match["name"], match["input"]
    try:
        json_value(input_text)
    except ValueError:
        is_broken_object = input_text.startswith("{")
        raw = text[match.start("input") : next_mark]
        return _Call(name, raw, next_mark) if is_broken_object else None
    return _Call(name, input_text, match.end())


@dataclass(slots=True)
class _Blocks:
    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    blocks: list[Block] = field(default_factory=list[Block])
    _is_thinking: bool = False

    def open_thinking(self) -> None:
        self._is_thinking = True

    def add_text(self, text: str | None, *, call_follows: bool) -> None:
        """What stands before a mark or the end: text, or thinking and then perhaps text; None where nothing does."""
        if self._is_thinking:
            self._is_thinking = False
            thought, text = _split_thinking(text or "", call_follows=call_follows)
            self.thoughts.append(thought)
            self.blocks.append(["thinking", len(thought)])
        if text is not None:
            self.texts.append(text)
            self.blocks.append(["text", len(text)])

    def add_call(self, call: _Call) -> None:
        self.blocks.append(["call", len(self.calls)])
        self.calls.append(tool_call(f"call_{len(self.calls)}", call.name, call.arguments))


def _split_thinking(text: str, *, call_follows: bool) -> tuple[str, str | None]:
    joins = [match.start() for match in _JOIN.finditer(text)]
    if not joins:
        return text, None
    at = joins[-1 if call_follows else 0]
    return text[:at], text[at + 1 :]
