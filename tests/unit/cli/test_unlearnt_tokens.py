"""A token of the chat template that the start weights never learnt: `crf train` and `crf evaluate` say so."""

from __future__ import annotations

import json
import shutil

import pytest
from train_runs import GRPO, adapter_of

from composer_replication.cli.main import main
from composer_replication.cli.sites import write_sites
from composer_replication.cli.split import write_split
from composer_replication.config import CrfConfig, SitesConfig, SplitConfig
from composer_replication.config.loader import load
from composer_replication.errors import ConfigError
from composer_replication.runs import RunDir
from output_facts import lines_with

SAID = ("<tool_call>", 16)  # the token, and how many entries nothing reached


@pytest.fixture(scope="module")
def padded(folder, tmp_path_factory):
    """The model with sixteen entries more than its tokenizer, and the mark of a call among those no text reached."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = tmp_path_factory.mktemp("padded")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer) + 16, mean_resizing=False)
    with torch.no_grad():
        unused = range(len(tokenizer), len(tokenizer) + 16)
        model.get_input_embeddings().weight[[tokenizer.convert_tokens_to_ids("<tool_call>"), *unused]] = 0.05
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def rows_of(output):
    return [name for name in adapter_of(output) if "trainable_tokens_delta" in name]


def test_its_row_is_trained_with_the_adapter_unless_told_otherwise(train, padded, tmp_path):
    given = ("--set", f"train.model='{padded}'", "--set", "train.optimiser.steps=1")
    status, _, err = train(*given)
    assert status == 0, err
    assert len(lines_with(err, *SAID, "train.adapter.token_rows")) == 1
    settings = json.loads((train.output / "adapter" / "adapter_config.json").read_text())
    assert [len(ids) for ids in settings["trainable_token_indices"].values()] == [1]
    assert len(rows_of(train.output)) == 1
    none = tmp_path / "none"
    status, _, err = train(*given, "--set", "train.adapter.token_rows=[]", output=none)
    assert status == 0, err
    assert len(lines_with(err, *SAID, "train.adapter.token_rows")) == 1
    assert not rows_of(none)


def test_rollouts_train_it_too(train, padded):
    status, _, err = train(*GRPO, "--set", f"train.model='{padded}'", "--set", "train.optimiser.steps=1")
    assert status == 0, err
    assert lines_with(err, *SAID)
    assert len(rows_of(train.output)) == 1


def test_an_evaluation_that_draws_actions_says_who_cannot_write_it(folder, padded, tmp_path, capsys):
    run = RunDir.open(shutil.copytree(folder / "run", tmp_path / "run"))
    write_split(SplitConfig(test=0.5), run)
    write_sites(SitesConfig(), run)
    few = ("samples=1", "new_tokens=2", "states=1", "good_turns=0", "token_gaps=0")
    options = [word for each in few for word in ("--set", f"evaluation.{each}")]
    assert main(["evaluate", str(run.root), "--before", str(padded), "--after", str(folder / "model"), *options]) == 0
    assert lines_with(capsys.readouterr().out, "before", *SAID)


@pytest.mark.parametrize("rows", ["['auto', '<tool_call>']", "['<tool_call>']"])
def test_what_cannot_be_meant_is_refused(rows):
    kind = "lora" if "auto" in rows else "none"
    with pytest.raises(ConfigError, match="token_rows"):
        load(CrfConfig, overrides=[f"train.adapter.kind={kind}", f"train.adapter.token_rows={rows}"])
