"""What `crf train` says of a run that cannot go on as it is asked to, or that did not meet what there is."""

from __future__ import annotations

import shutil

from composer_replication.runs import RunDir
from composer_replication.runs.artefacts import NOT_WRITTEN_YET
from output_facts import lines_with


def test_a_weight_that_changed_is_named_where_the_checkpoint_is_refused(train):
    assert train("--set", "train.optimiser.steps=1")[0] == 0
    status, _, err = train("--set", "train.optimiser.steps=2", "--set", "loss.beta_replay=0")
    assert status == 1
    changes = ("loss.beta_replay: 0.1 -> 0.0", "train.optimiser.steps: 1 -> 2")
    assert lines_with(err, "crf train", train.output / "checkpoints", *changes)


def test_the_diagnosis_does_not_miss_pairs_that_the_steps_did_not_meet(train, folder, tmp_path):
    run = RunDir.open(shutil.copytree(folder / "run", tmp_path / "run"))
    pairs = list(run.read_jsonl("pairs", schema="dpo_pair", version=2))[-1:]
    run.write_jsonl("pairs", pairs, schema="dpo_pair", version=2, sources=["conversations"])
    one_session = ("--set", "train.optimiser.steps=1", "--set", "train.optimiser.per_device=1")
    status, out, err = train(*one_session, "--set", f"train.run='{run.root}'")
    assert status == 0, err
    (diagnosis,) = [line for line in out.splitlines() if line.startswith("diagnosis: ")]
    assert lines_with(diagnosis, 1, "pairs", "channel 3", "train.optimiser.steps")


def test_new_pairs_are_refused_in_words_before_anything_is_computed(train, folder, tmp_path):
    run = RunDir.open(shutil.copytree(folder / "run", tmp_path / "run"))
    given = ("--set", "train.optimiser.steps=1", "--set", f"train.run='{run.root}'", "--set", "train.proof.on=true")
    assert train(*given)[0] == 0
    pairs = list(run.read_jsonl("pairs", schema="dpo_pair", version=2))[:6]
    run.write_jsonl("pairs", pairs, schema="dpo_pair", version=2, sources=["conversations"])
    status, _, err = train(*given)
    assert status == 1
    assert lines_with(err, train.output / "checkpoints", "pairs", "`--set train.output=FOLDER`")
    assert not lines_with(err, "sites")  # whose hints would be proved first
    assert train(*given, output=tmp_path / "elsewhere")[0] == 0


def test_what_a_training_is_made_of_says_whether_it_is_made_again(train, folder, tmp_path, monkeypatch):
    from dataclasses import replace

    from composer_replication.config.presets import load_with_preset
    from composer_replication.trainer.from_config.train_run import move_earlier_training, weights_folder, why_train

    run = RunDir.open(shutil.copytree(folder / "run", tmp_path / "run"))
    assert train("--set", "train.optimiser.steps=1", "--set", f"train.run='{run.root}'", output=None)[0] == 0
    config = load_with_preset("run.toml", ["train.optimiser.steps=1"])
    assert why_train(config, run) == ("", False)
    more = replace(config, train=replace(config.train, optimiser=replace(config.train.optimiser, steps=2)))
    assert why_train(more, run) == ("train.optimiser.steps: 1 -> 2", False)
    assert train("--set", "train.optimiser.steps=2", "--set", f"train.run='{run.root}'", output=None)[0] == 0
    assert why_train(config, run) == ("train.optimiser.steps: 2 -> 1", True)
    config = more
    other = replace(config, loss=replace(config.loss, beta_replay=0.2))
    assert why_train(other, run) == ("loss.beta_replay: 0.1 -> 0.2", True)
    run.write_jsonl("pairs", [], schema="dpo_pair", version=2, sources=["conversations"])
    why, is_other = why_train(config, run)
    assert lines_with(why, "pairs")
    assert is_other
    for name in ("evaluation.json", "evaluated.jsonl", "evaluated.meta.json"):
        (run.root / name).write_text("{}")
    place = move_earlier_training(config, run)
    assert {each.name for each in place.glob("eval*")} == {"evaluation.json", "evaluated.jsonl", "evaluated.meta.json"}
    assert not run.path("evaluation").exists()
    assert (place / "adapter" / "training.json").exists()
    assert not weights_folder(config, run).exists()
    assert why_train(config, run) == (NOT_WRITTEN_YET, False)
    assert move_earlier_training(config, run).name == "2"
