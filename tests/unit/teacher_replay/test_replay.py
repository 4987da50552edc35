"""Replays against a server that fails in every known way, and keeps its own books."""

from __future__ import annotations

import asyncio
import os
import random
import re
from decimal import Decimal

import pytest
from replay_pieces import KEY, TEACHERS, collect, options_for, states

from composer_replication.errors import InputError
from composer_replication.pairs.export import replay_and_normalize_trace
from composer_replication.teacher_replay import replay_trace
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import ReplayOptions
from composer_replication.teacher_replay.teachers import DEFAULT_TEACHERS, MissingKeyError, Teacher, read_teachers
from fault_server import FAULTS, FaultServer, Reply, evenly, group
from refusals import refusal

EVERY_FAULT = evenly(0.2, [fault.name for fault in FAULTS if fault.name != "overcharge"])
NUM_CAPS = 100 if os.environ.get("CRF_TEST_PROFILE") == "full" else 10
QUICK = {"retry_after_s": 0.05, "slow_s": 4.0}


def run(coroutine):
    return asyncio.run(coroutine)


def test_every_teacher_answers_at_every_state_in_order():
    prices = {each["slug"]: (each["input_per_mtok"], each["output_per_mtok"]) for each in TEACHERS}
    with FaultServer(prices=prices) as server:
        asked = list(states(4))
        options = options_for(server, order="in_order")
        found = run(replay_trace(asked, TEACHERS, 50.0, KEY, options=options))
        assert [(r["state_id"], r["teacher_slug"]) for r in found] == [
            (state["state_id"], teacher["slug"]) for state in asked for teacher in TEACHERS
        ]
        for result in found:
            assert result["error"] is None
            assert result["response_text"]
            assert result["cost_usd"] > 0
            assert result["prompt_tokens"] > 0
        spent = sum(Decimal(str(result["cost_usd"])) for result in found)
        assert abs(spent - server.total_usd()) < Decimal("1e-6")
        assert server.out_of_order() == []
        assert server.requests()["without_auth"] == 0


def test_what_was_answered_is_never_asked_again(tmp_path):
    with FaultServer() as server:
        options = options_for(server, cache=tmp_path / "s.sqlite")
        first, _ = run(collect(states(5), options))
        before = server.requests()["num_chat"]
        again, report = run(collect(states(5), options))
        assert server.requests()["num_chat"] == before
        assert report.counts == {"cached": 45}
        strip = {"is_cached"}
        assert {p: {k: v for k, v in r.items() if k not in strip} for p, r in first.items()} == {
            p: {k: v for k, v in r.items() if k not in strip} for p, r in again.items()
        }
        longer, _ = run(collect(states(6), options))
        assert server.requests()["num_chat"] == before + 9
        assert len(longer) == 54


@pytest.mark.parametrize("change", ["max_tokens", "tools", "message", "base_url"])
def test_another_request_is_another_question(tmp_path, change):
    with FaultServer() as server:
        options = options_for(server, cache=tmp_path / "s.sqlite")
        run(collect(states(1, 1), options))
        before = server.requests()["num_chat"]
        if change == "max_tokens":
            options = options_for(server, cache=options.cache, settings=options.settings._replace(max_tokens=65))
        elif change == "base_url":
            options = options_for(server, cache=options.cache, base_url=server.base_url.replace("/v1", "/api/v1"))
        asked = list(states(1, 1, tools=change != "tools", size=208 if change == "message" else 200))
        run(collect(asked, options))
        assert server.requests()["num_chat"] == before + 3


def test_faults_of_every_kind_leave_a_result_or_a_named_error_and_the_books_below_the_cap(note):
    with FaultServer(faults=EVERY_FAULT, latency_s=(0.0, 0.01), seed=3, **QUICK) as server:
        found, report = run(collect(states(60), options_for(server, max_concurrency=64, timeout_s=1.0), cap=30.0))
        assert len(found) == 540
        for result in found.values():
            assert (result["response_text"] is None) == (result["error"] is not None)
        total = server.total_usd()
        assert total <= Decimal("30")
        failures = {name: number for name, number in report.counts.items() if name.startswith("failure")}
        errors = sum(result["error"] is not None for result in found.values())
        note(f"540 calls at 20% faults: {errors} errors, {sum(failures.values())} failed attempts, ${total:.2f} billed")
        assert len(failures) >= 8
        assert report.spent_usd + report.unknown_billed_usd >= float(total)


