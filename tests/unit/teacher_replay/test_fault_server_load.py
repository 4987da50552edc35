"""What the fault server keeps: orders of sessions, a ledger that outlives its client, and only records in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_client import MODEL, TOOLS, ask, ask_all, chat_body, request_bytes

from fault_server import DEFAULT_PRICES, FaultServer, Reply, Settings, evenly, group, read_ledger

TESTS = Path(__file__).resolve().parents[2]
MANY = 10_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 4_000


def test_the_order_of_a_session_is_seen():
    def state(session: str, size: int, **fields) -> dict:
        turns = [{"role": "assistant", "content": f"a{at}"} for at in range(size)]
        start = [{"role": "system", "content": "same"}, {"role": "user", "content": session}]
        return {"model": MODEL, "messages": [*start, *turns], **fields}

    with FaultServer(latency_s=(0.2, 0.2)) as server:
        in_order = [request_bytes(state("a", size)) for size in (0, 1, 1, 2)]
        asyncio.run(ask_all(server.port, in_order, num_connections=1))
        assert server.out_of_order() == []
        assert server.requests()["max_in_flight"] == 1
        asyncio.run(ask_all(server.port, [request_bytes(state("a", 1))], num_connections=1))
        assert [line.rpartition(": ")[2] for line in server.out_of_order()] == ["request 4 goes back"]
        server.reset()
        mixed = [request_bytes(state(name, 0, model=model)) for name in "bcd" for model in DEFAULT_PRICES]
        asyncio.run(ask_all(server.port, mixed, num_connections=9))
        assert server.out_of_order() == []
        assert server.requests()["max_in_flight"] == 9
        two_at_once = [request_bytes(state("e", size)) for size in (0, 1)]
        asyncio.run(ask_all(server.port, two_at_once, num_connections=2))
        assert any("overlaps" in line for line in server.out_of_order())
        named = request_bytes(state("f", 0), X_Session_Id="mine")
        asyncio.run(ask_all(server.port, [named], num_connections=1))
        assert set(server.sessions()["mine"]) == {MODEL}


def test_a_question_that_was_given_up_before_it_was_read_says_nothing_of_the_order():
    """On a busy machine the server may read it when its client, which waits a second, is at a later state."""
    turns = [{"role": "assistant", "content": str(at)} for at in range(3)]
    later, earlier = chat_body("same"), chat_body("same")
    later["messages"] = [*later["messages"], *turns]
    with FaultServer() as server:
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGSTOP)
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request_bytes(later))
        os.kill(server._process.pid, signal.SIGCONT)
        wait_until(lambda: server.requests()["given_up"] == 1)
        ask(server, earlier)
        assert server.out_of_order() == []
        assert len(server.ledger()) == 2


def test_the_ledger_outlives_a_reset_in_the_file_and_a_client_that_vanished(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with FaultServer(ledger_path=path, slow_s=30.0) as server:
        ask(server, chat_body("before"))
        server.reset()
        assert (server.ledger(), read_ledger(path), server.total_usd()) == ([], [], 0)
        server.script([Reply(fault="slow", billed=True)])
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(request_bytes(chat_body("gone")))
            wait_until(lambda: read_ledger(path))
            assert server.requests()["num_in_flight"] == 1
        wait_until(lambda: server.requests()["num_in_flight"] == 0)
        assert [record.outcome for record in read_ledger(path)] == ["slow"]
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(RuntimeError, match="did not start"):  # one server, one ledger
        FaultServer(ledger_path=path).__enter__()


def test_the_server_ends_with_the_process_that_started_it():
    code = "import sys, time; from fault_server import FaultServer\n"
    code += "with FaultServer() as server: print(server.port, flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": str(TESTS)}, text=True) as starter:
        assert starter.stdout is not None
        port = int(starter.stdout.readline())
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        starter.kill()
    wait_until(lambda: not is_listening(port))


def test_a_mistake_of_the_server_itself_is_not_hidden():
    server = FaultServer().__enter__()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        assert sock.recv(1) == b""
    with pytest.raises(RuntimeError, match="ended with status 1"):
        server.__exit__(None, None, None)


def test_64_connections_under_all_faults_and_a_ledger_that_equals_what_was_reported():
    settings = Settings(seed=2, faults=evenly(0.5, (*group("retry"), *group("answer"))), slow_s=0.05, delay_s=0.05)
    requests = [request_bytes(chat_body(f"q{at % 1000}", tools=TOOLS)) for at in range(3000)]
    with FaultServer(settings, latency_s=(0.0, 0.03)) as server:
        replies = asyncio.run(ask_all(server.port, requests))
        ledger, seen = server.ledger(), server.requests()
    reported = [_cost(reply) for reply in replies]
    told = sum(record.cost_pico for record in ledger if record.is_reported)
    assert sum(reported) == told
    assert seen["max_connections"] >= 64
    assert 32 <= seen["max_in_flight"] <= 64
    assert sum(seen["outcomes"].values()) + seen["idle_closed"] == 3000  # each was met, or closed unread
    assert {record.outcome for record in ledger} > {"reset", "truncated", "usage_missing", "ok"}


def _cost(reply: bytes | None) -> int:
    try:
        body = json.loads(reply or b"")
    except ValueError:
        return 0
    cost = body.get("usage", {}).get("cost") if isinstance(body, dict) else None
    return round(cost * 1e12) if isinstance(cost, float) and 0 < cost < 1e6 else 0


def test_throughput_and_flat_memory_over_many_requests(note):
    text = "x" * 4000
    requests = [request_bytes(chat_body(f"{at} {text}", tools=TOOLS)) for at in range(MANY)]
    with FaultServer() as server:
        begin, start = time.perf_counter(), server.process()
        asyncio.run(ask_all(server.port, requests))
        elapsed_s, first = time.perf_counter() - begin, server.process()
        server.reset()
        asyncio.run(ask_all(server.port, requests))
        second = server.process()
        assert len(read_ledger(server.ledger_path)) == MANY
    cpu_us = (first["cpu_s"] - start["cpu_s"]) / MANY * 1e6
    growth_kb = (first["rss_bytes"] - start["rss_bytes"]) / MANY / 1e3
    rate = f"{MANY / elapsed_s:.0f} requests/s, client included, on 64 connections"
    many = f"{2 * MANY:,} requests (make test-full: 20,000)"
    note(f"fault server, {many}: {rate}; {cpu_us:.0f} us CPU and {growth_kb:.2f} KB kept a request of 4 KB")
    assert cpu_us < 600  # CPU, because other work on the machine says nothing about the server
    assert growth_kb < 2.5  # the records, not the requests
    assert second["rss_bytes"] - first["rss_bytes"] < 4e6


def is_listening(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def wait_until(holds, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
