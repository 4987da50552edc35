"""A run that is killed and resumed ends with the weights of one that was not: bit for bit, plain and with LoRA."""

from __future__ import annotations

import os

import pytest

from composer_replication.trainer.checkpoints import newest_complete
from kill_and_resume.kills import kill_at, kill_in_file, kill_plan, kill_when_seen
from kill_and_resume.runs import run_to_end, run_until_killed, run_with_kills

FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
JOB = "kill_and_resume.small_runs:job"
KILLS = [kill_at("on_substep_end", 4), kill_in_file("optimizer.json", 8), kill_when_seen("rng-0.json", 10)]


@pytest.mark.timeout(1200 if FULL else 300)  # twenty starts on a busy machine
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_a_run_killed_and_resumed_ends_as_one_that_was_not(tmp_path, note, lora):
    kills = kill_plan(20, num_steps=12, save_steps=2) if FULL else KILLS
    if not FULL:
        note(f"kill and resume of the small trainer: {len(kills)} kills (make test-full: 20)")
    options = {"lora": lora}
    whole = run_to_end(JOB, tmp_path / "whole", **options)
    killed = run_with_kills(JOB, tmp_path / "killed", kills, **options)
    assert killed["seen"] == whole["seen"][-len(killed["seen"]) :]
    assert {**killed, "seen": None} == {**whole, "seen": None}
    assert whole["steps"] == 12


def test_a_save_that_was_killed_before_its_manifest_is_passed_over(tmp_path, caplog):
    run_until_killed(JOB, tmp_path / "run", kill_in_file("manifest.json", 4))
    half, earlier = tmp_path / "run" / "checkpoint-4", tmp_path / "run" / "checkpoint-2"
    assert (half / "rng-0.json").exists()
    assert newest_complete(tmp_path / "run") == earlier
    assert "checkpoint-4" in caplog.text
