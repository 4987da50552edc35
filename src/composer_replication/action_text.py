"""Convert between an assistant turn, its text in a state's `student_action`, and the replies of teachers.

The text consists of the turn's blocks in order, joined by newlines: thinking as `[THINKING] ...`, a call as one line
`[TOOL_USE] name=Read input={...json...}`, and text unchanged. Anything that does not have exactly this form is plain
text. The text leaves two boundaries open, which the parser decides as follows:

* The end of thinking. Blocks are joined by one newline and paragraphs by two, so a single newline separates thinking
  from text: the last single newline if a call follows (models make a short remark before a call), else the first.
* The end of arguments that are not valid JSON. They begin with `{` and extend to the next marked block or the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import orjson

from composer_replication.errors import InputError, explain
from composer_replication.messages import content_text, json_value, message_calls, tool_call
from composer_replication.types import Action, Provenance, ToolCall, Turn

# "[THINKING] Let me look.", "[TOOL_USE] name=Read input={}"; not "see [THINKING] above", which is not at the start of a
# line.
_MARK = re.compile(r"^\[(?:THINKING|TOOL_USE)\] ", re.MULTILINE)
# '[TOOL_USE] name=Read input={"path": "a.py"}' -> name "Read", input '{"path": "a.py"}'
_CALL = re.compile(r"\[TOOL_USE\] name=(?P<name>[^\n]*?) input=(?P<input>[^\n]*)")
_THINKING = "[THINKING] "
# The newline in "thought\ntext"; none in "first paragraph\n\nsecond paragraph".
_JOIN = re.compile(r"(?<!\n)\n(?!\n)")
Block = list[str | int]
"""[kind, size]: the number of characters in a thinking or text block, or the index of a call."""


class _ParsedAction(NamedTuple):
    """A parsed action with its thinking; `blocks` is the order of its blocks, as in `Turn.extra["blocks"]`."""

    action: Action
    thinking: str
    blocks: list[Block]


def parse_action_text(text: str) -> _ParsedAction:
    """Parse an action into calls, text and thinking. The text contains no call ids, so new ones are generated."""
    blocks = _Blocks()
    at = 0  # start of the next block
    for mark, call in _marked_blocks(text):
        if mark < at:
            continue
        # Without the newline that joins this block to the next.
        blocks.add_text(text[at : mark - 1] if mark > at else None, call_follows=call is not None)
        if call is None:
            blocks.open_thinking()
            at = mark + len(_THINKING)
        else:
            blocks.add_call(call)
            at = call.end + 1
    blocks.add_text(text[at:] if at <= len(text) else None, call_follows=False)
    return _ParsedAction(
        Action(text="\n".join(blocks.texts), calls=tuple(blocks.calls)), "\n".join(blocks.thoughts), blocks.blocks
    )


def answer_turn(text: str, *, turn_id: str) -> Turn:
    """Return an assistant turn with the calls, text and thinking in an action's text."""
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


def _marked_blocks(text: str) -> list[tuple[int, _Call | None]]:
    """Return the start of every marked block, with its call, or with None if the block is thinking.

    A marker without a valid call is plain text.
    """
    blocks: list[tuple[int, _Call | None]] = []
    marks = [match.start() for match in _MARK.finditer(text)]
    for number, start in enumerate(marks):
        if text.startswith(_THINKING, start):
            blocks.append((start, None))
            continue
        after = marks[number + 1] - 1 if number + 1 < len(marks) else len(text)
        call = _parse_call_at(text, start, after)
        if call is not None:
            blocks.append((start, call))
    return blocks


def _parse_call_at(text: str, start: int, next_mark: int) -> _Call | None:
    match = _CALL.match(text, start)
    if match is None:
        return None
    name, input_text = match["name"], match["input"]
    try:
        json_value(input_text)
    except ValueError:
        # Invalid arguments may span several lines, so they extend to the next marker.
        is_broken_object = input_text.startswith("{")
        raw = text[match.start("input") : next_mark]
        return _Call(name, raw, next_mark) if is_broken_object else None
    return _Call(name, input_text, match.end())


