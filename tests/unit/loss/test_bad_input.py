"""Bad input to the dense losses raises the right error and names the argument; an empty mask is an exact zero."""

import pytest
import torch
from loss_cases import DIVERGENCES, LOSSES

from composer_replication.distillation import dpo_loss, entropy_aware_opd_loss, sdpo_loss, simpo_loss, taid_loss
from composer_replication.errors import InputError, NonFiniteError, ShapeError
from composer_replication.loss.jsd import generalized_jsd_loss
from composer_replication.loss.preference import avg_sequence_logprob

B, T, V = 2, 3, 7
MASK = torch.ones(B, T)
IDS = torch.zeros(B, T, dtype=torch.int64)
LOGITS = "student_logits|teacher_logits"


def logits(seed=0):
    return torch.randn(B, T, V, generator=torch.Generator().manual_seed(seed))


def short(value):
    """A readable test id: the names of the settings, not their tensors."""
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" if isinstance(v, int | float | str) else k for k, v in value.items())
    return value.__name__ if isinstance(value, type) else str(value)


# name -> call(student, teacher, **settings)
CALLS = {
    "jsd": generalized_jsd_loss,
    "taid": lambda student, teacher, **settings: taid_loss(student, teacher, **({"t": 0.4} | settings)),
    "sdpo": lambda student, teacher, **settings: sdpo_loss(student, teacher, **({"mask": MASK} | settings)),
    "soft_gate": entropy_aware_opd_loss,
    "hard_gate": lambda student, teacher, **settings: entropy_aware_opd_loss(
        student, teacher, **({"gate": "hard", "top_k": 3} | settings)
    ),
}
EVERY_CALL = pytest.mark.parametrize("name", CALLS)


def test_the_errors_are_the_standard_types_callers_expect():
    assert issubclass(ShapeError, ValueError)
    assert issubclass(InputError, ValueError)
    assert issubclass(NonFiniteError, ArithmeticError)


@EVERY_CALL
@pytest.mark.parametrize("shape", [(B, T, V + 1), (B, T + 1, V), (B + 1, T, V)], ids=str)
def test_logits_of_different_shapes_are_refused(name, shape):
    with pytest.raises(ShapeError, match=LOGITS):
        CALLS[name](logits(), torch.zeros(shape))


@EVERY_CALL
def test_integer_logits_are_refused(name):
    with pytest.raises(InputError, match="student_logits"):
        CALLS[name](logits().to(torch.int64), logits())
    with pytest.raises(InputError, match="teacher_logits"):
        CALLS[name](logits(), logits().to(torch.int64))


@pytest.mark.parametrize("shape", [(B, T + 1), (B, T - 1), (B * T,), (B, T, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "argument"), [("jsd", "labels"), ("taid", "mask"), ("sdpo", "mask"), ("soft_gate", "labels")]
)
def test_a_mask_of_another_shape_is_refused(name, argument, shape):
    with pytest.raises(ShapeError, match=argument):
        CALLS[name](logits(), logits(1), **{argument: torch.ones(shape, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("jsd", {"reduction": "average"}, "reduction"),
        ("soft_gate", {"reduction": "average"}, "reduction"),
        ("soft_gate", {"gate": "medium"}, "gate"),
        ("soft_gate", {"temperature": 0.0}, "temperature"),
        ("soft_gate", {"h_max": 0.0}, "h_max"),
        ("hard_gate", {"top_k": 0}, "top_k"),
        ("hard_gate", {"top_k": V + 1}, "top_k"),
        ("jsd", {"temperature": 0.0}, "temperature"),
        ("jsd", {"temperature": -1.0}, "temperature"),
        ("jsd", {"beta": -0.1}, "beta"),
        ("jsd", {"beta": 1.1}, "beta"),
        ("jsd", {"beta": float("nan")}, "beta"),
        ("jsd", {"top_k": 0}, "top_k"),
        ("jsd", {"top_k": -1}, "top_k"),
        ("jsd", {"top_k": V + 1}, "top_k"),
        ("jsd", {"token_clip": -1.0}, "token_clip"),
        ("sdpo", {"beta": -0.1}, "beta"),
        ("sdpo", {"beta": 1.1}, "beta"),
        ("sdpo", {"top_k": 0}, "top_k"),
        ("sdpo", {"top_k": V + 1}, "top_k"),
        ("taid", {"t": -0.01}, r"\bt\b"),
        ("taid", {"t": 1.01}, r"\bt\b"),
        ("taid", {"t": float("nan")}, r"\bt\b"),
    ],
    ids=short,
)
def test_a_setting_outside_its_range_is_refused(name, settings, match):
    with pytest.raises(InputError, match=match):
        CALLS[name](logits(), logits(1), **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"is_clip": 2.0, "token_ids": IDS}, "old_logprobs"),
        ({"is_clip": 2.0, "old_logprobs": MASK}, "token_ids"),
        ({"is_clip": -1.0, "token_ids": IDS, "old_logprobs": MASK}, "is_clip"),
        ({"sampled_token": True}, "token_ids"),
        ({"sampled_token": True, "token_ids": IDS + V}, "token_ids"),
        ({"sampled_token": True, "token_ids": IDS - 1}, "token_ids"),
        ({"is_clip": 2.0, "token_ids": IDS + V, "old_logprobs": MASK}, "token_ids"),
    ],
    ids=short,
)
def test_sdpo_refuses_missing_or_impossible_tokens(settings, match):
    with pytest.raises(InputError, match=match):
        sdpo_loss(logits(), logits(1), MASK, **settings)


