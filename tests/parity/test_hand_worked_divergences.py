"""Divergences worked by hand on vocabularies of two and three entries.

Unless a test says otherwise S = (1/2, 1/2) and T = (1/4, 3/4), for which
    kl_ts = KL(T||S) = 1/4 ln(1/2) + 3/4 ln(3/2) = -0.173286795139 + 0.304098831081 = 0.130812035941
    kl_st = KL(S||T) = 1/2 ln 2    + 1/2 ln(2/3) =  0.346573590280 - 0.202732554054 = 0.143841036226
"""

import math

import pytest
import torch
from closeness import assert_gradient, assert_value, value_and_gradients

from composer_replication.distillation import entropy_aware_opd_loss, sdpo_loss, taid_loss
from composer_replication.loss.entropy_opd import teacher_entropy
from composer_replication.loss.jsd import generalized_jsd_loss

KL_TS = 0.130812035941
KL_ST = 0.143841036226
LN2 = 0.693147180560


def logits(*probabilities):
    """(1,1,V) logits whose softmax is exactly these probabilities."""
    return torch.tensor([[list(probabilities)]], dtype=torch.float64).log()


def one_row(*entries):
    return torch.tensor([[list(entries)]], dtype=torch.float64)


S, T = logits(1 / 2, 1 / 2), logits(1 / 4, 3 / 4)
ONE = torch.ones(1, 1, dtype=torch.float64)


def check(fn, student, expected_value, expected_gradient):
    value, (gradient,) = value_and_gradients(fn, student)
    assert_value(value, torch.tensor(expected_value, dtype=torch.float64), torch.float64)
    assert_gradient(gradient, one_row(*expected_gradient), torch.float64)


def test_jsd_at_beta_0_is_kl_ts():
    # d kl_ts / d logits = p_S - p_T = (1/4, -1/4)
    check(lambda s: generalized_jsd_loss(s, T, beta=0.0), S, KL_TS, (0.25, -0.25))


def test_jsd_at_beta_1_is_kl_st():
    # d kl_st / d logit_v = p_v (ln(p_v / t_v) - kl_st) = 1/2 (ln 2 - 0.143841036226) = 0.274653072167, and its negative
    check(lambda s: generalized_jsd_loss(s, T, beta=1.0), S, KL_ST, (0.274653072167, -0.274653072167))


def test_jsd_at_beta_one_half_is_the_symmetric_jsd():
    # M = (3/8, 5/8)
    # KL(T||M) = 1/4 ln(2/3) + 3/4 ln(6/5) = -0.101366277027 + 0.136741167596 = 0.035374890569
    # KL(S||M) = 1/2 ln(4/3) + 1/2 ln(4/5) =  0.143841036226 - 0.111571775657 = 0.032269260569
    # half of each: 0.033822075569
    # d JSD / d logit_v = 1/2 p_v (ln(p_v / m_v) - KL(S||M)) = 1/4 (ln(4/3) - 0.032269260569) = 0.063853202971
    check(lambda s: generalized_jsd_loss(s, T), S, 0.033822075569, (0.063853202971, -0.063853202971))


def test_jsd_at_beta_one_quarter_weighs_the_teacher_by_beta():
    # M = 3/4 S + 1/4 T = (7/16, 9/16)
    # KL(T||M) = 1/4 ln(4/7) + 3/4 ln(4/3) = -0.139903946984 + 0.215761554339 = 0.075857607355
    # KL(S||M) = 1/2 ln(8/7) + 1/2 ln(8/9) =  0.066765696312 - 0.058891517828 = 0.007874178484
    # 1/4 * 0.075857607355 + 3/4 * 0.007874178484 = 0.024870035702
    loss = generalized_jsd_loss(S, T, beta=0.25)
    assert_value(loss, torch.tensor(0.024870035702, dtype=torch.float64), torch.float64)


def test_both_logits_are_divided_by_the_temperature_and_nothing_is_multiplied_back():
    # (0, 2 ln 3) / 2 = (0, ln 3) -> (1/4, 3/4); the gradient by the undivided logits is half of beta 0's.
    teacher = one_row(0.0, 2 * math.log(3))
    check(
        lambda s: generalized_jsd_loss(s, teacher, beta=0.0, temperature=2.0), one_row(0.0, 0.0), KL_TS, (0.125, -0.125)
    )


