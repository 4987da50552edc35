"""The fused linear divergence equals the dense one: value, row values and every gradient."""

import pytest
import torch
from batches import DTYPES
from closeness import assert_gradient, assert_no_gradient, assert_value
from linear_cases import DIVERGENCES, N, assert_fused_is_dense, dense, make_case, make_head, random, replace

from composer_replication.loss.linear import TeacherTerm, linear_divergence

EVERY = pytest.mark.parametrize("name", DIVERGENCES)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SOME = pytest.mark.parametrize("name", ["jsd", "kl_st_top_k", "student_top_k", "cross_entropy", "hard_gate"])


@EVERY
@DTYPE
def test_a_divergence_on_logits_is_its_reference(name, dtype):
    divergence, row_fn = DIVERGENCES[name]
    student, teacher = (x.detach().to(dtype) for x in make_case(seed=100).dense_logits())
    expected = torch.stack([row_fn(s, t) for s, t in zip(student, teacher, strict=True)])
    assert_value(divergence(student, teacher), expected, dtype)


@EVERY
@DTYPE
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_fused_is_dense_for_every_divergence(name, dtype, bias):
    assert_fused_is_dense(make_case(dtype, bias=bias), name, dtype)


@EVERY
@DTYPE
def test_fused_is_dense_with_scale_and_softcap(name, dtype):
    assert_fused_is_dense(make_case(dtype, seed=200, scale=0.6), name, dtype)
    assert_fused_is_dense(make_case(dtype, seed=300, scale=1.4, softcap=3.0), name, dtype)


@EVERY
@DTYPE
def test_fused_is_dense_with_two_teacher_terms(name, dtype):
    assert_fused_is_dense(make_case(dtype, seed=400, coefficients=(0.99, 0.01)), name, dtype)


@EVERY
@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_fused_is_dense_with_the_students_own_logits_in_the_target(name, t):
    if t == 0.0:
        case = make_case(seed=500, coefficients=(), student=1.0, softcap=5.0)
    else:
        case = make_case(seed=500, coefficients=(t,), student=1 - t, softcap=5.0)
    assert_fused_is_dense(case, name, torch.float64)


def test_fused_is_dense_with_the_student_and_two_teachers():
    assert_fused_is_dense(make_case(seed=550, coefficients=(0.5, 0.2), student=0.3), "cross_entropy", torch.float64)


@EVERY
@pytest.mark.parametrize("tile_rows", [1, 2, 3, 6, 7, 8, 1000, None])
def test_the_tile_size_changes_nothing(name, tile_rows):
    assert_fused_is_dense(make_case(seed=600), name, torch.float64, tile_rows=tile_rows)


@EVERY
@DTYPE
def test_fused_is_dense_with_row_weights_some_of_them_zero(name, dtype):
    weights = torch.tensor([0.5, 0.0, 2.0, 0.0, 0.0, 0.1, 1.0], dtype=dtype)
    assert_fused_is_dense(make_case(dtype, seed=700), name, dtype, row_weights=weights)


def test_a_row_of_weight_zero_receives_exactly_no_gradient():
    weights = torch.tensor([0.5, 0.0, 2.0, 0.0, 0.0, 0.1, 1.0], dtype=torch.float64)
    case = make_case(seed=700).leaves()
    divergence, _ = DIVERGENCES["kl_st"]
    linear_divergence(case.hidden, case.head.fused(), case.terms(), divergence, row_weights=weights).loss.backward()
    assert int(torch.count_nonzero(case.hidden.grad[weights == 0])) == 0
    assert bool((case.hidden.grad[weights != 0].norm(dim=1) > 0).all())


