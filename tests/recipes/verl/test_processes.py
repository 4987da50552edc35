"""Runs in processes of their own: killed and resumed from verl's checkpoint, and two workers that Ray starts."""

from __future__ import annotations

import json
import os
import pickletools
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from composer_replication.recipes.verl.engine import StepChannels
from recipes.recorded_steps import ITERATIONS, ROWS, fixed_batch, parameter_names, recorded_steps
from recipes.verl.cpu_engine import channels, new_engine, policy_loss, step_data
from recipes.verl.recorded_pairs import pairs_of
from recipes.verl.training_run import new_run, train, weights_of
from recipes.verl.two_workers import NUM_STEPS, batch_of

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]
TESTS = Path(__file__).resolve().parents[2]


def in_a_process(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS), *(each for each in sys.path if each and Path(each).is_dir())]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",  # by default 15 below their parent: on a busy machine they hardly run
    }
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    killed = in_a_process("recipes.verl.training_run", str(tmp_path), "2", "--die-in", "1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert [line["step"] for line in lines_of(tmp_path)] == [0]
    resumed = in_a_process("recipes.verl.training_run", str(tmp_path), "2", "--resume")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    engine = new_run()
    wanted = [train(engine, number) for number in range(3)]
    assert lines_of(tmp_path) == wanted
    found = load_file(tmp_path / "weights.safetensors")
    for name, value in weights_of(engine).items():
        assert torch.equal(found[name], value), name
    assert names_in_pickles(tmp_path / "step-2"), "verl's checkpoints are pickles no more: say so in the README"
    assert not [name for name in names_in_pickles(tmp_path / "step-2") if "composer" in name]


def names_in_pickles(folder: Path) -> set[str]:
    """Every module that reading verl's checkpoint would import."""
    return {name for path in folder.rglob("*.pt") for name in _modules(path)}


def _modules(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            if name.endswith(".pkl"):
                strings: list[str] = []
                for operation, argument, _ in pickletools.genops(file.read(name)):
                    if operation.name == "GLOBAL":
                        yield str(argument).partition(" ")[0]
                    elif operation.name == "STACK_GLOBAL":
                        yield strings[-2]
                    elif isinstance(argument, str):
                        strings.append(argument)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("workers")
    done = in_a_process("recipes.verl.two_workers", str(folder))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_two_workers_hold_half_of_the_weights_each(two_workers: dict[str, Any]) -> None:
    workers = two_workers["workers"]
    assert len({each["pid"] for each in workers}) == 2
    assert {each["engine"] for each in workers} == {"ChannelEngine"}
    assert all(0.45 < each["share"] < 0.55 for each in workers)
    assert two_workers["norms"][0] == two_workers["norms"][1]


def test_two_workers_make_the_recorded_steps(two_workers: dict[str, Any]) -> None:
    for found, wanted in zip(two_workers["steps"], recorded_steps()[:2], strict=False):
        for name, value in (
            ("actor/pg_loss", wanted.grpo),
            ("composer/sdpo_kl", wanted.sdpo),
            ("loss", wanted.total),
            ("grad_norm", wanted.grad_norm),
            ("composer/sdpo_kl_weight", wanted.alpha),
        ):
            assert abs(found[name] - value) < 1e-5 + 1e-5 * abs(value), (name, found[name], value)


def test_two_workers_are_one(two_workers: dict[str, Any]) -> None:
    """Also where only one of them has pairs, or both have copies of them, and one has twice the sites of the other."""
    groups = fixed_batch().group
    assert set(groups[: ROWS // 2].tolist()) & set(groups[ROWS // 2 :].tolist()), "no prompt is on both"
    engine = new_engine()
    engine.channels = StepChannels(channels(anneal="linear", beta_replay=0.05), new_engine())
    for number in range(NUM_STEPS):
        with engine.train_mode():
            outputs = engine.train_batch(step_data(batch_of(number)), policy_loss(8))
        engine.lr_scheduler_step()
        found = two_workers["steps"][number]
        assert found["loss"] == pytest.approx(sum(outputs["loss"]), abs=1e-5)
        assert found["grad_norm"] == pytest.approx(outputs["metrics"]["grad_norm"], rel=1e-4)
        if number >= ITERATIONS:
            assert found["composer/trace_replay_dpo_items"] == len(pairs_of(fixed_batch())) > 3
            replay = outputs["metrics"]["composer/trace_replay_dpo"].aggregate()
            assert found["composer/trace_replay_dpo"] == pytest.approx(replay, abs=1e-5)
    norms = {name: float(value.double().norm()) for name, value in weights_of(engine).items()}
    assert set(norms) == set(parameter_names())
    for name, value in norms.items():
        assert two_workers["norms"][0][name] == pytest.approx(value, rel=1e-5)
