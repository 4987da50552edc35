"""Lineage: back to the inputs, and which artefacts no longer follow from what they were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError, InputError
from composer_replication.runs import RunDir, Source


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # the log lies outside it
    path = tmp_path / "session.jsonl"
    path.write_bytes(b"log")
    return path


@pytest.fixture
def run(tmp_path: Path, log: Path) -> RunDir:
    """session.jsonl -> conversations -> sites -> pairs, and pairs from conversations too."""
    run = RunDir.create(tmp_path / "run")
    write(run, "conversations", 1, log)
    write(run, "sites", 1, "conversations")
    write(run, "pairs", 1, "sites", "conversations")
    return run


def write(run: RunDir, name: str, value: int, *sources: str | Path) -> None:
    run.write_jsonl(name, [{"value": value}], schema=name, version=1, sources=sources)


def test_a_fresh_chain_leads_back_to_its_input_and_nothing_is_stale(run: RunDir, log: Path) -> None:
    lineage = run.lineage("pairs")
    assert lineage.artefacts == ("conversations", "sites", "pairs")
    assert lineage.inputs == (Source(kind="file", name=str(log), sha256=hashlib.sha256(b"log").hexdigest()),)
    assert lineage.stale == ()
    assert lineage.missing == ()


def test_a_source_written_anew_makes_everything_after_it_stale(run: RunDir, log: Path) -> None:
    write(run, "conversations", 2, log)
    assert run.lineage("pairs").stale == ("sites", "pairs")
    assert run.lineage("conversations").stale == ()


def test_a_source_written_anew_with_the_same_rows_makes_nothing_stale(run: RunDir, log: Path) -> None:
    write(run, "conversations", 1, log)
    assert run.lineage("pairs").stale == ()


def test_staleness_passes_through_an_artefact_whose_own_bytes_did_not_change(run: RunDir, log: Path) -> None:
    write(run, "pairs", 1, "sites")
    write(run, "conversations", 2, log)
    assert run.lineage("pairs").stale == ("sites", "pairs")


def test_running_the_steps_again_in_order_makes_the_chain_fresh(run: RunDir, log: Path) -> None:
    write(run, "conversations", 2, log)
    write(run, "sites", 2, "conversations")
    assert run.lineage("pairs").stale == ("pairs",)
    write(run, "pairs", 2, "sites", "conversations")
    assert run.lineage("pairs").stale == ()


def test_an_input_that_changed_makes_the_whole_chain_stale(run: RunDir, log: Path) -> None:
    log.write_bytes(b"log, continued")
    assert run.lineage("pairs").stale == ("conversations", "sites", "pairs")


def test_an_input_that_is_gone_is_missing_and_not_called_changed(run: RunDir, log: Path) -> None:
    log.unlink()
    lineage = run.lineage("pairs")
    assert (lineage.stale, lineage.missing) == ((), (str(log),))


def test_an_artefact_that_is_gone_is_missing(run: RunDir) -> None:
    run.path("sites").unlink()
    lineage = run.lineage("pairs")
    assert (lineage.artefacts, lineage.missing) == (("conversations", "pairs"), ("sites",))


def test_a_source_that_disagrees_with_its_sidecar_is_an_error(run: RunDir) -> None:
    run.path("sites").write_bytes(b'{"value":9}\n')
    with pytest.raises(ArtefactCorruptError, match=r"sites\.jsonl"):
        run.lineage("pairs")
    with pytest.raises(ArtefactCorruptError, match=r"sites\.jsonl"):
        write(run, "pairs", 2, "sites")


def test_a_source_that_changes_while_its_rows_are_read_leaves_a_stale_artefact(run: RunDir, log: Path) -> None:
    def rows() -> Iterator[dict[str, object]]:
        yield {"value": 1}
        write(run, "conversations", 2, log)

    run.write_jsonl("sites", rows(), schema="sites", version=1, sources=["conversations"])
    assert run.lineage("sites").stale == ("sites",)


def test_a_file_artefact_can_be_a_source(run: RunDir) -> None:
    run.path("evaluation").write_bytes(b"{}")
    write(run, "pairs", 1, "evaluation")
    assert run.lineage("pairs").artefacts == ("evaluation", "pairs")
    run.path("evaluation").write_bytes(b"[]")
    assert run.lineage("pairs").stale == ("pairs",)


def test_two_artefacts_made_from_each_other_end_the_walk(run: RunDir) -> None:
    write(run, "conversations", 2, "pairs")
    assert set(run.lineage("pairs").stale) == {"sites", "pairs"}


def test_sources_that_do_not_exist_are_refused_by_name(run: RunDir) -> None:
    with pytest.raises(ArtefactNotFoundError, match="`crf replay`"):
        write(run, "pairs", 1, "teacher_calls")
    with pytest.raises(InputError, match=r"'conversation'.*\bconversations, session_sources\b"):
        write(run, "pairs", 1, "conversation")
    with pytest.raises(InputError, match="'checkpoints'"):
        write(run, "pairs", 1, "checkpoints")


def test_an_artefact_is_not_its_own_source(run: RunDir) -> None:
    before = run.meta("pairs")
    with pytest.raises(InputError, match="'pairs'"):
        write(run, "pairs", 2, "pairs")
    assert run.meta("pairs") == before


def test_the_lineage_of_what_was_never_written_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(ArtefactNotFoundError, match="`crf pairs`"):
        RunDir.create(tmp_path / "new").lineage("pairs")
