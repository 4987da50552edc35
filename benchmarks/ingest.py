"""Measure the ingestion of Claude Code logs: reading compared with orjson alone, end to end with scrubbing, and memory.

python benchmarks/ingest.py                     # 60 MB, as in the README's table
python benchmarks/ingest.py --megabytes 1       # anywhere, in seconds
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from composer_replication.ingestion import registry
from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.runs import RunDir
from session_logs import write_log

MB = 10**6
SESSIONS = Path(__file__).resolve().parents[2] / "shared" / "fixtures" / "sessions"
FLOOR = "orjson.loads over the lines (floor)"
KEPT = "lines read and parsed, records kept"
OURS = "claude_code.read: parse + merge + tree"
MIN_SPEED, MAX_RATIO, MAX_MEMORY, MAX_GROWTH, MIN_END_TO_END = 80.0, 3.0, 6.0, 1.1, 15.0


@dataclass
class Row:
    """A measurement with its goal; `is_met` is None if there is no goal."""

    what: str
    figure: float
    unit: str
    goal: str = ""
    is_met: bool | None = None
    note: str = ""


def read_session(path: Path) -> list[object]:
    return list(claude_code.read(SourceFile(path, path.name), IngestReport()))


def steps_of(path: Path) -> dict[str, Callable[[], object]]:
    """Return the steps to time. The file is in the page cache, and the baseline has its lines in memory already."""
    lines = path.read_bytes().splitlines(keepends=True)

    def parse() -> None:
        for line in lines:
            orjson.loads(line)

    def parse_from_file() -> list[object]:
        with path.open("rb") as file:
            return [orjson.loads(line) for line in file]

    return {FLOOR: parse, KEPT: parse_from_file, OURS: lambda: read_session(path)}


def measure_times(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every step; steps alternate within a round, so that load affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            kept = step()
            seconds[name].append(time.perf_counter() - started)
            del kept
    return seconds


def speed_rows(path: Path, rounds: int) -> list[Row]:
    size_mb = path.stat().st_size / MB
    seconds = measure_times(steps_of(path), rounds)
    rows: list[Row] = []
    for name, measured in seconds.items():
        speed = size_mb / min(measured)
        note = f"best of {rounds}; {size_mb / max(measured):.0f} to {speed:.0f}"
        goal = {"goal": f">= {MIN_SPEED:.0f}", "is_met": speed >= MIN_SPEED} if name == OURS else {}
        rows.append(Row(name, speed, "MB/s", note=note, **goal))
    ratio = min(seconds[OURS]) / min(seconds[FLOOR])
    in_turn = statistics.median(ours / floor for ours, floor in zip(seconds[OURS], seconds[FLOOR], strict=True))
    to_kept = min(seconds[OURS]) / min(seconds[KEPT])
    note = f"best to best; median over rounds {in_turn:.2f}; to parsing with the records kept {to_kept:.2f}"
    rows.append(Row("time of read to orjson.loads", ratio, "x", f"<= {MAX_RATIO:.0f}", ratio <= MAX_RATIO, note))
    return rows


def end_to_end_rows(log: Path, folder: Path, rounds: int) -> list[Row]:
    """Measure reading, scrubbing with all layers, encoding and writing, as CPU time of one process.

    The large log consists of copies, and the scrubber caches clean texts. Therefore real sessions are measured as well.
    """
    rows = [_end_to_end("end to end with scrub, the large log", [log], folder / "large", rounds)]
    if SESSIONS.exists():
        rows.append(_end_to_end("end to end with scrub, real sessions once", [SESSIONS], folder / "real", rounds))
    return rows


def _end_to_end(what: str, paths: list[Path], folder: Path, rounds: int) -> Row:
    files = [each for path in paths for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]
    size_mb, seconds = sum(file.stat().st_size for file in files) / MB, list[float]()
    known = {f"SECRET_TOKEN_{number}": f"known-value-{number:03}-of-the-environment" for number in range(20)}
    settings = ScrubSettings(env_values=known, home_dirs=("/srv/someone",), user_names=("someone",))
    for number in range(rounds):
        run = RunDir.create(folder / str(number))
        started = time.process_time()
        ingest_into(run, paths, scrub=settings)
        seconds.append(time.process_time() - started)
    speed = size_mb / min(seconds)
    note = (
        f"{size_mb:.1f} MB; best of {rounds}, {size_mb / max(seconds):.0f} to {speed:.0f}; 20 known values and a home"
    )
    return Row(what, speed, "MB/s", f">= {MIN_END_TO_END:.0f}", speed >= MIN_END_TO_END, note)


def memory_rows(log: Path, folder: Path) -> list[Row]:
    size = log.stat().st_size
    start, peak = peak_of("session", log)
    ratio = (peak - start) / size
    note = f"peak RSS {peak / MB:.0f} MB, {start / MB:.0f} MB of it before the file; the file {size / MB:.1f} MB"
    whole_start, whole_peak = peak_of("end to end", log)
    whole = (whole_peak - whole_start) / size
    whole_note = f"peak RSS {whole_peak / MB:.0f} MB: the session, its scrubbed copy, its rows"
    few, many = (peak_of("sessions", folder / name)[1] for name in ("few", "many"))
    growth = f"peak RSS {few / MB:.1f} MB over 10 sessions, {many / MB:.1f} MB over 100"
    return [
        Row("memory of one session to its file", ratio, "x", f"<= {MAX_MEMORY:.0f}", ratio <= MAX_MEMORY, note),
        Row("the same end to end", whole, "x", f"<= {MAX_MEMORY:.0f}", whole <= MAX_MEMORY, whole_note),
        Row("memory of 100 sessions to 10", many / few, "x", f"<= {MAX_GROWTH}", many / few <= MAX_GROWTH, growth),
    ]


def peak_of(kind: str, path: Path) -> tuple[int, int]:
    """Return the resident bytes of a new process after its imports and at its peak."""
    command = [sys.executable, __file__, "--child", kind, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    start, peak = map(int, result.stdout.split())
    return start, peak


def child(kind: str, path: Path) -> None:
    """Run one measurement of `peak_of`. One session is kept in memory; of many, each is freed before the next."""
    for name in registry.FORMATS if kind == "sessions" else ():
        registry._format_module(name)
    start = _peak_bytes()
    if kind == "session":
        kept = read_session(path)
        assert kept
    elif kind == "end to end":
        with tempfile.TemporaryDirectory() as folder:
            ingest_into(RunDir.create(Path(folder) / "run"), [path], scrub=ScrubSettings())
    else:
        for _ in registry.ingest([path], IngestReport(), scrubber=None):
            pass
    print(start, _peak_bytes())


def _peak_bytes() -> int:
    """Return the peak memory of this process; getrusage would include the parent's, which a child inherits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: memory is measured on Linux only")