def test_no_cap_is_ever_passed(note):
    draw = random.Random(5)
    refused = 0
    with FaultServer(faults=EVERY_FAULT, bytes_per_token=1.0, seed=9, billed_share=1.0, **QUICK) as server:
        for _ in range(NUM_CAPS):
            cap = draw.choice([0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.3), draw.uniform(0, 2.0)])
            server.reset()
            options = options_for(server, max_concurrency=64, timeout_s=0.5)
            found, _ = run(collect(states(20), options, cap=cap))
            assert server.total_usd() <= Decimal(str(cap))
            assert len(found) == 180
            refused += sum((result["error"] or "").startswith("budget: ") for result in found.values())
    note(f"{NUM_CAPS} random caps (make test-full: 100) x 60 states x 3 teachers: none passed, {refused} calls refused")
    assert refused > 10 * NUM_CAPS


def test_an_overcharge_stops_all_sending_and_is_named(tmp_path):
    with FaultServer() as server:
        server.script([Reply(fault="overcharge")])
        options = options_for(server, cache=tmp_path / "s.sqlite", max_concurrency=1)
        found, report = run(collect(states(3), options))
        assert report.stopped is not None
        took, bound = re.findall(r"\$(\d+\.\d+)", report.stopped)
        assert float(took) > float(bound)
        assert server.requests()["num_chat"] == 1
        assert sum((result["error"] or "").startswith("stopped: ") for result in found.values()) == 26
        again, _ = run(collect(states(3), options))
        assert server.requests()["num_chat"] == 1
        assert len(again) == 27
        with TeacherStore(options.cache) as store:
            store.resume_after_overrun()
        run(collect(states(3), options))
        assert server.requests()["num_chat"] == 27


SINGLE = {
    "error_body": ["error", "HTTP 200"],
    "choice_error": ["error", "HTTP 200"],
    "finish_error": ["finish_reason error"],
    "timeout_408": ["HTTP 408"],
    "rate_limit_seconds": ["HTTP 429"],
    "rate_limit_date": ["HTTP 429"],
    "rate_limit_bare": ["HTTP 429"],
    "in_flight_budget": ["HTTP 402"],
    "http_500": ["HTTP 500"],
    "http_502": ["HTTP 502"],
    "http_503_after": ["HTTP 503"],
    "http_529": ["HTTP 529"],
    "reset": ["connection"],
    "closed": ["connection"],
    "truncated": ["connection"],
    "truncated_chunked": ["connection"],
    "empty_body": ["HTTP 200", "body"],
    "invalid_json": ["HTTP 200", "JSON"],
    "json_not_object": ["HTTP 200", "JSON"],
    "empty_choices": ["HTTP 200", "message"],
    "content_null": ["HTTP 200", "message"],
    "slow": ["2 s"],
}


@pytest.mark.parametrize("fault", SINGLE)
def test_a_fault_that_passes_is_tried_again_and_named_in_the_counts(fault):
    with FaultServer(**QUICK) as server:
        server.script([Reply(fault=fault)])
        options = options_for(server, max_concurrency=1, timeout_s=2.0)  # a busy machine answers late, too
        found, report = run(collect(states(1, 1), options, teachers=TEACHERS[:1]))
        assert found[0, 0]["error"] is None
        assert found[0, 0]["attempts"] == 2
        ((failure, number),) = ((name, number) for name, number in report.counts.items() if name.startswith("failure"))
        assert [part for part in SINGLE[fault] if part not in failure] == []
        assert number == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("out_of_credit", "HTTP 402"),
        ("key_limit", "HTTP 403"),
        ("finish_length", "finish_reason length"),
        ("finish_filter", "finish_reason content_filter"),
    ],
)
def test_a_fault_that_stays_is_not_tried_again(fault, said):
    with FaultServer(**QUICK) as server:
        server.script([Reply(fault=fault)])
        found, _ = run(collect(states(1, 1), options_for(server), teachers=TEACHERS[:1]))
        assert found[0, 0]["error"].startswith(said)
        assert found[0, 0]["response_text"] is None
        assert server.requests()["num_chat"] == 1


@pytest.mark.parametrize("fault", [name for name in group("answer") if name != "overcharge"])
def test_an_odd_reply_is_a_reply(fault):
    with FaultServer(**QUICK) as server:
        server.script([Reply(fault=fault)])
        found, report = run(collect(states(1, 1), options_for(server), teachers=TEACHERS[:1]))
        assert found[0, 0]["error"] is None
        assert report.spent_usd >= float(server.total_usd())


def test_patience_ends():
    with FaultServer(faults={"http_500": 1.0}) as server:
        found, report = run(collect(states(1, 1), options_for(server), teachers=TEACHERS[:1]))
        assert found[0, 0]["error"].startswith("HTTP 500")
        assert re.search(r"\b6\b", found[0, 0]["error"])
        assert report.counts["attempts"] == 6
        assert report.num_unknown_billed == 6


