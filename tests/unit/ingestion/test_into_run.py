"""Sessions into a run: a second ingest reads only what is new, and the bytes are always those of a fresh one."""

from __future__ import annotations

import os

import pytest
from run_pieces import bytes_of, ingested, stored, write_chat, write_session, write_subagent

from composer_replication.errors import InputError
from composer_replication.ingestion import read_sessions as family_reading
from composer_replication.ingestion.scrubbing import ScrubSettings
from composer_replication.runs import RunDir
from refusals import refusal


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    for number in range(4):
        write_session(folder / f"-repo-{number % 2}", f"session-{number}", command=f"echo {number}")
    write_subagent(folder / "-repo-0", "parent")
    write_chat(folder / "chat.jsonl")
    return folder


@pytest.fixture
def read_files(monkeypatch):
    """Names of the families that were really read, in order."""
    names = []

    def spy(draft, family, *rest, real=family_reading._read_session_lines):
        names.append(family.name)
        return real(draft, family, *rest)

    monkeypatch.setattr(family_reading, "_read_session_lines", spy)
    return names


def fresh_bytes(tmp_path, logs, **options):
    return bytes_of(ingested(tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}", logs, **options)[0])


def test_ingesting_again_reads_nothing_and_changes_no_byte(tmp_path, logs, read_files):
    run, first = ingested(tmp_path / "run", logs)
    before = bytes_of(run)
    assert (first.num_read, len(read_files)) == (7, 6)  # files; a sub-agent is read with its session
    read_files.clear()
    _, second = ingested(tmp_path / "run", logs)
    assert read_files == []
    assert (second.num_read, second.num_reused) == (0, 7)
    assert bytes_of(run) == before
    assert (first.total, first.redactions, first.skipped) == (second.total, second.redactions, second.skipped)


def test_a_growing_folder_gives_the_bytes_of_ingesting_it_at_once(tmp_path, logs, read_files):
    run, _ = ingested(tmp_path / "run", logs)
    write_session(logs / "-a-first", "session-9", said="new and first in order")
    with (logs / "-repo-1" / "session-1.jsonl").open("ab") as file:
        file.write(b'{"type": "user", "uuid": "late", "parentUuid": "u4", "sessionId": "session-1",')
        file.write(b' "message": {"role": "user", "content": "one more thing"}}\n')
    read_files.clear()
    ingested(tmp_path / "run", logs)
    assert read_files == ["-a-first/session-9.jsonl", "-repo-1/session-1.jsonl"]
    assert stored(run)["session-1"]["turns"][-1]["text"] == "one more thing"
    assert bytes_of(run) == fresh_bytes(tmp_path, logs)


def test_folders_ingested_one_after_the_other_give_the_bytes_of_both_at_once(tmp_path, logs):
    other = tmp_path / "another"
    write_session(other, "far-away")
    run, _ = ingested(tmp_path / "run", logs)
    ingested(tmp_path / "run", other)
    at_once, _ = ingested(tmp_path / "at-once", other, logs)
    assert bytes_of(run) == bytes_of(at_once)


def test_processes_give_the_bytes_of_one(tmp_path, logs):
    secret = "sk-ant-api03-" + "Ab1" * 30
    for number in range(6):
        write_session(logs / "many", f"with-secret-{number}", said=f"use {secret} and {secret[:-1]}x{number}")
    serial, summary = ingested(tmp_path / "serial", logs, num_workers=1)
    parallel, in_processes = ingested(tmp_path / "parallel", logs, num_workers=3)
    assert bytes_of(serial) == bytes_of(parallel)
    assert summary == in_processes
    assert b"sk-ant" not in bytes_of(parallel)["conversations.jsonl"]


def test_no_process_is_started_for_what_is_read_before_it_has_begun(tmp_path, logs, monkeypatch):
    monkeypatch.setattr(family_reading, "ProcessPoolExecutor", None)  # calling it raises
    monkeypatch.setattr(family_reading.os, "cpu_count", lambda: 12)
    monkeypatch.setattr(family_reading.os, "sched_getaffinity", lambda _process: set(range(12)), raising=False)
    ingested(tmp_path / "run", logs, num_workers=None)
    assert [family_reading._choose_num_workers(size) for size in (0, 1_000_000, 3_500_000, 2**40)] == [1, 1, 4, 8]
    with pytest.raises(TypeError):
        ingested(tmp_path / "asked-for", logs, num_workers=2)


def test_sessions_whose_files_are_gone_stay(tmp_path, logs, read_files):
    run, _ = ingested(tmp_path / "run", logs)
    before = stored(run)
    (logs / "-repo-1" / "session-1.jsonl").unlink()
    read_files.clear()
    ingested(tmp_path / "run", logs)
    assert stored(run) == before
    assert read_files == []


def test_what_is_excluded_later_leaves_the_run(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    ingested(tmp_path / "run", logs, exclude=["session-2.jsonl"])
    assert "session-2" not in stored(run)
    (logs / ".crfignore").write_text("-repo-1\n")
    ingested(tmp_path / "run", logs)
    assert not {"session-1", "session-3"} & set(stored(run))
    assert {"session-0", "session-2"} <= set(stored(run))


def test_a_copy_of_a_session_is_kept_once_and_named(tmp_path, logs):
    copy = logs / "z-backup" / "session-0.jsonl"
    copy.parent.mkdir()
    copy.write_bytes((logs / "-repo-0" / "session-0.jsonl").read_bytes())
    run, summary = ingested(tmp_path / "run", logs)
    assert list(stored(run)).count("session-0") == 1
    (left,) = [each for each in summary.skipped if each.reason == "copy of another session"]
    assert (left.number, left.first) == (1, "z-backup/session-0.jsonl")
    (logs / "-repo-0" / "session-0.jsonl").write_bytes(b"")  # the original is lost: now the copy is the session
    ingested(tmp_path / "run", logs)
    assert bytes_of(run) == fresh_bytes(tmp_path, logs)
    assert "session-0" in stored(run)


def test_equal_ids_of_different_files_are_told_apart_with_their_links(tmp_path):
    for name, said in (("a", "one"), ("b", "two")):
        write_chat(tmp_path / "logs" / name / "output.jsonl", said)
    write_subagent(tmp_path / "logs" / "c", "twin", agent="x1")
    write_subagent(tmp_path / "logs" / "d", "twin", agent="x2")
    run, _ = ingested(tmp_path / "run", tmp_path / "logs")
    found = stored(run)
    assert len(found) == 6
    texts = {key: row["turns"][0]["text"] for key, row in found.items() if key.startswith("output")}
    assert sorted(texts.values()) == ["one", "two"]
    (second,) = [key for key in found if key.startswith("twin@")]
    (child,) = [row for key, row in found.items() if "agent-x2" in key]
    assert child["parent"]["conversation_id"] == second
    write_session(tmp_path / "logs" / "0", "newcomer")
    ingested(tmp_path / "run", tmp_path / "logs")
    assert bytes_of(run) == fresh_bytes(tmp_path, tmp_path / "logs")


def test_other_settings_scrub_everything_again_even_what_has_no_file_any_more(tmp_path, logs):
    write_session(logs, "secretive", said="the word is swordfish-4711")
    gone = write_session(logs, "gone", said="swordfish-4711 again")
    run, _ = ingested(tmp_path / "run", logs)
    assert "swordfish-4711" in str(stored(run))
    gone.unlink()
    ingested(tmp_path / "run", logs, scrub=ScrubSettings(env_values={"DEPLOY_PASSWORD": "swordfish-4711"}))
    assert "swordfish-4711" not in str(stored(run))
    assert "gone" in stored(run)
    everything = b"".join(path.read_bytes() for path in run.root.iterdir() if path.is_file())
    assert b"swordfish" not in everything


def test_the_sidecar_says_whether_secrets_were_left_in(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    assert run.meta("conversations").settings["scrubbed"] is True
    ingested(tmp_path / "run", logs, scrub=None)
    assert run.meta("conversations").settings["scrubbed"] is False


def test_accounts_of_other_rows_are_not_believed(tmp_path, logs):
    """A crash between the two artefacts: the next ingest reads everything and is right."""
    run, _ = ingested(tmp_path / "run", logs)
    kept = {name: (run.root / name).read_bytes() for name in ("session_sources.jsonl", "session_sources.meta.json")}
    write_session(logs / "-a-first", "newest")
    ingested(tmp_path / "run", logs)
    for name, data in kept.items():
        (run.root / name).write_bytes(data)
    ingested(tmp_path / "run", logs)
    assert bytes_of(run) == fresh_bytes(tmp_path, logs)


def test_a_path_without_a_session_is_an_error_that_names_the_formats_and_changes_nothing(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    before = bytes_of(run)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "package.json").write_text('{"name": "x"}')
    with refusal(InputError, what=str(tmp_path / "other"), got="1 ", fix="claude_code, codex"):
        ingested(tmp_path / "run", logs, tmp_path / "other")
    with refusal(InputError, what=str(tmp_path / "nowhere"), fix="~/.claude/projects"):
        ingested(tmp_path / "run", tmp_path / "nowhere")
    assert bytes_of(run) == before


def test_pipes_broken_links_and_unreadable_things_are_named_and_cost_nothing_else(tmp_path, logs):
    os.mkfifo(logs / "pipe.jsonl")
    (logs / "nowhere.jsonl").symlink_to(logs / "missing")
    (logs / "loop").symlink_to(logs)
    _, summary = ingested(tmp_path / "run", logs)
    left = {each.reason: (each.number, each.first) for each in summary.skipped}
    assert left == {"not a regular file": (2, "nowhere.jsonl"), "link to a folder": (1, "loop")}
    assert summary.total.conversations == 7


def test_names_of_files_and_reasons_are_scrubbed_and_bounded(tmp_path):
    secret = "ghp_" + "a1B2c3D4e5" * 4
    folder = tmp_path / "logs" / "-home-alice-shop"
    path = write_session(folder, secret)
    with path.open("ab") as file:
        file.write(b'{"type": "' + b"x" * 500 + b'", "uuid": "odd"}\n{"type": "' + secret.encode() + b'"}\nbroken\n')
    run, summary = ingested(tmp_path / "run", tmp_path / "logs")
    everything = b"".join(each.read_bytes() for each in run.root.iterdir() if each.is_file())
    assert secret.encode() not in everything
    assert b"alice" not in everything
    assert secret not in repr(summary)
    assert max(len(each.reason) for each in summary.skipped) <= 200


def test_tools_are_inferred_unless_a_file_says_what_they_are(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs, tools={"Bash": {"type": "object", "properties": {}}})
    rows = {row["name"]: row for row in run.read_jsonl("tools", schema="tool", version=3)}
    assert (rows["Bash"]["source"], rows["Bash"]["num_calls"]) == ("file", 4)
    assert rows["Task"]["source"] == "inferred"
    assert rows["Task"]["parameters"]["required"] == ["prompt"]


def test_a_run_of_another_ingest_is_current_and_a_stale_one_is_seen(tmp_path, logs):
    run, _ = ingested(tmp_path / "run", logs)
    assert RunDir.open(run.root).lineage("tools").stale == ()
