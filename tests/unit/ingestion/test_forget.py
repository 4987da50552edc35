"""A forgotten session leaves no row, no derived artefact, and does not come back."""

from __future__ import annotations

import pytest
from run_pieces import bytes_of, ingested, stored, write_chat, write_session, write_subagent

from composer_replication.cli.forget import forget, plan_forgetting
from composer_replication.errors import InputError
from composer_replication.ingestion.session_sources import FORGOTTEN
from refusals import refusal


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    write_session(folder, "11111111-aaaa", said="keep me")
    write_session(folder, "22222222-bbbb", said="the unspeakable")
    write_subagent(folder, "33333333-cccc")
    write_chat(folder / "a" / "output.jsonl", "first chat")
    write_chat(folder / "b" / "output.jsonl", "second chat")
    return folder


@pytest.fixture
def run(tmp_path, logs):
    """A run with sites made from its conversations, pairs made from the sites, and an adapter."""
    run, _ = ingested(tmp_path / "run", logs)
    sites = [{"site_id": f"s-{key}", "conversation_id": key} for key in stored(run)]
    run.write_jsonl("sites", sites, schema="site", version=1, sources=["conversations"], counts={"sites": len(sites)})
    pairs = [{"pair_id": 1, "text": "made from everything"}]
    run.write_jsonl("pairs", pairs, schema="pair", version=1, sources=["sites"])
    run.path("adapter").mkdir()
    (run.path("adapter") / "weights.safetensors").write_bytes(b"x")
    run.path("config").write_text("a = 1\n")
    return run


def everything(run):
    return b"".join(path.read_bytes() for path in run.root.rglob("*") if path.is_file())


def test_a_session_and_what_was_made_from_it_is_gone(run):
    plan = forget(run, ["22222222-bbbb"])
    assert plan.conversations == ("22222222-bbbb",)
    assert (plan.filtered, plan.deleted) == (("sites",), ("pairs", "adapter"))
    assert "22222222-bbbb" not in stored(run)
    assert b"unspeakable" not in everything(run)
    assert b"s-22222222-bbbb" not in everything(run)
    assert not run.path("pairs").exists()
    assert not run.path("adapter").exists()
    assert run.path("config").exists()


def test_filtered_artefacts_keep_the_other_rows_and_are_not_stale(run):
    forget(run, ["22222222-bbbb"])
    rows = list(run.read_jsonl("sites", schema="site"))
    assert {row["conversation_id"] for row in rows} == set(stored(run))
    assert run.lineage("sites").stale == ()
    assert run.meta("sites").settings == {"rows_forgotten": 1}
    assert run.meta("conversations").counts["sessions"] == len([r for r in stored(run).values() if not r["parent"]])


def test_sub_agents_go_with_the_session_that_started_them(run):
    assert forget(run, ["33333333-cccc"]).conversations == ("33333333-cccc", "33333333-cccc/agent-abc")
    assert not any(key.startswith("33333333") for key in stored(run))


def test_it_does_not_come_back_from_the_same_place_a_grown_log_or_a_copy(run, logs, tmp_path):
    forget(run, ["22222222-bbbb"])
    before = bytes_of(run)["conversations.jsonl"]
    ingested(run.root, logs)
    assert bytes_of(run)["conversations.jsonl"] == before
    log = logs / "22222222-bbbb.jsonl"
    with log.open("ab") as file:
        file.write(b'{"type": "user", "uuid": "new", "parentUuid": "u4", "sessionId": "22222222-bbbb",')
        file.write(b' "message": {"role": "user", "content": "still here?"}}\n')
    (logs / "copy").mkdir()
    (logs / "copy" / "renamed.jsonl").write_bytes(log.read_bytes())
    for _ in range(2):
        _, summary = ingested(run.root, logs)
        assert b"still here?" not in everything(run)
        assert FORGOTTEN in {each.reason for each in summary.skipped}
    ingested(run.root, logs, exclude=["*2222*", "copy"])
    ingested(run.root, logs, reread=True)
    assert b"still here?" not in everything(run)


def test_one_chat_among_files_of_the_same_name_goes_alone(run, logs):
    first, second = sorted(key for key in stored(run) if key.startswith("output"))
    forget(run, [second])
    assert first in stored(run)
    assert b"second chat" not in everything(run)
    ingested(run.root, logs, reread=True)
    assert b"second chat" not in everything(run)
    assert b"first chat" in everything(run)


def test_the_beginning_of_an_id_is_enough_when_only_one_has_it(run):
    assert plan_forgetting(run, ["222222"]).conversations == ("22222222-bbbb",)
    for name in ("2222", "output@nothing", "44444444"):
        with refusal(InputError, what="session", got=repr(name)):
            plan_forgetting(run, [name])


def test_a_plan_changes_nothing(run):
    before = everything(run)
    plan_forgetting(run, ["22222222-bbbb"])
    assert everything(run) == before


def test_artefacts_that_were_stale_already_are_deleted_not_made_to_look_current(run, logs):
    write_session(logs, "55555555-dddd")
    ingested(run.root, logs)
    assert "sites" in forget(run, ["22222222-bbbb"]).deleted


def test_everything_can_be_forgotten(run, logs):
    forget(run, list(stored(run)))
    assert stored(run) == {}
    ingested(run.root, logs)
    assert stored(run) == {}
