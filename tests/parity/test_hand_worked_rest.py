"""The TAID schedule, preferences, PRIME-RL and cross-entropy worked by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from closeness import assert_gradient, assert_value, value_and_gradients

from composer_replication.distillation import TAIDScheduler, dpo_loss, simpo_loss
from composer_replication.loss.linear import LinearHead, linear_cross_entropy, linear_token_logprobs
from composer_replication.loss.preference import avg_sequence_logprob
from composer_replication.recipes.prime_rl.composer_loss import loss_fn

LN2 = 0.693147180560


def vector(*entries):
    return torch.tensor(entries, dtype=torch.float64)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


def test_the_taid_schedule_adds_its_adaptive_step():
    # seed 2.0, then 1.0 at step 0: rel = (2-1)/2 = 0.5, m = 0.01 * 0.5 = 0.005, sigmoid(m) = 0.501249997396,
    # delta = 5e-4 * 0.501249997396 * (1 - 0.4) = 1.503749992e-4; linear part 0.4; t = 0.400150374999.
    scheduler = TAIDScheduler(10)
    assert scheduler.t == pytest.approx(0.4, abs=1e-7)
    assert scheduler.update_t(torch.tensor(2.0), 0) is None
    assert scheduler.t == pytest.approx(0.4, abs=1e-7)
    delta = scheduler.update_t(torch.tensor(1.0), 0)
    assert float(delta) == pytest.approx(1.503749992e-4, rel=1e-5)
    assert scheduler.t == pytest.approx(0.400150375, abs=1e-7)


def test_the_taid_schedule_is_never_behind_its_linear_part():
    # step 5 of 10: 0.4 + 0.6 * 0.5 = 0.7, far above 0.4 + delta.
    scheduler = TAIDScheduler(10)
    scheduler.update_t(torch.tensor(2.0), 4)
    scheduler.update_t(torch.tensor(1.0), 5)
    assert scheduler.t == pytest.approx(0.7, abs=1e-6)


def test_the_taid_schedule_stops_at_its_end():
    scheduler = TAIDScheduler(10, t_end=0.9)
    for step in (0, 10, 20):
        scheduler.update_t(torch.tensor(1.0), step)
    assert scheduler.t == pytest.approx(0.9, abs=1e-6)


def test_simpo_is_ln_2_where_the_margin_is_just_reached():
    # beta (c - r) - gamma = 2 (-0.5 + 1) - 1 = 0: -ln sigmoid(0) = ln 2; d/dc = -beta sigmoid(0) = -1.
    value, (chosen, rejected) = value_and_gradients(lambda c, r: simpo_loss(c, r), vector(-0.5), vector(-1.0))
    assert_value(value, scalar(LN2), torch.float64)
    assert_gradient(chosen, vector(-1.0), torch.float64)
    assert_gradient(rejected, vector(1.0), torch.float64)


def test_the_average_log_prob_counts_response_tokens_only():
    # row 0: (-2 - 3) / 2; row 1: -4 / 1
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    assert_value(avg_sequence_logprob(logprobs, mask), vector(-2.5, -4.0), torch.float64)


def test_dpo_compares_the_gains_over_the_reference():
    # row 0: (-1 + 1.5) - (-2 + 1.5) = 1: -ln sigmoid(0.1) = ln(1 + e^-0.1) = 0.644396660074
    # row 1: (-3 + 3) - (-1 + 3) = -2:   ln(1 + e^0.2) = 0.798138869382
    # mean 0.721267764728; d/dc = -beta sigmoid(-beta gap) / 2 = -0.05 / (1 + e^0.1), -0.05 / (1 + e^-0.2)
    references = (vector(-1.5, -3.0), vector(-1.5, -3.0))
    value, (chosen, rejected) = value_and_gradients(
        lambda c, r: dpo_loss(c, r, *references), vector(-1.0, -3.0), vector(-2.0, -1.0)
    )
    expected = vector(-0.05 / (1 + math.exp(0.1)), -0.05 / (1 + math.exp(-0.2)))
    assert_value(value, scalar(0.721267764728), torch.float64)
    assert_gradient(chosen, expected, torch.float64)
    assert_gradient(rejected, -expected, torch.float64)


def prime_rl(trainer, inference, advantage, *, ref=None, mask=True, weight=None, **knobs):
    """Loss and gradient of one token, given as probabilities."""

    def loss(lt):
        inputs = SimpleNamespace(
            trainer_logprobs=lt,
            inference_logprobs=vector(inference).log(),
            ref_logprobs=None if ref is None else vector(ref).log(),
            advantages=vector(advantage),
            loss_mask=torch.tensor([mask]),
            loss_weights=None if weight is None else vector(weight),
        )
        return loss_fn(inputs, **knobs).loss

    value, (gradient,) = value_and_gradients(loss, vector(trainer).log())
    return float(value), float(gradient[0])


LOG_GAP = math.log(0.9 / 0.5)  # 0.587786664902
KL = 1e-3 * LOG_GAP**2  # 3.45493e-4
KL_SLOPE = 2e-3 * LOG_GAP  # 1.175573e-3


@pytest.mark.parametrize(
    ("trainer", "inference", "advantage", "loss", "gradient"),
    [
        (0.5, 0.5, 2.0, -2.0, -2.0),  # on policy: r = 1, -A, and d/dlt = -A r
        (0.9, 0.5, 1.0, KL, KL_SLOPE),  # A > 0 and d = 0.4 > 0.2: dropped, the KL term stays
        (0.5, 0.9, 1.0, KL - 5 / 9, -KL_SLOPE - 5 / 9),  # A > 0 and d = -0.4: kept, r = 5/9
        (0.5, 0.9, -1.0, KL, -KL_SLOPE),  # A <= 0 and d = -0.4 < -0.2: dropped
        (0.9, 0.5, -1.0, KL + 1.8, KL_SLOPE + 1.8),  # A <= 0 and d = 0.4: kept, r = 9/5
    ],
)
def test_the_prime_rl_loss_drops_tokens_that_moved_too_far(trainer, inference, advantage, loss, gradient):
    assert prime_rl(trainer, inference, advantage) == pytest.approx((loss, gradient), abs=1e-10)


def test_the_prime_rl_knobs_scale_their_own_terms():
    # r = 9/5, A = -1: adv_tau 0.5 * 1.8 + kl_tau 0.1 * 0.345493...
    expected = 0.9 + 0.1 * LOG_GAP**2
    assert prime_rl(0.9, 0.5, -1.0, adv_tau=0.5, kl_tau=0.1)[0] == pytest.approx(expected, abs=1e-10)
    assert prime_rl(0.9, 0.5, 1.0, dppo_mask_high=0.5)[0] == pytest.approx(KL - 1.8, abs=1e-10)
    assert prime_rl(0.5, 0.9, -1.0, dppo_mask_low=0.5)[0] == pytest.approx(KL + 5 / 9, abs=1e-10)


def test_the_prime_rl_weight_multiplies_the_token_and_the_mask_removes_it():
    assert prime_rl(0.5, 0.5, 2.0, weight=0.25) == pytest.approx((-0.5, -0.5), abs=1e-10)
    assert prime_rl(0.5, 0.5, 2.0, mask=False) == (0.0, 0.0)


def test_alpha_sdpo_adds_a_pull_toward_the_reference():
    # A = 0, lt = li = ln(1/2), ref = ln(1/4): -sg(ref - lt) r = ln 2, and so is its gradient; alpha 0.5 halves both.
    assert prime_rl(0.5, 0.5, 0.0, ref=0.25, alpha_sdpo=0.5) == pytest.approx((LN2 / 2, LN2 / 2), abs=1e-10)
    # d = -0.4 < -0.2: dropped; the default loss and ref_kl each keep their KL term.
    assert prime_rl(0.5, 0.9, 0.0, ref=0.25, alpha_sdpo=1.0) == pytest.approx((2 * KL, -2 * KL_SLOPE), abs=1e-10)


def test_label_smoothing_spreads_epsilon_evenly_over_the_vocabulary():
    # p = (1/4, 3/4), y = 0: -ln p_y = ln 4 = 1.386294361120; the mean of -ln p is (1.386294361120 + 0.287682072452) / 2
    # = 0.836988216786. eps 0.2: 0.8 * 1.386294361120 + 0.2 * 0.836988216786 = 1.276433132253.
    # gradient by the logits: p - (0.8 + 0.1, 0.1) = (-0.65, 0.65); hidden is 1, so it is the weight's gradient too.
    weight = vector(1 / 4, 3 / 4).log().reshape(2, 1)

    def loss(w):
        return linear_cross_entropy(
            scalar(1.0).reshape(1, 1), LinearHead(w), torch.tensor([0]), label_smoothing=0.2
        ).loss

    value, (gradient,) = value_and_gradients(loss, weight)
    assert_value(value, scalar(1.276433132253), torch.float64)
    assert_gradient(gradient, vector(-0.65, 0.65).reshape(2, 1), torch.float64)


def test_a_token_log_prob_is_the_log_of_its_probability():
    # z = 2 * (h W^T + b) with h = 1, W = ln(1/4, 3/4) / 2, b = 0: p = (1/4, 3/4)
    head = LinearHead(vector(1 / 4, 3 / 4).log().reshape(2, 1) / 2, bias=vector(0.0, 0.0), scale=2.0)
    logprobs = linear_token_logprobs(torch.ones(2, 1, dtype=torch.float64), head, torch.tensor([0, 1]))
    assert_value(logprobs, vector(-1.386294361120, -0.287682072452), torch.float64)
