"""`crf train` cut short: before its first step, in its last one, or with a checkpoint that is damaged afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
from train_runs import GRPO, adapter_of, same

from composer_replication import optional
from composer_replication.cli import progress as train_progress
from composer_replication.cli.progress import _PhaseLines, format_duration
from composer_replication.cli.train import _shown_name
from composer_replication.runs import RunDir
from composer_replication.trainer.from_config import inputs as arguments
from composer_replication.trainer.objective import hint_proof
from composer_replication.trainer.sessions import reference
from composer_replication.trainer.sessions.phases import Phase
from output_facts import lines_with

PROOF = ("--set", "train.proof.on=true", "--set", "train.optimiser.steps=1")


@pytest.fixture
def own_run(folder, tmp_path):
    """A run directory of the test's own, with nothing proved or computed yet."""
    copy = tmp_path / "own"
    shutil.copytree(folder / "run", copy)
    for each in copy.glob("hint_proof*"):
        each.unlink()
    (copy / "ref_logprobs.safetensors").unlink(missing_ok=True)
    return copy


def interrupted_at(number, original, stop=KeyboardInterrupt):
    """The function, which is interrupted when it is called for the `number`th time; and its calls."""
    calls = []

    def counted(*args, **named):
        calls.append(args)
        if len(calls) == number:
            raise stop
        return original(*args, **named)

    return counted, calls


def test_an_interrupted_hint_proof_keeps_what_it_made_says_so_and_the_next_run_takes_it(train, own_run, monkeypatch):
    of_run = (*PROOF, "--set", f"train.run='{own_run}'")
    original = hint_proof.response_logprobs
    counted, _ = interrupted_at(6, original)
    monkeypatch.setattr(hint_proof, "response_logprobs", counted)
    status, _, err = train(*of_run)
    kept = own_run / "hint_proof.partial.jsonl"
    assert status == 130
    assert lines_with(err, 0, 12, "sites")
    assert lines_with(err, 5, 12, "sites", kept)
    assert len(kept.read_text().splitlines()) == 1 + 5
    counted, calls = interrupted_at(0, original)
    monkeypatch.setattr(hint_proof, "response_logprobs", counted)
    status, _, err = train(*of_run)
    assert status == 0, err
    assert len(calls) == 7
    assert lines_with(err, 5, 12, "sites")
    assert not kept.exists()
    rows = list(RunDir.open(own_run).read_jsonl("hint_proof", schema="hint_proof", version=3))
    (own_run / "hint_proof.jsonl").unlink()
    assert train(*of_run, "--set", "train.optimiser.steps=2")[0] == 0
    assert rows == list(RunDir.open(own_run).read_jsonl("hint_proof", schema="hint_proof", version=3))


def test_what_is_left_of_a_proof_with_other_settings_is_not_taken(train, own_run, monkeypatch):
    of_run = (*PROOF, "--set", f"train.run='{own_run}'")
    original = hint_proof.response_logprobs
    monkeypatch.setattr(hint_proof, "response_logprobs", interrupted_at(6, original)[0])
    assert train(*of_run)[0] == 130
    counted, calls = interrupted_at(0, original)
    monkeypatch.setattr(hint_proof, "response_logprobs", counted)
    assert train(*of_run, "--set", "train.batch.budget=4096")[0] == 0
    assert len(calls) == 12


def test_interrupted_references_are_kept_pass_by_pass(train, own_run, monkeypatch):
    def terminated(*_args, **_named):
        os.kill(os.getpid(), signal.SIGTERM)  # heard as Ctrl-C is
        pytest.fail("the signal was not heard")

    of_run = ("--set", f"train.run='{own_run}'", "--set", "train.optimiser.steps=1")
    original, calls = reference.pair_logprobs, []

    def passing(model, batch):
        logprobs = original(model, batch)
        calls.append(2 * len(logprobs))
        return terminated() if len(calls) == 3 else logprobs

    monkeypatch.setattr(reference, "pair_logprobs", passing)
    status, _, err = train(*of_run)
    done, total = sum(calls[:2]), 2 * RunDir.open(own_run).meta("pairs").rows  # of either answer
    assert status == 130
    assert lines_with(err, done, total, own_run / "ref_logprobs.safetensors")
    resumed = []

    def counted(model, batch):
        logprobs = original(model, batch)
        resumed.append(2 * len(logprobs))
        return logprobs

    monkeypatch.setattr(reference, "pair_logprobs", counted)
    status, _, err = train(*of_run)
    assert status == 0, err
    assert resumed[0] == calls[2]  # the pass that was lost, and no other
    assert lines_with(err, done, total)
    assert done + sum(resumed) == total


