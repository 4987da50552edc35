"""A plain client for the tests of the fault server: sockets and the standard library, so that nothing hides a byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

from fault_server import FaultServer

MODEL = "openai/gpt-5"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
]


def chat_body(question: str = "What now?", *, model: str = MODEL, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": question}]
    return {"model": model, "messages": messages, "max_tokens": 200, **fields}


def request_bytes(body: Any, *, method: str = "POST", path: str = "/v1/chat/completions", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    lines = {
        "Host": "loopback",
        "Content-Length": str(len(data)),
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


@dataclass(frozen=True)
class RawReply:
    """All bytes until the server closed; `error` is the exception's name if it did so by a reset."""

    data: bytes
    error: str | None
    elapsed_s: float

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1]) if self.data else 0

    @property
    def headers(self) -> dict[str, str]:
        lines = self.data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @property
    def body(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[2]

    @property
    def is_whole(self) -> bool:
        if self.headers.get("transfer-encoding") == "chunked":
            return self.data.endswith(b"0\r\n\r\n")
        return len(self.body) == int(self.headers.get("content-length", -1))

    def json(self) -> Any:
        return json.loads(self.body)


def ask(server: FaultServer, body: Any, **options: str) -> RawReply:
    """One request on a connection of its own, closed by the server."""
    begin = time.perf_counter()
    data, error = bytearray(), None
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        sock.sendall(request_bytes(body, **{"Connection": "close", **options}))
        try:
            while piece := sock.recv(65536):
                data += piece
        except ConnectionError as broken:
            error = type(broken).__name__
    return RawReply(bytes(data), error, time.perf_counter() - begin)


def get(server: FaultServer, path: str) -> RawReply:
    return ask(server, None, method="GET", path=path)


async def ask_all(port: int, requests: list[bytes], *, num_connections: int = 64) -> list[bytes | None]:
    """The bodies of the replies, in order of the requests; None where the connection broke."""
    replies: list[bytes | None] = [None] * len(requests)

    async def worker(first: int) -> None:
        streams = await asyncio.open_connection("127.0.0.1", port)
        for at in range(first, len(requests), num_connections):
            try:
                replies[at] = await _exchange(streams, requests[at])
            except (ConnectionError, asyncio.IncompleteReadError):
                await _close(streams[1])
                streams = await asyncio.open_connection("127.0.0.1", port)
        await _close(streams[1])

    await asyncio.gather(*(worker(first) for first in range(num_connections)))
    return replies


async def _exchange(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> bytes:
    reader, writer = streams
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        body = bytearray()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
        return bytes(body)
    return await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # the server may have reset it already
        await writer.wait_closed()
