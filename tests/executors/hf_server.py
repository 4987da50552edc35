"""A server on loopback that speaks the Jobs part of the Hub's API to huggingface_hub. A Job is a local process."""

from __future__ import annotations

import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from executors.containers import Container

OWNER = "tester"
TOKEN = "hf_loopback"


class Jobs:
    """The jobs of an account."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}
        self.containers: dict[str, Container] = {}
        self._numbers = itertools.count(1)

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        name = f"{next(self._numbers):024x}"
        environment = {**request.get("environment", {}), **request.get("secrets", {})}
        command = [*request.get("command", []), *request.get("arguments", [])]
        self.containers[name] = Container(command, environment, request.get("timeoutSeconds"))
        # Of secrets the real service shows the names alone.
        self.requests[name] = {**request, "secrets": dict.fromkeys(request.get("secrets", {}), "")}
        return self.shown(name)

    def shown(self, name: str) -> dict[str, Any]:
        request, stage = self.requests[name], self.stage(name)
        kept = ("dockerImage", "command", "arguments", "environment", "flavor", "labels", "secrets")
        owner = {"id": "1", "name": OWNER, "type": "user"}
        status = {"stage": stage, "message": None}
        shown = {"id": name, "createdAt": "2026-11-16T00:00:00.000Z", "status": status, "owner": owner}
        return shown | {key: request[key] for key in kept if key in request}

    def stage(self, name: str) -> str:
        container = self.containers[name]
        if container.code is None:
            return "RUNNING"
        if container.stopped:
            return "CANCELED"
        return "COMPLETED" if container.code == 0 else "ERROR"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    jobs: Jobs

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        match url.path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                self._answer({"name": OWNER, "type": "user"})
            case ["api", "jobs", _]:
                asked = [each.split("=", 1) for each in parse_qs(url.query).get("label", [])]
                fitting = [
                    name
                    for name, request in self.jobs.requests.items()
                    if all(request.get("labels", {}).get(key) == value for key, value in asked)
                ]
                self._answer([self.jobs.shown(name) for name in fitting])
            case ["api", "jobs", _, name] if name in self.jobs.requests:
                self._answer(self.jobs.shown(name))
            case ["api", "jobs", _, name, "logs"] if name in self.jobs.requests:
                self._stream(name, parse_qs(url.query).get("tail"))
            case _:
                self._answer({"error": "not found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "unauthorized"}, 401)
            return
        match urlsplit(self.path).path.strip("/").split("/"):
            case ["api", "jobs", _]:
                self._answer(self.jobs.run(json.loads(body)))
            case ["api", "jobs", _, name, "cancel"] if name in self.jobs.requests:
                self.jobs.containers[name].stop()
                self._answer(self.jobs.shown(name))
            case _:
                self._answer({"error": "not found"}, 404)

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, name: str, tail: list[str] | None) -> None:
        """Server-sent events: what there is so far, then what comes, to the end of the job."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        lines = self.jobs.containers[name].lines()
        sent = max(0, len(lines) - int(tail[0])) if tail else 0
        try:
            self._event("===== Job started at 2026-11-16 =====")
            while True:
                is_over = self.jobs.stage(name) != "RUNNING"
                for line in self.jobs.containers[name].lines()[sent:]:
                    self._event(line)
                    sent += 1
                if is_over:
                    break
                time.sleep(0.1)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.close_connection = True

    def _event(self, line: str) -> None:
        event = {"data": line, "timestamp": "2026-11-16T00:00:00.000Z"}
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        """Nobody reads it."""


class HubServer:
    """The service on a port of its own."""

    def __init__(self) -> None:
        self.jobs = Jobs()
        handler = type("Handler", (_Handler,), {"jobs": self.jobs})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        for container in self.jobs.containers.values():
            container.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)
