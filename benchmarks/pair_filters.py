"""Measure what the shipped pair recipe drops from maths and code pairs that should be kept.

python benchmarks/pair_filters.py                    # GSM8K, BFCL and the fixture sessions in ../shared
python benchmarks/pair_filters.py --shared FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from composer_replication.action_text import action_text
from composer_replication.ingestion import IngestReport, ingest
from composer_replication.ingestion.states import states
from composer_replication.pairs.normalise import (
    DJNormalizer,
    _DocumentDeduplicator,
    _pair_text,
    _special_character_ratio,
)
from composer_replication.types import DPOPair, Message

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
LIMITS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NUM_SUMS = 1000


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def pair(number: int, state: list[Message], chosen: str, rejected: str) -> DPOPair:
    return DPOPair(state_id=str(number), state_messages=state, chosen=chosen, rejected=rejected, n_teachers_agreeing=2)


def maths_pairs(shared: Path) -> list[DPOPair]:
    """Return pairs of a question's answer (chosen) and the previous question's answer (rejected)."""
    lines = (shared / "datasets" / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        pair(number, user(row["question"]), row["answer"], rows[number - 1]["answer"])
        for number, row in enumerate(rows)
    ]


def call_pairs(shared: Path) -> list[DPOPair]:
    """Return pairs of BFCL's function calls, each chosen over the call before it."""
    actions: list[str] = []
    for path in sorted((shared / "datasets" / "bfcl").glob("*.answers.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            calls = [(name, given) for call in json.loads(line)["ground_truth"] for name, given in call.items()]
            first = [(name, {key: values[0] for key, values in given.items()}) for name, given in calls]
            actions.append("\n".join(f"[TOOL_USE] name={name} input={json.dumps(given)}" for name, given in first))
    return [pair(n, user(f"Task {n}"), action, actions[n - 1]) for n, action in enumerate(actions)]


def coding_pairs(shared: Path) -> list[DPOPair]:
    """Return pairs of the fixture sessions' assistant turns, each chosen over the turn before it."""
    found: list[DPOPair] = []
    for conversation in ingest([shared / "fixtures" / "sessions"], IngestReport(), scrubber=None):
        last = "I will look at the files first."
        for messages, turn in states(conversation):
            action = action_text(turn)
            found.append(pair(len(found), messages, action, last))
            last = action
    return found


def sums() -> list[DPOPair]:
    """Return pairs of arithmetic answers that differ only in their numbers."""
    terms = [(7 * n + 11, 13 * n + 5) for n in range(NUM_SUMS)]
    return [
        pair(n, user(f"What is {a} + {b}?"), f"The sum is {a + b}.", f"The sum is {a + b + 1}.")
        for n, (a, b) in enumerate(terms)
    ]


def share(number: int, of: int) -> str:
    return f"{number} ({number / of:.1%})" if number else "0"


def print_limits(sets: dict[str, list[DPOPair]]) -> None:
    print("\n### Dropped by a limit on special characters, of chosen texts\n")
    print("| texts | number | median | most | " + " | ".join(f"> {limit}" for limit in LIMITS) + " |")
    print("|---" * (4 + len(LIMITS)) + "|")
    for name, pairs in sets.items():
        ratios = sorted(_special_character_ratio(pair["chosen"]) for pair in pairs)
        cells = [share(sum(ratio > limit for ratio in ratios), len(ratios)) for limit in LIMITS]
        middle = ratios[len(ratios) // 2]
        print(f"| {name} | {len(ratios)} | {middle:.2f} | {ratios[-2]:.2f}, {ratios[-1]:.2f} | {' | '.join(cells)} |")


def print_duplicates(sets: dict[str, list[DPOPair]]) -> None:
    settings = [(lower, ignore) for lower in (False, True) for ignore in (False, True)]
    print("\n### Dropped as duplicates\n")
    heads = [
        f"{'lower case' if lower else 'as it is'}{', non-characters ignored' * ignore}" for lower, ignore in settings
    ]
    print(f"| pairs | key | {' | '.join(heads)} |")
    print("|---" * (2 + len(settings)) + "|")
    for name, pairs in sets.items():
        for key in ("chosen", "state_chosen_rejected"):
            texts = [_pair_text(pair, key) for pair in pairs]
            print(f"| {name} | {key} | {' | '.join(duplicates(texts, *setting) for setting in settings)} |")


def duplicates(texts: Sequence[str], lower: bool, ignore: bool) -> str:
    operator = _DocumentDeduplicator(lowercase=lower, ignore_non_character=ignore)
    return share(len(texts) - len({operator.key(text) for text in texts}), len(texts))


def print_recipe(sets: dict[str, list[DPOPair]]) -> None:
    print("\n### The shipped recipe, operator by operator\n")
    normalizer = DJNormalizer()
    rows = {}
    for name, pairs in sets.items():
        normalizer.normalize(pairs)
        rows[name] = dict(normalizer.counts)
    print(f"| dropped by | {' | '.join(rows)} |")
    print("|---" * (1 + len(rows)) + "|")
    for reason in normalizer.counts:
        print(f"| {reason} | {' | '.join(str(counts[reason]) for counts in rows.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the pair recipe drops on maths and code.")
    parser.add_argument("--shared", type=Path, default=SHARED)
    args = parser.parse_args()
    sets = {"sums made here": sums()}
    if args.shared.is_dir():
        sets = {
            "GSM8K": maths_pairs(args.shared),
            "coding actions": coding_pairs(args.shared),
            "BFCL calls": call_pairs(args.shared),
            **sets,
        }
    else:
        print(f"no data at {args.shared}: only the sums made here")
    print_limits(sets)
    print_duplicates(sets)
    print_recipe(sets)


if __name__ == "__main__":
    main()
