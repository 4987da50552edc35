"""Ask every teacher what it would have done in every state, with a cache, a spending cap and retries."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from composer_replication.action_text import parse_reply
from composer_replication.errors import InputError, explain
from composer_replication.privacy.outgoing import LastGate
from composer_replication.sites.actions.equality import ActionContext, Tools, action_key
from composer_replication.teacher_replay.ask_and_retry import (
    AFTER_STOP,
    BudgetedClient,
    RetryPolicy,
    TeacherAnswer,
    call_result,
    run_jobs,
    run_lanes,
    session_of,
)
from composer_replication.teacher_replay.endpoint import TeacherClient
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.requests import Request, RequestBuilder, RequestSettings, flags
from composer_replication.teacher_replay.tables import Meter
from composer_replication.teacher_replay.teachers import (
    DEFAULT_TEACHERS,
    Price,
    Teacher,
    check_cap,
    read_teachers,
    to_dollars,
)
from composer_replication.teacher_replay.votes import StateContexts, can_outcome_change, read_vote
from composer_replication.types import TeacherCallResult, TeacherSpec, TraceState

_log = logging.getLogger(__name__)
T = TypeVar("T")
GateName = Literal["exact", "agree"]
OrderName = Literal["longest_first", "in_order"]
OnResult = Callable[[int, int, TeacherCallResult], None]
"""Called with the index of a state, the index of a teacher, and the result."""
OnMeter = Callable[[Meter], None]
"""Called with the amounts spent and reserved, after each result."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of a replay.

    `cache` is the file of the store (replies and money spent), which restarts and other processes share; None keeps
    both in memory. `gate`: None asks all teachers; "exact" asks the next teacher only while its vote can change the
    pair; "agree" stops when the first teacher agrees with the student. `order`: "longest_first" asks about the longest
    state of a session first and then about the others concurrently, because the provider has cached all of their
    prompts by then; "in_order" asks about one state at a time.
    """

    base_url: str | None = None
    cache: str | Path | None = None
    max_concurrency: int = 64
    gate: GateName | None = None
    order: OrderName = "longest_first"
    agreement_threshold: int = 2
    timeout_s: float = 120.0
    settings: RequestSettings = field(default_factory=RequestSettings)
    patience: RetryPolicy = field(default_factory=RetryPolicy)
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    """The environment in which API keys are looked up; None is that of the process."""
    last_gate: LastGate | None = None
    """Checks every request for secrets before it is sent; None is a check for the secrets in the environment."""

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "agreement_threshold"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise InputError(explain(name, got=repr(value), expected="1 or more"))
        if self.gate not in (None, "exact", "agree"):
            raise InputError(explain("gate", got=repr(self.gate), expected='None, "exact" or "agree"'))
        if self.order not in ("longest_first", "in_order"):
            raise InputError(explain("order", got=repr(self.order), expected='"longest_first" or "in_order"'))


@dataclass(kw_only=True)
class ReplayReport:
    """The result of a replay: counts by name, and the amounts of the whole store in US dollars.

    A replay ends early if a teacher billed more than its maximum cost (`stopped`), or if an endpoint refuses requests
    or cannot be reached (`given_up`).
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    spent_usd: float = 0.0
    unknown_billed_usd: float = 0.0
    num_unknown_billed: int = 0
    stopped: str | None = None
    given_up: str | None = None


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] = DEFAULT_TEACHERS,
    max_total_usd: float = 5.0,
    api_key: str | None = None,
    *,
    base_url: str | None = None,
    cache: str | Path | None = None,
    resume: bool = True,
    max_concurrency: int = 64,
    gate: GateName | None = None,
    options: ReplayOptions | None = None,
) -> list[TeacherCallResult]:
    """Ask all teachers about all states, and return the answers by state; the cap or a gate may skip calls.

    If an endpoint is given up, or a teacher bills more than its maximum cost, the remaining calls are not sent and
    their `error` begins with "stopped: ". The cap is never exceeded: the maximum cost of a request is reserved before
    it is sent, and requests wait until those in flight leave room. Raises InputError if the cap is below the price of
    every single call. With a `cache`, stored answers are not paid for again, and the cap covers everything that the
    store ever spent. `resume=False` rejects an existing store. `options` has all further options.
    """
    keywords = {"base_url": base_url, "cache": cache, "max_concurrency": max_concurrency, "gate": gate}
    changed = {name: value for name, value in keywords.items() if value not in (None, 64)}
    if options is not None and changed:
        fix = "Set them in ReplayOptions."
        got = f"both options and {sorted(changed)}"
        raise InputError(explain("arguments of replay_trace", got=got, expected="options only", fix=fix))
    replay_options = options or ReplayOptions(**changed)  # pyright: ignore[reportArgumentType]
    resolved_teachers = teachers_of(teachers, api_key, replay_options)
    if replay_options.gate is not None:
        check_threshold(len(resolved_teachers), replay_options.agreement_threshold)
    _check_states(states)
    if not resume and replay_options.cache is not None and Path(replay_options.cache).exists():
        fix = "Use resume=True, or choose another file."
        raise InputError(explain("cache", got=f"{replay_options.cache}, which exists", expected="a new file", fix=fix))
    _check_affordable(states, resolved_teachers, max_total_usd, replay_options)
    results: dict[tuple[int, int], TeacherCallResult] = {}

    def store_result(state: int, teacher: int, result: TeacherCallResult) -> None:
        results[state, teacher] = result

    report = await replay(
        states,
        resolved_teachers,
        max_total_usd,
        options=replay_options,
        on_result=store_result,
        reports_calls_over_cap=False,
    )
    if why := report.given_up or report.stopped:
        num_kept_back = report.counts.get(AFTER_STOP, 0)
        _log.warning("stopped, %d of %d calls were kept back: %s", num_kept_back, len(results), why)
    return [results[key] for key in sorted(results)]


