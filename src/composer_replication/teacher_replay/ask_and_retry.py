"""Answer questions from the store, or ask teachers within the spending cap and retry; for many sessions at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from composer_replication.action_text import text_of
from composer_replication.errors import InputError, explain
from composer_replication.messages import content_text, message_calls
from composer_replication.privacy.outgoing import LastGate
from composer_replication.teacher_replay.endpoint import FailedRequest, Reply, TeacherClient
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.requests import Request
from composer_replication.teacher_replay.tables import ClaimedElsewhere, NoRoom, RequestRefused
from composer_replication.teacher_replay.teachers import Teacher, to_dollars
from composer_replication.types import Action, TeacherCallResult, TraceState

_log = logging.getLogger(__name__)
# How often to check whether another process has received the answer to its request.
_FIRST_POLL_S, _MAX_POLL_S = 0.01, 0.5
# When to log what we wait for: most answers take less time.
_WARN_AFTER_S = 10.0
_ROOM_IN_CAP = "room in the cap"  # the key of that warning in `_warned_about`, beside the names of lock files
HELD_BACK = "held back by the last gate"
NOT_SENT = "not sent: it looks as if it held a secret"
KEPT_BACK = "kept back by the cap"
AFTER_STOP = "not sent after the stop"


class RetryPolicy(NamedTuple):
    """How often to retry a request: exponential backoff with jitter, and limits on waiting.

    `longest_claim_s` is the maximum wait for another process that is sending the same request or has reserved the rest
    of the cap. The wait for the cap is shared by all requests of a replay, and restarts whenever the other process
    makes progress.
    """

    max_attempts: int = 6
    first_wait_s: float = 0.5
    longest_wait_s: float = 60.0
    longest_claim_s: float = 600.0

    def check(self) -> None:
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise InputError(explain("max_attempts", got=repr(self.max_attempts), expected="1 or more"))

    def wait_s(self, attempt: int, asked_for: float | None, rng: random.Random) -> float | None:
        """Return the seconds to wait before the next attempt; None if the endpoint demands a longer wait than
        allowed.
        """
        if asked_for is not None:
            return None if asked_for > self.longest_wait_s else asked_for + rng.uniform(0, self.first_wait_s)
        return rng.uniform(0, min(self.longest_wait_s, self.first_wait_s * 2**attempt))


class TeacherAnswer(NamedTuple):
    """A teacher's answer, or the reason why there is none.

    `refusal` is the reason why the teacher was not asked: the spending cap, a stopped replay, a possible secret in the
    request, or another process that has been sending the same request for too long.
    """

    reply: dict[str, Any] | None
    error: str | None
    is_cached: bool
    latency_s: float
    attempts: int
    refusal: Literal["cap", "stop", "secret", "busy"] | None = None


class _ReservedReply(NamedTuple):
    """A reply, and the id of the reservation that it settles."""

    intent: int
    reply: Reply


class _ForeignClaim(NamedTuple):
    """Another process's claim to a request, found after this process had made `attempts` attempts to send it."""

    by: ClaimedElsewhere
    attempts: int


