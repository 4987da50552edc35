"""`crf replay RUN`: ask teachers what they would have done at each state, within a hard cap."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from composer_replication.cli.console import (
    add_config_arguments,
    add_gate_arguments,
    add_short,
    config_of,
)
from composer_replication.config import ReplayConfig
from composer_replication.errors import StaleArtefactError, explain
from composer_replication.ingestion.states import states, trace_state
from composer_replication.privacy.outgoing import Find, gate_of, refusal
from composer_replication.runs import RunDir, Source
from composer_replication.runs.files import read_conversations, read_sites, read_tools
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import held_out_of
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.teacher_replay.ask_and_retry import answer_of, call_result, session_of
from composer_replication.teacher_replay.cost_survey import PlannedState, PriceRange, Survey
from composer_replication.teacher_replay.forget import AskedTools
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import (
    OnMeter,
    ReplayOptions,
    ReplayReport,
    check_cap_fits_a_call,
    check_threshold,
    environment_of,
    teachers_of,
)
from composer_replication.teacher_replay.replay import replay as ask_teachers
from composer_replication.teacher_replay.requests import RequestSettings
from composer_replication.teacher_replay.teachers import Teacher, check_cap, read_specs
from composer_replication.teacher_replay.votes import is_unsent
from composer_replication.types import (
    Conversation,
    ErrorSite,
    TeacherCallResult,
    TraceState,
    Turn,
)

if TYPE_CHECKING:
    pass


WHEN_INTERRUPTED = "answers that came are kept, and the same command asks for the rest"
_COUNTED_TWICE = {"not asked", "calls not sent"}  # rows of the record that the asker's own counts explain better
# Flags of earlier versions: the key that each is short for, and its value where none is typed.
_KNOWN_FLAGS: dict[str, tuple[str, object]] = {
    "--sites": ("states", "sites"),
    "--limit": ("limit", None),
    "--full": ("gate", "none"),
    "--gate": ("gate", None),
    "--threshold": ("threshold", None),
    "--in-order": ("order", "in_order"),
    "--concurrency": ("concurrency", None),
    "--max-tokens": ("max_tokens", None),
    "--max-history": ("max_history_tokens", None),
    "--timeout": ("timeout_s", None),
    "--no-tools": ("send_tools", False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    add_short(parser, "--teachers", key="replay.teachers", metavar="FILE")
    add_short(parser, "--max-usd", key="replay.max_usd", metavar="USD")
    text = "only states of turns that failed or were refused: those pairs are made of"
    add_short(parser, "--failed", key="replay.states", value="failed", help=text)
    parser.add_argument("--dry-run", action="store_true", help="say what it would cost, and send nothing")
    parser.add_argument("--go-on", action="store_true", help="send again after a teacher took more than its bound")
    add_config_arguments(parser, "replay")
    add_gate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    for flag, (key, value) in _KNOWN_FLAGS.items():
        add_short(parser, flag, key=f"replay.{key}", value=value, hidden=True)


def run(args: argparse.Namespace) -> int:
    import asyncio

    from composer_replication.cli.console import say
    from composer_replication.cli.progress import call_progress
    from composer_replication.runs import RunDir

    section, run_dir = config_of(args).replay, RunDir.open(args.run)
    if args.no_scrub:
        say("crf replay: --no-scrub: nothing is looked at, and teachers see whatever the run holds")
    plan = plan_replay(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
    _say_price(plan)
    _refuse_small_cap(plan)
    _refuse_finds(plan)
    if args.dry_run:
        if args.json:
            _print_plan(plan)
        return 0
    price = plan.price
    with call_progress(price.num_calls + price.num_cached, section.max_usd, quiet=args.json) as bar:
        done = asyncio.run(ask(plan, on_call=bar.on_call, on_meter=bar.on_meter, goes_on=args.go_on))
    _show(plan, done, as_json=args.json)
    has_failed = not done.num_answers and any(done.counts.get(name) for name in ("calls", "calls not sent"))
    return 1 if done.report.stopped or done.report.given_up or has_failed else 0


def _say_price(plan: _ReplayPlan) -> None:
    from composer_replication.cli.console import say

    price, cap = plan.price, f"${plan.section.max_usd:g}"
    say(
        f"up to {price.num_calls:,} calls to send, {price.num_cached:,} answered before; if all are sent they cost "
        f"about ${price.low_usd:.4f} and at most ${price.high_usd:.4f}; ${price.spent_usd:.4f} of the cap of {cap} is "
        "spent"
    )
    if price.num_fitting < price.num_calls:
        say(f"the cap leaves room for about {price.num_fitting:,} of them; --max-usd raises it")


def _print_plan(plan: _ReplayPlan) -> None:
    from dataclasses import asdict

    from composer_replication.cli.console import print_json

    summary = {"run": str(plan.run.root), "done": False, "states": len(plan.asked), "cap_usd": plan.section.max_usd}
    print_json({**summary, **asdict(plan.price)})


def _show(plan: _ReplayPlan, done: Replayed, *, as_json: bool) -> None:
    from composer_replication.cli.console import (
        print_json,
        say,
        show,
        table,
    )
    from composer_replication.teacher_replay.ask_and_retry import KEPT_BACK

    run_dir, report, counts = plan.run, done.report, dict(done.counts)
    if as_json:
        print_json({"run": str(run_dir.root), "calls": counts, "report": report})
        return
    num_calls = counts.get("calls", 0) + counts.get("calls not sent", 0)
    why = report.stopped or report.given_up
    rows = {**counts, **report.counts, **({"answers": done.num_answers} if why else {})}
    table_rows = sorted((what, number) for what, number in rows.items() if what not in _COUNTED_TWICE)
    show(table("Teacher calls, stopped early" if why else "Teacher calls", ("what", "number"), table_rows))
    unknown = f" and ${report.unknown_billed_usd:.4f} held for {report.num_unknown_billed} attempts that may be billed"
    say(f"spent ${report.spent_usd:.4f}{unknown if report.num_unknown_billed else ''}; cap ${plan.section.max_usd:g}")
    if kept_back := report.counts.get(KEPT_BACK):
        say(f"the cap kept {kept_back:,} calls from being sent; --max-usd raises it, and only they are asked then")
    if report.stopped:
        say(f"stopped: {report.stopped}. Look at it, then go on with --go-on")
    if report.given_up:
        say(f"stopped: {report.given_up}. {done.num_answers:,} answers are kept; the same command asks for the rest")
    pairs = "`crf pairs RUN` makes pairs of it"
    if num_calls and not done.num_answers:
        pairs = "no call has an answer, so there is nothing to make pairs of"
    elif why:
        pairs = f"{done.num_answers:,} of {num_calls:,} calls have an answer; pairs of those alone would be few"
    say(f"{run_dir.path('teacher_calls')}: {pairs}")


# `crf replay`: teachers are asked about a run's states, and their answers go into `teacher_calls.jsonl`.
#
# The conversations are read twice. The first reading builds every request, looks at its bytes, adds up what it may cost
# and keeps its key; nothing is sent. The second builds each request again and asks. What is written comes from the keys
# and the store of answers, so neither requests nor answers are held in memory.

SCHEMA, VERSION = "teacher_call", 2
_RUN_DEPENDENT = ("is_cached",)
OnCall = Callable[[TeacherCallResult], None]


@dataclass(frozen=True, kw_only=True)
class _ReplayPlan:
    """What a replay would ask, of whom, and at what price.

    `finds` are texts in its requests that look as if they held a secret, each once, at the first state that shows it.
    """

    run: RunDir
    section: ReplayConfig
    teachers: Sequence[Teacher]
    options: ReplayOptions
    states: RunStates
    sources: Sequence[Source]
    asked: Sequence[PlannedState]
    price: PriceRange
    finds: Sequence[Find]


class Replayed(NamedTuple):
    """What a replay did, and the counts of `teacher_calls.jsonl`."""

    report: ReplayReport
    counts: Mapping[str, int]

    @property
    def num_answers(self) -> int:
        return self.counts.get("calls", 0) - self.counts.get("calls with an error", 0)


def replay(
    section: ReplayConfig,
    run: RunDir,
    *,
    no_scrub: bool = False,
    allowed: Iterable[str] = (),
    goes_on: bool = False,
    on_call: OnCall = lambda _result: None,
    on_meter: OnMeter | None = None,
) -> Replayed:
    """Ask, and write `teacher_calls.jsonl`. What looks as if it held a secret is refused before anything is sent."""
    plan = plan_replay(section, run, no_scrub=no_scrub, allowed=allowed)
    _refuse_finds(plan)
    return asyncio.run(ask(plan, on_call=on_call, on_meter=on_meter, goes_on=goes_on))


def plan_replay(
    section: ReplayConfig,
    run: RunDir,
    *,
    no_scrub: bool = False,
    allowed: Iterable[str] = (),
    teachers: Sequence[Teacher] | None = None,
    options: ReplayOptions | None = None,
) -> _ReplayPlan:
    """The requests of a replay, looked at and priced; none is sent.

    `teachers` are those to ask instead of the section's, `options` how to ask instead of what the section says.
    """
    cap_nano = check_cap(section.max_usd)
    options = options or _options(section, run)
    teachers = teachers or teachers_of(read_specs(section.teachers, "replay.teachers"), None, options)
    if options.gate is not None:
        check_threshold(len(teachers), options.agreement_threshold)
    gate = gate_of(run, environment_of(options), no_scrub=no_scrub, allowed=allowed, gate=options.last_gate)
    states = RunStates(section, run)
    sources = [run.source(name) for name in (*states.sources, *(["tools"] if section.send_tools else []))]
    with TeacherStore(options.cache) as store:
        survey = Survey(teachers, options, store, gate)
        planned_states = [survey.look_at(turn_state.state) for turn_state in states.read()]
        meter = store.meter()
    return _ReplayPlan(
        run=run,
        section=section,
        teachers=teachers,
        options=replace(options, last_gate=gate),
        states=states,
        sources=sources,
        asked=planned_states,
        price=survey.price(meter.spent + meter.unknown, cap_nano - meter.spent - meter.unknown),
        finds=tuple(survey.finds.values()),
    )


def _refuse_small_cap(plan: _ReplayPlan) -> None:
    """Raise InputError where the cap leaves no room for any call, and no answer is in the store."""
    price = plan.price
    if price.cheapest_nano is not None and not price.num_cached:
        check_cap_fits_a_call(price.left_nano, price.cheapest_nano, plan.section.max_usd)


def _refuse_finds(plan: _ReplayPlan) -> None:
    """Raise where a request looks as if it held a secret."""
    if plan.finds:
        raise refusal("requests to teachers", plan.finds)


async def ask(
    plan: _ReplayPlan,
    *,
    on_call: OnCall = lambda _result: None,
    on_meter: OnMeter | None = None,
    goes_on: bool = False,
) -> Replayed:
    """Ask, then write `teacher_calls.jsonl`: every call in the order of states and teachers, answered or not.

    The run is held meanwhile: a second replay of it says who holds it, and sends nothing. Where its conversations have
    changed since they were planned for, a StaleArtefactError says so; answers so far are in the store. Of a run that
    was not scrubbed nothing is sent, unless the gate is the open one. `goes_on`: a person has looked at the teacher
    that took more than its bound, and requests go out again.
    """
    _refuse_small_cap(plan)
    run, outcomes = plan.run, _Outcomes()

    def keep(_state: int, teacher: int, result: TeacherCallResult) -> None:
        outcomes.add(result, teacher)
        on_call(result)

    with run.used_for("replay"), TeacherStore(plan.options.cache) as store:
        store.hold("a replay of this run")
        if goes_on:
            store.resume_after_overrun()
        _check_unchanged(plan)
        report = await ask_teachers(
            _written_down(plan),
            plan.teachers,
            plan.section.max_usd,
            options=plan.options,
            on_result=keep,
            on_meter=on_meter,
            store=store,
        )
        _check_unchanged(plan)
        return Replayed(report, _write(plan, store, outcomes))


def read_calls(run: RunDir) -> Iterator[TeacherCallResult]:
    """The calls of a run, in order."""
    rows = run.read_jsonl("teacher_calls", schema=SCHEMA, version=VERSION)
    return (cast("TeacherCallResult", row) for row in rows)


def _options(section: ReplayConfig, run: RunDir) -> ReplayOptions:
    return ReplayOptions(
        cache=run.path("teacher_cache"),
        max_concurrency=section.concurrency,
        gate=None if section.gate == "none" else section.gate,
        order=section.order,
        agreement_threshold=section.threshold,
        timeout_s=section.timeout_s,
        settings=RequestSettings(max_tokens=section.max_tokens),
    )


class _Outcomes:
    """What came of the calls of this replay, by state and number of the teacher; answers are in the store."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, int], TeacherCallResult] = {}
        self._answered = set[int]()  # hashes: of a long replay there are many

    def add(self, result: TeacherCallResult, teacher: int) -> None:
        if result["message"] is None:  # pyright: ignore[reportTypedDictNotRequiredAccess]
            self.failures[result["state_id"], teacher] = result
        else:
            self._answered.add(hash((result["state_id"], teacher)))

    def was_answered(self, state_id: str, teacher: int) -> bool:
        return hash((state_id, teacher)) in self._answered


