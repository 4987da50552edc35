"""One question to one teacher: from the store if it was answered before, else within the spending cap, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby, starmap
from typing import Any, Literal, NamedTuple, TypeVar

from composer_replication.action_text import text_of
from composer_replication.errors import InputError, explain
from composer_replication.messages import content_text, message_calls
from composer_replication.privacy.outgoing import LastGate
from composer_replication.teacher_replay.endpoint import FailedRequest, Reply, TeacherClient
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.requests import Request
from composer_replication.teacher_replay.tables import Elsewhere, NoRoom, RequestRefused
from composer_replication.teacher_replay.teachers import Teacher, to_dollars
from composer_replication.types import Action, TeacherCallResult, TraceState

_log = logging.getLogger(__name__)
# How often to check whether another process has the answer that it is asking for.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.5
# When to log whom we wait for: most answers take less time.
_SAID_AFTER_S = 10.0
_ROOM = "room in the cap"  # like a lock file, a thing that a warning about waiting names
HELD_BACK = "held back by the last gate"
NOT_SENT = "not sent: it looks as if it held a secret"
KEPT_BACK = "kept back by the cap"
AFTER_STOP = "not sent after the stop"


class Patience(NamedTuple):
    """How often to try, and how long to wait in between: a random part of a time that doubles.

    `longest_claim_s` is how long to wait for another process that is sending the same request or has reserved the rest
    of the cap. All requests of a replay share the second wait, which begins again when that process makes progress.
    """

    max_attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    longest_claim_s: float = 600.0

    def check(self) -> None:
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise InputError(explain("max_attempts", got=repr(self.max_attempts), expected="1 or more"))

    def wait_s(self, attempt: int, asked_for: float | None, draw: random.Random) -> float | None:
        """Return the seconds before the next attempt; None if the endpoint asks for a longer wait than we allow."""
        if asked_for is not None:
            return None if asked_for > self.longest_wait_s else asked_for + draw.uniform(0, self.first_wait_s)
        return draw.uniform(0, min(self.longest_wait_s, self.first_wait_s * 2**attempt))


class TeacherAnswer(NamedTuple):
    """A teacher's answer, or why there is none.

    `refusal` says why the teacher was not asked: the spending cap, a stopped replay, a possible secret in the request,
    or another process that has the request under way for too long.
    """

    reply: dict[str, Any] | None
    error: str | None
    is_cached: bool
    latency_s: float
    attempts: int
    refusal: Literal["cap", "stop", "secret", "busy"] | None = None


class _Sent(NamedTuple):
    """A reply and the reservation that it settles."""

    intent: int
    reply: Reply


class _Claimed(NamedTuple):
    """Another process is asking; `attempts` of ours came before."""

    by: Elsewhere
    attempts: int


class Asker:
    """Asks questions within one cap. `counts` sums up: asked, cached, attempts, failures by name, kept back.

    "asked" are questions that were sent. A question that finds no room in the cap waits until requests under way are
    settled, and is kept back only if it would not fit even then.
    """

    def __init__(
        self,
        client: TeacherClient,
        store: TeacherStore,
        *,
        cap_nano: int,
        gate: LastGate,
        patience: Patience | None = None,
        seed: int | None = None,
    ) -> None:
        self._client, self._store, self._cap_nano, self._gate = client, store, cap_nano, gate
        self._patience = patience or Patience()
        self._patience.check()
        self._draw = random.Random(seed)  # noqa: S311 (jitter, not a secret)
        self._asking: dict[bytes, asyncio.Future[None]] = {}
        # Requests that wait for room in the cap queue up, so that small ones do not overtake a large one forever.
        self._row, self._settled, self._num_reserved = asyncio.Lock(), asyncio.Event(), 0
        # Since when other processes alone have held the room without reserving or settling anything.
        self._held_s, self._held_by_others = 0.0, (0, 0.0)
        self._named = set[str]()
        self._endpoints = Endpoints()
        self.counts: Counter[str] = Counter()

    @property
    def given_up(self) -> str | None:
        """Why nothing more is sent, if an endpoint is of no use."""
        return self._endpoints.given_up

    async def ask(self, request: Request) -> TeacherAnswer:
        """Return the answer to a request. The same request, asked twice at once, is sent once, even by several
        processes.
        """
        waits, attempts, waited_s = 0, 0, 0.0
        while True:
            while (in_flight := self._asking.get(request.key)) is not None:
                await asyncio.wait([in_flight])
            stored_reply = self._store.reply(request.key)
            if stored_reply is not None:
                self.counts["cached"] += 1
                self._store.ascribe(request.key, request.session)
                await asyncio.sleep(0)  # replies from the store must not starve requests in flight
                return answer_of(stored_reply, is_cached=True)
            outcome = await self._ask_alone(request, attempts)
            if isinstance(outcome, TeacherAnswer):
                return outcome
            claim, attempts = outcome
            if claim.holder is not None:
                if waited_s >= self._patience.longest_claim_s:
                    reason = f"not sent: for {waited_s:.0f} s {_waited_for(claim)}"
                    return TeacherAnswer(None, reason, False, waited_s, attempts, "busy")
                self.counts["waited for another process"] += waits == 0
                waits += 1
                waited_s += await self._wait_for(claim, waits, waited_s)

    async def _wait_for(self, claim: Elsewhere, waits: int, waited_s: float) -> float:
        """Wait before checking the store again; return the seconds waited. Logs once whom we wait for."""
        begin = time.monotonic()
        if waited_s >= _SAID_AFTER_S and claim.lock_file not in self._named:
            self._named.add(claim.lock_file)
            _log.warning("waiting: %s", _waited_for(claim))
        await self._endpoints.pause(min(_FIRST_LOOK_S * 2 ** min(waits, 8), _LONGEST_LOOK_S))
        return time.monotonic() - begin

    async def _ask_alone(self, request: Request, attempts: int) -> TeacherAnswer | _Claimed:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking[request.key] = done
        try:
            return await self._ask(request, attempts)
        finally:
            del self._asking[request.key]
            done.set_result(None)

    async def _ask(self, request: Request, attempts_made: int) -> TeacherAnswer | _Claimed:
        """Make the attempts that remain after `attempts_made`."""
        if finds := self._gate.in_request(request.body, request.label):
            self.counts[HELD_BACK] += 1
            await asyncio.sleep(0)
            return TeacherAnswer(None, f"{NOT_SENT}: {finds[0]}", False, 0.0, 0, "secret")
        begin, most = time.monotonic(), self._patience.max_attempts
        for attempt in range(attempts_made + 1, most + 1):
            outcome = await self._attempt(request, is_first=attempt == 1, is_last=attempt == most)
            latency_s = time.monotonic() - begin
            if isinstance(outcome, Elsewhere):
                return _Claimed(outcome, attempt - 1)
            if isinstance(outcome, RequestRefused):
                return TeacherAnswer(None, outcome.reason, False, latency_s, attempt - 1, outcome.refusal)
            if isinstance(outcome, _Sent):
                return self._keep(request, outcome, latency_s, attempt)
            self.counts[f"failure: {outcome.error.partition(':')[0]}"] += 1
            wait_s = self._patience.wait_s(attempt, outcome.retry_after_s, self._draw) if outcome.is_retried else None
            if wait_s is None or attempt == most:
                error = outcome.error if attempt == 1 else f"{outcome.error} (attempt {attempt})"
                return TeacherAnswer(None, error, False, latency_s, attempt)
            await self._endpoints.pause(wait_s)
        raise AssertionError("a claim is met before the last attempt is made")

    async def _attempt(
        self, request: Request, *, is_first: bool, is_last: bool
    ) -> _Sent | FailedRequest | RequestRefused | Elsewhere:
        """Send one request when it is its turn. A failure is settled here; a reply is settled when it is stored."""
        async with self._endpoints.turn(request.teacher):
            if self._endpoints.given_up is not None:
                self.counts[AFTER_STOP] += 1
                await asyncio.sleep(0)
                return RequestRefused(f"stopped: {self._endpoints.given_up}", refusal="stop")
            intent = await self._reserve(request)
            if isinstance(intent, Elsewhere):
                return intent
            if isinstance(intent, RequestRefused):
                self.counts[KEPT_BACK if intent.refusal == "cap" else AFTER_STOP] += 1
                await asyncio.sleep(0)
                return intent
            self.counts["asked"] += is_first
            self.counts["attempts"] += 1
            outcome = await self._send(request, intent)
            if isinstance(outcome, FailedRequest):
                self._settle(intent, _cost_of(outcome))
                is_last = is_last or not outcome.is_retried
            self._endpoints.note(request.teacher, outcome, is_last_attempt=is_last)
            return outcome if isinstance(outcome, FailedRequest) else _Sent(intent, outcome)

    async def _reserve(self, request: Request) -> int | RequestRefused | Elsewhere:
        """Reserve the highest cost of a request once requests under way leave room for it in the cap."""
        async with self._row:
            while self._endpoints.given_up is None:
                intent = self._store.reserve(request.key, request.teacher.slug, request.bound_nano, self._cap_nano)
                if not isinstance(intent, NoRoom):
                    self._num_reserved += isinstance(intent, int)
                    return intent
                if self._num_reserved:
                    await self._wait_for_room()
                    continue
                self._store.take_over_the_dead()
                if (under_way := self._store.under_way()) != self._held_by_others:  # other processes hold all of it
                    self._held_s, self._held_by_others = 0.0, under_way
                reason = f"{intent.reason}, reserved by other processes for {self._held_s:.0f} s without an answer"
                if self._held_s >= self._patience.longest_claim_s:
                    return RequestRefused(reason, refusal="cap")
                if self._held_s >= _SAID_AFTER_S and _ROOM not in self._named:
                    self._named.add(_ROOM)
                    _log.warning("waiting: %s", reason)
                self._held_s += await self._wait_for_room()
        return RequestRefused(f"stopped: {self._endpoints.given_up}", refusal="stop")

    async def _wait_for_room(self) -> float:
        """Wait until one of our requests is settled, or for a short time; return the seconds waited."""
        begin = time.monotonic()
        self._settled.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), _LONGEST_LOOK_S)
        return time.monotonic() - begin

    def _settle(
        self,
        intent: int,
        cost_nano: int | None,
        reply: tuple[bytes, str, dict[str, Any]] | None = None,
        session: str = "",
    ) -> None:
        """Settle a reservation, and wake requests that wait for room."""
        self._store.settle(intent, cost_nano, reply=reply, session=session)
        self._num_reserved -= 1
        self._settled.set()

    async def _send(self, request: Request, intent: int) -> Reply | FailedRequest:
        is_back = False
        try:
            outcome = await self._client.send(request)
            is_back = True
            return outcome
        finally:
            if not is_back:  # cancelled, or the program ends: the request may have arrived
                self._settle(intent, None)

    def _keep(self, request: Request, sent: _Sent, latency_s: float, attempt: int) -> TeacherAnswer:
        # A reply that states no cost counts for what was reserved.
        intent, reply = sent
        cost = request.bound_nano if reply.cost_nano is None else reply.cost_nano
        data = {**reply._asdict(), "cost_nano": cost, "latency_s": round(latency_s, 4), "attempts": attempt}
        reply_record = (request.key, request.teacher.slug, data)
        self._settle(intent, cost, reply_record, request.session)
        return answer_of(data, is_cached=False)


def answer_of(data: dict[str, Any], *, is_cached: bool) -> TeacherAnswer:
    return TeacherAnswer(data, data["error"], is_cached, data["latency_s"], data["attempts"])


def call_result(state_id: str, state_flags: list[str], slug: str, answer: TeacherAnswer) -> TeacherCallResult:
    """Return the result of a call, with the flags found in its state."""
    reply = answer.reply or {}
    message = reply.get("message")
    return TeacherCallResult(
        state_id=state_id,
        teacher_slug=slug,
        response_text=None if message is None or answer.error else reply_text(message),
        latency_s=answer.latency_s,
        prompt_tokens=reply.get("prompt_tokens", 0),
        completion_tokens=reply.get("completion_tokens", 0),
        cost_usd=to_dollars(reply.get("cost_nano") or 0),
        error=answer.error,
        message=message,
        finish_reason=reply.get("finish_reason"),
        is_cached=answer.is_cached,
        attempts=answer.attempts,
        flags=state_flags,
    )


def reply_text(message: Mapping[str, Any]) -> str:
    """Return a teacher's message in the form of a student's action: text, then a line for each call."""
    return text_of(Action(text=content_text(message.get("content")), calls=message_calls(message, "a reply")))


def _waited_for(claim: Elsewhere) -> str:
    return f"{claim.holder} has been asking the same; if it is gone, remove {claim.lock_file}"


def _cost_of(failure: FailedRequest) -> int | None:
    """Return the cost of a failed request: stated, zero if it was refused, or None if unknown."""
    if failure.cost_nano is not None:
        return failure.cost_nano
    return 0 if failure.billing == "none" else None


# ---- endpoints that are of no use

# An endpoint that refuses the key or cannot be reached ends a replay after a few requests. Until an endpoint has
# answered for the first time, it gets one request at a time: a wrong key costs three calls instead of all of them.
# Temporary faults (busy, broken, slow) prove that an endpoint exists, and retrying handles them. Once an endpoint has
# answered, only many refusals or failed connections in a row end the replay: the credit ran out, or the network is
# down.

_FIRST_FEW = 3
_IN_A_ROW = 8
# A server that is starting gets this long, however fast it refuses connections.
_STARTING_S = 2.0


@dataclass(slots=True)
class _Endpoint:
    """What is known of one address with one key. Refusals and missed connections are counted since the last answer."""

    is_proven: bool = False
    num_in_flight: int = 0
    num_refused: int = 0
    num_missed: int = 0
    num_calls_missed: int = 0
    first_missed: float = 0.0
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_room(self) -> bool:
        return self.is_proven or (self.num_in_flight == 0 and self.num_refused < _FIRST_FEW)

    def answered(self) -> None:
        self.is_proven = True
        self.num_refused = self.num_missed = self.num_calls_missed = 0

    def missed(self, *, is_last_attempt: bool) -> None:
        self.first_missed = self.first_missed if self.num_missed else time.monotonic()
        self.num_missed += 1
        self.num_calls_missed += is_last_attempt

    @property
    def is_refusing(self) -> bool:
        return self.num_refused >= (_IN_A_ROW if self.is_proven else _FIRST_FEW)

    @property
    def is_away(self) -> bool:
        if self.is_proven:
            return self.num_calls_missed >= _IN_A_ROW
        has_waited = time.monotonic() - self.first_missed >= _STARTING_S or self.num_calls_missed > 0
        return self.num_missed >= _FIRST_FEW and has_waited


class Endpoints:
    """The endpoints of a replay. `given_up` is a sentence for the user once one of them is of no use."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str | None], _Endpoint] = {}
        self._is_over = asyncio.Event()
        self.given_up: str | None = None

    @asynccontextmanager
    async def turn(self, teacher: Teacher) -> AsyncIterator[None]:
        """Wait for a turn to send: immediate, or when an endpoint that has not answered yet has room for one more
        request.
        """
        endpoint = self._of(teacher)
        while not endpoint.has_room and self.given_up is None:
            endpoint.moved.clear()
            await endpoint.moved.wait()
        endpoint.num_in_flight += 1
        try:
            yield
        finally:
            endpoint.num_in_flight -= 1
            endpoint.moved.set()

    def note(self, teacher: Teacher, outcome: Reply | FailedRequest, *, is_last_attempt: bool) -> None:
        """Record the outcome of an attempt."""
        endpoint = self._of(teacher)
        if isinstance(outcome, FailedRequest) and outcome.concerns == "account":
            endpoint.num_refused += 1
            if endpoint.is_refusing:
                self._give_up(_refused(teacher, outcome, endpoint.num_refused))
        elif isinstance(outcome, FailedRequest) and outcome.concerns == "connection":
            endpoint.missed(is_last_attempt=is_last_attempt)
            if endpoint.is_away:
                self._give_up(_away(teacher, outcome, endpoint.num_missed))
        else:
            endpoint.answered()
        endpoint.moved.set()

    async def pause(self, seconds: float) -> None:
        """Wait between attempts; returns at once when the replay is given up."""
        try:
            await asyncio.wait_for(self._is_over.wait(), seconds)
        except TimeoutError:
            return

    def _of(self, teacher: Teacher) -> _Endpoint:
        return self._known.setdefault((teacher.base_url, teacher.api_key), _Endpoint())

    def _give_up(self, sentence: str) -> None:
        self.given_up = self.given_up or sentence
        self._is_over.set()
        for endpoint in self._known.values():
            endpoint.moved.set()


