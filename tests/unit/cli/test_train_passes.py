"""`crf train` reads each conversation once and renders it once, whatever is asked of the sessions."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from train_runs import GRPO

from composer_replication.batch.render.renderer import Renderer
from composer_replication.runs import RunDir
from composer_replication.runs import files as conversations
from output_facts import lines_with

EVERYTHING = [
    *("--set", "train.optimiser.steps=1"),
    *("--set", "train.eval_every=1"),
    *("--set", "train.proof.on=true"),
    *("--set", "train.switches.contrast=1.0"),
    *("--set", "render.student_models=['no such model']"),
]


@pytest.fixture
def passes(folder, monkeypatch):
    """How often each conversation of the run was decoded, and rendered whole, by its id."""
    ids = {each.id for each in conversations.read_conversations(RunDir.open(folder / "run"))}
    found = {"decoded": Counter(), "rendered": Counter()}
    decode, render = conversations.conversation_from_row, Renderer.render

    def decoding(row):
        found["decoded"][row["id"]] += 1
        return decode(row)

    def rendering(self, conversation):
        found["rendered"].update({conversation.id} & ids)  # not the states of pairs, which have ids of their own
        return render(self, conversation)

    monkeypatch.setattr(conversations, "conversation_from_row", decoding)
    monkeypatch.setattr(Renderer, "render", rendering)
    return found, dict.fromkeys(ids, 1)


@pytest.mark.parametrize("options", [EVERYTHING, [*EVERYTHING, "--dry-run"]], ids=["training", "dry run"])
def test_training_on_sessions_reads_and_renders_each_once(train, passes, options):
    found, once = passes
    status, _, err = train(*options)
    assert status == 0, err
    assert lines_with(err, "render.student_models", "'no such model'")
    assert found == {"decoded": once, "rendered": once}


def test_rollouts_with_a_run_beside_them_read_and_render_each_once(train, passes):
    found, once = passes
    status, _, err = train(*GRPO, *EVERYTHING[:2], *EVERYTHING[4:])
    assert status == 0, err
    assert "hint proof" in json.loads((train.output / "adapter" / "training.json").read_text())["seconds"]
    assert found == {"decoded": once, "rendered": once}
