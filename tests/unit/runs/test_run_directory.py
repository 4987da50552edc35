"""Creating and opening run directories, and the table of artefact names."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from composer_replication.config.values import RESOLVED_NAME
from composer_replication.errors import InputError, RunError
from composer_replication.runs import ARTEFACTS, RunDir
from refusals import refusal


def test_a_created_run_opens_again(tmp_path: Path) -> None:
    created = RunDir.create(tmp_path / "deep" / "run")
    assert RunDir.open(tmp_path / "deep" / "run").root == created.root


def test_an_empty_folder_becomes_a_run_and_a_crashed_creation_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / ".run.json.1.abc.tmp").write_bytes(b"")
    RunDir.create(tmp_path)
    assert RunDir.open(tmp_path).root == tmp_path


def test_a_run_is_not_created_over_another_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path)
    marker = (tmp_path / "run.json").read_bytes()
    with refusal(RunError, what=str(tmp_path), got="run.json"):
        RunDir.create(tmp_path)
    assert (tmp_path / "run.json").read_bytes() == marker


def no_links(_source: object, _target: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_of_creators_at_the_same_time_one_wins_and_the_others_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    num_creators = 8
    start = Barrier(num_creators)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)

    def create(root: Path) -> str:
        start.wait()
        try:
            RunDir.create(root)
        except RunError as error:
            return error.got
        return "won"

    with ThreadPoolExecutor(num_creators) as pool:
        for attempt in range(20):
            root = tmp_path / str(attempt)
            outcomes = list(pool.map(create, [root] * num_creators))
            assert outcomes.count("won") == 1
            assert sum("run.json" in each for each in outcomes) == num_creators - 1
            assert [each.name for each in root.iterdir()] == ["run.json"]
            assert RunDir.open(root).root == root


def test_a_run_is_not_created_among_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with refusal(RunError, what=str(tmp_path), got="thesis.tex"):
        RunDir.create(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_is_not_created_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with refusal(RunError, what=str(tmp_path / "run"), got="file"):
        RunDir.create(tmp_path / "run")
    assert (tmp_path / "run").is_file()


@pytest.mark.parametrize(("folder", "missing"), [("absent", "folder"), (".", "run.json")])
def test_what_is_no_run_does_not_open(tmp_path: Path, folder: str, missing: str) -> None:
    with refusal(RunError, what=str(tmp_path / folder), got=missing, expected="run.json", fix="`crf ingest`"):
        RunDir.open(tmp_path / folder)


@pytest.mark.parametrize(
    ("marker", "got", "expected"), [("{", "line 1 column 2", "JSON"), ('{"layout_version": 99}', "99", "1")]
)
def test_a_run_of_an_unknown_layout_does_not_open(tmp_path: Path, marker: str, got: str, expected: str) -> None:
    (tmp_path / "run.json").write_text(marker)
    with refusal(RunError, what=str(tmp_path / "run.json"), got=got, expected=expected):
        RunDir.open(tmp_path)


def test_the_marker_names_the_tool_that_made_the_run(tmp_path: Path) -> None:
    RunDir.create(tmp_path)
    marker = json.loads((tmp_path / "run.json").read_text())
    assert set(marker) == {"layout_version", "created", "tool_version"}


def test_no_two_artefacts_share_a_file_and_none_takes_the_name_of_a_sidecar() -> None:
    names = [each.file_name for each in ARTEFACTS.values()] + [each.sidecar_name for each in ARTEFACTS.values()]
    assert len(set(names)) == len(names)
    assert all(name == artefact.name for name, artefact in ARTEFACTS.items())


def test_the_config_artefact_is_the_file_that_the_config_package_writes() -> None:
    assert ARTEFACTS["config"].file_name == RESOLVED_NAME


def test_the_path_of_an_artefact_is_inside_the_run(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path).path("ref_logprobs") == tmp_path / "ref_logprobs.safetensors"


def test_a_misspelt_artefact_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    with refusal(InputError, got="'conversation'", fix="'conversations'"):
        RunDir.create(tmp_path).path("conversation")


@pytest.mark.parametrize("name", ["metrics", "evaluation", "checkpoints"])
def test_only_records_are_written_as_records(tmp_path: Path, name: str) -> None:
    with refusal(InputError, what=repr(name), expected="conversations, session_sources, forgotten, tools, split, "):
        RunDir.create(tmp_path).write_jsonl(name, [], schema="s", version=1)


def test_only_a_journal_is_appended_to(tmp_path: Path) -> None:
    with refusal(InputError, what="'pairs'", expected="elsewhere, struck_hints, asked_tools, metrics"):
        RunDir.create(tmp_path).append_jsonl("pairs")
