"""Two processes: one checkpoint, one moment to stop, one failure; and FSDP2 states that come back whole."""

from __future__ import annotations

import shutil

import pytest

from composer_replication.trainer.checkpoints import newest_complete
from kill_and_resume.groups import run_group
from kill_and_resume.runs import run_to_end

JOB = "kill_and_resume.small_runs:job"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group") / "whole"
    return folder, run_group(JOB, folder, size=2)


def test_each_process_goes_on_with_its_own_batches_and_dropout(tmp_path, whole):
    folder, ends = whole
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["seen"] != ends[1]["seen"]
    shutil.copytree(
        folder / "checkpoint-4", tmp_path / "run" / "checkpoint-4"
    )  # within the second epoch of three steps
    for before, after in zip(ends, run_group(JOB, tmp_path / "run"), strict=True):
        assert after["seen"] == before["seen"][8:]
        assert {**after, "seen": None} == {**before, "seen": None}


def test_a_checkpoint_holds_the_states_of_both(whole):
    files = {path.name for path in (whole[0] / "checkpoint-4").iterdir()}
    assert {"rng-0.json", "rng-1.json", "extra-0.json", "extra-1.json", "cursor-1.safetensors"} <= files


def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path, whole):
    stopped = run_group(JOB, tmp_path / "run", stop_rank=1)
    assert [each["steps"] for each in stopped] == [3, 3]
    assert stopped[1]["stopped_by"] == "SIGTERM"
    assert stopped[0]["stopped_by"] not in {"", "SIGTERM"}  # it heard none itself
    assert newest_complete(tmp_path / "run").name == "checkpoint-3"
    assert run_group(JOB, tmp_path / "run")[0]["weights"] == whole[1][0]["weights"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_fails_one_process_is_said_by_both_and_nobody_waits(tmp_path, rank):
    said = run_group("kill_and_resume.small_runs:job_with_failing_disk", tmp_path / "run", rank=rank)
    assert ["No space left on device" in said[each]["error"] for each in (rank, 1 - rank)] == [True, False]
    assert all("checkpoint-4" in each["error"] for each in said)
    assert newest_complete(tmp_path / "run").name == "checkpoint-2"


def test_another_number_of_processes_is_refused(tmp_path, whole):
    shutil.copytree(whole[0] / "checkpoint-4", tmp_path / "run" / "checkpoint-4")
    with pytest.raises(AssertionError, match=r"StaleArtefactError.* num_processes 2\b.* num_processes 1\b"):
        run_to_end(JOB, tmp_path / "run")


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_sharded_weights_and_optimiser_come_back(tmp_path, lora):
    ends = run_group("kill_and_resume.small_runs:sharded_job", tmp_path / "run", lora=lora)
    for end in ends:
        assert end["resumed"] == end["stayed"] == ends[0]["stayed"]
        stayed, resumed, untrained = end["parts"]
        assert stayed == resumed
        assert (resumed == untrained) == lora  # below an adapter nothing is trained
    assert ends[0]["parts"] == ends[1]["parts"]  # every process reads all bytes
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in ends[0]["files"]