@pytest.mark.parametrize("argument", ["token_ids", "old_logprobs"])
def test_sdpo_refuses_tokens_of_another_shape(argument):
    settings = {"token_ids": IDS, "old_logprobs": MASK, "is_clip": 2.0}
    settings[argument] = settings[argument][:, :-1]
    with pytest.raises(ShapeError, match=argument):
        sdpo_loss(logits(), logits(1), MASK, **settings)


@EVERY_CALL
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_in_a_kept_row_is_an_error_that_names_the_row(name, side):
    student, teacher = logits(), logits(1)
    (student if side == "student" else teacher)[1, 2, 4] = float("nan")
    # (1, 2) of (2, 3): the pair itself, or row 5 when the rows are counted through
    with pytest.raises(NonFiniteError, match=r"[Rr]ow\D*(1\D+2\b|5\b)"):
        CALLS[name](student, teacher)


@pytest.mark.parametrize("name", LOSSES)
def test_an_all_ignored_batch_is_exactly_zero_with_exactly_zero_gradients(name):
    student, teacher = logits().requires_grad_(True), logits(1)
    loss = LOSSES[name](student, teacher, torch.zeros(B, T, dtype=torch.bool))
    assert loss.shape == ()
    assert float(loss.detach()) == 0.0
    loss.backward()
    assert student.grad is not None
    assert student.grad.shape == student.shape
    assert int(torch.count_nonzero(student.grad)) == 0


@pytest.mark.parametrize("name", ["jsd_0.5", "jsd_top_k", "soft_gate", "hard_gate"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_an_all_ignored_batch_of_nan_is_exactly_zero_for_every_reduction(name, reduction):
    student = torch.full((B, T, V), float("nan"), requires_grad=True)
    loss = DIVERGENCES[name](student, logits(1), torch.zeros(B, T, dtype=torch.bool), reduction=reduction)
    assert int(torch.count_nonzero(loss.detach())) == 0
    loss.sum().backward()
    assert int(torch.count_nonzero(student.grad)) == 0


def test_preference_losses_refuse_pairs_of_different_lengths():
    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ShapeError, match="rejected_avg_logprobs"):
        simpo_loss(three, two)
    with pytest.raises(ShapeError, match="rejected_logprobs"):
        dpo_loss(three, two, three, three)
    with pytest.raises(ShapeError, match="ref_chosen_logprobs"):
        dpo_loss(three, three, two, three)
    with pytest.raises(ShapeError, match="ref_rejected_logprobs"):
        dpo_loss(three, three, three, two)


def test_the_average_log_prob_refuses_a_mask_of_another_shape():
    with pytest.raises(ShapeError, match="response_mask"):
        avg_sequence_logprob(torch.zeros(2, 3), torch.ones(2, 4))
