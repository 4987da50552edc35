"""The cap holds against what a server really bills, whatever its usage block says; with honest usage it is used up."""

from __future__ import annotations

import asyncio
import os
import random
from decimal import Decimal

import pytest
from billing_server import DENSE, FEWER, HUGE, LIES, USUAL, BillingServer, honest
from replay_pieces import KEY, collect, options_for, states

from composer_replication.errors import InputError
from composer_replication.teacher_replay import replay_trace
from composer_replication.teacher_replay.ask_and_retry import KEPT_BACK, Patience
from composer_replication.teacher_replay.replay import request_of, teachers_of
from composer_replication.teacher_replay.requests import RequestBuilder, Settings

NUM_RUNS = 100 if os.environ.get("CRF_TEST_PROFILE") == "full" else 5
PRICES = {
    "anthropic/claude-opus-4.7": (5.0, 25.0),
    "openai/gpt-5": (1.25, 10.0),
    "deepseek/deepseek-v4-pro": (1.32, 3.96),
}
TEACHERS = [
    {"slug": slug, "input_per_mtok": per_input, "output_per_mtok": per_output}
    for slug, (per_input, per_output) in PRICES.items()
]
ANY_URL = "http://127.0.0.1:1/v1"
QUICK = Patience(max_attempts=2, first_wait_s=0.005, longest_wait_s=0.01)


def bounds(asked, teachers, options):
    """The most that each call can cost, in dollars."""
    builders = [RequestBuilder(teacher, options.settings) for teacher in teachers_of(teachers, KEY, options)]
    return [Decimal(request_of(builder, state).bound_nano) / 10**9 for state in asked for builder in builders]


async def replayed(server, asked, cap, **options):
    async with server.running():
        # Only a fault of ours may be slow: a busy machine must not add calls whose bill nobody knows.
        given = options_for(server, patience=QUICK, timeout_s=0.3 if server.fault_share else 20.0, **options)
        return await collect(asked, given, cap=cap, teachers=TEACHERS)


def a_run(number, tokenizers, usage_of, fault_share, concurrency=None):
    """A replay of random size, with more work than the cap pays for; the server, the cap and the report."""
    draw = random.Random(number)
    server = BillingServer(
        PRICES, draw.choice(tokenizers), usage_of, draw, fault_share=fault_share, latency_s=draw.choice([0.0, 0.005])
    )
    asked = list(states(draw.randint(8, 14), tools=draw.random() < 0.5, size=draw.randint(100, 2000)))
    settings = Settings(max_tokens=draw.randint(48, 256))
    most = bounds(asked, TEACHERS, options_for(None, base_url=ANY_URL, settings=settings))
    cap = float(max(most)) * draw.uniform(1.05, 3)
    concurrency = concurrency or draw.choice([1, 1, 4, 16, 64])
    found, report = asyncio.run(replayed(server, asked, cap, settings=settings, max_concurrency=concurrency))
    return server, Decimal(str(cap)), most, found, report


@pytest.mark.timeout(900)
def test_the_ledger_stays_within_the_cap_whatever_the_usage_says(note):
    shares = []
    for number in range(NUM_RUNS):
        draw = random.Random(f"lies {number}")
        is_usual = number % 4 != 0
        lies = list({**LIES, **HUGE, **(FEWER if is_usual else {})}.values())
        usage_of = [draw.choice(lies), lambda bill, lies=lies, draw=draw: draw.choice([honest, *lies])(bill)][
            number % 2
        ]
        fault_share = draw.choice([0.0, 0.0, 0.2])
        server, cap, _, _, _ = a_run(number, USUAL if is_usual else (*USUAL, *DENSE), usage_of, fault_share)
        assert server.num_requests
        assert server.total_usd <= cap
        shares.append(server.total_usd / cap)
    note(f"{NUM_RUNS} runs (make test-full: 100): the server's ledger is {max(shares):.0%} of the cap at most")


@pytest.mark.parametrize("name", [*LIES, *FEWER, *HUGE])
def test_no_lie_makes_a_ledger_pass_the_cap(name):
    lies = {**LIES, **FEWER, **HUGE}
    server, cap, *_ = a_run(1, USUAL, lies[name], fault_share=0.0, concurrency=1)
    assert 0 < server.total_usd <= cap


def test_with_honest_usage_a_run_stops_only_when_a_call_no_longer_fits(note):
    left = []
    for number in range(NUM_RUNS):
        server, cap, most, found, report = a_run(number, (*USUAL, *DENSE), honest, fault_share=0.0)
        kept_back = [number for number, result in enumerate(map(found.get, sorted(found))) if result["attempts"] == 0]
        assert server.total_usd <= cap
        assert report.counts[KEPT_BACK] == len(kept_back)
        assert report.counts["asked"] == server.num_requests == len(most) - len(kept_back)
        if kept_back:
            smallest = min(most[number] for number in kept_back)
            assert cap - server.total_usd < smallest + Decimal("1e-6")
            left.append((cap - server.total_usd) / smallest)
    note(f"{len(left)} honest runs with work left: {max(left):.2f} of one call's bound was left of the cap at most")
    assert left


def test_a_call_without_room_waits_until_others_are_answered():
    """64 calls at a time hold more than the cap; all of them together cost less."""
    server = BillingServer(PRICES, USUAL[0], honest, random.Random(3), latency_s=0.02)
    asked, settings = list(states(10)), Settings(max_tokens=256)
    most = bounds(asked, TEACHERS, options_for(None, base_url=ANY_URL, settings=settings))
    cap = float(sum(most)) / 3
    found, report = asyncio.run(replayed(server, asked, cap, max_concurrency=64, settings=settings))
    assert sum(sorted(most)[-64:]) > cap
    assert not [result["error"] for result in found.values() if result["error"]]
    assert report.counts == {"asked": 90, "attempts": 90}
    assert server.total_usd <= Decimal(str(cap))


def test_an_answer_far_beyond_max_tokens_is_paid_once_and_stops_the_replay():
    server = BillingServer(PRICES, USUAL[0], LIES["zeros"], random.Random(3), num_characters=40_000)
    _, report = asyncio.run(replayed(server, list(states(10)), 5.0, max_concurrency=64))
    assert server.num_requests == 1
    assert report.stopped is not None
    assert server.total_usd <= Decimal(str(report.spent_usd))


def test_a_cap_below_the_price_of_one_call_is_an_error_and_nothing_is_sent():
    server = BillingServer(PRICES, USUAL[0], honest, random.Random(3))

    async def ask(cap):
        async with server.running():
            return await replay_trace(list(states(2)), TEACHERS, cap, KEY, options=options_for(server))

    cheapest = min(bounds(list(states(2)), TEACHERS, options_for(None, base_url=ANY_URL)))
    with pytest.raises(InputError, match="cap"):
        asyncio.run(ask(float(cheapest) * 0.99))
    assert server.num_requests == 0
    asyncio.run(ask(float(cheapest) * 1.01))
    assert server.num_requests > 0
    assert asyncio.run(replay_trace([], TEACHERS, 0.0, KEY)) == []
