"""`crf train` with a warm-up: when there is one, what it says, and that it goes on wherever it was cut short."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import fields

import pytest
from train_runs import GRPO, adapter_of, same

from composer_replication.cli.main import main
from composer_replication.runs import RunDir
from composer_replication.trainer import warmup
from composer_replication.trainer.checkpoints.manifest import read_manifest
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.objective.hint_proof import verdict
from output_facts import lines_with

AUTO = tuple(f"--set=train.{each}" for each in ("warmup.below=-1", "warmup.steps=3", "optimiser.steps=2"))
PROVED = (*AUTO, "--set", "train.proof.on=true", "--set", "train.save.every=2")
# A random model of a few words has -10 nats or so; -1 is what a model must have that knows them.
ANNOUNCED = ("-1", 3, 'train.warmup.mode = "off"')  # what was asked for, how many steps come, and the way around them


@pytest.fixture
def own_run(folder, tmp_path):
    copy = tmp_path / "own"
    shutil.copytree(folder / "run", copy)
    for each in copy.glob("hint_proof*"):
        each.unlink()
    return copy


def proofs_of(run):
    rows = RunDir.open(run).read_jsonl("hint_proof", schema="hint_proof", version=3)
    names = [each.name for each in fields(hint_proof.HintProof)]
    return [hint_proof.HintProof(**{name: row[name] for name in names}) for row in rows]


def test_a_model_that_does_not_know_the_tools_is_warmed_up_unless_told_otherwise(train, own_run, tmp_path, capsys):
    of_run = (*PROVED, "--set", f"train.run='{own_run}'")
    status, _, err = train(*of_run)
    assert status == 0, err
    assert lines_with(err, *ANNOUNCED)
    assert lines_with(err, "warm-up", 3, "checkpoint-3")
    assert verdict(proofs_of(own_run)).summary(can_warm_up=False) in err
    record = json.loads((train.output / "adapter" / "training.json").read_text())
    assert (record["warmup_steps"], record["steps"]) == (3, 2)
    assert {"warm-up", "hint proof"} <= record["seconds"].keys()
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
    shown = " ".join(capsys.readouterr().out.split())
    assert lines_with(shown, site["reason"].replace("_", " "), site["num_tokens"], "tokens")
    assert main(["inspect", str(own_run), site["site_id"], "--tokenizer", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proof"]["good_with_hint"] == site["good_with_hint"]
    status, _, err = train(*of_run, "--set", "train.warmup.mode=off", output=tmp_path / "off")
    assert status == 0, err
    heeded = verdict(proofs_of(own_run))
    assert heeded.heeds is not None
    assert heeded.summary(can_warm_up=True) in err
    assert bool(lines_with(err, "train.warmup")) == (not heeded.heeds)  # the advice
    assert not (tmp_path / "off" / "checkpoints" / "warmup").exists()
    status, _, err = train(*of_run, "--set", "train.warmup.below=-1000", output=tmp_path / "known")
    assert status == 0, err
    for name in ("off", "known"):
        record = json.loads((tmp_path / name / "adapter" / "training.json").read_text())
        assert (record["warmup_steps"], "warm-up" in record["seconds"]) == (0, False)
    assert same(adapter_of(tmp_path / "known"), adapter_of(tmp_path / "off"))
    assert not same(adapter_of(tmp_path / "known"), adapter_of(train.output))


def test_cut_short_in_the_warm_up_in_the_proof_and_in_the_steps_it_ends_as_one_that_was_not(
    train, own_run, tmp_path, monkeypatch
):
    of_run = (*PROVED, "--set", f"train.run='{own_run}'")
    assert train(*of_run, output=tmp_path / "whole")[0] == 0
    rows = list(RunDir.open(own_run).read_jsonl("hint_proof", schema="hint_proof", version=3))
    (own_run / "hint_proof.jsonl").unlink()
    told = warmup._WarmUpCallback.on_step_end

    def stopping(self, args, state, control, **named):
        told(self, args, state, control, **named)
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(warmup._WarmUpCallback, "on_step_end", stopping)
        status, _, err = train(*of_run)
    assert status == 130
    warm = train.output / "checkpoints" / "warmup"
    assert any(lines_with(err, "warm-up", done, 3, "steps", warm) for done in (1, 2))
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
    assert lines_with(err, 3, 12, "sites", own_run / "hint_proof.partial.jsonl")
    assert not lines_with(err, *ANNOUNCED)  # it goes on as it began, and is not measured again
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
    assert lines_with(err, "warm-up", "step 1", "loss")
    lines = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert not any("eval_lm_ce" in line for line in lines)  # train.eval_every asks for none
    done = warmup.FinishedWarmUp.read(train.output / "checkpoints" / "warmup")
    assert [step for step, _ in done.held_out] == [1, 2][: len(done.held_out)]
    assert json.loads((train.output / "adapter" / "training.json").read_text())["counts"]["conversations"] == 10


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ([*GRPO, "--set", "train.warmup.mode=steps"], ["train.warmup.mode", "steps", "auto", "off"]),
        (
            ["--set=train.warmup.mode=steps", "--set=train.channels.good_turns=false"],
            ["train.warmup.mode", "steps", "train.channels.good_turns = true"],
        ),
        (["--set=train.warmup.mode=until", "--set=split.validation=0"], ["warm-up", "patience"]),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused_in_a_sentence(train, settings, facts):
    status, _, err = train(*settings)
    assert status == 1
    assert lines_with(err.rstrip("\n").splitlines()[-1], *facts)
