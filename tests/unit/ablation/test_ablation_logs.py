"""The world of logs: a job trains and evaluates in a run of its own, and arms with the same warm-up share it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from composer_replication.ablation.job import Job, Unit, read_result, run_in, write_job
from composer_replication.ablation.logs import session_units
from composer_replication.ablation.plan import Budget
from composer_replication.config import CrfConfig, loads
from composer_replication.errors import ConfigError

SETTINGS = """
[loss]
beta_replay = 0
alpha_sdpo = 0
[train]
model = "MODEL"
preset = "none"
[train.adapter]
rank = 4
[train.optimiser]
steps = 1
lr = 1e-2
per_device = 4
[train.save]
every = 100
[train.proof]
on = false
[train.warmup]
mode = "steps"
steps = 2
[evaluation]
samples = 0
good_turns = 0
token_gaps = 0
"""


@pytest.fixture(scope="module")
def experiment(folder, tmp_path_factory):
    return tmp_path_factory.mktemp("experiment")


@pytest.fixture
def shared_run(run):
    """With pairs that were made after its split."""
    rows = list(run.read_jsonl("pairs", schema="dpo_pair", version=2))
    run.write_jsonl("pairs", rows, schema="dpo_pair", version=2, sources=["conversations", "split"])
    return run


def job_of(experiment, folder, shared_run, arm, seed=1, **loss):
    config = loads(CrfConfig, SETTINGS.replace("MODEL", str(folder / "model")))
    optimiser = replace(config.train.optimiser, seed=seed)
    config = replace(config, loss=replace(config.loss, **loss), train=replace(config.train, optimiser=optimiser))
    place = experiment / "jobs" / arm / str(seed)
    return Job(folder=place, arm=arm, seed=seed, world="logs", config=config, options={}, budget=Budget(), run=shared_run.root)


def test_jobs_share_a_warm_up_and_leave_the_shared_run_as_it_was(experiment, folder, shared_run, monkeypatch):
    from composer_replication.trainer import warmup as warmups

    made = []
    monkeypatch.setattr(
        warmups, "_make_steps", lambda *a, make=warmups._make_steps, **k: (made.append(1), make(*a, **k))[1]
    )
    before = sorted(path.name for path in shared_run.root.iterdir())
    results = {}
    for arm, loss in {"plain": {}, "hints": {"alpha_sdpo": 1.0}}.items():
        job = job_of(experiment, folder, shared_run, arm, **loss)
        write_job(job)
        results[arm] = run_in(job.folder)
        assert read_result(job.folder) == results[arm]
    assert made == [1]
    assert sorted(path.name for path in shared_run.root.iterdir() if not path.name.endswith(".lock")) == before
    plain, hints = results["plain"], results["hints"]
    assert {each.spent.steps for each in results.values()} == {3}  # the warm-up's two, and one
    assert plain.digests["start"] == hints.digests["start"]
    assert plain.digests["trained"] != hints.digests["trained"]
    assert [unit.unit for unit in plain.units] == [unit.unit for unit in hints.units]
    assert plain.spent.tokens > 0 and plain.curve[-1]["step"] == 3
    assert not (experiment / "jobs" / "plain" / "1" / "run" / "checkpoints").exists()


def test_a_unit_is_a_session_with_sums_over_its_sites(run):
    def row(site, role, after, session="s"):
        keys = {"conversation_id": "c", "turn": 0, "turn_id": "t", "kind": "edit_no_match", "basis": "name"}
        own = {"id": f"{site}:{role}", "site_id": site, "session": session, "role": role}
        return {**own, **keys, "num_tokens": 1, "before": -2.0, "after": after, "control": None}

    rows = [row("1", "erring", -3.0), row("1", "good", -1.5), row("2", "erring", -2.0), row("2", "good", -2.0)]
    rows += [row("3", "erring", -2.5, "u"), row("3", "correction", -1.0, "u"), row("3", "good", -2.0, "u")]
    run.write_jsonl("evaluated", rows, schema="evaluated", version=1)
    sums = {"forced_erring": -1.0, "forced_gap": 1.5, "forced_good": 0.5, "sites": 2.0}
    others = {"forced_correction": 1.5, "corrections": 1.0, "forced_erring": -0.5, "forced_gap": 0.5}
    others |= {"forced_good": 0.0, "sites": 1.0}
    assert session_units(run) == [Unit(name, _with_kind(each)) for name, each in (("s", sums), ("u", others))]


def _with_kind(sums):
    return dict(sorted((sums | {f"{name}:edit_no_match": value for name, value in sums.items()}).items()))


def test_without_a_run_the_command_says_how_to_name_one(experiment, folder, run):
    job = replace(job_of(experiment, folder, run, "lost"), run=None)
    write_job(job)
    with pytest.raises(ConfigError, match="ablate.run: got none.*--run RUN"):
        run_in(job.folder)


def test_no_trl_is_needed(folder, shared_run, tmp_path):
    """A job's process, in which TRL cannot be imported."""
    import subprocess
    import sys

    job = job_of(tmp_path, folder, shared_run, "plain")
    write_job(job)
    code = f"""
import sys
sys.modules["trl"] = None
from composer_replication.ablation.job import main
raise SystemExit(main([{str(job.folder)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert read_result(job.folder).spent.steps == 3
