"""Forgetting: each stage cleans its own files, and what lies outside of the run is named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from run_pieces import ingested, write_session

import composer_replication
from composer_replication.cli.export import export_atif
from composer_replication.cli.forget import forget, plan_forgetting
from composer_replication.runs.directory import outside_copies, record_outside_copy

SRC = Path(composer_replication.__file__).parent


@pytest.fixture
def run(tmp_path):
    for name in ("11111111-aaaa", "22222222-bbbb"):
        write_session(tmp_path / "logs", name)
    return ingested(tmp_path / "run", tmp_path / "logs")[0]


def test_only_the_stage_that_owns_the_store_speaks_sql():
    speakers = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if "sqlite3" in [*names, getattr(node, "module", None)]:
                speakers.add(path.relative_to(SRC).parts[0])
    assert speakers == {"teacher_replay"}


def test_exports_and_weights_outside_of_the_run_are_named_as_long_as_they_are_there(run, tmp_path):
    assert plan_forgetting(run, ["11111111-aaaa"]).elsewhere == ()
    export_atif(run, tmp_path / "documents")
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    record_outside_copy(run, "checkpoints", tmp_path / "out" / "checkpoints")
    record_outside_copy(run, "checkpoints", tmp_path / "out" / "checkpoints")
    record_outside_copy(run, "trained weights", tmp_path / "out" / "adapter")  # never got that far
    record_outside_copy(run, "trained weights", run.path("adapter"))  # in the run: an artefact of it
    names = [(each.what, Path(each.path).name) for each in forget(run, ["11111111-aaaa"]).elsewhere]
    assert names == [("ATIF documents", "documents"), ("checkpoints", "checkpoints")]
    (tmp_path / "out" / "checkpoints").rmdir()
    assert [each.what for each in outside_copies(run)] == ["ATIF documents"]


def test_the_command_names_them_and_says_that_they_stay(run, tmp_path, capsys):
    from composer_replication.cli.main import main

    export_atif(run, tmp_path / "documents")
    assert main(["forget", "11111111-aaaa", "--run", str(run.root), "--yes"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert str(tmp_path / "documents") in line
    assert "ATIF" in line
    assert (tmp_path / "documents").exists()


def test_an_export_that_breaks_off_is_named_too(run, tmp_path, monkeypatch):
    """What it had written by then is a copy like any other."""

    def broken(*_):
        raise OSError("no space left")

    monkeypatch.setattr("composer_replication.cli.export.atomic_write_json", broken)
    with pytest.raises(OSError, match="no space"):
        export_atif(run, tmp_path / "documents")
    assert [each.what for each in outside_copies(run)] == ["ATIF documents"]


def link_folder(path: Path, target: Path) -> Path:
    """A folder outside of the run, with a page in it, that `path` is a link to."""
    target.mkdir()
    (target / "1.html").write_text("a page")
    path.symlink_to(target, target_is_directory=True)
    return target / "1.html"


@pytest.mark.parametrize("name", ["report_sessions", "checkpoints", "earlier", "evaluation", "teacher_cache", "sites"])
def test_an_artefact_that_is_a_link_goes_as_a_link_and_the_session_goes_with_it(run, tmp_path, name):
    outside = link_folder(run.path(name), tmp_path / "outside")
    forgotten = forget(run, ["11111111-aaaa"])
    assert not run.path(name).is_symlink()
    assert outside.read_text() == "a page"
    assert name in forgotten.deleted
    assert str(tmp_path / "outside") in [each.path for each in forgotten.elsewhere]
    assert "11111111-aaaa" not in run.path("conversations").read_text()


@pytest.mark.parametrize("name", ["report_html", "sites", "pairs", "teacher_cache", "asked_tools"])
def test_a_link_that_leads_nowhere_goes_too(run, tmp_path, name):
    run.path(name).symlink_to(tmp_path / "nowhere")
    forget(run, ["11111111-aaaa"])
    assert not run.path(name).is_symlink()
    assert "11111111-aaaa" not in run.path("conversations").read_text()


def test_links_inside_a_folder_and_in_the_place_of_leftovers_are_not_followed(run, tmp_path):
    run.path("report_sessions").mkdir()
    pages = [
        link_folder(run.path("report_sessions") / "inside", tmp_path / "one"),
        link_folder(run.root / ".sites.jsonl.1.ab.tmp", tmp_path / "two"),
        link_folder(run.root / "evaluated.partial.jsonl", tmp_path / "three"),
    ]
    (run.root / ".pairs.jsonl.1.ab.tmp").mkdir()
    forget(run, ["11111111-aaaa"])
    assert [page.read_text() for page in pages] == ["a page"] * 3
    assert not any(run.root.glob("*partial*"))
    assert not any(run.root.glob(".*.tmp"))
    assert not run.path("report_sessions").exists()
    assert "11111111-aaaa" not in run.path("conversations").read_text()


def test_what_a_link_to_the_conversations_led_to_is_named(run, tmp_path):
    target = tmp_path / "conversations.jsonl"
    run.path("conversations").rename(target)
    run.path("conversations").symlink_to(target)
    forgotten = forget(run, ["11111111-aaaa"])
    assert "11111111-aaaa" not in run.path("conversations").read_text()
    assert "11111111-aaaa" in target.read_text()
    assert str(target) in [artefact.path for artefact in forgotten.elsewhere]


def test_what_a_link_inside_a_folder_led_to_is_named(run, tmp_path):
    run.path("report_sessions").mkdir()
    link_folder(run.path("report_sessions") / "inside", tmp_path / "one")
    assert str(tmp_path / "one") in [artefact.path for artefact in forget(run, ["11111111-aaaa"]).elsewhere]


def test_a_store_of_answers_behind_a_link_keeps_the_answers_of_other_runs(run, tmp_path):
    import sqlite3

    shared = tmp_path / "shared.sqlite"
    with sqlite3.connect(shared) as store:
        store.execute("CREATE TABLE replies (key TEXT)")
        store.execute("INSERT INTO replies VALUES ('paid')")
    run.path("teacher_cache").symlink_to(shared)
    assert "teacher_cache" in forget(run, ["11111111-aaaa"]).deleted
    with sqlite3.connect(shared) as store:
        assert store.execute("SELECT key FROM replies").fetchall() == [("paid",)]
