"""Pairs of a run directory: states and calls in, what passes the filters into `pairs.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.pairs.agreement import PairReport
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import PairRecord, extract_pairs
from composer_replication.pairs.normalise.normalizer import DJNormalizer
from composer_replication.runs import RunDir
from composer_replication.teacher_replay.run_replay import Which, read_calls, run_states
from composer_replication.types import TraceState

SCHEMA, VERSION = "dpo_pair", 2


@dataclass(frozen=True, kw_only=True)
class PairsOfRun:
    """What became of the states, what the filters did, and how many rows were exported."""

    report: PairReport
    filtered: Mapping[str, int]
    num_exported: int | None


def write_pairs(
    run: RunDir, *, threshold: int | None = None, normalizer: DJNormalizer, export: Path | None = None
) -> PairsOfRun:
    """Extract, filter, and write. Rows name their state; an exported file holds the messages as well.

    States are those that were asked about; the threshold is the replay's unless everyone was asked.
    """
    said = {name: str(value) for name, value in run.meta("teacher_calls").settings.items()}
    teachers = [name for name in said["teachers"].split(", ") if name]
    history = said["max_history_tokens"]
    which = Which(send_tools=said["tools"] == "sent", max_history_tokens=int(history) if history else None)
    threshold = int(said["threshold"]) if threshold is None else threshold
    if said["gate"] != "none" and str(threshold) != said["threshold"]:
        fix = f"`crf replay RUN --full`, or `--threshold {threshold}` there: calls were left out that matter now."
        got = f"{threshold}, while `crf replay` asked for {said['threshold']}"
        raise InputError(explain("threshold", got=got, expected="the same", fix=fix))
    asked = {state["state_id"]: state for state in run_states(run, which)}
    found = extract_pairs(asked.values(), read_calls(run), threshold, teachers=teachers)
    records = {record.pair["state_id"]: record for record in found.records}
    kept = normalizer.normalize(_with_tools(record, asked) for record in found.records)
    run.write_jsonl(
        "pairs",
        (_row(records[pair.state_id], pair.metadata) for pair in kept),
        schema=SCHEMA,
        version=VERSION,
        sources=["conversations", "teacher_calls"],
        counts={"states": found.report.num_states, "extracted": len(found.records), "pairs": len(kept)},
        drops={**found.report.drops, **{f"filter: {k}": v for k, v in normalizer.counts.items() if k != "kept" and v}},
        settings={"threshold": str(threshold)},
    )
    num_exported = None if export is None or not kept else export_preferences(kept_pairs(kept, records), export)
    return PairsOfRun(report=found.report, filtered=normalizer.counts, num_exported=num_exported)


def kept_pairs(kept: list[Any], records: Mapping[str, PairRecord]) -> Iterator[Any]:
    """The pairs that passed, with the tools of their states."""
    for pair in kept:
        yield {**records[pair.state_id].pair, "tools": pair.metadata.get("tools")}


def _with_tools(record: PairRecord, asked: Mapping[str, TraceState]) -> Any:
    tools = asked[record.pair["state_id"]].get("tools")
    return {**record.pair, "tools": tools} if tools else record.pair


def _row(record: PairRecord, metadata: Mapping[str, Any]) -> dict[str, object]:
    """The messages of a state are those of its conversation: a row refers to them."""
    pair = {key: value for key, value in record.pair.items() if key != "state_messages"}
    about = {key: value for key, value in asdict(record).items() if key != "pair"}
    session, _, index = record.pair["state_id"].rpartition("::")
    known = {key: value for key, value in metadata.items() if key != "tools"}
    return {**pair, "conversation_id": session, "turn_number": int(index), **about, "metadata": known}
