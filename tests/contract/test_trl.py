"""What our trainer's overrides take for granted about TRL and transformers.

If one of these fails after an upgrade, its message names what moved, and what rests on it.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
import trl
from trl import GRPOTrainer
from trl.trainer import utils as trl_batches

from rollouts.tiny_policy import ScriptedGeneration, save_policy
from rollouts.trainers import PROMPTS, by_first_token, make, prompts, questions, quick_config, spy
from rollouts.workshop import Workshop

SAYS = f"trl {trl.__version__} with transformers {transformers.__version__}"
ALWAYS = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"]
SIGNATURES = {
    "_prepare_inputs": ["generation_batch"],
    "_generate": ["prompts"],
    "_generate_and_score_completions": ["inputs"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
    "_tool_call_loop": [
        "prompts",
        "prompt_ids",
        "completion_ids",
        "completions",
        "logprobs",
        "images",
        "multimodal_fields",
    ],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_compute_loss": ["model", "inputs"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "log": ["logs", "start_time"],
    "_save_checkpoint": ["model", "trial"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def build(policy, tmp_path):
    def built(spoken=None, *, settings=None, **named):
        trainer = make(GRPOTrainer, policy, quick_config(tmp_path, **(settings or {})), **named)
        if spoken is not None:
            ScriptedGeneration(trainer, dict.fromkeys(PROMPTS, spoken))
        return trainer

    return built


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items(), ids=list(SIGNATURES))
def test_an_overridden_method_keeps_its_parameters(name, expected):
    assert hasattr(GRPOTrainer, name), f"{SAYS}: GRPOTrainer.{name} is gone"
    found = [each for each in inspect.signature(getattr(GRPOTrainer, name)).parameters if each != "self"]
    assert found == expected, f"{SAYS}: GRPOTrainer.{name} takes {found}, the overrides expect {expected}"


def test_the_scoring_forward_keeps_its_first_parameters():
    name = "_get_per_token_logps_and_entropies"
    found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)[1:8]
    expected = ["model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert found[:6] == expected, f"{SAYS}: {name} begins with {found}"


def test_the_constructor_has_no_data_collator_and_ends_with_the_rollout_parameters():
    found = list(inspect.signature(GRPOTrainer.__init__).parameters)[1:]
    assert "data_collator" not in found, f"{SAYS}: GRPOTrainer takes a data_collator now; ours has its own of that name"
    expected = ["peft_config", "tools", "rollout_func", "environment_factory"]
    assert found[-4:] == expected, f"{SAYS}: the last constructor parameters are {found[-4:]}, expected {expected}"


def test_the_loss_is_already_scaled_for_accumulation():
    message = f"{SAYS}: loss_is_scaled_for_ga is no longer True; extra loss terms must not be divided by hand any more"
    assert GRPOTrainer.loss_is_scaled_for_ga is True, message


@pytest.mark.parametrize(
    ("settings", "extra"),
    [
        ({}, []),
        ({"beta": 0.1}, ["ref_per_token_logps"]),
        ({"num_iterations": 2}, ["old_per_token_logps"]),
        ({"steps_per_generation": 2}, ["old_per_token_logps"]),
        ({"gradient_accumulation_steps": 2}, []),
        ({"beta": 0.1, "num_iterations": 2}, ["old_per_token_logps", "ref_per_token_logps"]),
    ],
    ids=["plain", "beta", "iterations", "off-policy steps", "accumulation", "beta and iterations"],
)
def test_the_batch_has_these_keys(build, settings, extra):
    trainer = build([["yes"], ["no"], ["not so"]], settings=settings)
    output = trainer._generate_and_score_completions([{"prompt": PROMPTS[0]}] * 3)
    assert list(output) == ALWAYS + extra, f"{SAYS}: the batch of {settings} has the keys {list(output)}"
    assert output["advantages"].shape == (3,), f"{SAYS}: advantages are no longer one a sequence"
    assert output["num_items_in_batch"].ndim == 0, f"{SAYS}: num_items_in_batch is no 0-dim tensor any more"


def test_a_batch_with_tools_ends_with_the_tool_mask_which_is_padded_with_ones(build):
    trainer = build([["yes"], ["not so"], ["no"]], environment_factory=Workshop, train_dataset=questions())
    output = trainer._generate_and_score_completions([{"prompt": [{"role": "user", "content": PROMPTS[0]}]}] * 3)
    assert list(output) == [*ALWAYS, "tool_mask"], f"{SAYS}: with tools the batch has the keys {list(output)}"
    assert (output["tool_mask"] == 1).all(), f"{SAYS}: padding of tool_mask is not 1: runs of ones would move"


def test_generation_returns_eight_values_in_this_order(build):
    trainer = build([["yes"], ["not so"], ["no"]], environment_factory=Workshop, train_dataset=questions())
    calls = spy(trainer, "_generate")
    trainer._generate_and_score_completions([{"prompt": [{"role": "user", "content": PROMPTS[0]}]}] * 3)
    result = calls[0][2]
    assert len(result) == 8, f"{SAYS}: _generate returns {len(result)} values, the override unpacks 8"
    prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, _ = result
    assert [len(ids) for ids in completion_ids] == [len(mask) for mask in tool_mask], f"{SAYS}: values moved"
    assert [messages[0]["role"] for messages in completions] == ["assistant"] * 3, f"{SAYS}: completions moved"
    assert len(prompt_ids) == 3
    assert (logprobs, extra_fields, images) == (None, {}, None), f"{SAYS}: the last values of _generate moved"


def test_a_training_step_calls_the_overrides_in_this_order(build):
    trainer, order = build([["yes"], ["no"], ["not so"]], settings={"beta": 0.1, "num_iterations": 2}), []
    names = [
        "_prepare_inputs",
        "_generate_and_score_completions",
        "_generate",
        "_generate_single_turn",
        "_get_per_token_logps_and_entropies",
        "_calculate_rewards",
        "compute_loss",
        "_compute_loss",
    ]
    for name in names:
        _note_entry(trainer, name, order)
    trainer.train()
    scores = ["_get_per_token_logps_and_entropies"]
    expected = [*names[:4], *scores * 2, "_calculate_rewards", "compute_loss", "_compute_loss", *scores]
    assert order == expected, f"{SAYS}: a step (old and reference scores included) ran {order}"


def _note_entry(trainer, name, order):
    original = getattr(trainer, name)

    def entered(*positional, **named):
        order.append(name)
        return original(*positional, **named)

    setattr(trainer, name, entered)


def test_the_buffer_is_a_list_of_micro_batches_indexed_by_the_step(build):
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 2}
    trainer = build([["yes"], ["no"], ["not so"]], settings=settings)
    assert (trainer._step, trainer._buffered_inputs) == (0, None), f"{SAYS}: _step or _buffered_inputs begins otherwise"
    losses = spy(trainer, "_compute_loss")
    trainer.train()
    assert trainer._step == 4, f"{SAYS}: _step counts {trainer._step} after 4 micro-batches"
    assert isinstance(trainer._buffered_inputs, list), f"{SAYS}: _buffered_inputs is {type(trainer._buffered_inputs)}"
    used = [next(i for i, kept in enumerate(trainer._buffered_inputs) if kept is call[0][1]) for call in losses]
    assert used == [0, 1, 0, 1], f"{SAYS}: micro-batch {used} of the buffer were used, not _step % steps_per_generation"


def test_a_lost_buffer_is_generated_anew(build):
    trainer = build([["yes"], ["no"], ["not so"]], settings={"num_iterations": 4})
    trainer.model.train()
    trainer._step = 1
    scored = spy(trainer, "_generate_and_score_completions")
    trainer._prepare_inputs([{"prompt": PROMPTS[0]}] * 3)
    trainer._step = 2
    trainer._prepare_inputs([{"prompt": PROMPTS[0]}] * 3)
    assert len(scored) == 1, f"{SAYS}: an empty buffer is not filled in the middle of a window; resume rests on it"


def test_keys_added_to_a_batch_reach_the_loss_shuffled_and_split_in_unison(build):
    trainer = build(
        [["yes"], ["no"], ["not so"]], settings={"steps_per_generation": 2, "gradient_accumulation_steps": 2}
    )
    score = trainer._generate_and_score_completions

    def with_sites(rows):
        output = score(rows)
        firsts = [[int(ids[0])] * index for index, ids in enumerate(output["completion_ids"])]
        return {**output, "sites": firsts, "first": output["completion_ids"][:, 0].clone(), "whole": torch.tensor(7)}

    trainer._generate_and_score_completions = with_sites
    losses = spy(trainer, "_compute_loss")
    trainer.train()
    seen = []
    for (_, inputs), *_ in losses:
        assert inputs["first"].equal(inputs["completion_ids"][:, 0]), f"{SAYS}: added tensors are not shuffled along"
        assert isinstance(inputs["sites"], list), f"{SAYS}: an added list arrives as {type(inputs['sites'])}"
        assert len(inputs["sites"]) == 3, f"{SAYS}: an added list is not split into micro-batches"
        for sites, ids in zip(inputs["sites"], inputs["completion_ids"], strict=True):
            assert set(sites) <= {int(ids[0])}, f"{SAYS}: an added list is not shuffled along"
            seen.append(len(sites))
        assert inputs["whole"].item() == 7, f"{SAYS}: a 0-dim tensor does not arrive whole"
    assert sorted(seen) == list(range(6))


def test_lists_and_tensors_are_shuffled_alike_and_whole_numbers_are_not_split():
    batch = {"x": torch.arange(6), "y": list("abcdef"), "z": torch.tensor(5), "none": None}
    mixed = trl_batches.shuffle_sequence_dict(batch)
    assert mixed["y"] == [batch["y"][i] for i in mixed["x"]], f"{SAYS}: shuffle_sequence_dict permutes lists otherwise"
    assert mixed["z"].item() == 5
    parts = trl_batches.split_tensor_dict(mixed, 3)
    assert [part["y"] for part in parts] == [mixed["y"][i : i + 2] for i in (0, 2, 4)], f"{SAYS}: lists split otherwise"
    assert all(part["z"] is mixed["z"] and part["none"] is None for part in parts), f"{SAYS}: 0-dim tensors are split"


def test_the_shuffle_draws_from_the_global_generator_once():
    torch.manual_seed(3)
    expected = torch.randperm(6)
    torch.manual_seed(3)
    mixed = trl_batches.shuffle_sequence_dict({"x": torch.arange(6)})
    assert mixed["x"].equal(expected), f"{SAYS}: the shuffle draws other random numbers; bit-equal resume rests on them"


def test_the_fused_head_runs_the_backbone_once_a_micro_batch_and_gives_no_logits(build):
    trainer = build([["yes"], ["no"], ["not so"]], settings={"gradient_accumulation_steps": 2})
    shapes = []
    hook = trainer.model.base_model.register_forward_hook(
        lambda _module, _arguments, output: shapes.append(output.last_hidden_state.shape)
    )
    losses = spy(trainer, "_compute_loss")
    trainer.train()
    hook.remove()
    wanted = [(3, inputs["prompt_ids"].size(1) + inputs["completion_ids"].size(1), 32) for (_, inputs), *_ in losses]
    assert shapes == wanted, f"{SAYS}: the backbone ran over {shapes}; capturing expects prompt + completion once"
    ids = torch.tensor([[5, 6, 7]])
    output = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True)
    assert not hasattr(output, "logits"), f"{SAYS}: the fused head returns logits now"
    assert output.log_probs.shape == (1, 2), f"{SAYS}: log_probs have the shape {tuple(output.log_probs.shape)}"


def test_the_temperature_is_part_of_the_fused_head(build):
    trainer = build(settings={"temperature": 0.5})
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        fused = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        logits = trainer.model(input_ids=ids).logits[:, :-1] / 0.5
    plain = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    assert torch.allclose(fused, plain, atol=1e-5), f"{SAYS}: the fused head no longer divides by the temperature"


def test_a_tool_exception_becomes_the_text_of_a_dict_with_the_key_error(build):
    broken = '<tool_call>\n{"name": "read_file", "arguments": {"path": "gone"}}\n</tool_call>'
    unknown = '<tool_call>\n{"name": "grep", "arguments": {}}\n</tool_call>'
    spoken = [[broken, "done"], [unknown, "done"], ["done"]]
    trainer = build(
        spoken, settings={"max_completion_length": 300}, environment_factory=Workshop, train_dataset=questions()
    )
    calls = spy(trainer, "_generate")
    trainer._generate_and_score_completions([{"prompt": [{"role": "user", "content": PROMPTS[0]}]}] * 3)
    results = [[each for each in messages if each["role"] == "tool"] for messages in calls[0][2][3]]
    texts = ["[Errno 2] No such file or directory: 'gone'", "Tool grep not found."]
    expected = [
        [{"role": "tool", "name": name, "content": str({"error": text})}]
        for name, text in zip(("read_file", "grep"), texts, strict=True)
    ]
    assert results[:2] == expected, f"{SAYS}: a tool's exception is recorded as {results[:2]}; sites are read from it"


def test_environments_are_pooled_and_stand_in_the_order_of_the_rows(build):
    trainer = build([["yes"], ["no"], ["not so"]], environment_factory=Workshop, train_dataset=questions())
    rows = [{"prompt": [{"role": "user", "content": PROMPTS[0]}]}] * 3
    trainer._generate_and_score_completions(rows)
    first = list(trainer.environments)
    trainer._generate_and_score_completions(rows)
    assert len(first) == 3, f"{SAYS}: {len(first)} environments for 3 rows"
    assert [a is b for a, b in zip(first, trainer.environments, strict=True)] == [True] * 3, f"{SAYS}: not pooled"


def test_columns_of_a_row_reach_the_rewards_and_never_the_loss(build):
    seen = []

    def graded(completion_ids, mark, **_columns):
        seen.append(mark)
        return by_first_token(completion_ids)

    rows = prompts(mark=["here"] * 4)
    trainer = build([["yes"], ["no"], ["not so"]], reward_funcs=graded, train_dataset=rows)
    losses = spy(trainer, "_compute_loss")
    trainer.train()
    assert seen == [["here"] * 3]
    assert "mark" not in losses[0][0][1], f"{SAYS}: columns reach _compute_loss now; a collator could bring channel 3"
