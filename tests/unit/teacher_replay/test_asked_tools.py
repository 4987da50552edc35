"""A session that was asked about is asked about with the same tools again: more sessions cost no answer of others."""

from __future__ import annotations

import asyncio

import pytest
from claude_records import Log, call
from replay_pieces import KEY, TEACHERS, options_for
from run_pieces import ingested, run_states

from composer_replication.cli.forget import forget
from composer_replication.cli.replay import plan_replay, send_requests
from composer_replication.config import ReplayConfig
from composer_replication.errors import RunError
from composer_replication.teacher_replay.forget import AskedTools
from composer_replication.teacher_replay.replay import teachers_of
from fault_server import FaultServer
from refusals import refusal


def session(name, *tools):
    log = Log(session=name)
    log.user(f"do {name}")
    for number, (tool, arguments) in enumerate(tools):
        log.assistant(f"m{number}", call(f"c{number}", tool, **arguments))
        log.result(f"c{number}", "done")
    log.assistant("end", {"type": "text", "text": "All done."})
    return log.lines()


def write(folder, name, *tools):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_bytes(session(name, *tools))


def ask(run, server):
    options = options_for(server, cache=run.path("teacher_cache"))
    before = server.requests()["num_chat"]
    section = ReplayConfig(max_usd=10, states="all")
    plan = plan_replay(section, run, teachers=teachers_of(TEACHERS, KEY, options), options=options)
    asyncio.run(send_requests(plan))
    return server.requests()["num_chat"] - before


@pytest.fixture
def logs(tmp_path):
    write(tmp_path / "logs", "aaaaaaaa-1111", ("Read", {"path": "a"}), ("Edit", {"path": "a", "old": "x"}))
    return tmp_path / "logs"


def test_one_more_session_costs_no_answer_of_the_others(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    with FaultServer() as server:
        first = ask(run, server)
        write(logs, "00000000-2222", ("Grep", {"pattern": "x"}), ("Edit", {"old": "x", "path": "a"}))
        run, _ = ingested(tmp_path / "run", logs)
        second = ask(run, server)
        assert first == second == 3 * len(TEACHERS)
        assert ask(run, server) == 0
        forget(run, ["00000000-2222"])
        assert ask(run, server) == 0
    assert "00000000-2222" not in run.path("asked_tools").read_text()
    assert "Grep" not in run.path("asked_tools").read_text()


def test_a_session_that_goes_on_with_another_tool_is_asked_about_with_it(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    for state in run_states(run):
        AskedTools(run).record(state["session_id"], state["tools"])
    write(logs, "aaaaaaaa-1111", ("Read", {"path": "a"}), ("Grep", {"pattern": "x"}))
    run, _ = ingested(tmp_path / "run", logs)
    shown = [{tool["function"]["name"] for tool in state["tools"]} for state in run_states(run)]
    assert all("Grep" in names for names in shown)


def test_nothing_is_ingested_or_forgotten_under_a_replay(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    with run.used_for("replay"):
        with refusal(RunError, what=str(run.root), got="replay"):
            forget(run, ["aaaaaaaa-1111"])
        with refusal(RunError, what=str(run.root), got="replay"):
            ingested(tmp_path / "run", logs)
