"""Many states x 3 teachers at 20% faults and concurrency 64: all accounted for, books below the cap, memory flat."""

from __future__ import annotations

import asyncio
import os
import random
from decimal import Decimal
from pathlib import Path

import pytest
from replay_pieces import KEY, TEACHERS, options_for, states

from composer_replication.teacher_replay.replay import replay, teachers_of
from fault_server import FAULTS, FaultServer, evenly

NUM_RUNS, NUM_SESSIONS, MOST_SESSIONS = (
    (100, 500, 1500) if os.environ.get("CRF_TEST_PROFILE") == "full" else (1, 150, 600)
)
NUM_EACH = 4
EVERY_FAULT = evenly(0.2, [fault.name for fault in FAULTS if fault.name != "overcharge"])


def resident_mb():
    """What this process holds now: its peak so far may be that of an earlier test, and would hide any growth."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.timeout(3600)
def test_full_runs_at_twenty_percent_faults(tmp_path, note):
    draw = random.Random(11)
    seen, passed = set(), 0
    for number in range(NUM_RUNS):
        cap = draw.choice([1.0, 2.0, 5.0, 50.0]) if NUM_RUNS > 1 else 50.0
        with FaultServer(faults=EVERY_FAULT, seed=number, retry_after_s=0.02, slow_s=3.0, billed_share=1.0) as server:
            options = options_for(
                server,
                max_concurrency=64,
                timeout_s=1.0,
                cache=tmp_path / f"{number}.sqlite",
                order="longest_first" if number % 2 else "in_order",
            )
            found, errors = bytearray(NUM_SESSIONS * NUM_EACH * len(TEACHERS)), set()

            def keep(state, teacher, result, found=found, errors=errors):
                found[state * len(TEACHERS) + teacher] += 1
                assert (result["response_text"] is None) == (result["error"] is not None)
                if result["error"]:
                    errors.add(result["error"].partition(":")[0])

            asked, known = states(NUM_SESSIONS, NUM_EACH), teachers_of(TEACHERS, KEY, options)
            asyncio.run(replay(asked, known, cap, options=options, on_result=keep))
            assert set(found) == {1}
            assert server.total_usd() <= Decimal(str(cap))
            assert options.order != "in_order" or server.out_of_order() == []
            seen |= errors
            passed += 1
    size = f"{passed} runs of {NUM_SESSIONS * NUM_EACH} states x 3 teachers (make test-full: 100 of 2,000)"
    note(f"{size}: every call accounted for; errors: {', '.join(sorted(seen))}")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the sizes that Linux keeps")
def test_memory_does_not_grow_with_the_number_of_states(note):
    with FaultServer() as server:
        options = options_for(server, max_concurrency=64)

        known = teachers_of(TEACHERS[:1], KEY, options)

        def ask(num_sessions):
            asked, seen = states(num_sessions, 2, size=4000), [0.0]

            def look(*_):
                seen[0] = max(seen[0], resident_mb())

            asyncio.run(replay(asked, known, 1000.0, options=options, on_result=look))
            return seen[0]

        ask(100)
        before = ask(300)
        after = ask(MOST_SESSIONS)
    many = f"{2 * MOST_SESSIONS:,} states (make test-full: 3,000)"
    note(f"peak memory {before:.0f} MB after 600 states, {after:.0f} MB after {many}")
    assert after - before < 25
