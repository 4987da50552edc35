"""The same rollouts make the same batch here and in TRL: advantages, sites, hinted contexts."""

from __future__ import annotations

import pytest
import torch

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.envs.student import student_folder
from composer_replication.errors import InputError
from composer_replication.evaluation.ablation.workspace import SCHEMAS
from composer_replication.recipes.monarch.run import BatchSettings, _BatchBuilder
from composer_replication.recipes.monarch.tensor_file import SavedRollouts
from composer_replication.trainer.rollouts.sites import Rollout, schemas_of
from recipes.recorded_steps import GROUP, SETTINGS, Batch, recorded_batches
from refusals import refusal

MODEL = str(student_folder())


def played(batch: Batch) -> tuple[SavedRollouts, list[float], list[int]]:
    """The record's episodes with the world's answers, before TRL shuffled them; their rewards; their rows there."""
    pytest.importorskip("trl")
    from recipes.recorded_episodes import played as episode_of

    tokenizer, rows = load_tokenizer(MODEL), batch.place.argsort().tolist()
    episodes = [episode_of(tokenizer, batch, row) for row in rows]
    rollouts = [
        Rollout(
            rollout_id=f"r{row}",
            prompt_ids=each.prompt_ids,
            completion_ids=each.ids,
            sampled=each.sampled,
            prompt=each.prompt,
            messages=each.messages,
            tools=schemas_of(SCHEMAS),
        )
        for row, each in zip(rows, episodes, strict=True)
    ]
    kept = SavedRollouts(rollouts=rollouts, columns=[{} for _ in rows], weights_version=0)
    return kept, [each.workspace.reward().value for each in episodes], rows


def without_padding(ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    return ids[mask.bool()].tolist()


@pytest.mark.parametrize("number", [0, 3])
def test_a_recorded_batch_is_made_again_from_its_rollouts(tmp_path, number):
    wanted = recorded_batches()[number]
    kept, rewards, rows = played(wanted)
    kept.save(tmp_path, number)
    kept = SavedRollouts.load(tmp_path, number)  # as the generator hands it over
    maker = _BatchBuilder(MODEL, BatchSettings(num_generations=GROUP, scale_rewards=SETTINGS["scale_rewards"]))
    batch = maker.batch(kept, rewards, maker.find_sites(kept, number))
    torch.testing.assert_close(batch.advantages, wanted.advantages[rows], atol=1e-6, rtol=0)
    for here, there in enumerate(rows):
        ids = without_padding(batch.input_ids[here], batch.attention_mask[here])
        assert ids == wanted.row_ids(there)
        assert batch.loss_mask[here].sum() == wanted.loss_mask[there].sum()
    found = [
        (there, turn.start, turn.end, turn.teacher_start, turn.teacher_ids.tolist(), turn.kind, turn.hint)
        for here, there in enumerate(rows)
        for turn in batch.sites[here]
    ]
    recorded = [
        (site.row, site.start, site.end, site.teacher_start, site.teacher_ids.tolist(), site.kind, site.hint)
        for site in wanted.sites
    ]
    assert len(recorded) > 0
    assert sorted(found) == sorted(recorded)


def test_a_reward_for_every_rollout():
    kept, rewards, _ = played(recorded_batches()[0])
    maker = _BatchBuilder(MODEL, BatchSettings(num_generations=GROUP))
    with refusal(InputError, what="rewards", got="7", expected="8"):
        maker.batch(kept, rewards[1:], maker.find_sites(kept, 0))
