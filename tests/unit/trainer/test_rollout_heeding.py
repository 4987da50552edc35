"""Own hints against wrong ones in rollouts: figures of plain passes, however a step is cut; and the gate on them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_composer_channels import scripted
from test_composer_figures import cut
from test_heed_gate import compared

from composer_replication.loss.linear import LinearHead
from composer_replication.trainer.objective.row_weighting import Contrast, RowWeighting, TeacherRows
from composer_replication.trainer.rollouts import hint_distillation
from composer_replication.trainer.rollouts.hint_distillation import SITES
from composer_replication.trainer.rollouts.hint_gate import HintComparison, hint_effects
from rollouts.tiny_policy import save_policy
from rollouts.watched_losses import spy

CONTRAST = RowWeighting(contrast=1.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def shares(draw: torch.Generator, heads: list[LinearHead], num_rows: int) -> list[TeacherRows]:
    rows = [torch.randn(num_rows, 8, generator=draw) for _ in heads]
    return [TeacherRows(row, head, share) for row, head, share in zip(rows, heads, (0.7, 0.3), strict=True)]


def plain_logprobs(teachers: list[TeacherRows], tokens: torch.Tensor) -> torch.Tensor:
    logits = torch.stack([each.coefficient * (each.rows_NH @ each.head.weight.T) for each in teachers]).sum(0)
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]


def test_drops_are_those_of_whole_softmaxes() -> None:
    draw = torch.Generator().manual_seed(3)
    heads = [LinearHead(torch.randn(50, 8, generator=draw)) for _ in range(2)]
    lengths, with_contrast = [5, 1, 7, 3], [0, 2, 3]
    position = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.randint(50, (16,), generator=draw)
    rows_of = list(torch.arange(16).split(lengths))
    numbers = torch.cat([rows_of[turn] for turn in with_contrast])
    own, wrong, unhinted = shares(draw, heads, 16), shares(draw, heads, 15), shares(draw, heads, 15)
    found = hint_effects(own, Contrast(numbers, wrong, unhinted), tokens, position)
    per_row = [plain_logprobs(own, tokens)[numbers]]
    per_row += [plain_logprobs(each, tokens[numbers]) for each in (wrong, unhinted)]
    own_means, wrong_means, plain_means = (
        torch.stack([part.mean() for part in each.split([lengths[turn] for turn in with_contrast])]) for each in per_row
    )
    expected = torch.stack([plain_means - own_means, plain_means - wrong_means], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert hint_effects(own, Contrast(numbers[:0], [], []), tokens, position).shape == (0, 2)


def mean_logprob(model: Any, ids: torch.Tensor, start: int) -> float:
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, start - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(1, ids[start:, None]).mean())


def test_what_is_logged_is_what_plain_passes_say(policy: Path, tmp_path: Path) -> None:
    still = {"learning_rate": 0.0}
    trainer = scripted(policy, tmp_path / "on", still, alpha_sdpo=1.0, sdpo_weighting=CONTRAST)
    calls, gate = spy(trainer, "_compute_loss"), trainer.channels.hint_gate
    seen: list[HintComparison] = []
    gate.estimator.add = lambda several: seen.extend(several)
    trainer.train()
    inputs, model = calls[0][0][1], trainer.model.eval()
    drops = []
    for sample, turns in enumerate(inputs[SITES]):
        prompt = inputs["prompt_ids"][sample][inputs["prompt_mask"][sample].bool()]
        ids = torch.cat([prompt, inputs["completion_ids"][sample]])
        for turn in turns:
            size = turn.end - turn.start
            plain = mean_logprob(model, ids[: turn.end], turn.start)
            hinted = [(turn.teacher_ids, turn.teacher_start), (turn.wrong_ids, turn.wrong_start)]
            drops.append([plain - mean_logprob(model, each[: start + size], start) for each, start in hinted])
    assert len(drops) >= 2
    found = torch.tensor([each[3:] for each in seen])
    torch.testing.assert_close(found, torch.tensor(drops), rtol=1e-3, atol=1e-5)
    line = next(each for each in trainer.state.log_history if "loss/total" in each)
    assert line["hints/own_drop"] == gate.estimator.estimate().own_hint_nats
    assert "hints/gate" not in line, "a contrast alone gates nothing"

    without = scripted(policy, tmp_path / "off", still, alpha_sdpo=1.0)
    without.train()
    assert not [name for each in without.state.log_history for name in each if name.startswith("hints/")]


def cells_of(trainer: Any) -> list[Any]:
    return [value for row in trainer.channels.hint_gate.state()["heeding"] for value in row]


@pytest.mark.parametrize(("size", "accumulation", "steps"), [(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4)])
def test_a_generation_counts_the_same_however_it_is_cut(
    policy: Path, tmp_path: Path, size: int, accumulation: int, steps: int
) -> None:
    """In pieces of a step, or over several steps: rollouts of one prompt count once."""
    more = {"alpha_sdpo": 1.0, "sdpo_weighting": CONTRAST}
    still = {"learning_rate": 0.0}
    whole = scripted(policy, tmp_path / "whole", cut(4, 1) | still, **more)
    pieces = cut(size, accumulation, max_steps=steps, steps_per_generation=4 // size) | still
    parts = scripted(policy, tmp_path / "parts", pieces | {"steps_per_generation": 4 // size}, **more)
    whole.train()
    parts.train()
    one, other = cells_of(whole), cells_of(parts)
    assert [each for each in one if isinstance(each, str)] == [each for each in other if isinstance(each, str)] != []
    numbers = [[each for each in cells if not isinstance(each, str)] for cells in (one, other)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-3, abs=1e-6)


def test_rollouts_that_are_trained_on_twice_are_compared_once(policy: Path, tmp_path: Path) -> None:
    counts = []
    for iterations in (1, 3):
        settings = {"max_steps": iterations, "num_iterations": iterations, "learning_rate": 0.0}
        trainer = scripted(policy, tmp_path / str(iterations), settings, alpha_sdpo=1.0, sdpo_weighting=CONTRAST)
        trainer.train()
        counts.append(cells_of(trainer))
    numbers = [[each for each in cells if not isinstance(each, str)] for cells in counts]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-3, abs=1e-6)
    assert numbers[0]


# The gate.


def run_with_gate(
    policy: Path, folder: Path, heeded: bool, monkeypatch: pytest.MonkeyPatch, *, is_open: bool = False, **named: Any
) -> Any:
    """What the model does is made up: this tiny one has no opinion about hints."""
    made_up = compared(0.3, 0.0 if heeded else 0.3, 30)
    monkeypatch.setattr(hint_distillation, "_comparisons", lambda *_: made_up)
    still = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}  # Adam makes steps of what rounding leaves
    trainer = scripted(policy, folder, still, alpha_sdpo=30.0, **named)
    if is_open:
        trainer.channels.hint_gate.is_open = True
    trainer.train()
    return trainer


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


def lines_of(trainer: Any) -> list[dict[str, Any]]:
    return [each for each in trainer.state.log_history if "loss/total" in each]


def test_channel_2_rests_where_hints_are_not_heeded(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = run_with_gate(policy, tmp_path / "deaf", False, monkeypatch, heed_gate=True)
    lines = lines_of(deaf)
    assert [each["ran/sdpo_kl"] for each in lines] == [each["hints/gate"] for each in lines] == [0.0, 0.0, 0.0]
    for line in lines:
        assert line["loss/total"] == pytest.approx(line["loss/grpo"])
        assert line["loss/sdpo_kl"] > 0, "still measured"
    [told] = [each.getMessage() for each in caplog.records if "train.grpo.heed_gate" in each.getMessage()]
    assert re.search(r"\bstep 1\b.*\bchannel 2\b", told)


def test_behind_a_closed_gate_a_run_is_grpo_and_behind_an_open_one_it_is_not(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_with_gate(policy, tmp_path / "plain", True, monkeypatch)
    assert "hints/gate" not in lines_of(plain)[0]
    closed = run_with_gate(policy, tmp_path / "closed", False, monkeypatch, heed_gate=True)
    still = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}
    grpo = scripted(policy, tmp_path / "grpo", still)
    grpo.train()
    torch.testing.assert_close(weights_of(closed), weights_of(grpo), rtol=1e-5, atol=1e-7)
    assert (weights_of(closed) - weights_of(plain)).abs().max() > 1e-3, "the comparison could have failed"
    gated = run_with_gate(policy, tmp_path / "gated", True, monkeypatch, heed_gate=True)
    assert [each["ran/sdpo_kl"] for each in lines_of(gated)] == [0.0, 1.0, 1.0], "shown by the first step"
    assert (weights_of(gated) - weights_of(grpo)).abs().max() > 1e-3
    opened = run_with_gate(policy, tmp_path / "opened", True, monkeypatch, is_open=True, heed_gate=True)
    torch.testing.assert_close(weights_of(opened), weights_of(plain), rtol=1e-4, atol=1e-6)


def test_without_channel_2_there_is_no_gate(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path, heed_gate=True)
    assert trainer.channels.hint_gate is None
    looking = scripted(policy, tmp_path / "looking", heed_gate=True, measure_channels=True)
    assert looking.channels.hint_gate is None, "nothing to let rest"
