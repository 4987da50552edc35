"""`crf pairs RUN`: what the teachers agree on, and what sessions put right, against what was done; filtered."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from composer_replication.action_text import (
    action_text_without_thinking,
    parse_action_text,
    text_of,
    without_thought,
)
from composer_replication.cli.console import (
    add_config_arguments,
    add_gate_arguments,
    add_short,
    config_of,
)
from composer_replication.cli.replay import RunStates, StateOfTurn, read_calls
from composer_replication.config import PairsConfig, ReplayConfig
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.states import states
from composer_replication.pairs.corrections import ACTED, Correction, own_pairs
from composer_replication.pairs.export import export_preferences
from composer_replication.pairs.extract import (
    Extraction,
    PairRecord,
    PairReport,
    extract_pairs,
)
from composer_replication.pairs.normalise import DJNormalizer, NormalizedDPOPair
from composer_replication.privacy.outgoing import gate_of
from composer_replication.runs import RunDir
from composer_replication.runs.directory import note_elsewhere
from composer_replication.runs.files import (
    PAIRS_SCHEMA,
    PAIRS_VERSION,
    read_conversations,
    read_sites,
    read_tools,
)
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import held_out_of
from composer_replication.sites import find_error_sites
from composer_replication.types import (
    Action,
    Conversation,
    DPOPair,
    ErrorSite,
)

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.config import PairsConfig
    from composer_replication.pairs.extract import PairReport
    from composer_replication.runs import RunDir


_SOURCES = {
    "teachers": "what teachers agree on, what the student did",
    "correction": "the call that should have been made, the one that failed",
    "user": "the call as the user wanted it, the one refused",
    "acted_at_once": "a call that worked, the look that it did without",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="a run directory with conversations in it, and teacher calls if there are any"
    )
    parser.add_argument("--export", metavar="FILE", help="also write a preference data set for TRL's DPOTrainer")
    add_short(parser, "--threshold", key="pairs.threshold")
    add_short(parser, "--where-it-worked", key="pairs.where_it_worked", value=True)
    add_short(parser, "--thinking", key="pairs.thinking", value=True)
    add_short(parser, "--no-corrections", key="pairs.corrections", value=False, help="take teachers' answers alone")
    add_short(parser, "--recipe", key="pairs.recipe", metavar="FILE")
    add_short(parser, "--no-filter", key="pairs.filters", value="none", help="keep every pair")
    text = "run data-juicer's operators (extra: replaysim)"
    add_short(parser, "--data-juicer", key="pairs.filters", value="data_juicer", help=text)
    add_gate_arguments(parser)
    add_config_arguments(parser, "pairs")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say
    from composer_replication.runs import RunDir

    section, run_dir = config_of(args).pairs, RunDir.open(args.run)
    if args.export is not None and args.no_scrub:
        say("crf pairs: --no-scrub: nothing is looked at, and the data set holds whatever the run holds")
    export = None if args.export is None else Path(args.export)
    pairs = write_pairs(section, run_dir, export=export, no_scrub=args.no_scrub, allowed=args.allow)
    if export is not None and pairs.num_exported:
        from composer_replication.atomic import atomic_write_text
        from composer_replication.trainer.trained import preferences_card

        atomic_write_text(_card_of(export), preferences_card(run_dir, export.name))
    _show(run_dir, pairs, section, args)
    return 0


def _card_of(export: Path) -> Path:
    """Beside the file, under a name that nobody else's page has."""
    return export.with_suffix(".card.md")


def _show(run_dir: RunDir, pairs: _PairsOfRun, section: PairsConfig, args: argparse.Namespace) -> None:
    from composer_replication.cli.console import (
        print_json,
        say,
        show,
        table,
    )

    if args.json:
        report = None if pairs.report is None else pairs.report.to_dict()
        by_source = {**pairs.by_source, "failures": pairs.num_failures}
        record = {"report": report, "filters": dict(pairs.filtered), "sources": by_source}
        print_json({"run": str(run_dir.root), **record, "without_opposite": dict(pairs.without_opposite)})
        return
    show(
        *(() if pairs.report is None else _report_tables(pairs.report)),
        table("Filters", ("what", "pairs"), sorted(pairs.filtered.items())),
        table("Pairs", ("source", "pairs", "chosen, and rejected"), _source_rows(pairs.by_source)),
    )
    num_kept = pairs.filtered.get("kept", 0)
    say(f"{run_dir.path('pairs')}: {num_kept} pairs{_shares(pairs)}")
    for line in _notes(pairs, section):
        say(line)
    if args.export is not None:
        card = f"; {_card_of(Path(args.export))} says what they are"
        say(f"{args.export}: {pairs.num_exported} rows{card}" if pairs.num_exported else "nothing to export")


