"""Measure the speed of the scrubber on real sessions, in total and by layer, in MB/s of text and CPU time of one core.

Sessions repeat texts, and the scrubber caches clean ones. Therefore the total is also measured without repetition: only
with the strings of every record that no earlier record has.

python benchmarks/scrub.py                        # the fixture sessions in ../shared
python benchmarks/scrub.py --sessions ~/.claude/projects --repeats 5
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from composer_replication.privacy import Scrubber, assignments, command_lines, encodings, entropy, rules, scan, tables

SESSIONS = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "sessions"
# Kinds of rules that are counted separately: pseudonyms, which are expected in every path and no findings.
PEOPLE = "USER"


def read_records(folder: Path) -> list[Any]:
    """Return the JSON lines of all files below a folder."""
    lines = (line for path in sorted(folder.rglob("*.jsonl")) for line in path.read_bytes().splitlines())
    return [orjson.loads(line) for line in lines if line.strip()]


def strings_of(value: Any) -> Iterator[str]:
    """Yield the string values of a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_of(item)


def best(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest CPU time of a few runs, because other processes can only make it longer."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def without_repetition(records: list[Any]) -> list[list[str]]:
    """Return for each record the strings that no earlier record has."""
    seen: set[str] = set()
    fresh = []
    for record in records:
        new = [text for text in dict.fromkeys(strings_of(record)) if text not in seen]
        seen.update(new)
        fresh.append(new)
    return fresh


def random_values(count: int) -> dict[str, str]:
    """Return made-up values of secret environment variables, which are the same on every machine."""
    rng = random.Random(0)
    alphabet = string.ascii_letters + string.digits + "!@#$/+=-_"
    return {f"SECRET_{n}": "".join(rng.choices(alphabet, k=rng.randint(12, 44))) for n in range(count)}


# In the fixtures almost every record contains the home directory of the agent's user as /home/USER.
SETTINGS: dict[str, dict[str, Any]] = {
    "all layers": {},
    "... and 20 known values": {"env_values": random_values(20)},
    "... and a home directory": {
        "env_values": random_values(20),
        "home_dirs": ["/home/USER"],
        "user_names": ["jdoe"],
    },
}


def scrub_all(records: list[Any], settings: dict[str, Any]) -> None:
    """Scrub all records in one scope, with an empty cache."""
    scope = Scrubber(**settings).scope()
    for record in records:
        scope.value(record)


def layers(texts: list[str]) -> dict[str, Callable[[], object]]:
    """Return a call for each layer, which runs it on new texts after the layers before it."""
    scanner = scan.Scanner({}, (), use_entropy=True)
    flat = [text.encode("latin-1", "replace") for text in texts]
    active = [scanner.words.active(line) for line in flat]
    runs = [
        run for text, line in zip(texts, flat, strict=True) for _, run in scanner.clean_runs.unknown_runs(text, line)
    ]
    odd = [run for run in dict.fromkeys(runs) if not entropy.is_wordy(run) and not entropy.is_public_id(run)]
    joined = "\n".join(odd)
    known = zip(texts, flat, active, strict=True)
    prepared = list(known)
    return {
        "words (prefilter)": lambda: [scan.Scanner({}, (), use_entropy=True).words.active(b"\n".join(flat))],
        "runs (prefilter)": lambda: [scanner.clean_runs.unknown_runs(text, line) for text, line, _ in prepared],
        "vendor prefixes": lambda: [rule for rule in entropy.VENDOR_RULES if rule.triggered(joined)],
        "PEM, JWT, headers, URLs": lambda: [list(rules.structure_spans(text, words)) for text, _, words in prepared],
        "commands": lambda: [list(command_lines.command_spans(text, words)) for text, _, words in prepared],
        "key names": lambda: [
            list(assignments.keyword_spans(text, line.lower(), words)) for text, line, words in prepared
        ],
        "slots": lambda: [list(tables.slot_spans(text, words)) for text, _, words in prepared],
        "tables": lambda: [list(tables.table_spans(text, line.lower(), words)) for text, line, words in prepared],
        "entropy": lambda: [entropy.random_spans(run) for run in odd],
        "encodings": lambda: [list(encodings.decode_run(run)) for run in odd],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, default=SESSIONS)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    records = read_records(args.sessions)
    texts = [text for record in records for text in strings_of(record)]
    size = sum(map(len, texts))
    if not size:
        raise SystemExit(f"no sessions under {args.sessions}")
    raw = sum(len(orjson.dumps(record)) for record in records)
    print(f"{len(records):,} records, {len(texts):,} strings, {size / 1e6:.2f} MB of text, {raw / 1e6:.2f} MB of JSON")

    fresh = without_repetition(records)
    fresh_size = sum(map(len, strings_of(fresh)))
    for name, settings in SETTINGS.items():
        seconds = best(lambda settings=settings: scrub_all(records, settings), args.repeats)
        again = best(lambda settings=settings: scrub_all(fresh, settings), args.repeats)
        print(
            f"{name:28} {size / seconds / 1e6:6.1f} MB/s of text, {raw / seconds / 1e6:.1f} MB/s of JSON;"
            f" without repetition {fresh_size / again / 1e6:.1f} MB/s of text"
        )
    unique = list(dict.fromkeys(texts))
    unique_size = sum(map(len, unique))
    print(f"each layer alone, on the {unique_size / 1e6:.2f} MB of distinct strings:")
    for name, call in layers(unique).items():
        seconds = best(call, args.repeats)
        print(f"  {name:26} {unique_size / seconds / 1e6:8.1f} MB/s  {seconds * 1e3:7.1f} ms")
    scope = Scrubber().scope()
    for record in records:
        scope.value(record)
    found = {kind: count for kind, count in scope.report.counts.items() if kind != PEOPLE}
    print(f"placeholders per 100 KB: {sum(found.values()) / size * 1e5:.2f}  {found}")


if __name__ == "__main__":
    main()
