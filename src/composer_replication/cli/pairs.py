"""`crf pairs RUN`: make preference pairs for DPO (channel 3) and filter them.

Reads   conversations.jsonl; split.jsonl, sites.jsonl and teacher_calls.jsonl if they exist
Writes  pairs.jsonl; with --export also a data set for TRL's DPOTrainer

Pairs have two sources:

    replay    chosen: what teachers agree on; rejected: what the model did. By default, only actions that failed or
              were refused are rejected: if an action worked, a different choice by the teachers is no evidence
              against it. `--where-it-worked` adds pairs that reject actions that worked; they are always counted.
    sessions  chosen: the call that corrected an error; rejected: the call that failed. No teacher is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer_replication.action_text import action_text_without_thinking, parse_action_text, remove_thinking, text_of
from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    add_gate_arguments,
    config_from_args,
    log,
    print_json,
    show,
    table,
)
from composer_replication.cli.replay import RunStates, StateOfTurn, read_calls
from composer_replication.config import PairsConfig, ReplayConfig
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.states import states
from composer_replication.pairs.corrections import ACTED, Correction, find_session_pairs
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import Extraction, PairRecord, PairReport, extract_pairs
from composer_replication.pairs.normalise import DJNormalizer, NormalizedDPOPair
from composer_replication.privacy.outgoing import outgoing_gate
from composer_replication.runs import RunDir
from composer_replication.runs.directory import record_outside_copy
from composer_replication.runs.files import PAIRS_SCHEMA, PAIRS_VERSION, read_conversations, read_sites, read_tools
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import read_test_ids
from composer_replication.sites import find_error_sites
from composer_replication.types import Action, Conversation, DPOPair, ErrorSite

if TYPE_CHECKING:
    from rich.table import Table


_SOURCE_DESCRIPTIONS = {
    "teachers": "what teachers agree on, what the student did",
    "correction": "the call that should have been made, the one that failed",
    "user": "the call as the user wanted it, the one refused",
    "acted_at_once": "a call that worked, an unneeded lookup",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="run directory with conversations, and teacher calls if there are any"
    )
    parser.add_argument("--export", metavar="FILE", help="also write a preference data set for TRL's DPOTrainer")
    add_config_flag(parser, "--threshold", key="pairs.threshold")
    add_config_flag(parser, "--where-it-worked", key="pairs.where_it_worked", value=True)
    add_config_flag(parser, "--thinking", key="pairs.thinking", value=True)
    add_config_flag(parser, "--no-corrections", key="pairs.corrections", value=False, help="use only teachers' answers")
    add_config_flag(parser, "--recipe", key="pairs.recipe", metavar="FILE")
    add_config_flag(parser, "--no-filter", key="pairs.filters", value="none", help="keep every pair")
    text = "run data-juicer's operators (extra: replaysim)"
    add_config_flag(parser, "--data-juicer", key="pairs.filters", value="data_juicer", help=text)
    add_gate_arguments(parser)
    add_config_arguments(parser, "pairs")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    section, run_dir = config_from_args(args).pairs, RunDir.open(args.run)
    if args.export is not None and args.no_scrub:
        log("crf pairs: --no-scrub: the outgoing check is off; the data set contains secrets that the run contains")
    export = None if args.export is None else Path(args.export)
    pairs = write_pairs(section, run_dir, export=export, no_scrub=args.no_scrub, allowed=args.allow)
    if export is not None and pairs.num_exported:
        from composer_replication.atomic import atomic_write_text

        atomic_write_text(_card_path(export), _preferences_card(run_dir, export.name))
    _print_result(run_dir, pairs, section, args)
    return 0


def _card_path(export: Path) -> Path:
    """Return the path of the data set's card.

    The card is not named README.md, because the folder may belong to another project.
    """
    return export.with_suffix(".card.md")


def _print_result(run_dir: RunDir, pairs: _PairsResult, section: PairsConfig, args: argparse.Namespace) -> None:
    if args.json:
        report = None if pairs.report is None else pairs.report.to_dict()
        by_source = {**pairs.by_source, "failures": pairs.num_failures}
        record = {"report": report, "filters": dict(pairs.filtered), "sources": by_source}
        print_json({"run": str(run_dir.root), **record, "without_opposite": dict(pairs.surplus_look_first)})
        return
    show(
        *(() if pairs.report is None else _report_tables(pairs.report)),
        table("Filters", ("what", "pairs"), sorted(pairs.filtered.items())),
        table("Pairs", ("source", "pairs", "chosen, and rejected"), _source_rows(pairs.by_source)),
    )
    num_kept = pairs.filtered.get("kept", 0)
    log(f"{run_dir.path('pairs')}: {num_kept} pairs{_describe_sources(pairs)}")
    for line in _remarks(pairs, section):
        log(line)
    if args.export is not None:
        card = f"; {_card_path(Path(args.export))} describes them"
        log(f"{args.export}: {pairs.num_exported} rows{card}" if pairs.num_exported else "nothing to export")


def _report_tables(report: PairReport) -> tuple[Table, Table]:
    rows = [
        (
            kind,
            agreement.num_states,
            agreement.num_consensus,
            _percent(agreement.with_each_other),
            _percent(agreement.with_student),
        )
        for kind, agreement in sorted(report.agreement.items(), key=lambda item: -item[1].num_states)
    ]
    columns = ("student did", "states", "consensus", "teachers agree", "with student")
    return (
        table("Agreement", columns, rows, caption="Shares of pairs of teachers, and of votes for the student's action"),
        table("States without a pair", ("why", "states"), sorted(report.drops.items())),
    )


def _source_rows(by_source: Mapping[str, int]) -> list[tuple[str, int, str]]:
    return [(name, by_source.get(name, 0), what) for name, what in _SOURCE_DESCRIPTIONS.items() if name in by_source]


def _remarks(pairs: _PairsResult, section: PairsConfig) -> Iterator[str]:
    """Yield remarks that help to interpret the tables."""
    report = pairs.report
    if section.corrections and not pairs.num_failures:
        yield "no failed call in this run is blamed on the model, so there are no corrections"
    if number := sum(pairs.surplus_look_first.values()):
        by_kind = ", ".join(
            f"{count} for a {how.rpartition('_')[2]}" for how, count in pairs.surplus_look_first.items()
        )
        yield (
            f"{number} pairs prefer looking first ({by_kind}) and have no counterpart that prefers acting at once;"
            " the model may learn to look first always"
        )
    if report is None:
        if section.corrections:
            yield "no replay in this run: all pairs come from the sessions. Add teachers' answers with `crf replay RUN`"
        return
    if not pairs.filtered.get("kept", 0) and report.drops.get("no_votes"):
        yield f"{report.drops['no_votes']} states have no usable teacher answer; ask again with `crf replay RUN`"
    if report.num_rejected_worked:
        outcome = (
            "included (rejected_action_worked)" if section.where_it_worked else "left out; --where-it-worked adds them"
        )
        yield f"{report.num_rejected_worked} pairs would reject an action that worked: {outcome}"


def _describe_sources(pairs: _PairsResult) -> str:
    """Return text on how many pairs come from teachers and how many from sessions. Without a replay, it is empty."""
    if pairs.report is None:
        return ""
    from_teachers = pairs.by_source.get("teachers", 0)
    from_sessions = sum(number for name, number in pairs.by_source.items() if name != "teachers")
    states = f"{pairs.report.num_asked} states that teachers were asked about"
    return f": {from_teachers} from the {states}, {from_sessions} from the sessions themselves"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


_ONLY_THINKING = "nothing_but_thinking"  # a drop reason, stored in the sidecar


@dataclass(frozen=True, kw_only=True)
class _PairsResult:
    """Counts of the pairs that were made, for the tables."""

    report: PairReport | None  # None without a replay
    filtered: Mapping[str, int]  # pairs by filter outcome; "kept" are those in pairs.jsonl
    by_source: Mapping[str, int]
    num_failures: int  # errors of the model; a session may have corrected them
    surplus_look_first: Mapping[str, int]  # see `_count_surplus_look_first`
    num_exported: int | None


def write_pairs(
    section: PairsConfig,
    run: RunDir,
    *,
    export: Path | None = None,
    no_scrub: bool = False,
    allowed: Iterable[str] = (),
) -> _PairsResult:
    """Make the preference pairs of a run, filter them, and write pairs.jsonl.

    Rows of pairs.jsonl refer to a state of a conversation; an exported file also contains the messages of the state.
    The export has to pass the outgoing check, which refuses a run that was ingested with `--no-scrub` unless `no_scrub`
    is set here as well. Without a replay, all pairs come from the sessions.
    """
    # Built before any work is done: it raises for a run that must not be exported.
    gate = None if export is None else outgoing_gate(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    normalizer = _make_normalizer(section)
    session_pairs = _SessionPairs(run) if section.corrections else None
    replay_pairs = None
    if session_pairs is None or run.path("teacher_calls").exists():
        replay_pairs = _pairs_from_replay(section, run, session_pairs)
    else:
        for conversation in read_conversations(run):
            session_pairs.add(conversation)
    candidates = replay_pairs.candidates if replay_pairs else []
    candidates = [*candidates, *(session_pairs.balanced() if session_pairs else ())]
    records = {candidate.record.pair["state_id"]: candidate.record for candidate in candidates}
    held_out = read_test_ids(run)
    kept_pairs, filtered = _filter(normalizer, candidates, held_out)
    written = [(records[pair.state_id], pair.metadata) for pair in kept_pairs]
    _write_file(section, run, replay_pairs, session_pairs, filtered, written)
    num_exported = None
    if export is not None and kept_pairs:
        # Noted before the file exists, so that `crf forget` knows of every copy even if this process is killed.
        record_outside_copy(run, "preference data set", export)
        train_pairs = [pair for pair in kept_pairs if _conversation_id(pair.state_id) not in held_out]
        num_exported = export_preferences(_add_tools(train_pairs, records), export, gate=gate)
    return _PairsResult(
        report=replay_pairs.report if replay_pairs else None,
        filtered=filtered,
        by_source=Counter(record.source for record, _ in written),
        num_failures=session_pairs.num_failures if session_pairs else 0,
        surplus_look_first=_count_surplus_look_first(written),
        num_exported=num_exported,
    )


class _ReplayPairs(NamedTuple):
    """The pairs made from teachers' answers, before filtering."""

    candidates: list[_Candidate]
    report: PairReport
    threshold: int
    sources: list[str]  # the artefacts that were read


