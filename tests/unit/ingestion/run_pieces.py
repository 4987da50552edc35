"""Folders of small sessions, and run directories made from them."""

from __future__ import annotations

import json

from claude_records import Log, call, text

from composer_replication.cli.replay import RunStates
from composer_replication.config import ReplayConfig
from composer_replication.ingestion.ingest_run import ingest_into
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.runs import RunDir
from composer_replication.runs.files import CONVERSATIONS_SCHEMA, CONVERSATIONS_VERSION

ARTEFACTS = ("conversations.jsonl", "session_sources.jsonl", "tools.jsonl")


def session(identity, said="go", command="ls"):
    log = Log(session=identity)
    log.user(said)
    log.assistant("m1", call("t1", "Bash", command=command))
    log.result("t1", "done")
    log.assistant("m2", text("finished"))
    return log


def write_session(folder, identity, **options):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{identity}.jsonl"
    path.write_bytes(session(identity, **options).lines())
    return path


def write_chat(path, said="hi"):
    path.parent.mkdir(parents=True, exist_ok=True)
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "hello"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def write_subagent(folder, identity, agent="abc"):
    """A session that starts a sub-agent, and the sub-agent's log."""
    log = Log(session=identity)
    log.user("go")
    log.assistant("m1", call("t1", "Task", prompt="look"))
    log.result("t1", "found", toolUseResult={"agentId": agent, "status": "completed"})
    below = Log(session=identity)
    below.user("look", isSidechain=True, agentId=agent)
    below.assistant("a1", text("found"), isSidechain=True, agentId=agent)
    (folder / identity / "subagents").mkdir(parents=True)
    (folder / f"{identity}.jsonl").write_bytes(log.lines())
    (folder / identity / "subagents" / f"agent-{agent}.jsonl").write_bytes(below.lines())


def ingested(run_path, *paths, scrub=ScrubSettings(), **options):  # noqa: B008 (frozen)
    run = RunDir.open(run_path) if (run_path / "run.json").exists() else RunDir.create(run_path)
    return run, ingest_into(run, paths, scrub=scrub, **options)


def stored(run):
    return {
        row["id"]: row
        for row in run.read_jsonl("conversations", schema=CONVERSATIONS_SCHEMA, version=CONVERSATIONS_VERSION)
    }


def bytes_of(run):
    return {name: (run.root / name).read_bytes() for name in ARTEFACTS}


def run_states(run, **options):
    """The states that a replay with these options asks about."""
    return [each.state for each in RunStates(ReplayConfig(**({"states": "all"} | options)), run).read()]
