"""Before a launch, earlier ones of its bucket are asked about; what nobody can say is said, and stops nobody."""

from __future__ import annotations

import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from paid_service import PaidExecutor

from composer_replication.cli.replicas import preflight
from composer_replication.cli.replicas.launch_status import cancel, start_replica, start_replicas
from composer_replication.cli.replicas.launches import LaunchFile, canonical_bucket, create_launch, launch_path
from composer_replication.cli.replicas.request import LaunchRequest
from composer_replication.cli.replicas.supervision import DONE
from composer_replication.diloco.store import open_store
from composer_replication.errors import RunError
from refusals import refusal


class Asking(PaidExecutor):
    """Counts the questions, and may take its time over them."""

    num_polls, slow_s = 0, 0.0

    def poll(self, handle):
        self.num_polls += 1
        time.sleep(self.slow_s)
        return super().poll(handle)


class Place:
    """A bucket with earlier launches, and a machine that knows of them."""

    def __init__(self, folder: Path) -> None:
        self.bucket = str(folder / "bucket")
        self.store = open_store(self.bucket)
        self.executor = Asking(folder / "paid")

    def launch(self, *, executor: str = "local", replicas: int = 2, **options: Any) -> LaunchFile:
        about = {"bucket": self.bucket, "executor": executor, "options": options, "replicas": replicas, "commits": 4}
        args = {"trainer_kwargs": {}, "settings": {}}
        launch = create_launch(self.store, **about, entrypoint="nobody.calls_it", args=args)
        return LaunchFile.create(launch_path(canonical_bucket(self.bucket), launch.number), launch)

    def check(self, *, beside: bool = False, **options: Any) -> list[str]:
        asked = LaunchRequest(bucket=self.bucket, executor="local", replicas=1, module="mine", options=options)
        return preflight.check_launch(self.store, asked, self.executor, None, beside=beside)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Place(tmp_path)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("content", ["{}", "no JSON", '{"format": 2}'])
def test_a_file_that_cannot_be_read_is_said_and_stops_nobody(place, content, beside):
    file = place.launch()
    file.path.write_text(content)
    (line,) = place.check(beside=beside)
    assert line.startswith("launch 0 ")
    assert str(file.path) in line


def test_behind_a_file_that_cannot_be_read_others_are_asked_about(place):
    start_replicas(place.launch(), place.executor)
    place.launch().path.write_text("{}")
    with refusal(RunError, what="launch 0", got="rank 0, 1", fix="--beside"):
        place.check()
    first, second = place.check(beside=True)
    assert first.startswith("launch 1 ")
    assert second.startswith("launch 0 ")


def test_a_service_that_does_not_answer_is_said(place):
    start_replicas(place.launch(), place.executor)
    place.executor.trouble["silent"] = (0, 1)
    (line,) = place.check()
    assert line.startswith("launch 0 ")
    assert line.endswith("ServiceDown: 500 at a question")
    place.executor.trouble["silent"] = (0,)  # the other one is enough
    with refusal(RunError, what="launch 0", got="rank 1"):
        place.check()


class TestStartWhoseAnswerWasLost:
    @pytest.fixture
    def file(self, place) -> LaunchFile:
        file = place.launch(replicas=1, namespace="mine")
        place.executor.trouble["unanswered"] = 0
        with pytest.raises(Exception, match="504"):
            start_replica(file, file.read().launch, place.executor, 0, 0)
        assert file.read().latest_starts[0].handle is None
        return file

    def test_it_is_looked_for_by_its_name(self, place, file):
        with refusal(RunError, what="launch 0", got="rank 0"):
            place.check(namespace="mine")

    def test_one_that_is_not_listed_may_come_yet_and_nothing_is_noted(self, place, file):
        for path in place.executor.folder.iterdir():
            path.unlink()
        before = file.path.read_bytes()
        (line,) = place.check(namespace="mine")
        assert line.startswith("launch 0 ")
        assert "rank 0" in line
        place.executor.listed_s = 0.0  # of a service that lists at once
        assert place.check(namespace="mine") == []
        assert file.path.read_bytes() == before

    def test_where_it_cannot_be_looked_for_that_is_said(self, place, file):
        (line,) = place.check(namespace="another")
        assert line.startswith("launch 0 ")
        assert "namespace" in line


def test_a_cancel_that_did_not_end_all_leaves_a_launch_that_is_asked_about(place):
    file = place.launch()
    start_replicas(file, place.executor)
    place.executor.trouble["unending"] = (1,)
    assert [each.rank for each in cancel(file, place.executor, pause_s=0.0)] == [1]
    with refusal(RunError, what="launch 0", got="rank 1"):
        place.check()
    place.executor.trouble.clear()
    assert cancel(file, place.executor, pause_s=0.0) == []
    place.executor.num_polls = 0
    assert place.check() == []
    assert place.executor.num_polls == 0


def test_another_executor_is_neither_made_nor_asked(place, monkeypatch):
    made = []
    ray: Any = types.ModuleType("ray")
    ray.is_initialized, ray.init = lambda: False, lambda **how: made.append(how)
    monkeypatch.setitem(sys.modules, "ray", ray)
    file = place.launch(executor="ray", replicas=1)
    start_replicas(file, place.executor)
    (line,) = place.check()
    assert re.search(r"^launch 0 .*\bray\b.*\blocal\b", line)
    assert (made, place.executor.num_polls) == ([], 0)
    place.store.put(file.read().launch.key("output", "000", DONE), b"{}")
    assert place.check() == []


def test_all_questions_together_have_one_time_limit(place, monkeypatch):
    for _ in range(3):
        start_replicas(place.launch(), place.executor)
    monkeypatch.setattr(preflight, "MAX_CHECK_S", 0.3)
    place.executor.slow_s = 5.0
    begun = time.monotonic()
    lines = place.check()
    assert time.monotonic() - begun < 4
    assert place.executor.num_polls == 1
    assert [re.findall(r"^launch (\d)\b", line) for line in lines] == [["2"], ["0"]]
    assert re.search(r"\brank 0\b.* 0\.3 s\b", lines[0])
    assert " 0.3 s" in lines[1]
    assert "rank" not in lines[1]
