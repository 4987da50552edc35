"""Own hints against wrong ones in rollouts: the logged figures are those of plain passes, however a step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_composer_channels import scripted
from test_composer_figures import cut

from composer_replication.loss.linear import LinearHead
from composer_replication.objective.row_weighting import Contrast, RowWeighting
from composer_replication.objective.teacher_rows import Teacher
from composer_replication.rollouts.heeding import Heeding, heeding_sums
from composer_replication.rollouts.sites import SITES
from rollouts.tiny_policy import save_policy
from rollouts.watched_losses import spy

NAMES = ("hints/compared", "hints/own_wins", "hints/own_drop", "hints/other_drop")
CONTRAST = RowWeighting(contrast=1.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def shares(draw: torch.Generator, heads: list[LinearHead], num_rows: int) -> list[Teacher]:
    rows = [torch.randn(num_rows, 8, generator=draw) for _ in heads]
    return [Teacher(row, head, share) for row, head, share in zip(rows, heads, (0.7, 0.3), strict=True)]


def plain_logprobs(teachers: list[Teacher], tokens: torch.Tensor) -> torch.Tensor:
    logits = torch.stack([each.coefficient * (each.rows_NH @ each.head.weight.T) for each in teachers]).sum(0)
    return torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]


def test_the_sums_are_those_of_whole_softmaxes() -> None:
    draw = torch.Generator().manual_seed(3)
    heads = [LinearHead(torch.randn(50, 8, generator=draw)) for _ in range(2)]
    lengths, with_contrast = [5, 1, 7, 3], [0, 2, 3]
    position = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.randint(50, (16,), generator=draw)
    rows_of = list(torch.arange(16).split(lengths))
    numbers = torch.cat([rows_of[turn] for turn in with_contrast])
    own, wrong, unhinted = shares(draw, heads, 16), shares(draw, heads, 15), shares(draw, heads, 15)
    found = Heeding(*heeding_sums(own, Contrast(numbers, wrong, unhinted), tokens, position).tolist())

    per_row = [plain_logprobs(own, tokens)[numbers]]
    per_row += [plain_logprobs(each, tokens[numbers]) for each in (wrong, unhinted)]
    own_means, wrong_means, plain_means = (
        torch.stack([part.mean() for part in each.split([lengths[turn] for turn in with_contrast])]) for each in per_row
    )
    assert found.turns == 3
    assert found.own_wins == int((own_means < wrong_means).sum()) in (1, 2), "a case where it wins and one where not"
    assert found.own_drop == pytest.approx(float((plain_means - own_means).sum()), rel=1e-5)
    assert found.other_drop == pytest.approx(float((plain_means - wrong_means).sum()), rel=1e-5)
    nothing = Contrast(numbers[:0], [], [])
    assert heeding_sums(own, nothing, tokens, position).tolist() == [0.0] * 4


def mean_logprob(model: Any, ids: torch.Tensor, start: int) -> float:
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, start - 1 : -1]
    return float(torch.log_softmax(logits, -1).gather(1, ids[start:, None]).mean())


def test_what_is_logged_is_what_plain_passes_say(policy: Path, tmp_path: Path) -> None:
    still = {"learning_rate": 0.0}
    trainer = scripted(policy, tmp_path / "on", still, alpha_sdpo=1.0, sdpo_weighting=CONTRAST)
    calls = spy(trainer, "_compute_loss")
    trainer.train()
    inputs, model = calls[0][0][1], trainer.model.eval()
    drops = []
    for sample, turns in enumerate(inputs[SITES]):
        prompt = inputs["prompt_ids"][sample][inputs["prompt_mask"][sample].bool()]
        ids = torch.cat([prompt, inputs["completion_ids"][sample]])
        for turn in turns:
            size = turn["end"] - turn["start"]
            plain = mean_logprob(model, ids[: turn["end"]], turn["start"])
            hinted = [(turn["teacher_ids"], turn["teacher_start"]), (turn["wrong_ids"], turn["wrong_start"])]
            drops.append([plain - mean_logprob(model, each[: start + size], start) for each, start in hinted])
    line = next(each for each in trainer.state.log_history if "loss/total" in each)
    own, other = torch.tensor(drops).mean(0).tolist()
    assert line["hints/compared"] == len(drops) >= 2
    assert line["hints/own_drop"] == pytest.approx(own, rel=1e-3, abs=1e-5)
    assert line["hints/other_drop"] == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert line["hints/own_wins"] == sum(a > b for a, b in drops) / len(drops)

    without = scripted(policy, tmp_path / "off", still, alpha_sdpo=1.0)
    without.train()
    assert not [name for each in without.state.log_history for name in each if name.startswith("hints/")]


def test_a_step_in_pieces_logs_the_same(policy: Path, tmp_path: Path) -> None:
    lines = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        more = {"alpha_sdpo": 1.0, "sdpo_weighting": CONTRAST}
        trainer = scripted(policy, tmp_path / str(size), cut(size, accumulation), **more)
        trainer.train()
        line = next(each for each in trainer.state.log_history if "loss/total" in each)
        lines.append({name: line[name] for name in NAMES})
    assert lines[0]["hints/compared"] >= 2
    for other in lines[1:]:
        assert other == pytest.approx(lines[0], rel=1e-4)
