"""One HTTP client for any endpoint that speaks the chat-completions API.

A few connection pools share the work: one pool with all connections spends more time looking for a free one than the
requests take. The key goes into a header and nowhere else.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from composer_replication.optional import require
from composer_replication.teacher_replay.outcome import Failure, Reply, broken, read_response
from composer_replication.teacher_replay.requests import Request

_CONNECTIONS_A_POOL = 8
_MAX_BODY = 64 * 2**20


class TeacherClient:
    """Sends requests, at most `max_concurrency` at a time. An async context manager."""

    def __init__(self, *, max_concurrency: int = 64, timeout_s: float = 120.0) -> None:
        self._httpx: Any = require("httpx", extra="replay")
        self._num_pools = -(-max_concurrency // _CONNECTIONS_A_POOL)
        self._timeout_s = timeout_s
        self._pools: list[Any] = []
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        self._max_concurrency = max_concurrency

    async def __aenter__(self) -> TeacherClient:
        limits = self._httpx.Limits(
            max_connections=_CONNECTIONS_A_POOL, max_keepalive_connections=_CONNECTIONS_A_POOL, keepalive_expiry=30
        )
        context = self._httpx.create_ssl_context()  # made once: it takes longer than a request
        for _ in range(self._num_pools):
            pool = self._httpx.AsyncClient(limits=limits, timeout=self._timeout_s, verify=context, trust_env=True)
            self._pools.append(pool)
        for number in range(self._max_concurrency):
            self._free.put_nowait(self._pools[number % self._num_pools])
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for pool in self._pools:
            await pool.aclose()
        self._pools.clear()

    async def send(self, request: Request) -> Reply | Failure:
        """One attempt. Whatever goes wrong comes back as a Failure; only being cancelled is raised."""
        pool = await self._free.get()
        try:
            outcome = await self._post(pool, request)
        finally:
            self._free.put_nowait(pool)
        return _without_key(outcome, request.teacher.api_key)

    async def get_json(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """A plain GET, for lists of models."""
        pool = await self._free.get()
        try:
            response = await pool.get(url, headers=_headers(api_key))
        finally:
            self._free.put_nowait(pool)
        return response.status_code, response.content

    async def _post(self, pool: Any, request: Request) -> Reply | Failure:
        httpx = self._httpx
        url = f"{request.teacher.base_url}/chat/completions"
        headers = _headers(request.teacher.api_key) | {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await pool.post(url, content=request.body, headers=headers)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            return broken(f"no connection: {type(error).__name__}: {error}", was_sent=False)
        except TimeoutError:
            return broken(f"no answer within {self._timeout_s:g} s", was_sent=True)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return broken(f"connection broke: {type(error).__name__}: {error}", was_sent=True)
        body = response.content
        if len(body) > _MAX_BODY:
            return broken(f"an answer of {len(body)} bytes", was_sent=True)
        return read_response(response.status_code, response.headers, body, request.teacher.price)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _without_key(outcome: Reply | Failure, key: str | None) -> Reply | Failure:
    """An endpoint may put the key it was given into its complaint."""
    if isinstance(outcome, Failure) and key and key in outcome.error:
        return outcome._replace(error=outcome.error.replace(key, "<key>"))
    return outcome
