"""How often a step goes through the conversations: counted in the reader, not in a log."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from claude_records import Log, call, text
from replay_pieces import KEY, TEACHERS, options_for
from run_pieces import ingested

from composer_replication.cli.pairs import write_pairs
from composer_replication.cli.replay import plan_replay, send_requests
from composer_replication.cli.sites import write_sites
from composer_replication.config import PairsConfig, ReplayConfig, SitesConfig
from composer_replication.runs.artefacts import READ_COUNTS
from composer_replication.teacher_replay.replay import teachers_of
from composer_replication.teacher_replay.requests import RequestBuilder
from fault_server import FaultServer


@pytest.fixture
def run(tmp_path):
    """Three sessions, in each of them a file that is not there and a last word."""
    for number in range(3):
        log = Log(session=f"s-{number}")
        log.user(f"task {number}")
        log.assistant("m1", call("c1", "Read", file_path="/repo/a.py"))
        log.result("c1", "<tool_use_error>File does not exist.</tool_use_error>", is_error=True)
        log.assistant("m2", text("Done."))
        (tmp_path / f"s-{number}.jsonl").write_bytes(log.lines())
    return ingested(tmp_path / "run", *sorted(tmp_path.glob("s-*.jsonl")))[0]


@pytest.fixture
def passes():
    """What was gone through since the test began."""
    before = Counter(READ_COUNTS)
    return lambda: Counter(READ_COUNTS) - before


@pytest.fixture
def built(monkeypatch):
    """How often each request was built, by its key."""
    counts, build = Counter(), RequestBuilder.build

    def counted(self, *given, **named):
        request = build(self, *given, **named)
        counts[request.key] += 1
        return request

    monkeypatch.setattr(RequestBuilder, "build", counted)
    return counts


def replayed(run, server, **section):
    options = options_for(server, cache=run.path("teacher_cache"))
    teachers = teachers_of(TEACHERS, KEY, options)
    plan = plan_replay(ReplayConfig(**({"states": "all"} | section)), run, teachers=teachers, options=options)
    return asyncio.run(send_requests(plan))


@pytest.mark.parametrize(("states", "num_states"), [("all", 6), ("failed", 3), ("sites", 3)])
@pytest.mark.parametrize("has_sites", [False, True])
def test_a_replay_reads_the_conversations_twice_and_builds_each_request_twice(
    run, passes, built, states, num_states, has_sites
):
    if has_sites or states == "sites":
        write_sites(SitesConfig(), run)
    before = passes()
    with FaultServer() as server:
        done = replayed(run, server, states=states)
    assert done.counts["states"] == num_states
    assert done.counts["calls"] == num_states * len(TEACHERS)
    made = passes() - before
    assert made["decoded conversations"] == 2
    assert made["hashed conversations"] == 1
    assert set(built.values()) == {2}


def test_sites_and_pairs_read_the_conversations_once(run, passes):
    write_sites(SitesConfig(), run)
    assert passes()["decoded conversations"] == 1
    with FaultServer() as server:
        replayed(run, server)
    before = passes()
    write_pairs(PairsConfig(), run)
    assert (passes() - before)["decoded conversations"] == 1
