"""Recorded rollouts as episodes: the model says what it said, the workspace answers and judges anew."""

from __future__ import annotations

from typing import Any

from composer_replication.evaluation.ablation.workspace import TaskEpisode
from recipes.recorded_steps import Batch


def played(tokenizer: Any, batch: Batch, row: int) -> TaskEpisode:
    """The episode of one row: its messages, its files' worth, and the very ids of the record."""
    episode = TaskEpisode(tokenizer, int(batch.task_seeds[row]), "recorded")
    sampled = batch.loss_mask[row].tolist()
    ids, place, length = batch.completion_ids[row].tolist(), 0, int(batch.completion_mask[row].sum())
    while place < length:
        end = next((at for at in range(place, length) if not sampled[at]), length)
        place = end + len(episode.hear(ids[place:end]) or ())
    assert episode.ids == ids[:length], "the workspace answered otherwise than in the record"
    return episode
