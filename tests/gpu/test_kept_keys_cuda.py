"""Kept keys on CUDA: recorded passes choose the tokens of transformers' own loop, over turns and as rows end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.generation.row_cache import NextTokens
from composer_replication.trainer.rollouts.generation.talks import RecordedTalking, Talking
from scripted_talk import Scripted

sys.path.append(str(Path(__file__).parents[1] / "unit" / "generation"))
from kept_rows import end_an_autocast_elsewhere, new_tokens, padded, random_rows, small_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_turns_from_recorded_passes_have_the_tokens_of_a_fresh_start(monkeypatch):
    recorded = []
    usual = NextTokens._record
    monkeypatch.setattr(NextTokens, "_record", lambda self, *given: recorded.append(given[2]) or usual(self, *given))
    model, generator, rows = small_model().cuda(), RolloutGenerator(), random_rows((18, 15, 11, 18, 13, 9))
    with generator.rollout():
        for _turn in range(3):
            inputs = {name: value.cuda() for name, value in padded(rows).items()}
            found = generator.generate(model, **inputs, max_new_tokens=40, do_sample=False)
            expected = model.generate(**inputs, max_new_tokens=40, do_sample=False)
            said = new_tokens(found, rows)
            assert said == new_tokens(expected, rows)
            rows = [
                row + new + tool for row, new, tool in zip(rows, said, random_rows((4, 9, 2, 7, 5, 3)), strict=True)
            ]
    assert len(recorded) >= 3
    assert not generator.left_because


def test_the_same_seed_draws_the_same_tokens():
    model, rows = small_model().cuda(), random_rows((18, 15, 11))
    inputs = {name: value.cuda() for name, value in padded(rows).items()}
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append(RolloutGenerator().generate(model, **inputs, max_new_tokens=30, do_sample=True, top_k=0))
    assert torch.equal(*found)


def test_conversations_of_recorded_passes_say_what_others_say_side_by_side(monkeypatch):
    recorded = []
    usual = NextTokens._record
    monkeypatch.setattr(NextTokens, "_record", lambda self, *given: recorded.append(given[2]) or usual(self, *given))
    model, said = small_model().cuda(), []
    for kind in (Talking, RecordedTalking):
        talks = [Scripted(number, number % 3) for number in range(5)]
        kind(model, ends=[2], places=3, room=120, temperature=0.0).run(talks)
        said.append([talk.heard for talk in talks])
    assert said[0] == said[1]
    assert recorded


def test_recordings_of_a_training_in_bf16_read_the_weights_whatever_other_threads_do(monkeypatch):
    """Several stretches up and down, and a thread that empties the copies which autocasts have in common, before a
    recording and after it. Each replay's logits are those of the same pass, not recorded."""
    recorded, record, logits, over, said = [], NextTokens._record, NextTokens.logits, [], []

    def disturbed(self, *given):
        if len(recorded) % 2:
            end_an_autocast_elsewhere("cuda")
        recorded.append(given[2])
        made = record(self, *given)
        end_an_autocast_elsewhere("cuda")
        for weight in model.parameters():  # over what was given back
            over.extend(torch.full_like(weight, float("nan"), dtype=torch.bfloat16) for _ in range(4))
        return made

    def compared(self, *given):
        found, expected = logits(self, *given).clone(), self._run(*given)
        torch.testing.assert_close(found, expected, atol=0.3, rtol=0.05, equal_nan=True)
        return found

    model = small_model().cuda()
    model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
    monkeypatch.setattr(NextTokens, "logits", compared)
    for recording in (record, disturbed):
        monkeypatch.setattr(NextTokens, "_record", recording)
        talks = [Scripted(number, number % 5) for number in range(9)]
        RecordedTalking(model, ends=[1000], places=3, room=900, temperature=0.0).run(talks)
        said.append([talk.heard for talk in talks])
    assert said[0] == said[1]
    assert len(set(recorded)) >= 2
