"""`crf replay RUN`: ask teachers what they would have done at each state of a run, up to a spending cap.

Reads   conversations.jsonl; tools.jsonl, split.jsonl and sites.jsonl if they exist
Writes  teacher_calls.jsonl, one row per state and teacher; answers are cached in teacher_cache.sqlite

The conversations are read twice. The first pass builds every request, checks it for secrets, adds its price to the
total and keeps only its cache key; it sends nothing. The second pass builds the requests again and sends them. The rows
are then written from the keys and the cache, so memory holds neither requests nor answers.

    plan_replay    first pass: what would be sent, and what it may cost
    send_requests  second pass: send, cache, and write teacher_calls.jsonl
    RunStates      the states of a run, which `crf pairs` reads as well
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

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
from composer_replication.config import ReplayConfig
from composer_replication.errors import StaleArtefactError, explain
from composer_replication.ingestion.states import states, trace_state
from composer_replication.privacy.outgoing import Find, outgoing_gate, refusal
from composer_replication.runs import RunDir, Source
from composer_replication.runs.files import read_conversations, read_sites, read_tools
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import read_test_ids
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.teacher_replay.ask_and_retry import answer_from_record, call_result, session_of
from composer_replication.teacher_replay.cost_survey import PlannedState, PriceRange, Survey
from composer_replication.teacher_replay.forget import AskedTools
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import (
    OnMeter,
    ReplayOptions,
    ReplayReport,
    check_cap_fits_a_call,
    check_threshold,
    resolve_environment,
    teachers_of,
)
from composer_replication.teacher_replay.replay import replay as ask_teachers
from composer_replication.teacher_replay.requests import RequestSettings
from composer_replication.teacher_replay.teachers import Teacher, check_cap, read_specs
from composer_replication.teacher_replay.votes import is_unsent
from composer_replication.types import Conversation, ErrorSite, TeacherCallResult, TraceState, Turn

WHEN_INTERRUPTED = "the answers so far are saved; run the same command again for the rest"
# Not printed: the counts of requests in the same table also give the reasons.
_COUNTED_WITH_REQUESTS = {"not asked", "calls not sent"}
# Flags of earlier versions, hidden from --help: the config key of each, and its value if it takes none.
_HIDDEN_FLAGS: dict[str, tuple[str, object]] = {
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
    parser.add_argument("run", metavar="RUN", help="run directory with ingested conversations (`crf ingest`)")
    add_config_flag(parser, "--teachers", key="replay.teachers", metavar="FILE")
    add_config_flag(parser, "--max-usd", key="replay.max_usd", metavar="USD")
    text = "ask only about turns that failed or were refused; pairs are made from these"
    add_config_flag(parser, "--failed", key="replay.states", value="failed", help=text)
    parser.add_argument("--dry-run", action="store_true", help="print what it would cost, and send nothing")
    parser.add_argument(
        "--go-on", action="store_true", help="continue although a teacher has charged more than its stated maximum"
    )
    add_config_arguments(parser, "replay")
    add_gate_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    for flag, (key, value) in _HIDDEN_FLAGS.items():
        add_config_flag(parser, flag, key=f"replay.{key}", value=value, hidden=True)


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.progress import call_progress

    section, run_dir = config_from_args(args).replay, RunDir.open(args.run)
    if args.no_scrub:
        log("crf replay: --no-scrub: the outgoing check is off; teachers see everything in the run")
    plan = plan_replay(section, run_dir, no_scrub=args.no_scrub, allowed=args.allow)
    _log_price(plan)
    _refuse_small_cap(plan)
    _refuse_secrets(plan)
    if args.dry_run:
        if args.json:
            _print_plan(plan)
        return 0
    price = plan.price
    with call_progress(price.num_calls + price.num_cached, section.max_usd, quiet=args.json) as bar:
        done = asyncio.run(
            send_requests(plan, on_call=bar.on_call, on_meter=bar.on_meter, resume_after_overrun=args.go_on)
        )
    _show(plan, done, as_json=args.json)
    has_failed = not done.num_answers and any(done.counts.get(name) for name in ("calls", "calls not sent"))
    return 1 if done.report.stopped or done.report.given_up or has_failed else 0


def _log_price(plan: _ReplayPlan) -> None:
    price, cap = plan.price, f"${plan.section.max_usd:g}"
    log(
        f"up to {price.num_calls:,} calls to send, {price.num_cached:,} already cached; together they cost about "
        f"${price.low_usd:.4f} and at most ${price.high_usd:.4f}; ${price.spent_usd:.4f} of the cap of {cap} is spent"
    )
    if price.num_fitting < price.num_calls:
        log(f"the cap is enough for about {price.num_fitting:,} of these calls; raise it with --max-usd")


def _print_plan(plan: _ReplayPlan) -> None:
    from dataclasses import asdict

    summary = {
        "run": str(plan.run.root),
        "done": False,
        "states": len(plan.planned_states),
        "cap_usd": plan.section.max_usd,
    }
    print_json({**summary, **asdict(plan.price)})


def _show(plan: _ReplayPlan, done: ReplayResult, *, as_json: bool) -> None:
    from composer_replication.teacher_replay.ask_and_retry import KEPT_BACK

    run_dir, report, counts = plan.run, done.report, dict(done.counts)
    if as_json:
        print_json({"run": str(run_dir.root), "calls": counts, "report": report})
        return
    num_calls = counts.get("calls", 0) + counts.get("calls not sent", 0)
    why = report.stopped or report.given_up
    rows = {**counts, **report.counts, **({"answers": done.num_answers} if why else {})}
    table_rows = sorted((what, number) for what, number in rows.items() if what not in _COUNTED_WITH_REQUESTS)
    show(table("Teacher calls, stopped early" if why else "Teacher calls", ("what", "number"), table_rows))
    # Money stays reserved for a request that timed out, because the provider may still bill it.
    unknown = f" and ${report.unknown_billed_usd:.4f} held for {report.num_unknown_billed} attempts that may be billed"
    log(f"spent ${report.spent_usd:.4f}{unknown if report.num_unknown_billed else ''}; cap ${plan.section.max_usd:g}")
    if num_unsent := report.counts.get(KEPT_BACK):
        log(
            f"Spending cap reached: {num_unsent:,} requests were not sent. Raise --max-usd and rerun to send only these"
        )
    if report.stopped:
        log(f"stopped: {report.stopped}. Check the teacher's prices, then continue with --go-on")
    if report.given_up:
        log(f"stopped: {report.given_up}. {done.num_answers:,} answers are saved; run the same command for the rest")
    next_step = "make pairs from it with `crf pairs RUN`"
    if num_calls and not done.num_answers:
        next_step = "no call has an answer, so no pairs can be made"
    elif why:
        next_step = f"{done.num_answers:,} of {num_calls:,} calls have an answer, which gives few pairs"
    log(f"{run_dir.path('teacher_calls')}: {next_step}")


SCHEMA, VERSION = "teacher_call", 2
_NOT_STORED = ("is_cached",)  # it depends on earlier replays, so a rerun would write different rows
OnCall = Callable[[TeacherCallResult], None]


@dataclass(frozen=True, kw_only=True)
class _ReplayPlan:
    """The requests of a replay, the teachers that receive them, and the cost.

    `finds` lists, without duplicates, the texts in the requests that look like secrets, each with the first state that
    contains it.
    """

    run: RunDir
    section: ReplayConfig
    teachers: Sequence[Teacher]
    options: ReplayOptions
    states: RunStates
    sources: Sequence[Source]
    planned_states: Sequence[PlannedState]
    price: PriceRange
    finds: Sequence[Find]


class ReplayResult(NamedTuple):
    """The result of a replay: the report on the requests, and the row counts of teacher_calls.jsonl."""

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
    resume_after_overrun: bool = False,
    on_call: OnCall = lambda _result: None,
    on_meter: OnMeter | None = None,
) -> ReplayResult:
    """Ask the teachers and write teacher_calls.jsonl. Sends nothing and raises if a request may contain a secret."""
    plan = plan_replay(section, run, no_scrub=no_scrub, allowed=allowed)
    _refuse_secrets(plan)
    return asyncio.run(
        send_requests(plan, on_call=on_call, on_meter=on_meter, resume_after_overrun=resume_after_overrun)
    )


def plan_replay(
    section: ReplayConfig,
    run: RunDir,
    *,
    no_scrub: bool = False,
    allowed: Iterable[str] = (),
    teachers: Sequence[Teacher] | None = None,
    options: ReplayOptions | None = None,
) -> _ReplayPlan:
    """Build the requests of a replay, check them for secrets and compute their price, without sending any.

    `teachers` and `options` replace the settings in `section`.
    """
    cap_nano = check_cap(section.max_usd)
    options = options or _replay_options(section, run)
    teachers = teachers or teachers_of(read_specs(section.teachers, "replay.teachers"), None, options)
    if options.gate is not None:
        check_threshold(len(teachers), options.agreement_threshold)
    gate = outgoing_gate(run, resolve_environment(options), no_scrub=no_scrub, allowed=allowed, gate=options.last_gate)
    states = RunStates(section, run)
    sources = [run.source(name) for name in (*states.sources, *(["tools"] if section.send_tools else []))]
    with TeacherStore(options.cache) as store:
        survey = Survey(teachers, options, store, gate)
        planned_states = [survey.add_state(turn_state.state) for turn_state in states.read()]
        meter = store.meter()
    return _ReplayPlan(
        run=run,
        section=section,
        teachers=teachers,
        options=replace(options, last_gate=gate),
        states=states,
        sources=sources,
        planned_states=planned_states,
        price=survey.price(meter.spent + meter.unknown, cap_nano - meter.spent - meter.unknown),
        finds=tuple(survey.finds.values()),
    )


def _refuse_small_cap(plan: _ReplayPlan) -> None:
    """Raise InputError if no answer is cached and the spending cap is too small for even one call."""
    price = plan.price
    if price.cheapest_nano is not None and not price.num_cached:
        check_cap_fits_a_call(price.left_nano, price.cheapest_nano, plan.section.max_usd)


def _refuse_secrets(plan: _ReplayPlan) -> None:
    """Raise if a request contains text that looks like a secret."""
    if plan.finds:
        raise refusal("requests to teachers", plan.finds)


async def send_requests(
    plan: _ReplayPlan,
    *,
    on_call: OnCall = lambda _result: None,
    on_meter: OnMeter | None = None,
    resume_after_overrun: bool = False,
) -> ReplayResult:
    """Send the requests, then write teacher_calls.jsonl: one row per state and teacher, answered or not.

    The run is locked until this is done, so a second replay of the same run raises an error and sends nothing. Raises
    StaleArtefactError if the conversations have changed since the plan was made; the answers so far stay in the cache.
    Requests from a run that was ingested with `--no-scrub` are sent only if the outgoing check is off.

    Args:
        plan: The plan made by `plan_replay`.
        on_call: Called with the result of every call.
        on_meter: Called when the amount of money spent or reserved changes.
        resume_after_overrun: Send requests even if a teacher has charged more than its maximum before.
    """
    _refuse_small_cap(plan)
    run, outcomes = plan.run, _Outcomes()

    def on_result(_state: int, teacher: int, result: TeacherCallResult) -> None:
        outcomes.add(result, teacher)
        on_call(result)

    with run.used_for("replay"), TeacherStore(plan.options.cache) as store:
        store.hold("a replay of this run")
        if resume_after_overrun:
            store.resume_after_overrun()
        _check_unchanged(plan)
        report = await ask_teachers(
            _store_tools(plan),
            plan.teachers,
            plan.section.max_usd,
            options=plan.options,
            on_result=on_result,
            on_meter=on_meter,
            store=store,
        )
        _check_unchanged(plan)
        return ReplayResult(report, _write(plan, store, outcomes))


def read_calls(run: RunDir) -> Iterator[TeacherCallResult]:
    """Yield the rows of teacher_calls.jsonl in order."""
    rows = run.read_jsonl("teacher_calls", schema=SCHEMA, version=VERSION)
    return (cast("TeacherCallResult", row) for row in rows)


def _replay_options(section: ReplayConfig, run: RunDir) -> ReplayOptions:
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
    """The outcomes of this replay by state and teacher. Only failures are stored here; answers are in the cache."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, int], TeacherCallResult] = {}
        self._answered = set[int]()  # hashes, to save memory: a long replay has hundreds of thousands

    def add(self, result: TeacherCallResult, teacher: int) -> None:
        if result["message"] is None:  # pyright: ignore[reportTypedDictNotRequiredAccess]
            self.failures[result["state_id"], teacher] = result
        else:
            self._answered.add(hash((result["state_id"], teacher)))

    def was_answered(self, state_id: str, teacher: int) -> bool:
        return hash((state_id, teacher)) in self._answered


