"""`crf train` with a warm-up: when there is one, what it says, and that it goes on wherever it was cut short."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from train_runs import GRPO, adapter_of, same

from composer_replication.cli.main import main
from composer_replication.objective import hint_proof
from composer_replication.runs import RunDir
from composer_replication.trainer import warmup
from composer_replication.trainer.checkpoints.manifest import read_manifest

AUTO = tuple(f"--set=train.{each}" for each in ("warmup.below=-1", "warmup.steps=3", "optimiser.steps=2"))
PROVED = (*AUTO, "--set", "train.proof.on=true", "--set", "train.save.every=2")
# A random model of a few words has -10 nats or so; -1 is what a model must have that knows them.
SENTENCE = "this model does not speak the logs' harness yet, and 3 steps of channel 1 come first"


@pytest.fixture
def own_run(folder, tmp_path):
    copy = tmp_path / "own"
    shutil.copytree(folder / "run", copy)
    for each in copy.glob("hint_proof*"):
        each.unlink()
    return copy


def test_a_model_that_does_not_know_the_tools_is_warmed_up_unless_told_otherwise(train, own_run, tmp_path, capsys):
    of_run = (*PROVED, "--set", f"train.run='{own_run}'")
    status, _, err = train(*of_run)
    assert status == 0, err
    assert SENTENCE in err
    assert "warm-up: 3 of 3 steps" in err
    assert "warm-up: 3 steps of channel 1, the weights of checkpoint-3" in err
    assert "hint proof: " in err
    assert "warm up first" not in err
    record = json.loads((train.output / "adapter" / "training.json").read_text())
    assert (record["warmup_steps"], record["steps"]) == (3, 2)
    warm = train.output / "checkpoints" / "warmup"
    assert read_manifest(warm / "checkpoint-3")["about"]["data"]["phase"] == "warm-up"
    later = read_manifest(train.output / "checkpoints" / "checkpoint-2")["about"]["data"]
    assert (later["phase"], later["start_weights"]) == ("after a warm-up", record["start_digest"])
    assert (warm / "ref_logprobs.safetensors").exists()
    lines = [json.loads(line) for line in (warm / "metrics.jsonl").read_text().splitlines()]
    assert [line["ran/lm_ce"] for line in lines if "loss" in line] == [1.0] * 3
    assert {line["ran/sdpo_kl"] for line in lines if "loss" in line} == {0.0}
    site = next(iter(RunDir.open(own_run).read_jsonl("hint_proof", schema="hint_proof", version=3)))
    assert main(["inspect", str(own_run), site["site_id"], "--tokenizer", "model"]) == 0
    words = f"hint proof of the last training: {site['reason'].replace('_', ' ')} ({site['num_tokens']} tokens"
    assert words in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", str(own_run), site["site_id"], "--tokenizer", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["good_with_hint"] == site["good_with_hint"]
    status, _, err = train(*of_run, "--set", "train.warmup.mode=off", output=tmp_path / "off")
    assert status == 0, err
    assert "warm-up" not in err
    assert "warm up first (train.warmup)" in err or "heeds hints on these logs" in err
    assert not (tmp_path / "off" / "checkpoints" / "warmup").exists()
    status, _, err = train(*of_run, "--set", "train.warmup.below=-1000", output=tmp_path / "known")
    assert status == 0, err
    assert "warm-up" not in err
    assert same(adapter_of(tmp_path / "known"), adapter_of(tmp_path / "off"))
    assert not same(adapter_of(tmp_path / "known"), adapter_of(train.output))


def test_cut_short_in_the_warm_up_in_the_proof_and_in_the_steps_it_ends_as_one_that_was_not(
    train, own_run, tmp_path, monkeypatch
):
    of_run = (*PROVED, "--set", f"train.run='{own_run}'")
    assert train(*of_run, output=tmp_path / "whole")[0] == 0
    rows = list(RunDir.open(own_run).read_jsonl("hint_proof", schema="hint_proof", version=3))
    (own_run / "hint_proof.jsonl").unlink()
    told = warmup._Watching.on_step_end

    def stopping(self, args, state, control, **named):
        told(self, args, state, control, **named)
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(warmup._Watching, "on_step_end", stopping)
        status, _, err = train(*of_run)
    assert status == 130
    warm = train.output / "checkpoints" / "warmup"
    assert f"interrupted in the warm-up, after 2 of 3 steps, which are kept in {warm}" in err or (
        f"interrupted in the warm-up, after 1 of 3 steps, which are kept in {warm}" in err
    )
    original, calls = hint_proof.response_logprobs, []

    def interrupted(model, responses):
        calls.append(responses)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(model, responses)

    with monkeypatch.context() as patch:
        patch.setattr(hint_proof, "response_logprobs", interrupted)
        status, _, err = train(*of_run, "--resume")
    assert status == 130
    assert "interrupted in the hint proof, after 3 of 12 sites" in err
    assert "harness yet" not in err  # it goes on as it began, and is not measured again
    shown = []
    monkeypatch.setattr(hint_proof, "response_logprobs", lambda *each: shown.append(each) or original(*each))
    status, _, err = train(*of_run)
    assert status == 0, err
    assert len(shown) == 9
    assert same(adapter_of(train.output), adapter_of(tmp_path / "whole"))
    assert rows == list(RunDir.open(own_run).read_jsonl("hint_proof", schema="hint_proof", version=3))
    status, _, err = train(*of_run, "--set", "train.resume=false")
    assert status == 1


def test_until_the_held_out_loss_stops_falling(train, own_run):
    until = ("mode=until", "every=1", "patience=1", "most=2")
    of_run = ("--set", f"train.run='{own_run}'", "--set", "train.optimiser.steps=1")
    status, _, err = train(*of_run, *(f"--set=train.warmup.{each}" for each in until))
    assert status == 0, err
    assert "warm-up step 1: held-out loss of good turns " in err
    lines = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert not any("eval_lm_ce" in line for line in lines)  # train.eval_every asks for none
    done = warmup.finished_warm_up(train.output / "checkpoints" / "warmup")
    assert [step for step, _ in done.held_out] == [1, 2][: len(done.held_out)]
    assert json.loads((train.output / "adapter" / "training.json").read_text())["counts"]["conversations"] == 10


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([*GRPO, "--set", "train.warmup.mode=steps"], "a training with rollouts has no warm-up"),
        (["--set=train.warmup.mode=steps", "--set=train.channels.good_turns=false"], "good turns to learn"),
        (["--set=train.warmup.mode=until", "--set=split.validation=0"], "no held-out sessions"),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused_in_a_sentence(train, settings, expected):
    status, _, err = train(*settings)
    assert status == 1
    assert expected in err.rstrip("\n").splitlines()[-1]
