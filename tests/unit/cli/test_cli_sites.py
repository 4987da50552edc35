"""`crf sites`: a table one understands, filters, JSON, and one site shown with its evidence and hint."""

from __future__ import annotations

import json

import pytest
from claude_records import Log, call
from crf import crf, must

from output_facts import lines_with

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"


@pytest.fixture
def run(tmp_path):
    log = Log(session="aaaaaaaa-1111")
    log.user("go")
    log.assistant("m1", call("t1", "Edit", file_path="/repo/a.py", old_string="x", new_string="y"))
    log.result("t1", NOT_READ, is_error=True)
    log.assistant("m2", call("t2", "Bash", command="pytest -q"))
    log.result("t2", "Exit code 1\n\x1b[31m1 failed\x1b[0m [bold]not markup[/bold]", is_error=True)
    log.assistant("m3", call("t3", "Bash", command="cat nothere.md | head"))
    log.result("t3", "cat: nothere.md: No such file or directory", is_error=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "aaaaaaaa-1111.jsonl").write_bytes(log.lines())
    must("ingest", "logs", "-o", "run", cwd=tmp_path)
    return tmp_path / "run"


def rows(run):
    return [json.loads(line) for line in (run / "sites.jsonl").read_text().splitlines()]


def test_the_table_has_kinds_blames_counts_confidence_and_an_example(run):
    done = crf("sites", run, cwd=run.parent)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any({"kind", "blame", "sites", "id"} <= set(line.split()) for line in lines)
    assert any(line.startswith("edit_not_read model 1 1 0.98 File has not been read yet.") for line in lines)
    assert any(line.startswith("test_failure task 1 0 0.85 1 failed [bold]not markup[/bold]") for line in lines)
    assert "\x1b" not in done.stdout
    assert lines_with(done.stderr, "sites.jsonl", 3, 1, "crf sites RUN --list")


def test_the_artefact_holds_every_failure_with_its_hint_or_the_reason_why_not(run):
    must("sites", run, cwd=run.parent)
    kept, task, soft = rows(run)
    assert (kept["kind"], kept["is_kept"], kept["hint"]["source"]) == ("edit_not_read", True, "template")
    assert kept["hint"]["template"] == "edit_not_read"
    assert "`Edit`" in kept["hint"]["text"]
    assert (task["is_kept"], task["hint"], task["reason"]) == (False, None, "blame task: rule test_failure")
    assert (soft["is_soft"], soft["is_kept"], soft["hint"]) == (True, False, None)
    assert all(row["conversation_id"] == "aaaaaaaa-1111" for row in (kept, task, soft))
    meta = json.loads((run / "sites.meta.json").read_text())
    assert {each["name"] for each in meta["sources"]} == {"conversations", "tools"}
    assert meta["counts"]["blame: model"] == 2


def test_filters_and_json(run):
    table = json.loads(must("sites", run, "--json", "--blame", "model", cwd=run.parent))["table"]
    assert {row["kind"] for row in table} == {"edit_not_read", "shell_path_missing"}
    table = json.loads(must("sites", run, "--json", "--kind", "test_failure", cwd=run.parent))["table"]
    assert [(row["blame"], row["number"], row["num_kept"]) for row in table] == [("task", 1, 0)]
    assert len(rows(run)) == 3  # a filter shows less; the artefact is whole
    wrong = crf("sites", run, "--blame", "nobody", cwd=run.parent)
    assert wrong.returncode == 1
    assert "model, harness, task, user, env, unknown" in wrong.stderr


def test_soft_failures_are_kept_from_a_lower_confidence_on(run):
    must("sites", run, "--min-confidence", "0.4", cwd=run.parent)
    assert [row["is_kept"] for row in rows(run)] == [True, False, True]


def test_one_site_is_shown_with_turn_result_evidence_and_hint(run):
    must("sites", run, cwd=run.parent)
    identity = rows(run)[0]["id"]
    shown = must("sites", run, "--show", identity[:6], cwd=run.parent)
    assert '[TOOL_USE] name=Edit input={"file_path":"/repo/a.py"' in shown
    assert ">>>File has not been read yet. Read it first before writing to it.<<<" in shown
    data = json.loads(must("sites", run, "--show", identity, "--json", cwd=run.parent))
    assert lines_with(shown, "hint", "template", "edit_not_read", data["hint"]["version"])
    assert data["hint"]["text"] in shown
    assert (data["site"]["id"], data["hint"]["template"]) == (identity, "edit_not_read")
    assert crf("sites", run, "--show", "zzzz", cwd=run.parent).returncode == 1


def test_all_sites_are_listed_with_their_hints_and_one_is_struck_out_for_good(run):
    first = must("sites", run, "--list", cwd=run.parent)
    kept, task, soft = rows(run)
    lines = first.splitlines()
    assert lines_with(lines[0], kept["id"], "edit_not_read", "Edit", "model", 0.98)
    assert lines[1].endswith("  File has not been read yet. Read it first before writing to it.")
    assert lines[2].endswith(f"  {kept['hint']['text']}")
    assert lines_with(lines[3], task["id"], "task", task["reason"])
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [kept["id"], task["id"], soft["id"]]
    assert "\x1b" not in first
    before = (run / "sites.jsonl").stat().st_mtime_ns
    listed = json.loads(must("sites", run, "--list", "--json", "--blame", "model", cwd=run.parent))["sites"]
    assert [each["site"]["id"] for each in listed] == [kept["id"], soft["id"]]
    assert listed[0]["hint"]["text"] == kept["hint"]["text"]
    assert (run / "sites.jsonl").stat().st_mtime_ns == before  # looked at, not found anew
    done = crf("sites", run, "--drop", kept["id"][:6], cwd=run.parent)
    assert (done.returncode, done.stdout) == (0, "")
    assert lines_with(done.stderr, kept["id"], "edit_not_read", f"`crf hints RUN --keep {kept['id']}`")
    assert [row["is_kept"] for row in rows(run)] == [False, False, False]
    must("sites", run, cwd=run.parent)
    assert rows(run)[0]["hint"] is None
    done = crf("sites", run, "--drop", "zzzz", cwd=run.parent)
    assert done.returncode == 1
    assert lines_with(done.stderr, "--drop", "'zzzz'", "--list")


def test_control_characters_of_a_log_do_not_reach_the_terminal(run):
    must("sites", run, cwd=run.parent)
    shown = must("sites", run, "--show", rows(run)[1]["id"], cwd=run.parent)
    assert "\x1b" not in shown


def test_a_run_without_conversations_says_what_to_do(tmp_path):
    from composer_replication.runs import RunDir

    RunDir.create(tmp_path / "empty")
    done = crf("sites", tmp_path / "empty", cwd=tmp_path)
    assert done.returncode == 1
    assert "crf ingest" in done.stderr


def test_forgetting_a_session_takes_its_sites_along(run):
    must("sites", run, cwd=run.parent)
    must("forget", "aaaaaaaa-1111", "--run", run, "--yes", cwd=run.parent)
    assert rows(run) == []
