"""`FaultServer`: the server in a process of its own, as a context manager."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from fault_server.ledger import Billed
from fault_server.settings import Reply, Settings

STOP_S = 10.0


class FaultServer:
    """`with FaultServer(seed=1, faults={"reset": 0.1}) as server: ...`; the keywords are the fields of `Settings`."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        ledger_path: Path | None = None,
        port: int = 0,
        **changes: Any,
    ) -> None:
        self.settings = dataclasses.replace(settings or Settings(), **changes)
        self._given_path, self._given_port = ledger_path, port
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> FaultServer:
        self._folder = tempfile.TemporaryDirectory(prefix="fault-server-")
        folder = Path(self._folder.name)
        self.ledger_path = self._given_path or folder / "ledger.jsonl"
        self._stderr_path = folder / "stderr.txt"
        try:
            self.port = self._start()
        except BaseException:
            self._end()
            self._folder.cleanup()
            raise
        self.url = f"http://127.0.0.1:{self.port}"
        self.base_url = f"{self.url}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = self._end()
        said = self._stderr_path.read_text(encoding="utf-8")
        self._folder.cleanup()
        if status != 0 and error is None:
            raise RuntimeError(f"the fault server ended with status {status}:\n{said}")

    def ledger(self, since: int = 0) -> list[Billed]:
        """Everything billed so far, in order; `since` skips that many."""
        return [Billed.from_json(each) for each in self._ask("GET", f"/__ledger?since={since}")["records"]]

    def total_usd(self) -> Decimal:
        return Decimal(self._ask("GET", "/__ledger/total")["total_usd"])

    def requests(self) -> dict[str, Any]:
        """Counts by fingerprint, outcome and status, the most in flight, with and without a key."""
        return self._ask("GET", "/__requests")

    def sessions(self) -> dict[str, dict[str, list[dict[str, Any]]]]:
        """session -> model -> what was asked, in the order of arrival."""
        return self._ask("GET", "/__sessions")

    def out_of_order(self) -> list[str]:
        """Where a model saw an earlier state of a session after a later one, or two of its states at once."""
        found = []
        for session, models in self.sessions().items():
            for model, line in models.items():
                where = f"session {session}, {model}"
                steps = enumerate(pairwise(each["num_messages"] for each in line), start=1)
                found += [f"{where}: request {at} goes back" for at, (before, now) in steps if now < before]
                found += [f"{where}: request {at} overlaps" for at, each in enumerate(line) if each["overlaps"]]
        return found

    def process(self) -> dict[str, float]:
        """rss_bytes and cpu_s of the server's process."""
        return self._ask("GET", "/__process")

    def script(self, replies: Iterable[Reply], *, fingerprint: str | None = None, model: str | None = None) -> None:
        """The next replies to this fingerprint, or to this model, or to anyone; then the settings decide again."""
        records = [dataclasses.asdict(reply) for reply in replies]
        self._ask("POST", "/__script", {"replies": records, "fingerprint": fingerprint, "model": model})

    def reset(self) -> None:
        """Forgets ledger, counts, attempts and scripts; the file keeps its lines and gets one that says so."""
        self._ask("POST", "/__reset")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body))
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise RuntimeError(f"{method} {path}: got {reply.status}: {data[:500]!r}")
        return json.loads(data)

    def _start(self) -> int:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        with self._stderr_path.open("w", encoding="utf-8") as stderr:
            # A session of its own: neither Ctrl-C nor a test that kills its client's group reaches the server.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fault_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,
            )
        start = {"settings": self.settings.to_json(), "ledger_path": str(self.ledger_path), "port": self._given_port}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(start) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(STOP_S)
            raise RuntimeError(f"the fault server did not start:\n{self._stderr_path.read_text(encoding='utf-8')}")
        return int(json.loads(line)["port"])

    def _end(self) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            return process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
