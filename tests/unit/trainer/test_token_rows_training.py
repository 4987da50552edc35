"""Tokens of the template that the weights never learnt: found, trained with the adapter, saved, resumed and merged."""

from __future__ import annotations

import json
import re

import pytest
import torch
from offline_pieces import arguments, renderer, sessions_of
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from composer_replication.batch.model_folder import load_adapter
from composer_replication.cli.export_weights import _merge_adapter
from composer_replication.errors import ConfigError
from composer_replication.trainer.checkpoints.weights import load_weights
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.model_head import get_linear_head
from composer_replication.trainer.offline_trainer import OfflineTrainer
from composer_replication.trainer.sessions.rendering import assistant_token_ids
from composer_replication.trainer.start_model import _token_ids, prepare_model, untrained_rows
from composer_replication.trainer.trained import Trained

TOKENIZER = renderer().tokenizer
END = TOKENIZER.convert_tokens_to_ids("<|eot_id|>")
NUM_UNUSED = 12
CHANNEL_1 = ChannelSettings(alpha_sdpo=0.0, beta_replay=0.0)


def padded(*, untrained=(END,), spread=1e-3, tied=True):
    """A model with entries behind the tokenizer's last, whose rows are those that no text ever moved."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(TOKENIZER) + NUM_UNUSED,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            ids = [*untrained, *range(len(TOKENIZER), config.vocab_size)]
            weight[ids] = 0.1 + spread * torch.randn(len(ids), config.hidden_size)
    return model


def adapted(folder, *, tied=True, rows=(END,)):
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = arguments(folder)
    return prepare_model(padded(tied=tied), args, peft_config=config, quantization="none", token_rows=lambda _: rows)


def trained(folder, *, steps=4, resume=False, rows=(END,), tied=True, **changes):
    args = arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2, **changes)
    sessions = sessions_of(0, 1, 2, use_sites=False, use_pairs=False)
    trainer = OfflineTrainer(adapted(folder, tied=tied, rows=rows), args, sessions, settings=CHANNEL_1)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def head_row(model):
    return get_linear_head(model, torch.tensor([[3, 5, 7]])).weight[END].detach()


def test_the_tokens_that_sessions_say_and_weights_never_learnt_are_found():
    said = assistant_token_ids(sessions_of(0).rendered)
    assert END in said
    found = untrained_rows(padded(), TOKENIZER, said)
    assert list(found.tokens.items()) == [(END, "<|eot_id|>")]
    assert found.distances[0] <= found.limit < found.typical
    assert (found.num_unused, found.limit) == (NUM_UNUSED, pytest.approx(0.1 * found.typical))
    words = found.describe()
    assert all(re.search(fact, words) for fact in (r"<\|eot_id\|>", r"\b12\b", r"\b10%"))


def test_nothing_is_found_where_nothing_is_said_trained_or_can_be_told():
    said = assistant_token_ids(sessions_of(0).rendered)
    assert untrained_rows(padded(untrained=()), TOKENIZER, said) is None
    assert untrained_rows(padded(), TOKENIZER, said - {END}) is None
    # Unused rows as far from one another as trained ones: a fresh model.
    assert untrained_rows(padded(spread=0.2), TOKENIZER, said) is None
    model = padded()
    model.resize_token_embeddings(len(TOKENIZER) + 3)
    assert untrained_rows(model, TOKENIZER, said) is None
    assert untrained_rows(padded().to("meta"), TOKENIZER, said) is None


def test_a_row_that_an_adapter_trains_is_not_called_untrained(tmp_path):
    said = assistant_token_ids(sessions_of(0).rendered)
    assert untrained_rows(adapted(tmp_path), TOKENIZER, said) is None
    assert list(untrained_rows(adapted(tmp_path, rows=()), TOKENIZER, said).tokens) == [END]


def test_tokens_by_name_are_ids_and_others_are_refused():
    assert _token_ids(TOKENIZER, ["<|eot_id|>"]) == [END]
    with pytest.raises(ConfigError, match="<nothing>"):
        _token_ids(TOKENIZER, ["<nothing>"])


@pytest.mark.parametrize("tied", [True, False])
def test_steps_move_the_row_and_its_token_gets_likelier_where_lora_alone_leaves_it(tmp_path, tied):
    start = padded(tied=tied).get_output_embeddings().weight
    with_rows = trained(tmp_path / "rows", tied=tied).model
    without = trained(tmp_path / "none", rows=(), tied=tied).model
    assert not torch.allclose(head_row(with_rows), start[END], atol=1e-3)
    assert torch.equal(head_row(without), start[END])
    below = with_rows.get_output_embeddings().token_adapter.base_layer.weight
    assert torch.equal(below, start)

    def logprob(model):
        ids = torch.tensor([sessions_of(0).rendered[0].sequences[0].ids])
        at = ids[0].tolist().index(END, 40)
        with torch.no_grad():
            return model.eval()(input_ids=ids).logits[0, at - 1].log_softmax(-1)[END].item()

    assert logprob(with_rows) > logprob(without)


@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_run_ends_bit_for_bit_and_its_adapter_loads_back(tmp_path, tied):
    whole = trained(tmp_path / "whole", tied=tied)
    trained(tmp_path / "parts", steps=2, tied=tied)
    parts = trained(tmp_path / "parts", resume=True, tied=tied)
    one, other = weights(whole.model), weights(parts.model)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    checkpoint = tmp_path / "parts" / "checkpoint-4"
    again = adapted(tmp_path / "again", tied=tied)
    load_weights(again, checkpoint)
    assert all(torch.equal(each, one[name]) for name, each in weights(again).items())
    saved = load_file(checkpoint / "adapter_model.safetensors")
    rows = [name for name in saved if "trainable_tokens_delta" in name]
    assert len(rows) == (1 if tied else 2)
    assert all(saved[name].shape == (1, 32) for name in rows)
    assert not any("embed_tokens.weight" in name or "lm_head.weight" in name for name in saved)


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_with_rows_loads_for_use_and_merges(tmp_path, tied):
    trainer = trained(tmp_path / "run", tied=tied)
    trainer.model.save_pretrained(tmp_path / "adapter")
    padded(tied=tied).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    ids = torch.tensor([[3, END, 7, 9]])
    expected = trainer.model.eval()(input_ids=ids).logits
    loaded = load_adapter(padded(tied=tied), tmp_path / "adapter", what="adapter")
    assert isinstance(loaded, PeftModel)
    assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)
    assert torch.equal(head_row(loaded), head_row(trainer.model))
    stands_on = Trained(base=str(tmp_path / "base"), adapter=tmp_path / "adapter")
    assert _merge_adapter(stands_on, tmp_path / "merged").is_close
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert torch.allclose(merged(input_ids=ids).logits, expected, atol=1e-5)
    assert torch.equal(merged.get_output_embeddings().weight[END], head_row(trainer.model))
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is tied


def test_rows_are_whole_where_the_weights_below_are_halves(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = arguments(tmp_path)
    halves = padded().to(torch.bfloat16)
    model = prepare_model(halves, args, peft_config=config, quantization="none", token_rows=lambda _: [END])
    (row,) = [each for name, each in model.named_parameters() if "trainable_tokens_delta" in name]
    assert row.dtype == torch.float32
    assert row.requires_grad
    assert get_linear_head(model, torch.tensor([[3, 5, 7]])).weight.dtype == torch.bfloat16
