"""Each fault of the fault server sends the bytes, bills the amount and ends the connection as it claims."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import pytest
from fault_client import RawReply, ask, chat_body, request_bytes

from fault_server import BY_NAME, FAULTS, FaultServer, Reply, fingerprint, group

WAIT_S = 0.12


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(seed=3, slow_s=WAIT_S, delay_s=WAIT_S, billed_share=1.0, retry_after_s=7) as running:
        yield running


def meet(server: FaultServer, fault: str, **fields) -> RawReply:
    body = chat_body(f"meet {fault}", **fields)
    server.script([Reply(fault=fault)], fingerprint=fingerprint(body))
    return ask(server, body)


def answer_to(server: FaultServer, fault: str) -> dict:
    """The good answer to the same question."""
    return ask(server, chat_body(f"meet {fault}")).json()


def test_every_fault_has_its_bytes_tested_here():
    tested = {*STATUSES, *BROKEN, *RUBBISH, *BROKEN_OFF, *group("answer"), "content_null", "slow", "finish_filter"}
    assert tested | {"finish_length"} == set(BY_NAME)


STATUSES = {
    "in_flight_budget": 402,
    "timeout_408": 408,
    "rate_limit_seconds": 429,
    "rate_limit_date": 429,
    "rate_limit_bare": 429,
    "http_500": 500,
    "http_502": 502,
    "http_503": 503,
    "http_503_after": 503,
    "http_529": 529,
    "out_of_credit": 402,
    "key_limit": 403,
}
IN_SECONDS = {"in_flight_budget", "rate_limit_seconds", "http_503_after"}


@pytest.mark.parametrize("fault", STATUSES)
def test_an_error_status_with_or_without_retry_after(server, fault):
    reply = meet(server, fault)
    assert reply.status == STATUSES[fault]
    assert reply.is_whole
    if fault not in ("http_502", "http_503"):  # a gateway's own pages are no JSON
        assert reply.json()["error"]["code"] == STATUSES[fault]
    if fault in IN_SECONDS:
        assert reply.headers["retry-after"] == "7"
    elif fault == "rate_limit_date":
        wait_s = parsedate_to_datetime(reply.headers["retry-after"]).timestamp() - time.time()
        assert 5 < wait_s <= 8
        assert reply.headers["x-ratelimit-remaining"] == "0"
    else:
        assert "retry-after" not in reply.headers


def test_the_two_meanings_of_402_and_the_budget_of_a_key_differ_by_limit_source(server):
    sources = {
        fault: meet(server, fault).json()["error"].get("metadata", {}).get("limit_source")
        for fault in ("out_of_credit", "in_flight_budget", "key_limit")
    }
    assert sources["out_of_credit"] is None
    assert sources["in_flight_budget"] == "openrouter_in_flight_budget"
    assert sources["key_limit"]


BROKEN = {"reset": (0, "ConnectionResetError"), "closed": (0, None), "truncated": (200, None)} | {
    "truncated_chunked": (200, None)
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_connection_breaks_where_it_should(server, fault):
    reply = meet(server, fault)
    assert (reply.status, reply.error) == BROKEN[fault]
    if reply.data:
        assert reply.headers["x-generation-id"]
        assert len(reply.body) > 50
        assert not reply.is_whole


RUBBISH = {"empty_body", "invalid_json", "json_not_object", "empty_choices"}


@pytest.mark.parametrize("fault", sorted(RUBBISH))
def test_a_whole_reply_that_holds_no_answer(server, fault):
    reply = meet(server, fault)
    assert reply.status == 200
    assert reply.is_whole
    if fault == "empty_body":
        assert reply.body == b""
    elif fault == "invalid_json":
        with pytest.raises(json.JSONDecodeError):
            reply.json()
    elif fault == "json_not_object":
        assert isinstance(reply.json(), list)
    else:
        assert reply.json()["choices"] == []
        assert reply.json()["usage"]["cost"] > 0


BROKEN_OFF = {"error_body", "error_beside_choices", "choice_error", "finish_error"}


@pytest.mark.parametrize("fault", sorted(BROKEN_OFF))
def test_an_error_inside_http_200(server, fault):
    reply = meet(server, fault)
    body = reply.json()
    assert reply.status == 200
    assert ("error" in body) == (fault in ("error_body", "error_beside_choices"))
    if fault == "error_body":
        assert set(body) == {"error"}
        assert body["error"]["code"] == 502
        return
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "error"
    assert ("error" in choice) == (fault == "choice_error")
    whole = answer_to(server, fault)["choices"][0]["message"]["content"]
    assert whole.startswith(choice["message"]["content"])
    assert whole != choice["message"]["content"]


@pytest.mark.parametrize(("fault", "reason"), [("finish_length", "length"), ("finish_filter", "content_filter")])
def test_an_answer_that_is_not_whole_is_billed(server, fault, reason):
    before = len(server.ledger())
    body = meet(server, fault, max_tokens=500).json()
    assert body["choices"][0]["finish_reason"] == reason
    assert (body["usage"]["completion_tokens"] == 500) == (fault == "finish_length")
    (record,) = server.ledger(since=before)
    assert record.outcome == fault
    assert round(body["usage"]["cost"] * 1e12) == record.cost_pico


def test_a_message_without_content(server):
    (choice,) = meet(server, "content_null").json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": None}
    assert choice["finish_reason"] == "stop"


SAME_JSON = {"delayed_headers", "dribble", "chunked", "padded", "idle_close", "overcharge", "extra_fields"}


@pytest.mark.parametrize("fault", group("answer"))
def test_an_odd_answer_is_the_good_answer_in_another_form(server, fault):
    before = len(server.ledger())
    reply = meet(server, fault)
    data = reply.body
    if fault == "chunked":
        data = b"".join(data.split(b"\r\n")[1:-3:2])
    body, good = json.loads(data), answer_to(server, fault)
    found, expected = body["choices"][0]["message"], good["choices"][0]["message"]
    assert {name: found[name] for name in expected} == expected
    assert ("x_unknown" in found) == (fault == "extra_fields")
    assert reply.is_whole
    if fault in ("delayed_headers", "dribble"):
        assert reply.elapsed_s > WAIT_S
    assert reply.body.startswith(b"\n  ") == (fault == "padded")
    assert ("usage" in body) == (fault != "usage_missing")
    record = server.ledger(since=before)[0]
    assert record.outcome == fault
    assert record.is_reported == (fault in SAME_JSON)
    if record.is_reported:
        assert round(body["usage"]["cost"] * 1e12) == record.cost_pico


def test_a_missing_and_a_malformed_cost(server):
    assert "cost" not in meet(server, "cost_missing").json()["usage"]
    costs = []
    for at in range(40):
        body = chat_body(f"cost {at}")
        server.script([Reply(fault="cost_malformed")], fingerprint=fingerprint(body))
        costs.append(ask(server, body).json()["usage"]["cost"])
    assert {str(cost) for cost in costs} == {"None", "-1", "True", "free", "inf"}


def test_an_overcharge_passes_the_bound_by_bytes_and_is_billed(server):
    before = len(server.ledger())
    body = chat_body("meet overcharge")
    reported = meet(server, "overcharge").json()["usage"]["cost"]
    bound = (len(json.dumps(body)) + body["max_tokens"]) * 10.0 / 1e6
    assert reported > bound
    assert float(server.ledger(since=before)[0].cost_usd) == reported


def test_a_slow_reply_is_billed_when_asked_for_and_unbilled_it_ends_as_408(server):
    before = len(server.ledger())
    body = chat_body("slow")
    server.script([Reply(fault="slow", billed=True), Reply(fault="slow", billed=False)], fingerprint=fingerprint(body))
    billed, unbilled = ask(server, body), ask(server, body)
    assert (billed.status, unbilled.status) == (200, 408)
    assert min(billed.elapsed_s, unbilled.elapsed_s) > WAIT_S
    assert [record.attempt for record in server.ledger(since=before)] == [0]


def test_an_unbilled_fault_reports_no_cost(server):
    body = chat_body("unbilled")
    server.script([Reply(fault="finish_error", billed=False)], fingerprint=fingerprint(body))
    before = len(server.ledger())
    assert ask(server, body).json()["usage"]["cost"] == 0
    assert server.ledger(since=before) == []


def test_faults_are_billed_as_their_table_says(server):
    before = len(server.ledger())
    for fault in FAULTS:
        meet(server, fault.name)
    billed = {record.outcome for record in server.ledger(since=before)}
    assert billed == {fault.name for fault in FAULTS if fault.billed != "never"}  # billed_share is 1 here


def test_a_connection_kept_alive_is_closed_under_the_next_request():
    with FaultServer() as server:
        server.script([Reply(fault="idle_close")])
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(request_bytes(chat_body("first")))
            assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
            sock.sendall(request_bytes(chat_body("second")))
            with pytest.raises(ConnectionResetError):
                sock.recv(65536)
        seen = server.requests()
        assert seen["idle_closed"] == 1
        assert seen["outcomes"] == {"idle_close": 1}
        assert len(server.ledger()) == 1