def test_top_k_keeps_the_teachers_largest_entries_and_renormalises_both_sides():
    # T = (1/8, 3/8, 4/8): top 2 are entries 1 and 2 -> (3/7, 4/7). S = (1/2, 1/4, 1/4) -> (1/2, 1/2) on them.
    # kl_ts = 3/7 ln(6/7) + 4/7 ln(8/7) = -0.066064577069 + 0.076303652928 = 0.010239075859
    # gradient p_S - p_T on the kept entries: (0, 1/2 - 3/7, 1/2 - 4/7) = (0, 1/14, -1/14)
    student, teacher = logits(1 / 2, 1 / 4, 1 / 4), logits(1 / 8, 3 / 8, 4 / 8)
    check(
        lambda s: generalized_jsd_loss(s, teacher, beta=0.0, top_k=2), student, 0.010239075859, (0.0, 1 / 14, -1 / 14)
    )


def test_the_token_cap_limits_the_value_after_the_sum_and_scales_the_gradient():
    # d = 0.143841036226, cap 0.05: the value is 0.05, the gradient 0.05 / 0.143841036226 = 0.347606 of it.
    gradient = 0.274653072167 * 0.05 / KL_ST
    check(lambda s: generalized_jsd_loss(s, T, beta=1.0, token_clip=0.05), S, 0.05, (gradient, -gradient))


def test_a_token_cap_above_the_divergence_changes_nothing():
    loss = generalized_jsd_loss(S, T, beta=1.0, token_clip=0.2)
    assert_value(loss, torch.tensor(KL_ST, dtype=torch.float64), torch.float64)


def test_probabilities_in_place_of_logits_give_the_same_divergence():
    loss = generalized_jsd_loss(S.exp(), T.exp(), beta=1.0, logits_are_probs=True)
    assert_value(loss, torch.tensor(KL_ST, dtype=torch.float64), torch.float64)


@pytest.mark.parametrize(
    ("reduction", "labelled", "expected"),
    [
        # Tokens hold kl_ts, 0, 0 | kl_ts, kl_ts, 0; labels keep the first two of each row: kl_ts, 0 | kl_ts, kl_ts.
        ("sum", True, 3 * KL_TS),
        ("batchmean", True, 3 * KL_TS / 4),  # four kept tokens
        ("mean", True, 3 * KL_TS / 8),  # four kept tokens of two entries
        ("sum", False, 3 * KL_TS),
        ("batchmean", False, 3 * KL_TS / 2),  # no labels: the batch size
        ("mean", False, 3 * KL_TS / 12),  # six tokens of two entries
    ],
)
def test_each_reduction_divides_by_what_it_names(reduction, labelled, expected):
    student = S.expand(2, 3, 2)
    teacher = torch.stack([torch.stack([T[0, 0], S[0, 0], S[0, 0]]), torch.stack([T[0, 0], T[0, 0], S[0, 0]])])
    labels = torch.tensor([[0, 7, -100], [1, 2, -100]]) if labelled else None
    loss = generalized_jsd_loss(student, teacher, labels, beta=0.0, reduction=reduction)
    assert_value(loss, torch.tensor(expected, dtype=torch.float64), torch.float64)


def test_reduction_none_keeps_the_shape_with_zeros_where_ignored():
    labels = torch.tensor([[5, -100, 0]])
    values = generalized_jsd_loss(S.expand(1, 3, 2), T.expand(1, 3, 2), labels, beta=0.0, reduction="none")
    assert_value(values, one_row(KL_TS, 0.0, KL_TS)[0], torch.float64)


def test_sdpo_is_kl_st_by_default():
    check(lambda s: sdpo_loss(s, T, ONE), S, KL_ST, (0.274653072167, -0.274653072167))


def test_sdpo_puts_everything_outside_the_students_top_k_into_one_bucket():
    # S = (1/2, 1/4, 1/4), T = (1/4, 1/4, 1/2), k = 1: entry 0 and the rest: S (1/2, 1/2), T (1/4, 3/4) -> kl_st.
    # The bucket's gradient 0.274653072167 is shared by entries 1 and 2 as their probability, half each.
    student, teacher = logits(1 / 2, 1 / 4, 1 / 4), logits(1 / 4, 1 / 4, 1 / 2)
    g = 0.274653072167
    check(lambda s: sdpo_loss(s, teacher, ONE, top_k=1), student, KL_ST, (g, -g / 2, -g / 2))


