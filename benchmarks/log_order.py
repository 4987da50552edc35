"""Check that ingestion keeps the order in which a model wrote the arguments of its calls, for Claude Code logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from composer_replication.types import Conversation
from target_check import Tally

_CHANNEL = "arguments"


def order_violations(files: Sequence[Path], conversations: Sequence[Conversation], tally: Tally) -> None:
    """Count the calls whose keys, at any depth, are in another order than in the log."""
    written = {identity: _keys(given) for path in files for identity, given in _calls(path)}
    for conversation in conversations:
        for turn in conversation.turns:
            for call in turn.calls:
                if call.id in written and call.raw_arguments is None:
                    tally.notes["calls compared with the log"] += 1
                    if _keys(call.arguments) != written[call.id]:
                        seen = f"{list(call.arguments)} in {conversation.id}, turn {turn.id}"
                        tally.blame(_CHANNEL, "keys_in_another_order", seen)


def _calls(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the ids and inputs of the calls in a log; lines that are not JSON are skipped."""
    if path.suffix != ".jsonl":
        return
    with path.open("rb") as lines:
        for line in lines:
            if b'"tool_use"' not in line:
                continue
            try:
                record = orjson.loads(line)
            except ValueError:
                continue
            message = record.get("message") if isinstance(record, dict) else None
            content = message.get("content") if isinstance(message, dict) else None
            for block in content if isinstance(content, list) else ():
                if isinstance(block, dict) and block.get("type") == "tool_use":
                    yield str(block.get("id")), block.get("input")


def _keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(key, _keys(each)) for key, each in value.items()]
    return [_keys(each) for each in value] if isinstance(value, list | tuple) else None
