"""Channel 2 of the verl recipe on packed logits, without verl: against whole rows in fp64."""

from types import SimpleNamespace

import pytest
import torch

from composer_replication.recipes.verl.channel_loss import (
    ROW_NUMBER,
    VALUES,
    ChannelLoss,
    EngineChannels,
    TeacherRows,
    _concatenate,
    _divergence_rows,
    _teacher_rows,
)
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn

VOCAB, TOP_K = 300, 8
LENGTHS = (7, 5, 9)
TURNS = {0: [(3, 6)], 2: [(2, 4), (7, 9)]}
"""Tokens [start, end) of the rows that are taught."""


def settings(**changes):
    given = {"alpha_sdpo": 0.1, "beta_replay": 0.0, "sdpo_jsd_beta": 1.0, "teacher_top_k": TOP_K}
    return EngineChannels(**given | changes)


def teacher_logits(row):
    count = sum(end - start for start, end in TURNS[row])
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(row), dtype=torch.float64)
    logits[:, 10 : 10 + TOP_K] += 8.0
    return logits


def taught_row(row, options, dtype):
    """As `run_teacher` puts a row's turns together."""
    parts, first = [], 0
    for start, end in TURNS[row]:
        turn = ErringTurn(start, end, torch.zeros(1), 0, "kind", "hint", "turn")
        parts.append(_teacher_rows(turn, teacher_logits(row)[first : first + end - start].to(dtype), options))
        first += end - start
    return _concatenate(parts)


def packed(rows, logits, *, temperature=1.0):
    """The rows' logits one after the other as the engine has them, and what comes with them."""
    lengths = torch.tensor([0, *(LENGTHS[row] for row in rows)])
    data = {
        "temperature": temperature,
        ROW_NUMBER: torch.tensor(rows),
        "input_ids": SimpleNamespace(offsets=lambda: lengths.cumsum(0)),
    }
    return torch.cat([logits[row] for row in rows])[None] / temperature, data


def student_logits(gap, dtype):
    """Surer of the teacher's entries with every step of the gap."""
    generator = torch.Generator().manual_seed(9)
    rows = [torch.randn(length, VOCAB, generator=generator, dtype=torch.float64) for length in LENGTHS]
    for row in rows:
        row[:, 10 : 10 + TOP_K] += gap
    return [row.to(dtype).requires_grad_() for row in rows]


def values(logits, options, rows=(0, 1, 2), dtype=torch.float32, **named):
    taught = [taught_row(row, options, dtype) if row in TURNS else None for row in range(len(LENGTHS))]
    loss = ChannelLoss(lambda **_: None, options, taught, alpha=0.1, num_items=7.0)
    whole, data = packed(rows, logits, **named)
    return loss(student_logits=whole, data=data)[VALUES]


def by_the_formula(logits, row, beta, temperature):
    """Sum over a row's targets: the teacher's best entries, and all others as one, in fp64."""
    places = [place for start, end in TURNS[row] for place in range(start - 1, end - 1)]
    log_s, log_t = ((each / temperature).log_softmax(-1) for each in (logits[row][places], teacher_logits(row)))
    ids = log_t.topk(TOP_K, -1).indices
    is_listed = torch.zeros_like(log_t, dtype=torch.bool).scatter(-1, ids, True)
    s, t = (
        torch.cat([each.exp().gather(-1, ids), torch.where(is_listed, 0.0, each.exp()).sum(-1, keepdim=True)], -1)
        for each in (log_s, log_t)
    )
    return ((t * (t / s).log()) if beta == 0.0 else (s * (s / t).log())).sum()


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize(("gap", "temperature"), [(8.0, 1.0), (18.0, 1.0), (22.0, 1.0), (22.0, 0.7), (50.0, 1.3)])
def test_values_and_gradients_are_those_of_whole_rows(gap, temperature, beta):
    """fp32 against fp64; also where 1 - sum p would be nothing, and with a temperature of channel 2's own."""
    logits = student_logits(gap, torch.float32)
    found = values(logits, settings(sdpo_jsd_beta=beta, sdpo_temperature=temperature)).sum()
    exact = [row.detach().double().requires_grad_() for row in logits]
    wanted = sum(by_the_formula(exact, row, beta, temperature) for row in TURNS)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)
    for row in TURNS:
        (ours,) = torch.autograd.grad(found, logits[row], retain_graph=True)
        (theirs,) = torch.autograd.grad(wanted, exact[row], retain_graph=True)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=2e-6)
        others = torch.ones(VOCAB, dtype=torch.bool)
        others[10 : 10 + TOP_K] = False
        tails = [each[:, others].double().sum() for each in (ours, theirs)]
        torch.testing.assert_close(*tails, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("top_k", [TOP_K, None])
def test_fp64_stays_fp64(top_k):
    logits = student_logits(12.0, torch.float64)
    found = values(logits, settings(teacher_top_k=top_k), dtype=torch.float64)
    assert found.dtype == torch.float64
    if top_k is not None:
        wanted = sum(by_the_formula(logits, row, 1.0, 1.0) for row in TURNS)
        torch.testing.assert_close(found.sum(), wanted, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("rows", [(2, 0, 1), (1, 0), (2,), (1,)])
def test_dynamic_batches_and_the_rollouts_temperature_change_nothing(rows):
    logits = student_logits(8.0, torch.float32)
    each = dict(zip(range(3), values(logits, settings())[0].split(LENGTHS), strict=True))
    found = values(logits, settings(), rows, temperature=0.7)[0]
    wanted = torch.cat([each[row] for row in rows])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert bool(found.any()) == any(row in TURNS for row in rows)
    assert found.requires_grad


def test_a_teacher_that_gave_its_best_entries_alone_has_the_tail_that_they_leave():
    teacher = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    student = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    turn = ErringTurn(1, 5, torch.zeros(1), 0, "kind", "hint", "turn")
    whole = _teacher_rows(turn, teacher, settings())
    assert whole.tail_N1 is not None
    alone = TeacherRows(whole.position_N, whole.ids_NK, whole.logprobs_NK)
    found, wanted = (_divergence_rows(student, each, beta=1.0, temperature=1.0) for each in (alone, whole))
    torch.testing.assert_close(found, wanted)
