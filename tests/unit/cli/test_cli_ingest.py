"""`crf ingest`, `crf export` and `crf forget` as a user meets them: tables, JSON, exit statuses, nothing half done."""

from __future__ import annotations

import json
import re
import time

import pytest
from claude_records import Log, call, text
from crf import crf, must
from run_pieces import write_chat, write_session, write_subagent

from composer_replication.cli.main import build_parser, main
from composer_replication.ingestion import IngestReport
from composer_replication.ingestion.formats import atif
from composer_replication.ingestion.source_files import SourceFile
from output_facts import lines_with


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    write_session(folder, "aaaaaaaa-1111")
    write_subagent(folder, "bbbbbbbb-2222")
    write_chat(folder / "chat.jsonl")
    (folder / "notes.json").write_text('{"just": "notes"}')
    (folder / "cut.jsonl").write_bytes((folder / "aaaaaaaa-1111.jsonl").read_bytes()[:-20] + b"\n{not json}\n")
    return folder


def test_help_answers_fast(tmp_path, note):
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        said = must("--help", cwd=tmp_path)
        seconds.append(time.perf_counter() - started)
    assert "ingest" in said
    note(f"crf --help: {min(seconds):.3f} s, best of 3 (budget 0.3 s)")
    assert min(seconds) < 0.3