@dataclass(slots=True)
class _Blocks:
    """The blocks of an action, collected in order."""

    texts: list[str] = field(default_factory=list[str])
    thoughts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    blocks: list[Block] = field(default_factory=list[Block])
    _is_thinking: bool = False

    def open_thinking(self) -> None:
        self._is_thinking = True

    def add_text(self, text: str | None, *, call_follows: bool) -> None:
        """Add the text before a marker or before the end (None if there is no text). The first part of the text may
        be thinking.
        """
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


# The reverse direction: from a turn to its text.

_BLOCK_KINDS = ("thinking", "text", "call")
TEXT_AFTER_CALL = "text_after_call"
"""Key in `Turn.extra` for turns with text after a call whose block order was lost."""


def action_text(turn: Turn) -> str:
    """Return an assistant turn as one text: its thinking, text and calls in order, joined by newlines."""
    blocks: Any = turn.extra.get("blocks")
    layout: list[Any] = blocks if _is_valid_layout(blocks, turn) else _plain_layout(turn)
    texts, thoughts = _PieceReader(turn.text), _PieceReader(turn.thinking)
    parts: list[str] = []
    for kind, size in layout:
        if kind == "text":
            parts.append(texts.take(size))
        elif kind == "thinking":
            parts.append(f"[THINKING] {thoughts.take(size)}")
        else:
            parts.append(_call_text(turn.calls[size]))
    return "\n".join(parts)


def has_text_after_call(turn: Turn) -> bool:
    """Return whether the turn has text after one of its calls.

    Chat templates put text before calls, so they cannot render such a turn.
    """
    if turn.extra.get(TEXT_AFTER_CALL) is True:
        return True
    blocks: Any = turn.extra.get("blocks")
    if not turn.calls or not _is_valid_layout(blocks, turn):
        return False  # in the default order, no text follows a call
    texts, has_called = _PieceReader(turn.text), False
    for kind, size in blocks:
        has_called = has_called or kind == "call"
        if kind == "text" and texts.take(size).strip() and has_called:
            return True
    return False


def has_late_thinking(turn: Turn) -> bool:
    """Return whether a thinking block of the turn comes after its text or a call.

    Chat templates put thinking first, so they cannot render such a turn.
    """
    blocks: Any = turn.extra.get("blocks")
    if not turn.thinking.strip() or not _is_valid_layout(blocks, turn):
        return False
    kinds = [kind for kind, size in blocks if kind == "call" or size]  # without empty blocks
    return "thinking" in kinds[next((at for at, kind in enumerate(kinds) if kind != "thinking"), len(kinds)) :]


def recut_blocks(turn: Turn, text: str, thinking: str) -> dict[str, Any]:
    """Return a copy of `turn.extra` whose blocks fit rewritten texts: each block ends at the same newline as before.

    If the number of lines has changed, the block boundaries are dropped, and only whether text follows a call is kept.
    """
    rest = {key: value for key, value in turn.extra.items() if key != "blocks"}
    blocks: Any = turn.extra.get("blocks")
    if not _is_valid_layout(blocks, turn):
        return rest
    new = {
        "text": _recut_sizes(turn.text, text, blocks, "text"),
        "thinking": _recut_sizes(turn.thinking, thinking, blocks, "thinking"),
    }
    if new["text"] is None or new["thinking"] is None:
        return rest | ({TEXT_AFTER_CALL: True} if has_text_after_call(turn) else {})
    sizes = {kind: iter(lengths or ()) for kind, lengths in new.items()}
    return rest | {"blocks": [[kind, next(sizes[kind])] if kind in sizes else [kind, size] for kind, size in blocks]}


def _recut_sizes(old: str, new: str, blocks: list[Any], kind: str) -> list[int] | None:
    if old.count("\n") != new.count("\n"):
        return None
    pieces, lines, sizes = _PieceReader(old), iter(new.split("\n")), list[int]()
    for num_newlines in (pieces.take(size).count("\n") for block_kind, size in blocks if block_kind == kind):
        sizes.append(len("\n".join(next(lines) for _ in range(num_newlines + 1))))
    return sizes


def action_text_without_thinking(turn: Turn) -> str:
    """Return the turn's calls and text as one text, without its thinking."""
    blocks: Any = turn.extra.get("blocks")
    spoken_blocks = [block for block in blocks if block[0] != "thinking"] if _is_valid_layout(blocks, turn) else None
    return action_text(replace(turn, thinking="", extra={**turn.extra, "blocks": spoken_blocks}))


