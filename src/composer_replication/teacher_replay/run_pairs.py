"""Pairs of a run directory: states and calls in, what passes the filters into `pairs.jsonl`.

By default a pair is made only where the student's action failed or was refused. Where it worked and others merely did
something else, there is no evidence against it: such pairs are made on request, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from composer_replication.actions.parse import parse_action_text
from composer_replication.actions.reply import without_thought
from composer_replication.actions.write import action_text_without_thinking, text_of
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.last_gate import LastGate, gate_of
from composer_replication.pairs.agreement import PairReport
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import Extraction, PairRecord, extract_pairs
from composer_replication.pairs.normalise.normalizer import DJNormalizer, NormalizedDPOPair
from composer_replication.runs import RunDir
from composer_replication.teacher_replay.run_failures import Failures, read_failures
from composer_replication.teacher_replay.run_replay import StateOfTurn, Which, read_calls, run_turns
from composer_replication.types import DPOPair

SCHEMA, VERSION = "dpo_pair", 2
WORKED = "rejected_action_worked"
_ONLY_THINKING = "nothing_but_thinking"


@dataclass(frozen=True, kw_only=True)
class PairsOfRun:
    """What became of the states, what the filters did, and how many rows were exported."""

    report: PairReport
    filtered: Mapping[str, int]
    num_exported: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairChoices:
    """`where_it_worked`: also pairs that reject an action which worked. `thinking`: leave it in the texts of a pair."""

    where_it_worked: bool = False
    thinking: bool = False


def write_pairs(
    run: RunDir,
    *,
    threshold: int | None = None,
    normalizer: DJNormalizer,
    export: Path | None = None,
    choices: PairChoices | None = None,
    gate: LastGate | None = None,
) -> PairsOfRun:
    """Extract, filter, and write. Rows name their state; an exported file holds the messages as well.

    What is exported goes through the gate, by default one that refuses a run made with `--no-scrub`.

    States are those that were asked about; the threshold is the replay's unless everyone was asked.
    """
    if export is not None and gate is None:
        gate = gate_of(run, os.environ, no_scrub=False)
    said = {name: str(value) for name, value in run.meta("teacher_calls").settings.items()}
    threshold = _threshold(said, threshold)
    history = said["max_history_tokens"]
    which = Which(send_tools=said["tools"] == "sent", max_history_tokens=int(history) if history else None)
    asked = {each.state["state_id"]: each for each in run_turns(run, which)}
    teachers = [name for name in said["teachers"].split(", ") if name]
    extraction = extract_pairs((each.state for each in asked.values()), read_calls(run), threshold, teachers=teachers)
    failures, choices = read_failures(run), choices or PairChoices()
    found = _chosen(extraction, asked, failures, choices)
    records = {record.pair["state_id"]: record for record in found}
    kept = normalizer.normalize(_with_facts(record, asked, failures) for record in found)
    _write(run, kept, records, extraction.report, normalizer, failures, {"threshold": str(threshold)} | asdict(choices))
    num_exported = None
    if export is not None and kept:
        num_exported = export_preferences(kept_pairs(kept, records), export, gate=gate)
    return PairsOfRun(report=extraction.report, filtered=normalizer.counts, num_exported=num_exported)


def kept_pairs(kept: list[Any], records: Mapping[str, PairRecord]) -> Iterator[Any]:
    """The pairs that passed, with the tools of their states."""
    for pair in kept:
        yield {**records[pair.state_id].pair, "tools": pair.metadata.get("tools")}


def _threshold(said: Mapping[str, str], threshold: int | None) -> int:
    threshold = int(said["threshold"]) if threshold is None else threshold
    if said["gate"] != "none" and str(threshold) != said["threshold"]:
        fix = f"`crf replay RUN --full`, or `--threshold {threshold}` there: calls were left out that matter now."
        got = f"{threshold}, while `crf replay` asked for {said['threshold']}"
        raise InputError(explain("threshold", got=got, expected="the same", fix=fix))
    return threshold


def _chosen(
    extraction: Extraction, asked: Mapping[str, StateOfTurn], failures: Failures, choices: PairChoices
) -> list[PairRecord]:
    """The pairs that were asked for, their texts as asked for; the report counts the others."""
    found: list[PairRecord] = []
    report = extraction.report
    for record in extraction.records:
        each = asked[record.pair["state_id"]]
        has_worked = not failures.has_failed((each.conversation_id, each.turn.id))
        report.num_rejected_worked += has_worked
        pair = record.pair if choices.thinking else _without_thinking(record.pair, each)
        if has_worked and not choices.where_it_worked:
            report.drop(WORKED)
        elif not pair["rejected"].strip() or not pair["chosen"].strip():
            report.drop(_ONLY_THINKING)
        else:
            found.append(replace(record, pair=pair))
    report.num_pairs = len(found)
    return found


def _without_thinking(pair: DPOPair, each: StateOfTurn) -> DPOPair:
    """Both sides without thinking: teachers do not show theirs, and a pair must not teach whether to think."""
    chosen = without_thought(pair["chosen"])
    parsed = parse_action_text(chosen)
    chosen = text_of(parsed.action) if parsed.thinking else chosen
    return cast("DPOPair", {**pair, "chosen": chosen, "rejected": action_text_without_thinking(each.turn)})


def _with_facts(record: PairRecord, asked: Mapping[str, StateOfTurn], failures: Failures) -> Any:
    """The pair with its state's tools, and whether and how the rejected action failed."""
    each = asked[record.pair["state_id"]]
    turn = (each.conversation_id, each.turn.id)
    facts = {WORKED: not failures.has_failed(turn), "rejected_failures": list(failures.kinds_of(turn))}
    tools = each.state.get("tools")
    return {**record.pair, **facts, **({"tools": tools} if tools else {})}


def _write(
    run: RunDir,
    kept: Sequence[NormalizedDPOPair],
    records: Mapping[str, PairRecord],
    report: PairReport,
    normalizer: DJNormalizer,
    failures: Failures,
    settings: Mapping[str, Any],
) -> None:
    num_worked = sum(pair.metadata[WORKED] for pair in kept)
    run.write_jsonl(
        "pairs",
        (_row(records[pair.state_id], pair.metadata) for pair in kept),
        schema=SCHEMA,
        version=VERSION,
        sources=["conversations", "teacher_calls", *(["sites"] if failures.is_from_sites else [])],
        counts={"states": report.num_states, "extracted": len(records), "pairs": len(kept), WORKED: num_worked},
        drops={**report.drops, **{f"filter: {k}": v for k, v in normalizer.counts.items() if k != "kept" and v}},
        settings=settings,
    )


def _row(record: PairRecord, metadata: Mapping[str, Any]) -> dict[str, object]:
    """The messages of a state are those of its conversation: a row refers to them."""
    pair = {key: value for key, value in record.pair.items() if key != "state_messages"}
    about = {key: value for key, value in asdict(record).items() if key != "pair"}
    session, _, index = record.pair["state_id"].rpartition("::")
    known = {key: value for key, value in metadata.items() if key != "tools"}
    return {**pair, "conversation_id": session, "turn_number": int(index), **about, "metadata": known}
