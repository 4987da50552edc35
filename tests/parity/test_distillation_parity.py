"""TAID, its schedule, both entropy gates, SimPO and DPO against the slow references."""

import pytest
import reference
import torch
from batches import DTYPES, keep_mask, logprobs, pair
from closeness import assert_gradient, assert_value, value_and_gradients

from composer_replication.distillation import TAIDScheduler, dpo_loss, entropy_aware_opd_loss, simpo_loss, taid_loss
from composer_replication.loss.entropy_opd import teacher_entropy
from composer_replication.loss.preference import avg_sequence_logprob

MASK = keep_mask(21)


def same(dtype, ours, theirs, *inputs):
    value, gradients = value_and_gradients(ours, *inputs)
    expected, expected_gradients = value_and_gradients(theirs, *inputs)
    assert_value(value, expected, dtype)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_gradient(gradient, expected_gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("t", [0.0, 0.25, 0.4, 1.0])
def test_taid_is_the_reference(t, masked, dtype):
    student, teacher = pair(0, dtype=dtype)
    mask = MASK.to(dtype) if masked else None
    same(dtype, lambda s: taid_loss(s, teacher, mask, t=t), lambda s: reference.taid(s, teacher, mask, t=t), student)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"t_start": 0.0, "t_end": 0.8, "alpha": 0.3, "beta": 0.5},
        {"t_start": 0.2, "alpha": 0.05, "beta": 0.9},
        {"disable_adaptive": True},
    ],
    ids=str,
)
def test_the_taid_schedule_is_the_reference(settings):
    losses = (3.0 - 2.0 * logprobs(1, 30)).tolist()
    scheduler, history = TAIDScheduler(60, **settings), []
    for step, loss in enumerate(losses):
        scheduler.update_t(torch.tensor(loss), step)
        history.append(scheduler.t)
    assert_value(history, reference.taid_schedule(losses, 60, **settings))


def test_the_taid_schedule_never_goes_back():
    scheduler, previous = TAIDScheduler(200, alpha=0.1, beta=0.5), 0.0
    for step, loss in enumerate((1.0 - 5.0 * logprobs(2, 40)).tolist()):
        scheduler.update_t(torch.tensor(loss), step)
        assert scheduler.t >= previous
        previous = scheduler.t


def test_a_loss_that_is_not_finite_does_not_seed_the_taid_schedule():
    plain, late = TAIDScheduler(20, alpha=0.1), TAIDScheduler(20, alpha=0.1)
    assert late.update_t(torch.tensor(float("inf")), 0) is None
    for step, loss in enumerate((3.0, 2.0, 1.5)):
        plain.update_t(torch.tensor(loss), step)
        late.update_t(torch.tensor(loss), step)
    assert late.t == plain.t


def test_a_restored_taid_schedule_continues_where_the_saved_one_stood():
    losses = (1.0 - 2.0 * logprobs(3, 12)).tolist()
    whole, first, second = (TAIDScheduler(50, alpha=0.1, beta=0.5) for _ in range(3))
    for step, loss in enumerate(losses):
        whole.update_t(torch.tensor(loss), step)
    for step, loss in enumerate(losses[:5]):
        first.update_t(torch.tensor(loss), step)
    second.load_state_dict(first.state_dict())
    assert second.t == first.t
    for step, loss in enumerate(losses[5:], start=5):
        second.update_t(torch.tensor(loss), step)
    assert second.t == whole.t


def test_the_teachers_entropy_is_the_reference():
    _, teacher = pair(4)
    expected = torch.stack([torch.stack([reference.entropy_row(row) for row in rows]) for rows in teacher])
    assert_value(teacher_entropy(teacher), expected, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"h_max": 1.5}, {"temperature": 0.7}, {"temperature": 2.0}], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
def test_the_soft_gate_is_the_reference(reduction, settings, dtype):
    student, teacher = pair(5, dtype=dtype)
    labels = MASK.to(torch.int64)
    same(
        dtype,
        lambda s: entropy_aware_opd_loss(s, teacher, labels=labels, reduction=reduction, **settings),
        lambda s: reference.entropy_opd(s, teacher, labels, reduction=reduction, **settings),
        student,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"tau": 2.0}, {"temperature": 2.0}, {"top_k": 1}, {"top_k": 18}], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "none"])
def test_the_hard_gate_is_the_reference(reduction, settings, dtype):
    student, teacher = pair(6, dtype=dtype)
    labels = MASK.to(torch.int64)
    same(
        dtype,
        lambda s: entropy_aware_opd_loss(s, teacher, labels=labels, reduction=reduction, gate="hard", **settings),
        lambda s: reference.entropy_opd(s, teacher, labels, reduction=reduction, gate="hard", **settings),
        student,
    )


def test_the_teachers_of_these_cases_fall_on_both_sides_of_the_gate():
    entropies = teacher_entropy(pair(6)[1])
    for tau in (1.0, 2.0):
        assert bool((entropies > tau).any())
        assert bool((entropies < tau).any())
        assert float((entropies - tau).abs().min()) > 1e-3


@pytest.mark.parametrize("gate", ["soft", "hard"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_entropy_opd_without_labels_counts_every_token(reduction, gate):
    student, teacher = pair(7)
    same(
        torch.float64,
        lambda s: entropy_aware_opd_loss(s, teacher, reduction=reduction, gate=gate),
        lambda s: reference.entropy_opd(s, teacher, reduction=reduction, gate=gate),
        student,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"beta": 2.5, "gamma": 0.625}, {"beta": 10.0, "gamma": 0.0}], ids=str)
def test_simpo_is_the_reference(settings, dtype):
    chosen, rejected = logprobs(31, 6, dtype=dtype), logprobs(32, 6, dtype=dtype)
    same(
        dtype,
        lambda c, r: simpo_loss(c, r, **settings),
        lambda c, r: reference.simpo(c, r, **settings),
        chosen,
        rejected,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
def test_dpo_is_the_reference(beta, dtype):
    chosen, rejected, ref_chosen, ref_rejected = (20 * logprobs(seed, 6, dtype=dtype) for seed in range(41, 45))
    same(
        dtype,
        lambda c, r: dpo_loss(c, r, ref_chosen, ref_rejected, beta=beta),
        lambda c, r: reference.dpo(c, r, ref_chosen, ref_rejected, beta=beta),
        chosen,
        rejected,
    )


def test_preference_losses_stay_exact_for_extreme_margins():
    # -ln sigmoid(-2000) = 2000 + ln(1 + e^-2000) = 2000; -ln sigmoid(2000) = 0.
    low, high = torch.tensor([-1000.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(simpo_loss(low, high, beta=2.0, gamma=0.0)) == 2000.0
    assert float(simpo_loss(high, low, beta=2.0, gamma=0.0)) == 0.0
    assert float(dpo_loss(low, high, zero, zero, beta=2.0)) == 2000.0


def test_the_average_log_prob_is_the_masked_mean_and_so_is_its_gradient():
    values = logprobs(51, 2, 4)
    mask = MASK.clone()
    mask[1, 0] = True
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    _, (gradient,) = value_and_gradients(lambda x: (avg_sequence_logprob(x, mask) * weights).sum(), values)
    counts = mask.sum(1, keepdim=True).double()
    assert_value(avg_sequence_logprob(values, mask), (values * mask).sum(1) / counts[:, 0], torch.float64)
    assert_gradient(gradient, mask * weights[:, None] / counts, torch.float64)