class BudgetedClient:
    """Sends requests within one spending cap; answers those whose replies are in the store without sending them.

    `counts` counts requests by outcome. A request that does not fit into the cap waits until requests in flight are
    settled, and is refused only if it would not fit even then.
    """

    def __init__(
        self,
        client: TeacherClient,
        store: TeacherStore,
        *,
        cap_nano: int,
        gate: LastGate,
        patience: RetryPolicy | None = None,
        seed: int | None = None,
    ) -> None:
        self._client, self._store, self._cap_nano, self._gate = client, store, cap_nano, gate
        self._patience = patience or RetryPolicy()
        self._patience.check()
        self._rng = random.Random(seed)  # noqa: S311 (jitter, not a secret)
        self._in_flight: dict[bytes, asyncio.Future[None]] = {}
        # Requests wait for room in the cap in a queue, so that small ones do not overtake a large one forever.
        self._queue, self._reservation_settled, self._num_reserved = asyncio.Lock(), asyncio.Event(), 0
        # For how long only reservations of other processes have blocked the cap, without any progress of theirs.
        self._blocked_s, self._foreign_reservations = 0.0, (0, 0.0)
        self._warned_about = set[str]()
        self._endpoints = _EndpointHealth()
        self.counts: Counter[str] = Counter()

    @property
    def given_up(self) -> str | None:
        """The reason why an endpoint was given up, after which nothing more is sent; None if no endpoint was."""
        return self._endpoints.given_up

    async def ask(self, request: Request) -> TeacherAnswer:
        """Return the answer to a request; identical requests are sent only once, even by several processes."""
        waits, attempts, waited_s = 0, 0, 0.0
        while True:
            while (in_flight := self._in_flight.get(request.key)) is not None:
                await asyncio.wait([in_flight])
            stored_reply = self._store.reply(request.key)
            if stored_reply is not None:
                self.counts["cached"] += 1
                self._store.add_reply_session(request.key, request.session)
                await asyncio.sleep(0)  # let requests in flight make progress
                return answer_from_record(stored_reply, is_cached=True)
            outcome = await self._ask_alone(request, attempts)
            if isinstance(outcome, TeacherAnswer):
                return outcome
            claim, attempts = outcome
            if claim.holder is not None:
                if waited_s >= self._patience.longest_claim_s:
                    reason = f"not sent: for {waited_s:.0f} s {_describe_claim(claim)}"
                    return TeacherAnswer(None, reason, False, waited_s, attempts, "busy")
                self.counts["waited for another process"] += waits == 0
                waits += 1
                waited_s += await self._wait_for(claim, waits, waited_s)

    async def _wait_for(self, claim: ClaimedElsewhere, waits: int, waited_s: float) -> float:
        """Wait for another process before the store is checked again; return the seconds waited. Logs once which
        process that is.
        """
        begin = time.monotonic()
        if waited_s >= _WARN_AFTER_S and claim.lock_file not in self._warned_about:
            self._warned_about.add(claim.lock_file)
            _log.warning("waiting: %s", _describe_claim(claim))
        await self._endpoints.pause(min(_FIRST_POLL_S * 2 ** min(waits, 8), _MAX_POLL_S))
        return time.monotonic() - begin

    async def _ask_alone(self, request: Request, attempts: int) -> TeacherAnswer | _ForeignClaim:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_flight[request.key] = done
        try:
            return await self._ask(request, attempts)
        finally:
            del self._in_flight[request.key]
            done.set_result(None)

    async def _ask(self, request: Request, attempts_made: int) -> TeacherAnswer | _ForeignClaim:
        """Answer with a refusal if the request contains a secret; otherwise make the attempts that remain after
        `attempts_made`.
        """
        if finds := self._gate.in_request(request.body, request.label):
            self.counts[HELD_BACK] += 1
            await asyncio.sleep(0)
            return TeacherAnswer(None, f"{NOT_SENT}: {finds[0]}", False, 0.0, 0, "secret")
        begin, most = time.monotonic(), self._patience.max_attempts
        for attempt in range(attempts_made + 1, most + 1):
            outcome = await self._attempt(request, is_first=attempt == 1, is_last=attempt == most)
            latency_s = time.monotonic() - begin
            if isinstance(outcome, ClaimedElsewhere):
                return _ForeignClaim(outcome, attempt - 1)
            if isinstance(outcome, RequestRefused):
                return TeacherAnswer(None, outcome.reason, False, latency_s, attempt - 1, outcome.refusal)
            if isinstance(outcome, _ReservedReply):
                return self._store_reply(request, outcome, latency_s, attempt)
            self.counts[f"failure: {outcome.error.partition(':')[0]}"] += 1
            wait_s = self._patience.wait_s(attempt, outcome.retry_after_s, self._rng) if outcome.is_retried else None
            if wait_s is None or attempt == most:
                error = outcome.error if attempt == 1 else f"{outcome.error} (attempt {attempt})"
                return TeacherAnswer(None, error, False, latency_s, attempt)
            await self._endpoints.pause(wait_s)
        raise AssertionError("the last attempt returns an answer")

    async def _attempt(
        self, request: Request, *, is_first: bool, is_last: bool
    ) -> _ReservedReply | FailedRequest | RequestRefused | ClaimedElsewhere:
        """Send a request when its endpoint has a free slot. A failed request is settled here, a successful one when
        its reply is stored.
        """
        async with self._endpoints.sending_slot(request.teacher):
            if self._endpoints.given_up is not None:
                self.counts[AFTER_STOP] += 1
                await asyncio.sleep(0)
                return RequestRefused(f"stopped: {self._endpoints.given_up}", refusal="stop")
            intent = await self._reserve(request)
            if isinstance(intent, ClaimedElsewhere):
                return intent
            if isinstance(intent, RequestRefused):
                self.counts[KEPT_BACK if intent.refusal == "cap" else AFTER_STOP] += 1
                await asyncio.sleep(0)
                return intent
            self.counts["asked"] += is_first
            self.counts["attempts"] += 1
            outcome = await self._send(request, intent)
            if isinstance(outcome, FailedRequest):
                self._settle(intent, _known_cost(outcome))
                is_last = is_last or not outcome.is_retried
            self._endpoints.record(request.teacher, outcome, is_last_attempt=is_last)
            return outcome if isinstance(outcome, FailedRequest) else _ReservedReply(intent, outcome)

    async def _reserve(self, request: Request) -> int | RequestRefused | ClaimedElsewhere:
        """Reserve the maximum cost of a request as soon as requests in flight leave room for it in the cap."""
        async with self._queue:
            while self._endpoints.given_up is None:
                intent = self._store.reserve(request.key, request.teacher.slug, request.bound_nano, self._cap_nano)
                if not isinstance(intent, NoRoom):
                    self._num_reserved += isinstance(intent, int)
                    return intent
                if self._num_reserved:
                    await self._wait_for_room()
                    continue
                self._store.recover_dead_reservations()
                if (open_reservations := self._store.open_reservations()) != self._foreign_reservations:
                    self._blocked_s, self._foreign_reservations = 0.0, open_reservations
                reason = f"{intent.reason}, reserved by other processes for {self._blocked_s:.0f} s without an answer"
                if self._blocked_s >= self._patience.longest_claim_s:
                    return RequestRefused(reason, refusal="cap")
                if self._blocked_s >= _WARN_AFTER_S and _ROOM_IN_CAP not in self._warned_about:
                    self._warned_about.add(_ROOM_IN_CAP)
                    _log.warning("waiting: %s", reason)
                self._blocked_s += await self._wait_for_room()
        return RequestRefused(f"stopped: {self._endpoints.given_up}", refusal="stop")

    async def _wait_for_room(self) -> float:
        """Wait until a request of this process is settled, but at most `_MAX_POLL_S`; return the seconds waited."""
        begin = time.monotonic()
        self._reservation_settled.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reservation_settled.wait(), _MAX_POLL_S)
        return time.monotonic() - begin

    def _settle(
        self,
        intent: int,
        cost_nano: int | None,
        reply: tuple[bytes, str, dict[str, Any]] | None = None,
        session: str = "",
    ) -> None:
        """Settle a reservation, and wake the requests that wait for room in the cap."""
        self._store.settle(intent, cost_nano, reply=reply, session=session)
        self._num_reserved -= 1
        self._reservation_settled.set()

    async def _send(self, request: Request, intent: int) -> Reply | FailedRequest:
        has_outcome = False
        try:
            outcome = await self._client.send(request)
            has_outcome = True
            return outcome
        finally:
            if not has_outcome:  # cancelled, or the program ends: the request may have arrived
                self._settle(intent, None)

    def _store_reply(self, request: Request, sent: _ReservedReply, latency_s: float, attempt: int) -> TeacherAnswer:
        # A reply without a known cost counts with the reserved amount.
        intent, reply = sent
        cost = request.bound_nano if reply.cost_nano is None else reply.cost_nano
        data = {**reply._asdict(), "cost_nano": cost, "latency_s": round(latency_s, 4), "attempts": attempt}
        reply_record = (request.key, request.teacher.slug, data)
        self._settle(intent, cost, reply_record, request.session)
        return answer_from_record(data, is_cached=False)