def _pairs_from_replay(section: PairsConfig, run: RunDir, session_pairs: _SessionPairs | None) -> _ReplayPairs:
    """Make pairs from the teachers' answers. Each conversation that is read is also added to `session_pairs`.

    The threshold must be that of the replay, unless the replay asked all teachers about every state.
    """
    replay_settings = _read_replay_settings(run)
    threshold = _check_threshold(replay_settings, section.threshold)
    states = RunStates(replay_settings.section, run, with_failures=True)
    state_ids = {call["state_id"] for call in read_calls(run)}
    all_states = states.read(along=session_pairs.add if session_pairs else None)
    asked_states = {
        turn_state.state["state_id"]: turn_state
        for turn_state in all_states
        if turn_state.state["state_id"] in state_ids
    }
    extraction = extract_pairs(
        (turn_state.state for turn_state in asked_states.values()),
        read_calls(run),
        threshold,
        teachers=replay_settings.teachers,
    )
    records = _select_pairs(extraction, asked_states, section)
    candidates = [_Candidate(record, _rejected_metadata(asked_states[record.pair["state_id"]])) for record in records]
    return _ReplayPairs(candidates, extraction.report, threshold, states.sources)


def _write_file(
    section: PairsConfig,
    run: RunDir,
    replay_pairs: _ReplayPairs | None,
    session_pairs: _SessionPairs | None,
    filtered: Mapping[str, int],
    kept_pairs: Sequence[tuple[PairRecord, Mapping[str, Any]]],
) -> None:
    reads_sites = (replay_pairs is not None and "sites" in replay_pairs.sources) or (
        session_pairs is not None and session_pairs.reads_sites
    )
    has_split = run.path(SPLIT).exists()
    dropped = {f"filter: {k}": v for k, v in filtered.items() if k != "kept" and v}
    run.write_jsonl(
        "pairs",
        (_to_row(record, metadata) for record, metadata in kept_pairs),
        schema=PAIRS_SCHEMA,
        version=PAIRS_VERSION,
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
            _WORKED: sum(bool(metadata[_WORKED]) for _, metadata in kept_pairs),
            **Counter(f"source: {record.source}" for record, _ in kept_pairs),
            **{f"without opposite: {how}": number for how, number in _count_surplus_look_first(kept_pairs).items()},
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


def _filter(
    normalizer: DJNormalizer, candidates: Sequence[_Candidate], held_out: Set[str]
) -> tuple[list[NormalizedDPOPair], dict[str, int]]:
    """Return the pairs that pass the filters, and the number of pairs by outcome.

    Held-out pairs are filtered separately: the filters keep the first of several equal pairs, and a training pair must
    not displace a test pair.
    """
    pairs: list[NormalizedDPOPair] = []
    counts: Counter[str] = Counter()
    for is_held_out in (False, True) if held_out else (False,):
        part = (
            candidate
            for candidate in candidates
            if (_conversation_id(candidate.record.pair["state_id"]) in held_out) == is_held_out
        )
        pairs += normalizer.normalize(
            cast("Any", {**candidate.record.pair, **candidate.metadata}) for candidate in part
        )
        for reason, number in normalizer.counts.items():
            counts[reason] += number
    return pairs, dict(counts)


def _conversation_id(state_id: str) -> str:
    return state_id.rpartition("::")[0]


class _ReplaySettings(NamedTuple):
    """The settings of the run's replay, and its teachers in the order of their votes."""

    section: ReplayConfig
    teachers: list[str]


def _read_replay_settings(run: RunDir) -> _ReplaySettings:
    """Read the settings of the replay from the sidecar of teacher_calls.jsonl."""
    settings: dict[str, Any] = dict(run.meta("teacher_calls").settings)
    # Before version 0.2 all values were strings: "a, b" for the teachers, "sent" or "" for the tools.
    if isinstance(settings["teachers"], str):
        history = settings["max_history_tokens"]
        settings |= {
            "teachers": [name for name in settings["teachers"].split(", ") if name],
            "threshold": int(settings["threshold"]),
            "send_tools": settings["tools"] == "sent",
            "max_history_tokens": int(history) if history else None,
        }
    names = ("gate", "threshold", "send_tools", "max_history_tokens")
    return _ReplaySettings(ReplayConfig(states="all", **{name: settings[name] for name in names}), settings["teachers"])


def _make_normalizer(section: PairsConfig) -> DJNormalizer:
    backend = "data_juicer" if section.filters == "data_juicer" else "native"
    return DJNormalizer(section.recipe, skip_dj=section.filters == "none", backend=backend)


def _add_tools(pairs: Sequence[Any], records: Mapping[str, PairRecord]) -> Iterator[Any]:
    """Yield each pair with the tools of its state added."""
    for pair in pairs:
        yield {**records[pair.state_id].pair, "tools": pair.metadata.get("tools")}


def _check_threshold(replay_settings: _ReplaySettings, threshold: int | None) -> int:
    """Return the number of teachers that must agree.

    Raises InputError if the replay skipped calls that are needed for this number.
    """
    replayed = replay_settings.section
    threshold = replayed.threshold if threshold is None else threshold
    # With a gate, `crf replay` stops asking about a state once its own threshold is reached or out of reach.
    if replayed.gate != "none" and threshold != replayed.threshold:
        fix = f"Run `crf replay RUN --full` or `crf replay RUN --threshold {threshold}` to send the missing calls."
        got, expected = f"{threshold}", f"{replayed.threshold}, the threshold of the replay"
        raise InputError(explain("threshold", got=got, expected=expected, fix=fix))
    return threshold


def _select_pairs(
    extraction: Extraction, asked_states: Mapping[str, StateOfTurn], section: PairsConfig
) -> list[PairRecord]:
    """Return the pairs that `section` selects, without the texts that it excludes.

    The pairs that are not selected are counted in the report.
    """
    selected: list[PairRecord] = []
    report = extraction.report
    for record in extraction.records:
        turn_state = asked_states[record.pair["state_id"]]
        report.num_rejected_worked += not turn_state.has_failed
        pair = record.pair if section.thinking else _without_thinking(record.pair, turn_state)
        if not turn_state.has_failed and not section.where_it_worked:
            report.drop(_WORKED)
        elif not pair["rejected"].strip() or not pair["chosen"].strip():
            report.drop(_ONLY_THINKING)
        else:
            action = None if section.thinking else record.chosen_action
            record = replace(record, pair=pair, chosen_action=action)
            selected.append(record if section.words else _strip_prose(record, turn_state))
    report.num_pairs = len(selected)
    return selected


def _without_thinking(pair: DPOPair, turn_state: StateOfTurn) -> DPOPair:
    """Return the pair without the thinking on both sides, because teachers return no thinking."""
    chosen = remove_thinking(pair["chosen"])
    parsed = parse_action_text(chosen)
    chosen = text_of(parsed.action) if parsed.thinking else chosen
    return cast("DPOPair", {**pair, "chosen": chosen, "rejected": action_text_without_thinking(turn_state.turn)})


def _strip_prose(record: PairRecord, turn_state: StateOfTurn) -> PairRecord:
    """Reduce both sides of a pair to their calls if both call a tool, because teachers vote on calls, not on words."""
    chosen = parse_action_text(record.pair["chosen"]).action
    if not (chosen.calls and turn_state.turn.calls):
        return record
    chosen, rejected = Action(text="", calls=chosen.calls), Action(text="", calls=turn_state.turn.calls)
    pair = cast("DPOPair", {**record.pair, "chosen": text_of(chosen), "rejected": text_of(rejected)})
    return replace(record, pair=pair, chosen_action=chosen, rejected_action=rejected)


def _rejected_metadata(turn_state: StateOfTurn) -> dict[str, Any]:
    """Return metadata of a pair: whether and how the rejected action failed, and the tools of its state."""
    tools = turn_state.state.get("tools")
    outcome = {_WORKED: not turn_state.has_failed, "rejected_failures": list(turn_state.failures)}
    return {**outcome, **({"tools": tools} if tools else {})}


def _to_row(record: PairRecord, metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return a row of pairs.jsonl, which names the conversation and turn instead of repeating the messages."""
    conversation_id, _, index = record.pair["state_id"].rpartition("::")
    return {
        **{key: value for key, value in record.pair.items() if key != "state_messages"},
        "conversation_id": conversation_id,
        "turn_number": int(index.partition(".")[0]),  # "0012.1" is the second call of turn 12
        **{key: value for key, value in asdict(record).items() if key != "pair"},
        "metadata": {key: value for key, value in metadata.items() if key != "tools"},
    }


# ---- Pairs from the sessions themselves
# Most corrections prefer looking first (search for the text before editing it). A model that is trained only on them
# learns to look first always. So each such pair is balanced by a pair from a state where acting at once was right, for
# the same kind of lookup (text or path) and, if possible, from the same session. Pairs without a counterpart are
# counted. Held-out sessions are balanced among themselves.

# By whether the failed call is an edit: an edit looks for text, every other call for a path.
_LOOKUP_KINDS = {True: "looked_for_text", False: "looked_for_path"}
# Spare counterparts for other sessions. Each keeps its messages in memory, so their number is limited.
_MAX_SPARE, _MAX_SPARE_PER_SESSION = 64, 4
_WORKED = "rejected_action_worked"


class _Candidate(NamedTuple):
    """A pair before filtering, with metadata on its rejected answer."""

    record: PairRecord
    metadata: Mapping[str, Any]


class _Balance:
    """The counts of missing counterparts by kind of lookup, and the spare pairs that can fill the gaps.

    A counterpart of a pair that prefers looking something up first is a pair that prefers acting at once.
    """

    def __init__(self) -> None:
        self.needed: Counter[str] = Counter()  # counterparts that are missing, by kind of lookup
        self.spare: dict[str, list[_Candidate]] = {how: [] for how in _LOOKUP_KINDS.values()}

    def usable_spares(self) -> Iterator[_Candidate]:
        return (pair for how, pairs in self.spare.items() for pair in pairs[: self.needed[how]])


class _SessionPairs:
    """Pairs from the sessions themselves, collected one conversation at a time.

    `pairs` holds the pairs so far. `num_failures` counts the model's errors, whether or not they were corrected.
    """

    def __init__(self, run: RunDir) -> None:
        self.pairs: list[_Candidate] = []
        self.num_failures = 0
        self._tools = read_tools(run)
        self._sites: dict[str, list[ErrorSite]] | None = None
        self._held_out = read_test_ids(run)
        self._balances = {is_held_out: _Balance() for is_held_out in (False, True)}
        if run.is_current("sites"):
            self._sites = defaultdict(list)
            for site, _ in read_sites(run):
                self._sites[site.conversation_id].append(site)

    @property
    def reads_sites(self) -> bool:
        return self._sites is not None

    def add(self, conversation: Conversation) -> None:
        """Add the pairs of a conversation.

        A few pairs that prefer acting at once are set aside, to balance pairs of other sessions that prefer looking
        first.
        """
        sites = find_error_sites(conversation) if self._sites is None else self._sites[conversation.id]
        self.num_failures += sum(site.is_kept for site in sites)
        candidates = list(find_session_pairs(conversation, sites))
        corrections = [correction for correction in candidates if correction.source != ACTED]
        balance = self._balances[conversation.id in self._held_out]
        balance.needed.update(
            _lookup_kind(correction.kind) for correction in corrections if correction.how == "look_first"
        )
        counterparts = sorted(
            (correction for correction in candidates if correction.source == ACTED),
            key=lambda correction: _shuffle_key(conversation, correction),
        )
        used: list[Correction] = []
        spare: list[Correction] = []
        room = {
            how: min(_MAX_SPARE - len(spare_pairs), _MAX_SPARE_PER_SESSION)
            for how, spare_pairs in balance.spare.items()
        }
        for correction in counterparts:
            if balance.needed[correction.how] > 0:
                balance.needed[correction.how] -= 1
                used.append(correction)
            elif room[correction.how] > 0:
                room[correction.how] -= 1
                spare.append(correction)
        pairs = self._build(conversation, [*corrections, *used, *spare])
        self.pairs += pairs[: len(pairs) - len(spare)]
        for correction, pair in zip(spare, pairs[len(pairs) - len(spare) :], strict=True):
            balance.spare[correction.how].append(pair)

    def balanced(self) -> list[_Candidate]:
        """Return all pairs.

        Missing pairs that prefer acting at once are filled in with spare pairs from other sessions.
        """
        return [*self.pairs, *(pair for balance in self._balances.values() for pair in balance.usable_spares())]

    def _build(self, conversation: Conversation, corrections: Iterable[Correction]) -> list[_Candidate]:
        turn_numbers = {correction.turn_number for correction in corrections}
        messages_before = {}
        for number, (messages, _) in enumerate(states(conversation)) if turn_numbers else ():
            if number in turn_numbers:
                # `states` puts our system prompt first. If the log has one itself, drop ours.
                has_system_prompt = len(messages) > 1 and messages[1].get("role") == "system"
                messages_before[number] = messages[1:] if has_system_prompt else messages
        tools = self._tools.of(conversation.format)
        return [
            _make_candidate(conversation, correction, messages_before[correction.turn_number], tools)
            for correction in corrections
        ]


def _count_surplus_look_first(pairs: Iterable[tuple[PairRecord, Mapping[str, Any]]]) -> dict[str, int]:
    """Count, by kind of lookup, how many more pairs prefer looking first than prefer acting at once.

    Only positive counts are returned.
    """
    surplus: Counter[str] = Counter()
    for record, metadata in pairs:
        if record.source == ACTED:
            surplus[metadata["how"]] -= 1
        elif metadata.get("how") == "look_first":
            surplus[_lookup_kind(metadata["rejected_failures"][0])] += 1
    return dict(+surplus)  # `+` drops what is not positive


def _lookup_kind(kind: str) -> str:
    # "edit_no_match" -> looked_for_text, "file_not_found" -> looked_for_path
    return _LOOKUP_KINDS[kind.startswith("edit_")]


def _shuffle_key(conversation: Conversation, correction: Correction) -> bytes:
    """Return a sort key that shuffles the states of a session deterministically."""
    return hashlib.sha256(f"{conversation.id}::{correction.turn_number}".encode("utf-8", "replace")).digest()


def _make_candidate(conversation: Conversation, correction: Correction, messages: list[Any], tools: Any) -> _Candidate:
    chosen, rejected = (Action(text="", calls=(call,)) for call in (correction.chosen, correction.failed))
    # A turn may have several calls, so the call's number is part of the id.
    pair = DPOPair(
        state_id=f"{conversation.id}::{correction.turn_number:04d}.{correction.call_number}",
        state_messages=messages,
        chosen=text_of(chosen),
        rejected=text_of(rejected),
        n_teachers_agreeing=0,
    )
    record = PairRecord(
        pair=pair,
        chosen_by=correction.source,
        teachers=(),
        classes=(),
        student_kind=correction.failed.name,
        chosen_kind=correction.chosen.name,
        chosen_action=chosen,
        rejected_action=rejected,
        source=correction.source,
    )
    outcome = {_WORKED: False, "rejected_failures": [correction.kind] if correction.kind else [], "how": correction.how}
    return _Candidate(record, {**outcome, **({"tools": tools} if tools else {})})


def _preferences_card(run: RunDir, file: str) -> str:
    """Return the README for preference pairs exported for TRL's DPOTrainer."""
    from composer_replication.trainer.trained import data_card

    fields = {
        "state_id": "conversation and turn of the pair",
        "prompt": "messages before the turn",
        "chosen": "the preferred action: one assistant message",
        "rejected": "the rejected action: one assistant message",
        "tools": "JSON schemas of the tools, as text",
    }
    what = "Preference pairs from sessions of coding agents: the consensus of teachers, or corrections in a session."
    return data_card(run, name=file, what=what, fields=fields, files={"train": file})
