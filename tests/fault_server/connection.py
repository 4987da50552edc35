"""Just enough HTTP/1.1: one request at a time per connection, kept alive, with replies that wait, break and reset."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from fault_server.counts import InFlight
from fault_server.deliveries import Delivery, http_bytes

MAX_BODY = 64 * 2**20
MAX_HEAD = 64 * 2**10
IDLE_CLOSE_S = 0.05


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    is_given_up: bool = False
    """The client had closed its side before this was read: on a busy machine it may have asked something else since."""


class Service(Protocol):
    def connected(self) -> None: ...
    def disconnected(self) -> None: ...
    def idle_closed(self) -> None: ...
    def handle(self, request: HttpRequest) -> tuple[Delivery, InFlight | None]: ...
    def finished(self, entry: InFlight) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, service: Service, open_connections: set[Connection]) -> None:
        self._service = service
        self._open = open_connections
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._entry: InFlight | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = False
        self._is_closing_idle = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open.add(self)
        self._service.connected()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self._cancel_timer()
        self._end_entry()
        self._service.disconnected()

    def data_received(self, data: bytes) -> None:
        if self._is_closing_idle:
            # The classic race: the client believed in the connection, and what it sent is never read.
            self._service.idle_closed()
            self._abort()
            return
        self._buffer += data
        self._next()

    def eof_received(self) -> bool:
        return False  # the client is gone: close, and with it whatever still waits to be sent

    def close(self) -> None:
        self._transport.abort()

    def _next(self) -> None:
        while not self._is_busy and not self._transport.is_closing() and (request := self._request()):
            delivery, self._entry = self._service.handle(request)
            if self._entry is not None:
                self._entry.is_given_up = self._is_client_gone
            self._is_busy = True
            closes = request.headers.get("connection", "").lower() == "close"
            self._play(delivery, 0, "close" if closes and delivery.end == "keep" else delivery.end)

    def _request(self) -> HttpRequest | None:
        if self._head is None and not self._read_head():
            return None
        assert self._head is not None
        method, target, headers = self._head
        size = int(headers.get("content-length") or 0)
        if size > MAX_BODY or "transfer-encoding" in headers:
            self._transport.write(http_bytes(413 if size > MAX_BODY else 411, b"", {"Connection": "close"}))
            self._transport.close()
            return None
        if len(self._buffer) < size:
            return None
        body = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._head = None
        path, _, query = target.partition("?")
        return HttpRequest(method, path, query, headers, body, self._is_client_gone())

    def _is_client_gone(self) -> bool:
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                self._transport.abort()
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._head = (method, target, headers)
        return True

    def _play(self, delivery: Delivery, at: int, end: str) -> None:
        """Sends the steps from `at` on; a step that waits leaves the rest to a timer."""
        for index in range(at, len(delivery.steps)):
            wait_s, data = delivery.steps[index]
            if wait_s > 0:
                self._timer = self._loop.call_later(wait_s, self._late, delivery, index, end)
                return
            self._transport.write(data)
        self._finish(end)

    def _late(self, delivery: Delivery, index: int, end: str) -> None:
        self._transport.write(delivery.steps[index][1])
        self._play(delivery, index + 1, end)
        self._next()

    def _finish(self, end: str) -> None:
        self._cancel_timer()
        self._end_entry()
        self._is_busy = False
        if end == "close":
            self._transport.close()
        elif end == "reset":
            self._abort()
        elif end == "idle_close":
            self._is_closing_idle = True
            self._timer = self._loop.call_later(IDLE_CLOSE_S, self._transport.close)

    def _abort(self) -> None:
        # Lingering for zero seconds makes the kernel send RST, not FIN.
        sock = cast(socket.socket, self._transport.get_extra_info("socket"))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_entry(self) -> None:
        if self._entry is not None:
            self._service.finished(self._entry)
            self._entry = None


def connection_factory(service: Service) -> tuple[Callable[[], Connection], set[Connection]]:
    open_connections: set[Connection] = set()
    return lambda: Connection(service, open_connections), open_connections
