"""`crf replay`: teachers are asked about a run's states, and their answers go into `teacher_calls.jsonl`.

The conversations are read twice. The first reading builds every request, looks at its bytes, adds up what it may cost
and keeps its key; nothing is sent. The second builds each request again and asks. What is written comes from the keys
and the store of answers, so neither requests nor answers are held in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from composer_replication.config import ReplayConfig
from composer_replication.errors import StaleArtefactError, explain
from composer_replication.ingestion.last_gate import Find, gate_of, refusal
from composer_replication.runs import RunDir, Source
from composer_replication.steps.states import RunStates
from composer_replication.teacher_replay.ask_and_retry import answer_of, call_result
from composer_replication.teacher_replay.asked_tools import AskedTools
from composer_replication.teacher_replay.concurrency import session_of
from composer_replication.teacher_replay.cost_survey import PlannedState, PriceRange, Survey
from composer_replication.teacher_replay.nano_dollars import check_cap
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
from composer_replication.teacher_replay.requests import Settings
from composer_replication.teacher_replay.store.ledger import TeacherStore
from composer_replication.teacher_replay.teachers import Teacher, read_specs
from composer_replication.teacher_replay.votes.consensus import is_unsent
from composer_replication.types import TeacherCallResult, TraceState

SCHEMA, VERSION = "teacher_call", 2
_RUN_DEPENDENT = ("is_cached",)
OnCall = Callable[[TeacherCallResult], None]


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
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
    refuse_finds(plan)
    return asyncio.run(ask(plan, on_call=on_call, on_meter=on_meter, goes_on=goes_on))


def plan_replay(
    section: ReplayConfig,
    run: RunDir,
    *,
    no_scrub: bool = False,
    allowed: Iterable[str] = (),
    teachers: Sequence[Teacher] | None = None,
    options: ReplayOptions | None = None,
) -> ReplayPlan:
    """The requests of a replay, looked at and priced; none is sent.

    `teachers` are those to ask instead of the section's, `options` how to ask instead of what the section says.
    """
    cap_nano = check_cap(section.max_usd)
    options = options or _options(section, run)
    teachers = teachers or teachers_of(read_specs(section.teachers, "replay.teachers"), None, options)
    if options.gate is not None:
        check_threshold(len(teachers), options.agreement_threshold)
    gate = gate_of(run, environment_of(options), no_scrub=no_scrub, allowed=allowed, given=options.last_gate)
    states = RunStates(section, run)
    sources = [run.source(name) for name in (*states.sources, *(["tools"] if section.send_tools else []))]
    with TeacherStore(options.cache) as store:
        survey = Survey(teachers, options, store, gate)
        planned_states = [survey.look_at(turn_state.state) for turn_state in states.read()]
        meter = store.meter()
    return ReplayPlan(
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


def refuse_small_cap(plan: ReplayPlan) -> None:
    """Raise InputError where the cap leaves no room for any call, and no answer is in the store."""
    price = plan.price
    if price.cheapest_nano is not None and not price.num_cached:
        check_cap_fits_a_call(price.left_nano, price.cheapest_nano, plan.section.max_usd)


def refuse_finds(plan: ReplayPlan) -> None:
    """Raise where a request looks as if it held a secret."""
    if plan.finds:
        raise refusal("requests to teachers", plan.finds)


async def ask(
    plan: ReplayPlan,
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
    refuse_small_cap(plan)
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
        settings=Settings(max_tokens=section.max_tokens),
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


def _written_down(plan: ReplayPlan) -> Iterator[TraceState]:
    """The planned states, each with its session's tools kept before it is asked about."""
    asked_tools = AskedTools(plan.run)
    for turn_state in plan.states.read(only=(planned.state_id for planned in plan.asked), verify=False):
        if turn_state.state.get("tools"):
            asked_tools.keep(session_of(turn_state.state), turn_state.state["tools"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
        yield turn_state.state


def _write(plan: ReplayPlan, store: TeacherStore, outcomes: _Outcomes) -> Mapping[str, int]:
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
    plan: ReplayPlan, store: TeacherStore, outcomes: _Outcomes, counts: Counter[str]
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


def _while_unchanged(plan: ReplayPlan, rows: Iterator[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The rows; an error instead of their end, for which nothing is written, where their sources changed meanwhile."""
    yield from rows
    _check_unchanged(plan)


def _check_unchanged(plan: ReplayPlan) -> None:
    """Calls are written beside the states that were asked about, never beside others."""
    for source in plan.sources:
        if plan.run.source(source.name) != source:
            fix = (
                "Answers so far are paid for and kept in teacher_cache.sqlite: run the same command again, and only "
                "what is new is asked."
            )
            got, expected = "a file that was changed during the replay", "the one that was asked about"
            raise StaleArtefactError(explain(str(plan.run.path(source.name)), got=got, expected=expected, fix=fix))
