"""Tokens from kept keys are those of transformers' own loop: any family, any lengths, over turns, as rows end."""

from __future__ import annotations

import pytest
import torch
from kept_rows import EOS, VOCAB, new_tokens, padded, random_rows, small_model

from composer_replication.trainer.objective.attention.attend import accept_self_attending_masks
from composer_replication.trainer.rollouts.generation import generator as loop_module
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.generation.row_cache import KeyValueRows, NextTokens, read_tokens
from model_families import FAMILIES, build

ROWS = random_rows((18, 15, 11, 18, 13, 1))
ROWS[3] = list(ROWS[0])
FAST = ("Qwen2", "Qwen3", "Llama", "Mistral", "Gemma-3", "OLMo-2", "GPT-NeoX", "OPT", "DeepSeek-V3", "Qwen3-MoE")
LEFT = {
    "Gemma-2": "eager",
    "GPT-2": "AttributeError",
    "LFM2": "1 conv of 2",
    "Falcon, ALiBi": "ALiBi",
    "Qwen3-Next": "1 linear_attention of 2",
    "Falcon-H1": "2 hybrid of 2",
    "Doge": "28 tokens",
}
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, key and value, heads, size, bytes
SETTINGS = {
    "greedy": {"do_sample": False},
    "plain": {"do_sample": True, "top_k": 0},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"do_sample": True, "top_k": 0, "repetition_penalty": 1.3},
}


def seeded(generate, *, seed=1, **inputs):
    torch.manual_seed(seed)
    return generate(**inputs)


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.mark.parametrize("name", [*FAST, *LEFT])
def test_greedy_tokens_are_those_of_transformers_in_every_family(name):
    policy, generator = build(name), RolloutGenerator()
    inputs = {**padded(ROWS), "max_new_tokens": 10, "do_sample": False}
    expected = policy.generate(**inputs)
    assert torch.equal(generator.generate(policy, **inputs), expected)
    said = " ".join(generator.left_because)
    assert (LEFT[name] in said) if name in LEFT else not said
    assert generator.counts["usual_calls" if name in LEFT else "fast_calls"] == 1
    assert FAMILIES[name].kind in policy.config.model_type


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_the_same_seed_draws_the_same_tokens_as_transformers(model, settings):
    inputs = {**padded(ROWS), "max_new_tokens": 40, **settings}
    generator = RolloutGenerator()
    expected = seeded(model.generate, **inputs)
    found = seeded(lambda **given: generator.generate(model, **given), **inputs)
    assert torch.equal(found, expected)
    assert torch.equal(seeded(lambda **given: generator.generate(model, **given), **inputs), expected)
    assert not generator.left_because


def test_rows_that_ended_are_left_out_and_change_nothing(model, monkeypatch):
    RolloutGenerator().generate(model, **padded(ROWS), max_new_tokens=1)  # the experiment with the model comes first
    sizes = []
    usual = NextTokens.logits
    monkeypatch.setattr(
        NextTokens, "logits", lambda self, tokens, *given: sizes.append(len(tokens)) or usual(self, tokens, *given)
    )
    inputs = {**padded(ROWS), "max_new_tokens": 60, "do_sample": True, "top_k": 0}
    expected = seeded(model.generate, **inputs)
    lengths = sorted({len(each) for each in new_tokens(expected, ROWS)})
    assert len(lengths) > 3, "the rows have to end at different lengths"
    generator = RolloutGenerator()
    assert torch.equal(seeded(lambda **given: generator.generate(model, **given), **inputs), expected)
    assert sizes[0] == 6
    assert sizes[-1] <= 3
    assert generator.counts["new_tokens"] == sum(len(each) for each in new_tokens(expected, ROWS))


@pytest.mark.parametrize("looks_every", [1, 8], ids=["every step", "every eighth"])
def test_turns_go_on_from_kept_keys_with_the_tokens_of_a_fresh_start(model, monkeypatch, looks_every):
    monkeypatch.setattr(loop_module, "_STEPS_BETWEEN_CHECKS", {"cpu": looks_every})
    generator = RolloutGenerator()
    settings = {"max_new_tokens": 30, "do_sample": False}
    rows, read = [list(row) for row in ROWS], []
    with generator.rollout():
        for turn in range(3):
            expected = model.generate(**padded(rows), **settings)
            found = generator.generate(model, **padded(rows), **settings)
            said = new_tokens(found, rows)
            assert said == new_tokens(expected, rows)
            read.append(generator.counts["read_tokens"])
            tools = random_rows((4, 9, 2, 7, 5, 3)[: len(rows)], seed=turn)
            rows = [row + new + tool for row, new, tool in zip(rows, said, tools, strict=True)]
            rows = rows[1:] if turn else rows  # TRL goes on with those that called a tool
    assert read[1] - read[0] == 4 + 9 + 2 + 7 + 5 + 3, "the last token of the turn and what tools said, less the last"
    assert generator.counts["fast_calls"] == 3