def test_sdpo_without_a_tail_renormalises_on_the_students_top_k():
    # S = (4/8, 3/8, 1/8) -> (4/7, 3/7) on entries 0 and 1; T = (1/4, 1/4, 1/2) -> (1/2, 1/2).
    # kl_st = 4/7 ln(8/7) + 3/7 ln(6/7) = 0.076303652928 - 0.066064577069 = 0.010239075859
    student, teacher = logits(4 / 8, 3 / 8, 1 / 8), logits(1 / 4, 1 / 4, 1 / 2)
    loss = sdpo_loss(student, teacher, ONE, top_k=2, add_tail=False)
    assert_value(loss, torch.tensor(0.010239075859, dtype=torch.float64), torch.float64)


@pytest.mark.parametrize(
    ("old_probability", "weight"),
    [(1 / 8, 2.0), (1.0, 0.5), (1 / 2, 1.0)],  # ratios 4 (clipped at 2), 1/2 and 1
)
def test_sdpo_weighs_a_token_by_its_clipped_ratio(old_probability, weight):
    token_ids, old = torch.tensor([[0]]), torch.tensor([[old_probability]], dtype=torch.float64).log()
    g = 0.274653072167 * weight
    check(
        lambda s: sdpo_loss(s, T, ONE, token_ids=token_ids, old_logprobs=old, is_clip=2.0), S, KL_ST * weight, (g, -g)
    )


def test_sampled_token_sdpo_is_a_stopped_gap_times_the_students_log_prob():
    # Token 0: ln S = -ln 2, ln T = -2 ln 2, gap ln 2: value ln 2 * -ln 2 = -0.480453013918.
    # Gradient ln 2 * (1 - 1/2, -1/2).
    check(
        lambda s: sdpo_loss(s, T, ONE, token_ids=torch.tensor([[0]]), sampled_token=True),
        S,
        -0.480453013918,
        (LN2 / 2, -LN2 / 2),
    )


def test_taid_pulls_toward_the_softmax_of_the_mixed_logits():
    # student (0, 0), teacher (0, 2 ln 3), t 1/2: mix (0, ln 3) -> p_t = (1/4, 3/4); q = (1/2, 1/2).
    # value -(1/4 + 3/4) ln(1/2) = ln 2; gradient q - p_t = (1/4, -1/4).
    teacher = one_row(0.0, 2 * math.log(3))
    check(lambda s: taid_loss(s, teacher, t=0.5), one_row(0.0, 0.0), LN2, (0.25, -0.25))


def test_the_teachers_entropy_is_in_nats():
    # H = 1/4 ln 4 + 3/4 ln(4/3) = 0.346573590280 + 0.215761554339 = 0.562335144619
    assert_value(teacher_entropy(T), ONE * 0.562335144619, torch.float64)


def test_the_soft_gate_mixes_both_directions_by_the_teachers_entropy():
    # w = H / ln 2 = 0.562335144619 / 0.693147180560 = 0.811278124459
    # w * 0.130812035941 + (1 - w) * 0.143841036226 = 0.106124943175 + 0.027145950136 = 0.133270893311
    # the gradients of both directions mix alike: w * 0.25 + (1 - w) * 0.274653072167
    w = 0.811278124459
    g = w * 0.25 + (1 - w) * 0.274653072167
    check(lambda s: entropy_aware_opd_loss(s, T), S, 0.133270893311, (g, -g))


def test_the_soft_gate_saturates_at_h_max():
    # h_max 0.5 < H: w = 1, only kl_ts is left.
    check(lambda s: entropy_aware_opd_loss(s, T, h_max=0.5), S, KL_TS, (0.25, -0.25))


def test_the_hard_gate_adds_kl_ts_only_above_its_threshold():
    # H = 0.5623. tau 0.6: closed, kl_st alone. tau 0.5: open; the teacher's top entry (3/4) and its tail (1/4)
    # against (1/2, 1/2) is kl_ts: 0.143841036226 + 0.130812035941 = 0.274653072167.
    closed = entropy_aware_opd_loss(S, T, gate="hard", tau=0.6, top_k=1)
    assert_value(closed, torch.tensor(KL_ST, dtype=torch.float64), torch.float64)
    g = 0.274653072167 + 0.25
    check(lambda s: entropy_aware_opd_loss(s, T, gate="hard", tau=0.5, top_k=1), S, 0.274653072167, (g, -g))
