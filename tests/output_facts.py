"""Find facts in what a command prints, such as names, numbers and paths, whatever the sentences around them say."""

from __future__ import annotations

import re


def lines_with(text: str, *facts: object) -> list[str]:
    """Return the lines of `text` that hold every fact as a whole word, number or path, in any order.

    `lines_with(err, "--replicas", 0, 1000)` finds a refusal of `--replicas 0` that names 1000, but neither 10 nor 0.5.
    """
    patterns = [_whole(str(fact)) for fact in facts]
    return [line for line in text.splitlines() if all(pattern.search(line) for pattern in patterns)]


def _whole(fact: str) -> re.Pattern[str]:
    before = r"(?<![\w-])(?<!\d[.,])" if fact[0].isdigit() else r"(?<!\w)" if fact[0].isalnum() else ""
    after = r"(?!\w)(?![.,]\d)(?!\.\w)" if fact[-1].isalnum() else ""
    return re.compile(f"{before}{re.escape(fact)}{after}")