def _report_tables(report: PairReport) -> tuple[Table, Table]:
    from composer_replication.cli.console import table

    rows = [
        (
            kind,
            agreement.num_states,
            agreement.num_consensus,
            _share(agreement.with_each_other),
            _share(agreement.with_student),
        )
        for kind, agreement in sorted(report.agreement.items(), key=lambda item: -item[1].num_states)
    ]
    columns = ("student did", "states", "consensus", "teachers agree", "with student")
    return (
        table("Agreement", columns, rows, caption="Shares of pairs of teachers, and of votes for the student's action"),
        table("States without a pair", ("why", "states"), sorted(report.drops.items())),
    )


def _source_rows(by_source: Mapping[str, int]) -> list[tuple[str, int, str]]:
    return [(name, by_source.get(name, 0), what) for name, what in _SOURCES.items() if name in by_source]


def _notes(pairs: _PairsOfRun, section: PairsConfig) -> Iterator[str]:
    """What somebody who reads the figures should know besides."""
    report = pairs.report
    if section.corrections and not pairs.num_failures:
        yield "no call of this run failed by the model's doing: there is nothing that a session put right"
    if number := sum(pairs.without_opposite.values()):
        by_kind = ", ".join(f"{count} for a {how.rpartition('_')[2]}" for how, count in pairs.without_opposite.items())
        yield (
            f"{number} pairs say to look first ({by_kind}) and have no opposite from a state where acting at once was"
            " right: more of them than of those may teach to look always"
        )
    if report is None:
        if section.corrections:
            yield "no replay in this run: all pairs are the sessions' own. `crf replay RUN` asks other models too"
        return
    if not pairs.filtered.get("kept", 0) and report.drops.get("no_votes"):
        unheard = report.drops["no_votes"]
        yield f"no teacher's answer counts for {unheard} of the states that were asked: `crf replay RUN` asks anew"
    if report.num_rejected_worked:
        dropped = "are none" if not section.where_it_worked else "are among them (rejected_action_worked)"
        more = "" if section.where_it_worked else "; --where-it-worked makes them too"
        yield f"{report.num_rejected_worked} pairs would reject an action that worked: they {dropped}{more}"


def _shares(pairs: _PairsOfRun) -> str:
    """Who they are from: the states that teachers were asked about say nothing about pairs of the sessions' own."""
    if pairs.report is None:
        return ""
    from_teachers = pairs.by_source.get("teachers", 0)
    from_sessions = sum(number for name, number in pairs.by_source.items() if name != "teachers")
    states = f"{pairs.report.num_asked} states that teachers were asked about"
    return f": {from_teachers} from the {states}, {from_sessions} from the sessions alone"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


# `crf pairs`: states and calls in, what passes the filters into `pairs.jsonl`, with the sessions' own pairs.
#
# Of teachers' answers, a pair is made by default only where the student's action failed or was refused. Where it worked
# and others merely did something else, there is no evidence against it: such pairs are made on request, and counted.

_ONLY_THINKING = "nothing_but_thinking"


@dataclass(frozen=True, kw_only=True)
class _PairsOfRun:
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
) -> _PairsOfRun:
    """Extract, filter, and write. Rows name their state; an exported file holds the messages as well.

    What is exported goes through the last gate first, which refuses a run made with `--no-scrub` unless that is said
    here, too. A replay need not have been: then all pairs are the sessions' own.
    """
    # First: a run that may not go out is not worked on.
    gate = None if export is None else gate_of(run, os.environ, no_scrub=no_scrub, allowed=allowed)
    normalizer = _normalizer(section)
    own_pairs = _OwnPairs(run) if section.corrections else None
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
    return _PairsOfRun(
        report=replay_pairs.report if replay_pairs else None,
        filtered=filtered,
        by_source=Counter(record.source for record, _ in written),
        num_failures=own_pairs.num_failures if own_pairs else 0,
        without_opposite=without_opposite(written),
        num_exported=num_exported,
    )


class _Asked(NamedTuple):
    """What the teachers' answers gave: candidates, what became of the states, the threshold, what it was read from."""

    candidates: list[_OwnPair]
    report: PairReport
    threshold: int
    sources: list[str]


def _asked(section: PairsConfig, run: RunDir, own_pairs: _OwnPairs | None) -> _Asked:
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
    candidates = [_OwnPair(record, _facts(asked_states[record.pair["state_id"]])) for record in chosen]
    return _Asked(candidates, extraction.report, threshold, states.sources)