def test_a_signal_in_the_last_step_ends_a_whole_run(train, monkeypatch, tmp_path):
    assert train(output=tmp_path / "whole")[0] == 0
    shown = train_progress._log_metrics

    def stopping(step, total, metrics):
        shown(step, total, metrics)
        if step == 3:  # heard at the end of the step that comes
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train_progress, "_log_metrics", stopping)
    status, out, err = train()
    assert status == 0, err
    assert lines_with(err, "SIGINT")
    assert re.search(r"\b4\D+4 steps\b", out)
    assert same(adapter_of(train.output), adapter_of(tmp_path / "whole"))


def test_a_finished_run_whose_newest_checkpoint_is_damaged_makes_its_last_step_again(train):
    every = ("--set", "train.save.every=1", "--set", "train.save.keep=4")
    assert train(*every)[0] == 0
    finished = adapter_of(train.output)
    damaged = train.output / "checkpoints" / "checkpoint-4" / "adapter_model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1  # as many bytes as before
    damaged.write_bytes(content)
    shutil.rmtree(train.output / "adapter")
    status, out, err = train(*every)
    assert status == 0, err
    assert lines_with(err, "checkpoint-4")
    assert lines_with(err, "checkpoint-3")
    assert re.search(r"^step 4\D+4\b", err, re.MULTILINE)
    assert re.search(r"\b4\D+4 steps\b", out)
    assert same(adapter_of(train.output), finished)
    assert json.loads((train.output / "adapter" / "training.json").read_text())["steps"] == 4


@pytest.mark.parametrize(("mode", "missing"), [((), ("accelerate", "peft")), (GRPO, ("accelerate", "peft", "trl"))])
def test_without_the_extra_the_command_that_installs_it_is_named(train, monkeypatch, mode, missing):
    absent = ("accelerate", "peft", "trl", "datasets")
    monkeypatch.setattr(arguments, "available", lambda name: name not in absent and optional.available(name))
    status, out, err = train(*mode)
    assert (status, out) == (1, "")
    assert lines_with(err, *missing, 'pip install "composer-replication[train]"')
    assert bool(lines_with(err, "trl")) == ("trl" in missing)
    assert "Traceback" not in err


def test_lines_about_a_phase_come_at_its_begin_every_ten_seconds_and_at_its_end():
    said, now = [], [0.0]
    lines = _PhaseLines(said.append, clock=lambda: now[0])

    def at(second, done, total=80):
        now[0] = second
        lines(Phase(name="hint proof", done=done, total=total, items="sites"))

    at(0, 20)
    at(4, 22)
    at(12, 26)
    at(15, 28)
    at(120, 80)
    at(130, 80, total=80)  # found done: not spoken of
    assert all(lines_with(line, "hint proof", "sites") for line in said)
    assert [re.findall(r"\d+(?: min)?", line) for line in said] == [["20", "80"], ["26", "80", "2 min"], ["80", "80"]]
    assert [format_duration(each) for each in (40.4, 300.0, 7200.0)] == ["40 s", "5 min", "2.0 h"]


def test_print_has_one_name_for_channel_2():
    assert [_shown_name(each) for each in ("sdpo_kl", "sdpo_kl_logged", "sdpo_kl: hint_does_nothing", "lm_ce")] == [
        "sdpo_jsd",
        "sdpo_jsd_logged",
        "sdpo_jsd: hint_does_nothing",
        "lm_ce",
    ]
    assert train_progress._metrics_text({"loss/sdpo_kl": 0.5, "loss/total": 1.0}) == "total 1  sdpo_jsd 0.5"


def test_a_finished_checkpoint_of_another_version_is_not_trained_over(train):
    assert train("--set", "train.save.every=2")[0] == 0
    manifests = sorted((train.output / "checkpoints").glob("checkpoint-*/manifest.json"))
    for manifest in manifests:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 0}))
    before = [each.read_bytes() for each in manifests]
    status, _, err = train("--set", "train.save.every=2")
    assert status == 1
    assert lines_with(err, train.output / "checkpoints", "checkpoint-4", "train.output")
    assert [each.read_bytes() for each in manifests] == before


def test_one_wrong_target_among_right_ones_is_named(train):
    status, _, err = train("--set", "train.adapter.targets=['q_proj', 'foo']")
    assert status == 1
    assert lines_with(err, "train.adapter", "foo", "all-linear")
