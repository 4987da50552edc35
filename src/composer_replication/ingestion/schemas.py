"""Tool schemas inferred from the calls a session shows; logs hold none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from composer_replication.types import Conversation

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def infer_tool_schemas(conversations: Iterable[Conversation]) -> dict[str, dict[str, Any]]:
    """Tool name -> a JSON-schema object: every argument seen, its types, and as required what no good call lacked.

    Calls that failed, or whose arguments were no object, teach nothing about what is required.
    """
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    present: dict[str, Counter[str]] = defaultdict(Counter)
    good_calls: Counter[str] = Counter()
    for conversation in conversations:
        failed = {r.call_id for turn in conversation.turns for r in turn.results if r.is_error is True}
        for call in (call for turn in conversation.turns for call in turn.calls):
            if call.raw_arguments is not None or call.id in failed:
                continue
            good_calls[call.name] += 1
            for name, value in call.arguments.items():
                seen[call.name][name].add(_TYPES.get(type(value), "null"))
                present[call.name][name] += 1
    return {
        tool: {
            "type": "object",
            "properties": {name: _property(kinds) for name, kinds in sorted(seen[tool].items())},
            "required": sorted(name for name, number in present[tool].items() if number == good_calls[tool]),
        }
        for tool in sorted(good_calls)
    }


def _property(kinds: set[str]) -> dict[str, Any]:
    ordered = sorted(kinds)
    return {"type": ordered[0] if len(ordered) == 1 else ordered}