def test_a_wait_longer_than_our_patience_is_not_waited_for():
    with FaultServer(retry_after_s=3600) as server:
        server.script([Reply(fault="rate_limit_seconds")])
        found, _ = run(collect(states(1, 1), options_for(server), teachers=TEACHERS[:1]))
        assert found[0, 0]["error"].startswith("HTTP 429")


def test_a_server_that_is_not_there_is_said_and_costs_nothing():
    with FaultServer() as server:
        options = options_for(server, base_url="http://127.0.0.1:9/v1")
        found, report = run(collect(states(1, 1), options, teachers=TEACHERS[:1]))
    assert "connection" in found[0, 0]["error"]
    assert (report.spent_usd, report.unknown_billed_usd) == (0.0, 0.0)


def test_a_session_that_asks_the_same_twice_at_once_sends_it_once():
    with FaultServer(latency_s=(0.05, 0.05)) as server:
        same = list(states(1, 1)) * 8
        for number, state in enumerate(same := [dict(each) for each in same]):
            state["session_id"] = f"other {number}"
        found, _ = run(collect(same, options_for(server), teachers=TEACHERS[:1]))
        assert len(found) == 8
        assert server.requests()["num_chat"] == 1


def test_the_key_is_in_the_header_and_nowhere_else(tmp_path):
    with FaultServer(**QUICK) as server:
        echo = {"error": {"code": 400, "message": f"bad key Bearer {KEY} given"}}
        server.script([Reply(status=400, headers={}, body=echo)])
        options = options_for(server, cache=tmp_path / "s.sqlite")
        found, report = run(collect(states(2), options))
        assert server.requests()["without_auth"] == 0
    texts = [repr(found), repr(report), repr(options)]
    texts += [file.read_bytes().decode("utf-8", "replace") for file in tmp_path.iterdir()]
    teachers = read_teachers(TEACHERS, environment={}, api_key=KEY)
    assert all(isinstance(teacher, Teacher) for teacher in teachers)
    assert KEY not in "".join([*texts, repr(teachers), str(teachers)])
    assert "<key>" in repr(found)


def test_a_key_goes_only_where_it_was_meant_to(monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", KEY)
    with FaultServer() as server:
        options = options_for(server, environment={"OPENROUTER_API_KEY": KEY, "OTHER": "other-key-of-ours"})
        run(collect(states(1, 1), options, api_key=None, teachers=TEACHERS[:1]))
        assert server.requests()["with_auth"] == 0
        named = [{**TEACHERS[0], "api_key_env": "OTHER"}]
        run(collect(states(2, 1), options, api_key=None, teachers=named))
        assert server.requests()["with_auth"] == 2


def test_without_a_key_for_openrouter_nothing_is_sent():
    with pytest.raises(RuntimeError, match="OPENROUTER_API_KEY"):
        run(replay_trace(list(states(1)), TEACHERS, options=ReplayOptions(environment={})))


def test_without_a_key_the_key_s_error_comes_before_that_of_a_price():
    for teachers in (DEFAULT_TEACHERS, [{"slug": "a/b"}]):
        with pytest.raises(MissingKeyError, match="OPENROUTER_API_KEY"):
            run(replay_trace(list(states(1)), teachers, options=ReplayOptions(environment={})))


def test_the_default_teachers_can_be_asked_as_the_guide_shows():
    with FaultServer() as server:
        options = options_for(server)
        found = run(replay_trace(list(states(2, 1)), max_total_usd=10.0, api_key=KEY, options=options))
        given = {"states": list(states(2, 1)), "api_key": KEY, "options": options}
        actions, _ = run(replay_and_normalize_trace(**given))
    for results in (found, actions):
        assert [result["teacher_slug"] for result in results] == [each["slug"] for each in DEFAULT_TEACHERS] * 2
        assert all(result["error"] is None and result["cost_usd"] > 0 for result in results)


def test_fewer_teachers_than_a_gate_needs_are_refused():
    options = ReplayOptions(gate="exact", agreement_threshold=3, environment={})
    with refusal(InputError, what="threshold", got="3", fix="agreement_threshold"):
        run(replay_trace(list(states(1)), TEACHERS[:2], api_key=KEY, options=options))


def test_a_teacher_without_a_price_cannot_be_asked_under_a_cap():
    with refusal(InputError, what="a/b", got="none", fix="`crf teachers`"):
        run(replay_trace(list(states(1)), [{"slug": "a/b"}], api_key=KEY))


def test_plain_endpoints_get_no_fields_of_openrouter():
    with FaultServer(dialect="plain") as server:
        found, report = run(collect(states(1), options_for(server), teachers=TEACHERS[1:2]))
        assert all(result["error"] is None for result in found.values())
        assert report.spent_usd >= float(server.total_usd())
