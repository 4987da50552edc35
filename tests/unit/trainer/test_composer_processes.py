"""ComposerReplicationTrainer on two processes, by DDP and by FSDP2: the run of one process with as large a batch."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import composer_worker as worker
import pytest
import torch
from safetensors.torch import load_file

from rollouts.tiny_policy import save_policy
from warm_crf import WarmCall


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def together(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    port, beside = free_port(), [Path(__file__).parent]
    processes = [
        WarmCall("composer_worker:main", rank, port, str(policy), str(folder), beside=beside) for rank in (0, 1)
    ]
    try:
        codes = [each.wait(120) for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert codes == [0, 0]
    return [
        (load_file(folder / f"{rank}.safetensors"), json.loads((folder / f"{rank}.json").read_text()))
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("name", worker.CASES)
def test_two_processes_end_with_the_weights_and_figures_of_one(policy, together, tmp_path, name):
    wanted, rows = worker.run(worker.CASES[name], policy, tmp_path, rank=0, num_processes=1)
    assert all(row["loss/sdpo_kl"] > 0 for row in rows[:-1])
    assert rows[-1], "no hints were compared"
    for weights, logs in together:
        got = {key.partition("|")[2]: value for key, value in weights.items() if key.startswith(f"{name}|")}
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
        for row, expected in zip(logs[name], rows, strict=True):
            assert row == pytest.approx(expected, abs=1e-5)