def _store_tools(plan: _ReplayPlan) -> Iterator[TraceState]:
    """Yield the planned states, and store the tools of each session before its first request is sent.

    A later replay sends the stored tools, so that its requests match the cached answers.
    """
    asked_tools = AskedTools(plan.run)
    for turn_state in plan.states.read(only=(planned.state_id for planned in plan.planned_states), verify=False):
        if turn_state.state.get("tools"):
            asked_tools.record(session_of(turn_state.state), turn_state.state["tools"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
        yield turn_state.state


def _write(plan: _ReplayPlan, store: TeacherStore, outcomes: _Outcomes) -> Mapping[str, int]:
    """Write teacher_calls.jsonl, together with the settings from which `crf pairs` rebuilds the same states."""
    meta = plan.run.write_jsonl(
        "teacher_calls",
        _check_after_rows(plan, _call_rows(plan, store, outcomes, counts := Counter())),
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


def _call_rows(
    plan: _ReplayPlan, store: TeacherStore, outcomes: _Outcomes, counts: Counter[str]
) -> Iterator[dict[str, object]]:
    """Yield the rows of teacher_calls.jsonl one at a time from the cache, and count them."""
    for planned in plan.planned_states:
        counts["states"] += 1
        for index, (teacher, key) in enumerate(zip(plan.teachers, planned.keys, strict=True)):
            failed = outcomes.failures.get((planned.state_id, index))
            reply = None if failed or not key else store.reply(key)
            if failed is None and reply is None:
                # "not asked": the vote was already decided without this teacher (`replay.gate`).
                counts["reply gone" if outcomes.was_answered(planned.state_id, index) else "not asked"] += 1
                continue
            if reply is not None:
                store.add_reply_session(key, planned.session)
            answer = answer_from_record(reply or {}, is_cached=True) if failed is None else None
            result = failed if answer is None else call_result(planned.state_id, planned.flags, teacher.slug, answer)
            assert result is not None
            if is_unsent(result):
                counts["calls not sent"] += 1
            else:
                counts["calls"] += 1
                counts["calls with an error"] += result["error"] is not None
            counts["flagged"] += bool(result.get("flags"))
            row = {name: value for name, value in result.items() if name not in _NOT_STORED}
            yield {**row, "conversation_id": planned.session}


def _check_after_rows(plan: _ReplayPlan, rows: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
    """Yield the rows, then raise StaleArtefactError if a source has changed since the plan was made.

    The error after the last row causes the unfinished file to be discarded.
    """
    yield from rows
    _check_unchanged(plan)


def _check_unchanged(plan: _ReplayPlan) -> None:
    """Raise StaleArtefactError if a source has changed since the plan was made.

    Its calls would then belong to the old states.
    """
    for source in plan.sources:
        if plan.run.source(source.name) != source:
            fix = "Run the same command again: answers so far are in teacher_cache.sqlite, only new requests are sent."
            got, expected = "a file that changed during the replay", "the file that the plan was made from"
            raise StaleArtefactError(explain(str(plan.run.path(source.name)), got=got, expected=expected, fix=fix))


# ---- The states of a run
# A state is everything that the model had seen before a turn. `crf replay` asks teachers what they would do in it, and
# `crf pairs` compares their answers with the turn. Both must build the same states, with the same tools.

# A call that reports a failing test, a lint error or a compile error did its job, so it has not failed itself.
TASK_FAILURES = frozenset({"test_failure", "lint_or_typecheck", "compile_error"})


class StateOfTurn(NamedTuple):
    """A state, the turn that followed it, and the error kinds of the turn's failed calls."""

    state: TraceState
    conversation_id: str
    turn: Turn
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether a call of the turn failed or was refused. Failures in `TASK_FAILURES` do not count."""
        return any(kind not in TASK_FAILURES for kind in self.failures)


_FailuresByTurn = dict[str, tuple[str, ...]]
"""Error kinds of the failed calls, by turn id."""


class RunStates:
    """The states of a run that the settings in `section` select. Each pass over them yields the same states.

    Held-out sessions are skipped: they must not be trained on, so asking about them would waste money.

    With `with_failures`, every state lists the failed calls of its turn, whoever is to blame. The failures are read
    from sites.jsonl, or found in the conversations if that file is missing or stale.
    """

    def __init__(self, section: ReplayConfig, run: RunDir, *, with_failures: bool = False) -> None:
        self._section, self._run, self._held_out = section, run, read_test_ids(run)
        with_failures = with_failures or section.states == "failed"
        wants_sites = section.states == "sites"
        self.reads_sites = (wants_sites and run.path("sites").exists()) or (with_failures and run.is_current("sites"))
        self._must_find_failures = (wants_sites or with_failures) and not self.reads_sites
        self._kept_turns: set[tuple[str, str]] = set()  # turns of kept sites, for `states = "sites"`
        self._failures: dict[str, _FailuresByTurn] = defaultdict(dict)
        for site in (site for site, _ in read_sites(run)) if self.reads_sites else ():
            self._collect(site, self._failures[site.conversation_id])

    @property
    def sources(self) -> list[str]:
        """The artifacts from which these states are read."""
        split = [SPLIT] if self._run.path(SPLIT).exists() else []
        return ["conversations", *split, *(["sites"] if self.reads_sites else [])]

    def read(
        self,
        only: Iterable[str] | None = None,
        *,
        verify: bool = True,
        along: Callable[[Conversation], None] | None = None,
    ) -> Iterator[StateOfTurn]:
        """Yield the states session by session. The states of a session share their message objects.

        Args:
            only: Ids of the states to yield, as collected in an earlier pass.
            verify: Compare the file's checksum, which is not needed in a second pass.
            along: Called with every conversation, including held-out ones.
        """
        section = self._section
        tools, asked_tools = (read_tools(self._run), AskedTools(self._run)) if section.send_tools else (None, None)
        ids, num_states = None if only is None else set(only), 0
        for conversation in read_conversations(self._run, verify=verify):
            if along is not None:
                along(conversation)
            if conversation.id in self._held_out:
                continue
            session_tools = (
                asked_tools.tools_for(conversation, tools.of(conversation.format)) if tools and asked_tools else None
            )
            failures = self._failures_by_turn(conversation) if ids is None else {}
            for turn_state in self._conversation_states(conversation, failures):
                if not (self._is_selected(turn_state) if ids is None else turn_state.state["state_id"] in ids):
                    continue
                if section.limit is not None and num_states >= section.limit:
                    return
                num_states += 1
                if session_tools:
                    turn_state.state["tools"] = session_tools
                yield turn_state

    def _conversation_states(self, conversation: Conversation, failures: _FailuresByTurn) -> Iterator[StateOfTurn]:
        history = states(conversation, max_history_tokens=self._section.max_history_tokens)
        for index, (messages, turn) in enumerate(history):
            if turn.origin == "meta":  # written by the harness instead of the model, so it is not an action
                continue
            # `states` puts our system prompt first. If the log has one itself, drop ours.
            has_system_prompt = len(messages) > 1 and messages[1].get("role") == "system"
            state = trace_state(
                f"{conversation.id}::{index:04d}", messages[1:] if has_system_prompt else messages, turn
            )
            state["session_id"], state["cwd"] = conversation.id, conversation.cwd
            yield StateOfTurn(state, conversation.id, turn, failures.get(turn.id, ()))

    def _failures_by_turn(self, conversation: Conversation) -> _FailuresByTurn:
        if not self._must_find_failures:
            return self._failures.get(conversation.id, {})
        failures: _FailuresByTurn = {}
        for site in find_error_sites(conversation):
            self._collect(site, failures)
        return failures

    def _collect(self, site: ErrorSite, failures: _FailuresByTurn) -> None:
        if site.is_kept:
            self._kept_turns.add((site.conversation_id, site.turn_id))
        if site.kind != NO_FAILURE:
            failures[site.turn_id] = (*failures.get(site.turn_id, ()), site.kind)

    def _is_selected(self, turn_state: StateOfTurn) -> bool:
        if self._section.states == "sites":
            return (turn_state.conversation_id, turn_state.turn.id) in self._kept_turns
        return self._section.states == "all" or turn_state.has_failed
