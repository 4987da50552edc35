"""The evaluation's figures reach a tracker once, with their intervals, whatever happens on the way."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from test_cards import EVALUATION

from composer_replication.errors import MissingExtraError
from composer_replication.evaluation.evaluate import _evaluation_metrics, _report_evaluation


class Tracker(ModuleType):
    def __init__(self, error=None):
        super().__init__("trackio")
        self.asked, self.error = [], error

    def init(self, **given):
        self.asked.append(("init", given))

    def log(self, metrics):
        self.asked.append(("log", metrics))
        if self.error:
            raise self.error

    def finish(self):
        self.asked.append(("finish",))


def test_figures_become_metrics_with_their_intervals():
    assert _evaluation_metrics(EVALUATION) == {
        "evaluation/after/forced_gap": 0.5,
        "evaluation/after/forced_gap/low": 0.25,
        "evaluation/after/forced_gap/high": 0.75,
        "evaluation/control/forced_erring": -0.125,
        "evaluation/after/forced_gap/path_missing": 1.0,
        "evaluation/after/forced_gap/path_missing/low": 0.5,
        "evaluation/after/forced_gap/path_missing/high": 2.0,
        "evaluation/damage/loss_good_turns/before": 1.5,
        "evaluation/damage/loss_good_turns/after": 1.25,
    }


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_they_are_logged_as_a_run_of_their_own(name, monkeypatch):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    _report_evaluation(name, EVALUATION, run_name="first")
    assert [each[0] for each in tracker.asked] == ["init", "log", "finish"]
    given = tracker.asked[0][1]
    assert (given["project"], given["name"]) == ("mine", "first-evaluation")
    assert given["config"]["verdict"] == "better"
    assert tracker.asked[1][1] == _evaluation_metrics(EVALUATION)


def test_a_tracker_that_fails_is_closed_and_none_logs_nothing(monkeypatch):
    tracker = Tracker(OSError("disk"))
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    with pytest.raises(OSError, match="disk"):
        _report_evaluation("trackio", EVALUATION, run_name="first")
    assert tracker.asked[-1] == ("finish",)
    _report_evaluation("none", EVALUATION, run_name="first")
    assert len(tracker.asked) == 3


def test_crf_evaluate_reports_to_the_tracker_of_the_training_and_does_without_one_that_is_gone(
    example_run, monkeypatch
):
    from composer_replication.config import CrfConfig, loads
    from composer_replication.evaluation import evaluate as step
    from composer_replication.evaluation.models import _Models
    from composer_replication.runs import RunDir
    from composer_replication.trainer.from_config.training import TrainingCallbacks

    monkeypatch.setattr(step, "_evaluate_run", lambda *_a, **_k: EVALUATION)
    monkeypatch.setattr(step, "models_of", lambda *_a, **_k: _Models("a", "b"))
    monkeypatch.setattr(step, "require_split_rows", lambda _run: [])
    tracker, said = Tracker(), []
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setitem(sys.modules, "wandb", None)
    for name in ("none", "trackio", "wandb"):
        config = loads(CrfConfig, f"[train]\nreport_to = '{name}'\n")
        record = step.evaluate(config, RunDir.open(example_run), progress=TrainingCallbacks(say=said.append))
        assert record is EVALUATION
    assert [each[0] for each in tracker.asked] == ["init", "log", "finish"]
    assert tracker.asked[0][1]["name"] == "run-evaluation"
    assert len(said) == 1
    assert "pip install wandb" in said[0]


def test_one_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"\bpip install wandb\b"):
        _report_evaluation("wandb", EVALUATION, run_name="first")
