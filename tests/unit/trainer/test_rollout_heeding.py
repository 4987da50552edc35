"""Own hints against wrong ones in rollouts: figures of plain passes, however a step is cut; and the gate on them."""

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
from composer_replication.rollouts import channel
from composer_replication.rollouts.channel import heeding_sums
from composer_replication.rollouts.heeding import Heeding
from composer_replication.rollouts.sites import SITES
from composer_replication.trainer.composer.heed_gate import HeedGate
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


# The gate.


@pytest.mark.parametrize(
    ("sums", "has_contrast", "is_open"),
    [
        ((19, 0, 0.0, 19.0), False, True),  # too few to tell
        ((20, 14, 20.0, 1.0), False, False),  # 14.47 are needed
        ((20, 15, 20.0, 1.0), False, True),
        ((400, 219, 100.0, 1.0), False, False),
        ((400, 220, 100.0, 1.0), False, True),
        ((400, 300, 20.0, 10.1), False, False),  # it wins, and most of it is what any text does
        ((400, 300, 20.0, 10.1), True, True),  # which a contrast takes off
        ((400, 300, 20.0, -5.0), False, True),
        ((400, 300, -5.0, -9.0), False, True),  # both make the error likelier, its own less
    ],
)
def test_the_gate_is_open_where_own_hints_win_and_mean_something(
    sums: tuple[float, ...], has_contrast: bool, is_open: bool
) -> None:
    gate = HeedGate(has_contrast=has_contrast)
    gate.add(Heeding(*sums))
    assert gate.is_open, "a step is decided before it begins"
    told = gate.after_step()
    assert gate.is_open is is_open
    assert (told is None) is is_open
    if told:
        assert f"of {sums[0]} turns" in told
        assert "train.grpo.heed_gate = false" in told
    again = HeedGate(has_contrast=has_contrast)
    again.load_state(gate.state())
    assert again.is_open is is_open
    assert gate.after_step() is None, "said once"


def test_the_gate_opens_again() -> None:
    gate = HeedGate(has_contrast=False)
    gate.add(Heeding(40, 10, 1.0, 1.0))
    assert "rests" in str(gate.after_step())
    for _ in range(3):
        gate.add(Heeding(40, 40, 40.0, 1.0))
    assert "goes on" in str(gate.after_step())
    assert gate.is_open


def run_with_gate(policy: Path, folder: Path, heeded: bool, monkeypatch: pytest.MonkeyPatch, **named: Any) -> Any:
    """What the model does is made up: this tiny one has no opinion about hints."""
    one = torch.tensor([30.0, 30.0, 30.0, 0.0] if heeded else [30.0, 15.0, 3.0, 3.0])
    monkeypatch.setattr(channel, "heeding_sums", lambda *_: one)
    still = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1}  # Adam makes steps of what rounding leaves
    trainer = scripted(policy, folder, still, alpha_sdpo=30.0, **named)
    trainer.train()
    return trainer


def weights_of(trainer: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


def lines_of(trainer: Any) -> list[dict[str, Any]]:
    return [each for each in trainer.state.log_history if "loss/total" in each]


def test_channel_2_rests_from_the_second_step_on_where_hints_are_not_heeded(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = run_with_gate(policy, tmp_path / "deaf", False, monkeypatch, heed_gate=True)
    lines = lines_of(deaf)
    assert [each["ran/sdpo_kl"] for each in lines] == [1.0, 0.0, 0.0]
    assert [each["hints/gate"] for each in lines] == [1.0, 0.0, 0.0]
    assert lines[2]["loss/total"] == pytest.approx(lines[2]["loss/grpo"])
    assert lines[2]["loss/sdpo_kl"] > 0, "still measured"
    said = [each.getMessage() for each in caplog.records if "rests on rollouts" in each.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 1: ")


def test_an_open_gate_changes_no_weight(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_with_gate(policy, tmp_path / "plain", True, monkeypatch)
    gated = run_with_gate(policy, tmp_path / "gated", True, monkeypatch, heed_gate=True)
    assert [each["ran/sdpo_kl"] for each in lines_of(gated)] == [1.0] * 3
    torch.testing.assert_close(weights_of(gated), weights_of(plain), rtol=1e-4, atol=1e-6)
    closed = run_with_gate(policy, tmp_path / "closed", False, monkeypatch, heed_gate=True)
    assert (weights_of(closed) - weights_of(plain)).abs().max() > 1e-3, "the comparison could have failed"
    assert "hints/gate" not in lines_of(plain)[0]


def test_without_channel_2_there_is_no_gate(policy: Path, tmp_path: Path) -> None:
    trainer = scripted(policy, tmp_path, heed_gate=True)
    assert trainer.channels.gate is None
    assert not trainer.channels.compares_hints
