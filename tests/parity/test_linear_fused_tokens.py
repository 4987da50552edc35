"""The fused token log-probs and the fused cross-entropy equal the dense ones; bf16 inputs are computed in fp32."""

import pytest
import reference
import torch
from batches import DTYPES
from closeness import assert_gradient, assert_value
from linear_cases import DIVERGENCES, N, dense, make_case, random, replace

from composer_replication.loss.linear import linear_cross_entropy, linear_divergence, linear_token_logprobs

DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TILE = pytest.mark.parametrize("tile_rows", [1, 3, 7, 1000, None])
HEADS = pytest.mark.parametrize(
    "head",
    [{"bias": False}, {}, {"scale": 0.5}, {"scale": 1.5, "softcap": 3.0}, {"bias": False, "softcap": 2.0}],
    ids=str,
)
TOKEN_IDS = torch.tensor([0, 18, 5, 5, 11, 2, 18])
BF16_GRADIENT = 1e-2  # a bf16 number carries 8 bits: rounding alone moves each entry by up to 0.4%


def dense_logprobs(case):
    rows = zip(case.head.logits(case.hidden), TOKEN_IDS.tolist(), strict=True)
    return torch.stack([reference.log_probs(row)[i] for row, i in rows])


def dense_cross_entropy(case, row_weights=None, label_smoothing=0.0):
    rows = zip(case.head.logits(case.hidden), TOKEN_IDS.tolist(), strict=True)
    values = torch.stack([reference.smoothed_cross_entropy_row(r, i, label_smoothing=label_smoothing) for r, i in rows])
    weights = torch.full_like(values, 1 / N) if row_weights is None else row_weights.double()
    return (weights * values).sum(), values.detach()


def assert_same_gradients(ours, theirs, dtype):
    expected = theirs.gradients()
    for name, gradient in ours.gradients().items():
        assert_gradient(gradient, expected[name], dtype)


@DTYPE
@TILE
@HEADS
def test_token_log_probs_are_dense_in_value_and_gradient(head, tile_rows, dtype):
    ours, theirs = make_case(dtype, seed=1, **head).leaves(), make_case(dtype, seed=1, **head).leaves()
    upstream = random(2, N, dtype=dtype)
    values = linear_token_logprobs(ours.hidden, ours.head.fused(), TOKEN_IDS, tile_rows=tile_rows)
    expected = dense_logprobs(theirs)
    assert_value(values, expected, dtype)
    (values * upstream).sum().backward()
    (expected * upstream.double()).sum().backward()
    assert_same_gradients(ours, theirs, dtype)


@DTYPE
@TILE
@HEADS
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_dense_in_value_and_gradient(label_smoothing, head, tile_rows, dtype):
    ours, theirs = make_case(dtype, seed=3, **head).leaves(), make_case(dtype, seed=3, **head).leaves()
    result = linear_cross_entropy(
        ours.hidden, ours.head.fused(), TOKEN_IDS, label_smoothing=label_smoothing, tile_rows=tile_rows
    )
    expected, rows = dense_cross_entropy(theirs, label_smoothing=label_smoothing)
    assert_value(result.loss, expected, dtype)
    assert_value(result.row_values, rows, dtype)
    assert not result.row_values.requires_grad
    (3.0 * result.loss).backward()
    (3.0 * expected).backward()
    assert_same_gradients(ours, theirs, dtype)


@DTYPE
def test_cross_entropy_honours_row_weights(dtype):
    weights = torch.tensor([0.5, 0.0, 2.0, 0.0, 0.0, 0.1, 1.0], dtype=dtype)
    ours, theirs = make_case(dtype, seed=4).leaves(), make_case(dtype, seed=4).leaves()
    result = linear_cross_entropy(ours.hidden, ours.head.fused(), TOKEN_IDS, row_weights=weights, tile_rows=2)
    expected, rows = dense_cross_entropy(theirs, weights)
    assert_value(result.loss, expected, dtype)
    assert_value(result.row_values, rows, dtype)
    result.loss.backward()
    expected.backward()
    assert_same_gradients(ours, theirs, dtype)
    assert int(torch.count_nonzero(ours.hidden.grad[weights == 0])) == 0


@pytest.mark.parametrize("function", [linear_token_logprobs, linear_cross_entropy])
def test_a_tied_weight_collects_both_gradients(function):
    mixer = random(6, 5, 5)
    base = make_case(seed=5, bias=False)

    def tied(weight):
        return replace(base, hidden=torch.tanh(weight[TOKEN_IDS] @ mixer), head=replace(base.head, weight=weight))

    ours, theirs = (base.head.weight.clone().requires_grad_(True) for _ in range(2))
    if function is linear_token_logprobs:
        value, expected = function(tied(ours).hidden, tied(ours).head.fused(), TOKEN_IDS), dense_logprobs(tied(theirs))
    else:
        value = function(tied(ours).hidden, tied(ours).head.fused(), TOKEN_IDS).loss
        expected = dense_cross_entropy(tied(theirs))[0]
    value.sum().backward()
    expected.sum().backward()
    assert_value(value, expected, torch.float64)
    assert_gradient(ours.grad, theirs.grad, torch.float64)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("function", [linear_token_logprobs, linear_cross_entropy])
