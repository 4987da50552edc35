"""What an evaluation may claim: named before training, intervals over what was held out, models that give numbers."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from evaluation_runs import config

from composer_replication.config import CrfConfig, SplitConfig, config_hash, loads, write_resolved
from composer_replication.evaluation.arms import Arm
from composer_replication.evaluation.evaluate import evaluate
from composer_replication.evaluation.models import with_settings_of_training
from composer_replication.evaluation.verdict import _training_remarks
from composer_replication.runs.files import hash_weight_files, read_rows
from composer_replication.runs.split import read_split_rows


@pytest.fixture
def trained(other, tmp_path):
    """Weights with the record and the settings of a training beside them."""
    place = tmp_path / "out" / "model"
    shutil.copytree(other, place)
    settings = loads(CrfConfig, '[evaluation]\nprimary = "forced_erring"\n[train.batch]\nplacement = "before_turn"\n')
    write_resolved(settings, place.parent)
    (place / "training.json").write_text(json.dumps({"config_hash": config_hash(settings)}))
    return place


def test_a_figure_is_named_before_training_only_where_the_training_s_own_settings_name_it(run, folder, trained):
    names = {"before": str(folder / "model"), "after": str(trained)}
    before = evaluate(config('primary = "forced_erring"\n'), run, **names)
    assert before["named"] == "before training"
    assert "forced_erring" not in " ".join(before["verdict"]["remarks"])
    after = evaluate(config(), run, **names)
    assert after["named"] == "after training"
    assert "forced_erring" in after["verdict"]["remarks"][-1]  # which its settings name
    assert not [each for each in after["verdict"]["remarks"] if "windows" in each]
    (trained.parent / "config.resolved.toml").write_text('[evaluation]\nprimary = "forced_gap"\n')
    changed = evaluate(config(), run, **names)
    assert changed["named"] == "after training"


def test_settings_of_the_training_hold_where_none_are_named(run, trained):
    given = loads(CrfConfig, "")
    taken = with_settings_of_training(given, run, str(trained), ["evaluation.samples=1"])
    assert taken.evaluation.primary == "forced_erring"
    assert taken.evaluation.samples == 1
    assert taken.train.batch.placement == "before_turn"
    assert with_settings_of_training(given, run, str(trained.parent)) == given


def test_where_projects_are_held_out_intervals_are_over_projects(run, folder, other):
    sites = list(run.read_jsonl("sites", schema="error_site"))
    rows = [row._replace(project="/a" if at % 2 else "/b")._asdict() for at, row in enumerate(read_split_rows(run))]
    listed = [{**row, "near_duplicates": []} for row in rows]
    settings = {"by": "project", "validation": 0.0, "test": 0.5}
    run.write_jsonl("split", listed, schema="split", version=1, sources=["conversations"], settings=settings)
    run.write_jsonl("sites", sites, schema="error_site", version=1, sources=["conversations", "split"])
    record = evaluate(config(), run, before=str(folder / "model"), after=str(other))
    assert record["split"]["over"] == "project"
    assert {each["sessions"] for each in record["figures"]} == {2}
    assert record["verdict"]["word"] == "too_thin"
    assert re.search(r"\b5\b.*\bprojects\b.*\b2\b", record["verdict"]["sentences"][1])
    assert SplitConfig(by="project").by == settings["by"]


@pytest.mark.parametrize(("broken", "word"), [("after", "worse"), ("before", "too_thin"), ("control", None)])
def test_a_model_whose_log_probs_are_not_numbers_is_a_verdict(run, folder, other, tmp_path, broken, word):
    from transformers import AutoModelForCausalLM

    place = tmp_path / "broken"
    shutil.copytree(other, place)
    model = AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    model.save_pretrained(place)
    names = {"before": str(folder / "model"), "after": str(other), broken: str(place)}
    record = evaluate(config("samples = 1\nstates = 1\nnew_tokens = 2\n"), run, **names)
    assert repr(broken) in record["not_run"]["control" if broken == "control" else "forced"]
    if word is None:
        assert {each["arm"] for each in record["figures"]} == {"after"}
        assert all(row["control"] is None for row in read_rows(run, "evaluated"))
        return
    assert record["verdict"]["word"] == word
    assert "log-probs" in record["verdict"]["sentences"][0]
    assert record["figures"] == []


def test_every_part_without_a_result_has_a_reason(run, folder):
    model = str(folder / "model")
    record = evaluate(config(), run, before=model, after=model)
    assert set(record["not_run"]) >= {"control", "good_turns", "sampled", "token_gaps", "gsm8k", "code"}
    has_corrections = any(row["role"] == "correction" for row in read_rows(run, "evaluated"))
    assert has_corrections is ("corrections" not in record["not_run"])


@pytest.mark.parametrize(("seen", "is_said"), [(8, True), (16, False), (None, False)])
def test_steps_that_are_less_than_a_pass_over_the_data_are_a_remark(tmp_path, seen, is_said):
    counts = {"windows": 16} | ({} if seen is None else {"windows_seen": seen})
    (tmp_path / "training.json").write_text(json.dumps({"steps": 8, "counts": counts}))
    said = _training_remarks([Arm("before", "m", "m", None), Arm("after", str(tmp_path), "m", str(tmp_path))])
    assert len(said) == is_said
    figures = r"\b8 steps\b.*\b8 of 16 windows\b.*\btrain\.optimiser\.steps = 16\b"
    assert all(re.search(figures, each) for each in said)


def test_an_adapter_s_settings_belong_to_its_files_and_its_place_does_not(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")

    def digest(**settings):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        return hash_weight_files(tmp_path)

    first = digest(lora_alpha=16, r=8, base_model_name_or_path="here", peft_version="1")
    assert digest(r=8, lora_alpha=16, base_model_name_or_path="/there", peft_version="2") == first
    assert digest(lora_alpha=32, r=8) != first
    (tmp_path / "adapter_config.json").write_text("{")
    assert hash_weight_files(tmp_path) not in (first, None)
