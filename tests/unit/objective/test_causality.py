"""Sequences share their prefixes and are padded at the end: refused where later tokens change earlier rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Qwen2Config
from transformers.masking_utils import sdpa_mask

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.errors import UnsupportedModelError
from composer_replication.trainer.objective.attention.model_checks import check_causal
from refusals import refusal

IDS = list(range(3, 35))


def model_with(attention):
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def sees_all_beyond(length):
    """Attention that looks ahead in long sequences, whatever its mask says."""

    def attend(module, query, key, value, attention_mask, **options):
        ahead = query.shape[2] > length
        found = F.scaled_dot_product_attention(query, key, value, is_causal=not ahead)
        return found.transpose(1, 2).contiguous(), None

    name = f"ahead beyond {length}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def test_rows_that_depend_on_later_tokens_are_refused_by_name_at_the_length_where_they_do():
    model = model_with(sees_all_beyond(20))
    check_causal(model, torch.tensor(IDS[:16]))
    with refusal(UnsupportedModelError, what="Qwen2ForCausalLM", got="16 of 16") as caught:
        check_causal(model, torch.tensor(IDS))
    assert str(len(IDS)) in caught.value.got


@pytest.mark.parametrize("as_tree", [False, True])
def test_no_loss_is_made_of_them(as_tree):
    model = model_with(sees_all_beyond(20))
    targets = SessionTargets()
    targets.add_response(IDS, 20, 30)
    targets.add_response([*IDS[:20], 40, 41, 42], 20, 23)
    mask = torch.tensor([[0] * 20 + [1] * 12])
    mapping = {"input_ids": torch.tensor([IDS]), "response_mask": mask}
    with refusal(UnsupportedModelError, what="Qwen2ForCausalLM", got="16 of 16"):
        compose_loss(model, targets.build() if as_tree else mapping)


def test_a_causal_model_passes_is_asked_once_a_length_and_left_as_it_was():
    model = model_with("sdpa").train()
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    for length, wanted in ((16, 2), (16, 2), (9, 2), (30, 4), (30, 4)):
        check_causal(model, torch.tensor(IDS[:length]))
        assert len(passes) == wanted
    assert all(module.training for module in model.modules())


def test_a_model_that_fails_by_itself_is_refused_by_name():
    because = "expected m1 and m2 to have the same dtype"

    def attend(*_given, **_options):
        raise RuntimeError(because)

    AttentionInterface.register("broken", attend)
    with refusal(UnsupportedModelError, what="Qwen2ForCausalLM", got=because) as caught:
        check_causal(model_with("broken"), torch.tensor(IDS))
    assert {"torch.float32", "32"} <= set(caught.value.what.split())
