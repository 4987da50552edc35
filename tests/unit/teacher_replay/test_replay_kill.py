"""`crf replay` killed at random moments, again and again: the same calls in the end, and the books below the cap."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from decimal import Decimal

from crf import SRC, must
from replay_pieces import TEACHERS

from fault_server import FaultServer, evenly, group

NUM_KILLS = 50 if os.environ.get("CRF_TEST_PROFILE") == "full" else 5
CAP = 40.0
# What a run measures about itself is not what was said.
OF_THE_RUN = ("latency_s", "attempts")


def write_chats(path, num_sessions=40, num_each=3):
    with path.open("w") as file:
        for session in range(num_sessions):
            messages = [{"role": "user", "content": f"Task {session}: make the tests pass."}]
            for index in range(num_each):
                function = {"name": "bash", "arguments": json.dumps({"command": f"pytest t{index}.py"})}
                call = {"id": f"c{index}", "type": "function", "function": function}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": f"c{index}", "content": f"{index} failed"})
            messages.append({"role": "assistant", "content": "I am done."})
            file.write(json.dumps({"messages": messages}) + "\n")


def command(run, folder):
    options = ["--full", "--max-usd", str(CAP), "--max-tokens", "32", "--concurrency", "16", "--timeout", "5"]
    return [
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


def environment(folder):
    return {"HOME": str(folder), "PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]}


def calls_of(run):
    rows = [json.loads(line) for line in (run / "teacher_calls.jsonl").read_text().splitlines()]
    return {json.dumps({k: v for k, v in row.items() if k not in OF_THE_RUN}, sort_keys=True) for row in rows}


def prepare(folder, base_url):
    folder.mkdir()
    write_chats(folder / "chats.jsonl")
    (folder / "t.json").write_text(json.dumps([{**teacher, "base_url": base_url} for teacher in TEACHERS]))
    must("ingest", "chats.jsonl", "-o", "run", cwd=folder)
    return folder / "run"


def server_for():
    faults = evenly(0.1, group("retry"))
    faults.pop("slow", None)  # each would take the whole time-out
    return FaultServer(
        faults=faults, max_faulty_attempts=2, latency_s=(0.005, 0.03), retry_after_s=0.02, seed=4, billed_share=1.0
    )


def test_kills_lose_nothing_and_spend_nothing_twice(tmp_path, note):
    with server_for() as server:
        whole = prepare(tmp_path / "whole", server.base_url)
        done = subprocess.run(
            command(whole, tmp_path), cwd=whole.parent, env=environment(tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        wanted, uninterrupted = calls_of(whole), server.total_usd()
    assert len(wanted) == 40 * 4 * 3
    with server_for() as server:
        run = prepare(tmp_path / "killed", server.base_url)
        draw, kills = random.Random(7), 0
        while kills < NUM_KILLS:
            process = subprocess.Popen(
                command(run, tmp_path),
                cwd=run.parent,
                env=environment(tmp_path),
                stderr=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            time.sleep(draw.uniform(0.3, 1.6) if NUM_KILLS < 10 else draw.uniform(0.25, 0.9))
            if process.poll() is not None:
                # It was done before we struck: take its replies away, and let it begin again.
                for file in run.glob("teacher_cache.sqlite*"):
                    file.unlink()
                server.reset()
                continue
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert server.total_usd() <= Decimal(str(CAP))
        done = subprocess.run(
            command(run, tmp_path), cwd=run.parent, env=environment(tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        total = server.total_usd()
        assert calls_of(run) == wanted
        assert total <= Decimal(str(CAP))
        dearest = max(billed.cost_usd for billed in server.ledger())
        assert total <= uninterrupted + kills * 16 * dearest  # what was in flight at each kill
        repeated = sum(each["attempts"] for each in server.requests()["by_fingerprint"].values())
    note(f"killed {kills} times: the same {len(wanted)} calls, ${total:.3f} billed, ${uninterrupted:.3f} without kills")
    assert repeated >= len(wanted)
    shutil.rmtree(tmp_path / "whole")