def _write(
    section: PairsConfig,
    run: RunDir,
    replay_pairs: _Asked | None,
    own_pairs: _OwnPairs | None,
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
    normalizer: DJNormalizer, candidates: Sequence[_OwnPair], held_out: Set[str]
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


# Pairs that the sessions of a run give without any adviser: their corrections, and as many of the opposite.
#
# Most corrections say to look first. For each of them there is a pair from a state where acting at once was right, of
# the same session where it has one, so that the two keep each other in balance: one that says not to look for a text
# once more for one that says to look for it, and the same for paths. What has no opposite is counted. Sessions that
# are held out balance each other, and no others.

_LOOK_FIRST = {True: "looked_for_text", False: "looked_for_path"}  # what an edit needed, and what other calls did
MOST_SPARE, _MOST_OF_A_SESSION = 64, 4
"""Pairs of a kind that are kept for other sessions: each holds the messages before it."""
WORKED = "rejected_action_worked"


class _OwnPair(NamedTuple):
    """A pair, and what its row says of the rejected side besides."""

    record: PairRecord
    facts: Mapping[str, Any]


class _Balance:
    """What sessions that may balance each other have too much of, and too little."""

    def __init__(self) -> None:
        self.owed: Counter[str] = Counter()  # pairs of the opposite, by what was looked for
        self.spare: dict[str, list[_OwnPair]] = {how: [] for how in _LOOK_FIRST.values()}

    def spare_ones(self) -> Iterator[_OwnPair]:
        return (pair for how, pairs in self.spare.items() for pair in pairs[: self.owed[how]])


class _OwnPairs:
    """Takes one conversation after the other; `pairs` are those so far, `num_failures` what they could be made of."""

    def __init__(self, run: RunDir) -> None:
        self.pairs: list[_OwnPair] = []
        self.num_failures = 0
        self._tools = read_tools(run)
        self._sites: dict[str, list[ErrorSite]] | None = None
        self._held_out = held_out_of(run)
        self._balances = {is_held_out: _Balance() for is_held_out in (False, True)}
        if run.is_current("sites"):
            self._sites = defaultdict(list)
            for site, _ in read_sites(run):
                self._sites[site.conversation_id].append(site)

    @property
    def reads_sites(self) -> bool:
        return self._sites is not None

    def take(self, conversation: Conversation) -> None:
        """The pairs of a conversation, and of what it has too much to balance others with a few."""
        sites = find_error_sites(conversation) if self._sites is None else self._sites[conversation.id]
        self.num_failures += sum(site.is_kept for site in sites)
        candidates = list(own_pairs(conversation, sites))
        corrections = [correction for correction in candidates if correction.source != ACTED]
        balance = self._balances[conversation.id in self._held_out]
        balance.owed.update(
            _looked_for(correction.kind) for correction in corrections if correction.how == "look_first"
        )
        acted = sorted(
            (correction for correction in candidates if correction.source == ACTED),
            key=lambda correction: _order(conversation, correction),
        )
        chosen: list[Correction] = []
        spare: list[Correction] = []
        room = {
            how: min(MOST_SPARE - len(spare_pairs), _MOST_OF_A_SESSION) for how, spare_pairs in balance.spare.items()
        }
        for correction in acted:
            if balance.owed[correction.how] > 0:
                balance.owed[correction.how] -= 1
                chosen.append(correction)
            elif room[correction.how] > 0:
                room[correction.how] -= 1
                spare.append(correction)
        pairs = self._made(conversation, [*corrections, *chosen, *spare])
        self.pairs += pairs[: len(pairs) - len(spare)]
        for correction, pair in zip(spare, pairs[len(pairs) - len(spare) :], strict=True):
            balance.spare[correction.how].append(pair)

    def balanced(self) -> list[_OwnPair]:
        """All pairs, with spare ones of other sessions for what is still owed."""
        return [*self.pairs, *(pair for balance in self._balances.values() for pair in balance.spare_ones())]

    def _made(self, conversation: Conversation, chosen: Iterable[Correction]) -> list[_OwnPair]:
        turn_numbers = {correction.turn_number for correction in chosen}
        before = {}
        for number, (messages, _) in enumerate(states(conversation)) if turn_numbers else ():
            if number in turn_numbers:
                # A log with a system prompt of its own needs none of ours in front of it.
                is_own = len(messages) > 1 and messages[1].get("role") == "system"
                before[number] = messages[1:] if is_own else messages
        tools = self._tools.of(conversation.format)
        return [_pair(conversation, correction, before[correction.turn_number], tools) for correction in chosen]


def without_opposite(pairs: Iterable[tuple[PairRecord, Mapping[str, Any]]]) -> dict[str, int]:
    """Of pairs with what their rows say: how many more say to look first than not to, by what was looked for."""
    more: Counter[str] = Counter()
    for record, facts in pairs:
        if record.source == ACTED:
            more[facts["how"]] -= 1
        elif facts.get("how") == "look_first":
            more[_looked_for(facts["rejected_failures"][0])] += 1
    return dict(+more)


def _looked_for(kind: str) -> str:
    return _LOOK_FIRST[kind.startswith("edit_")]


def _order(conversation: Conversation, correction: Correction) -> bytes:
    """The same in every run, and of no meaning: states from all over a session."""
    return hashlib.sha256(f"{conversation.id}::{correction.turn_number}".encode("utf-8", "replace")).digest()


def _pair(conversation: Conversation, correction: Correction, messages: list[Any], tools: Any) -> _OwnPair:
    chosen, rejected = (Action(text="", calls=(call,)) for call in (correction.chosen, correction.failed))
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
    about = {WORKED: False, "rejected_failures": [correction.kind] if correction.kind else [], "how": correction.how}
    return _OwnPair(record, {**about, **({"tools": tools} if tools else {})})
