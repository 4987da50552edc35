"""What an assistant turn did, as one text: the form that states and pairs are known by. `parse` reads it back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import orjson

from composer_replication.types import Action, Provenance, ToolCall, Turn

_BLOCK_KINDS = ("thinking", "text", "call")
TEXT_AFTER_CALL = "text_after_call"
"""Key of `Turn.extra` for turns whose blocks are not known any more, but that text followed a call."""


def action_text(turn: Turn) -> str:
    """What an assistant turn did, as one text: its blocks in order, joined by newlines."""
    blocks: Any = turn.extra.get("blocks")
    layout: list[Any] = blocks if _fits(blocks, turn) else _plain_layout(turn)
    texts, thoughts = _Pieces(turn.text), _Pieces(turn.thinking)
    parts: list[str] = []
    for kind, size in layout:
        if kind == "text":
            parts.append(texts.take(size))
        elif kind == "thinking":
            parts.append(f"[THINKING] {thoughts.take(size)}")
        else:
            parts.append(_call_text(turn.calls[size]))
    return "\n".join(parts)


def text_follows_call(turn: Turn) -> bool:
    """Whether the turn says something after one of its calls, which templates that write text first cannot show."""
    if turn.extra.get(TEXT_AFTER_CALL) is True:
        return True
    blocks: Any = turn.extra.get("blocks")
    if not turn.calls or not _fits(blocks, turn):
        return False  # the plain order: thinking, text, calls
    texts, has_called = _Pieces(turn.text), False
    for kind, size in blocks:
        has_called = has_called or kind == "call"
        if kind == "text" and texts.take(size).strip() and has_called:
            return True
    return False


def thinking_comes_late(turn: Turn) -> bool:
    """Whether a thought of the turn comes behind its text or a call; templates show thinking first."""
    blocks: Any = turn.extra.get("blocks")
    if not turn.thinking.strip() or not _fits(blocks, turn):
        return False
    kinds = [kind for kind, size in blocks if kind == "call" or size]
    return "thinking" in kinds[next((at for at, kind in enumerate(kinds) if kind != "thinking"), len(kinds)) :]


def recut_blocks(turn: Turn, text: str, thinking: str) -> dict[str, Any]:
    """`turn.extra` for new texts, which differ within lines: their pieces end at the same newlines as before.

    Where lines came or went nobody can tell the pieces apart, and what stays is whether text follows a call.
    """
    rest = {key: value for key, value in turn.extra.items() if key != "blocks"}
    blocks: Any = turn.extra.get("blocks")
    if not _fits(blocks, turn):
        return rest
    new = {
        "text": _recut(turn.text, text, blocks, "text"),
        "thinking": _recut(turn.thinking, thinking, blocks, "thinking"),
    }
    if new["text"] is None or new["thinking"] is None:
        return rest | ({TEXT_AFTER_CALL: True} if text_follows_call(turn) else {})
    sizes = {kind: iter(lengths or ()) for kind, lengths in new.items()}
    return rest | {"blocks": [[kind, next(sizes[kind])] if kind in sizes else [kind, size] for kind, size in blocks]}


def _recut(old: str, new: str, blocks: list[Any], kind: str) -> list[int] | None:
    if old.count("\n") != new.count("\n"):
        return None
    pieces, lines, sizes = _Pieces(old), iter(new.split("\n")), list[int]()
    for num_newlines in (pieces.take(size).count("\n") for block_kind, size in blocks if block_kind == kind):
        sizes.append(len("\n".join(next(lines) for _ in range(num_newlines + 1))))
    return sizes


def action_text_without_thinking(turn: Turn) -> str:
    """The same without what the turn thought."""
    blocks: Any = turn.extra.get("blocks")
    kept_blocks = [block for block in blocks if block[0] != "thinking"] if _fits(blocks, turn) else None
    return action_text(replace(turn, thinking="", extra={**turn.extra, "blocks": kept_blocks}))


def text_of(action: Action) -> str:
    """An action that is in no log in the same form: its text, then a line for each call."""
    return action_text(turn_of(action, turn_id="action"))


def turn_of(action: Action, *, turn_id: str) -> Turn:
    """An assistant turn that does this and thinks nothing."""
    where = Provenance(file=turn_id, lines=(1,))
    return Turn(id=turn_id, role="assistant", origin="model", text=action.text, calls=action.calls, provenance=where)


class _Pieces:
    """Cuts a text that was joined by newlines back into its pieces."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def take(self, size: int) -> str:
        piece = self._text[self._at : self._at + size]
        self._at += size + 1
        return piece


def _fits(blocks: Any, turn: Turn) -> bool:
    """Whether a layout cuts this turn's texts where they were joined and names each call once: logs can be forged."""
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
    """The arguments as the model wrote them, or as JSON."""
    if call.raw_arguments is not None:
        return call.raw_arguments
    try:
        return orjson.dumps(dict(call.arguments)).decode()
    except TypeError:  # a model may write integers of any length, and half of a surrogate pair
        return json.dumps(dict(call.arguments), separators=(",", ":"), default=str)
