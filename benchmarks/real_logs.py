"""Run real logs through `crf`'s steps, and judge every target token by an independent oracle.

python benchmarks/real_logs.py LOGS --tokenizer FOLDER --tokenizer FOLDER --jobs 2
python benchmarks/real_logs.py LOGS --tokenizer FOLDER --limit 20 --all   # a few sessions, each turn rendered whole

Logs are processed in parts of a few sessions: ingest -> sites -> pairs -> the default batches of `crf train`. Pairs are
made up from the log: a turn with a failed call is rejected, and a later successful call of the same tool is chosen. A
target is right if the tokenizer's own template would have generated it at its place (`session_oracle`). Contexts are
compared with a rendering assembled from pieces, in linear time, and for --sample turns per conversation (--all: every
turn) with complete renderings of the preceding messages. Exits with 1 if there is a violation.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from composer_replication.cli.sites import write_sites
from composer_replication.config import SitesConfig
from composer_replication.errors import InputError
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations
from composer_replication.types import Conversation
from judged_run import Pair, judge_run, write_pairs
from log_order import order_violations
from target_check import Tally
from target_runs import CHANNELS
from template_oracle import Student

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MAX_PAIRS = 8
"""Maximum number of pairs of one conversation."""
ANY = "(any: the log's own order)"
_STUDENTS: dict[str, Student] = {}


class Part(NamedTuple):
    """The files of a few sessions, and how to process them."""

    logs: Path
    files: tuple[Path, ...]
    tokenizers: tuple[Path, ...]
    sample: int | None


class Judgement(NamedTuple):
    tokenizer: str
    sessions: int
    seconds: float
    tally: Tally


def parts_of(logs: Path, limit: int | None, size: int) -> Iterator[tuple[Path, ...]]:
    """Yield files in groups of `size` sessions; files of the same session stay together."""
    sessions = defaultdict[str, list[Path]](list)
    for path in sorted(each for each in logs.rglob("*") if each.suffix in (".jsonl", ".json", ".traj")):
        found = _UUID.search(str(path.relative_to(logs)))
        sessions[found[0] if found else str(path)].append(path)
    names = sorted(sessions)[:limit]
    for start in range(0, len(names), size):
        yield tuple(path for name in names[start : start + size] for path in sessions[name])


def pairs_of(conversation: Conversation) -> Iterator[Pair]:
    """Yield pairs of an erring turn (rejected) and a later successful call of its tool, without its text (chosen)."""
    failed = {result.call_id: bool(result.is_error) for turn in conversation.turns for result in turn.results}
    asked = [turn for turn in conversation.turns if turn.role == "assistant"]
    made = 0
    for number, turn in enumerate(asked):
        wrong = next((call for call in turn.calls if failed.get(call.id)), None)
        if wrong is None or made == _MAX_PAIRS:
            continue
        later = (call for other in asked[number + 1 : number + 20] for call in other.calls)
        right = next((call for call in later if call.name == wrong.name and failed.get(call.id) is False), None)
        if right is not None and right.raw_arguments is None:
            made += 1
            answer = replace(turn, text="", thinking="", calls=(right,), extra={})
            yield Pair(conversation.id, number, answer)


def judge_part(part: Part) -> list[Judgement]:
    with tempfile.TemporaryDirectory() as folder:
        logs, run = Path(folder) / "logs", RunDir.create(Path(folder) / "run")
        for path in part.files:  # as a folder, because a single file without a session would be an error
            copy = logs / path.relative_to(part.logs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        try:
            ingest_into(run, [logs], scrub=ScrubSettings())
        except InputError as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            return []
        write_sites(SitesConfig(), run)
        conversations = list(read_conversations(run))
        pairs = [pair for conversation in conversations for pair in pairs_of(conversation)]
        write_pairs(run, pairs)
        sessions = len({conversation.session_id or conversation.id for conversation in conversations})
        began = time.perf_counter()
        order = Tally()
        order_violations(part.files, conversations, order)
        found = [Judgement(ANY, sessions, time.perf_counter() - began, order)]
        for tokenizer in part.tokenizers:
            began = time.perf_counter()
            tally = judge_run(run, tokenizer, pairs=pairs, sample=part.sample, students=_STUDENTS)
            found.append(Judgement(str(tokenizer), sessions, time.perf_counter() - began, tally))
        return found


def judge_all(parts: Sequence[Part], jobs: int) -> Iterator[list[Judgement]]:
    if jobs == 1:
        yield from map(judge_part, parts)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(judge_part, parts)


def names_of(tokenizers: Sequence[Path]) -> dict[str, str]:
    """Return for each folder the shortest end of its path that distinguishes it from the others."""
    for size in range(1, 12):
        names = {str(tokenizer): "/".join(tokenizer.parts[-size:]) for tokenizer in tokenizers}
        if len(set(names.values())) == len(names):
            return {**names, ANY: ANY}
    return {**{str(tokenizer): str(tokenizer) for tokenizer in tokenizers}, ANY: ANY}


def print_table(judged: dict[str, Judgement], names: dict[str, str]) -> None:
    columns = ["tokenizer", "sessions", "turns", *(f"{each} runs" for each in CHANNELS), "target tokens"]
    print("| " + " | ".join([*columns, "violations", "seconds"]) + " |")
    print("|" + "---|" * (len(columns) + 2))
    for key, (_, sessions, seconds, tally) in judged.items():
        runs = [f"{tally.runs[each]:,}" for each in CHANNELS]
        row = [names[key], f"{sessions:,}", f"{tally.notes['turns']:,}", *runs, f"{sum(tally.tokens.values()):,}"]
        print("| " + " | ".join([*row, f"{sum(tally.violations.values()):,}", f"{seconds:.0f}"]) + " |")
    for key, (_, _, _, tally) in judged.items():
        whole, turns = tally.notes["turns compared with whole renderings"], tally.notes["turns"]
        print(f"\n{names[key]}: {whole:,} of {turns:,} turns compared with whole renderings (--all: every one)")
        for (channel, kind), number in sorted(tally.violations.items()):
            print(f"  violation  {channel}: {kind}  {number:,}\n             {tally.examples[channel, kind][:400]}")
        for note, number in sorted(tally.notes.items()):
            if number and note not in ("turns", "turns compared with whole renderings"):
                print(f"  note       {note}  {number:,}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, help="folder with session logs")
    parser.add_argument("--tokenizer", type=Path, action="append", required=True, help="folder; may be given again")
    parser.add_argument("--limit", type=int, help="so many sessions, in the order of their names")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, default=8, help="sessions that are ingested together")
    parser.add_argument("--sample", type=int, default=12, help="turns a conversation to compare with whole renderings")
    parser.add_argument("--all", action="store_true", help="compare every turn with whole renderings")
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sample, tokenizers = None if given.all else given.sample, tuple(given.tokenizer)
    parts = [Part(given.logs, files, tokenizers, sample) for files in parts_of(given.logs, given.limit, given.part)]
    if not parts:
        parser.error(f"{given.logs}: no session log in it")
    judged: dict[str, Judgement] = {}
    number = 0
    try:
        for number, several in enumerate(judge_all(parts, given.jobs), 1):
            _add(judged, several)
            print(f"part {number} of {len(parts)}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"stopped: {number} of {len(parts)} parts were judged\n")
    print_table(judged, names_of(tokenizers))
    return int(number < len(parts) or any(each.tally.violations for each in judged.values()))


def _add(judged: dict[str, Judgement], several: Sequence[Judgement]) -> None:
    for tokenizer, sessions, seconds, tally in several:
        known = judged.setdefault(tokenizer, Judgement(tokenizer, 0, 0.0, Tally()))
        known.tally.add(tally)
        judged[tokenizer] = known._replace(sessions=known.sessions + sessions, seconds=known.seconds + seconds)


def _stop(*_: object) -> None:
    """Print the results so far after SIGTERM as well."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
