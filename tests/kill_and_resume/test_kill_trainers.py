"""Both trainers, killed and resumed, end with the weights, the teacher and the figures of a run that was not."""

from __future__ import annotations

import os

import pytest

from kill_and_resume.kills import kill_at, kill_in_file, kill_plan, kill_when_seen
from kill_and_resume.runs import run_to_end, run_with_kills

FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
JOBS = {"rollouts": ("kill_and_resume.composer_runs:job", 1), "logged": ("kill_and_resume.offline_runs:job", 2)}
KILLS = {
    # Steps 1 and 2 share a generation window, and so on: a micro-step of step 2 lies inside one.
    "rollouts": [kill_at("on_substep_end", 2), kill_in_file("extra-0.json", 4), kill_at("on_optimizer_step", 6)],
    "logged": [kill_at("on_substep_end", 4), kill_in_file("optimizer.json", 4), kill_when_seen("rng-0.json", 6)],
}


@pytest.mark.timeout(1200 if FULL else 300)  # twenty starts on a busy machine
@pytest.mark.parametrize("trainer", JOBS)
def test_a_killed_and_resumed_run_is_the_same_run(tmp_path, note, trainer):
    job, save_steps = JOBS[trainer]
    kills = kill_plan(20, num_steps=6, save_steps=save_steps) if FULL else KILLS[trainer]
    if not FULL:
        note(f"kill and resume on {trainer}: {len(kills)} kills (make test-full: 20)")
    whole = run_to_end(job, tmp_path / "whole")
    assert run_with_kills(job, tmp_path / "killed", kills) == whole