def _written_down(plan: _ReplayPlan) -> Iterator[TraceState]:
    """The planned states, each with its session's tools kept before it is asked about."""
    asked_tools = AskedTools(plan.run)
    for turn_state in plan.states.read(only=(planned.state_id for planned in plan.asked), verify=False):
        if turn_state.state.get("tools"):
            asked_tools.keep(session_of(turn_state.state), turn_state.state["tools"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
        yield turn_state.state


def _write(plan: _ReplayPlan, store: TeacherStore, outcomes: _Outcomes) -> Mapping[str, int]:
    """`teacher_calls.jsonl`; its settings are what `crf pairs` must know to see the same states."""
    meta = plan.run.write_jsonl(
        "teacher_calls",
        _while_unchanged(plan, _rows(plan, store, outcomes, counts := Counter())),
        schema=SCHEMA,
        version=VERSION,
        sources=[source for source in plan.sources if source.name != "tools"],
        counts=counts,
        drops={},
        settings={
            "teachers": [teacher.slug for teacher in plan.teachers],
            "gate": plan.options.gate or "none",
            "threshold": plan.options.agreement_threshold,
            "send_tools": plan.section.send_tools,
            "max_history_tokens": plan.section.max_history_tokens,
            "states": plan.section.states,
            "limit": plan.section.limit,
            "max_usd": plan.section.max_usd,
        },
    )
    return meta.counts


def _rows(
    plan: _ReplayPlan, store: TeacherStore, outcomes: _Outcomes, counts: Counter[str]
) -> Iterator[dict[str, object]]:
    """From the store, not from memory: a replay of any length is written with little of it."""
    for planned in plan.asked:
        counts["states"] += 1
        for index, (teacher, key) in enumerate(zip(plan.teachers, planned.keys, strict=True)):
            failed = outcomes.failures.get((planned.state_id, index))
            reply = None if failed or not key else store.reply(key)
            if failed is None and reply is None:
                # Else a gate saw that it could not matter.
                counts["reply gone" if outcomes.was_answered(planned.state_id, index) else "not asked"] += 1
                continue
            if reply is not None:
                store.ascribe(key, planned.session)
            answer = answer_of(reply or {}, is_cached=True) if failed is None else None
            result = failed if answer is None else call_result(planned.state_id, planned.flags, teacher.slug, answer)
            assert result is not None
            if is_unsent(result):
                counts["calls not sent"] += 1
            else:
                counts["calls"] += 1
                counts["calls with an error"] += result["error"] is not None
            counts["flagged"] += bool(result.get("flags"))
            row = {name: value for name, value in result.items() if name not in _RUN_DEPENDENT}
            yield {**row, "conversation_id": planned.session}


def _while_unchanged(plan: _ReplayPlan, rows: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The rows; an error instead of their end, for which nothing is written, where their sources changed meanwhile."""
    yield from rows
    _check_unchanged(plan)


def _check_unchanged(plan: _ReplayPlan) -> None:
    """Calls are written beside the states that were asked about, never beside others."""
    for source in plan.sources:
        if plan.run.source(source.name) != source:
            fix = (
                "Answers so far are paid for and kept in teacher_cache.sqlite: run the same command again, and only "
                "what is new is asked."
            )
            got, expected = "a file that was changed during the replay", "the one that was asked about"
            raise StaleArtefactError(explain(str(plan.run.path(source.name)), got=got, expected=expected, fix=fix))


# The states of a run, as `crf replay` asks about them and `crf pairs` compares them; and which of their turns failed.
#
# A state is what a model had seen before a turn, and the turn is what it did then. Both steps read it here, with the
# tools that the session is asked about with.

# Tests that fail, a linter or a compiler that finds something: the call did what it was made for.
PART_OF_THE_WORK = frozenset({"test_failure", "lint_or_typecheck", "compile_error"})


class StateOfTurn(NamedTuple):
    """A state, with the conversation and the turn that its action is, and the kinds of the turn's failing calls."""

    state: TraceState
    conversation_id: str
    turn: Turn
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether a call of the turn failed, was refused, stopped or blocked, other than as part of the work."""
        return any(kind not in PART_OF_THE_WORK for kind in self.failures)


_Failures = dict[str, tuple[str, ...]]
"""Kinds of failing calls by the id of their turn."""


class RunStates:
    """The states of a run; reading them again gives the same ones as long as the run is the same.

    Sessions that are held out have none here: nobody is asked, or paid, for what nothing may be learnt from.

    `knows_failures`: `failures` of a state are looked up, kept as a site or not, whoever's doing it was. They are those
    of `sites.jsonl`, or found in the conversations where that is not there or older than they are. Error sites are
    found there too if `crf sites` was not run.
    """

    def __init__(self, section: ReplayConfig, run: RunDir, *, knows_failures: bool = False) -> None:
        self._section, self._run, self._held_out = section, run, held_out_of(run)
        knows_failures = knows_failures or section.states == "failed"
        wants_sites = section.states == "sites"
        self.reads_sites = (wants_sites and run.path("sites").exists()) or (knows_failures and run.is_current("sites"))
        self._finds = (wants_sites or knows_failures) and not self.reads_sites
        self._taught: set[tuple[str, str]] = set()
        self._failures: dict[str, _Failures] = defaultdict(dict)
        for site in (site for site, _ in read_sites(run)) if self.reads_sites else ():
            self._take(site, self._failures[site.conversation_id])

    @property
    def sources(self) -> list[str]:
        """Artefacts that these states are made of."""
        split = [SPLIT] if self._run.path(SPLIT).exists() else []
        return ["conversations", *split, *(["sites"] if self.reads_sites else [])]

    def read(
        self,
        only: Iterable[str] | None = None,
        *,
        verify: bool = True,
        along: Callable[[Conversation], None] | None = None,
    ) -> Iterator[StateOfTurn]:
        """Session by session; messages are shared between the states of one. `only`: ids of the states, as read before.

        `verify=False` is for a file whose checksum was compared by an earlier reading. `along` sees every conversation.
        """
        section = self._section
        tools, asked_tools = (read_tools(self._run), AskedTools(self._run)) if section.send_tools else (None, None)
        ids, number = None if only is None else set(only), 0
        for conversation in read_conversations(self._run, verify=verify):
            if along is not None:
                along(conversation)
            if conversation.id in self._held_out:
                continue
            session_tools = (
                asked_tools.of(conversation, tools.of(conversation.format)) if tools and asked_tools else None
            )
            failures = self._failures_of(conversation) if ids is None else {}
            for turn_state in self._of(conversation, failures):
                if not (self._is_wanted(turn_state) if ids is None else turn_state.state["state_id"] in ids):
                    continue
                if section.limit is not None and number >= section.limit:
                    return
                number += 1
                if session_tools:
                    turn_state.state["tools"] = session_tools
                yield turn_state

    def _of(self, conversation: Conversation, failures: _Failures) -> Iterator[StateOfTurn]:
        history = states(conversation, max_history_tokens=self._section.max_history_tokens)
        for index, (messages, turn) in enumerate(history):
            if turn.origin == "meta":  # what the harness wrote in the model's place is nobody's action
                continue
            # A log with a system prompt of its own needs none of ours in front of it.
            is_own = len(messages) > 1 and messages[1].get("role") == "system"
            state = trace_state(f"{conversation.id}::{index:04d}", messages[1:] if is_own else messages, turn)
            state["session_id"], state["cwd"] = conversation.id, conversation.cwd
            yield StateOfTurn(state, conversation.id, turn, failures.get(turn.id, ()))

    def _failures_of(self, conversation: Conversation) -> _Failures:
        if not self._finds:
            return self._failures.get(conversation.id, {})
        failures: _Failures = {}
        for site in find_error_sites(conversation):
            self._take(site, failures)
        return failures

    def _take(self, site: ErrorSite, failures: _Failures) -> None:
        if site.is_kept:
            self._taught.add((site.conversation_id, site.turn_id))
        if site.kind != NO_FAILURE:
            failures[site.turn_id] = (*failures.get(site.turn_id, ()), site.kind)

    def _is_wanted(self, turn_state: StateOfTurn) -> bool:
        if self._section.states == "sites":
            return (turn_state.conversation_id, turn_state.turn.id) in self._taught
        return self._section.states == "all" or turn_state.has_failed