def test_a_row_that_differs_from_what_is_kept_is_read_anew_from_there(model):
    rows = random_rows((20, 20))
    generator, settings = RolloutGenerator(), {"max_new_tokens": 6, "do_sample": False}
    with generator.rollout():
        first = new_tokens(generator.generate(model, **padded(rows), **settings), rows)
        before = generator.counts["read_tokens"]
        other = (first[0][2] - 3 + 1) % (VOCAB - 3) + 3
        changed = [rows[0] + first[0][:2] + [other] * 3, rows[1] + first[1][:4] + [5, 6]]
        found = generator.generate(model, **padded(changed), **settings)
    assert torch.equal(found, model.generate(**padded(changed), **settings))
    assert (
        generator.counts["read_tokens"] - before == 2 + 1
    )  # but for the last token of each, which the first step reads


def test_nothing_is_kept_from_one_batch_of_rollouts_to_the_next(model):
    rows, settings = random_rows((20,)), {"max_new_tokens": 5, "do_sample": False}
    generator = RolloutGenerator()
    for _ in range(2):
        with generator.rollout():
            generator.generate(model, **padded(rows), **settings)
    assert generator.counts["read_tokens"] == 2 * 19


def test_what_a_group_shares_is_read_once(model):
    prompts = random_rows((90, 70, 80))
    begins_alike = [prompts[0][:66] + each[66:] for each in prompts]
    for rows, expected in ((prompts, 89 + 69 + 79), (begins_alike, 66 + 23 + 3 + 13)):
        groups = [row for row in rows for _ in range(4)]
        generator, settings = RolloutGenerator(), {"max_new_tokens": 6, "do_sample": False}
        found = generator.generate(model, **padded(groups), **settings)
        assert torch.equal(found, model.generate(**padded(groups), **settings))
        assert generator.counts["read_tokens"] == expected
        assert generator.counts["prompt_tokens"] == 4 * (sum(map(len, rows)) - 3)


def test_logits_from_pieces_are_those_of_the_whole_row(model):
    rows, cache, steps = random_rows((25, 8, 17)), KeyValueRows(3, 30), []
    with torch.no_grad(), accept_self_attending_masks(model):
        for ends in ((4, 0, 9), (4, 5, 12), (20, 6, 13)):
            read_tokens(model, cache, [row[:end] for row, end in zip(rows, ends, strict=True)])
        step = NextTokens(model, cache, record=False)
        for slots in ([20, 6, 13], [21, 7, 14]):
            tokens = torch.tensor([row[slot] for row, slot in zip(rows, slots, strict=True)])
            steps.append((slots, step.logits(tokens, torch.tensor(slots), 30)))
    assert model.config._attn_implementation == "sdpa"
    for slots, found in steps:
        expected = [model(torch.tensor([row[: at + 1]])).logits[0, -1] for row, at in zip(rows, slots, strict=True)]
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_few_at_a_time_gives_the_same_tokens_and_a_smaller_cache(model):
    inputs = {**padded(ROWS), "max_new_tokens": 12, "do_sample": False}
    whole, parts = RolloutGenerator(), RolloutGenerator(batch=2)
    assert torch.equal(parts.generate(model, **inputs), whole.generate(model, **inputs))
    assert parts.counts["cache_bytes"] < whole.counts["cache_bytes"]
    assert whole.counts["cache_bytes"] == len(ROWS) * (17 + 12 + 1) * TOKEN_BYTES


def test_a_budget_ends_rows_that_have_spent_it_in_earlier_turns(model):
    rows, generator = random_rows((10, 10), seed=5), RolloutGenerator()
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with generator.rollout(budget=20):
        first = generator.generate(model, **padded(rows), **settings)[:, 10:].tolist()
        longer = [rows[0] + first[0] + [7] * 6, rows[1] + first[1][:3] + [7]]
        found = generator.generate(model, **padded(longer), **settings)
    expected = model.generate(**padded(longer), **settings)
    width = max(map(len, longer))
    assert found[0, width : width + 2].tolist() == expected[0, width : width + 2].tolist()
    assert found[0, width + 2 :].tolist() == [0] * 10
    assert found[1].tolist() == expected[1].tolist()
    copies = 2 + 1  # the row that runs on by itself has one
    assert generator.counts["cache_bytes"] == copies * (9 + 20 + 1) * TOKEN_BYTES


def test_tokens_are_drawn_with_their_probabilities():
    """Chi-square of 4000 first and second tokens against the model's own probabilities, with a fixed seed."""
    model, row = small_model(initializer_range=0.05), random_rows((9,))[0]
    settings = {"max_new_tokens": 2, "do_sample": True, "temperature": 1.3, "top_k": 0, "eos_token_id": None}
    inputs = padded([row] * 4000)
    found = seeded(lambda **given: RolloutGenerator().generate(model, **given), **inputs, **settings, pad_token_id=0)
    with torch.no_grad():
        first_V = (model(torch.tensor([row])).logits[0, -1] / 1.3).softmax(-1)
        after = torch.tensor([[*row, token] for token in range(VOCAB)])
        second_V = first_V @ (model(after).logits[:, -1] / 1.3).softmax(-1)
    for column, probs in ((9, first_V), (10, second_V)):
        counts = torch.bincount(found[:, column], minlength=VOCAB)
        chi_square = float(((counts - 4000 * probs) ** 2 / (4000 * probs)).sum())
        assert chi_square < 98.3, "99.9% of draws from these probabilities are below"  # 59 degrees of freedom
    assert EOS in found[:, 9]  # nothing is forbidden
