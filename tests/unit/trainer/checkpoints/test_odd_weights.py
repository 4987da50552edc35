"""Weights and configs that somebody else wrote, as odd as they may be: an error that names them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from composer_replication.batch.model_folder import load_config
from composer_replication.errors import InputError, RunError
from composer_replication.trainer.checkpoints.weights import load_weights, save_weights
from composer_replication.trainer.watch.memory_plan import shape_of
from kill_and_resume.small_runs import small_model, write_weights_manifest
from refusals import refusal


def header(entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ODD = {
    "empty": b"",
    "a header of more than there is": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": (9).to_bytes(8, "little") + b"not json!",
    "a dtype that nobody has": header({"w": {"dtype": "X9", "shape": [1], "data_offsets": [0, 1]}}) + b"0",
    "offsets outside": header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}) + b"0",
}


@pytest.mark.parametrize("name", ODD)
def test_weights_that_are_no_safetensors_are_named(tmp_path, name):
    model = small_model()
    save_weights(model, tmp_path, None, own_names=True)
    (tmp_path / "model.safetensors").write_bytes(ODD[name])
    write_weights_manifest(tmp_path, model)
    with refusal(RunError, what="model.safetensors"):
        load_weights(model, tmp_path)


def test_weights_of_another_shape_are_named(tmp_path):
    model = small_model()
    save_weights(model, tmp_path, None, own_names=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state["transformer.wpe.weight"] = torch.zeros(3)
    save_file(state, tmp_path / "model.safetensors")
    write_weights_manifest(tmp_path, model)
    with pytest.raises(RunError, match=r"'transformer\.wpe\.weight'.*\[3\]"):
        load_weights(model, tmp_path)


SOUND = {"model_type": "qwen2", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": 0},
        {"hidden_size": -16},
        {"hidden_act": "no_such"},
        {"rope_scaling": {"rope_type": "no_such"}},
    ],
    ids=str,
)
def test_configs_that_make_no_model_are_named(tmp_path, odd):
    (tmp_path / "config.json").write_text(json.dumps({**SOUND, "intermediate_size": 32} | odd))
    with pytest.raises(InputError, match=str(tmp_path)):
        shape_of(load_config(str(tmp_path), what="train.model"))