def test_a_folder_of_mixed_formats_gives_a_table_on_stdout_and_talk_on_stderr(tmp_path, logs):
    done = crf("ingest", logs, "-o", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any({"format", "sessions", "turns", "calls", "secrets"} <= set(line.split()) for line in lines)
    assert "openai_messages 1 1 1 2 0 0 0 0 0" in lines
    assert any(re.search(r"^\w+ 5 4 5 ", line) for line in lines)  # the sum
    assert any(line.endswith(" 1 notes.json") for line in lines)
    assert any("JSON" in line and "cut.jsonl:" in line for line in lines)
    assert "conversations" in done.stderr
    assert "conversations.jsonl" not in done.stdout


def test_json_is_one_object_with_the_same_numbers(tmp_path, logs):
    said = must("ingest", logs, "-o", tmp_path / "run", "--json", cwd=tmp_path)
    summary = json.loads(said)
    assert said.count("\n") == 1
    assert summary["total"]["conversations"] == 5
    assert {each["format"] for each in summary["formats"]} == {"claude_code", "openai_messages"}
    assert summary["is_scrubbed"] is True
    rows = (tmp_path / "run" / "conversations.jsonl").read_text().splitlines()
    assert len(rows) == 5


def test_no_scrub_has_to_be_typed_in_full_and_is_recorded(tmp_path, logs):
    short = crf("ingest", logs, "-o", tmp_path / "run", "--no-scr", cwd=tmp_path)
    assert short.returncode == 2
    assert not (tmp_path / "run").exists()
    done = crf("ingest", logs, "-o", tmp_path / "run", "--no-scrub", cwd=tmp_path)
    assert lines_with(done.stderr, "--no-scrub", "secrets")
    meta = json.loads((tmp_path / "run" / "conversations.meta.json").read_text())
    assert meta["settings"]["scrubbed"] is False
    exported = crf("export", tmp_path / "run", "--atif", tmp_path / "atif", cwd=tmp_path)
    assert "--no-scrub" in exported.stderr


def test_secrets_of_the_environment_and_the_user_do_not_get_through(tmp_path):
    log = Log(session="cccccccc-3333")
    log.user("deploy with hunter2-correct-horse as /home/zaphod/.ssh said, thanks, zaphod")
    log.assistant("m1", call("t1", "Bash", command="echo hunter2-correct-horse", path="/home/zaphod/x"), text("ok"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "cccccccc-3333.jsonl").write_bytes(log.lines())
    known = {"DEPLOY_PASSWORD": "hunter2-correct-horse", "USER": "zaphod", "HOME": "/home/zaphod"}
    for workers in ("1", "2"):
        done = crf("ingest", "logs", "-o", f"run{workers}", "--workers", workers, cwd=tmp_path, **known)
        assert done.returncode == 0
        written = b"".join(path.read_bytes() for path in (tmp_path / f"run{workers}").iterdir())
        for shown in (written.decode(), done.stdout, done.stderr):
            assert "hunter2" not in shown
            assert "zaphod" not in shown
    assert (tmp_path / "run1/conversations.jsonl").read_bytes() == (tmp_path / "run2/conversations.jsonl").read_bytes()


def test_a_path_without_sessions_says_what_was_tried_and_leaves_no_run_behind(tmp_path):
    (tmp_path / "empty").mkdir()
    done = crf("ingest", tmp_path / "empty", "-o", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 1
    assert "claude_code, codex" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_run_is_not_written_into(tmp_path, logs):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    done = crf("ingest", logs, "-o", tmp_path / "mine", cwd=tmp_path)
    assert done.returncode == 1
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_tools_file_is_checked_and_used(tmp_path, logs):
    (tmp_path / "tools.json").write_text(
        json.dumps([{"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {}}}}])
    )
    must("ingest", logs, "-o", tmp_path / "run", "--tools", tmp_path / "tools.json", cwd=tmp_path)
    rows = map(json.loads, (tmp_path / "run" / "tools.jsonl").read_text().splitlines())
    assert {row["name"]: row["source"] for row in rows} == {"Bash": "file", "Task": "inferred"}
    (tmp_path / "bad.json").write_text('[{"name": "Bash"}]')
    done = crf("ingest", logs, "-o", tmp_path / "run", "--tools", tmp_path / "bad.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "input_schema" in done.stderr
    (tmp_path / "bad.json").write_text("[]")
    done = crf("ingest", logs, "-o", tmp_path / "run", "--tools", tmp_path / "bad.json", cwd=tmp_path)
    assert done.returncode == 1
    assert lines_with(done.stderr, tmp_path / "bad.json", "tools", "--tools")


def test_exported_sessions_read_back_with_their_sub_agents(tmp_path, logs):
    must("ingest", logs, "-o", tmp_path / "run", cwd=tmp_path)
    said = must("export", tmp_path / "run", "--atif", tmp_path / "atif", cwd=tmp_path)
    files = sorted((tmp_path / "atif").iterdir())
    assert sorted(said.split()) == [str(file) for file in files]
    read = [c for file in files for c in atif.read(SourceFile(file, file.name), IngestReport())]
    stored = [json.loads(line) for line in (tmp_path / "run" / "conversations.jsonl").read_text().splitlines()]
    assert {each.id for each in read} == {row["id"] for row in stored}
    again = crf("export", tmp_path / "run", "--atif", tmp_path / "atif", cwd=tmp_path)
    assert again.returncode == 1


def test_an_exported_folder_can_be_ingested_again(tmp_path, logs):
    must("ingest", logs, "-o", tmp_path / "run", cwd=tmp_path)
    must("export", tmp_path / "run", "--atif", tmp_path / "atif", cwd=tmp_path)
    summary = json.loads(must("ingest", tmp_path / "atif", "-o", tmp_path / "second", "--json", cwd=tmp_path))
    first = json.loads(must("ingest", logs, "-o", tmp_path / "run", "--json", cwd=tmp_path))
    for column in ("conversations", "turns", "calls", "results", "errors"):
        assert summary["total"][column] == first["total"][column], column


def test_forget_asks_first_and_then_does_it(tmp_path, logs):
    must("ingest", logs, "-o", tmp_path / "run", cwd=tmp_path)
    refused = crf("forget", "aaaaaaaa-1111", "--run", tmp_path / "run", cwd=tmp_path)
    assert refused.returncode == 1
    assert "--yes" in refused.stderr
    assert "aaaaaaaa-1111" in (tmp_path / "run" / "conversations.jsonl").read_text()
    said = must("forget", "aaaaaa", "--run", tmp_path / "run", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(said)["done"] is False
    must("forget", "aaaaaaaa-1111", "--yes", cwd=tmp_path / "run", HOME=str(tmp_path))
    kept = {json.loads(line)["id"] for line in (tmp_path / "run" / "conversations.jsonl").read_text().splitlines()}
    assert "aaaaaaaa-1111" not in kept
    assert {"bbbbbbbb-2222", "chat"} <= kept


@pytest.mark.parametrize("words", [[], ["ingest"], ["ingest", "x"], ["nonsense"], ["export", "x"], ["forget"]])
def test_what_is_not_understood_exits_with_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "usage: crf" in capsys.readouterr().err


def test_every_option_explains_itself():
    for action in build_parser()._subparsers._group_actions[0].choices.values():
        assert all(each.help for each in action._actions)


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path, logs):
    import subprocess
    import sys

    from crf import SRC

    crf_ingest = f"{sys.executable} -m composer_replication ingest {logs} -o {tmp_path / 'run'}"
    command = f"{crf_ingest} | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {"PYTHONPATH": str(SRC), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "conversations.jsonl").exists()