def _refused(teacher: Teacher, failure: FailedRequest, times: int) -> str:
    what = f"{teacher.base_url} refused {times} requests in a row ({failure.error})"
    if failure.error.startswith("HTTP 402"):
        return f"{what}: put credit on the account"
    if teacher.api_key is None:
        return f"{what}: no key was sent; name the variable that holds it with api_key_env in the teachers' file"
    return f"{what}: look at the key in {teacher.key_name}, which was sent for {teacher.slug}"


def _away(teacher: Teacher, failure: FailedRequest, times: int) -> str:
    what = f"{teacher.base_url} cannot be reached ({failure.error}; {times} attempts)"
    return f"{what}: look at the address and the network"


# ---- many sessions at once

# The prompt of a state begins with those of all earlier states of its session. A provider that caches prompts and has
# read the longest one has read them all, so it is asked first and the others side by side after it. With
# `order="in_order"` each state waits for the one before it, which suits caches that keep only ends of prompts.

T = TypeVar("T")


class Numbered(NamedTuple):
    """A state and its position among all states."""

    number: int
    state: TraceState


def session_of(state: TraceState) -> str:
    """Return the session of a state: the one it names, else the first part of its id."""
    return state.get("session_id") or state["state_id"].rpartition("::")[0] or state["state_id"]


