"""What `crf train` says beside its figures: contexts a model never learnt, hints it does not heed, what was learnt."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from composer_replication.config import CrfConfig, loads
from composer_replication.envs.student import TRAINED_CONTEXT, student_folder
from composer_replication.trainer.from_config import inputs
from composer_replication.trainer.from_config.inputs import fitted, max_context
from composer_replication.trainer.from_config.offline import _context_warning
from composer_replication.trainer.from_config.training import _hint_check_findings
from composer_replication.trainer.objective import hint_proof as heeding
from composer_replication.trainer.warmup import FinishedWarmUp


def windows_of(model, **batch):
    """What a config with these options is fitted to, and what is said about it."""
    text = f"[train]\nmodel = '{model}'\n[train.batch]\n" + "".join(f"{k} = {v}\n" for k, v in batch.items())
    config = fitted(loads(CrfConfig, text))
    return config.train.batch.window, config.evaluation.context, _context_warning(config, max_context(model))


def test_unset_windows_fit_what_the_student_has_learnt_and_no_word_is_said():
    assert windows_of(str(student_folder())) == ((TRAINED_CONTEXT, 256), TRAINED_CONTEXT, "")


def test_windows_that_are_set_longer_than_that_stay_and_are_named():
    window, context, said = windows_of(str(student_folder()), budget=8192)
    assert (window, context) == ((8192, 1024), 2048)
    assert re.search(r"\b8,192 tokens\b.*\b2,048\b", said)
    assert windows_of(str(student_folder()), budget=2048, overlap=64)[::2] == ((2048, 64), "")


@pytest.mark.parametrize(
    ("positions", "said", "window", "context"),
    [
        (3000, 10**30, (3000, 375), 3000),
        (40960, 4000, (4000, 500), 4000),
        (131072, 131072, (32768, 2048), 8192),
        (None, 10**30, (32768, 2048), 8192),
    ],
)
def test_other_models_are_held_to_their_positions_and_what_their_tokenizer_says(
    monkeypatch, positions, said, window, context
):
    text = SimpleNamespace(max_position_embeddings=positions)
    monkeypatch.setattr(inputs, "model_config", lambda _name: SimpleNamespace(get_text_config=lambda: text))
    monkeypatch.setattr(inputs, "load_tokenizer", lambda _name: SimpleNamespace(model_max_length=said))
    assert windows_of("any") == (window, context, "")


@pytest.mark.parametrize(("heeds", "number"), [(False, 1), (True, 0), (None, 0)])
def test_a_proof_that_failed_is_part_of_the_diagnosis(monkeypatch, heeds, number):
    found = SimpleNamespace(heeds=heeds, summary=lambda *, can_warm_up: f"not heeded, {can_warm_up}")
    monkeypatch.setattr("composer_replication.trainer.from_config.training.verdict", lambda _proofs: found)
    for can_warm_up in (True, False):  # the advice of the proof is that of the report and of the card
        said = list(_hint_check_findings(SimpleNamespace(proofs=["one"]), can_warm_up=can_warm_up))
        assert said == [f"not heeded, {can_warm_up}"] * number
    for without in (SimpleNamespace(proofs=None), None):
        assert list(_hint_check_findings(without, can_warm_up=True)) == []
    assert heeding.verdict([]).heeds is None


def test_a_warm_up_says_what_it_learnt():
    done = FinishedWarmUp(checkpoint="checkpoint-9", steps=9, held_out=[], start_weights="x", settings={})
    assert re.search(r"^warm-up\b.*\b9 steps\b.*\bcheckpoint-9\b", done.describe())
    told = replace(done, learnt=[2.5, 1.25], held_out=[[3, 3.0], [6, 2.0]]).describe()
    assert re.search(r"\b2\.500\b.*\b1\.250\b.*\b3\.000\b.*\b2\.000\b", told)
