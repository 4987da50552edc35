"""Bad input to the fused functions and to the PRIME-RL loss raises the right error and names the argument."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from composer_replication.errors import InputError, ShapeError
from composer_replication.loss import JSD, EntropyGate, StudentTopK
from composer_replication.loss.linear import (
    LinearHead,
    TeacherTerm,
    linear_cross_entropy,
    linear_divergence,
    linear_token_logprobs,
)
from composer_replication.recipes.prime_rl.composer_loss import loss_fn

N, V, H = 4, 7, 3
HIDDEN, WEIGHT = torch.ones(N, H), torch.ones(V, H)
IDS = torch.zeros(N, dtype=torch.int64)


def short(value):
    """A readable test id: the names of the settings, not their tensors."""
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" if isinstance(v, int | float | str) else k for k, v in value.items())
    return value.__name__ if isinstance(value, type) else str(value)


def divergence_call(hidden=HIDDEN, weight=WEIGHT, *, bias=None, teacher=HIDDEN, teacher_weight=WEIGHT, **settings):
    divergence = settings.pop("divergence", JSD())
    terms = settings.pop("teacher_terms", [TeacherTerm(teacher, LinearHead(teacher_weight))])
    return linear_divergence(hidden, LinearHead(weight, bias=bias), terms, divergence, **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hidden": torch.ones(N, H + 1)}, "hidden|weight"),
        ({"hidden": torch.ones(1, N, H)}, "hidden"),
        ({"bias": torch.ones(V + 1)}, "bias"),
        ({"teacher": torch.ones(N + 1, H)}, "teacher"),
        ({"teacher_weight": torch.ones(V + 1, H)}, "teacher"),
        ({"row_weights": torch.ones(N + 1)}, "row_weights"),
        ({"row_weights": torch.ones(N, 1)}, "row_weights"),
    ],
    ids=short,
)
def test_the_fused_divergence_refuses_shapes_that_do_not_fit(settings, match):
    with pytest.raises(ShapeError, match=match):
        divergence_call(**settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hidden": HIDDEN.to(torch.int64)}, "hidden"),
        ({"tile_rows": 0}, "tile_rows"),
        ({"tile_rows": -3}, "tile_rows"),
        ({"token_clip": -1.0}, "token_clip"),
        ({"teacher_terms": []}, "teacher_terms"),
        ({"divergence": JSD(top_k=V + 1)}, "top_k"),
        ({"divergence": StudentTopK(top_k=V + 1)}, "top_k"),
        ({"divergence": EntropyGate(gate="hard", top_k=V + 1)}, "top_k"),
    ],
    ids=short,
)
def test_the_fused_divergence_refuses_settings_that_make_no_sense(settings, match):
    with pytest.raises(InputError, match=match):
        divergence_call(**settings)


BAD_DIVERGENCES = pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (JSD, {"beta": 1.5}, "beta"),
        (JSD, {"beta": -0.5}, "beta"),
        (JSD, {"temperature": 0.0}, "temperature"),
        (JSD, {"top_k": 0}, "top_k"),
        (StudentTopK, {"beta": 2.0, "top_k": 3}, "beta"),
        (StudentTopK, {"top_k": 0}, "top_k"),
        (EntropyGate, {"gate": "medium"}, "gate"),
        (EntropyGate, {"temperature": -1.0}, "temperature"),
        (EntropyGate, {"gate": "hard", "top_k": 0}, "top_k"),
    ],
    ids=short,
)


@BAD_DIVERGENCES
def test_a_divergence_with_a_setting_outside_its_range_is_refused_by_the_fused_loss(kind, settings, match):
    with pytest.raises(InputError, match=match):
        divergence_call(divergence=kind(**settings))


@BAD_DIVERGENCES
def test_a_divergence_with_a_setting_outside_its_range_is_refused_on_plain_logits_too(kind, settings, match):
    with pytest.raises(InputError, match=match):
        kind(**settings)(torch.zeros(N, V), torch.ones(N, V))


@pytest.mark.parametrize("function", [linear_token_logprobs, linear_cross_entropy])
def test_token_functions_refuse_ids_that_do_not_fit(function):
    head = LinearHead(WEIGHT)
    for ids in (IDS + V, IDS - 1):
        with pytest.raises(InputError, match="token_ids"):
            function(HIDDEN, head, ids)
    with pytest.raises(ShapeError, match="token_ids"):
        function(HIDDEN, head, IDS[:-1])
    with pytest.raises(InputError, match="tile_rows"):
        function(HIDDEN, head, IDS, tile_rows=0)


def test_cross_entropy_refuses_impossible_weights_and_smoothing():
    head = LinearHead(WEIGHT)
    with pytest.raises(ShapeError, match="row_weights"):
        linear_cross_entropy(HIDDEN, head, IDS, row_weights=torch.ones(N - 1))
    for smoothing in (-0.1, 1.1):
        with pytest.raises(InputError, match="label_smoothing"):
            linear_cross_entropy(HIDDEN, head, IDS, label_smoothing=smoothing)


def prime_rl_inputs(**changes):
    tensors = {
        "trainer_logprobs": torch.full((5,), -1.0),
        "inference_logprobs": torch.full((5,), -1.1),
        "ref_logprobs": torch.full((5,), -0.9),
        "advantages": torch.tensor([1.0, -1.0, 0.0, 2.0, -2.0]),
        "loss_mask": torch.ones(5, dtype=torch.bool),
        "loss_weights": torch.ones(5),
    }
    return SimpleNamespace(**tensors | changes)


EVERY_TENSOR = pytest.mark.parametrize("name", list(vars(prime_rl_inputs())))


@EVERY_TENSOR
def test_the_prime_rl_loss_refuses_a_tensor_that_is_not_one_dimensional(name):
    tensor = getattr(prime_rl_inputs(), name)
    with pytest.raises(ShapeError, match=name):
        loss_fn(prime_rl_inputs(**{name: tensor[None]}), alpha_sdpo=0.1)


@EVERY_TENSOR
def test_the_prime_rl_loss_refuses_a_tensor_of_another_length(name):
    # When the trainer's own length is the odd one, the message may name any of the others.
    tensor = getattr(prime_rl_inputs(), name)
    with pytest.raises(ShapeError, match="logprobs" if name == "trainer_logprobs" else name):
        loss_fn(prime_rl_inputs(**{name: tensor[:-1]}), alpha_sdpo=0.1)


@pytest.mark.parametrize("knob", ["alpha_sdpo", "dppo_mask_high", "dppo_mask_low", "adv_tau", "kl_tau"])
def test_the_prime_rl_loss_refuses_a_negative_knob(knob):
    with pytest.raises(InputError, match=knob):
        loss_fn(prime_rl_inputs(), **{knob: -0.1})


def test_the_prime_rl_loss_refuses_a_negative_beta_dpo():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(InputError, match="beta_dpo"):
            loss_fn(prime_rl_inputs(), beta_dpo=-0.1)


def test_alpha_sdpo_without_reference_log_probs_is_refused_and_never_a_zero():
    with pytest.raises(InputError, match="ref_logprobs"):
        loss_fn(prime_rl_inputs(ref_logprobs=None), alpha_sdpo=0.1)


def test_reference_log_probs_are_not_needed_while_alpha_sdpo_is_zero():
    without = loss_fn(prime_rl_inputs(ref_logprobs=None)).loss
    assert float(without) == float(loss_fn(prime_rl_inputs()).loss)


def test_beta_dpo_warns_and_changes_nothing():
    with pytest.warns(UserWarning, match="beta_dpo"):
        warned = loss_fn(prime_rl_inputs(), beta_dpo=0.1).loss
    assert float(warned) == float(loss_fn(prime_rl_inputs()).loss)


def test_an_all_masked_prime_rl_sample_is_exactly_zero_with_exactly_zero_gradients():
    trainer = torch.full((5,), -1.0, requires_grad=True)
    inputs = prime_rl_inputs(trainer_logprobs=trainer, loss_mask=torch.zeros(5, dtype=torch.bool))
    loss = loss_fn(inputs, alpha_sdpo=0.5).loss
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert int(torch.count_nonzero(trainer.grad)) == 0