def text_of(action: Action) -> str:
    """Return the text of an action that does not come from a log: its text, then one line per call."""
    return action_text(turn_from_action(action, turn_id="action"))


def turn_from_action(action: Action, *, turn_id: str) -> Turn:
    """Return an assistant turn for the action, without thinking."""
    where = Provenance(file=turn_id, lines=(1,))
    return Turn(id=turn_id, role="assistant", origin="model", text=action.text, calls=action.calls, provenance=where)


class _PieceReader:
    """Reads the pieces of a text that consists of pieces joined by newlines."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def take(self, size: int) -> str:
        """Return the next piece, which has `size` characters."""
        piece = self._text[self._at : self._at + size]
        self._at += size + 1
        return piece


def _is_valid_layout(blocks: Any, turn: Turn) -> bool:
    """Return whether a list of blocks divides the turn's texts at newlines and lists each call exactly once.

    The list may come from a log, and logs can be forged.
    """
    if not isinstance(blocks, list) or not all(_is_block(block) for block in cast("list[Any]", blocks)):
        return False
    sizes = {kind: [size for block_kind, size in blocks if block_kind == kind] for kind in _BLOCK_KINDS}
    return (
        _is_joined(turn.text, sizes["text"])
        and _is_joined(turn.thinking, sizes["thinking"])
        and sorted(sizes["call"]) == list(range(len(turn.calls)))
    )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and isinstance(block[0], str)
        and block[0] in _BLOCK_KINDS
        and type(block[1]) is int
        and block[1] >= 0
    )


def _is_joined(text: str, sizes: list[int]) -> bool:
    end = -1
    for size in sizes:
        if end >= 0 and text[end : end + 1] != "\n":
            return False
        end += 1 + size
    return max(end, 0) == len(text)


def _plain_layout(turn: Turn) -> list[tuple[str, int]]:
    layout = [("thinking", len(turn.thinking))] if turn.thinking else []
    layout += [("text", len(turn.text))] if turn.text else []
    return layout + [("call", index) for index in range(len(turn.calls))]


def _call_text(call: ToolCall) -> str:
    return f"[TOOL_USE] name={call.name} input={arguments_text(call)}"


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as the model wrote them, or else as JSON."""
    if call.raw_arguments is not None:
        return call.raw_arguments
    try:
        return orjson.dumps(dict(call.arguments)).decode()
    except TypeError:  # orjson rejects integers beyond 64 bits and lone surrogates; models write both
        return json.dumps(dict(call.arguments), separators=(",", ":"), default=str)


# Replies of teachers: text, calls written as text, or messages in the OpenAI or Anthropic format.
#
# Thinking is dropped. Arguments that are not a JSON object stay raw. Calls written as text count only if the rest of
# the text consists of remarks: next to other code they may be an example.

_THOUGHTS = ("think", "thinking")
_TAG, _TAG_END = "<tool_call>", "</tool_call>"
# Info strings of code fences that may hold a call.
_JSON_MARKS = ("", "json", "tool_call", "tool_use", "tool")
# Keys that models use for the name and the arguments of a call.
_NAME_KEYS = ("name", "tool", "tool_name", "function_name")
_ARGUMENT_KEYS = ("arguments", "input", "args", "parameters", "tool_input")
# An object with any other key is not a call.
_CALL_KEYS = frozenset({*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "type", "call_id", "recipient"})


def parse_reply(reply: str | Mapping[str, Any] | Sequence[Any]) -> Action:
    """Return the action in a reply: a text, a message, or a message's list of content blocks."""
    if isinstance(reply, str):
        return _parse_text_reply(reply)
    if isinstance(reply, Mapping):
        return _parse_message_reply(reply)
    if isinstance(reply, list | tuple):
        return _parse_message_reply({"content": reply})
    raise InputError(
        explain("teacher reply", got=type(reply).__name__, expected="a string, a message or a list of blocks")
    )


def _parse_text_reply(text: str) -> Action:
    action = parse_action_text(remove_thinking(text)).action
    action_of_calls = _parse_written_calls(action.text) if not action.calls else None
    return action_of_calls if action_of_calls is not None else action


