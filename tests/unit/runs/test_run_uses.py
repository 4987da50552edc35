"""A replay and a training keep a run as it is: nothing is forgotten under them, and no replay is ingested under."""

from __future__ import annotations

import pytest

from composer_replication.errors import RunError
from composer_replication.runs import RunDir
from refusals import refusal


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run")


def test_what_is_used_is_not_changed_and_may_be_again_afterwards(run):
    other = RunDir.open(run.root)
    with run.used_for("replay"):
        for against in (("replay",), ("replay", "training")):
            with (
                refusal(RunError, what=str(run.root), got="replay"),
                other.exclusive("forget", against=against),
            ):
                pytest.fail("the run was changed")
    with run.used_for("training"):
        with other.exclusive("ingest"):  # weights are made of what was read when they began
            pass
        with (
            refusal(RunError, what=str(run.root), got="training"),
            other.exclusive("forget", against=("replay", "training")),
        ):
            pytest.fail("the run was changed")
    with other.exclusive("forget", against=("replay", "training")):
        pass


def test_several_may_use_it_at_once_and_none_while_it_is_changed(run):
    other = RunDir.open(run.root)
    with run.used_for("training"), other.used_for("training"):
        pass
    with (
        run.exclusive("forget", against=("replay", "training")),
        refusal(RunError, what=str(run.root), got="process"),
        other.used_for("training"),
    ):
        pytest.fail("two at once")


def test_a_run_that_nobody_can_write_to_can_be_used(run, monkeypatch):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.open", read_only)
    with run.used_for("training"):
        pass
