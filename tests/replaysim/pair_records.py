"""A thousand made-up pairs, the same every time: prose, code, maths, other scripts, near and exact duplicates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

NUM_PAIRS = 1000
WORDS = ["the", "test", "file", "Größe", "Файл", "数据", "run", "x", "I", "naïve", "बजे", "π", "ø", "一", "ready."]
SEPARATORS = [" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u2003", "\x1c", "\u3000", ""]
SIGNS = [
    *"!@#$%^&*()[]{}<>/\\|~`'\"=+-_;:,.?0123456789",
    "→",
    "…",
    "•",
    "🙂",
    "👩\u200d🔧",
    "\u200d",
    "²",
    "٣",
    "\ufeff",
]


@cache
def pairs() -> list[dict[str, Any]]:
    """Pairs of every kind in turn; one in seven repeats an earlier one, exactly, in other case or with other blanks."""
    chance = random.Random(1)
    made: list[dict[str, Any]] = []
    for number in range(NUM_PAIRS):
        if made and number % 7 == 0:
            made.append(repeated(chance, chance.choice(made), number))
        else:
            question = {"role": "user", "content": f"{text(chance)} {number % 50}"}
            made.append(pair(number, [question], text(chance), text(chance)))
    return made


def pair(number: int, state: list[dict[str, Any]], chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "state_id": f"s{number}",
        "state_messages": state,
        "chosen": chosen,
        "rejected": rejected,
        "n_teachers_agreeing": 2 + number % 2,
    }


def repeated(chance: random.Random, earlier: dict[str, Any], number: int) -> dict[str, Any]:
    change: Callable[[str], str] = chance.choice(
        [str, str.upper, lambda text: f" {text}\n", lambda text: text + " 12!"]
    )
    return pair(number, earlier["state_messages"], change(earlier["chosen"]), earlier["rejected"])


def text(chance: random.Random) -> str:
    kind = chance.choice(["empty", "prose", "prose", "code", "code", "maths", "signs", "noise", "long"])
    if kind == "empty":
        return chance.choice(["", " ", "\n", "ok", "....", "\x1c\x1d"])
    if kind == "maths":
        terms = [chance.randrange(1000) for _ in range(chance.randrange(1, 20))]
        return f"{' + '.join(map(str, terms))} = <<{sum(terms)}>>{sum(terms)}"
    if kind == "code":
        arguments = {"command": f"ls -la {chance.choice(WORDS)}", "timeout": chance.randrange(100)}
        return f"[TOOL_USE] name=Bash input={json.dumps(arguments)}"
    if kind == "signs":
        return "".join(chance.choice(SIGNS) for _ in range(chance.randrange(1, 60)))
    if kind == "noise":
        return "".join(chr(character(chance)) for _ in range(chance.randrange(1, 80)))
    length = chance.randrange(3000, 6000) if kind == "long" else chance.randrange(1, 40)
    return "".join(chance.choice(WORDS) + chance.choice(SEPARATORS) for _ in range(length))


def character(chance: random.Random) -> int:
    """A code point that is no surrogate: those cannot be hashed by data-juicer."""
    code = chance.choice([chance.randrange(0x250), chance.randrange(0x3000), chance.randrange(0x20000)])
    return code if not 0xD800 <= code < 0xE000 else 0x41
