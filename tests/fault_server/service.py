"""The routes: the chat API with its faults, the models list, and what a test may read and reset under `/__`."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fault_server.answers import answer, cost_pico, overcharge_pico
from fault_server.chat import BadRequest, ChatRequest, read_chat
from fault_server.connection import HttpRequest
from fault_server.counts import Counts, InFlight
from fault_server.deliveries import Delivery, Exchange, deliver, deliver_exactly, error_json, http_bytes, json_bytes
from fault_server.faults import FaultPlan, draw
from fault_server.ledger import Billed, Ledger, usd
from fault_server.settings import PICO_PER_USD, Reply, Settings

SESSION_HEADER = "x-session-id"
Handled = tuple[Delivery, InFlight | None]


class FaultService:
    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._settings, self._ledger = settings, ledger
        self._plan = FaultPlan(
            settings.seed, settings.faults, settings.sticky, settings.billed_share, settings.max_faulty_attempts
        )
        self._counts = Counts()
        self._scripts: dict[tuple[str, str], deque[Reply]] = {}
        self._routes = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/generation"): self._generation,
            ("GET", "/v1/key"): self._key,
            ("GET", "/__ledger"): self._get_ledger,
            ("GET", "/__ledger/total"): lambda _: _json(self._total()),
            ("GET", "/__requests"): lambda _: _json(self._counts.to_json()),
            ("GET", "/__sessions"): lambda _: _json(self._counts.sessions_json()),
            ("GET", "/__process"): lambda _: _json({"rss_bytes": _rss_bytes(), "cpu_s": time.process_time()}),
            ("POST", "/__script"): self._add_script,
            ("POST", "/__reset"): self._reset,
        }

    def connected(self) -> None:
        self._counts.connected()

    def disconnected(self) -> None:
        self._counts.connections -= 1

    def idle_closed(self) -> None:
        self._counts.totals["idle_closed"] += 1

    def finished(self, entry: InFlight) -> None:
        self._counts.end(entry)

    def handle(self, request: HttpRequest) -> Handled:
        route = self._routes.get((request.method, request.path.removeprefix("/api")))
        if route is None:
            return _json(error_json(404, f"no {request.method} {request.path} here"), 404)
        return route(request)

    def _chat(self, request: HttpRequest) -> Handled:
        totals = self._counts.totals
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        has_auth = scheme.lower() == "bearer" and bool(key.strip())  # noted, never kept
        totals["num_chat"] += 1
        totals["with_auth" if has_auth else "without_auth"] += 1
        try:
            if self._settings.require_auth and not has_auth:
                raise BadRequest(401, "No auth credentials found")
            chat = read_chat(request.body, request.headers.get(SESSION_HEADER), self._settings)
        except BadRequest as refused:
            totals["refused"] += 1
            return _json(refused.body, refused.status)
        totals["given_up"] += request.is_given_up
        return self._answer(chat, is_given_up=request.is_given_up)

    def _answer(self, chat: ChatRequest, *, is_given_up: bool) -> Handled:
        entry = self._counts.begin(chat, is_given_up=is_given_up)
        attempt = self._counts.by_fingerprint[chat.fingerprint].attempts - 1
        scripted = self._scripted(chat)
        exchange = self._decide(chat, attempt, scripted)
        delivery = deliver_exactly(scripted) if scripted and scripted.status is not None else deliver(exchange)
        outcome = "scripted" if scripted and scripted.status is not None else exchange.fault
        if exchange.is_billed:
            self._ledger.bill(_billed(exchange, outcome))
        self._counts.replied(chat.fingerprint, delivery.status, outcome, exchange.is_billed)
        wait_s = self._latency(chat.fingerprint)
        if scripted and scripted.status is None:
            wait_s += scripted.delay_s
        if wait_s > 0:
            (first_s, data), *rest = delivery.steps
            delivery = replace(delivery, steps=((first_s + wait_s, data), *rest))
        return delivery, entry

    def _decide(self, chat: ChatRequest, attempt: int, scripted: Reply | None) -> Exchange:
        """What this attempt meets, what is billed for it, and the answer it would have or has."""
        settings = self._settings
        fault = scripted.fault if scripted else self._plan.fault(chat.fingerprint, attempt)
        if (
            not scripted
            and settings.credit_usd is not None
            and self._ledger.total_pico >= settings.credit_usd * PICO_PER_USD
        ):
            fault = "out_of_credit"
        whole = answer(chat, settings)
        tokens = chat.max_tokens if fault == "finish_length" else whole.completion_tokens
        pico = overcharge_pico(chat, settings) if fault == "overcharge" else cost_pico(chat, tokens, settings)
        is_billed = self._plan.is_billed(fault, chat.fingerprint, attempt)
        if scripted and (scripted.billed is not None or scripted.status is not None):
            is_billed = bool(scripted.billed)
            if is_billed and scripted.billed is not True:
                pico = round(float(scripted.billed or 0) * PICO_PER_USD)
        retry_after_s = scripted.retry_after_s if scripted else None
        return Exchange(
            chat=chat,
            answer=whole,
            settings=settings,
            fault=fault,
            attempt=attempt,
            pico=pico if is_billed else 0,
            completion_tokens=tokens,
            retry_after_s=settings.retry_after_s if retry_after_s is None else retry_after_s,
            is_billed=is_billed,
        )

    def _latency(self, fingerprint: str) -> float:
        low, high = self._settings.latency_s
        return low + (high - low) * draw(self._settings.seed, "latency", fingerprint) if high > 0 else 0.0

    def _scripted(self, chat: ChatRequest) -> Reply | None:
        for key in (("fingerprint", chat.fingerprint), ("model", chat.model), ("any", "")):
            if replies := self._scripts.get(key):
                return replies.popleft()
        return None

    def add_script(self, replies: Iterable[Reply], fingerprint: str | None = None, model: str | None = None) -> None:
        key = ("fingerprint", fingerprint) if fingerprint else ("model", model) if model else ("any", "")
        self._scripts.setdefault(key, deque()).extend(replies)

    def _add_script(self, request: HttpRequest) -> Handled:
        record = json.loads(request.body)
        replies = [Reply(**each) for each in record["replies"]]
        self.add_script(replies, record.get("fingerprint"), record.get("model"))
        return _json({"added": len(replies)})

    def _reset(self, _: HttpRequest) -> Handled:
        self._ledger.reset()
        self._counts.reset()
        self._scripts.clear()
        return _json({"reset": True})

    def _get_ledger(self, request: HttpRequest) -> Handled:
        since = int(parse_qs(request.query).get("since", ["0"])[0])
        return _json({**self._total(), "records": [each.to_json() for each in self._ledger.records[since:]]})

    def _total(self) -> dict[str, Any]:
        total = self._ledger.total_pico
        return {"total_usd": str(usd(total)), "total_pico": total, "num_billed": len(self._ledger.records)}

    def _models(self, _: HttpRequest) -> Handled:
        self._counts.totals["models_listed"] += 1
        return _json({"data": [self._model(model) for model in self._settings.prices]})

    def _model(self, model: str) -> dict[str, Any]:
        per_input, per_output = (format(usd(pico).normalize(), "f") for pico in self._settings.pico_per_token(model))
        record: dict[str, Any] = {"id": model, "name": model, "context_length": self._settings.context_length}
        record["supported_parameters"] = ["max_tokens", "temperature", "tools", "tool_choice"]
        record["top_provider"] = {"context_length": self._settings.context_length, "max_completion_tokens": None}
        if model not in self._settings.unpriced:
            record["pricing"] = {"prompt": per_input, "completion": per_output, "request": "0", "image": "0"}
        return record

    def _generation(self, request: HttpRequest) -> Handled:
        generation_id = parse_qs(request.query).get("id", [""])[0]
        record = self._ledger.find(generation_id)
        if record is None:
            return _json(error_json(404, "Generation not found"), 404)
        known = {"id": generation_id, "model": record.model, "total_cost": record.cost_pico / PICO_PER_USD}
        tokens = {"tokens_prompt": record.prompt_tokens, "tokens_completion": record.completion_tokens}
        return _json({"data": known | tokens})

    def _key(self, _: HttpRequest) -> Handled:
        limit, spent = self._settings.credit_usd, self._ledger.total_pico / PICO_PER_USD
        left = None if limit is None else max(0.0, limit - spent)
        return _json({"data": {"label": "fault server", "limit": limit, "usage": spent, "limit_remaining": left}})


def _billed(exchange: Exchange, outcome: str) -> Billed:
    chat = exchange.chat
    return Billed(
        at_s=time.time(),
        fingerprint=chat.fingerprint,
        attempt=exchange.attempt,
        model=chat.model,
        session=chat.session,
        outcome=outcome,
        prompt_tokens=chat.prompt_tokens,
        completion_tokens=exchange.completion_tokens,
        cost_pico=exchange.pico,
        is_reported=exchange.tells_cost and outcome != "scripted",
    )


def _json(value: Any, status: int = 200) -> Handled:
    return Delivery(status, ((0.0, http_bytes(status, json_bytes(value))),)), None


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
