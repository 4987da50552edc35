"""`crf pairs`: states and calls in, what passes the filters into `pairs.jsonl`, with the sessions' own pairs.

Of teachers' answers, a pair is made by default only where the student's action failed or was refused. Where it worked
and others merely did something else, there is no evidence against it: such pairs are made on request, and counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_replication.actions.parse import parse_action_text
from composer_replication.actions.reply import without_thought
from composer_replication.actions.write import action_text_without_thinking, text_of
from composer_replication.config import PairsConfig, ReplayConfig
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.last_gate import gate_of
from composer_replication.pairs.agreement import PairReport
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import Extraction, PairRecord, extract_pairs
from composer_replication.pairs.normalise.normalizer import DJNormalizer, NormalizedDPOPair
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.elsewhere import note_elsewhere
from composer_replication.runs.pairs import SCHEMA, VERSION
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import held_out_of
from composer_replication.steps.own_pairs import WORKED, OwnPair, OwnPairs, without_opposite
from composer_replication.steps.replay import read_calls
from composer_replication.steps.states import RunStates, StateOfTurn
from composer_replication.types import Action, DPOPair

_ONLY_THINKING = "nothing_but_thinking"


@dataclass(frozen=True, kw_only=True)
class PairsOfRun:
    """What became of the states, what the filters did, how many pairs each source gave, how many rows were exported.

    Without a replay there is no `report`. `num_failures` are those of the model that a session could have put right.
    `without_opposite`: pairs that say to look first, more than there are of those that say not to, by what for.
    """

    report: PairReport | None
    filtered: Mapping[str, int]
    by_source: Mapping[str, int]
    num_failures: int
    without_opposite: Mapping[str, int]
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
    here, too. A replay need not have been: then all pairs are the sessions' own.
    """
    # First: a run that may not go out is not worked on.
    gate = None if export is None else gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    normalizer = _normalizer(section)
    own_pairs = OwnPairs(run) if section.corrections else None
    replay_pairs = None
    if own_pairs is None or run.path("teacher_calls").exists():
        replay_pairs = _asked(section, run, own_pairs)
    else:
        for conversation in read_conversations(run):
            own_pairs.take(conversation)
    candidates = [*(replay_pairs.candidates if replay_pairs else ()), *(own_pairs.balanced() if own_pairs else ())]
    records = {candidate.record.pair["state_id"]: candidate.record for candidate in candidates}
    held_out = held_out_of(run)
    kept_pairs, filtered = _filtered(normalizer, candidates, held_out)
    written = [(records[pair.state_id], pair.metadata) for pair in kept_pairs]
    _write(section, run, replay_pairs, own_pairs, filtered, written)
    num_exported = None
    if export is not None and kept_pairs:
        note_elsewhere(run, "preference data set", export)  # before it is there, so that no copy is unknown
        learnt = [pair for pair in kept_pairs if _conversation_of(pair.state_id) not in held_out]
        num_exported = export_preferences(_kept_pairs(learnt, records), export, gate=gate)
    return PairsOfRun(
        report=replay_pairs.report if replay_pairs else None,
        filtered=filtered,
        by_source=Counter(record.source for record, _ in written),
        num_failures=own_pairs.num_failures if own_pairs else 0,
        without_opposite=without_opposite(written),
        num_exported=num_exported,
    )


class _Asked(NamedTuple):
    """What the teachers' answers gave: candidates, what became of the states, the threshold, what it was read from."""

    candidates: list[OwnPair]
    report: PairReport
    threshold: int
    sources: list[str]


def _asked(section: PairsConfig, run: RunDir, own_pairs: OwnPairs | None) -> _Asked:
    """States are those that were asked about; the threshold is the replay's unless everyone was asked."""
    asked_how = _settings(run)
    threshold = _threshold(asked_how, section.threshold)
    states = RunStates(asked_how.section, run, knows_failures=True)
    called = {call["state_id"] for call in read_calls(run)}
    every = states.read(along=own_pairs.take if own_pairs else None)
    asked_states = {
        turn_state.state["state_id"]: turn_state for turn_state in every if turn_state.state["state_id"] in called
    }
    extraction = extract_pairs(
        (turn_state.state for turn_state in asked_states.values()),
        read_calls(run),
        threshold,
        teachers=asked_how.teachers,
    )
    chosen = _chosen(extraction, asked_states, section)
    candidates = [OwnPair(record, _facts(asked_states[record.pair["state_id"]])) for record in chosen]
    return _Asked(candidates, extraction.report, threshold, states.sources)


def _write(
    section: PairsConfig,
    run: RunDir,
    replay_pairs: _Asked | None,
    own_pairs: OwnPairs | None,
    filtered: Mapping[str, int],
    kept_pairs: Sequence[tuple[PairRecord, Mapping[str, Any]]],
) -> None:
    reads_sites = (replay_pairs is not None and "sites" in replay_pairs.sources) or (
        own_pairs is not None and own_pairs.reads_sites
    )
    has_split = run.path(SPLIT).exists()
    dropped = {f"filter: {k}": v for k, v in filtered.items() if k != "kept" and v}
    run.write_jsonl(
        "pairs",
        (_row(record, metadata) for record, metadata in kept_pairs),
        schema=SCHEMA,
        version=VERSION,
        sources=[
            "conversations",
            *([SPLIT] if has_split else []),
            *(["teacher_calls"] if replay_pairs else []),
            *(["sites"] if reads_sites else []),
        ],
        counts={
            "states": replay_pairs.report.num_states if replay_pairs else 0,
            "extracted": sum(filtered.values()),
            "pairs": len(kept_pairs),
            WORKED: sum(bool(metadata[WORKED]) for _, metadata in kept_pairs),
            **Counter(f"source: {record.source}" for record, _ in kept_pairs),
            **{f"without opposite: {how}": number for how, number in without_opposite(kept_pairs).items()},
        },
        drops={**(replay_pairs.report.drops if replay_pairs else {}), **dropped},
        settings={
            "threshold": replay_pairs.threshold if replay_pairs else None,
            "where_it_worked": section.where_it_worked,
            "thinking": section.thinking,
            "words": section.words,
            "corrections": section.corrections,
            "filters": section.filters,
            "recipe": section.recipe,
        },
    )


