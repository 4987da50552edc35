"""DDP and FSDP2 on two processes: each has its own session, and the gradients are the mean of what each has alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
import wrapped_worker as worker
from safetensors.torch import load_file
from torch import nn

from composer_replication.errors import UnsupportedModelError
from composer_replication.trainer.objective.distributed import unwrapped
from warm_crf import python_command

SRC = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [*python_command(), worker.__file__, request.param]
    processes = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        said = [each.communicate(timeout=200)[1] for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0, 0], said
    return [load_file(folder / f"{rank}.safetensors") for rank in (0, 1)]


@pytest.mark.parametrize("name", worker.CASES)
def test_every_process_gets_its_own_loss_and_the_mean_of_the_gradients(results, name):
    alone = [worker.one_case("none", rank, **worker.CASES[name]) for rank in (0, 1)]
    for rank in (0, 1):
        cases = results[rank].items()
        got = {key.partition("|")[2]: value for key, value in cases if key.startswith(f"{name}|")}
        torch.testing.assert_close(got["total"], alone[rank]["total"], rtol=1e-10, atol=1e-12)
        wanted = {key for each in alone for key in each} - {"total"}
        assert {key.removeprefix("module.") for key in got} - {"total"} == wanted
        for key in wanted:
            mean = sum(each.get(key, torch.zeros_like(got[key])) for each in alone) / 2
            # Norms round to fp32 inside, and a path that runs flat rounds elsewhere than a tree.
            assert (got[key] - mean).norm() <= 1e-6 * mean.norm() + 1e-12, key


def test_a_wrapper_that_hides_the_weights_for_good_is_refused():
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(UnsupportedModelError, match="FSDP2"):
        unwrapped(FullyShardedDataParallel())
