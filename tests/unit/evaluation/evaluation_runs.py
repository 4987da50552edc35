"""A small run with sessions held out, a model with other weights, and a config that asks for as little as can be."""

from __future__ import annotations

import shutil

import pytest
import torch

from composer_replication.cli.split import write_split
from composer_replication.config import CrfConfig, SplitConfig, loads
from composer_replication.runs import RunDir

NOTHING = {"samples": 0, "good_turns": 0, "token_gaps": 0}

TIMES = {"created": "", "seconds": 0.0}
"""When an evaluation was made, and how long it took: what two of the same differ in."""


def config(more=""):
    """[evaluation] with these lines, and nothing else of what they do not name."""
    rest = "".join(f"{name} = {value}\n" for name, value in NOTHING.items() if f"{name} =" not in more)
    return loads(CrfConfig, f"[evaluation]\n{rest}{more}")


@pytest.fixture
def run(folder, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(folder / "run", copy)
    opened = RunDir.open(copy)
    hold_out(opened, 0.5)
    return opened


def hold_out(run, share, *, with_sites=True):
    """Split anew, and the sites as if they had been found after it."""
    rows = list(run.read_jsonl("sites", schema="error_site")) if with_sites else []
    write_split(SplitConfig(test=share, validation=0.0), run)
    write_sites(run, rows)


def write_sites(run, rows):
    run.write_jsonl("sites", rows, schema="error_site", version=1, sources=["conversations", "split"])


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory):
    """The same model with other weights."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(folder / "model", place)
    model = AutoModelForCausalLM.from_pretrained(place)
    torch.manual_seed(7)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.05 * torch.randn_like(each))
    model.save_pretrained(place)
    return place