@EVERY
@DTYPE
def test_fused_is_dense_with_a_token_cap(name, dtype):
    case = make_case(dtype, seed=800)
    _, rows = dense(case, DIVERGENCES[name][1])
    middle = float(rows.sort().values[N // 2])
    assert_fused_is_dense(case, name, dtype, token_clip=0.9 * middle)
    weights = torch.linspace(0.0, 1.0, N, dtype=dtype)
    assert_fused_is_dense(case, name, dtype, token_clip=0.9 * middle, row_weights=weights)


@EVERY
@pytest.mark.parametrize("upstream", [3.0, -0.5])
def test_the_upstream_gradient_multiplies_every_gradient(name, upstream):
    assert_fused_is_dense(make_case(seed=900), name, torch.float64, upstream=upstream)


@EVERY
def test_fused_is_dense_for_a_single_row(name):
    assert_fused_is_dense(make_case(seed=1000, rows=1), name, torch.float64)


@EVERY
def test_no_rows_give_exactly_zero_and_zero_gradients(name):
    case = make_case(rows=0).leaves()
    result = linear_divergence(case.hidden, case.head.fused(), case.terms(), DIVERGENCES[name][0])
    assert result.loss.shape == ()
    assert float(result.loss.detach()) == 0.0
    assert result.row_values.shape == (0,)
    result.loss.backward()
    for gradient in case.gradients().values():
        assert gradient is not None
        assert int(torch.count_nonzero(gradient)) == 0


@SOME
@DTYPE
def test_a_tied_weight_collects_the_gradient_of_both_its_uses(name, dtype):
    """The weight is also the embedding that the hidden rows are made of."""
    divergence, row_fn = DIVERGENCES[name]
    case, mixer = make_case(dtype, seed=1100, bias=False), random(1101, 5, 5, dtype=dtype)
    token_ids = torch.tensor([3, 3, 0, 18, 7, 1, 3])

    def tied(weight):
        return replace(
            case, hidden=torch.tanh(weight[token_ids] @ mixer.to(weight.dtype)), head=replace(case.head, weight=weight)
        )

    ours = case.head.weight.clone().requires_grad_(True)
    theirs = case.head.weight.double().clone().requires_grad_(True)
    result = linear_divergence(tied(ours).hidden, tied(ours).head.fused(), case.terms(), divergence, tile_rows=2).loss
    expected, _ = dense(tied(theirs), row_fn)
    (result + 0.1 * ours.square().sum()).backward()
    (expected + 0.1 * theirs.square().sum()).backward()
    assert_value(result, expected, dtype)
    assert_gradient(ours.grad, theirs.grad, dtype)


@SOME
def test_frozen_hidden_rows_leave_the_weights_gradient_as_it_is(name):
    divergence, row_fn = DIVERGENCES[name]
    ours, theirs = make_case(seed=1200).leaves(), make_case(seed=1200).leaves()
    linear_divergence(ours.hidden.detach(), ours.head.fused(), ours.terms(), divergence, tile_rows=3).loss.backward()
    dense(theirs, row_fn)[0].backward()
    assert ours.hidden.grad is None
    assert_gradient(ours.head.weight.grad, theirs.head.weight.grad, torch.float64)
    assert_gradient(ours.head.bias.grad, theirs.head.bias.grad, torch.float64)


@SOME
def test_a_frozen_head_leaves_the_hidden_gradient_as_it_is(name):
    divergence, row_fn = DIVERGENCES[name]
    ours, theirs = make_case(seed=1300).leaves(), make_case(seed=1300).leaves()
    frozen = make_case(seed=1300).head.fused()
    linear_divergence(ours.hidden, frozen, ours.terms(), divergence, tile_rows=3).loss.backward()
    dense(theirs, row_fn)[0].backward()
    assert_gradient(ours.hidden.grad, theirs.hidden.grad, torch.float64)
    assert frozen.weight.grad is None


@SOME
def test_without_gradients_the_value_is_the_same_and_has_no_graph(name):
    divergence, row_fn = DIVERGENCES[name]
    case = make_case(seed=1400)
    expected, _ = dense(case, row_fn)
    plain = linear_divergence(case.hidden, case.head.fused(), case.terms(), divergence, tile_rows=3)
    live = case.leaves()
    with torch.no_grad():
        silent = linear_divergence(live.hidden, live.head.fused(), live.terms(), divergence, tile_rows=3)
    assert not plain.loss.requires_grad
    assert not silent.loss.requires_grad
    assert_value(plain.loss, expected, torch.float64)
    assert_value(silent.loss, expected, torch.float64)


@SOME
def test_teachers_receive_no_gradient(name):
    case = make_case(seed=1500).leaves()
    hidden, head = random(1501, N, 5).requires_grad_(True), make_head(1502, torch.float64)
    head.weight.requires_grad_(True)
    head.bias.requires_grad_(True)
    terms = [TeacherTerm(hidden, head.fused())]
    linear_divergence(case.hidden, case.head.fused(), terms, DIVERGENCES[name][0]).loss.backward()
    for tensor in (hidden, head.weight, head.bias):
        assert_no_gradient(tensor)


@SOME
def test_a_teacher_that_shares_the_students_head_is_detached_from_it(name):
    divergence, row_fn = DIVERGENCES[name]
    base, teacher_hidden = make_case(seed=1600), random(1601, N, 5)
    ours, theirs = base.leaves(), base.leaves()
    terms = [TeacherTerm(teacher_hidden, ours.head.fused())]
    linear_divergence(ours.hidden, ours.head.fused(), terms, divergence, tile_rows=3).loss.backward()
    dense(replace(theirs, teachers=[(teacher_hidden, base.head, 1.0)]), row_fn)[0].backward()
    assert_gradient(ours.head.weight.grad, theirs.head.weight.grad, torch.float64)
    assert_gradient(ours.hidden.grad, theirs.hidden.grad, torch.float64)
