"""The books of a run: pairs by source, what was dropped and why, which file was made from which, and the config."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from composer_replication.errors import ComposerError
from composer_replication.report.records import RunRecords
from composer_replication.report.shown_texts import PairView, pair_view
from composer_replication.runs import ARTEFACTS

_SOURCES = {
    "teachers": "what advisers agreed on, against what the model did",
    "correction": "what the session did itself after a call failed, against the failing call",
    "user": "what the user let through, against the call that was refused",
    "acted_at_once": "acting at once where that was right, against looking once more: the balance to look-first pairs",
}
_EXAMPLES = 2
_NOT_LISTED = ("report_html", "report_md", "teacher_cache")  # what is being written, and a store that changes when read
_STAGES = {
    "conversations": "ingest",
    "split": "split",
    "sites": "sites",
    "teacher_calls": "replay",
    "pairs": "pairs",
}
_CHANNELS = {"lm_ce": "good turns", "sdpo_kl": "hints", "trace_replay_dpo": "pairs"}


class PairGroup(NamedTuple):
    source: str
    meaning: str
    number: int
    by_kind: list[tuple[str, int]]
    examples: list[tuple[str, PairView]]


def pair_groups(records: RunRecords) -> list[PairGroup]:
    """Pairs by source, with the first of different kinds as examples; each example with its conversation."""
    grouped: dict[str, list[int]] = defaultdict(list)
    for at, row in enumerate(records.pairs):
        grouped[str(row.get("source") or "teachers")].append(at)
    groups: list[PairGroup] = []
    for source, indices in grouped.items():
        kinds = Counter(_kind(records.pairs[at].get("metadata") or {}) for at in indices)
        first = {_kind(records.pairs[at].get("metadata") or {}): at for at in reversed(indices)}
        examples = [records.pairs[at] for at in sorted(first.values())[:_EXAMPLES]]
        views = [(str(row["conversation_id"]), pair_view(row)) for row in examples]
        groups.append(PairGroup(source, _SOURCES.get(source, ""), len(indices), kinds.most_common(), views))
    return sorted(groups, key=lambda group: (-group.number, group.source))


def _kind(metadata: Mapping[str, object]) -> str:
    failures = metadata.get("rejected_failures")
    return str(failures[0]) if isinstance(failures, list) and failures else "none"


class Drop(NamedTuple):
    stage: str
    reason: str
    number: int
    meaning: str


def drops(records: RunRecords, meanings: Mapping[str, str]) -> list[Drop]:
    """What each step left out, by reason, the most first within a step; what the proof dropped is told once."""
    return list(_drops(records, meanings))


def _drops(records: RunRecords, meanings: Mapping[str, str]) -> Iterator[Drop]:
    counted: list[tuple[str, Mapping[str, int]]] = [
        (stage, records.run.meta(name).drops)
        for name, stage in _STAGES.items()
        if records.has(name) and name not in records.unreadable
    ]
    reasons = Counter(str(row["reason"]) for row in records.proofs.values() if not row["is_kept"])
    counted.append(("hint proof", reasons))
    trained: Mapping[str, int] = (records.training_record or {}).get("drops") or {}
    counted.append(("train", {why: n for why, n in trained.items() if why.rpartition(": ")[2] not in reasons}))
    counted.append(("evaluate", (records.evaluation or {}).get("drops") or {}))
    for stage, numbers in counted:
        for reason, number in sorted(numbers.items(), key=lambda reason_count: (-reason_count[1], reason_count[0])):
            channel, _, why = reason.rpartition(": ")
            label = f"{_CHANNELS.get(channel, channel)}: {why}" if channel else why
            yield Drop(stage, label.replace("_", " "), number, meanings.get(why, ""))


class FileOfRun(NamedTuple):
    """One artefact in the lineage. `state` is current, stale, of other weights, or unreadable."""

    name: str
    command: str
    rows: int | None
    sha256: str
    made_from: str
    created: str
    tool_version: str
    state: str


def files_of(records: RunRecords) -> list[FileOfRun]:
    """Every file of records and every checked file, in the order of the pipeline."""
    files: list[FileOfRun] = []
    for name, artefact in ARTEFACTS.items():
        if not records.has(name) or artefact.kind not in ("records", "file") or name in _NOT_LISTED:
            continue
        try:
            files.append(_file(records, name))
        except ComposerError as error:
            files.append(FileOfRun(artefact.file_name, artefact.command, None, "", "", "", "", f"unreadable: {error}"))
    return files


def _file(records: RunRecords, name: str) -> FileOfRun:
    artefact = ARTEFACTS[name]
    if artefact.kind != "records":
        is_hashed = records.path(name).parent == records.run.root and name != "evaluation"  # which holds its own time
        sha256 = records.run.source(name).sha256 if is_hashed else ""
        state = "of other weights" if name == "evaluation" and records.other_weights else "current"
        return FileOfRun(artefact.file_name, artefact.command, None, sha256, "", "", "", state)
    meta = records.run.meta(name)
    artefact_names = [source.name for source in meta.sources if source.kind == "artefact"]
    outside = len(meta.sources) - len(artefact_names)
    made_from = ", ".join([*artefact_names, *([f"{outside:,} files outside the run"] if outside else [])])
    state = "current" if records.run.is_current(name) else "stale: what it was made from has changed since"
    return FileOfRun(
        artefact.file_name, artefact.command, meta.rows, meta.sha256, made_from, meta.created, meta.tool_version, state
    )


def config_text(records: RunRecords) -> str:
    """The resolved config of the training, as it was written."""
    path = records.path("config")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
