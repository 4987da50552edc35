"""OfflineTrainer on two processes, by DDP and by FSDP2: the run of one process with as large a batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import offline_worker as worker
import pytest
import torch
from safetensors.torch import load_file

from warm_crf import python_command

SRC = Path(__file__).parents[3] / "src"


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*python_command(), worker.__file__, request.param]
    port = str(free_port())
    outputs = [open(folder / f"{rank}.txt", "w+") for rank in (0, 1)]  # noqa: SIM115, PTH123
    processes = [
        subprocess.Popen([*command, str(rank), port, str(folder)], env=environment, stdout=out, stderr=out)
        for rank, out in enumerate(outputs)
    ]
    try:
        for each in processes:
            each.wait(timeout=240)
    finally:
        for each in processes:
            each.kill()
        for each in outputs:
            each.close()
    said = [(folder / f"{rank}.txt").read_text()[-3000:] for rank in (0, 1)]
    assert [each.returncode for each in processes] == [0, 0], "\n".join(said)
    weights = [load_file(folder / f"{rank}.safetensors") for rank in (0, 1)]
    return weights, [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return {name: worker.run(case, folder, "none", num_processes=1) for name, case in worker.CASES.items()}


@pytest.mark.parametrize("name", worker.CASES)
def test_two_processes_end_with_the_weights_and_figures_of_one(results, alone, name):
    weights, logs = results
    wanted, wanted_rows, _ = alone[name]
    for rank in (0, 1):
        got = {key.partition("|")[2]: value for key, value in weights[rank].items() if key.startswith(f"{name}|")}
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
        rows, own_items = logs[rank][name]
        for row, expected in zip(rows, wanted_rows, strict=True):
            assert row == pytest.approx(expected, abs=1e-5)
        has_sites = not (rank and worker.CASES[name].get("bare"))
        assert (own_items["sdpo_jsd"] > 0) == (own_items["trace_replay_dpo"] > 0) == has_sites


def test_the_runs_learned_something(alone):
    from offline_pieces import tiny

    start = dict(tiny().double().named_parameters())
    for name, (weights, *_) in alone.items():
        if not worker.CASES[name].get("lora"):
            assert all(
                (weights[key] - value).abs().max() > 1e-3 for key, value in start.items() if "k_proj.bias" not in key
            )
