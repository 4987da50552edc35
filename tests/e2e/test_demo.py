"""`crf demo`: what it promises, on this machine, in minutes; a channel that did not run makes it fail."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from composer_replication.cli.demo import (
    SEED,
    SESSIONS,
    SETTINGS,
    SHUFFLES,
    _channels_that_did_not_run,
    demo_config,
    demo_logs,
)
from composer_replication.cli.main import main
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_evaluation
from composer_replication.runs.lineage import describe_channel
from output_facts import lines_with


def test_it_takes_sixty_sessions_or_more_and_every_setting_is_a_key(tmp_path):
    config = demo_config(tmp_path / "logs")
    assert SESSIONS >= 60
    assert config.run.control
    assert config.run.shuffles >= 3  # with fewer an interval over shuffles says next to nothing
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
    for folder, steps in ((tmp_path, 3), (tmp_path / "control", 0), (tmp_path / "control" / "2", 0)):
        (folder / "adapter").mkdir(parents=True)
        channels = [{"name": "sdpo_kl", "weight": 0.1, "steps": steps}, {"name": "lm_ce", "weight": 0.0, "steps": 0}]
        (folder / "adapter" / "training.json").write_text(json.dumps({"channels": channels, "steps": 3}))
    controls = (tmp_path / "control", tmp_path / "control" / "2")
    outcomes = _channels_that_did_not_run(tmp_path)
    assert len(outcomes) == len(controls)
    for outcome, folder in zip(outcomes, controls, strict=True):
        assert lines_with(outcome, "sdpo_kl", f"{folder}:", describe_channel({"weight": 0.1, "steps": 0}, 3))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The folder of one whole demo, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("demo") / "demo", StringIO()
    with redirect_stdout(printed):
        assert main(["demo", "-o", str(folder)]) == 0
    return folder, printed.getvalue().splitlines()


def primary_of(run, arm):
    figures = read_evaluation(run)["figures"]
    (found,) = [each for each in figures if (each["name"], each["arm"], each["kind"]) == ("forced_gap", arm, None)]
    return found


@pytest.mark.full
def test_the_trained_arm_is_better_on_held_out_sessions(demo):
    folder, lines = demo
    run = RunDir.open(folder / "run")
    assert lines[-1].endswith(f" {run.path('report_html')}")
    assert run.path("report_html").stat().st_size > 10_000
    assert read_evaluation(run)["verdict"]["word"] == "better"
    assert primary_of(run, "after")["low"] > 0


@pytest.mark.full
def test_the_controls_interval_holds_zero_and_the_difference_to_it_does_not(demo):
    run = RunDir.open(demo[0] / "run")
    control, difference = primary_of(run, "control"), primary_of(run, "difference")
    assert control["low"] < 0 < control["high"]
    assert difference["low"] > 0
    assert (control["shuffles"], difference["shuffles"]) == (SHUFFLES, SHUFFLES)
    assert read_evaluation(run)["named"] == "before training"


@pytest.mark.full
def test_the_control_moves_little_beside_the_trained_arm(demo):
    run = RunDir.open(demo[0] / "run")
    assert abs(primary_of(run, "control")["estimate"]) < 0.2 * primary_of(run, "after")["estimate"]
