"""Channel 2's switches on rows that a caller captured itself, with numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composer_replication.batch.alignment import positions_in_sites
from composer_replication.errors import InputError, ShapeError
from composer_replication.loss import JSD
from composer_replication.loss.linear import LinearHead
from composer_replication.trainer.objective.channels import ChannelOptions, Denominators, _Preference, hint_channel
from composer_replication.trainer.objective.row_weighting import Contrast, HintTargets, RowWeighting, TeacherRows
from refusals import refusal


def by_hand(student, teacher, weighting, targets=None, beta=0.0):
    """kl_ts, or kl_st with beta 1, of distributions given as probabilities; the head is the identity."""
    rows = [torch.tensor(each, dtype=torch.float64).clamp_min(1e-300).log() for each in (student, teacher)]
    head = LinearHead(torch.eye(rows[0].shape[1], dtype=torch.float64))
    shares = [TeacherRows(rows[1], head, 1.0)]
    return hint_channel(head, rows[0], shares, options_of(weighting, beta), targets or HintTargets())


def options_of(weighting, beta):
    options = ChannelOptions(
        JSD(beta=beta), _Preference(True, 0.1, 0.0), None, None, 0.0, Denominators(None), 1.0, 0.0, ()
    )
    return options._replace(weighting=weighting)


def test_the_gate_by_hand():
    """Where the teacher finds a third of the student's odds the weight is 3/2, where they agree 1; the mean is 5/4."""
    student, teacher = [[0.75, 0.25], [0.5, 0.5]], [[0.25, 0.75], [0.5, 0.5]]
    targets = HintTargets(tokens_N=torch.tensor([0, 1]))
    divergence = 0.5 * math.log(3)  # KL of (3/4, 1/4) and (1/4, 3/4)
    for normalise, wanted in ((False, 1.5 * divergence / 2), (True, 1.5 / 1.25 * divergence / 2)):
        weighting = RowWeighting(sigmoid_gate_tau=1.0, normalise=normalise)
        assert by_hand(student, teacher, weighting, targets, beta=1.0).value.item() == pytest.approx(wanted, abs=1e-12)


def test_the_teachers_entropy_by_hand():
    """Two of four entries: half as sure as can be. All four: it says nothing."""
    student, teacher = [[0.25] * 4, [0.7, 0.1, 0.1, 0.1]], [[0.5, 0.5, 0.0, 0.0], [0.25] * 4]
    targets = HintTargets(tokens_N=torch.tensor([2, 0]))
    for normalise, wanted in ((False, 0.5 * math.log(2) / 2), (True, math.log(2))):
        weighting = RowWeighting(teacher_entropy=True, normalise=normalise)
        assert by_hand(student, teacher, weighting, targets).value.item() == pytest.approx(wanted, abs=1e-12)


def test_the_position_by_hand():
    """Three rows, of which the second alone differs, and it is the third token of its site: a ninth of the weight."""
    student, teacher = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]]
    targets = HintTargets(position_N=torch.tensor([0, 2, 0]))
    for normalise, scale in ((False, 1.0), (True, 27 / 19)):  # (1 + 1/9 + 1) / 3 = 19/27
        weighting = RowWeighting(position_decay=1 / 3, normalise=normalise)
        wanted = scale * math.log(2) / 9 / 3
        assert by_hand(student, teacher, weighting, targets).value.item() == pytest.approx(wanted, abs=1e-12)


def test_the_contrast_by_hand():
    """Right three to one, wrong even: strength 2 makes nine to one. A row without a wrong hint keeps three to one."""
    even, right = [0.5, 0.5], [0.75, 0.25]
    head = LinearHead(torch.eye(2, dtype=torch.float64))
    wrong = [TeacherRows(torch.tensor([even], dtype=torch.float64).log(), head, 1.0)]
    targets = HintTargets(contrast=Contrast(torch.tensor([0]), wrong), sites_without_contrast=1)
    found = by_hand([even, even], [right, right], RowWeighting(contrast=2.0), targets)
    sharpened = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    plain = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert found.value.item() == pytest.approx((sharpened + plain) / 2, abs=1e-12)
    assert found.sites_without_contrast == 1
    off = by_hand([even, even], [right, right], None, targets)
    assert off.value.item() == pytest.approx(plain, abs=1e-12)
    assert off.sites_without_contrast == 0


def test_rows_that_say_too_little_are_refused():
    rows = [[0.5, 0.5]]
    with refusal(InputError, what="token", got="None"):
        by_hand(rows, rows, RowWeighting(sigmoid_gate_tau=1.0))
    with refusal(InputError, what="position", got="None"):
        by_hand(rows, rows, RowWeighting(position_decay=0.5), HintTargets(tokens_N=torch.tensor([0])))
    with refusal(ShapeError, what="token", got="(2,)", expected="(1,)"):
        by_hand(rows, rows, RowWeighting(teacher_entropy=True), HintTargets(tokens_N=torch.tensor([0, 1])))


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, list | tuple) else [result]
        self.numel = max([self.numel, *(each.numel() for each in made if isinstance(each, torch.Tensor))])
        return result


def test_no_tensor_has_all_rows_times_the_vocabulary():
    num_rows, vocab, width = 300, 100_000, 2
    torch.manual_seed(0)
    head = LinearHead(torch.randn(vocab, width, requires_grad=True))
    student, right, wrong = (torch.randn(num_rows, width, requires_grad=number == 0) for number in range(3))
    contrast = Contrast(torch.arange(0, num_rows, 2), [TeacherRows(wrong[::2], head, 1.0)])
    targets = HintTargets(torch.arange(num_rows), torch.arange(num_rows), contrast)
    options = options_of(RowWeighting(0.7, True, 0.99, 1.5), beta=1.0)
    with Largest() as largest:
        hint_channel(head, student, [TeacherRows(right, head, 1.0)], options, targets).value.backward()
    assert head.weight.grad.any()
    assert vocab < largest.numel < 0.2 * num_rows * vocab


def test_a_site_begins_where_any_side_does_not_go_on():
    def rows(*places):
        return torch.tensor([sequence * 10 + position for sequence, position in places], dtype=torch.int64)

    student = rows((0, 3), (0, 4), (0, 5), (0, 6), (0, 5), (0, 6), (1, 7))
    teacher = rows((0, 8), (0, 9), (1, 8), (1, 9), (2, 4), (2, 5), (2, 6))
    assert positions_in_sites(student).tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert positions_in_sites(student, teacher).tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert positions_in_sites(rows()).shape == (0,)
