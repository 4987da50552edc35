"""Count by class how many secrets of a test set survive `crf ingest`, and how many harmless texts it changes.

A set is a folder with `secrets.jsonl` and `harmless.jsonl` (or `.jsonl.xz`). Each case becomes a Claude Code session.
All sessions are ingested, and the rows of the run are searched. Texts that the outgoing check would stop are counted
as well.

python benchmarks/secret_sets.py FOLDER                # counts by class
python benchmarks/secret_sets.py FOLDER --show         # and every case that went wrong, with its text
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.privacy.outgoing import LastGate
from composer_replication.runs import RunDir

# So many consecutive characters of a secret count as the secret, if they are at least half of it.
_MIN_SURVIVING_CHARS = 6
_PLACEHOLDER = re.compile(r"<[A-Z][A-Z_]*_\d+>")  # <PASSWORD_1>


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case."""

    id: str
    context: str
    kind: str
    failed: bool
    refused: bool
    row: str


def read_cases(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the cases in `NAME.jsonl` or `NAME.jsonl.xz`."""
    plain = folder / f"{name}.jsonl"
    data = plain.read_bytes() if plain.exists() else lzma.decompress((folder / f"{name}.jsonl.xz").read_bytes())
    return [orjson.loads(line) for line in data.splitlines() if line.strip()]


def session_lines(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a case as the lines of a Claude Code log."""
    lines: list[dict[str, Any]] = []
    call = 0
    for number, message in enumerate(case["messages"]):
        kind = message["kind"]
        role = "assistant" if kind in ("assistant", "call") else "user"
        if kind == "call":
            call += 1
            content: Any = [
                {"type": "tool_use", "id": f"toolu_{call}", "name": message["name"], "input": message["input"]}
            ]
        elif kind == "result":
            content = [{"type": "tool_result", "tool_use_id": f"toolu_{call}", "content": message["text"]}]
        else:
            content = message["text"] if role == "user" else [{"type": "text", "text": message["text"]}]
        line: dict[str, Any] = {
            "type": role,
            "uuid": f"m{number}",
            "parentUuid": f"m{number - 1}" if number else None,
            "sessionId": case["id"],
            "timestamp": f"2026-01-01T00:{number:02d}:00.000Z",
            "message": {"role": role, "content": content},
        }
        if role == "assistant":
            line["message"] |= {"id": f"msg_{number}", "model": "m"}
        lines.append(line)
    return lines


def strings_of(value: Any) -> list[str]:
    """Return all strings in a JSON value, in order."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings_of(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings_of(item)]
    return []


def has_survived(case: Mapping[str, Any], text: str) -> bool:
    """Return whether a text has a secret or half of it, or over half the characters of a secret in pieces."""
    pieces = case.get("pieces")
    if pieces:
        left = sum(len(piece) for piece in pieces if piece in text)
        return 2 * left > sum(map(len, pieces))
    secret = case["secret"]
    length = min(len(secret), max(_MIN_SURVIVING_CHARS, math.ceil(len(secret) / 2)))
    return any(secret[start : start + length] in text for start in range(len(secret) - length + 1))


def judge(folder: Path, work: Path, *, processes: int) -> tuple[list[Verdict], list[Verdict]]:
    """Ingest the set, and return the verdicts on its secrets and on its harmless texts."""
    secrets, harmless = read_cases(folder, "secrets"), read_cases(folder, "harmless")
    logs = work / "logs"
    logs.mkdir()
    for case in secrets + harmless:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in session_lines(case))
        (logs / f"{case['id']}.jsonl").write_text(text, encoding="utf-8")
    run = RunDir.create(work / "run")
    ingest_into(run, [logs], scrub=ScrubSettings(), num_workers=processes)
    rows: dict[str, Any] = {
        str(row["session_id"]): row for row in run.read_jsonl("conversations", schema="conversation", version=2)
    }
    gate = LastGate({})
    verdicts: tuple[list[Verdict], list[Verdict]] = ([], [])
    for case in secrets + harmless:
        turns: list[dict[str, Any]] = rows[case["id"]]["turns"]
        text = "\n".join(strings_of(turns))
        is_secret = "secret" in case
        before = Counter(_PLACEHOLDER.findall("\n".join(strings_of(case["messages"]))))
        failed = has_survived(case, text) if is_secret else bool(Counter(_PLACEHOLDER.findall(text)) - before)
        refused = any(gate.look(part, "") is not None for turn in turns for part in _sent_parts(turn))
        verdict = Verdict(case["id"], str(case["context"]), case["class"], failed, refused, text)
        verdicts[0 if is_secret else 1].append(verdict)
    return verdicts


def _sent_parts(turn: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a turn that are sent in a request."""
    calls = [{"name": call["name"], "arguments": call["arguments"]} for call in turn["calls"]]
    return [turn["text"], *calls, *(result["text"] for result in turn["results"])]


def interval(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of a share."""
    z, share = 1.96, count / total
    middle = share + z * z / (2 * total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def print_counts(title: str, verdicts: Sequence[Verdict]) -> None:
    failed = sum(verdict.failed for verdict in verdicts)
    low, high = interval(failed, len(verdicts))
    refused = sum(verdict.refused for verdict in verdicts)
    print(f"{title}: {failed} of {len(verdicts)} ({failed / len(verdicts):.1%} [{low:.1%}, {high:.1%}]); ", end="")
    print(f"the last gate would refuse {refused} after ingest")
    for context in sorted({verdict.context for verdict in verdicts}, key=lambda name: (len(name), name)):
        group = [verdict for verdict in verdicts if verdict.context == context]
        print(f"  context {context}: {sum(verdict.failed for verdict in group)} of {len(group)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", action="store_true", help="print every case that went wrong")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        secrets, harmless = judge(arguments.folder, Path(work), processes=arguments.processes)
    for title, verdicts in (("secrets that survive", secrets), ("harmless texts changed", harmless)):
        print_counts(title, verdicts)
        if arguments.show:
            for verdict in verdicts:
                if verdict.failed or verdict.refused:
                    state = "failed" if verdict.failed else "the gate refuses it"
                    print(f"--- {verdict.id}, context {verdict.context}, {verdict.kind}: {state}\n{verdict.row}")


if __name__ == "__main__":
    main()
