"""The items of a Codex rollout: their names, the calls they make, and what came back in any of its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from composer_replication.ingestion.reading.source import Record, as_text
from composer_replication.ingestion.reading.turn_list import as_string, parse_call
from composer_replication.types import ToolCall


@dataclass(frozen=True, slots=True)
class Item:
    """A payload with its place."""

    payload: Record
    line: int
    timestamp: Any
    index: int | None = None

    @property
    def kind(self) -> str:
        return as_string(self.payload.get("type")) or ("message" if "role" in self.payload else "")

    @property
    def name(self) -> str:
        """The item's own id, or its place."""
        place = f"line-{self.line}" if self.index is None else f"line-{self.line}.{self.index}"
        return as_string(self.payload.get("id")) or place

    @property
    def call_id(self) -> str:
        return as_string(self.payload.get("call_id")) or self.name


def call_of(item: Item) -> ToolCall:
    payload = item.payload
    if item.kind == "custom_tool_call":
        text = payload.get("input")
        return parse_call(item.call_id, payload.get("name"), {"input": text} if isinstance(text, str) else text)
    if item.kind == "function_call":
        return parse_call(item.call_id, payload.get("name"), payload.get("arguments"))
    # Tools of the service itself have no name of their own and say what they do in `action`.
    return parse_call(item.call_id, item.kind.removesuffix("_call"), payload.get("action"))


def text_and_flag(output: Any) -> tuple[str, bool | None]:
    """Text and error flag: of a string (older: JSON with an exit code), a list of blocks, or {content, success}."""
    if isinstance(output, dict):
        success = output.get("success")
        return as_text(output.get("content")), not success if isinstance(success, bool) else None
    if not isinstance(output, str) or not output.startswith("{"):
        return as_text(output), None
    try:
        inner = orjson.loads(output)
    except orjson.JSONDecodeError:
        return output, None
    metadata = inner.get("metadata")
    code = metadata.get("exit_code") if isinstance(metadata, dict) else None
    if set(inner) == {"output", "metadata"} and isinstance(code, int):
        return as_text(inner["output"]), code != 0
    return output, None
