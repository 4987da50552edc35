"""States of one session side by side: the same answers, less waiting, and prompts that a cache has already."""

from __future__ import annotations

import asyncio
import time

import pytest
from replay_pieces import TEACHERS, collect, options_for, states

from composer_replication.errors import InputError
from composer_replication.teacher_replay.ask_and_retry import run_lanes
from composer_replication.teacher_replay.replay import ReplayOptions
from fault_server import FaultServer
from refusals import refusal

OF_THE_RUN = ("latency_s", "is_cached")


def ask(order, *, num_sessions=1, num_each=24, latency_s=0.05, gate=None, concurrency=64, teachers=TEACHERS):
    """Answers by place, what the server counted, its sessions, and the seconds it took."""
    with FaultServer(latency_s=(latency_s, latency_s), agreement=0.6, seed=3) as server:
        options = options_for(server, order=order, gate=gate, max_concurrency=concurrency, timeout_s=20.0)
        begin = time.monotonic()
        found, _ = asyncio.run(collect(states(num_sessions, num_each), options, teachers=teachers))
        took = time.monotonic() - begin
        plain = {
            at: {key: value for key, value in result.items() if key not in OF_THE_RUN} for at, result in found.items()
        }
        return plain, server.requests(), server.sessions(), took


@pytest.mark.parametrize("gate", [None, "exact", "agree"])
def test_the_order_changes_no_answer(gate):
    by_default, counted, _, _ = ask("longest_first", num_sessions=3, num_each=8, latency_s=0.0, gate=gate)
    one_by_one, also_counted, _, _ = ask("in_order", num_sessions=3, num_each=8, latency_s=0.0, gate=gate)
    assert by_default == one_by_one
    assert counted["num_chat"] == also_counted["num_chat"]


def test_one_long_session_uses_the_concurrency_it_is_given(note):
    _, wide, _, wide_s = ask("longest_first", latency_s=0.2)
    _, narrow, _, narrow_s = ask("longest_first", latency_s=0.2, concurrency=4)
    _, serial, _, serial_s = ask("in_order", latency_s=0.2)
    assert wide["max_in_flight"] > 16
    assert narrow["max_in_flight"] == 4
    assert serial["max_in_flight"] == 3  # one a teacher, whatever the concurrency
    note(
        f"24 states x 3 teachers of one session at 0.2 s an answer: in order {serial_s:.2f} s, side by side "
        f"{narrow_s:.2f} s at concurrency 4, {wide_s:.2f} s at 64"
    )


@pytest.mark.parametrize("gate", [None, "exact"])
def test_a_gate_or_none_the_longest_state_goes_first_and_alone(gate):
    _, _, asked, _ = ask("longest_first", num_sessions=2, num_each=6, gate=gate)
    assert len(asked) == 2
    for models in asked.values():
        line = models[TEACHERS[0]["slug"]]
        sizes = [each["num_messages"] for each in line]
        assert sizes[0] == max(sizes) == 12
        assert not line[1]["overlaps"]
        assert any(each["overlaps"] for each in line[2:])


def test_a_cache_of_blocks_has_nearly_every_prompt_in_either_order(note):
    shares = {}
    for order in ("longest_first", "in_order"):
        _, counted, _, _ = ask(order, num_sessions=2, num_each=16, latency_s=0.02)
        for kind in ("blocks", "ends"):
            shares[order, kind] = counted[f"cached_by_{kind}"] / counted["prompt_tokens"]
    assert shares["longest_first", "blocks"] > 0.85  # all but the longest prompt of each session
    assert shares["longest_first", "blocks"] == pytest.approx(shares["in_order", "blocks"], abs=0.01)
    assert shares["in_order", "ends"] == shares["in_order", "blocks"]
    assert shares["longest_first", "ends"] < 0.5  # what --in-order is for
    note("prompt tokens in a provider's cache: " + ", ".join(f"{o} ({k}) {s:.0%}" for (o, k), s in shares.items()))


def test_lanes_are_worked_off_whole_whatever_their_lengths():
    done, open_lanes, most_open = [], set(), 0

    async def work(job):
        nonlocal most_open
        lane, number = job
        if number == 0:
            open_lanes.add(lane)
        assert lane in open_lanes or number == 0
        most_open = max(most_open, len(open_lanes))
        await asyncio.sleep(0.001 * (number % 3))
        if number:
            assert (lane, 0) in done
        done.append(job)

    lanes = [[(lane, number) for number in range(1 + lane % 5)] for lane in range(40)]
    asyncio.run(run_lanes(iter(lanes), work, num_workers=7))
    assert sorted(done) == sorted(job for lane in lanes for job in lane)
    asyncio.run(run_lanes(iter([]), work, num_workers=3))


def test_an_error_in_a_lane_ends_it_all():
    async def work(job):
        await asyncio.sleep(0)
        raise InputError(f"job {job}")

    with pytest.raises(InputError, match="job 1"):
        asyncio.run(run_lanes([[1, 2], [1, 2]], work, num_workers=4))


def test_an_order_that_is_none_is_named():
    with refusal(InputError, what="order", got="'random'", expected='"longest_first"'):
        ReplayOptions(order="random")
