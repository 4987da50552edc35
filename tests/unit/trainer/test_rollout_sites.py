"""The trainer's sites are those of scripts that somebody wrote who had not seen its rules, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
from data.scripted_rollouts import SCRIPTS, Found, Scripted, batches, differences
from rollouts.tiny_policy import load_tokenizer, save_policy
from rollouts.trainers import make, questions, quick_config
from rollouts.workshop import Workshop


class Recorded:
    """Every script's sites as the trainer put them into its batch."""

    def __init__(self, policy: Path, folder: Path) -> None:
        config = quick_config(folder, per_device_train_batch_size=2, num_generations=2)
        self.tokenizer = load_tokenizer(policy)
        trainer: Any = make(
            ComposerReplicationTrainer,
            policy,
            config,
            train_dataset=questions(),
            environment_factory=Workshop,
            measure_channels=True,
        )
        self.found: dict[str, list[list[Found]]] = {}
        self.teacher_ids: dict[str, list[tuple[list[int], list[int]]]] = {}
        for batch in batches(self.tokenizer):
            batch.attach(trainer)
            output = trainer._generate_and_score_completions(batch.rows(2))
            for index, script in enumerate(batch.scripts_of_rows(2)):
                prompt = int(output["prompt_mask"][index].sum())
                ids = output["completion_ids"][index].tolist()
                sites = output["sdpo_sites"][index]
                self.found.setdefault(script.name, []).append([_found(each, prompt, ids) for each in sites])


def _found(site: dict[str, Any], prompt: int, ids: list[int]) -> Found:
    start, end = site["start"] - prompt, site["end"] - prompt
    turn = int(site["turn_id"].removeprefix("assistant-"))
    taught = site["teacher_ids"].tolist()[site["teacher_start"] :]
    assert taught == ids[start:end]  # the teacher scores the sampled ids, not a rendering of their text
    return Found(turn, start, end, tuple(ids[start:end]), kind=site["kind"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(save_policy(tmp_path_factory.mktemp("policy")), tmp_path_factory.mktemp("out"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_taught_turns_are_those_of_the_script(recorded: Recorded, script: Scripted) -> None:
    for sites in recorded.found[script.name]:
        assert differences(script, recorded.tokenizer, sites) == []
