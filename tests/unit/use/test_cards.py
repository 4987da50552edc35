"""Cards state data, licence, figures with intervals and limits; no path is relative, no text of a log is in them."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import yaml

from composer_replication.cli.export_weights import _evaluation_of
from composer_replication.envs.student import student_folder
from composer_replication.runs import RunDir
from composer_replication.runs.files import hash_weight_files, write_evaluation
from composer_replication.trainer.trained import (
    UNKNOWN_LICENCE,
    Trained,
    _licence_of,
    data_card,
    find_trained,
    make_base_absolute,
    model_card,
    resolve_base,
)

EVALUATION = {
    "schema": "composer_replication.evaluation",
    "version": 1,
    "models": {"before": {"name": "start"}, "after": {"name": "adapter"}, "control": None},
    "primary": "forced_gap",
    "verdict": {"word": "better", "sentences": ["Erring calls became less likely.", "Good ones <b>stayed</b>."],
                "remarks": ["Training hardly moved the model | at all."]},
    "power": {"sentence": "With 40 sites an effect of 0.2 nats could have been seen."},
    "figures": [
        {"name": "forced_gap", "arm": "after", "label": "gap", "unit": "nats", "estimate": 0.5, "low": 0.25,
         "high": 0.75, "n": 40, "sessions": 12, "better": "higher", "is_primary": True, "kind": None},
        {"name": "forced_erring", "arm": "control", "label": "erring", "unit": "nats", "estimate": -0.125, "low": None,
         "high": None, "n": 40, "sessions": 12, "better": "lower", "is_primary": False, "kind": None},
        {"name": "forced_gap", "arm": "after", "label": "gap of one kind", "unit": "nats", "estimate": 1.0, "low": 0.5,
         "high": 2.0, "n": 4, "sessions": 2, "better": "higher", "is_primary": False, "kind": "path_missing"},
    ],
    "not_run": {"sampled": "no GPU"},
    "damage": [{"name": "loss_good_turns", "before": 1.5, "after": 1.25, "control": None, "unit": "nats"}],
}  # fmt: skip


def front_matter(card):
    return yaml.safe_load(card.split("---")[1])


def test_a_card_states_base_licence_data_figures_and_limits(example_run, tmp_path):
    base = shutil.copytree(student_folder(), tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    record = {
        "steps": 12,
        "warmup_steps": 3,
        "config_hash": "c" * 64,
        "start_digest": "d" * 64,
        "channels": [
            {"name": "sdpo_kl", "weight": 0.1, "steps": 11},
            {"name": "trace_replay_dpo", "weight": 0.05, "steps": 0},
        ],
    }
    trained = Trained(base=str(base), adapter=tmp_path, record=record, run=RunDir.open(example_run))
    card = model_card(trained, form="adapter", name="/somewhere/adapter", evaluation=EVALUATION)
    assert front_matter(card)["license"] == "apache-2.0"
    assert front_matter(card)["base_model"] == str(base)
    assert "apache-2.0" in card.partition("\n---\n")[2]  # in the text as well
    assert re.search(r"\b12 steps\b.*\bwarm-up\b.*\b3\b.*\bsdpo_kl\b.*\b0\.1\b.*\b11 steps\b", card)
    head, interval = r"\| \*\*gap\*\* \| after \| \+0\.500 nats \|", r" \+0\.250\b.*\+0\.750 \|"
    assert re.search(rf"{head}{interval} 40 \| 12 \| higher\b", card)
    assert re.search(r"\| erring \| control \| -0\.125 nats \| [^|\d]*\bsessions\b[^|\d]* \| 40 \| 12 \| lower\b", card)
    assert "gap of one kind" not in card
    assert "Erring calls became less likely. Good ones &lt;b>stayed&lt;/b>." in card
    assert "- Training hardly moved the model \\| at all." in card
    assert "- With 40 sites an effect of 0.2 nats could have been seen." in card
    assert re.search(r"\bsampled\b.*\bno GPU\b", card)
    assert "| loss_good_turns | 1.5 | 1.25 | nats |" in card
    counts = json.loads((example_run / "conversations.meta.json").read_text())["counts"]
    assert re.search(rf"\b{counts['sessions']} sessions\b", card)
    assert re.search(r"\b7\b[^.]*\bhint\b", card)
    assert re.search(r"\b5\b[^.]*\bpairs\b", card)


@pytest.mark.parametrize("files", [None, "digest of others", "digest of these"])
def test_figures_of_other_weights_are_in_no_card(tmp_path, files):
    run, adapter = RunDir.create(tmp_path / "run"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    these = hash_weight_files(adapter)
    after = {"name": "gone/adapter", "files": these if files == "digest of these" else files}
    models = {**EVALUATION["models"], "after": after}
    write_evaluation(run, {**EVALUATION, "models": models, "split": {}, "sampled": None, "drops": {}})
    found = _evaluation_of(Trained(base="m", adapter=adapter, run=run))
    assert (found is not None) == (files == "digest of these")


def test_what_nobody_knows_is_said(tmp_path):
    card = model_card(Trained(base="owner/model"), form="merged", name="x", evaluation=None)
    assert UNKNOWN_LICENCE in card
    assert "license" not in front_matter(card)
    assert front_matter(card)["base_model"] == "owner/model"
    assert "`crf evaluate RUN`" in card  # which would say whether it is better
    [training] = re.findall(r"\n## Training\n\n(.+?)\n\n## ", card, re.DOTALL)
    assert not re.search(r"\d|channel", training)


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"README.md": "---\ntags: [a]\nlicense: mit # a comment\n---\n"}, "mit"),
        ({"README.md": '---\nlicense: "llama3.1"\n---\nlicense: other\n'}, "llama3.1"),
        ({"README.md": "# No front matter\nlicense: mit\n"}, UNKNOWN_LICENCE),
        ({"config.json": '{"license": "bsd-3-clause"}'}, "bsd-3-clause"),
        ({"README.md": "---\nlicense:\n---\n", "config.json": '{"license": 3}'}, UNKNOWN_LICENCE),
        ({}, UNKNOWN_LICENCE),
    ],
)
def test_the_licence_is_what_the_start_weights_say(tmp_path, files, licence):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _licence_of(str(tmp_path)) == licence


def test_a_relative_base_is_found_from_here_and_from_the_adapter_and_written_down_whole(adapter, tmp_path, monkeypatch):
    work = tmp_path / "work"
    shutil.copytree(student_folder(), work / "small")
    copy = shutil.copytree(adapter, work / "run" / "adapter")
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "small"}))
    monkeypatch.chdir(tmp_path)  # from another folder
    assert find_trained(str(copy)).base == str(work / "small")
    assert make_base_absolute(copy) == str(work / "small")
    assert json.loads((copy / "adapter_config.json").read_text())["base_model_name_or_path"] == str(work / "small")
    assert resolve_base("owner/model") == "owner/model"


def test_no_text_of_a_log_is_in_a_card(example_run):
    run = RunDir.open(example_run)
    card = model_card(Trained(base="m", run=run), form="merged", name="x", evaluation=None)
    card += data_card(run, name="d", what="w", fields={"a": "b"}, files={"train": "train.jsonl"})
    rows = [json.loads(line) for line in (example_run / "conversations.jsonl").read_text().splitlines()]
    said = {turn["text"] for row in rows for turn in row["turns"] if len(turn["text"]) > 20}
    assert said
    assert [text for text in said if text in card] == []
