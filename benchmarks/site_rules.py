"""Measure the rules that find error sites: confusion tables on labelled results, and speed on real results.

python benchmarks/site_rules.py                        # confusion tables; speed on the fixture sessions in ../shared
python benchmarks/site_rules.py --sessions ~/.claude/projects
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from composer_replication.ingestion import IngestReport, ingest
from composer_replication.sites import find_error_sites

ROOT = Path(__file__).resolve().parents[1]
SESSIONS = ROOT.parent / "shared" / "fixtures" / "sessions"
MIN_SPEED = 20.0
MB = 10**6


def print_confusion() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from data.labelled import FILES, confusion, precision_and_recall, rows, table

    for name in FILES:
        found = confusion(rows(name))
        precision, recall = precision_and_recall(found)
        print(f"\n### {name.capitalize()} set: {found.total()} results, labels down, verdicts across\n")
        print("\n".join(table(found)))
        print(f"\nblame=model: precision {precision:.3f}, recall {recall:.3f}")


def print_speed(sessions: Path, rounds: int) -> None:
    conversations = list(ingest([sessions], IngestReport(), scrubber=None))
    results = [result.text for conversation in conversations for turn in conversation.turns for result in turn.results]
    size_mb, best = sum(len(text.encode("utf-8", "replace")) for text in results) / MB, float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for conversation in conversations:
            find_error_sites(conversation)
        best = min(best, time.process_time() - started)
    met = "yes" if size_mb / best >= MIN_SPEED else "NO"
    print(f"\n### Speed: {len(results)} results, {size_mb:.2f} MB of text, one core, best of {rounds}\n")
    print("| what | figure | unit | goal | met |\n|---|---|---|---|---|")
    print(f"| find_error_sites | {size_mb / best:.1f} | MB/s | >= {MIN_SPEED:.0f} | {met} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Score and speed of the error-site rules.")
    parser.add_argument("--sessions", type=Path, default=SESSIONS)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print_confusion()
    if args.sessions.exists():
        print_speed(args.sessions, args.rounds)
    else:
        print(f"\nno sessions at {args.sessions}: speed was not measured")


if __name__ == "__main__":
    main()