def test_a_frozen_side_receives_nothing_and_the_other_its_whole_gradient(function, frozen):
    ours, theirs = make_case(seed=7, bias=False).leaves(), make_case(seed=7, bias=False).leaves()
    (ours.hidden if frozen == "hidden" else ours.head.weight).requires_grad_(False)
    value = function(ours.hidden, ours.head.fused(), TOKEN_IDS, tile_rows=3)
    if function is linear_token_logprobs:
        value.sum().backward()
        dense_logprobs(theirs).sum().backward()
    else:
        value.loss.backward()
        dense_cross_entropy(theirs)[0].backward()
    gradients, expected = ours.gradients(), theirs.gradients()
    live = "weight" if frozen == "hidden" else "hidden"
    assert gradients[frozen] is None
    assert_gradient(gradients[live], expected[live], torch.float64)


def test_one_row_is_enough_and_no_rows_give_zero():
    one = make_case(seed=8, rows=1)
    expected = reference.log_probs(one.head.logits(one.hidden)[0])[4]
    ids = torch.tensor([4])
    assert_value(linear_token_logprobs(one.hidden, one.head.fused(), ids)[0], expected, torch.float64)
    assert_value(linear_cross_entropy(one.hidden, one.head.fused(), ids).loss, -expected, torch.float64)

    none, empty = make_case(seed=8, rows=0).leaves(), torch.zeros(0, dtype=torch.int64)
    logprobs = linear_token_logprobs(none.hidden, none.head.fused(), empty)
    result = linear_cross_entropy(none.hidden, none.head.fused(), empty)
    assert logprobs.shape == (0,)
    assert result.row_values.shape == (0,)
    assert float(result.loss.detach()) == 0.0
    (logprobs.sum() + result.loss).backward()
    for gradient in none.gradients().values():
        assert gradient is not None
        assert int(torch.count_nonzero(gradient)) == 0


def assert_bf16_gradients(ours, theirs):
    expected = theirs.gradients()
    for name, gradient in ours.gradients().items():
        assert gradient.dtype == torch.bfloat16
        distance = float((gradient.double() - expected[name].double()).norm())
        assert distance <= BF16_GRADIENT * float(expected[name].double().norm()), name


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_bf16_divergence_is_computed_in_fp32(name):
    case = make_case(torch.bfloat16, seed=9)
    ours, theirs = case.leaves(), case.leaves()
    divergence, row_fn = DIVERGENCES[name]
    result = linear_divergence(ours.hidden, ours.head.fused(), ours.terms(), divergence, tile_rows=3)
    expected, rows = dense(theirs, row_fn)
    assert result.loss.dtype == torch.float32
    assert_value(result.loss, expected)
    assert_value(result.row_values, rows)
    result.loss.backward()
    expected.backward()
    assert_bf16_gradients(ours, theirs)


def test_bf16_token_log_probs_and_cross_entropy_are_computed_in_fp32():
    case = make_case(torch.bfloat16, seed=10)
    ours, theirs = case.leaves(), case.leaves()
    logprobs = linear_token_logprobs(ours.hidden, ours.head.fused(), TOKEN_IDS, tile_rows=3)
    result = linear_cross_entropy(ours.hidden, ours.head.fused(), TOKEN_IDS, tile_rows=3)
    assert logprobs.dtype == result.loss.dtype == torch.float32
    assert_value(logprobs, dense_logprobs(theirs))
    assert_value(result.loss, dense_cross_entropy(theirs)[0])
    (2.0 * result.loss).backward()
    (2.0 * dense_cross_entropy(theirs)[0]).backward()
    assert_bf16_gradients(ours, theirs)


def test_the_inputs_are_left_as_they_were():
    case = make_case(seed=11).leaves()
    before = [x.detach().clone() for x in (case.hidden, case.head.weight, case.head.bias, case.teachers[0][0])]
    divergence, _ = DIVERGENCES["jsd"]
    linear_divergence(case.hidden, case.head.fused(), case.terms(), divergence, tile_rows=2).loss.backward()
    linear_cross_entropy(case.hidden, case.head.fused(), TOKEN_IDS, tile_rows=2).loss.backward()
    after = [case.hidden, case.head.weight, case.head.bias, case.teachers[0][0]]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
