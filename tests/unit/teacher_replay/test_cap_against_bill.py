"""The cap holds against a server's bill where its token counts are impossible for its text; honest counts use it up.

No tokenizer is known to the cap. A server that states fewer tokens than it bills, but as many as some usual tokenizer
would make of the text, can pass the cap by that share: a dense tokenizer (a token for a character or a byte) that
states a quarter, a usual one that states seven tenths, or one that leaves thinking out of its counts where the rest is
enough for all its text. The tests bound what such a lie costs; nothing here excludes it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from decimal import Decimal

import pytest
from billing_server import (
    DENSE,
    FEWER,
    HUGE,
    LIES,
    USUAL,
    BillingServer,
    characters,
    fewer,
    honest,
    text_quarters,
    words_and_signs,
)
from replay_pieces import KEY, collect, options_for, states

from composer_replication.errors import InputError
from composer_replication.teacher_replay import replay_trace
from composer_replication.teacher_replay.ask_and_retry import KEPT_BACK, RetryPolicy
from composer_replication.teacher_replay.endpoint import Reply, _parse_response
from composer_replication.teacher_replay.replay import request_of, teachers_of
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from refusals import refusal

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
# Texts with the fewest tokens that one of seven tokenizers makes of them (Qwen2.5, GPT-4o, Claude, DeepSeek-V3,
# Gemma 3, Llama 3 and SmolLM2), measured with `tokenizers` 0.23, without special tokens.
TEXTS = {
    "prose": ("The test fails because the parser drops the last line. " * 12, 133),
    "code": ("    for name in names:\n        if name not in known:\n            raise KeyError(name)\n" * 8, 144),
    "JSON": ('{"type":"tool_result","is_error":false,"content":"3 passed in 0.12s"}\n' * 10, 220),
    "hex": ("3f2a9c1b 07de44a0 ffee0192 8c77d15e 00b1a2c3 9d8e7f60\n" * 10, 380),
    "figures": ("2026-11-18 20:36:46 1234567 0.98765 100000\n" * 10, 190),
    "Chinese": ("解析器丢掉了最后一行，所以测试失败。先读取日志，再修改一行代码，然后重新运行。" * 10, 240),  # noqa: RUF001
    "Japanese": ("最後の行が失われるため、テストは失敗します。ログを読んでからコードを直してください。" * 10, 210),
    "Korean": ("마지막 줄이 빠져서 테스트가 실패합니다. 로그를 읽고 코드를 고친 다음 다시 실행하세요. " * 10, 242),
    "Russian": ("Тест не проходит, потому что разбор теряет последнюю строку файла. " * 10, 161),
    "Greek": ("Η δοκιμή αποτυγχάνει επειδή χάνεται η τελευταία γραμμή του αρχείου. " * 10, 221),  # noqa: RUF001
    "Hindi": ("परीक्षण विफल होता है क्योंकि फ़ाइल की अंतिम पंक्ति खो जाती है। " * 10, 142),
    "accents": ("Größe, façade, élève: déjà vu à l'hôtel, où est la bibliothèque? " * 10, 182),
    "emoji": ("🙂🎉🚀👍🔥✅ " * 20, 121),
}
RUNS = {
    "rules of a log": (("=" * 78 + "\n") * 30, 60),
    "a table": (("|" + "---|" * 12 + "\n") * 30, 210),
    "blank lines": ("x\n" + "\n" * 500 + " " * 900 + "y", 24),
    "one letter": ("A" * 800, 50),
}
CHINESE = ("读取日志", "测试失败", "修改一行代码", "重新运行", "最后一行", "解析器")
ANY_URL = "http://127.0.0.1:1/v1"
QUICK = RetryPolicy(max_attempts=2, first_wait_s=0.005, longest_wait_s=0.01)


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
    settings = RequestSettings(max_tokens=draw.randint(48, 256))
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


def counted(text, *, prompt=None, completion=None):
    """What an answer of this text to a prompt of this text counts for, in nano-dollars; None is its bound."""
    enough = len(text.encode())
    usage = {"prompt_tokens": prompt or enough, "completion_tokens": completion or enough}
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    (teacher, *_) = teachers_of(TEACHERS, KEY, options_for(None, base_url=ANY_URL))
    request = RequestBuilder(teacher, RequestSettings(max_tokens=4000, fence=False)).build(
        [{"role": "user", "content": text}], None
    )
    reply = _parse_response(200, {}, json.dumps({"choices": [choice], "usage": usage}).encode(), request)
    assert isinstance(reply, Reply)
    return reply.cost_nano


@pytest.mark.parametrize("name", [*TEXTS, *RUNS])
def test_the_counts_of_real_tokenizers_are_credited(name):
    text, fewest = {**TEXTS, **RUNS}[name]
    assert counted(text, prompt=fewest, completion=fewest) == fewest * 5_000 + fewest * 25_000


@pytest.mark.parametrize("name", TEXTS)
def test_three_tenths_of_what_the_coarsest_tokenizer_makes_are_no_count(name):
    text, fewest = TEXTS[name]
    assert counted(text, prompt=int(fewest * 0.3)) is None
    assert counted(text, completion=int(fewest * 0.3)) is None


def a_run_in(words, tokenizer, share, number):
    """A replay of states and answers in these words, by a server that states a share of its tokens; ledger and cap."""
    draw = random.Random(f"{share} {number}")
    server = BillingServer(PRICES, tokenizer, fewer(share), draw, words=words)
    asked = list(states(10, tools=False))
    for state in asked:
        state["messages"] = [{"role": "user", "content": " ".join(draw.choices(words, k=200))}]
    settings = RequestSettings(max_tokens=256)
    cap = 2 * float(max(bounds(asked, TEACHERS, options_for(None, base_url=ANY_URL, settings=settings))))
    asyncio.run(replayed(server, asked, cap, settings=settings, max_concurrency=4))
    return server.total_usd, Decimal(str(cap))


@pytest.mark.parametrize(
    ("words", "tokenizer", "share"),
    [
        (("test", "file", "line", "read"), text_quarters, 0.7),
        (CHINESE, characters, 0.25),
    ],
    ids=["seven tenths of usual English", "a quarter of Chinese"],
)
def test_a_share_that_no_tokenizer_makes_keeps_the_ledger_within_the_cap(words, tokenizer, share):
    for number in range(3):
        billed, cap = a_run_in(words, tokenizer, share, number)
        assert 0 < billed <= cap


@pytest.mark.parametrize(
    ("words", "tokenizer", "share"),
    [
        (("read(x);", "a[i]=b;"), words_and_signs, 0.7),
        (CHINESE, characters, 0.7),
        (("test", "file", "line", "read"), characters, 0.3),
    ],
    ids=["seven tenths of code", "seven tenths of Chinese", "three tenths of a dense tokenizer"],
)
def test_a_plausible_lie_passes_the_cap_by_its_share_at_most(words, tokenizer, share, note):
    for number in range(3):
        billed, cap = a_run_in(words, tokenizer, share, number)
        assert billed <= cap / Decimal(str(share))
    note(f"a stated share of {share}: the ledger is {billed / cap:.0%} of the cap")


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
    asked, settings = list(states(10)), RequestSettings(max_tokens=256)
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
    with refusal(InputError, what="cap", expected=f"${cheapest:.6f}", fix="max_total_usd"):
        asyncio.run(ask(float(cheapest) * 0.99))
    assert server.num_requests == 0
    asyncio.run(ask(float(cheapest) * 1.01))
    assert server.num_requests > 0
    assert asyncio.run(replay_trace([], TEACHERS, 0.0, KEY)) == []
