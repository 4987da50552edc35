"""Test `same_action` on labelled pairs of actions: which pairs it calls the same, and which are.

python benchmarks/action_pairs.py              # both files of tests/data; prints every mistake
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_replication.action_text import parse_reply
from composer_replication.pairs import same_action
from composer_replication.sites.actions.equality import ActionContext, tool_schemas

DATA = Path(__file__).parents[1] / "tests" / "data"
FILES = ("action_pairs.jsonl", "action_pairs_held_out.jsonl")


def rows(name: str) -> Iterator[dict[str, Any]]:
    with (DATA / name).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def reply_of(action: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return an action of the table as the message or the text that a model would send."""
    if "tool_calls" in action:
        return {"role": "assistant", "content": action.get("text", ""), "tool_calls": action["tool_calls"]}
    if "content" in action:
        return {"role": "assistant", "content": action["content"]}
    return action["text"]


def is_called_same(row: Mapping[str, Any]) -> bool:
    given = row.get("context") or {}
    context = ActionContext(
        cwd=given.get("cwd"), tools=tool_schemas(given.get("tools")), files=given.get("files") or {}
    )
    first, second = (parse_reply(reply_of(row[side])) for side in ("a", "b"))
    return same_action(first, second, context)


def main() -> None:
    for name in FILES:
        counted: Counter[tuple[bool, bool]] = Counter()
        wrong: list[str] = []
        for row in rows(name):
            got = is_called_same(row)
            counted[row["same"], got] += 1
            if got is not row["same"]:
                wrong.append(f"{row['id']}: called {'same' if got else 'different'} ({row['why']})")
        print(f"\n{name}\n| label | called same | called different |\n|---|---|---|")
        for label in (True, False):
            print(f"| {'same' if label else 'different'} | {counted[label, True]} | {counted[label, False]} |")
        print("\n".join(wrong))


if __name__ == "__main__":
    main()
