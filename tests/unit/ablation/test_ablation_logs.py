"""The world of logs: a job trains and evaluates in a run of its own, and arms with the same warm-up share it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from ablation_plans import write_arms

from composer_replication.config import CrfConfig, loads
from composer_replication.errors import ConfigError, RunError
from composer_replication.evaluation.ablation.job import Job, Unit, read_result, run_in, write_job
from composer_replication.evaluation.ablation.logs import _session_units, check_plan
from composer_replication.evaluation.ablation.plan import Budget, read_plan
from composer_replication.runs.split import read_test_ids
from refusals import refusal

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


@pytest.fixture
def shared_run(run):
    """With pairs that were made after its split."""
    rows = list(run.read_jsonl("pairs", schema="dpo_pair", version=2))
    run.write_jsonl("pairs", rows, schema="dpo_pair", version=2, sources=["conversations", "split"])
    return run


def job_of(experiment, folder, shared_run, arm, seed=1, **loss):
    config = loads(CrfConfig, SETTINGS.replace("MODEL", str(folder / "model")))
    optimiser = replace(config.train.optimiser, seed=seed)
    channels = replace(config.train.channels, good_turns_after_warmup=not loss.get("alpha_sdpo"))
    train = replace(config.train, optimiser=optimiser, channels=channels)
    config = replace(config, loss=replace(config.loss, **loss), train=train)
    place = experiment / "jobs" / arm / str(seed)
    return Job(
        folder=place, arm=arm, seed=seed, world="logs", config=config, options={}, budget=Budget(), run=shared_run.root
    )


def test_jobs_share_a_warm_up_leave_the_shared_run_as_it_was_and_need_no_trl(tmp_path, folder, shared_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    before = {path.name: path.read_bytes() for path in shared_run.root.iterdir() if path.is_file()}
    results, warmups = [], set()
    for arm, weight in {"plain": 0, "hints": 1}.items():
        job = job_of(tmp_path, folder, shared_run, arm, alpha_sdpo=weight)
        write_job(job)
        results.append(run_in(job.folder))
        assert read_result(job.folder) == results[-1]
        assert not (job.folder / "run" / "checkpoints").exists()
        [warmup] = job.shared.glob("warmup-*/warmup.json")
        warmups.add(warmup.stat().st_mtime_ns)
    assert {path.name: path.read_bytes() for path in shared_run.root.iterdir() if path.is_file()} == before
    assert len(warmups) == 1
    plain, hints = results
    assert (plain.spent.steps, hints.spent.steps) == (3, 3)  # the warm-up's two, whoever made them, and one
    assert plain.digests["start"] == hints.digests["start"]
    assert plain.digests["trained"] != hints.digests["trained"]
    assert [unit.unit for unit in plain.units] == [unit.unit for unit in hints.units]
    assert plain.curve[-1]["step"] == 3
    channels = [[name for name in ("loss/lm_ce", "loss/sdpo_kl") if name in each.curve[-1]] for each in results]
    assert channels == [["loss/lm_ce"], ["loss/sdpo_kl"]]
    assert 0 < plain.spent.tokens < hints.spent.tokens  # hinted contexts are read, too


@pytest.mark.skipif(os.environ.get("CRF_TEST_PROFILE") != "full", reason="a process of its own: the full count")
def test_a_job_s_own_process_needs_no_trl(tmp_path, folder, shared_run):
    job = job_of(tmp_path, folder, shared_run, "plain")
    write_job(job)
    start = "from composer_replication.evaluation.ablation.job import _main; sys.exit(_main(sys.argv[1:]))"
    code = f"import sys; sys.modules['trl'] = None; {start}"
    done = subprocess.run([sys.executable, "-c", code, str(job.folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read_result(job.folder).spent.steps == 3


def test_a_job_with_nothing_to_judge_by_fails_and_says_why(tmp_path, folder, shared_run):
    rows = [
        row | {"is_kept": row["is_kept"] and row["conversation_id"] not in read_test_ids(shared_run)}
        for row in shared_run.read_jsonl("sites", schema="error_site", version=1)
    ]
    shared_run.write_jsonl("sites", rows, schema="error_site", version=1, sources=["conversations", "split"])
    job = job_of(tmp_path, folder, shared_run, "plain")
    write_job(job)
    with refusal(RunError, what=str(job.folder / "run"), fix="split.test"):
        run_in(job.folder)
    assert read_result(job.folder) is None


@pytest.mark.parametrize("name", ["split", "sites"])
def test_a_run_that_is_not_ready_is_refused_before_any_job(tmp_path, run, name):
    plan = read_plan(write_arms(tmp_path), run=str(run.root))
    check_plan(plan)
    run.path(name).unlink()
    with refusal(RunError, what=str(run.root), got=name, fix=f"crf {name} "):
        check_plan(plan)


def test_a_unit_is_a_session_with_sums_over_its_sites(run):
    def row(site, role, after, session="s"):
        keys = {"conversation_id": "c", "turn": 0, "turn_id": "t", "kind": "edit_no_match", "basis": "name"}
        own = {"id": f"{site}:{role}", "site_id": site, "session": session, "role": role}
        return {**own, **keys, "num_tokens": 1, "before": -2.0, "after": after, "control": None, "controls": None}

    rows = [row("1", "erring", -3.0), row("1", "good", -1.5), row("2", "erring", -2.0), row("2", "good", -2.0)]
    rows += [row("3", "erring", -2.5, "a"), row("3", "correction", -1.0, "a"), row("3", "good", -2.0, "a")]
    run.write_jsonl("evaluated", rows, schema="evaluated", version=1)
    sums = {"forced_erring": -1.0, "forced_gap": 1.5, "forced_good": 0.5, "sites": 2.0}
    others = {"forced_correction": 1.5, "corrections": 1.0, "forced_erring": -0.5, "forced_gap": 0.5}
    others |= {"forced_good": 0.0, "sites": 1.0}
    # The first 16 digits of sha256; in their order, which is not that of the names.
    expected = [Unit("043a718774c572bd", _with_kind(sums)), Unit("ca978112ca1bbdca", _with_kind(others))]
    assert _session_units(run) == expected  # no id of a session


def _with_kind(sums):
    return dict(sorted((sums | {f"{name}:edit_no_match": value for name, value in sums.items()}).items()))


def test_without_a_run_the_command_says_how_to_name_one(tmp_path, folder, run):
    job = replace(job_of(tmp_path, folder, run, "lost"), run=None)
    write_job(job)
    with refusal(ConfigError, what="ablate.run", fix="--run"):
        run_in(job.folder)
