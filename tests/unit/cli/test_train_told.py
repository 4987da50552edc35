"""What `crf train` says of a run that cannot go on as it is asked to, or that did not meet what there is."""

from __future__ import annotations

import shutil

from composer_replication.runs import RunDir


def test_a_weight_that_changed_is_named_where_the_checkpoint_is_refused(train):
    assert train("--set", "train.optimiser.steps=1")[0] == 0
    status, _, err = train("--set", "train.optimiser.steps=2", "--set", "loss.beta_replay=0")
    assert status == 1
    refusal = next(line for line in err.splitlines() if "checkpoint-1: got sessions" in line)
    assert (
        "Set otherwise than when the run began: loss.beta_replay: 0.1 -> 0.0; train.optimiser.steps: 1 -> 2." in refusal
    )


def test_the_diagnosis_does_not_miss_pairs_that_the_steps_did_not_meet(train, folder, tmp_path):
    run = RunDir.open(shutil.copytree(folder / "run", tmp_path / "run"))
    pairs = list(run.read_jsonl("pairs", schema="dpo_pair", version=2))[-1:]
    run.write_jsonl("pairs", pairs, schema="dpo_pair", version=2, sources=["conversations"])
    one_session = ("--set", "train.optimiser.steps=1", "--set", "train.optimiser.per_device=1")
    status, out, err = train(*one_session, "--set", f"train.run='{run.root}'")
    assert status == 0, err
    assert [line for line in out.splitlines() if line.startswith("diagnosis: ")] == [
        "diagnosis: No step held any of the 1 preference pairs while their weight was above 0: channel 3 never ran. "
        "More steps (train.optimiser.steps) reach them."
    ]
