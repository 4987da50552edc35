"""The workspace in TRL: the same schemas, transcripts and rewards, and its failures become sites of their kinds."""

from __future__ import annotations

import json

import pytest

from composer_replication.envs.trl_environment import WorkspaceEnvironment, task_rows
from composer_replication.envs.workspace import TOOLS, Workspace, generate_task
from composer_replication.errors import InputError
from refusals import refusal
from workspace_calls import ROOT, path

SEED = 11


def spoken(name, arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def calls_of(task):
    """Failures of several kinds, then what solves the task."""
    first, (edit, *_) = task.solution[0].path, task.solution
    change = {"file_path": path(first), "old_string": edit.old, "new_string": edit.new}
    return [
        ("Read", {"file_path": path("nowhere/" + "missing.py")}),
        ("Edit", change),
        ("Read", {"file_path": path(first)}),
        ("Edit", {**change, "old_string": "nobody wrote this"}),
        ("Edit", {**change, "old_string": edit.new}),
        ("Grep", {"pattern": "(", "path": ROOT}),
        ("Read", {"path": path(first)}),
        ("RunTests", {}),
        ("Edit", change),
        ("RunTests", {}),
        ("Finish", {}),
    ]


def test_a_method_has_the_schema_of_its_tool():
    utils = pytest.importorskip("transformers.utils")
    environment = WorkspaceEnvironment()
    for tool in TOOLS:
        wanted = json.loads(json.dumps(tool["function"]))
        del wanted["parameters"]["additionalProperties"]
        if not wanted["parameters"]["required"]:
            del wanted["parameters"]["required"]
        made = utils.get_json_schema(getattr(environment, wanted["name"]))["function"]
        made.pop("return", None)
        assert made == wanted


def test_calls_through_the_methods_are_calls_of_the_workspace():
    task = generate_task(SEED)
    environment, workspace = WorkspaceEnvironment(), Workspace(task)
    assert environment.reset(seed=SEED) == task.prompt
    assert environment.reset(seed=SEED, prompt=[{"role": "user", "content": "x"}], other=1) is None
    for name, arguments in [*calls_of(task), ("Read", {"self": 1})]:
        assert getattr(environment, name)(**arguments) == workspace.call(name, arguments).text
    assert environment.get_reward() == workspace.reward().value == 1.0


def test_an_environment_without_a_task_says_what_is_missing():
    with refusal(InputError, what="workspace", expected="reset(seed=", fix="seed"):
        WorkspaceEnvironment().get_reward()
    with refusal(InputError, what="difficulty", got="'none'"):
        task_rows([1], difficulty="none")  # type: ignore[arg-type]


def test_rows_hold_the_prompt_and_what_reset_needs():
    (row,) = task_rows([SEED], difficulty="hard", system="Be brief.")
    task = generate_task(SEED, difficulty="hard")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task.prompt}]
    assert row == {"prompt": messages, "seed": SEED, "difficulty": "hard"}


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_a_config_can_name_the_tasks_and_the_environment(difficulty):
    pytest.importorskip("datasets")
    from composer_replication.trainer.from_config.grpo import _import_object, _load_dataset

    module = "composer_replication.envs.trl_environment"
    prompts = _load_dataset(f"{module}:{difficulty}_tasks")
    assert prompts["seed"][:] == list(range(10_000, 11_000)), "seeds 0 to 999 are for cards and evaluation"
    environment = _import_object(f"{module}:WorkspaceEnvironment", "train.grpo.environment")()
    assert environment.reset(**prompts[5]) is None
    task = generate_task(10_005, difficulty=difficulty)
    assert prompts[5]["prompt"] == [{"role": "user", "content": task.prompt}]
    assert environment.LS(path=ROOT) == Workspace(task).call("LS", {"path": ROOT}).text


def test_failing_calls_of_a_rollout_become_sites_of_their_kinds(tmp_path):
    """Through TRL's own loop and our trainer: parsed, run, rendered, judged by the rules."""
    pytest.importorskip("trl")
    from datasets import Dataset

    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from rollouts.tiny_policy import ScriptedGeneration, save_policy
    from rollouts.trainers import make, quick_config

    task = generate_task(SEED)
    calls = calls_of(task)
    rows = task_rows([SEED])
    config = quick_config(
        tmp_path / "out", per_device_train_batch_size=2, num_generations=2, max_completion_length=3600
    )
    policy = save_policy(tmp_path / "policy")
    trainer = make(
        ComposerReplicationTrainer,
        policy,
        config,
        reward_funcs=[],
        train_dataset=Dataset.from_list(rows),
        environment_factory=WorkspaceEnvironment,
        measure_channels=True,
    )
    trainer.model.config.max_position_embeddings = 8192
    turns = [*(spoken(*each) for each in calls), "It is done."]
    ScriptedGeneration(trainer, {rows[0]["prompt"][-1]["content"]: [turns]})
    output = trainer._generate_and_score_completions(rows * 2)
    workspace = Workspace(task)
    outcomes = [workspace.call(*each) for each in calls]
    expected = [(f"assistant-{turn}", each.kind) for turn, each in enumerate(outcomes) if each.kind]
    assert len(expected) == 6
    for sites in output["sdpo_sites"]:
        assert [(site.turn_id, site.kind) for site in sites] == expected
    assert output["advantages"].tolist() == [0.0, 0.0]
    assert [environment.get_reward() for environment in trainer.environments] == [1.0, 1.0]
