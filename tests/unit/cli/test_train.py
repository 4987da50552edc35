"""`crf train`: what it writes and says, what it refuses in a sentence, and that a stopped run goes on bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file
from train_runs import GRPO, adapter_of, same
from transformers import AutoModelForCausalLM, training_args

from composer_replication.cli import progress as train_progress
from composer_replication.cli import train as verb
from composer_replication.cli.main import main
from composer_replication.config import CrfConfig, describe, load
from composer_replication.errors import NotEnoughMemoryError
from composer_replication.runs import RunDir
from composer_replication.runs.directory import MARKER
from composer_replication.runs.lineage import _channel_state, describe_channel
from composer_replication.trainer.checkpoints import weights_digest
from composer_replication.trainer.from_config import inputs as run_arguments
from composer_replication.trainer.from_config.offline import _check_memory
from composer_replication.trainer.from_config.output_folder import TrainingFolder
from composer_replication.trainer.objective.channels import NO_PAIR
from composer_replication.trainer.watch import memory_plan as planner
from output_facts import lines_with
from refusals import refusal


def test_a_run_leaves_config_metrics_checkpoint_adapter_and_a_record_of_where_they_are_from(train, folder):
    status, out, err = train()
    assert status == 0, err
    assert len([line for line in out.splitlines() if line.startswith("diagnosis: ")]) == 1  # the all-clear
    # The preset's weight of channel 2 is 0 at the last step.
    for channel, ran in (("lm_ce", 4), ("sdpo_jsd", 3), ("trace_replay_dpo", 4)):
        row = next(line for line in out.splitlines() if line.split()[:1] == [channel])
        assert re.search(rf"\b{ran}\D+4\b", row)
    assert re.search(r"^step 4\D+4\b.*\btotal \d", err, re.MULTILINE)
    resolved = load(CrfConfig, train.output / "config.resolved.toml")
    assert (resolved.train.teacher.kind, resolved.loss.beta_replay, resolved.train.optimiser.steps) == (
        "trust_region",  # of the preset, the file and the file
        0.1,
        4,
    )
    lines = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    adapter = json.loads((train.output / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(folder / "model")  # it was typed as "model"
    card = (train.output / "adapter" / "README.md").read_text()
    assert lines_with(card, "adapter", f"`{folder / 'model'}`")
    assert [line for line in lines_with(card, 4, "steps") if re.search(r"\blm_ce \(\D*1\D+4\D*\)", line)]
    assert lines_with(card, 12, "sessions")
    record = json.loads((train.output / "adapter" / "training.json").read_text())
    assert record["diagnosis"] == []
    run = RunDir.open(folder / "run")
    assert {each["name"]: each["sha256"] for each in record["sources"]} == {
        name: run.meta(name).sha256 for name in ("conversations", "tools", "sites", "pairs")
    }
    assert [(each["name"], each["steps"]) for each in record["channels"]] == [
        ("lm_ce", 4),
        ("sdpo_kl", 3),
        ("trace_replay_dpo", 4),
    ]
    assert record["counts"].keys() >= {"lm_ce", "sdpo_kl", "trace_replay_dpo"}
    assert "sdpo_jsd" not in record["counts"]
    checkpoint = train.output / "checkpoints" / "checkpoint-4"
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert same(adapter_of(train.output), saved)
    assert any(bool(value.any()) for name, value in saved.items() if "lora_B" in name)
    assert run.path("ref_logprobs").exists()


def test_a_run_that_is_told_to_stop_saves_says_how_to_go_on_and_ends_as_one_that_was_not(train, monkeypatch, tmp_path):
    assert train(output=tmp_path / "whole")[0] == 0
    shown = train_progress._log_metrics

    def stopping(step, total, metrics):
        shown(step, total, metrics)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train_progress, "_log_metrics", stopping)
    status, _, err = train()
    assert status == 130
    # The signal may be heard one step later than it was sent.
    stopped_at = max(int(each.name.rpartition("-")[2]) for each in (train.output / "checkpoints").glob("checkpoint-*"))
    assert stopped_at in (2, 3)
    assert [line for line in lines_with(err, "SIGTERM", stopped_at) if re.search(rf"\b{stopped_at}\D+4\b", line)]
    assert lines_with(err, f"crf train --config run.toml --set 'train.output='\"'\"'{train.output}")
    assert err.rstrip().endswith("--resume")
    assert not (train.output / "adapter").exists()
    monkeypatch.setattr(train_progress, "_log_metrics", shown)
    status, _, err = train("--resume")
    assert status == 0, err
    assert lines_with(err, f"checkpoint-{stopped_at}")
    assert same(adapter_of(train.output), adapter_of(tmp_path / "whole"))
    lines = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


def test_another_call_takes_no_further_step_names_what_changed_and_a_new_run_needs_its_own_folder(train):
    assert train("--set", "train.optimiser.steps=1")[0] == 0
    before = adapter_of(train.output)
    status, _, err = train("--set", "train.optimiser.steps=1", "--set", "train.optimiser.lr=0.5")
    assert status == 0, err
    assert lines_with(err, "train.optimiser.lr: 0.01 -> 0.5")
    assert lines_with(err, 1, "train.optimiser.steps")
    assert same(adapter_of(train.output), before)
    status, _, err = train("--set", "train.resume=false")
    assert status == 1
    assert lines_with(err, "train.resume", "checkpoint-1", "train.output")


def test_a_dry_run_counts_and_plans_without_weights(train, folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for each in (folder / "model").iterdir():
        if each.suffix != ".safetensors":
            (bare / each.name).write_bytes(each.read_bytes())
    status, out, err = train("--dry-run", "--set", f"train.model='{bare}'")
    assert status == 0, err
    shown = {" ".join(line.split()[:-1]): line.split()[-1] for line in out.splitlines() if line.strip()}
    labels = dict(verb._COUNTS)
    assert [shown[labels[name]] for name in ("conversations", "sites", "pairs")] == ["12"] * 3
    assert "GiB" in err
    assert [each.name for each in train.output.iterdir()] == ["config.resolved.toml"]
    status, out, err = train("--dry-run", "--json", "--set", f"train.model='{bare}'")
    assert json.loads(out)["memory"]["fits"] is True


def test_what_does_not_fit_is_refused_with_advice_unless_forced(train, monkeypatch):
    monkeypatch.setattr(planner, "free_memory", lambda _device: 10**7)
    status, _, err = train("--set", "train.optimiser.steps=1")
    assert status == 1
    *_, refused = err.splitlines()
    assert re.search(r"^crf train: .*\b0\.\d+ GiB.*\b0\.01 GiB", refused)
    assert "gradient_checkpointing=True" in err
    assert not (train.output / "checkpoints").exists()
    status, _, err = train("--set", "train.optimiser.steps=1", "--force")
    assert status == 0
    assert re.search(r"\b0\.\d+ GiB.*\b0\.01 GiB", err)
    assert "gradient_checkpointing=True" in err  # the plan is shown, with what would make it fit


def test_memory_that_is_not_free_is_an_error_of_its_own_as_it_may_be_later():
    plan = planner.MemoryPlan(parts={"weights": 2 << 30}, available=1 << 30, advice=("Wait.",))
    with refusal(NotEnoughMemoryError, got="2.00 GiB"):
        _check_memory(plan, print, must_fit=True)


def test_a_channel_of_weight_0_is_called_off_and_figures_come_as_json(train):
    status, out, err = train("--json", "--set", "loss.alpha_sdpo=0", "--set", "train.optimiser.steps=1")
    assert status == 0, err
    found = json.loads(out)
    assert {each["name"]: each["steps"] for each in found["channels"]} == {
        "lm_ce": 1,
        "sdpo_kl": 0,
        "trace_replay_dpo": 1,
    }
    assert found["saved"] == str(train.output / "adapter")
    status, out, _ = train("--set", "loss.alpha_sdpo=0", "--set", "train.optimiser.steps=1")
    row = next(line for line in out.splitlines() if line.split()[:1] == ["sdpo_jsd"])
    assert row.split()[1] == "0"
    assert describe_channel({"weight": 0.0, "steps": 0}, 1) in row


def test_all_weights_held_out_sessions_and_switches_train_too(train, folder):
    status, _, err = train(
        *("--set", "train.adapter.kind=none", "--set", "train.optimiser.steps=1", "--set", "train.eval_every=1"),
        *("--set", "train.switches.sigmoid_gate_tau=1.0", "--set", "train.switches.contrast=0.5"),
        *("--set", "train.proof.on=true", "--set", "train.teacher.kind=ema"),
    )
    assert status == 0, err
    assert lines_with(err, "sites", 10)
    lines = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_loss" in line for line in lines)
    assert (train.output / "model" / "model.safetensors").exists()
    record = json.loads((train.output / "model" / "training.json").read_text())
    assert "hint proof" in record["seconds"]
    assert record["counts"]["conversations"] == 10
    start = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    assert record["start_digest"] == weights_digest(start)


def test_rollouts_train_with_prompts_and_rewards_by_name_and_logged_sessions_beside_them(train, folder):
    status, out, err = train(*GRPO)
    assert status == 0, err
    assert re.search(r"grpo.*\bsdpo\b.*rollouts.*\bsdpo\b.*trace_replay_dpo", err)
    lines = [json.loads(line) for line in (train.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["rewards/length/unjudged"] for line in lines if "reward" in line] == [0.0, 0.0]
    assert (train.output / "adapter" / "adapter_model.safetensors").exists()
    record = json.loads((train.output / "adapter" / "training.json").read_text())
    channels = {each["name"]: each for each in record["channels"]}
    assert [channels[name]["steps"] for name in ("grpo", "trace_replay_dpo")] == [2, 2]
    assert _channel_state(channels["sdpo_kl"]) == "never_ran"
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for row, name in (("grpo", "grpo"), ("trace_replay_dpo", "trace_replay_dpo"), ("sdpo_jsd", "sdpo_kl")):
        assert describe_channel(channels[name], 2) in rows[row]
    named = {each["kind"]: (each["name"], each["sha256"]) for each in record["sources"][-2:]}
    task = sha256((folder / "task.py").read_bytes()).hexdigest()
    assert named == {"dataset": ("task:prompts", task), "reward": ("task:length", task)}
    assert record["counts"]["trace_replay_dpo"] == record["counts"]["pairs"] == 12


def test_a_run_without_pairs_is_told_how_to_make_some_or_to_want_none_in_both_modes(train, folder, tmp_path):
    bare = tmp_path / "bare"
    assert main(["ingest", str(folder / "logs"), "-o", str(bare)]) == 0
    assert main(["sites", str(bare)]) == 0
    of_run = ("--set", f"train.run='{bare}'", "--set", "train.optimiser.steps=1")
    for number, mode in enumerate(([], GRPO)):
        status, _, err = train(*mode, *of_run, output=tmp_path / str(number))
        assert status == 0, err
        assert lines_with(err, "loss.beta_replay") == [NO_PAIR.format(0.1)]


REPORTS = ("trackio", "wandb")
# What the refusal names, by case:
BAD = {
    "no model": (["--set", "train.model=none"], ["train.model", "none"]),
    "a model that is not there": (["--set", "train.model=./no\x1b[31mwhere"], ["model", "./no", "[31mwhere"]),
    "no run": (["--set", "train.run=none"], ["train.run", "none"]),
    "a run that is none": (["--set", "train.run=model"], ["model", MARKER]),
    "an unknown key": (["--set", "train.optimiser.step=3"], ["train.optimiser.step", "train.optimiser.steps"]),
    "an option nobody reads": (["--set", "loss.lm_ce_label_smoothing=0.1"], ["loss.lm_ce_label_smoothing", 0.1]),
    "a schedule that goes backwards": (
        ["--set", "loss.sdpo_wrapper=taid", "--set", "loss.taid_t=0.5", "--set", "train.channels.taid_end=0.2"],
        ["t_start", "t_end", "(0.5, 0.2)"],
    ),
    "nothing to resume": (["--resume"], ["out/checkpoints", "--resume"]),
    "a budget that holds nothing": (
        [f"--set=train.{each}" for each in ("batch.budget=16", "batch.overlap=0", "channels.good_turns=false")],
        ["logged sessions", 12, "longer_than_window"],
    ),
    "no prompts": ([*GRPO, "--set", "train.grpo.dataset=none"], ["train.grpo.dataset", "none"]),
    "a reward of no module": ([*GRPO, "--set", "train.grpo.rewards=['tusk:length']"], ["No module named 'tusk'"]),
    "a reward of no name": ([*GRPO, "--set", "train.grpo.rewards=['length']"], ["'length'", "module:name"]),
    "no reward": ([*GRPO, "--set", "train.grpo.rewards=[]"], ["train.grpo.rewards", "none"]),
    **{
        f"{each} that is not there": ([f"--set=train.report_to={each}"], ["train.report_to", f"pip install {each}"])
        for each in REPORTS
    },
    "rollouts told to what is not there": (
        [*GRPO, "--set=train.report_to=wandb"],
        ["train.report_to", "pip install wandb"],
    ),
    "half precision without a GPU": (["--set=train.optimiser.bf16=true"], ["train.optimiser.bf16", "true"]),
    "rollouts in half precision without a GPU": (
        [*GRPO, "--set=train.optimiser.bf16=true"],
        ["train.optimiser.bf16 = false"],
    ),
    "4 bits that cannot be had": (["--set=train.adapter.kind=qlora"], ["qlora", 'train.adapter.kind = "lora"']),
    "rollouts that make no group": (
        [*GRPO, "--set", "train.optimiser.per_device=3"],
        ["3 x 1 = 3", "train.grpo.num_generations", 4, "train.optimiser.per_device = 4"],
    ),
    "an adapter on layers that are not there": (
        ["--set", "train.adapter.targets=['c_attn']"],
        ["train.adapter.targets", "c_attn", "q_proj"],
    ),
    "rollouts with an adapter on layers that are not there": (
        [*GRPO, "--set", "train.adapter.targets=['c_attn']"],
        ["train.adapter.targets", "c_attn", "q_proj"],
    ),
    "a budget below the overlap": (
        ["--set", "train.batch.budget=1024", "--set", "train.batch.overlap=1024"],
        ["train.batch.overlap", 1024, "train.batch.budget", "train.batch.overlap = 128"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_is_one_sentence_and_nothing_is_written(train, case, monkeypatch):
    arguments, facts = BAD[case]
    needed = {"accelerate", "peft", "trl", "datasets"}  # what the extra has; all else is not there
    monkeypatch.setattr(run_arguments, "available", lambda package: package in needed)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: False)
    status, out, err = train(*arguments)
    assert status == 1
    last = err.rstrip("\n").splitlines()[-1]
    assert last.startswith("crf train: ")
    assert lines_with(last, *facts), last
    assert (out, "Traceback" in err, "\x1b" in err) == ("", False, False)
    assert not (train.output / "adapter").exists()
    if case in ("half precision without a GPU", "wandb that is not there", "4 bits that cannot be had"):
        assert err.count("\n") == 1  # what takes no reading to find out is said before the sessions are read


def test_without_sites_the_command_to_type_is_named(train, folder, tmp_path):
    assert main(["ingest", str(folder / "logs"), "-o", str(tmp_path / "bare")]) == 0
    status, _, err = train("--set", f"train.run='{tmp_path / 'bare'}'")
    assert status == 1
    assert "crf sites" in err


def test_a_folder_is_trained_in_by_one_process_at_a_time(train):
    with TrainingFolder(train.output).held():
        status, _, err = train()
    assert status == 1
    assert lines_with(err, f"{train.output}:", "train.output")
    assert [each.name for each in train.output.iterdir() if each.is_dir()] == []


def test_every_option_is_listed_with_its_type_default_and_sentence(capsys):
    assert main(["train", "--options"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "train.optimiser.steps: int >= 1 = "
        in lines[next(i for i, each in enumerate(lines) if "optimiser.steps:" in each)]
    )
    assert lines[1::2] == [f"    {each.sentence}" for each in describe(CrfConfig)]
    assert main(["train", "--options", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert [each["key"] for each in options] == [line.partition(":")[0] for line in lines[::2]]
