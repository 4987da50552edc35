"""What TRL's trainer does with tools, environments and rollout functions; ours does the same."""

from __future__ import annotations

import pytest
import torch

from data.scripted_rollout_types import call, failed
from rollouts.tiny_policy import ScriptedGeneration, load_tokenizer, save_policy, turn_ids
from rollouts.trainers import (
    PROMPTS,
    TRAINERS,
    by_first_token,
    changed,
    make,
    questions,
    quick_config,
    spy,
    trainer_named,
    weights,
)

ADD = call("add", first=3, second=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def build(request, policy, tmp_path):
    """Makes a trainer of the class under test whose rollouts are given, the same for every prompt.

    `observed` are the texts an environment may put behind a prompt when it is reset.
    """

    def built(spoken, *, config=None, observed=("",), **named):
        named.setdefault("train_dataset", questions())
        settings = {"max_completion_length": 400, "num_generations": 3, **(config or {})}
        trainer = make(trainer_named(request.param), policy, quick_config(tmp_path, **settings), **named)
        scripts = {text + more: spoken for text in PROMPTS for more in observed}
        trainer.generation = ScriptedGeneration(trainer, scripts)
        return trainer

    return built


both = pytest.mark.parametrize("build", TRAINERS, indirect=True)


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def train_and_look(trainer):
    """The one micro-batch of a step, what `_generate` gave for it, and whether the model learnt from it."""
    generated, losses = spy(trainer, "_generate"), spy(trainer, "_compute_loss")
    before = weights(trainer)
    trainer.train()
    assert changed(before, trainer) == set(before)
    ((_, inputs), _, _), (_, _, output) = losses[0], generated[0]
    return inputs, output


@both
def test_tools_are_called_and_their_results_are_masked_out(build):
    asked = []

    def add(first: int, second: int) -> int:
        """Adds.

        Args:
            first: a number
            second: a number
        """
        asked.append((first, second))
        return first + second

    async def halve(number: int) -> int:
        """Halves.

        Args:
            number: an even number
        """
        asked.append(number)
        if number % 2:
            raise ValueError("the number is odd")
        return number // 2

    spoken = [[ADD, call("halve", number=7), "7 is odd."], ["No tool."], [call("halve", number=8), "It is 4."]]
    trainer = build(spoken, tools=[add, halve])
    inputs, (_, ids, masks, messages, *_) = train_and_look(trainer)
    assert asked == [(3, 4), 8, 7]
    results = [[message["content"] for message in each if message["role"] == "tool"] for each in messages]
    assert results == [["7", failed("the number is odd")], [], ["4"]]
    own = [sum(len(turn_ids(trainer.processing_class, turn)) for turn in turns) for turns in spoken]
    assert [sum(mask) for mask in masks] == own
    assert [len(mask) for mask in masks] == [len(each) for each in ids]
    assert inputs["num_items_in_batch"] == sum(own) == (inputs["tool_mask"] * inputs["completion_mask"]).sum()
    assert inputs["completion_mask"].sum() == sum(map(len, ids))
    assert logged(trainer, "tools/call_frequency") == [1.0]
    assert logged(trainer, "tools/failure_frequency") == pytest.approx([1 / 3])
    assert trainer.generation.num_calls == 3


class Counter:
    """Counts up to a goal that its row sets."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.goals = []

    def reset(self, goal, **row):
        assert row["prompt"][0]["role"] == "user"
        self.goals.append(goal)
        self.total = 0
        return f" Goal: {goal}."

    def increase(self, by: int) -> int:
        """Counts on.

        Args:
            by: how far
        """
        self.total += by
        return self.total

    def get_reward(self):
        return -abs(self.goals[-1] - self.total)


@both
def test_an_environment_is_reset_with_its_row_and_may_own_the_reward(build):
    Counter.made = 0
    near, far = call("increase", by=4), call("increase", by=1)
    spoken = [[near, far, "5"], [near, "4"], ["0"]]
    trainer = build(
        spoken,
        environment_factory=Counter,
        reward_funcs=None,
        train_dataset=questions(goal=[5] * 4),
        config={"max_steps": 2},
        observed=[" Goal: 5."],
    )
    inputs, _ = train_and_look(trainer)
    assert [each.total for each in trainer.environments] == [5, 4, 0]
    assert [each.goals for each in trainer.environments] == [[5, 5]] * 3
    assert Counter.made == 3, "three rollouts a batch, and the instances are used again"
    assert logged(trainer, "rewards/Counter/mean") == pytest.approx([-2.0, -2.0])
    rewards = torch.tensor([0.0, -1.0, -5.0])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    torch.testing.assert_close(inputs["advantages"].sort().values, advantages.sort().values)


class Doubler:
    """Another environment, with a tool of its own."""

    def reset(self, **_row):
        self.doubled = []

    def double(self, number: int) -> int:
        """Doubles.

        Args:
            number: a number
        """
        self.doubled.append(number)
        return 2 * number


@both
def test_several_environments_each_offer_their_own_tools(build):
    rows = questions(goal=[5] * 4, environment=["counter", "doubler", "counter", "doubler"])
    trainer = build(
        [[call("double", number=4), "8"], [call("double", number=5), call("increase", by=1), "1"], ["none"]],
        environment_factory={"counter": Counter, "doubler": Doubler},
        reward_funcs=by_first_token,
        train_dataset=rows,
        observed=["", " Goal: 5."],
        config={"steps_per_generation": 2, "gradient_accumulation_steps": 2, "shuffle_dataset": False},
    )
    _, (prompt_ids, _, _, messages, *_) = train_and_look(trainer)
    assert [type(each) for each in trainer.environments] == [Counter] * 3 + [Doubler] * 3
    results = [[message["content"] for message in each if message["role"] == "tool"] for each in messages]
    not_found = failed("Tool double not found.")
    assert results[:3] == [[not_found], [not_found, "1"], []]
    assert results[3:] == [["8"], ["10", failed("Tool increase not found.")], []]
    offered = [trainer.processing_class.decode(ids) for ids in prompt_ids]
    assert ['"double"' in text for text in offered] == [False] * 3 + [True] * 3
    assert ['"increase"' in text for text in offered] == [True] * 3 + [False] * 3


@both
def test_a_malformed_call_is_kept_as_text_and_ends_the_rollout(build):
    broken = '<tool_call>\n{"name": "double", "arguments": {"number": 4}\n</tool_call>'
    nameless = '<tool_call>\n{"arguments": {"number": 4}}\n</tool_call>'
    trainer = build([[broken], [nameless], ["fine"]], environment_factory=Doubler, reward_funcs=by_first_token)
    inputs, (_, ids, masks, messages, *_) = train_and_look(trainer)
    assert [each for (each,) in messages] == [
        {"role": "assistant", "content": text} for text in (broken, nameless, "fine")
    ]
    assert masks == [[1] * len(each) for each in ids]
    assert trainer.generation.num_calls == 1
    assert logged(trainer, "tools/call_frequency") == [0.0]
    assert inputs["num_items_in_batch"] == sum(map(len, ids))


@both
def test_a_result_that_does_not_fit_is_taken_back(build, policy):
    long = call("double", number=int("7" * 120))
    spoken = [[call("double", number=1), long], [call("double", number=2), "4"], ["fine"]]
    limit = len(turn_ids(load_tokenizer(policy), long)) + 140
    trainer = build(
        spoken, environment_factory=Doubler, reward_funcs=by_first_token, config={"max_completion_length": limit}
    )
    _, (_, ids, masks, messages, *_) = train_and_look(trainer)
    assert [message["role"] for message in messages[0]] == ["assistant", "tool", "assistant"]
    assert len(ids[0]) == len(masks[0]) <= limit
    assert masks[0][-1] == 1
    assert trainer.environments[0].doubled == [1, int("7" * 120)], "the call was made all the same"


@both
def test_a_rollout_function_is_asked_once_and_its_env_mask_decides_what_counts(build):
    seen, prompts_seen = [], []

    def rolled(prompts, trainer):
        prompts_seen.append([prompt[-1]["content"] for prompt in prompts])
        return {
            "prompt_ids": [[5, 6, 7]] * len(prompts),
            "completion_ids": [[40 + index, 50, 60, 70] for index in range(len(prompts))],
            "logprobs": [[-1.0] * 4] * len(prompts),
            "env_mask": [[1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]],
            "mark": [f"mark {index}" for index in range(len(prompts))],
        }

    def graded(completion_ids, mark, **columns):
        seen.append((mark, "env_mask" in columns))
        return by_first_token(completion_ids)

    trainer = build([], rollout_func=rolled, reward_funcs=graded)
    inputs, output = train_and_look(trainer)
    assert trainer.generation.num_calls == 0
    assert len(prompts_seen) == 1
    assert len(set(prompts_seen[0])) == 1
    assert seen == [(["mark 0", "mark 1", "mark 2"], False)]
    assert sorted(inputs["tool_mask"].tolist()) == sorted(output[2])
    assert inputs["num_items_in_batch"] == 9
    assert inputs["sampling_per_token_logps"].tolist() == [[-1.0] * 4] * 3
    assert logged(trainer, "completions/mean_length") == [3.0]


@both
def test_a_rollout_function_that_forgets_a_key_is_told_which(build):
    trainer = build([], rollout_func=lambda prompts, trainer: {"prompt_ids": [], "logprobs": []})
    with pytest.raises(ValueError, match="completion_ids"):
        trainer.train()