def sessions(states: Iterable[TraceState]) -> Iterator[list[Numbered]]:
    """Group neighboring states of a session. Only one session is held at a time, so memory does not
    grow with the log.
    """
    for _, group in groupby(starmap(Numbered, enumerate(states)), key=lambda numbered: session_of(numbered.state)):
        yield list(group)


async def work_off(jobs: Iterable[T], work: Callable[[T], Awaitable[None]], *, num_workers: int) -> None:
    """Work on all jobs, `num_workers` at a time, reading the iterator as workers become free.
    Raises the first error.
    """
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await work(job)

    await _together(worker, num_workers)


async def work_off_lanes(
    lanes: Iterable[Sequence[T]], work: Callable[[T], Awaitable[None]], *, num_workers: int
) -> None:
    """Work on lanes of jobs as `work_off` does: the first job of a lane alone, then the others side by side.

    A lane is opened only when no open lane has a job that can start, so few lanes are held at a time.
    """
    waiting, ready = iter(lanes), deque[T]()
    num_opening, moved = 0, asyncio.Event()

    async def worker() -> None:
        nonlocal num_opening
        while True:
            lane = None if ready else next(waiting, None)
            if ready:
                await work(ready.popleft())
            elif lane is not None:
                num_opening += 1
                await work(lane[0])
                num_opening -= 1
                ready.extend(lane[1:])
                moved.set()
            elif num_opening:
                moved.clear()
                await moved.wait()
            else:
                return

    await _together(worker, num_workers)


async def _together(worker: Callable[[], Coroutine[Any, Any, None]], num_workers: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the other errors follow from the first


def by_teacher(states: Iterable[TraceState], num_teachers: int) -> Iterator[tuple[Sequence[Numbered], int]]:
    """Yield each session once per teacher, so that teachers do not wait for each other."""
    for group in sessions(states):
        for teacher in range(num_teachers):
            yield group, teacher
