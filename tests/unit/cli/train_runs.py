"""A small run directory, model and config for the tests of `crf train`; torch is loaded by those that ask."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "sdpo_end_to_end"
# One word of three settings that tests change: `--set` wins over the file.
CONFIG = """
[loss]
beta_replay = 0.1

[train]
model = "model"
run = "run"
log_every = 1

[train.adapter]
rank = 4

[train.optimiser]
steps = 4
lr = 1e-2
per_device = 4

[train.save]
every = 100

[train.proof]
on = false
"""


TASK = """
def prompts():
    from datasets import Dataset
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"Test {name}."}]} for name in ("moss", "jade")])

def length(completion_ids, **columns):
    return [float(ids[0] % 7) + len(ids) / 100 for ids in completion_ids]
"""
GRPO = [
    *("--set", "train.mode=grpo", "--set", "train.grpo.dataset='task:prompts'", "--set", "train.optimiser.steps=2"),
    *("--set", "train.grpo.rewards=['task:length']", "--set", "train.grpo.num_generations=4"),
    *("--set", "train.grpo.max_completion_length=6", "--set", "train.batch.part=call"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model, a run of twelve sessions with sites and pairs, and a config; one thread, as all is small."""
    import torch

    from composer_replication.cli.main import main
    from composer_replication.runs import RunDir
    from composer_replication.runs.files import read_conversations

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLE))
    import world

    root = tmp_path_factory.mktemp("train")
    tokenizer = world.build_tokenizer()
    for part in (tokenizer, world.new_model(tokenizer)):
        part.save_pretrained(root / "model")
    (root / "logs").mkdir()
    world.write_logs(root / "logs")
    assert main(["ingest", str(root / "logs"), "-o", str(root / "run")]) == 0
    assert main(["sites", str(root / "run")]) == 0
    run = RunDir.open(root / "run")
    rows = world.right_calls(list(read_conversations(run)))
    run.write_jsonl("pairs", rows, schema="dpo_pair", version=2, sources=["conversations"])
    (root / "run.toml").write_text(CONFIG)
    (root / "task.py").write_text(TASK)
    yield root
    sys.path.remove(str(EXAMPLE))
    torch.set_num_threads(num_threads)


@pytest.fixture
def train(folder, monkeypatch, capsys, tmp_path):
    """Runs `crf train` there and gives exit status, stdout and stderr; what it writes goes to a folder of the test."""
    from composer_replication.cli.main import main

    monkeypatch.chdir(folder)

    def call(*arguments, output=tmp_path / "out", config="run.toml"):
        capsys.readouterr()
        given = ["--config", config] if config else []
        given += [] if output is None else ["--set", f"train.output='{output}'"]
        status = main(["train", *given, *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    call.output = tmp_path / "out"
    return call


def adapter_of(output):
    from safetensors.torch import load_file

    return load_file(output / "adapter" / "adapter_model.safetensors")


def same(left, right):
    import torch

    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
