"""The sites' own hints in other words: `python wordings.py RUN/sites.jsonl OUT_FOLDER` writes a file a wording."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

WORDINGS: dict[str, Callable[[str], str]] = {
    "order": lambda hint: f"Do this in your next call: {hint}",
    "warning": lambda hint: f"The call that you are about to make will fail. {hint}",
    "own_thought": lambda hint: f"Wait. The first call that comes to my mind would fail. {hint}",
    "first_sentence": lambda hint: re.split(r"(?<=[.!?])\s", hint, maxsplit=1)[0],
    "warning_alone": lambda _: "The call that you are about to make will fail.",
}


def main() -> None:
    sites, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in sites.read_text(encoding="utf-8").splitlines()]
    hints = {row["id"]: row["hint"]["text"] for row in rows if row.get("hint")}
    for name, reword in WORDINGS.items():
        lines = [json.dumps({"site": site, "hint": reword(hint)}) for site, hint in hints.items()]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
