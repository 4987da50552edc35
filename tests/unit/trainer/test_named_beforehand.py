"""What a training began with and what it took stays known when it goes on: its primary figure, and its seconds."""

from __future__ import annotations

import pytest

from composer_replication.config import CrfConfig, loads
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.sessions import phases
from composer_replication.trainer.sessions.phases import Phase, PhaseTimes


def named(primary):
    return loads(CrfConfig, f'[evaluation]\nprimary = "{primary}"\n')


@pytest.mark.parametrize(("step", "expected"), [(3, "forced_gap"), (None, "forced_erring")])
def test_a_training_that_goes_on_keeps_the_primary_figure_that_it_began_with(tmp_path, monkeypatch, step, expected):
    """However often it goes on: the settings beside the weights name what was named before the first step."""
    folder = TrainingFolder(tmp_path)
    monkeypatch.setattr(TrainingFolder, "newest_step", lambda _self: step)
    folder.write_config(named("forced_gap"))
    for other in ("forced_correction", "forced_erring"):
        config = folder.with_first_primary(named(other))
        folder.write_config(config)
    assert config.evaluation.primary == expected
    folder.config.write_text("[evaluation]\nprimary = 3\n")
    assert folder.with_first_primary(named("forced_erring")).evaluation.primary == "forced_erring"


def test_seconds_of_what_comes_before_the_first_step_add_up_over_calls(tmp_path, monkeypatch):
    heard = []

    def one_call(*times):
        clock = iter(times)
        monkeypatch.setattr(phases.time, "monotonic", lambda: next(clock))
        told = PhaseTimes(tmp_path / "checkpoints" / "seconds.json", heard.append)
        for done in range(len(times)):
            told(Phase(name="hint proof", done=done, total=2, items="sites"))
        return told.seconds

    assert one_call(10.0, 11.0, 14.5) == {"hint proof": 4.5}
    assert one_call(0.0, 2.0, 3.0) == {"hint proof": 7.5}
    assert len(heard) == 6


def test_a_phase_whose_process_is_killed_before_it_is_over_is_known_to_the_next(tmp_path):
    path = tmp_path / "seconds.json"
    PhaseTimes(path, lambda _phase: None)(Phase(name="hint proof", done=0, total=2, items="sites"))
    assert PhaseTimes(path, lambda _phase: None).seconds == {"hint proof": 0.0}
