"""Answers of endpoints are bounded by what they unpack to and by the time they take, whatever the endpoint does."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
import tracemalloc
import zlib

import pytest
from replay_pieces import TEACHERS, collect, options_for, states

from composer_replication.errors import InputError
from composer_replication.teacher_replay.ask_and_retry import RetryPolicy
from composer_replication.teacher_replay.endpoint import MAX_BODY
from composer_replication.teacher_replay.prices import list_models
from refusals import refusal

ONCE = RetryPolicy(max_attempts=1)
GOOD = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"cost": 0.0}}
MODELS = {"data": [{"id": "a/b", "pricing": {"prompt": "0.1", "completion": "0.1"}}]}


def bomb(num_bytes):
    """A gzip body of zeros, made a megabyte at a time."""
    packing = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    zeros = b"0" * 2**20
    return b"".join([*(packing.compress(zeros) for _ in range(num_bytes // 2**20)), packing.flush()])


def answering(body, *, encoding=None, pause_s=0.0, status=200, more="", asked=None):
    """A server that gives every request this body, a byte at a time where it pauses; `asked` notes each request."""

    async def answer(reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
            said = (f"content-encoding: {encoding}\r\n" if encoding else "") + more
            if asked is not None:
                asked.append(head)
            head = f"HTTP/1.1 {status} OK\r\nconnection: close\r\n{said}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode())
            if not pause_s:
                writer.write(body)
            for at in range(len(body) if pause_s else 0):
                writer.write(body[at : at + 1])
                await writer.drain()
                await asyncio.sleep(pause_s)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return answer


async def with_server(answer, work):
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        return await work(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")


def asked(answer, **changes):
    async def ask(base_url):
        options = options_for(None, **({"base_url": base_url, "patience": ONCE} | changes))
        found, _ = await collect(states(1, 1), options, teachers=TEACHERS[1:2])
        return found[0, 0]

    return asyncio.run(with_server(answer, ask))


def listed(answer, timeout_s=5.0):
    return asyncio.run(with_server(answer, lambda base_url: list_models(base_url, None, timeout_s=timeout_s)))


def peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_unpacks_to_too_much_is_not_unpacked(note):
    body = bomb(128 * 2**20)
    answer = answering(body, encoding="gzip")
    errors = []

    def both():
        errors.append(asked(answer)["error"])
        with refusal(InputError, what="/v1/models", got=f"{MAX_BODY} bytes"):
            listed(answer)

    peak = peak_of(both)
    note(f"{len(body):,} bytes of gzip for 134,217,728: at most {peak:,} bytes were held")
    assert [f"{MAX_BODY} bytes" in error for error in errors] == [True]
    assert peak < 4 * MAX_BODY


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "zstd"])
def test_an_encoding_that_was_not_asked_for_is_not_unpacked(encoding):
    answer = answering(gzip.compress(json.dumps(GOOD).encode()), encoding=encoding)
    assert repr(encoding) in asked(answer)["error"]


def test_gzip_is_read_and_what_breaks_off_is_no_answer():
    body = gzip.compress(json.dumps(GOOD).encode())
    assert asked(answering(body, encoding="gzip"))["response_text"] == "hi"
    assert [each.slug for each in listed(answering(gzip.compress(json.dumps(MODELS).encode()), encoding="gzip"))] == [
        "a/b"
    ]
    broken = [asked(answering(each, encoding="gzip")) for each in (body[:-9], b"\x1f\x8b no gzip at all")]
    assert [each["response_text"] for each in broken] == [None, None]
    assert len({each["error"] for each in broken} - {None}) == 2


def test_an_answer_that_drips_ends_with_the_time_for_all_of_it():
    drip = answering(b" " * 400, pause_s=0.02)  # 8 s; each byte comes in time
    begin = time.monotonic()
    assert "0.5 s" in asked(drip, timeout_s=0.5)["error"]
    with refusal(InputError, what="/v1/models", got="0.5 s"):
        listed(drip, timeout_s=0.5)
    assert time.monotonic() - begin < 5


ENDED = json.dumps(GOOD).encode()
ERROR = json.dumps({"error": {"code": 401, "message": "no such key"}}).encode()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(ENDED[:40]) + gzip.compress(b"") + gzip.compress(ENDED[40:])),
        ("gzip", gzip.compress(ENDED) + b"\0" * 30),
        ("gzip", gzip.compress(ENDED) + b"\n"),
        ("deflate", zlib.compress(ENDED)),
        ("deflate", zlib.compress(ENDED, wbits=-15)),
        ("identity", ENDED),
    ],
    ids=["members", "zeros behind", "a line end behind", "zlib", "raw deflate", "as it is"],
)
@pytest.mark.parametrize("pause_s", [0.0, 0.0001])  # a byte at a time: members and headers lie across its parts
def test_every_way_to_pack_an_answer_is_read_whole(encoding, body, pause_s):
    assert asked(answering(body, encoding=encoding, pause_s=pause_s))["response_text"] == "hi"


def test_members_share_one_room():
    half = gzip.compress(b"0" * (MAX_BODY // 2 + 1))
    assert f"{MAX_BODY} bytes" in asked(answering(half * 2, encoding="gzip"))["error"]
    assert re.search(r"^HTTP 200\b.*\bJSON\b", asked(answering(half, encoding="gzip"))["error"])


@pytest.mark.parametrize(
    ("status", "encoding", "body"),
    [
        (401, "br", b"\x0b\x02\x80"),
        (402, "gzip", ERROR),  # said to be packed, and is not
        (429, "gzip", gzip.compress(ERROR)[:-4]),
        (404, "gzip", gzip.compress(b"0" * (MAX_BODY + 1))),
        (400, "gzip", b""),
    ],
    ids=["another encoding", "not packed", "breaks off", "too long", "empty"],
)
def test_a_refusal_is_one_by_its_status_whatever_its_body_is(status, encoding, body):
    """Nothing is billed for a request that was refused, and a wait that was asked for is kept."""
    seen = []

    async def ask(base_url):
        options = options_for(None, base_url=base_url, patience=RetryPolicy(2, 0.001, 5.0))
        return await collect(states(1, 1), options, teachers=TEACHERS[1:2])

    answer = answering(body, encoding=encoding, status=status, more="retry-after: 0.3\r\n", asked=seen)
    begin = time.monotonic()
    found, report = asyncio.run(with_server(answer, ask))
    assert found[0, 0]["error"].startswith(f"HTTP {status}")
    assert (report.unknown_billed_usd, report.num_unknown_billed) == (0.0, 0)
    assert len(seen) == (2 if status == 429 else 1)
    assert (time.monotonic() - begin >= 0.3) >= (status == 429)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("br", b"\x0b\x02\x80"), ("gzip", b"no gzip"), ("gzip", gzip.compress(b"0" * (MAX_BODY + 1)))],
    ids=["another encoding", "not packed", "too long"],
)
def test_an_answer_that_came_whole_and_cannot_be_read_is_paid_for_once(encoding, body):
    seen = []
    answer = answering(body, encoding=encoding, asked=seen)
    found = asked(answer, patience=RetryPolicy(3, 0.001, 0.01))
    assert found["response_text"] is None
    assert not found["error"].startswith("HTTP")
    assert len(seen) == 1


def test_an_empty_body_is_empty_in_every_encoding():
    (error,) = {asked(answering(b"", encoding=each))["error"] for each in (None, "gzip", "deflate")}
    assert re.search(r"^HTTP 200\b.*\bbody\b", error)
