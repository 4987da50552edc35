"""An endpoint that refuses the key or is not there ends a replay after a few requests; one that stumbles does not."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import socket
import time

import pytest
from replay_pieces import KEY, TEACHERS, collect, options_for, states

from composer_replication.teacher_replay import replay_trace
from composer_replication.teacher_replay.ask_and_retry import RetryPolicy
from composer_replication.teacher_replay.endpoint import FailedRequest, _parse_response
from composer_replication.teacher_replay.requests import RequestBuilder, RequestSettings
from composer_replication.teacher_replay.teachers import read_teachers
from fault_server import FaultServer, Reply

ONE = TEACHERS[1:2]
NOWHERE = "http://127.0.0.1:9/v1"
DENIED = Reply(status=401, headers={}, body={"error": {"code": 401, "message": "No auth credentials found"}})


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_a_wrong_key_is_found_out_by_three_requests(concurrency):
    with FaultServer(latency_s=(0.02, 0.02)) as server:
        server.script([DENIED] * 200)
        named = [{**TEACHERS[1], "api_key_env": "MY_KEY"}]
        options = options_for(server, max_concurrency=concurrency, environment={"MY_KEY": KEY})
        found, report = run(collect(states(40, 2), options, api_key=None, teachers=named))
        assert server.requests()["num_chat"] == 3
    assert len(found) == 80
    assert sum(result["error"].startswith("HTTP 401") for result in found.values()) == 3
    assert sum(result["error"].startswith("stopped: ") for result in found.values()) == 77
    assert report.counts["not sent after the stop"] == 77
    assert server.base_url in report.given_up
    assert "MY_KEY" in report.given_up
    assert KEY not in report.given_up


def test_the_list_of_replay_trace_says_which_calls_were_kept_back_and_why(caplog):
    with FaultServer(latency_s=(0.02, 0.02)) as server:
        server.script([DENIED] * 200)
        found = run(replay_trace(list(states(4, 2)), ONE, 5.0, KEY, options=options_for(server)))
    assert [each["state_id"] for each in found] == [state["state_id"] for state in states(4, 2)]
    kept_back = [each["error"] for each in found if not each["error"].startswith("HTTP 401")]
    assert len(kept_back) == 5
    assert all(re.search(rf"^stopped: {re.escape(server.base_url)}\b.*\b3\b", error) for error in kept_back)
    assert re.search(rf"\b5\b.*\b8\b.*{re.escape(server.base_url)}", caplog.text)


def test_where_no_key_was_sent_the_sentence_says_so():
    with FaultServer(require_auth=True) as server:
        options = options_for(server, environment={"OPENROUTER_API_KEY": KEY})
        _, report = run(collect(states(5), options, api_key=None, teachers=ONE))
        assert server.requests()["num_chat"] == 3
    assert server.base_url in report.given_up
    assert "api_key_env" in report.given_up
    assert "OPENROUTER_API_KEY" not in report.given_up


@pytest.mark.parametrize("fault", ["out_of_credit", "key_limit"])
def test_credit_that_is_gone_ends_it_too(fault):
    with FaultServer(faults={fault: 1.0}) as server:
        _, report = run(collect(states(20), options_for(server)))
        assert server.requests()["num_chat"] == 3
    assert report.given_up


def test_credit_that_runs_out_on_the_way_keeps_what_was_answered(tmp_path):
    with FaultServer() as server:
        options = options_for(server, cache=tmp_path / "s.sqlite", max_concurrency=4)
        run(collect(states(4, 1), options, teachers=ONE))
        server.script([Reply(fault="ok")] * 2 + [Reply(fault="out_of_credit")] * 100)
        found, report = run(collect(states(60, 1), options, teachers=ONE))
        assert 4 + 2 + 8 <= server.requests()["num_chat"] <= 4 + 2 + 8 + 4
    assert "HTTP 402" in report.given_up
    assert "credit" in report.given_up
    assert sum(result["error"] is None for result in found.values()) == 6


def test_what_is_in_the_store_is_told_although_the_key_is_wrong(tmp_path):
    with FaultServer() as server:
        options = options_for(server, cache=tmp_path / "s.sqlite")
        run(collect(states(5), options))
        server.script([DENIED] * 200)
        found, report = run(collect(states(30), options))
    assert report.given_up
    assert sum(result["error"] is None for result in found.values()) == 45


def test_an_endpoint_that_is_not_there_is_given_up_in_seconds():
    with FaultServer() as server:
        options = options_for(server, base_url=NOWHERE, patience=RetryPolicy())
        begin = time.monotonic()
        found, report = run(collect(states(4, 1), options, teachers=ONE))
        assert time.monotonic() - begin < 12  # it was a minute
    assert len(found) == 4
    assert NOWHERE in report.given_up
    assert "ConnectError" in report.given_up
    assert (report.spent_usd, report.unknown_billed_usd) == (0.0, 0.0)


def test_a_server_that_starts_late_is_waited_for():
    message = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"cost": 0.0}}
    body = json.dumps(message).encode()

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    importlib.import_module("httpx")  # on a busy machine its import alone may outlast the wait below

    async def start_late(place):
        options = options_for(
            None, base_url=f"http://127.0.0.1:{place.getsockname()[1]}/v1", patience=RetryPolicy(first_wait_s=0.2)
        )
        asked = asyncio.create_task(collect(states(2), options, teachers=ONE))
        await asyncio.sleep(0.6)
        async with await asyncio.start_server(answer, sock=place):
            return await asked

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))  # until it listens, connections are refused
        found, report = run(start_late(place))
    assert report.given_up is None
    assert [number for name, number in report.counts.items() if "connection" in name and number] != []
    assert all(result["error"] is None for result in found.values())


def test_stumbling_is_no_reason_to_stop():
    with FaultServer(retry_after_s=0.02) as server:
        first = ["http_500", "http_503", "rate_limit_bare", "reset", "closed", "truncated", "invalid_json"]
        server.script([Reply(fault=name) for name in first] * 2)
        found, report = run(collect(states(10), options_for(server)))
    assert report.given_up is None
    assert all(result["error"] is None for result in found.values())


def test_single_refusals_between_answers_are_single_errors():
    with FaultServer() as server:
        server.script([Reply(fault="ok"), *[Reply(fault="key_limit"), Reply(fault="ok")] * 20])
        found, report = run(collect(states(41, 1), options_for(server, max_concurrency=1), teachers=ONE))
    assert report.given_up is None
    assert sum(result["error"] is not None for result in found.values()) == 20


def test_a_text_that_a_moderator_refused_is_one_call_s_matter():
    (teacher,) = read_teachers(ONE, environment={}, api_key=KEY)
    request = RequestBuilder(teacher, RequestSettings()).build([{"role": "user", "content": "Go on."}], None)
    body = b'{"error": {"code": 403, "message": "flagged", "metadata": {"reasons": ["x"], "flagged_input": "y"}}}'
    moderated = _parse_response(403, {}, body, request)
    assert isinstance(moderated, FailedRequest)
    assert moderated.scope == "call"
    assert _parse_response(403, {}, b'{"error": {"message": "bad key"}}', request).scope == "account"
    in_flight = b'{"error": {"metadata": {"limit_source": "openrouter_in_flight_budget"}}}'
    assert _parse_response(402, {}, in_flight, request).scope == "call"