def answer_from_record(data: dict[str, Any], *, is_cached: bool) -> TeacherAnswer:
    return TeacherAnswer(data, data["error"], is_cached, data["latency_s"], data["attempts"])


def call_result(state_id: str, state_flags: list[str], slug: str, answer: TeacherAnswer) -> TeacherCallResult:
    """Return a teacher's answer about a state as a TeacherCallResult."""
    reply = answer.reply or {}
    message = reply.get("message")
    return TeacherCallResult(
        state_id=state_id,
        teacher_slug=slug,
        response_text=None if message is None or answer.error else _reply_text(message),
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


def _reply_text(message: Mapping[str, Any]) -> str:
    """Return a teacher's message in the form of a student's action: the text, followed by one line per call."""
    return text_of(Action(text=content_text(message.get("content")), calls=message_calls(message, "a reply")))


def _describe_claim(claim: ClaimedElsewhere) -> str:
    return f"{claim.holder} has been asking the same; if it is gone, remove {claim.lock_file}"


def _known_cost(failure: FailedRequest) -> int | None:
    """Return the cost of a failed request: the billed amount, 0 if the request was refused, or None if unknown."""
    if failure.cost_nano is not None:
        return failure.cost_nano
    return 0 if failure.billing == "none" else None


# ---- endpoints that fail

# An endpoint that refuses the key or cannot be reached ends a replay after a few requests. Until an endpoint has
# answered for the first time, it gets one request at a time, so a wrong key costs three calls instead of all of them.
# Temporary faults (overload, server errors, timeouts) prove that an endpoint exists, and are handled by retries. Once
# an endpoint has answered, only many consecutive refusals or failed connections end the replay: the credit ran out, or
# the network is down.

_MAX_FIRST_FAILURES = 3
_MAX_CONSECUTIVE_FAILURES = 8
# A starting server gets this much time, however fast it refuses connections.
_STARTING_S = 2.0


@dataclass(slots=True)
class _Endpoint:
    """The state of one address used with one key. Its counts of refusals and failed connections start at its last
    answer.
    """

    has_answered: bool = False
    num_in_flight: int = 0
    num_refused: int = 0
    num_missed: int = 0
    num_calls_missed: int = 0
    first_missed: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def has_room(self) -> bool:
        return self.has_answered or (self.num_in_flight == 0 and self.num_refused < _MAX_FIRST_FAILURES)

    def record_answer(self) -> None:
        self.has_answered = True
        self.num_refused = self.num_missed = self.num_calls_missed = 0

    def record_missed(self, *, is_last_attempt: bool) -> None:
        self.first_missed = self.first_missed if self.num_missed else time.monotonic()
        self.num_missed += 1
        self.num_calls_missed += is_last_attempt

    @property
    def is_refusing(self) -> bool:
        return self.num_refused >= (_MAX_CONSECUTIVE_FAILURES if self.has_answered else _MAX_FIRST_FAILURES)

    @property
    def is_unreachable(self) -> bool:
        if self.has_answered:
            return self.num_calls_missed >= _MAX_CONSECUTIVE_FAILURES
        has_waited = time.monotonic() - self.first_missed >= _STARTING_S or self.num_calls_missed > 0
        return self.num_missed >= _MAX_FIRST_FAILURES and has_waited


class _EndpointHealth:
    """The endpoints of a replay. Once an endpoint has to be given up, `given_up` holds the reason to show to the
    user.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str | None], _Endpoint] = {}
        self._is_over = asyncio.Event()
        self.given_up: str | None = None

    @asynccontextmanager
    async def sending_slot(self, teacher: Teacher) -> AsyncIterator[None]:
        """Wait until a request may be sent; only endpoints that have not answered yet cause a wait."""
        endpoint = self._endpoint_of(teacher)
        while not endpoint.has_room and self.given_up is None:
            endpoint.changed.clear()
            await endpoint.changed.wait()
        endpoint.num_in_flight += 1
        try:
            yield
        finally:
            endpoint.num_in_flight -= 1
            endpoint.changed.set()

    def record(self, teacher: Teacher, outcome: Reply | FailedRequest, *, is_last_attempt: bool) -> None:
        """Record the outcome of an attempt."""
        endpoint = self._endpoint_of(teacher)
        if isinstance(outcome, FailedRequest) and outcome.scope == "account":
            endpoint.num_refused += 1
            if endpoint.is_refusing:
                self._give_up(_refusal_message(teacher, outcome, endpoint.num_refused))
        elif isinstance(outcome, FailedRequest) and outcome.scope == "connection":
            endpoint.record_missed(is_last_attempt=is_last_attempt)
            if endpoint.is_unreachable:
                self._give_up(_unreachable_message(teacher, outcome, endpoint.num_missed))
        else:
            endpoint.record_answer()
        endpoint.changed.set()

    async def pause(self, seconds: float) -> None:
        """Sleep between attempts; return early if the replay is given up."""
        try:
            await asyncio.wait_for(self._is_over.wait(), seconds)
        except TimeoutError:
            return

    def _endpoint_of(self, teacher: Teacher) -> _Endpoint:
        return self._known.setdefault((teacher.base_url, teacher.api_key), _Endpoint())

    def _give_up(self, sentence: str) -> None:
        self.given_up = self.given_up or sentence
        self._is_over.set()
        for endpoint in self._known.values():
            endpoint.changed.set()


def _refusal_message(teacher: Teacher, failure: FailedRequest, times: int) -> str:
    what = f"{teacher.base_url} refused {times} requests in a row ({failure.error})"
    if failure.error.startswith("HTTP 402"):
        return f"{what}: add credit to the account"
    if teacher.api_key is None:
        return f"{what}: no key was sent; set api_key_env in the teachers' file to the variable that holds the key"
    return f"{what}: check the key in {teacher.key_name}, which was sent for {teacher.slug}"


def _unreachable_message(teacher: Teacher, failure: FailedRequest, times: int) -> str:
    what = f"{teacher.base_url} cannot be reached ({failure.error}; {times} attempts)"
    return f"{what}: check the address and the network"


# ---- many sessions at once

# The prompt of a state begins with the prompts of all earlier states of its session. A provider with a prompt cache
# that has read the longest prompt has read them all, so the longest is asked first and the others concurrently after
# it. With `order="in_order"` each state waits for the previous one, which suits caches that store only the end of a
# prompt.

T = TypeVar("T")


def session_of(state: TraceState) -> str:
    """Return the session id of a state, by default the first part of the state's id."""
    return state.get("session_id") or state["state_id"].rpartition("::")[0] or state["state_id"]


async def run_jobs(jobs: Iterable[T], work: Callable[[T], Awaitable[None]], *, num_workers: int) -> None:
    """Run `work` on all jobs with `num_workers` concurrent workers. Raises the first error."""
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await work(job)

    await _run_workers(worker, num_workers)


async def run_lanes(lanes: Iterable[Sequence[T]], work: Callable[[T], Awaitable[None]], *, num_workers: int) -> None:
    """Run lists of jobs (lanes) with `num_workers` concurrent workers: the first job of a lane alone, then its other
    jobs concurrently.

    A lane is opened only if no open lane has a job that can start, so few lanes are in memory at a time.
    """
    waiting, ready = iter(lanes), deque[T]()
    num_opening, changed = 0, asyncio.Event()

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
                changed.set()
            elif num_opening:
                changed.clear()
                await changed.wait()
            else:
                return

    await _run_workers(worker, num_workers)


async def _run_workers(worker: Callable[[], Coroutine[Any, Any, None]], num_workers: int) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the other errors are consequences of the first
