"""Own hints against wrong ones in rollouts: figures of plain passes, however a step is cut; and the gate on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from test_composer_channels import scripted
from test_composer_figures import cut

from composer_replication.loss.linear import LinearHead
from composer_replication.objective.row_weighting import Contrast, RowWeighting
from composer_replication.objective.teacher_rows import Teacher
from composer_replication.rollouts.channel import hint_drops
from composer_replication.rollouts.heeding import Comparison, Heeding
from composer_replication.rollouts.sites import SITES
from composer_replication.trainer.composer import channels
from composer_replication.trainer.composer.heed_gate import HeedWatch
from rollouts.tiny_policy import save_policy
from rollouts.watched_losses import spy

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


def test_drops_are_those_of_whole_softmaxes() -> None:
    draw = torch.Generator().manual_seed(3)
    heads = [LinearHead(torch.randn(50, 8, generator=draw)) for _ in range(2)]
    lengths, with_contrast = [5, 1, 7, 3], [0, 2, 3]
    position = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.randint(50, (16,), generator=draw)
    rows_of = list(torch.arange(16).split(lengths))
    numbers = torch.cat([rows_of[turn] for turn in with_contrast])
    own, wrong, unhinted = shares(draw, heads, 16), shares(draw, heads, 15), shares(draw, heads, 15)
    found = hint_drops(own, Contrast(numbers, wrong, unhinted), tokens, position)
    per_row = [plain_logprobs(own, tokens)[numbers]]
    per_row += [plain_logprobs(each, tokens[numbers]) for each in (wrong, unhinted)]
    own_means, wrong_means, plain_means = (
        torch.stack([part.mean() for part in each.split([lengths[turn] for turn in with_contrast])]) for each in per_row
    )
    expected = torch.stack([plain_means - own_means, plain_means - wrong_means], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert hint_drops(own, Contrast(numbers[:0], [], []), tokens, position).shape == (0, 2)


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
    watch = trainer.channels.watch
    assert len(drops) >= 2
    assert watch.heeding.own_drop == pytest.approx(torch.tensor(drops).mean(0)[0].item(), rel=1e-3, abs=1e-5)
    assert watch.heeding.other_drop == pytest.approx(torch.tensor(drops).mean(0)[1].item(), rel=1e-3, abs=1e-5)
    line = next(each for each in trainer.state.log_history if "loss/total" in each)
    assert line["hints/own_drop"] == watch.heeding.own_drop
    assert "hints/gate" not in line, "a contrast alone gates nothing"

    without = scripted(policy, tmp_path / "off", still, alpha_sdpo=1.0)
    without.train()
    assert not [name for each in without.state.log_history for name in each if name.startswith("hints/")]


def test_a_step_in_pieces_counts_the_same(policy: Path, tmp_path: Path) -> None:
    found = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        more = {"alpha_sdpo": 1.0, "sdpo_weighting": CONTRAST}
        trainer = scripted(policy, tmp_path / str(size), cut(size, accumulation), **more)
        trainer.train()
        state = trainer.channels.watch.state()["heeding"]
        found.append([value for each in [*state["by_kinds"], state["sums"]] for value in each])
    assert any(each for each in found[0] if each == 1), "something was compared"
    for other in found[1:]:
        assert [each for each in other if isinstance(each, str)] == [e for e in found[0] if isinstance(e, str)]
        assert [e for e in other if not isinstance(e, str)] == pytest.approx(
            [e for e in found[0] if not isinstance(e, str)], rel=1e-4, abs=1e-6
        )


def test_rollouts_that_are_trained_on_twice_are_compared_once(policy: Path, tmp_path: Path) -> None:
    counts = []
    for iterations in (1, 3):
        settings = {"max_steps": iterations, "num_iterations": iterations}
        trainer = scripted(policy, tmp_path / str(iterations), settings, alpha_sdpo=1.0, sdpo_weighting=CONTRAST)
        trainer.train()
        counts.append(trainer.channels.watch.state()["heeding"]["sums"][2])
    assert counts[0] == counts[1] > 0


# The gate.


def compared(
    own: float, other: float, number: int, noise: float = 0.05, prompts: int | None = None
) -> list[Comparison]:
    """Two kinds, each against the other, with this effect and that luck."""
    draw = random.Random(0)
    return [
        Comparison(
            each if prompts is None else each % prompts,
            *(("a", "b") if each % 2 else ("b", "a")),
            own + draw.gauss(0, noise),
            other + draw.gauss(0, noise),
        )
        for each in range(number)
    ]


@pytest.mark.parametrize(
    ("own", "other", "number", "has_contrast", "is_open"),
    [
        (0.3, 0.3, 19, False, True),  # too few to tell
        (0.3, 0.0, 40, False, True),
        (0.3, 0.31, 40, False, False),
        (0.3, 0.31, 40, True, False),
        (0.3, 0.25, 40, False, False),  # it does more, and most of it is what any text does
        (0.3, 0.25, 40, True, True),  # which a contrast takes off
        (0.3, 0.16, 40, False, True),  # near twice as much: as before
        (-0.1, -0.3, 40, False, False),  # both make the error likelier, and that would be taught
        (0.3, -0.3, 40, False, True),
    ],
)
def test_the_gate_is_open_where_own_hints_do_more_and_mean_something(
    own: float, other: float, number: int, has_contrast: bool, is_open: bool
) -> None:
    gate = HeedWatch(gates=True, has_contrast=has_contrast)
    gate.add(compared(own, other, number))
    assert gate.is_open, "a step is decided before it begins"
    told = gate.after_step()
    assert gate.is_open is is_open
    assert (told is None) is is_open
    if told:
        assert f"over {number} comparisons" in told
        assert "train.grpo.heed_gate = false" in told
    again = HeedWatch(gates=True, has_contrast=has_contrast)
    again.load_state(gate.state())
    assert again.is_open is is_open
    assert gate.after_step() is again.after_step() is None, "said once"
    assert again.metrics() == gate.metrics()
    only_watched = HeedWatch(gates=False, has_contrast=has_contrast)
    only_watched.add(compared(own, other, number))
    assert only_watched.after_step() is None
    assert only_watched.is_open


def test_the_gate_opens_again_and_keeps_what_it_did_in_between() -> None:
    gate = HeedWatch(gates=True, has_contrast=False)
    gate.add(compared(0.1, 0.1, 30))
    assert "rests" in str(gate.after_step())
    for _ in range(20):
        gate.add(compared(0.4, 0.0, 30))
        if told := gate.after_step():
            break
    assert "goes on" in str(told)
    doubtful = HeedWatch(gates=True, has_contrast=False)
    doubtful.add(compared(0.03, 0.0, 30, noise=0.12))
    doubtful.after_step()
    assert 0.5 < doubtful.heeding.deviations < 2
    assert doubtful.is_open, "it was before"
    doubtful.is_open = False
    doubtful.after_step()
    assert not doubtful.is_open


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_what_a_text_does_wherever_it_stands_is_not_heeding(share: float) -> None:
    """Hints about a lower any turn by 0.3, those about b by 0.1; nobody reads what they say."""
    draw, effect = random.Random(1), {"a": 0.3, "b": 0.1}
    kinds = ["a" if draw.random() < share else "b" for _ in range(2000)]
    turns = [
        Comparison(
            number,
            kind,
            other := "b" if kind == "a" else "a",
            effect[kind] + draw.gauss(0, 0.05),
            effect[other] + draw.gauss(0, 0.05),
        )
        for number, kind in enumerate(kinds)
    ]
    heeding = Heeding()
    heeding.add(turns)
    assert heeding.is_shown is False
    means = [each.own_drop - each.other_drop for each in turns]
    assert share == 0.5 or abs(sum(means) / len(means)) > 0.1, "a plain mean would be fooled"
    heeded = Heeding()
    heeded.add([each._replace(own_drop=each.own_drop + 0.03) for each in turns])
    assert heeded.is_shown is True
    assert heeded.advantage[0] == pytest.approx(0.03, abs=0.015)


def test_standard_errors_hold_what_chance_does() -> None:
    """Without an effect two standard errors are passed upwards in about one run of forty."""
    passed = 0
    for seed in range(1000):
        draw = random.Random(seed)
        heeding = Heeding()
        heeding.add(
            Comparison(number, *draw.sample(["a", "b", "c"], 2), draw.gauss(0, 1), draw.gauss(0, 1))
            for number in range(60)
        )
        passed += heeding.deviations >= 2
    assert 10 <= passed <= 45


def test_rollouts_of_one_prompt_that_err_alike_count_once() -> None:
    heeding = Heeding()
    heeding.add(compared(0.3, 0.1, 40, prompts=4))
    assert heeding.compared == 4
    one_way = Heeding()
    one_way.add([Comparison(number, "a", "b", 1.0, 0.0) for number in range(50)])
    assert (one_way.compared, one_way.is_shown) == (0, None), "nothing to weigh it with"


def run_with_gate(policy: Path, folder: Path, heeded: bool, monkeypatch: pytest.MonkeyPatch, **named: Any) -> Any:
    """What the model does is made up: this tiny one has no opinion about hints."""
    made_up = compared(0.3, 0.0 if heeded else 0.3, 30)
    monkeypatch.setattr(channels, "_comparisons", lambda *_: made_up)
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
    assert trainer.channels.watch is None
    looking = scripted(policy, tmp_path / "looking", heed_gate=True, measure_channels=True)
    assert looking.channels.watch is None, "nothing to let rest"
