"""Channel 2 on rollouts with a contrast, against the formula written out densely: loss and gradient, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_composer_channels import scripted
from torch import Tensor, nn

from composer_replication.trainer.objective.channels import LossKnobs
from composer_replication.trainer.objective.compose import channel_options
from composer_replication.trainer.objective.row_weighting import RowWeighting
from composer_replication.trainer.rollouts.hint_distillation import ErringTurn, distill, place_turns
from composer_replication.trainer.teacher_keeper import TeacherKeeper
from rollouts.tiny_policy import save_policy
from tiny_models import VOCAB, build

PROMPT, COMPLETION = 7, 20


def some_ids(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


SEQUENCES = [torch.cat([some_ids(size, seed), some_ids(COMPLETION, 10 + seed)]) for seed, size in enumerate((7, 4))]
"""Two rollouts, the second with a shorter prompt, so that it is padded."""


def a_turn(rollout: int, start: int, end: int, hint: Tensor, wrong: Tensor | None) -> ErringTurn:
    before, erring = SEQUENCES[rollout][: start - 2], SEQUENCES[rollout][start - 2 : end]
    wrong_ids = None if wrong is None else torch.cat([before, wrong, erring])
    wrong_start = 0 if wrong is None else start + len(wrong)
    ids = torch.cat([before, hint, erring])
    return ErringTurn(
        start, end, ids, start + len(hint), "a", "hint", f"{rollout}:{start}", wrong_ids, wrong_start, "b"
    )


def three_turns() -> list[list[ErringTurn]]:
    """Two with a wrong hint, in both rollouts, and one without."""
    first = a_turn(0, 9, 14, some_ids(5, 20), some_ids(4, 21))
    return [[first, a_turn(0, 18, 23, some_ids(3, 22), None)], [a_turn(1, 10, 17, some_ids(6, 23), some_ids(7, 24))]]


def padded() -> tuple[Tensor, Tensor]:
    width = PROMPT + COMPLETION
    rows = [torch.nn.functional.pad(row, (width - len(row), 0)) for row in SEQUENCES]
    masks = [torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in SEQUENCES]
    return torch.stack(rows), torch.stack(masks)


def channel_loss(model: nn.Module, keeper: TeacherKeeper, turns: list[list[ErringTurn]], strength: float) -> Tensor:
    ids, mask = padded()
    placed = place_turns(turns, mask[:, :PROMPT], ids, mask[:, PROMPT:])
    assert placed is not None
    options = channel_options(
        model,
        LossKnobs(alpha_sdpo=1.0, beta_replay=0.0, sdpo_jsd_beta=1.0),
        denominators={"sdpo_jsd": placed.tokens_N.numel()},
        sdpo_teachers=keeper.shares(),
        sdpo_weighting=RowWeighting(contrast=strength),
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    _, found, _ = distill(
        model, ids, placed, options, lambda: model(input_ids=ids, attention_mask=mask, position_ids=positions)
    )
    assert found is not None
    return found.value


def dense_loss(
    model: nn.Module, shares: list[tuple[nn.Module, float]], turns: list[list[ErringTurn]], strength: float
) -> Tensor:
    """Mean KL(student || teacher) over target tokens; teacher = without a hint + strength * (right - wrong)."""

    def teacher_logits(ids: Tensor, start: int, size: int) -> Tensor:
        with torch.no_grad():
            rows = [weight * each(ids[None]).logits[0, start - 1 : start - 1 + size] for each, weight in shares]
        return torch.stack(rows).sum(0)

    rows: list[Tensor] = []
    for rollout, of_rollout in enumerate(turns):
        for turn in of_rollout:
            size, unhinted = turn.end - turn.start, SEQUENCES[rollout][: turn.end]
            student = model(unhinted[None]).logits[0, turn.start - 1 : turn.end - 1].log_softmax(-1)
            teacher = teacher_logits(turn.teacher_ids, turn.teacher_start, size)
            if turn.wrong_ids is not None:
                wrong = teacher_logits(turn.wrong_ids, turn.wrong_start, size)
                teacher = teacher_logits(unhinted, turn.start, size) + strength * (teacher - wrong)
            rows.append((student.exp() * (student - teacher.log_softmax(-1))).sum(-1))
    return torch.cat(rows).mean()


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def moved(model: nn.Module) -> nn.Module:
    """Away from the weights that a teacher was made of."""
    torch.manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            each += 0.02 * torch.randn_like(each)
    return model


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["live", "trust_region"])
@pytest.mark.parametrize("family", ["qwen2-tied", "llama-untied"])
def test_loss_and_gradient_are_those_of_the_formula(family: str, kind: Any, strength: float) -> None:
    model, keeper = build(family).double(), TeacherKeeper(kind, live_share=0.25)
    keeper.attach(model)
    start = build(family).double()
    moved(model)
    shares = [(model, 1.0)] if kind == "live" else [(start, 0.75), (model, 0.25)]
    found, expected = (
        channel_loss(model, keeper, three_turns(), strength),
        dense_loss(model, shares, three_turns(), strength),
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    mine, wanted = gradient(model, found), gradient(model, expected)
    assert float((mine - wanted).norm() / wanted.norm()) < 1e-6


def test_a_wrong_hint_that_is_the_right_one_leaves_nothing_to_teach() -> None:
    model, keeper = build("qwen2-tied").double(), TeacherKeeper("live")
    keeper.attach(model)
    hint = some_ids(5, 20)
    same = channel_loss(model, keeper, [[a_turn(0, 9, 14, hint, hint)], []], 1.0)
    plain = channel_loss(model, keeper, [[a_turn(0, 9, 14, hint, None)], []], 1.0)
    assert abs(same.item()) < 1e-12
    assert float(gradient(model, same).abs().max()) < 1e-12
    assert plain.item() > 0.01


def test_how_many_errors_have_no_contrast_is_logged(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    lines = []
    for name, switch in (("plain", None), ("contrast", RowWeighting(contrast=1.0))):
        trainer = scripted(policy, tmp_path / name, {"max_steps": 1}, alpha_sdpo=1.0, sdpo_weighting=switch)
        trainer.train()
        lines.append(trainer.state.log_history[0])
    assert "sites/without_contrast" not in lines[0]
    taught, without = lines[1]["sites/taught_per_rollout"], lines[1]["sites/without_contrast"]
    assert (taught, without) == (0.75, 0.0)  # three of four rollouts err, in two ways: each has the other's hint