def resolve_environment(options: ReplayOptions) -> Mapping[str, str]:
    """Return the environment in which API keys and known secrets are looked up."""
    return os.environ if options.environment is None else options.environment


def teachers_of(specs: Sequence[Mapping[str, Any]], api_key: str | None, options: ReplayOptions) -> list[Teacher]:
    """Convert descriptions of teachers to teachers with keys and prices."""
    return read_teachers(
        specs,
        environment=resolve_environment(options),
        api_key=api_key,
        base_url=options.base_url,
        prices=options.prices,
    )


async def replay(
    states: Iterable[TraceState],
    teachers: Sequence[Teacher],
    max_total_usd: float,
    *,
    options: ReplayOptions,
    on_result: OnResult,
    on_meter: OnMeter | None = None,
    store: TeacherStore | None = None,
    reports_calls_over_cap: bool = True,
) -> ReplayReport:
    """Ask all teachers about all states like `replay_trace`, but pass each result to a callback, so that memory does
    not grow with the states.

    `store` is an open store to use instead of `options.cache`; it is not closed. Calls that do not fit into the cap
    have a result, too, unless `reports_calls_over_cap` is false.
    """
    cap_nano = check_cap(max_total_usd)
    report = ReplayReport()
    client = TeacherClient(max_concurrency=options.max_concurrency, timeout_s=options.timeout_s)
    with TeacherStore(options.cache) if store is None else contextlib.nullcontext(store) as store:
        gate = options.last_gate or LastGate(resolve_environment(options))
        asker = BudgetedClient(client, store, cap_nano=cap_nano, gate=gate, patience=options.patience)
        async with client:
            run = _Replay(asker, teachers, options, _with_meter(on_result, on_meter, store), reports_calls_over_cap)
            await run.ask_all(states, options.order, num_workers=options.max_concurrency)
        meter = store.meter()
        report.counts = dict(asker.counts) | dict(run.gate.counts if run.gate else {})
        report.spent_usd, report.unknown_billed_usd = to_dollars(meter.spent), to_dollars(meter.unknown)
        report.num_unknown_billed, report.stopped = meter.num_unknown, meter.halted
        report.given_up = asker.given_up
    return report


def _with_meter(on_result: OnResult, on_meter: OnMeter | None, store: TeacherStore) -> OnResult:
    if on_meter is None:
        return on_result

    def report_both(state: int, teacher: int, result: TeacherCallResult) -> None:
        on_meter(store.meter())
        on_result(state, teacher, result)

    return report_both