def print_table(title: str, rows: Iterable[Row]) -> None:
    print(f"\n### {title}\n")
    print("| what | figure | unit | goal | met | note |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        met = {None: "", True: "yes", False: "NO"}[row.is_met]
        print(f"| {row.what} | {row.figure:.2f} | {row.unit} | {row.goal} | {met} | {row.note} |")


def save(path: str | None, settings: dict[str, object], rows: Iterable[Row]) -> None:
    """Append a JSON line with the settings, the machine and all rows to a file."""
    if path is None:
        return
    machine = {"python": platform.python_version(), "orjson": orjson.__version__, "cores": os.cpu_count()}
    record = {"bench": "ingest", "settings": settings, "machine": machine, "rows": [asdict(row) for row in rows]}
    with Path(path).open("a") as out:
        out.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed and memory of reading Claude Code logs.")
    parser.add_argument("--megabytes", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default=None, help="append the figures to this file")
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child[0], Path(args.child[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "session.jsonl"
        kind = write_log(log, int(args.megabytes * MB))
        for count, part in ((10, "few"), (100, "many")):
            (folder / part).mkdir()
            for number in range(count):
                small = int(args.megabytes * MB / 100)
                write_log(folder / part / f"session-{number:03}.jsonl", small, first_copy=2 * number)
        rows = speed_rows(log, args.rounds) + end_to_end_rows(log, folder, args.rounds) + memory_rows(log, folder)
    print_table(f"Ingestion of {args.megabytes:g} MB on one core: {kind}, best of {args.rounds}", rows)
    settings = {"megabytes": args.megabytes, "rounds": args.rounds, "logs": kind}
    save(args.json, settings, rows)


if __name__ == "__main__":
    main()