def remove_thinking(text: str) -> str:
    """Return the text without the thinking that some models write before their answer.

    The opening tag may be missing, because some templates put it into the prompt. In that case, the closing tag has to
    end a line.
    """
    for tag in _THOUGHTS:
        before, end, after = text.partition(f"</{tag}>")
        head, opening, _ = before.partition(f"<{tag}>")
        if end and (not head.strip() if opening else after.startswith("\n")):
            return after.lstrip()
    return text


def _parse_written_calls(text: str) -> Action | None:
    """Return the calls in a text that has them in `<tool_call>` tags, in code fences or as bare JSON; None if the
    text contains other code.
    """
    if _TAG in text:
        first, *parts = text.split(_TAG)
        bodies = [part.partition(_TAG_END) for part in parts]
        remarks = first + "".join(after for _, _, after in bodies)
        calls = _parse_calls([body for body, _, _ in bodies]) if all(end for _, end, _ in bodies) else None
    elif "```" in text:
        fences, remarks = _split_fences(text)
        is_json = bool(fences) and all(mark in _JSON_MARKS for mark, _ in fences)
        calls = _parse_calls([body for _, body in fences]) if is_json else None
    else:
        remarks = ""
        calls = _parse_calls([text]) if text.lstrip().startswith(("{", "[")) else None
    return Action(text=remarks.strip(), calls=calls) if calls is not None and "```" not in remarks else None


def _split_fences(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return (info string, body) for every fenced block, and the text around the blocks."""
    fences: list[tuple[str, str]] = []
    remarks: list[str] = []
    inside: list[str] | None = None
    mark = ""
    for line in text.split("\n"):
        is_fence = line.strip().startswith("```")
        if is_fence and inside is None:
            inside, mark = [], line.strip().removeprefix("```").strip().lower()
        elif line.strip() == "```" and inside is not None:
            fences.append((mark, "\n".join(inside)))
            inside = None
        else:
            (remarks if inside is None else inside).append(line)
    if inside is not None:
        remarks.append("```")  # an unclosed fence: the caller rejects remarks that contain one
    return fences, "\n".join(remarks)


def _parse_calls(texts: list[str]) -> tuple[ToolCall, ...] | None:
    """Parse texts that each contain a call or a list of calls. Return None if one of them contains neither."""
    calls: list[ToolCall] = []
    for text in texts:
        try:
            value = json_value(text)
        except ValueError:
            return None
        for entry in cast("list[object]", value) if isinstance(value, list) and value else [value]:
            call = _call_from_object(entry, len(calls))
            if call is None:
                return None
            calls.append(call)
    return tuple(calls)


def _call_from_object(value: object, number: int) -> ToolCall | None:
    """Return the call in an object that has a name, arguments, and only keys allowed in a call; otherwise None."""
    body = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    if isinstance(body.get("function"), dict) and body.keys() <= {"function", "id", "type"}:
        body = cast("dict[str, Any]", body["function"])
    # Exactly one key for each: with two names it would be unclear which one is meant.
    names = [body[key] for key in _NAME_KEYS if isinstance(body.get(key), str) and body[key]]
    argument_values = [body[key] for key in _ARGUMENT_KEYS if key in body]
    if len(names) != 1 or len(argument_values) != 1 or not body.keys() <= _CALL_KEYS:
        return None
    arguments = argument_values[0]
    # Arguments that look like a schema mean the definition of a tool, not a call.
    is_schema = isinstance(arguments, dict) and isinstance(arguments.get("properties"), dict) and "type" in arguments
    if is_schema or not isinstance(arguments, dict | str):
        return None
    return tool_call(f"call_{number}", names[0], arguments)


def _parse_message_reply(message: Mapping[str, Any]) -> Action:
    content = message.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise InputError(explain("content of a reply", got=type(content).__name__, expected="a string, a list or null"))
    calls, text = message_calls(message, "a reply"), content_text(cast("object", content))
    nameless = next((number for number, call in enumerate(calls) if not call.name), None)
    if nameless is not None:
        raise InputError(explain(f"tool call {nameless} in a reply", got="no name", expected="a call with a tool name"))
    if calls:
        return Action(text=remove_thinking(text) if isinstance(content, str) else text, calls=calls)
    refusal = message.get("refusal")
    return _parse_text_reply(text or (refusal if isinstance(refusal, str) else ""))