class _Replay:
    def __init__(
        self,
        asker: BudgetedClient,
        teachers: Sequence[Teacher],
        options: ReplayOptions,
        on_result: OnResult,
        reports_calls_over_cap: bool,
    ) -> None:
        self._asker, self._on_result, self._reports_calls_over_cap = asker, on_result, reports_calls_over_cap
        self._builders = [RequestBuilder(teacher, options.settings) for teacher in teachers]
        self._slugs = [teacher.slug for teacher in teachers]
        self.gate: _AskingGate | None = None
        if options.gate is not None:
            self.gate = _AskingGate(options.gate, options.agreement_threshold, len(teachers), _StateVotes())

    async def ask_all(self, states: Iterable[TraceState], order: OrderName, *, num_workers: int) -> None:
        """Ask about all states of each session, either one at a time or the longest first and then the others
        concurrently.
        """
        if self.gate is None:
            lanes = (
                [(numbered, index) for numbered in group]
                for group, index in _sessions_by_teacher(states, len(self._slugs))
            )
            await self._run(lanes, self._ask_one_teacher, order, num_workers)
        else:
            await self._run(self._gated(states), self._ask_all_teachers, order, num_workers)

    async def _run(
        self, lanes: Iterable[list[T]], work: Callable[[T], Awaitable[None]], order: OrderName, num_workers: int
    ) -> None:
        async def one_by_one(lane: list[T]) -> None:
            for job in lane:
                await work(job)

        if order == "in_order":
            await run_jobs(lanes, one_by_one, num_workers=num_workers)
        else:
            await run_lanes((lane[::-1] for lane in lanes), work, num_workers=num_workers)

    def _gated(self, states: Iterable[TraceState]) -> Iterator[list[_NumberedState]]:
        """Yield each session after the gate has read its states in order, because teachers are asked about the
        states in another order.
        """
        assert self.gate is not None
        for group in _group_by_session(states):
            self.gate.read_ahead([numbered.state for numbered in group])
            yield group

    async def _ask_one_teacher(self, job: tuple[_NumberedState, int]) -> None:
        await self._ask(*job)

    async def _ask_all_teachers(self, numbered: _NumberedState) -> None:
        """Ask one teacher at a time about a state, until the gate says that no further answer matters."""
        assert self.gate is not None
        answers: list[TeacherCallResult] = []
        for teacher in range(len(self._slugs)):
            if not self.gate.should_ask(numbered.state, answers):
                break
            answers.append(await self._ask(numbered, teacher))
        self.gate.release(numbered.state)

    async def _ask(self, numbered: _NumberedState, teacher: int) -> TeacherCallResult:
        number, state = numbered
        _check_state(state, number)
        try:
            request = request_of(self._builders[teacher], state)
        except InputError as error:  # no request can be built: this costs nothing, and other states continue
            answer = TeacherAnswer(None, f"not sent: {error}"[:300], False, 0.0, 0)
        else:
            answer = await self._asker.ask(request)
        result = call_result(state["state_id"], flags(state["messages"]), self._slugs[teacher], answer)
        if self._reports_calls_over_cap or answer.refusal != "cap":
            self._on_result(number, teacher, result)
        return result


def request_of(builder: RequestBuilder, state: TraceState) -> Request:
    """Build the request that asks a teacher about a state."""
    label = f"state {state['state_id']}"
    return builder.build(state["messages"], state.get("tools"), session_of(state), label=label)


def check_threshold(num_teachers: int, threshold: int) -> None:
    """Raise InputError if the agreement threshold exceeds the number of teachers, so that no pair could result."""
    if num_teachers < threshold:
        some = f"{num_teachers} teacher{'s' * (num_teachers != 1)}"
        fix = f"Add {threshold - num_teachers} more, or lower the threshold (replay.threshold, agreement_threshold)."
        raise InputError(
            explain("threshold", got=f"{threshold} with {some}", expected=f"at least {threshold} teachers", fix=fix)
        )


def check_cap_fits_a_call(left_nano: int, cheapest_nano: int, max_total_usd: float) -> None:
    """Raise InputError if the rest of the cap is below the maximum cost of the cheapest call."""
    if left_nano < cheapest_nano:
        got = f"${max_total_usd:g}, of which ${to_dollars(max(0, left_nano)):.6f} is left"
        expected = f"at least ${to_dollars(cheapest_nano):.6f}, the maximum cost of the cheapest call"
        fix = "Raise the cap (--max-usd, max_total_usd), or allow shorter answers (replay.max_tokens, Settings)."
        raise InputError(explain("cap", got=got, expected=expected, fix=fix))


def _check_affordable(
    states: Sequence[TraceState], teachers: Sequence[Teacher], max_total_usd: float, options: ReplayOptions
) -> None:
    """Raise InputError if no call fits into the rest of the cap and no call has a stored reply."""
    cap_nano, cheapest = check_cap(max_total_usd), None
    builders = [RequestBuilder(teacher, options.settings) for teacher in teachers]
    is_new = options.cache is None or not Path(options.cache).exists()
    with TeacherStore(None if is_new else options.cache) as store:
        meter = store.meter()
        remaining_nano = cap_nano - meter.spent - meter.unknown
        for state in states:
            for builder in builders:
                try:
                    request = request_of(builder, state)
                except InputError:  # the replay reports this as the call's result, at no cost
                    continue
                if request.bound_nano <= remaining_nano or store.reply(request.key) is not None:
                    return
                cheapest = min(request.bound_nano, request.bound_nano if cheapest is None else cheapest)
    if cheapest is not None:
        check_cap_fits_a_call(remaining_nano, cheapest, max_total_usd)


def _check_states(states: Sequence[TraceState]) -> None:
    """Raise InputError, before anything is paid for, unless all states are valid and have different ids."""
    seen_ids: set[str] = set()
    for number, state in enumerate(states):
        _check_state(state, number)
        if state["state_id"] in seen_ids:
            raise InputError(explain("state_id", got=f"{state['state_id']!r} twice", expected="unique ids"))
        seen_ids.add(state["state_id"])


