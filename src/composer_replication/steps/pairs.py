"""`crf pairs`: states and calls in, what passes the filters into `pairs.jsonl`.

By default a pair is made only where the student's action failed or was refused. Where it worked and others merely did
something else, there is no evidence against it: such pairs are made on request, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.actions.parse import parse_action_text
from composer_replication.actions.reply import without_thought
from composer_replication.actions.write import action_text_without_thinking, text_of
from composer_replication.config import PairsConfig, ReplayConfig
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.last_gate import LastGate, gate_of
from composer_replication.pairs.agreement import PairReport
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import Extraction, PairRecord, extract_pairs
from composer_replication.pairs.normalise.normalizer import DJNormalizer
from composer_replication.runs import RunDir
from composer_replication.runs.elsewhere import note_elsewhere
from composer_replication.runs.pairs import SCHEMA, VERSION
from composer_replication.steps.replay import read_calls
from composer_replication.steps.states import RunStates, StateOfTurn
from composer_replication.types import DPOPair

WORKED = "rejected_action_worked"
_ONLY_THINKING = "nothing_but_thinking"


@dataclass(frozen=True, kw_only=True)
class PairsOfRun:
    """What became of the states, what the filters did, and how many rows were exported."""

    report: PairReport
    filtered: Mapping[str, int]
    num_exported: int | None


def write_pairs(
    section: PairsConfig,
    run: RunDir,
    *,
    export: Path | None = None,
    no_scrub: bool = False,
    allowed: Iterable[str] = (),
) -> PairsOfRun:
    """Extract, filter, and write. Rows name their state; an exported file holds the messages as well.

    What is exported goes through the last gate first, which refuses a run made with `--no-scrub` unless that is said
    here, too. States are those that were asked about; the threshold is the replay's unless everyone was asked.
    """
    # First: a run that may not go out is not worked on.
    gate = None if export is None else gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    normalizer = _normalizer(section)
    asked_how = _settings(run)
    threshold = _threshold(asked_how, section.threshold)
    states = RunStates(asked_how.section, run, knows_failures=True)
    asked = {each.state["state_id"]: each for each in states.read()}
    extraction = extract_pairs(
        (each.state for each in asked.values()), read_calls(run), threshold, teachers=asked_how.teachers
    )
    chosen = _chosen(extraction, asked, section)
    records = {record.pair["state_id"]: record for record in chosen}
    kept = normalizer.normalize(_with_facts(record, asked) for record in chosen)
    num_worked = sum(pair.metadata[WORKED] for pair in kept)
    report = extraction.report
    settings = {"threshold": threshold, "where_it_worked": section.where_it_worked, "thinking": section.thinking}
    run.write_jsonl(
        "pairs",
        (_row(records[pair.state_id], pair.metadata) for pair in kept),
        schema=SCHEMA,
        version=VERSION,
        sources=[*states.sources[:1], "teacher_calls", *states.sources[1:]],
        counts={"states": report.num_states, "extracted": len(records), "pairs": len(kept), WORKED: num_worked},
        drops={**report.drops, **{f"filter: {k}": v for k, v in normalizer.counts.items() if k != "kept" and v}},
        settings=settings,
    )
    num_exported = _exported(run, export, gate, kept, records) if export is not None and kept else None
    return PairsOfRun(report=report, filtered=normalizer.counts, num_exported=num_exported)


class _AskedHow(NamedTuple):
    """How `crf replay` asked: its settings, and the teachers in order."""

    section: ReplayConfig
    teachers: list[str]


def _settings(run: RunDir) -> _AskedHow:
    """From the sidecar of the calls; before version 0.2 all of it was text."""
    said: dict[str, Any] = dict(run.meta("teacher_calls").settings)
    if isinstance(said["teachers"], str):
        history = said["max_history_tokens"]
        said |= {
            "teachers": [name for name in said["teachers"].split(", ") if name],
            "threshold": int(said["threshold"]),
            "send_tools": said["tools"] == "sent",
            "max_history_tokens": int(history) if history else None,
        }
    names = ("gate", "threshold", "send_tools", "max_history_tokens")
    return _AskedHow(ReplayConfig(**{name: said[name] for name in names}), said["teachers"])


def _normalizer(section: PairsConfig) -> DJNormalizer:
    backend = "data_juicer" if section.filters == "data_juicer" else "native"
    return DJNormalizer(section.recipe, skip_dj=section.filters == "none", backend=backend)


def _exported(
    run: RunDir, export: Path, gate: LastGate | None, kept: Sequence[Any], records: Mapping[str, PairRecord]
) -> int:
    """Write the pairs that passed, with the tools of their states; how many."""
    note_elsewhere(run, "preference data set", export)  # before it is there, so that no copy is unknown
    pairs = ({**records[pair.state_id].pair, "tools": pair.metadata.get("tools")} for pair in kept)
    return export_preferences(pairs, export, gate=gate)


def _threshold(asked_how: _AskedHow, threshold: int | None) -> int:
    before = asked_how.section
    threshold = before.threshold if threshold is None else threshold
    if before.gate != "none" and threshold != before.threshold:
        fix = f"`crf replay RUN --full`, or `--threshold {threshold}` there: calls were left out that matter now."
        got = f"{threshold}, while `crf replay` asked for {before.threshold}"
        raise InputError(explain("threshold", got=got, expected="the same", fix=fix))
    return threshold


def _chosen(extraction: Extraction, asked: Mapping[str, StateOfTurn], section: PairsConfig) -> list[PairRecord]:
    """The pairs that were asked for, their texts as asked for; the report counts the others."""
    found: list[PairRecord] = []
    report = extraction.report
    for record in extraction.records:
        each = asked[record.pair["state_id"]]
        report.num_rejected_worked += not each.has_failed
        pair = record.pair if section.thinking else _without_thinking(record.pair, each)
        if not each.has_failed and not section.where_it_worked:
            report.drop(WORKED)
        elif not pair["rejected"].strip() or not pair["chosen"].strip():
            report.drop(_ONLY_THINKING)
        else:
            action = None if section.thinking else record.chosen_action
            found.append(replace(record, pair=pair, chosen_action=action))
    report.num_pairs = len(found)
    return found


def _without_thinking(pair: DPOPair, each: StateOfTurn) -> DPOPair:
    """Both sides without thinking: teachers do not show theirs, and a pair must not teach whether to think."""
    chosen = without_thought(pair["chosen"])
    parsed = parse_action_text(chosen)
    chosen = text_of(parsed.action) if parsed.thinking else chosen
    return cast("DPOPair", {**pair, "chosen": chosen, "rejected": action_text_without_thinking(each.turn)})


def _with_facts(record: PairRecord, asked: Mapping[str, StateOfTurn]) -> Any:
    """The pair with its state's tools, and whether and how the rejected action failed."""
    each = asked[record.pair["state_id"]]
    facts = {WORKED: not each.has_failed, "rejected_failures": list(each.failures)}
    tools = each.state.get("tools")
    return {**record.pair, **facts, **({"tools": tools} if tools else {})}


def _row(record: PairRecord, metadata: Mapping[str, Any]) -> dict[str, object]:
    """The messages of a state are those of its conversation: a row refers to them."""
    pair = {key: value for key, value in record.pair.items() if key != "state_messages"}
    about = {key: value for key, value in asdict(record).items() if key != "pair"}
    session, _, index = record.pair["state_id"].rpartition("::")
    known = {key: value for key, value in metadata.items() if key != "tools"}
    return {**pair, "conversation_id": session, "turn_number": int(index), **about, "metadata": known}
