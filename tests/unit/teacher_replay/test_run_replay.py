"""`replay_run` from Python: the calls that are written are those of the states that were asked about."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from replay_pieces import KEY, TEACHERS, options_for

from composer_replication.cli import replay as step
from composer_replication.config import ReplayConfig
from composer_replication.errors import RunError, StaleArtefactError
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.privacy.outgoing import LastGate, OpenGate
from composer_replication.runs import RunDir
from composer_replication.teacher_replay.ask_and_retry import HELD_BACK
from composer_replication.teacher_replay.ledger import TeacherStore
from composer_replication.teacher_replay.replay import teachers_of
from fault_server import FaultServer
from refusals import refusal


def write_chat(folder, name, num_states=2):
    """A session of so many answers; sessions are read in the order of their files."""
    folder.mkdir(exist_ok=True)
    messages = []
    for number in range(num_states):
        messages += [{"role": "user", "content": f"{name} asks {number}"}, {"role": "assistant", "content": "Done."}]
    (folder / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")


@pytest.fixture
def run(tmp_path):
    for name in ("b", "c"):
        write_chat(tmp_path / "logs", name)
    made = RunDir.create(tmp_path / "run")
    ingest_into(made, [tmp_path / "logs"], scrub=ScrubSettings())
    return made


def replayed(run, server, on_call=lambda _: None, resume_after_overrun=False, **changes):
    specs = [{**TEACHERS[1], "base_url": server.base_url}]
    options = options_for(None, **({"cache": run.path("teacher_cache"), "max_concurrency": 1} | changes))
    plan = step.plan_replay(ReplayConfig(states="all"), run, teachers=teachers_of(specs, KEY, options), options=options)
    return asyncio.run(step.send_requests(plan, on_call=on_call, resume_after_overrun=resume_after_overrun)).report


@pytest.fixture
def without_locks(monkeypatch):
    """As on a file system that has none: elsewhere an ingest waits for the replay."""
    monkeypatch.setattr("composer_replication.runs.directory.try_lock", lambda *_, **__: True)


@pytest.mark.usefixtures("without_locks")
def test_an_ingest_during_the_replay_is_named_and_the_answers_stay_in_the_store(run, tmp_path):
    told = []

    def ingest_more(_result):
        told.append(1)
        if len(told) == 4:
            write_chat(tmp_path / "logs", "a")  # in front of all others
            ingest_into(run, [tmp_path / "logs"], scrub=ScrubSettings())

    with FaultServer() as server:
        with refusal(StaleArtefactError, what="conversations.jsonl", fix="teacher_cache.sqlite"):
            replayed(run, server, ingest_more)
        assert not run.path("teacher_calls").exists()
        assert server.requests()["num_chat"] == 4
        replayed(run, server)
        assert server.requests()["num_chat"] == 6  # the new session alone
    assert dict(run.meta("teacher_calls").counts)["calls"] == 6


@pytest.mark.usefixtures("without_locks")
def test_an_ingest_while_the_calls_are_written_leaves_the_calls_as_they_were(run, tmp_path, monkeypatch):
    rows_of = step._call_rows

    def changing_at_the_end(*given):
        yield from rows_of(*given)
        write_chat(tmp_path / "logs", "a")
        ingest_into(run, [tmp_path / "logs"], scrub=ScrubSettings())

    with FaultServer() as server:
        replayed(run, server)
        before = run.path("teacher_calls").read_bytes()
        monkeypatch.setattr(step, "_call_rows", changing_at_the_end)
        with refusal(StaleArtefactError, what="conversations.jsonl", fix="teacher_cache.sqlite"):
            replayed(run, server)
    assert run.path("teacher_calls").read_bytes() == before


def test_one_process_has_one_lock_file_beside_the_store(run):
    """Whoever removes the lock file that a message names ends the hold and the claims."""
    seen = []
    with FaultServer() as server:
        replayed(run, server, lambda _: seen.append(len(list(run.root.glob("teacher_cache.sqlite.*.lock")))))
    assert set(seen) == {1}
    assert not list(run.root.glob("teacher_cache.sqlite.*.lock"))


def test_a_reply_that_is_gone_is_not_told_as_not_asked(run):
    def lose_one(_result):
        with TeacherStore(run.path("teacher_cache")) as store, store._transaction():
            store._execute("UPDATE bills SET key = NULL, digest = NULL")
            store._execute("DELETE FROM replies")

    with FaultServer() as server:
        replayed(run, server, lose_one)
    counts = dict(run.meta("teacher_calls").counts)
    assert counts == {"states": 4, "reply gone": 4}


def test_a_run_that_was_not_scrubbed_is_sent_through_the_open_gate_alone(tmp_path):
    write_chat(tmp_path / "logs", "b")
    run = RunDir.create(tmp_path / "run")
    ingest_into(run, [tmp_path / "logs"], scrub=None)
    with FaultServer() as server:
        for gate in (None, LastGate({})):
            with refusal(RunError, what=str(run.root), got="--no-scrub"):
                replayed(run, server, last_gate=gate)
        assert server.requests()["num_chat"] == 0
        replayed(run, server, last_gate=OpenGate())
        assert server.requests()["num_chat"] == 2


def test_the_gate_knows_the_environment_of_the_options(run):
    with FaultServer() as server:
        report = replayed(run, server, environment={"DEPLOY_PASSWORD": "c asks 1"})
        assert server.requests()["num_chat"] == 3
    assert report.counts[HELD_BACK] == 1


def test_a_stop_is_lifted_by_whoever_holds_the_run_and_by_nobody_else(run):
    path = run.path("teacher_cache")
    with FaultServer() as server, TeacherStore(path) as other:
        intent = other.reserve(b"k", "t", 5, 1000)
        other.settle(intent, 900, reply=None)
        assert other.meter().halted
        other.hold("a replay of this run")
        with refusal(RunError, what="teacher_cache.sqlite", got=str(os.getpid())):
            replayed(run, server, resume_after_overrun=True)
        assert other.meter().halted
        other.close()
        assert replayed(run, server).stopped
        assert server.requests()["num_chat"] == 0
        assert replayed(run, server, resume_after_overrun=True).stopped is None
        assert server.requests()["num_chat"] == 4
