"""Rows of embedding and head that an adapter trains: the objective sees them, the weights below stay as they are."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from composer_replication import compose_loss
from composer_replication.errors import UnsupportedModelError
from composer_replication.trainer.objective.distributed import adapter_disabled, merged_token_rows
from composer_replication.trainer.objective.fingerprint import trained_adapter_digest, weights_digest
from composer_replication.trainer.objective.model_head import embedding_count, get_linear_head
from composer_replication.trainer.objective.reference import response_logprobs
from composer_replication.trainer.objective.row_weighting import WeightedTeacher
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from tiny_models import VOCAB, build, random_batch

ROWS = [5, 41]
KINDS = ["qwen2-tied", "qwen2-untied", "gemma2-tied"]


def adapted(family="qwen2-tied", *, rows=ROWS, moved=True):
    model = build(family)
    places = rows if model.config.tie_word_embeddings else {"embed_tokens": rows, "lm_head": rows}
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], trainable_token_indices=places)
    model = get_peft_model(model, config)
    if moved:
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "lora_B" in name or "trainable_tokens_delta" in name:
                    each.add_(torch.randn_like(each) * 0.2)
    return model


def batch_with_rows():
    """Targets and contexts both hold the trained tokens."""
    batch = random_batch(4, pairs=False)
    for key in ("input_ids", "ctx_teacher_input_ids"):
        batch[key][:, 3] = ROWS[0]
    batch["input_ids"][:, 9], batch["ctx_teacher_input_ids"][:, 14] = ROWS[1], ROWS[1]
    return batch


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("family", KINDS)
def test_loss_and_gradients_are_those_of_the_models_own_logits(family):
    batch = batch_with_rows()
    ours, plain = adapted(family), adapted(family)
    composed = compose_loss(ours, batch, alpha_sdpo=0.0, beta_replay=0.0).total
    composed.backward()
    logits = plain(input_ids=batch["input_ids"]).logits[:, :-1]
    wanted = batch["response_mask"][:, 1:].bool()
    loss = cross_entropy(logits[wanted], batch["input_ids"][:, 1:][wanted])
    loss.backward()
    assert composed.item() == pytest.approx(loss.item(), abs=1e-5)
    got, expected = gradients(ours), gradients(plain)
    assert any("trainable_tokens_delta" in name for name in got)
    for name, each in expected.items():
        assert each.norm() > 0, name
        assert (got[name] - each).norm() <= 2e-5 * each.norm(), name


@pytest.mark.parametrize("family", KINDS)
def test_below_the_adapter_the_head_has_the_rows_it_began_with(family):
    model, bare, ids = adapted(family), build(family), torch.tensor([[3, 5, 41, 7]])
    with torch.no_grad(), adapter_disabled(model):
        assert torch.equal(get_linear_head(model, ids).weight, bare.get_output_embeddings().weight)
        assert torch.equal(model(input_ids=ids).logits, bare(input_ids=ids).logits)
    changed = (get_linear_head(model, ids).weight != bare.get_output_embeddings().weight).any(dim=1).nonzero().flatten()
    assert changed.tolist() == ROWS
    assert embedding_count(model) == VOCAB


def test_a_frozen_teacher_of_the_same_model_is_the_bare_model():
    """The teacher's rows are those below the adapter; a copy of the start weights teaches the same."""
    batch, model = batch_with_rows(), adapted()
    below = [WeightedTeacher(None, 1.0, without_adapter=True)]
    apart = [WeightedTeacher(build("qwen2-tied"), 1.0)]
    one, other = (compose_loss(model, batch, alpha_sdpo=1.0, sdpo_teachers=each).sdpo_jsd for each in (below, apart))
    assert one.item() == pytest.approx(other.item(), abs=1e-6)
    live = compose_loss(model, batch, alpha_sdpo=1.0).sdpo_jsd
    assert abs(live.item() - one.item()) > 1e-3


def test_a_trust_region_mixes_the_logits_of_two_heads():
    batch, model = batch_with_rows(), adapted()
    shares = [WeightedTeacher(None, 0.9, without_adapter=True), WeightedTeacher(None, 0.1)]
    apart = [WeightedTeacher(build("qwen2-tied"), 0.9), WeightedTeacher(adapted(), 0.1)]
    one, other = (compose_loss(model, batch, alpha_sdpo=1.0, sdpo_teachers=each).sdpo_jsd for each in (shares, apart))
    assert one.item() == pytest.approx(other.item(), abs=1e-6)


def test_an_average_follows_the_rows():
    model, keeper = adapted(moved=False), TeacherKeeper("ema", ema_rate=0.5)
    keeper.attach(model)
    (name,) = [name for name, _ in model.named_parameters() if "trainable_tokens_delta" in name]
    before = dict(model.named_parameters())[name].detach().clone()
    with torch.no_grad():
        dict(model.named_parameters())[name].add_(1.0)
    keeper.after_step(model)
    assert torch.allclose(dict(keeper.model.named_parameters())[name], before + 0.5)
    weight = get_linear_head(keeper.model, torch.tensor([[3, 5, 41, 7]])).weight
    assert torch.allclose(weight[ROWS], before + 0.5)


@pytest.mark.parametrize("family", KINDS)
def test_the_digest_of_the_weights_below_is_that_of_the_bare_model(family):
    bare = weights_digest(build(family))
    assert weights_digest(adapted(family)) == bare == weights_digest(adapted(family, rows=None))
    assert weights_digest(adapted(family), with_adapter=True) != weights_digest(
        adapted(family, moved=False), with_adapter=True
    )
    assert trained_adapter_digest(adapted(family, moved=False)) is None


@pytest.mark.parametrize("family", KINDS)
def test_rows_in_place_change_no_logit_and_leave_no_trace(family):
    model, ids = adapted(family).eval(), torch.tensor([[3, 5, 41, 7, 5]])
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.no_grad():
        usual = model(input_ids=ids).logits
        with merged_token_rows(model):
            assert torch.allclose(model(input_ids=ids).logits, usual, atol=1e-6)
            assert torch.equal(get_linear_head(model, ids).weight[ROWS], model.state_dict()[_delta(model)])
        assert torch.equal(model(input_ids=ids).logits, usual)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def _delta(model):
    return [name for name in model.state_dict() if "trainable_tokens_delta" in name][-1]


def test_log_probs_of_responses_see_the_rows():
    model, ids = adapted(), [3, 9, 5, 41, 7]
    logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = sum(logits[at - 1, ids[at]].item() for at in (2, 3, 4))
    assert response_logprobs(model, [(ids, 2)]).item() == pytest.approx(expected, abs=1e-4)


def test_a_head_with_a_bias_is_refused():
    model = adapted("qwen2-untied")
    model.get_output_embeddings().token_adapter.base_layer.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    with pytest.raises(UnsupportedModelError, match="token_rows"):
        get_linear_head(model, torch.tensor([[3, 5]]))
