"""Replays killed with requests in flight, and several of one run at once: what was answered is never billed again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from typing import NamedTuple

from crf import must
from replay_pieces import TEACHERS
from run_pieces import run_states
from test_replay_kill import calls_of, environment, write_chats

from composer_replication.runs import RunDir
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from composer_replication.teacher_replay.teachers import read_teachers
from fault_server import FaultServer, fingerprint

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
NUM_KILLS = 20 if IS_FULL else 2
NUM_AT_ONCE = 4 if IS_FULL else 2
CONCURRENCY = 8


def prepare(folder, server, num_sessions):
    folder.mkdir()
    write_chats(folder / "chats.jsonl", num_sessions)
    teachers = [{**teacher, "base_url": server.base_url} for teacher in TEACHERS]
    (folder / "t.json").write_text(json.dumps(teachers))
    must("ingest", "chats.jsonl", "-o", "run", cwd=folder)
    return folder / "run"


def start(run):
    options = ["--full", "--max-usd", "40", "--max-tokens", "32", "--concurrency", str(CONCURRENCY)]
    command = [
        sys.executable,
        "-m",
        "composer_replication",
        "replay",
        str(run),
        "--teachers",
        "t.json",
        "--set=replay.states=all",
        *options,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=run.parent, env=environment(run.parent), text=True, **pipes)


def names_of(run, server):
    """Key in the store -> fingerprint at the server, of every request of the run."""
    specs = [{**teacher, "base_url": server.base_url} for teacher in TEACHERS]
    found = {}
    for teacher in read_teachers(specs, environment={}):
        builder = RequestBuilder(teacher, RequestSettings(max_tokens=32))
        for state in run_states(RunDir.open(run)):
            request = builder.build(state["messages"], state.get("tools"), state["session_id"])
            found[request.key] = fingerprint(json.loads(request.body))
    return found


class AfterKill(NamedTuple):
    answered: set[str]
    in_flight: set[str]
    billed: Counter[str]


def after_kill(run, server, names):
    """What the store knew when its process died, and what the server had billed by then."""
    connection = sqlite3.connect(run / "teacher_cache.sqlite")
    answered, in_flight = (
        {names[key] for (key,) in connection.execute(f"SELECT key FROM {table}")} for table in ("replies", "intents")
    )
    connection.close()
    return AfterKill(answered, in_flight, Counter(each.fingerprint for each in server.ledger()))


def kill_in_flight(run, server, names, num_more):
    """Start a replay, let it be billed for some more requests, and kill it while others are on their way."""
    before = len(server.ledger())
    process = start(run)
    with process:
        while len(server.ledger()) < before + num_more:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    return after_kill(run, server, names)


def test_replays_killed_in_flight_bill_no_answer_twice(tmp_path, note):
    rng, kills = random.Random(2), []
    with FaultServer(latency_s=(0.05, 0.15)) as server:
        run = prepare(tmp_path / "killed", server, num_sessions=12 + NUM_KILLS)
        names = names_of(run, server)
        for _ in range(NUM_KILLS):
            kills.append(kill_in_flight(run, server, names, rng.randint(1, 2 * CONCURRENCY)))
        last = start(run)
        _, said = last.communicate()
        assert last.returncode == 0, said
        billed, total = Counter(each.fingerprint for each in server.ledger()), server.total_usd()
    twice = sum(billed[name] > kill.billed[name] for kill in kills for name in kill.answered)
    lost = Counter(name for kill in kills for name in kill.in_flight)
    unexplained = sum(max(number - 1 - lost[name], 0) for name, number in billed.items())
    with TeacherStore(run / "teacher_cache.sqlite") as store:
        meter = store.meter()
        assert store.num_replies() == len(names) == len(calls_of(run))
    again = sum(billed.values()) - len(billed)  # lost with the process that waited for them, and asked for anew
    note(
        f"replay killed {NUM_KILLS} times with {sum(lost.values())} requests in flight, {again} of them billed and "
        "asked for anew: "
        f"{twice} of {len(names)} answers billed again, {unexplained} requests billed twice that were not in flight at "
        f"a kill; ${total:.4f} billed, ${meter.committed / 1e9:.4f} in the books (full: 20 kills)"
    )
    assert all(kill.in_flight for kill in kills)
    assert twice == unexplained == 0
    assert set(billed) == set(names.values())
    assert total <= Decimal(meter.committed) / 10**9


def stop_outside_transactions(process, run):
    """A stopped process lives, and holds what it holds; but a lock of SQLite's would make all others wait for it."""
    while True:
        process.send_signal(signal.SIGSTOP)
        connection = sqlite3.connect(run / "teacher_cache.sqlite", timeout=0.2, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError:
            process.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        finally:
            connection.close()


def test_replays_of_one_run_at_once_bill_nothing_twice_and_say_who_holds_it(tmp_path, note):
    with FaultServer(latency_s=(0.1, 0.3)) as server:
        run = prepare(tmp_path / "held", server, num_sessions=3 * NUM_AT_ONCE)
        first = start(run)
        while not server.ledger():
            assert first.poll() is None, first.stderr.read()
            time.sleep(0.01)
        stop_outside_transactions(first, run)  # or it might be done before the others have begun
        others = [start(run) for _ in range(NUM_AT_ONCE - 1)]
        said = [process.communicate()[1] for process in others]
        first.send_signal(signal.SIGCONT)
        assert first.communicate()[1]
        num_calls, billed = len(calls_of(run)), [each.fingerprint for each in server.ledger()]
    holder = rf"\b{first.pid}\b.*{re.escape(socket.gethostname())}.*\b20\d\d-"
    refused = [text for text in said if re.search(holder, text)]
    note(
        f"{NUM_AT_ONCE} replays of one run at once: {len(billed)} requests billed, {len(billed) - len(set(billed))} "
        f"twice; {len(refused)} named the process that holds the run (full: 4 at once)"
    )
    assert first.returncode == 0
    assert len(billed) == len(set(billed)) == num_calls == 36 * NUM_AT_ONCE
    assert [process.returncode for process in others] == [1] * (NUM_AT_ONCE - 1)
    assert len(refused) == NUM_AT_ONCE - 1
    assert not any("Traceback" in text for text in said)


SHARED_STORE = """
import asyncio, sys
sys.path[:0] = sys.argv[3:]
from replay_pieces import KEY, TEACHERS, options_for, states
from composer_replication.teacher_replay.replay import replay_trace
options = options_for(None, base_url=sys.argv[1], cache=sys.argv[2], max_concurrency=4, timeout_s=20.0)
found = asyncio.run(replay_trace(list(states(8, 2)), TEACHERS, 100.0, KEY, options=options))
print(sum(each["error"] is None for each in found), sum(not each["is_cached"] for each in found))
"""


def test_processes_that_share_a_store_divide_the_calls_among_themselves(tmp_path, note):
    """As `replay_trace` may be used: everyone has every answer in the end, and each was sent by one of them."""
    paths = [path for path in sys.path if path.endswith(("teacher_replay", "tests", "src"))]
    with FaultServer(latency_s=(0.02, 0.1)) as server:
        command = [sys.executable, "-c", SHARED_STORE, server.base_url, str(tmp_path / "s.sqlite"), *paths]
        processes = [
            subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
            for _ in range(NUM_AT_ONCE)
        ]
        counts = [tuple(map(int, process.communicate()[0].split())) for process in processes]
        billed = [each.fingerprint for each in server.ledger()]
    num_twice = len(billed) - len(set(billed))
    note(
        f"{NUM_AT_ONCE} processes with one store: {len(billed)} requests billed, {num_twice} twice; "
        f"sent by each: {[sent for _, sent in counts]} (full: 4 at once)"
    )
    assert [answered for answered, _ in counts] == [48] * NUM_AT_ONCE
    assert len(billed) == len(set(billed)) == sum(sent for _, sent in counts) == 48
