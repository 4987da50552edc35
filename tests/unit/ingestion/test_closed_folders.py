"""A folder that is closed to us is counted, and costs no other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from composer_replication.ingestion.registry import discover
from composer_replication.ingestion.source_files import IngestReport


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_closed_folder_is_counted_and_costs_no_other(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o000)
    (tmp_path / "a.jsonl").write_text("{}\n")
    report = IngestReport()
    assert [each.name for each in discover(tmp_path, report)] == ["a.jsonl"]
    assert any(os.strerror(errno.EACCES) in reason for reason in report.skipped)


def test_a_folder_that_cannot_be_looked_into_is_walked_past(tmp_path, monkeypatch):
    """As above, also for root: looking for the mark of a run must not raise."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.jsonl").write_text("{}\n")

    def closed(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", lambda self: closed(self) if self.name == "run.json" else True)
    assert [each.name for each in discover(tmp_path, IngestReport())] == ["a.jsonl"]
