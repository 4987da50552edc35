"""The twenty episodes through TRL's own tool loop: its parsing, its calls, its messages, its rewards."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset
from trl import GRPOTrainer

from adapters.scripted_episodes import MAX_CALLS, Script, played_alone, scripts
from composer_replication.envs.trl_environment import WorkspaceEnvironment
from rollouts.tiny_policy import ScriptedGeneration, save_policy
from rollouts.trainers import make, quick_config, spy

SCRIPTS = scripts()
SAID = "I am done."


def spoken(script: Script) -> list[str]:
    """What a model writes; every second one makes two calls a turn."""
    calls = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in script.calls]
    size = 1 + script.seed % 2
    turns = [calls[at : at + size] for at in range(0, len(calls), size)]
    return ["\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in turn) for turn in turns] + [SAID]


def worth(environments, **_columns):
    return [each.get_reward() for each in environments]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """The messages of each episode, and its reward."""
    rows = [
        {"prompt": [{"role": "user", "content": each.name}], "seed": each.seed, "difficulty": each.difficulty}
        for each in SCRIPTS
    ]
    folder = tmp_path_factory.mktemp("trl")
    config = quick_config(
        folder, per_device_train_batch_size=len(rows), num_generations=2, max_completion_length=200_000
    )
    trainer = make(
        GRPOTrainer,
        save_policy(folder / "policy"),
        config,
        reward_funcs=worth,
        train_dataset=Dataset.from_list(rows),
        environment_factory=lambda: WorkspaceEnvironment(max_calls=MAX_CALLS),
    )
    trainer.model.config.max_position_embeddings = config.max_completion_length  # TRL drops what is longer
    ScriptedGeneration(trainer, {each.name: [spoken(each)] for each in SCRIPTS})
    generated, rewarded = spy(trainer, "_generate"), spy(trainer, "_calculate_rewards")
    trainer._generate_and_score_completions(rows)
    return generated[0][2][3], rewarded[0][2][:, 0].tolist()


@pytest.mark.parametrize("number", range(len(SCRIPTS)), ids=[script.name for script in SCRIPTS])
def test_an_episode_has_the_answers_and_the_reward_that_it_has_without_trl(episodes, number):
    messages, reward = episodes[0][number], episodes[1][number]
    calls, alone = played_alone(SCRIPTS[number])
    answers = [(each["name"], each["content"]) for each in messages if each["role"] == "tool"]
    assert answers == [(call["name"], call["text"]) for call in calls]
    assert (reward, messages[-1]["content"]) == (pytest.approx(alone), SAID)
