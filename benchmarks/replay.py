"""Measure the client's cost of teacher calls: CPU time per call at concurrency 64, and of a resume with cached replies.

python benchmarks/replay.py                    # 3,000 calls; a resume over 100,000
python benchmarks/replay.py --calls 300 --cached 2000
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import ReplayOptions, replay, teachers_of
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from composer_replication.teacher_replay.teachers import read_teachers
from composer_replication.types import TeacherCallResult, TraceState
from fault_server import FaultServer

TEACHER = {"slug": "openai/gpt-5", "input_per_mtok": 1.25, "output_per_mtok": 10.0}


def states(number: int, size: int) -> Iterator[TraceState]:
    """Yield states of `number` different sessions, each of about `size` bytes."""
    for index in range(number):
        text = f"Task {index}: " + "look at the code and fix it. " * (size // 29)
        messages: list[dict[str, object]] = [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": text},
        ]
        yield TraceState(state_id=f"s{index}::0000", messages=messages, student_action="ls")


def ask(number: int, size: int, options: ReplayOptions) -> tuple[float, float, int]:
    """Run `number` teacher calls, and return the CPU seconds, the wall-clock seconds and the number of failed calls."""
    failed = 0

    def count(_state: int, _teacher: int, result: TeacherCallResult) -> None:
        nonlocal failed
        failed += result["error"] is not None

    cpu, wall = time.process_time(), time.perf_counter()
    known = teachers_of([TEACHER], "key", options)
    asyncio.run(replay(states(number, size), known, 1e6, options=options, on_result=count))
    return time.process_time() - cpu, time.perf_counter() - wall, failed


def fill(path: Path, number: int, size: int, base_url: str, settings: RequestSettings) -> None:
    """Fill a cache with the replies of a finished replay."""
    (teacher,) = read_teachers([TEACHER], environment={}, api_key="key", base_url=base_url)
    builder = RequestBuilder(teacher, settings)
    reply = {
        "message": {"role": "assistant", "content": "I would run the tests. " * 20},
        "finish_reason": "stop",
        "prompt_tokens": 1000,
        "completion_tokens": 100,
        "cost_nano": 1000,
        "error": None,
        "latency_s": 1.0,
        "attempts": 1,
    }
    with TeacherStore(path) as store:
        for state in states(number, size):
            key = builder.build(state["messages"], None).key
            intent = store.reserve(key, teacher.slug, 1000, 10**18)
            assert isinstance(intent, int)
            store.settle(intent, 1000, reply=(key, teacher.slug, reply))


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU of teacher calls, and time of a resume.")
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--cached", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=4096, help="bytes of a state")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| what | figure | goal |\n|---|---|---|")
    settings = RequestSettings(max_tokens=64)
    with tempfile.TemporaryDirectory() as folder, FaultServer(latency_s=(0.02, 0.04)) as server:
        found = []
        for number in range(args.rounds):
            cache = Path(folder) / f"{number}.sqlite"
            options = ReplayOptions(base_url=server.base_url, cache=cache, settings=settings, environment={})
            cpu, wall, failed = ask(args.calls, args.size, options)
            assert not failed, f"{failed} calls failed"
            found.append((cpu / args.calls * 1e3, args.calls / wall))
        best = min(found)
        spread = f"{found[0][0]:.2f}" if len(found) == 1 else f"{min(found)[0]:.2f} to {max(found)[0]:.2f}"
        print(f"| CPU a call at concurrency 64, {args.size} bytes | {best[0]:.2f} ms ({spread}) | <= 3 ms |")
        print(f"| calls a second, server 20 to 40 ms | {best[1]:.0f} | |")
        cache = Path(folder) / "full.sqlite"
        fill(cache, args.cached, args.size, server.base_url, settings)
        options = ReplayOptions(base_url=server.base_url, cache=cache, settings=settings, environment={})
        before = server.requests()["num_chat"]
        _, wall, _ = ask(args.cached, args.size, options)
        sent = server.requests()["num_chat"] - before
        print(f"| resume over {args.cached:,} cached calls, {sent} sent | {wall:.1f} s | < 10 s |")


if __name__ == "__main__":
    main()
