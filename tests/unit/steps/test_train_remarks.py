"""What `crf train` says beside its figures: contexts a model never learnt, hints it does not heed, what was learnt."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from composer_replication.config import CrfConfig, loads
from composer_replication.envs.student import student_folder
from composer_replication.objective import heeding
from composer_replication.steps.train import _beyond_context
from composer_replication.trainer.from_config.training import _unheeded
from composer_replication.trainer.warmup import FinishedWarmUp


@pytest.mark.parametrize(("budget", "is_said"), [(2048, False), (2049, True), (8192, True)])
def test_windows_longer_than_the_student_has_seen_are_named(budget, is_said):
    text = f"[train]\nmodel = '{student_folder()}'\n[train.batch]\nbudget = {budget}\noverlap = 256\n"
    said = list(_beyond_context(loads(CrfConfig, text)))
    assert bool(said) == is_said
    assert all(f"{budget:,} tokens, and this model has learnt contexts of up to 2,048" in each for each in said)


def test_other_models_are_held_to_their_positions(tmp_path):
    import json
    import shutil

    copy = shutil.copytree(student_folder(), tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 3000}))
    text = f"[train]\nmodel = '{copy}'\n[train.batch]\nbudget = 3001\n"
    (said,) = _beyond_context(loads(CrfConfig, text))
    assert "up to 3,000" in said
    assert list(_beyond_context(loads(CrfConfig, text.replace("3001", "3000")))) == []


@pytest.mark.parametrize(("heeds", "number"), [(False, 1), (True, 0), (None, 0)])
def test_a_proof_that_failed_is_part_of_the_diagnosis(monkeypatch, heeds, number):
    found = SimpleNamespace(heeds=heeds, in_words=lambda *, can_warm_up: f"not heeded, {can_warm_up}")
    monkeypatch.setattr("composer_replication.trainer.from_config.training.verdict", lambda _proofs: found)
    for can_warm_up in (True, False):  # the advice of the proof is that of the report and of the card
        said = list(_unheeded(SimpleNamespace(proofs=["one"]), can_warm_up=can_warm_up))
        assert said == [f"not heeded, {can_warm_up}"] * number
    for without in (SimpleNamespace(proofs=None), None):
        assert list(_unheeded(without, can_warm_up=True)) == []
    assert heeding.verdict([]).heeds is None


def test_a_warm_up_says_what_it_learnt():
    done = FinishedWarmUp(checkpoint="checkpoint-9", steps=9, held_out=[], start_weights="x", settings={})
    assert done.in_words() == "warm-up: 9 steps of channel 1, the weights of checkpoint-9"
    told = replace(done, learnt=[2.5, 1.25], held_out=[[3, 3.0], [6, 2.0]]).in_words()
    assert "loss of good turns 2.500 at first, 1.250 at last; held-out loss of good turns 3.000 at first, 2.000" in told
