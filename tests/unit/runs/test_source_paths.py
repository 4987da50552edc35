"""Names of source files in sidecars: no user name in them, and lineage still finds the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.runs import RunDir

USER = "ada-lovelace"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "users" / USER
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    return home


def write_from(source: str | Path, run: RunDir) -> str:
    """The name that the sidecar of an artefact made from `source` gives it; lineage must find that file."""
    run.write_jsonl("pairs", [{"id": 1}], schema="pair", version=1, sources=[source])
    [name] = [each.name for each in run.meta("pairs").sources]
    assert_found(Path(source), run)
    return name


def assert_found(source: Path, run: RunDir) -> None:
    before = source.read_bytes()
    assert (run.lineage("pairs").stale, run.lineage("pairs").missing) == ((), ())
    source.write_bytes(before + b", continued")
    assert run.lineage("pairs").stale == ("pairs",)
    source.write_bytes(before)


def make_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"log")
    return path


@pytest.mark.parametrize(
    ("run_at", "source_at", "name"),
    [
        (f"users/{USER}/work/runs/1", f"users/{USER}/work/logs/a.jsonl", "../../logs/a.jsonl"),
        (f"users/{USER}/work", f"users/{USER}/logs/a.jsonl", "~/logs/a.jsonl"),
        (f"users/{USER}/work", f"users/{USER}/a.jsonl", "~/a.jsonl"),
        ("scratch/run", f"users/{USER}/logs/a.jsonl", "~/logs/a.jsonl"),
        ("scratch/run", "scratch/run/adapter/a.bin", "adapter/a.bin"),
        ("scratch/run", "scratch/run/~/a.bin", "./~/a.bin"),
        (f"users/{USER}/work", f"users/{USER}/work/~root", "./~root"),
    ],
)
def test_the_name_of_the_home_directory_is_in_no_sidecar(
    tmp_path: Path, home: Path, run_at: str, source_at: str, name: str
) -> None:
    run = RunDir.create(tmp_path / run_at)
    assert write_from(make_file(tmp_path / source_at), run) == name
    assert USER not in (run.root / "pairs.meta.json").read_text()


@pytest.mark.parametrize("run_at", ["data/run", f"users/{USER}/run"])
def test_a_file_outside_the_home_directory_and_the_run_keeps_its_path(tmp_path: Path, home: Path, run_at: str) -> None:
    log = make_file(tmp_path / "data" / "a.jsonl")
    assert write_from(log, RunDir.create(tmp_path / run_at)) == str(log)


def test_a_home_that_is_a_link_is_known_by_both_of_its_paths(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk" / USER
    disk.mkdir(parents=True)
    home.rmdir()
    home.symlink_to(disk)
    make_file(home / "logs" / "a.jsonl")
    run = RunDir.create(tmp_path / "run")
    assert write_from(home / "logs" / "a.jsonl", run) == "~/logs/a.jsonl"
    monkeypatch.chdir(home)  # the working directory is known by its real path
    assert write_from("logs/a.jsonl", run) == "~/logs/a.jsonl"
    assert USER not in (run.root / "pairs.meta.json").read_text()


def test_a_source_is_found_when_the_run_and_its_neighbours_move_together(home: Path) -> None:
    make_file(home / "work" / "logs" / "a.jsonl")
    write_from(home / "work" / "logs" / "a.jsonl", RunDir.create(home / "work" / "run"))
    (home / "work").rename(home / "archive")
    assert_found(home / "archive" / "logs" / "a.jsonl", RunDir.open(home / "archive" / "run"))


def test_a_run_behind_a_link_finds_its_sources_from_either_path(home: Path) -> None:
    log = make_file(home / "work" / "disk" / "a.jsonl")
    (home / "work" / "disk" / "run").mkdir()
    (home / "work" / "run").symlink_to(home / "work" / "disk" / "run")
    assert write_from(log, RunDir.create(home / "work" / "run")) == "../a.jsonl"
    assert_found(log, RunDir.open(home / "work" / "disk" / "run"))


def test_a_path_with_steps_back_over_a_link_names_the_file_it_means(home: Path) -> None:
    log = make_file(home / "far" / "logs" / "a.jsonl")
    (home / "far" / "logs" / "deep").mkdir()
    (home / "short").symlink_to(home / "far" / "logs" / "deep")
    assert write_from(home / "short" / ".." / "a.jsonl", RunDir.create(home / "run")) == "~/far/logs/a.jsonl"
    assert log.read_bytes() == b"log"


@pytest.mark.parametrize("value", ["/", ""])
def test_a_home_at_the_root_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOME", value)
    log = make_file(tmp_path / "a.jsonl")
    assert write_from(log, RunDir.create(tmp_path / "run")) == str(log)


def test_a_missing_source_is_told_by_its_name_in_the_sidecar(home: Path) -> None:
    log = make_file(home / "a.jsonl")
    run = RunDir.create(home / "work" / "run")
    write_from(log, run)
    log.unlink()
    assert run.lineage("pairs").missing == ("~/a.jsonl",)