def _check_state(state: TraceState, number: int) -> None:
    for key in ("state_id", "messages", "student_action"):
        if key not in state:
            raise InputError(explain(f"state {number}", got=f"keys {sorted(state)}", expected=f"also {key!r}"))
    if not state["messages"]:
        raise InputError(explain(f"state {state['state_id']}", got="no messages", expected="at least one"))


class _NumberedState(NamedTuple):
    """A state and its index among all states."""

    number: int
    state: TraceState


def _group_by_session(states: Iterable[TraceState]) -> Iterator[list[_NumberedState]]:
    """Group consecutive states by session. Only one session is in memory at a time."""
    for _, group in groupby(
        starmap(_NumberedState, enumerate(states)), key=lambda numbered: session_of(numbered.state)
    ):
        yield list(group)


def _sessions_by_teacher(
    states: Iterable[TraceState], num_teachers: int
) -> Iterator[tuple[Sequence[_NumberedState], int]]:
    """Yield each session once per teacher, so that teachers do not wait for each other."""
    for group in _group_by_session(states):
        for teacher in range(num_teachers):
            yield group, teacher


# ---- whether to ask another teacher: only if its vote can change the pair, or by a heuristic


class _StateVotes:
    """Evaluates a state's answers received so far in the same way as `extract_pairs`.

    The states of a session must come in order or be read ahead in order, so that each message is read only once.
    """

    def __init__(self, *, cwd: str | None = None, tools: Tools | None = None) -> None:
        self._contexts = StateContexts(cwd=cwd, tools=tools)
        self._ahead: dict[str, ActionContext] = {}

    def read_ahead(self, states: Sequence[TraceState]) -> None:
        """Read the states of a session in order, and store the context of each until it is released."""
        for state in states:
            self._ahead[state["state_id"]] = self._context(state)

    def release(self, state: TraceState) -> None:
        self._ahead.pop(state["state_id"], None)

    def agrees_with_student(self, state: TraceState, answer: TeacherCallResult) -> bool:
        """Whether a teacher took the same action as the student."""
        action = read_vote(answer).action
        if action is None:
            return False
        context = self._context(state)
        return action_key(action, context) == self._student_key(state, context)

    def can_change(
        self, state: TraceState, answers: Sequence[TeacherCallResult], *, threshold: int, num_teachers: int
    ) -> bool:
        """Whether the remaining teachers can change the preference pair; `answers` are those of the teachers asked
        so far, in order.
        """
        actions = [read_vote(answer).action for answer in answers]
        if not any(actions):  # nobody has voted yet, so the context does not matter
            return can_outcome_change([], "", threshold, num_teachers - len(answers))
        context = self._context(state)
        student = self._student_key(state, context)
        if student is None:
            return False  # the student's action cannot be parsed, so there is no pair
        votes = [None if action is None else action_key(action, context) for action in actions]
        return can_outcome_change(votes, student, threshold, num_teachers - len(answers))

    def _student_key(self, state: TraceState, context: ActionContext) -> str | None:
        try:
            return action_key(parse_reply(state["student_action"]), context)
        except InputError:
            return None

    def _context(self, state: TraceState) -> ActionContext:
        ahead = self._ahead.get(state["state_id"])
        return self._contexts.at(state) if ahead is None else ahead


class _AskingGate:
    """Decides whether to ask the next teacher. Counts the calls saved and, with the gate "agree", the pairs that may be
    lost.

    A call counts as saved if the answers so far decide the pair, but not if an earlier teacher could not be asked.
    """

    def __init__(self, kind: Literal["exact", "agree"], threshold: int, num_teachers: int, votes: _StateVotes) -> None:
        self._kind, self._threshold, self._num_teachers, self._votes = kind, threshold, num_teachers, votes
        self.counts: Counter[str] = Counter()

    def read_ahead(self, states: Sequence[TraceState]) -> None:
        """Read the states of a session in order, so that teachers may afterwards be asked about them in any order."""
        self._votes.read_ahead(states)

    def release(self, state: TraceState) -> None:
        self._votes.release(state)

    def should_ask(self, state: TraceState, answers: Sequence[TeacherCallResult]) -> bool:
        can_change = self._votes.can_change(state, answers, threshold=self._threshold, num_teachers=self._num_teachers)
        is_useful = can_change
        if is_useful and self._kind == "agree" and len(answers) == 1:
            is_useful = not self._votes.agrees_with_student(state, answers[0])
            self.counts["pairs that may be lost"] += not is_useful
        if not is_useful and all(answer["error"] is None for answer in answers):
            self.counts["calls saved"] += self._num_teachers - len(answers)
        return is_useful
