"""The torchrun commands of docs/guides/processes.md, as printed: two processes over gloo make the run of one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from output_facts import lines_with
from warm_crf import SRC, crf_command

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / each) for each in ("contract", "unit/cli")]
import train_runs  # noqa: E402
from guide_pages import steps  # noqa: E402

folder = train_runs.folder
COMMANDS = [step.command for step in steps((ROOT / "docs/guides/processes.md").read_text(), engine="torchrun")]
# What `accelerate launch` sets for FSDP: with these transformers gives all ranks but 0 zeros for weights.
EFFICIENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
CONFIG = """
[train]
model = "model"
run = "run"

[train.adapter]
rank = 4

[train.teacher]
kind = "trust_region"
live_share = 0.1

[train.optimiser]
steps = 3
lr = 1e-3
per_device = {per_device}

[train.proof]
on = false

[train.warmup]
mode = "off"

[loss]
beta_replay = 0.1
"""
ALL, SPREAD = "train.adapter.kind=none", "train.fsdp.on=true"
PAIRS = [(command, is_on) for command in COMMANDS for is_on in (False, True)]
QUICK = {(COMMANDS[0], False), (COMMANDS[-1], True)}
CASES = [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.full]) for pair in PAIRS]


@pytest.fixture(scope="module")
def place(folder):
    """The folder of a random model and a run of twelve sessions with sites and pairs, with the guide's config file."""
    for name, per_device in {"train.toml": 2, "alone.toml": 4}.items():
        (folder / name).write_text(CONFIG.format(per_device=per_device))
    return folder


def environment(**more):
    """What a newcomer has, and nothing that says CPU."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ours = {"PATH": path, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ} | ours | more


@pytest.fixture(scope="module")
def alone(place):
    """One process with twice the batch, for an adapter and for all weights; each is trained once."""
    trained = {}

    def losses(kind):
        if kind not in trained:
            options = ["--set", f"train.adapter.kind={kind}", "--set", f"train.output=alone-{kind}"]
            command = [*crf_command(), "train", "--config", "alone.toml", *options]
            done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
            trained[kind] = losses_of(place / f"alone-{kind}")
        return trained[kind]

    return losses


def losses_of(output):
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("loss/lm_ce", "loss/sdpo_kl", "loss/trace_replay_dpo")
    return [{name: row[name] for name in names if name in row} for row in rows if "loss/total" in row]


def test_the_guide_has_a_command_for_ddp_and_fsdp2_with_an_adapter_and_with_all_weights():
    assert {(ALL in command, SPREAD in command) for command in COMMANDS} == {
        (is_all, is_spread) for is_all in (False, True) for is_spread in (False, True)
    }


@pytest.mark.parametrize(("command", "is_efficient"), CASES)
def test_two_processes_have_the_losses_of_one(place, alone, command, is_efficient):
    output = f"out-{PAIRS.index((command, is_efficient))}"
    more = EFFICIENT if is_efficient else {}
    # The command is the guide's own; only the folder that it writes to is ours.
    done = subprocess.run(
        ["sh", "-c", f"{command} --set train.output={output}"],
        cwd=place,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = alone("none" if ALL in command else "lora")
    assert expected[0].keys() == {"loss/lm_ce", "loss/sdpo_kl", "loss/trace_replay_dpo"}
    for row, other in zip(losses_of(place / output), expected, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    (line,) = lines_with(done.stderr, "2 processes")
    kind, here, total = re.search(r"\b(DDP|FSDP2)\b.*\b2 processes\D+([\d,]+)\D+([\d,]+)", line).groups()
    share = int(here.replace(",", "")) / int(total.replace(",", ""))
    assert (kind, share) == (("FSDP2", pytest.approx(0.5, abs=0.01)) if SPREAD in command else ("DDP", 1.0))
    # Rank 0 alone prints:
    assert len(re.findall(r"^ *lm_ce ", done.stdout, re.MULTILINE)) == 1
    assert len(re.findall(r"\bstep 3\D+3\b", done.stderr)) == len(lines_with(done.stderr, "sessions", "run")) == 1


@pytest.mark.full
def test_an_error_that_all_ranks_have_is_printed_once(place):
    command = COMMANDS[0].replace("train.toml", "absent.toml")
    done = subprocess.run(
        ["sh", "-c", command], cwd=place, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("crf train: ") == 1
    assert "CRF_DEBUG" not in done.stderr  # as for what nobody foresaw
