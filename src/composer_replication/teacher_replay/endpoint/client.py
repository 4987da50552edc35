"""One HTTP client for any endpoint that speaks the chat-completions API.

A few connection pools share the work: one pool with all connections spends more time looking for a free one than the
requests take. The key goes into a header and nowhere else.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.optional import require
from composer_replication.teacher_replay.endpoint.outcome import Failure, Reply, broken, read_response, with_status
from composer_replication.teacher_replay.endpoint.unpacking import ASKED_FOR, limited_body
from composer_replication.teacher_replay.requests import Request

_CONNECTIONS_A_POOL = 8
_CONNECT_S = 10.0  # an address that nobody answers at is known long before an answer would be due


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
            timeout = self._httpx.Timeout(self._timeout_s, connect=min(self._timeout_s, _CONNECT_S))
            pool = self._httpx.AsyncClient(limits=limits, timeout=timeout, verify=context, trust_env=True)
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
        what = f"GET {url.partition('?')[0]}"
        try:
            async with asyncio.timeout(self._timeout_s):
                async with pool.stream("GET", url, headers=_headers(api_key)) as response:
                    body = await limited_body(response)
        except TimeoutError:
            got = f"none within {self._timeout_s:g} s"
            raise InputError(explain(what, got=got, expected="a whole answer")) from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise InputError(explain(what, got=type(error).__name__, expected="an answer")) from None
        finally:
            self._free.put_nowait(pool)
        if isinstance(body, Failure):
            raise InputError(explain(what, got=body.error, expected="an answer"))
        return response.status_code, body

    async def _post(self, pool: Any, request: Request) -> Reply | Failure:
        httpx = self._httpx
        url = f"{request.teacher.base_url}/chat/completions"
        headers = _headers(request.teacher.api_key) | {"content-type": "application/json"}
        response: Any = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async with pool.stream("POST", url, content=request.body, headers=headers) as response:
                    body = await limited_body(response)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            reason = f"not sent: {type(error).__name__}"  # its text may hold the header
            return Failure(reason, False, "none", concerns="connection")
        except httpx.PoolTimeout:
            return Failure("no connection was free", True, "none")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return broken(f"no connection: {type(error).__name__}: {error}", was_sent=False)
        except TimeoutError:
            body = broken(f"no answer within {self._timeout_s:g} s", was_sent=True)
        except httpx.HTTPError as error:
            body = broken(f"connection broke: {type(error).__name__}: {error}", was_sent=True)
        if isinstance(body, Failure):
            return body if response is None else with_status(response.status_code, response.headers, body)
        if request.teacher.api_key:  # before anything is cut: half a key is still most of it
            body = body.replace(request.teacher.api_key.encode(), b"<key>")
        return read_response(response.status_code, response.headers, body, request)


def _headers(api_key: str | None) -> dict[str, str]:
    return ASKED_FOR | ({"authorization": f"Bearer {api_key}"} if api_key else {})


def _without_key(outcome: Reply | Failure, key: str | None) -> Reply | Failure:
    """An endpoint may put the key it was given into its complaint."""
    if isinstance(outcome, Failure) and key and key in outcome.error:
        return outcome._replace(error=outcome.error.replace(key, "<key>"))
    return outcome
