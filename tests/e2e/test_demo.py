"""`crf demo`: what it promises, on this machine, in minutes; a channel that did not run makes it fail."""

from __future__ import annotations

import json

import pytest

from composer_replication.cli.main import main
from composer_replication.runs import RunDir
from composer_replication.runs.evaluation import read_evaluation
from composer_replication.steps.demo import SEED, SESSIONS, SETTINGS, channels_that_did_not_run, demo_config, demo_logs


def test_it_takes_sixty_sessions_or_more_and_every_setting_is_a_key(tmp_path):
    config = demo_config(tmp_path / "logs")
    assert SESSIONS >= 60
    assert config.run.control
    assert (config.train.control, config.evaluation.primary) == ("none", "forced_gap")
    assert len({each.partition("=")[0] for each in SETTINGS}) == len(SETTINGS)


def test_logs_are_made_once_and_whole(tmp_path):
    (tmp_path / ".logs.making").mkdir()
    (tmp_path / ".logs.making" / "half").write_text("killed here")
    logs = demo_logs(tmp_path / "logs", sessions=2, seed=SEED - 5)
    files = {path: path.stat().st_mtime_ns for path in logs.rglob("*.jsonl")}
    assert len(files) == 2
    demo_logs(tmp_path / "logs", sessions=2, seed=SEED - 5)
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_channel_with_a_weight_and_no_step_is_named(tmp_path):
    for folder, steps in ((tmp_path, 3), (tmp_path / "control", 0)):
        (folder / "adapter").mkdir(parents=True)
        channels = [{"name": "sdpo_kl", "weight": 0.1, "steps": steps}, {"name": "lm_ce", "weight": 0.0, "steps": 0}]
        (folder / "adapter" / "training.json").write_text(json.dumps({"channels": channels}))
    assert channels_that_did_not_run(tmp_path) == [f"sdpo_kl of {tmp_path / 'control'}"]


@pytest.mark.full
def test_the_trained_arm_is_better_on_held_out_sessions_and_the_control_is_not(tmp_path, capsys):
    assert main(["demo", "-o", str(tmp_path / "demo")]) == 0
    lines = capsys.readouterr().out.splitlines()
    run = RunDir.open(tmp_path / "demo" / "run")
    assert lines[-1] == f"report: {run.path('report_html')}"
    assert run.path("report_html").stat().st_size > 10_000
    evaluation = read_evaluation(run)
    primary = {
        each["arm"]: each for each in evaluation["figures"] if each["name"] == "forced_gap" and each["kind"] is None
    }
    assert evaluation["verdict"]["word"] == "better"
    assert primary["after"]["low"] > 0
    assert primary["control"]["low"] < 0 < primary["control"]["high"]