def _filtered(
    normalizer: DJNormalizer, candidates: Sequence[OwnPair], held_out: Set[str]
) -> tuple[list[NormalizedDPOPair], dict[str, int]]:
    """What the filters keep, and their counts. Of equal pairs the first is kept, so each side is filtered by itself."""
    pairs: list[NormalizedDPOPair] = []
    counts: Counter[str] = Counter()
    for is_held_out in (False, True) if held_out else (False,):
        side = (
            candidate
            for candidate in candidates
            if (_conversation_of(candidate.record.pair["state_id"]) in held_out) == is_held_out
        )
        pairs += normalizer.normalize(cast("Any", {**candidate.record.pair, **candidate.facts}) for candidate in side)
        for reason, number in normalizer.counts.items():
            counts[reason] += number
    return pairs, dict(counts)


def _conversation_of(state_id: str) -> str:
    return state_id.rpartition("::")[0]


class _AskedHow(NamedTuple):
    """How `crf replay` asked: its settings, and the teachers in order."""

    section: ReplayConfig
    teachers: list[str]


def _settings(run: RunDir) -> _AskedHow:
    """From the sidecar of the calls; before version 0.2 all of it was text."""
    settings: dict[str, Any] = dict(run.meta("teacher_calls").settings)
    if isinstance(settings["teachers"], str):
        history = settings["max_history_tokens"]
        settings |= {
            "teachers": [name for name in settings["teachers"].split(", ") if name],
            "threshold": int(settings["threshold"]),
            "send_tools": settings["tools"] == "sent",
            "max_history_tokens": int(history) if history else None,
        }
    names = ("gate", "threshold", "send_tools", "max_history_tokens")
    return _AskedHow(ReplayConfig(states="all", **{name: settings[name] for name in names}), settings["teachers"])


def _normalizer(section: PairsConfig) -> DJNormalizer:
    backend = "data_juicer" if section.filters == "data_juicer" else "native"
    return DJNormalizer(section.recipe, skip_dj=section.filters == "none", backend=backend)


def _kept_pairs(pairs: Sequence[Any], records: Mapping[str, PairRecord]) -> Iterator[Any]:
    """The pairs that passed, with the tools of their states."""
    for pair in pairs:
        yield {**records[pair.state_id].pair, "tools": pair.metadata.get("tools")}


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
    chosen_records: list[PairRecord] = []
    report = extraction.report
    for record in extraction.records:
        turn_state = asked[record.pair["state_id"]]
        report.num_rejected_worked += not turn_state.has_failed
        pair = record.pair if section.thinking else _without_thinking(record.pair, turn_state)
        if not turn_state.has_failed and not section.where_it_worked:
            report.drop(WORKED)
        elif not pair["rejected"].strip() or not pair["chosen"].strip():
            report.drop(_ONLY_THINKING)
        else:
            action = None if section.thinking else record.chosen_action
            record = replace(record, pair=pair, chosen_action=action)
            chosen_records.append(record if section.words else _calls_alone(record, turn_state))
    report.num_pairs = len(chosen_records)
    return chosen_records


def _without_thinking(pair: DPOPair, turn_state: StateOfTurn) -> DPOPair:
    """Both sides without thinking: teachers do not show theirs, and a pair must not teach whether to think."""
    chosen = without_thought(pair["chosen"])
    parsed = parse_action_text(chosen)
    chosen = text_of(parsed.action) if parsed.thinking else chosen
    return cast("DPOPair", {**pair, "chosen": chosen, "rejected": action_text_without_thinking(turn_state.turn)})


def _calls_alone(record: PairRecord, turn_state: StateOfTurn) -> PairRecord:
    """Where both sides call, their calls without a word: advisers agree on a call, and nobody voted on the words."""
    chosen = parse_action_text(record.pair["chosen"]).action
    if not (chosen.calls and turn_state.turn.calls):
        return record
    right, wrong = Action(text="", calls=chosen.calls), Action(text="", calls=turn_state.turn.calls)
    pair = cast("DPOPair", {**record.pair, "chosen": text_of(right), "rejected": text_of(wrong)})
    return replace(record, pair=pair, chosen_action=right, rejected_action=wrong)


def _facts(turn_state: StateOfTurn) -> dict[str, Any]:
    """Whether and how the rejected action failed, and the tools of its state."""
    tools = turn_state.state.get("tools")
    about = {WORKED: not turn_state.has_failed, "rejected_failures": list(turn_state.failures)}
    return {**about, **({"tools": tools} if tools else {})}


def _row(record: PairRecord, metadata: Mapping[str, Any]) -> dict[str, object]:
    """The messages of a state are those of its conversation: a row refers to them."""
    pair = {key: value for key, value in record.pair.items() if key != "state_messages"}
    about = {key: value for key, value in asdict(record).items() if key != "pair"}
    session, index = _conversation_of(record.pair["state_id"]), record.pair["state_id"].rpartition("::")[2]
    kept_metadata = {key: value for key, value in metadata.items() if key != "tools"}
    return {
        **pair,
        "conversation_id": session,
        "turn_number": int(index.partition(".")[0]),
        **about,
        "metadata": kept_metadata,
    }
