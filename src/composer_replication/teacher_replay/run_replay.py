"""A replay of a run directory: states from its conversations, calls into `teacher_calls.jsonl`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.run_sites import read_sites
from composer_replication.ingestion.last_gate import Find, LastGate
from composer_replication.ingestion.states import states, trace_state
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import TOOL_SCHEMA, TOOL_VERSION, read_conversations
from composer_replication.teacher_replay.ask import answer_of
from composer_replication.teacher_replay.lanes import session_of
from composer_replication.teacher_replay.money import to_dollars
from composer_replication.teacher_replay.replay import (
    OnMeter,
    ReplayOptions,
    ReplayReport,
    call_result,
    replay,
    request_of,
)
from composer_replication.teacher_replay.requests import RequestBuilder
from composer_replication.teacher_replay.run_failures import TurnName, has_current_sites, read_failures
from composer_replication.teacher_replay.store import TeacherStore
from composer_replication.teacher_replay.teachers import Teacher
from composer_replication.types import TeacherCallResult, TraceState, Turn

SCHEMA, VERSION = "teacher_call", 2
# Real prompts have about four bytes a token, and answers of coding agents are short: the low end of what it may cost.
_BYTES_PER_TOKEN, _USUAL_ANSWER = 4, 120
_RUN_DEPENDENT = ("is_cached",)


@dataclass(frozen=True, kw_only=True)
class Which:
    """Which states of a run are asked about: all, or some; the first `limit` of them.

    `only_sites`: of turns that erred and may be taught. `only_failed`: of turns that failed or were refused, whoever's
    doing it was; those are the states that `crf pairs` makes pairs of by default.
    """

    only_sites: bool = False
    only_failed: bool = False
    limit: int | None = None
    max_history_tokens: int | None = None
    send_tools: bool = True

    def __post_init__(self) -> None:
        if self.only_sites and self.only_failed:
            raise InputError(explain("states", got="only_sites and only_failed", expected="one of them"))
        if self.limit is not None and self.limit < 1:
            raise InputError(explain("limit", got=self.limit, expected="1 or more states"))


class Estimate(NamedTuple):
    """Before a cent is spent: calls to send, calls in the store, the price range of those to send.

    `finds` are texts in them that look as if they held a secret, each once, at the first state that shows it.
    """

    num_calls: int
    num_cached: int
    low_usd: float
    high_usd: float
    finds: tuple[Find, ...] = ()


class StateOfTurn(NamedTuple):
    """A state, with the conversation and the turn that its action is."""

    state: TraceState
    conversation_id: str
    turn: Turn


def run_states(run: RunDir, which: Which) -> Iterator[TraceState]:
    """The states of a run, session by session; messages are shared between the states of one."""
    return (each.state for each in run_turns(run, which))


def run_turns(run: RunDir, which: Which) -> Iterator[StateOfTurn]:
    """As `run_states`, each with its turn."""
    wanted = _wanted(run, which)
    tools = _tools_by_format(run) if which.send_tools else {}
    number = 0
    for conversation in read_conversations(run):
        shown = tools.get(conversation.format)
        for index, (messages, turn) in enumerate(states(conversation, max_history_tokens=which.max_history_tokens)):
            is_wanted = wanted is None or (conversation.id, turn.id) in wanted
            if turn.origin == "meta" or not is_wanted:  # what the harness wrote in the model's place is nobody's action
                continue
            if which.limit is not None and number >= which.limit:
                return
            number += 1
            # A log with a system prompt of its own needs none of ours in front of it.
            is_own = len(messages) > 1 and messages[1].get("role") == "system"
            state = trace_state(f"{conversation.id}::{index:04d}", messages[1:] if is_own else messages, turn)
            state["session_id"], state["cwd"] = conversation.id, conversation.cwd
            if shown:
                state["tools"] = shown
            yield StateOfTurn(state, conversation.id, turn)


def _wanted(run: RunDir, which: Which) -> set[TurnName] | None:
    """The turns whose states are asked about; None for all."""
    if which.only_sites:
        return {(site.conversation_id, site.turn_id) for site, _ in read_sites(run) if site.is_kept}
    if which.only_failed:
        failures = read_failures(run)
        return {turn for turn in failures.kinds if failures.has_failed(turn)}
    return None


def _reads_sites(run: RunDir, which: Which) -> bool:
    return which.only_sites or (which.only_failed and has_current_sites(run))


def estimate(
    asked: Iterator[TraceState],
    teachers: Sequence[Teacher],
    options: ReplayOptions,
    store: TeacherStore,
    gate: LastGate | None = None,
) -> Estimate:
    """What asking everyone once would cost at least and at most, cached replies aside."""
    builders = [RequestBuilder(teacher, options.settings) for teacher in teachers]
    num_calls = num_cached = low = high = 0
    finds: dict[bytes, Find] = {}
    for state in asked:
        for teacher, builder in zip(teachers, builders, strict=True):
            try:
                request = request_of(builder, state)
            except InputError:  # it will be a call with that error, and costs nothing
                continue
            if store.reply(request.key) is not None:
                num_cached += 1
                continue
            num_calls += 1
            for find in gate.in_request(request.body, request.place) if gate is not None else ():
                finds.setdefault(find.digest, find)
            high += request.bound_nano
            low += teacher.price.bound(len(request.body) // _BYTES_PER_TOKEN, _USUAL_ANSWER)
    return Estimate(num_calls, num_cached, to_dollars(low), to_dollars(high), tuple(finds.values()))


async def replay_run(
    run: RunDir,
    which: Which,
    specs: Sequence[Mapping[str, Any]],
    teachers: Sequence[Teacher],
    *,
    max_total_usd: float,
    api_key: str | None,
    options: ReplayOptions,
    on_call: Callable[[TeacherCallResult], None],
    on_meter: OnMeter | None = None,
) -> ReplayReport:
    """Ask, then write `teacher_calls.jsonl`: every call in the order of states and teachers, answered or not.

    The run is held meanwhile: a second replay of it says who holds it, and sends nothing.
    """
    failures: dict[tuple[int, int], TeacherCallResult] = {}

    def keep(state: int, teacher: int, result: TeacherCallResult) -> None:
        if result["message"] is None:  # pyright: ignore[reportTypedDictNotRequiredAccess]
            failures[state, teacher] = result
        on_call(result)

    counts: Counter[str] = Counter()
    with TeacherStore(options.cache) as store:
        store.hold("a replay of this run")
        report = await replay(
            run_states(run, which), specs, max_total_usd, api_key, options=options, on_result=keep, on_meter=on_meter
        )
        rows = _rows(run_states(run, which), teachers, options, store, failures, counts)
        run.write_jsonl(
            "teacher_calls",
            rows,
            schema=SCHEMA,
            version=VERSION,
            sources=["conversations", *(["sites"] if _reads_sites(run, which) else [])],
            counts=counts,
            drops={},
            settings=_said_of(which, teachers, options),
        )
    return report


def _said_of(which: Which, teachers: Sequence[Teacher], options: ReplayOptions) -> dict[str, str]:
    """What `crf pairs` must know to see the same states."""
    return {
        "teachers": ", ".join(each.slug for each in teachers),
        "gate": options.gate or "none",
        "threshold": str(options.agreement_threshold),
        "tools": "sent" if which.send_tools else "not sent",
        "max_history_tokens": str(which.max_history_tokens or ""),
    }


def read_calls(run: RunDir) -> Iterator[TeacherCallResult]:
    """The calls of a run, in order."""
    rows = run.read_jsonl("teacher_calls", schema=SCHEMA, version=VERSION)
    return (cast("TeacherCallResult", row) for row in rows)


def _rows(
    asked: Iterator[TraceState],
    teachers: Sequence[Teacher],
    options: ReplayOptions,
    store: TeacherStore,
    failures: Mapping[tuple[int, int], TeacherCallResult],
    counts: Counter[str],
) -> Iterator[dict[str, object]]:
    """From the store, not from memory: a replay of any length is written with little of it."""
    builders = [RequestBuilder(teacher, options.settings) for teacher in teachers]
    for number, state in enumerate(asked):
        counts["states"] += 1
        for index, (teacher, builder) in enumerate(zip(teachers, builders, strict=True)):
            failed = failures.get((number, index))
            key = b"" if failed else request_of(builder, state).key
            known = None if failed else store.reply(key)
            if failed is None and known is None:
                counts["not asked"] += 1  # a gate saw that it could not matter
                continue
            if known is not None:
                store.ascribe(key, session_of(state))
            result = failed or call_result(state, teacher.slug, answer_of(known or {}, is_cached=True))
            counts["calls"] += 1
            counts["calls with an error"] += result["error"] is not None
            counts["flagged"] += bool(result.get("flags"))
            kept = {key: value for key, value in result.items() if key not in _RUN_DEPENDENT}
            yield {**kept, "conversation_id": session_of(state)}


def _tools_by_format(run: RunDir) -> dict[str, list[dict[str, Any]]]:
    """For each kind of log, the tools that its agent was seen to have, in the form that requests take.

    All of them for every session of that agent: only those that a session went on to call would tell what comes.
    """
    rows = cast("Iterator[dict[str, Any]]", run.read_jsonl("tools", schema=TOOL_SCHEMA, version=TOOL_VERSION))
    schemas = {row["name"]: row["parameters"] for row in rows}
    names: dict[str, set[str]] = {}
    for conversation in read_conversations(run):
        called = {call.name for turn in conversation.turns for call in turn.calls}
        names.setdefault(conversation.format, set()).update(called & set(schemas))
    return {
        format_name: [
            {"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in sorted(found)
        ]
        for format_name, found in names.items()
    }
