"""What TRL's trainer does on one or two steps of a tiny policy; ours does the same while its channels are off."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from rollouts.reference_loss import CLIPPED, LOSS_TYPES
from rollouts.tiny_policy import ScriptedGeneration, save_policy
from rollouts.trainers import (
    PROMPTS,
    TRAINERS,
    by_first_token,
    changed,
    make,
    prompts,
    quick_config,
    spy,
    trainer_named,
    weights,
)
from rollouts.watched_losses import assert_losses_agree, watch_losses

# Completions of unequal length, and the last one of each prompt without an end: it fills the budget.
SPOKEN = {text: [["yes"], ["not so"], ["the file failed and the tests ran on"]] for text in PROMPTS}
BUDGET = 8


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(params=TRAINERS)
def trainer_class(request):
    return trainer_named(request.param)


@pytest.fixture
def scripted(trainer_class, policy, tmp_path):
    """Makes a trainer whose three completions a prompt are known, with rewards that differ."""

    def build(**settings):
        named = {
            name: settings.pop(name) for name in ("reward_funcs", "peft_config", "eval_dataset") if name in settings
        }
        config = quick_config(tmp_path, max_completion_length=BUDGET, **settings)
        trainer = make(trainer_class, policy, config, **named)
        trainer.generation = ScriptedGeneration(trainer, SPOKEN)
        return trainer

    return build


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_a_step_changes_every_parameter_and_logs_what_was_sampled(trainer_class, policy, tmp_path):
    trainer = make(trainer_class, policy, quick_config(tmp_path, max_steps=2))
    before, generated = weights(trainer), spy(trainer, "_generate_single_turn")
    trainer.train()
    assert changed(before, trainer) == set(before)
    assert len(generated) == 2
    assert logged(trainer, "frac_reward_zero_std") == [0.0, 0.0]
    rewards = [by_first_token(result[0]) for *_, result in generated]
    torch.testing.assert_close(torch.tensor(logged(trainer, "reward")), torch.tensor(rewards).mean(1))


def test_equal_rewards_change_nothing(scripted):
    trainer = scripted(reward_funcs=lambda completions, **_: [1.0] * len(completions))
    before = weights(trainer)
    trainer.train()
    assert changed(before, trainer) == set()
    assert logged(trainer, "frac_reward_zero_std") == [1.0]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_loss_type_has_the_value_and_the_gradient_of_its_definition(scripted, loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    trainer = scripted(
        loss_type=loss_type, num_iterations=2, max_steps=2, learning_rate=3e-2, importance_sampling_level=level
    )
    before, watched = weights(trainer), watch_losses(trainer)
    trainer.train()
    assert_losses_agree(watched)
    (on_policy, *_), (off_policy, *_, logps) = watched
    assert off_policy is on_policy, "the second iteration goes over the same samples"
    assert not torch.equal(off_policy["old_per_token_logps"], logps), "the policy has moved"
    assert changed(before, trainer) == set(before)
    if loss_type in CLIPPED:
        low, high = logged(trainer, "clip_ratio/low_mean"), logged(trainer, "clip_ratio/high_mean")
        assert (low[0], high[0]) == (0.0, 0.0)
        assert low[1] + high[1] == pytest.approx(logged(trainer, "clip_ratio/region_mean")[1])
        assert low[1] + high[1] > 0, "nothing was clipped: the case shows too little"


def test_several_steps_and_accumulated_micro_batches_come_out_of_one_generation(scripted):
    trainer = scripted(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2, max_steps=4)
    watched, scored = watch_losses(trainer), spy(trainer, "_generate_and_score_completions")
    trainer.train()
    assert len(scored) == trainer.generation.num_calls == 1
    assert len(watched) == 8
    assert_losses_agree(watched)
    seen = [id(inputs) for inputs, *_ in watched]
    assert seen[:4] == seen[4:]
    assert len(set(seen)) == 4


def test_evaluation_scores_its_own_samples_and_trains_nothing(scripted):
    trainer = scripted(
        eval_dataset=prompts(PROMPTS[:2]), per_device_eval_batch_size=2, num_generations_eval=2, eval_strategy="steps"
    )
    before, scored = weights(trainer), spy(trainer, "_generate_and_score_completions")
    metrics = trainer.evaluate()
    assert changed(before, trainer) == set()
    assert [result["completion_ids"].shape[0] for *_, result in scored] == [2, 2]
    spoken = [
        [*trainer.processing_class.encode(words[0]), trainer.eos_token_ids[0]] for words in SPOKEN["It is not"][:2]
    ]
    assert metrics["eval_reward"] == pytest.approx(sum(by_first_token(spoken)) / 2)
    assert trainer._step == 0
    assert trainer._buffered_inputs is None
    trainer.train()
    assert logged(trainer, "eval_reward") == [metrics["eval_reward"]]


def test_multiple_iterations_generate_once_for_two_steps(scripted):
    trainer = scripted(num_iterations=2, max_steps=4)
    watched = watch_losses(trainer)
    trainer.train()
    assert trainer.generation.num_calls == 2
    assert all("old_per_token_logps" in inputs for inputs, *_ in watched)
    torch.testing.assert_close(watched[0][0]["old_per_token_logps"], watched[0][-1])


@pytest.mark.parametrize("is_corrected", [True, False])
def test_a_kl_weight_loads_the_reference_by_path_and_leaves_it_as_it_was(scripted, is_corrected):
    trainer = scripted(beta=0.3, max_steps=2, num_iterations=2, use_bias_correction_kl=is_corrected)
    start = {name: value.clone() for name, value in trainer.ref_model.named_parameters()}
    assert all(torch.equal(start[name], value) for name, value in weights(trainer).items())
    assert trainer.ref_model is not trainer.model
    watched = watch_losses(trainer)
    trainer.train()
    assert_losses_agree(watched)
    assert all(torch.equal(start[name], value) for name, value in trainer.ref_model.named_parameters())
    first, second = logged(trainer, "kl")
    assert abs(first) < 1e-6 < second


def test_an_adapter_is_trained_and_its_base_is_not(scripted):
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = scripted(peft_config=config, max_steps=2, beta=0.3)
    before, watched = weights(trainer), watch_losses(trainer)
    trainer.train()
    assert trainer.ref_model is None
    assert_losses_agree(watched)
    assert changed(before, trainer) == {name for name in before if "lora_" in name}


def test_a_reward_gets_the_columns_of_its_own_prompt(scripted_with_columns):
    trainer, seen = scripted_with_columns
    trainer.train()
    ((asked, answers, levels),) = seen
    wanted = {text: index for index, text in enumerate(PROMPTS)}
    assert len(asked) == 3
    assert len(set(asked)) == 1
    assert [wanted[text] for text in asked] == answers
    assert levels == [text.upper() for text in asked]


@pytest.fixture
def scripted_with_columns(trainer_class, policy, tmp_path):
    seen = []

    def graded(prompts, completion_ids, answer, level, **_columns):
        seen.append((prompts, answer, level))
        return by_first_token(completion_ids)

    rows = prompts(PROMPTS, answer=range(len(PROMPTS)), level=[text.upper() for text in PROMPTS])
    trainer = make(trainer_class, policy, quick_config(tmp_path), reward_funcs=graded, train_dataset=rows)
    ScriptedGeneration(trainer, SPOKEN)
    return trainer, seen


def test_a_truncated_completion_is_masked_out(scripted):
    trainer = scripted(mask_truncated_completions=True)
    watched = watch_losses(trainer)
    trainer.train()
    assert_losses_agree(watched)
    inputs, *_, gradient, _, _ = watched[0]
    is_cut = inputs["completion_ids"][:, -1] != trainer.processing_class.pad_token_id
    assert is_cut.sum() == 1
    assert inputs["completion_mask"].sum(1)[is_cut].tolist() == [0]
    assert (inputs["completion_mask"].sum(1)[~is_cut] > 0).all()
    assert gradient[is_cut].abs().max() == 0
    assert (gradient[~is_cut] != 0).equal(inputs["completion_mask"][~is_cut].bool())
    assert logged(trainer, "completions/clipped_ratio") == pytest.approx([1 / 3])
    assert inputs["num_items_in_batch"] == inputs["completion_mask"].sum()


def test_when_every_completion_is_truncated_nothing_changes(trainer_class, policy, tmp_path):
    trainer = make(
        trainer_class, policy, quick_config(tmp_path, mask_truncated_completions=True, max_completion_length=2)
    )
    ScriptedGeneration(trainer, {text: [["the file"], ["not so much"], ["tests ran"]] for text in PROMPTS})
    before = weights(trainer)
    trainer.train()
    assert logged(trainer, "completions/clipped_ratio") == [1.0]
    assert logged(trainer, "loss") == logged(trainer, "grad_norm") == [0.0]
    assert changed(before, trainer) == set()


def test_the_off_policy_mask_drops_bad_sequences_that_became_unlikely(scripted):
    trainer = scripted(off_policy_mask_threshold=1e-4, num_iterations=2, max_steps=2, loss_type="grpo")
    watched, masks = watch_losses(trainer), spy(trainer, "get_off_policy_mask")
    trainer.train()
    assert_losses_agree(watched)
    (first, second) = (result.flatten().tolist() for *_, result in masks)
    assert first == [1.0, 1.0, 1.0]
    advantages = watched[1][0]["advantages"]
    assert [kept for kept, advantage in zip(second, advantages, strict=True) if advantage >= 0] == [1.0] * sum(
        advantages >= 0
    )
    assert 0.0 in second


def test_sequence_level_ratios_are_one_number_a_sequence(scripted):
    trainer = scripted(importance_sampling_level="sequence", num_iterations=2, max_steps=2, loss_type="grpo")
    watched = watch_losses(trainer)
    trainer.train()
    assert_losses_agree(watched)
    gradient, mask = watched[1][3], watched[1][0]["completion_mask"].bool()
    for row, kept in zip(gradient, mask, strict=True):
        assert torch.allclose(row[kept], row[kept][0].expand_as(row[kept]))


def test_delta_caps_the_ratio_where_clipping_does_not(scripted):
    trainer = scripted(delta=1.25, num_iterations=2, loss_type="grpo")
    score = trainer._generate_and_score_completions

    def score_as_if_every_token_had_become_likelier(rows):
        output = score(rows)
        return {**output, "old_per_token_logps": output["old_per_token_logps"] - 0.4}

    trainer._generate_and_score_completions = score_as_if_every_token_had_become_likelier
    watched = watch_losses(trainer)
    trainer.train()
    assert_losses_agree(watched)
    inputs, loss, *_, gradient, _, _ = watched[0]
    advantages = inputs["advantages"]
    assert gradient.abs().max() == 0  # exp(0.4) is over 1 + epsilon for the good and over delta for the bad
    used = torch.where(advantages < 0, 1.25, 1 + trainer.epsilon_high)
    assert loss.item() == pytest.approx(-(used * advantages).mean().item(), abs=1e-6)


def test_the_entropy_filter_leaves_the_uncertain_tokens_only(scripted):
    trainer = scripted(top_entropy_quantile=0.5)
    watched, masks = watch_losses(trainer), spy(trainer, "get_high_entropy_mask")
    trainer.train()
    assert_losses_agree(watched)
    ((_, _, kept),) = masks
    inputs, _, _, gradient, _, _ = watched[0]
    num_tokens = int(inputs["completion_mask"].sum())
    assert kept.sum() == (num_tokens + 1) // 2
    assert (gradient != 0).equal(kept & (inputs["advantages"] != 0)[:, None])


def test_the_entropy_bonus_is_the_mean_entropy_times_its_weight(scripted):
    trainer = scripted(entropy_coef=0.25)
    watched = watch_losses(trainer)
    trainer.train()
    assert_losses_agree(watched)
    (entropy,), (policy_loss,) = logged(trainer, "entropy"), logged(trainer, "policy_loss")
    assert watched[0][1].item() == pytest.approx(policy_loss - 0.25 * entropy, abs=1e-5)
    assert logged(trainer, "entropy_coef") == [0.25]


def test_a_generation_batch_repeats_each_prompt_and_comes_again_for_each_micro_step(scripted):
    trainer = scripted(
        steps_per_generation=2, num_iterations=2, max_steps=3, shuffle_dataset=False, gradient_accumulation_steps=2
    )
    prepared = spy(trainer, "_prepare_inputs")
    trainer.train()
    asked = [[row["prompt"] for row in arguments[0]] for arguments, *_ in prepared]
    first, second = ([text for text in pair for _ in range(3)] for pair in (PROMPTS[:2], PROMPTS[2:]))
    assert asked == [first] * 4 + [second] * 2
    assert trainer.generation.num_calls == 2
    assert [result["completion_ids"].size(0) for *_, result in prepared] == [3] * 6
