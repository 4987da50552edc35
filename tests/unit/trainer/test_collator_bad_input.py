"""What a log can do wrong: an error that says where, or a drop that is counted by name."""

from __future__ import annotations

import copy
import math
import pickle
import re

import pytest
import torch
from render_checks import decode
from tiny import tiny_model
from tokenizers import Tokenizer, models
from traces import HINT, collator_of, marked_runs, pair, session
from transformers import PreTrainedTokenizerFast

from composer_replication import compose_loss
from composer_replication.errors import InputError
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from refusals import refusal
from tokenizer_assets import load

ASKED = {"role": "user", "content": "Q"}
ANSWERED = {"role": "assistant", "content": "A"}
FAILED = {"role": "tool", "content": "no", "tool_error": True, "error_meta": {"error_kind": "k"}}
EXCHANGE = {"turns": [ASKED, ANSWERED], "final_reward": 1.0}


@pytest.mark.parametrize(
    ("options", "got", "expected"),
    [
        ({"max_seq_len": 1}, "1", r"\b2\b"),
        ({"max_dpo_seq_len": 2.5}, "2.5", r"\b2\b"),
        ({"pad_token_id": None}, "None", r"\b0\b"),
        ({"pad_token_id": -1}, "-1", r"\b0\b"),
        ({"ignore_index": 1}, "1", r"-100\b.*\b0\b"),
        ({"placement": "after"}, "'after'", "before_turn"),
        ({"hint_generator": "hint"}, "str", "error_kind"),
    ],
)
def test_a_bad_setting_is_named_at_once(options, got, expected):
    with refusal(InputError, what=next(iter(options))) as refused:
        CollatorConfig(**options)
    assert refused.value.got == got
    assert re.search(expected, refused.value.expected)


def test_a_given_template_stands_in_for_one_that_the_tokenizer_lacks():
    bare = copy.deepcopy(load("gemma"))
    template, bare.chat_template = bare.chat_template, None
    collator = ComposerDataCollator(bare, CollatorConfig(chat_template=template))
    assert collator([EXCHANGE])["response_mask"].sum() > 1


def test_an_error_of_a_template_is_named():
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template="{{ 1 // 0 }}")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        ComposerDataCollator(empty, CollatorConfig())


def test_a_role_that_the_template_refuses_is_said_in_another_way_and_what_it_refuses_altogether_is_named():
    collator = collator_of("gemma")
    batch = collator([{"turns": [{"role": "system", "content": "Rules."}, ASKED, ANSWERED]}])
    assert "user\nRules.\n\nQ" in decode(collator.renderer, batch["input_ids"][0].tolist())
    assert collator.renderer.counts["system_as_user"] == 1
    refusing = (
        "{% for m in messages %}{% if m.content == 'Q' %}{{ raise_exception('I refuse') }}{% endif %}"
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}"
    )
    with pytest.raises(InputError, match=r"\bthe-trace\b.*I refuse"):
        collator_of("gemma", chat_template=refusing)([{**EXCHANGE, "trace_id": "the-trace"}])


@pytest.mark.parametrize(
    ("example", "names", "got", "expected"),
    [
        ("text", ("trace 1",), "str", "TraceExample"),
        ({"final_reward": 1.0}, ("trace 1",), "['final_reward']", "'turns'"),
        ({"turns": None}, ("trace 1",), "['turns']", "'turns'"),
        ({"turns": "text"}, ("messages", "trace 1"), "str", ""),
        ({"turns": ["text"]}, ("message 0", "trace 1"), "str", ""),
        ({"trace_id": "x", "turns": [{"role": "robot"}]}, ("role", "message 0", "x"), "'robot'", "assistant"),
        ({"turns": [ASKED, ANSWERED], "final_reward": math.nan}, ("final_reward", "trace 1"), "nan", ""),
        ({"turns": [ASKED, ANSWERED], "final_reward": math.inf}, ("final_reward", "trace 1"), "inf", ""),
        ({"turns": [ASKED, ANSWERED], "final_reward": "1.0"}, ("final_reward", "trace 1"), "'1.0'", ""),
        ({"turns": [ASKED, ANSWERED], "final_reward": [1.0]}, ("final_reward", "trace 1"), "[1.0]", ""),
        ({"turns": [ASKED, ANSWERED, {**FAILED, "error_meta": "k"}]}, ("error_meta", "trace 1:2"), "str", ""),
        (
            {"turns": [ASKED, ANSWERED, {**FAILED, "error_meta": {"error_kind": 7}}]},
            ("error_kind", "trace 1:2"),
            "int",
            "",
        ),
        ({"turns": [ASKED, ANSWERED], "dpo_pairs": pair()}, ("dpo_pairs", "trace 1"), "dict", "DPOPair"),
        ({"turns": [ASKED, ANSWERED], "dpo_pairs": ["x"]}, ("pair 0", "trace 1"), "str", "DPOPair"),
        (
            {"turns": [], "dpo_pairs": [{"chosen": "a", "rejected": "b"}]},
            ("pair 0", "trace 1"),
            "['chosen', 'rejected']",
            "'state_messages'",
        ),
        ({"turns": [], "dpo_pairs": [{**pair(), "chosen": None}]}, ("pair 0", "trace 1"), "'chosen'", "'chosen'"),
        ({"turns": [], "dpo_pairs": [{**pair(), "rejected": 7}]}, ("rejected", "pair 0", "trace 1"), "int", ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_broken_trace_is_named(example, names, got, expected):
    with refusal(InputError, got=got, expected=expected) as refused:
        collator_of("gemma")([EXCHANGE, example])
    assert [name for name in names if name not in refused.value.what] == []


def test_a_hint_must_be_text():
    collator = collator_of("gemma", hint_generator=lambda *_: 7)
    with refusal(InputError, what="trace 0:1", got="int") as refused:
        collator([{"turns": [ASKED, ANSWERED, FAILED]}])
    assert re.search(r"\bhint\b.*\bk\b", refused.value.what)


@pytest.mark.parametrize(
    ("turns", "hint", "reason"),
    [
        ([ASKED, ANSWERED, FAILED], None, "no_hint"),
        ([ASKED, ANSWERED, FAILED], " \n ", "hint_makes_no_tokens"),
        ([FAILED, ASKED, ANSWERED], HINT, "error_without_assistant_turn"),
        ([{**ASKED, "tool_error": True}, ANSWERED], HINT, "error_without_assistant_turn"),
    ],
)
def test_a_site_that_cannot_be_one_is_counted(turns, hint, reason):
    collator = collator_of("gemma", hint_generator=lambda *_: hint)
    batch = collator([{"turns": turns, "final_reward": 0.0}])
    assert dict(collator.counts) == {reason: 1}
    assert "ctx_teacher_input_ids" not in batch
    assert (batch["response_mask"] == 1).any()


def test_a_hint_that_goes_elsewhere_is_counted_with_where_it_went():
    collator = collator_of("gemma")
    collator([{"turns": [ASKED, ANSWERED, FAILED]}])
    assert collator.counts["placement_fell_back:before_turn->in_last_message"] == 1


def test_a_hint_with_no_place_to_go_is_counted():
    """Nothing stands before the turn, and a hint is put into what does."""
    collator = collator_of("llama3")
    batch = collator([{"turns": [{**ANSWERED, "tool_error": True}, ASKED, ANSWERED], "final_reward": 0.0}])
    assert dict(collator.counts) == {"hint_has_no_place": 1}
    assert marked_runs(collator, batch["input_ids"][0], batch["response_mask"][0]) == ["A<|eot_id|>"] * 2


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({**pair(), "state_messages": []}, "pair_without_state"),
        (pair(chosen=""), "pair_without_answer"),
        (pair(rejected=" \n"), "pair_without_answer"),
        (pair(chosen="Same.", rejected="Same."), "pair_of_equal_answers"),
    ],
)
def test_a_pair_that_teaches_nothing_is_counted(given, reason):
    collator = collator_of("gemma")
    batch = collator([{**EXCHANGE, "dpo_pairs": [given, pair()]}])
    assert dict(collator.counts) == {reason: 1}
    assert batch["dpo_chosen_input_ids"].shape[0] == 1


def test_arguments_that_are_no_json_are_trained_on_as_they_are():
    turns = [ASKED, {"role": "assistant", "tool_call": {"name": "bash", "arguments": '{"command": "ls'}}]
    collator = collator_of("qwen2_5")
    batch = collator([{"turns": turns}])
    (run,) = marked_runs(collator, batch["input_ids"][0], batch["response_mask"][0])
    assert '"arguments": {"command": "ls}' in run


def test_a_trace_without_a_reward_is_nan_and_counted():
    collator = collator_of("gemma")
    rewards = collator([EXCHANGE, {"turns": [ASKED, ANSWERED]}, {**EXCHANGE, "final_reward": True}])["rewards"]
    assert rewards.isnan().tolist() == [False, True, False]
    assert rewards[2].item() == 1.0
    assert collator.counts["no_reward"] == 1
    assert collator([{**EXCHANGE, "final_reward": torch.tensor(0.5)}])["rewards"].tolist() == [0.5]


def test_traces_without_turns_are_counted_and_the_others_stay():
    collator = collator_of("gemma")
    batch = collator([{"turns": [], "final_reward": 1.0}, EXCHANGE, {"turns": [ASKED], "final_reward": 1.0}])
    assert batch["input_ids"].shape[0] == len(batch["rewards"]) == 1
    assert dict(collator.counts) == {"empty_conversation": 1, "no_assistant_turn": 1}


def test_a_batch_of_no_traces_is_an_error():
    with refusal(InputError, what="batch", got="traces"):
        collator_of("gemma")([])


def test_a_batch_whose_traces_all_fall_out_has_nothing_to_score_and_says_so():
    """A run of days must not end because one session holds nothing but a turn that is too long."""
    collator = collator_of("gemma", max_seq_len=8)
    long = {"turns": [ASKED, {**ANSWERED, "content": "word " * 30}], "final_reward": 1.0}
    batch = collator([long, {"turns": [], "final_reward": 1.0}, {"turns": [ASKED], "final_reward": 1.0}])
    assert dict(collator.counts) == {
        "turn_longer_than_max_seq_len": 1,
        "sequence_cut": 1,
        "empty_conversation": 1,
        "no_assistant_turn": 1,
        "batch_without_rows": 1,
    }
    assert batch["rewards"].isnan().tolist() == [True]
    components = compose_loss(tiny_model(load("gemma")), batch)
    assert components.active == ()
    assert components.total.item() == 0.0


def test_pairs_alone_are_a_batch_in_which_only_they_count():
    collator = collator_of("gemma")
    batch = collator([{"turns": [], "dpo_pairs": [pair()], "final_reward": 1.0}])
    assert collator.counts["batch_without_rows"] == 1
    assert batch["response_mask"].sum() == 0
    assert batch["rewards"].isnan().all()
    components = compose_loss(tiny_model(load("gemma")), batch, dpo_variant="simpo")
    assert components.active == ("trace_replay_dpo",)


@pytest.mark.parametrize("values", [(1.0, math.nan), (1.0,)])
def test_reference_logprobs_that_are_no_two_numbers_are_named(values):
    class Broken:
        def lookup(self, *ids):
            return values

    with refusal(InputError, what="pair 0", got=str(values)):
        collator_of("gemma", reference=Broken())([{**EXCHANGE, "dpo_pairs": [pair()]}])


def test_rows_of_a_table_with_nulls_for_what_is_missing_are_taken():
    """A data set of records gives every message every key."""
    empty = dict.fromkeys(("content", "tool_call", "tool_error", "error_meta", "tool_calls", "tool_call_id", "name"))
    turns = [{**empty, **turn} for turn in session()["turns"]]
    collator = collator_of("llama3")
    batch, plain = collator([{**session(), "turns": turns, "dpo_pairs": None}]), collator([session()])
    assert all(torch.equal(batch[key], plain[key]) for key in plain)


def test_a_collator_survives_the_way_to_a_worker():
    collator = ComposerDataCollator(load("gemma"), CollatorConfig())
    again = pickle.loads(pickle.dumps(collator))
    batch, plain = again([EXCHANGE]), collator([EXCHANGE])
    assert all(torch.equal(batch[key], plain[key]) for key in plain)


def test_the_given_traces_are_left_as_they_were():
    trace = session(dpo_pairs=[pair()])
    before = copy.deepcopy(trace)
    collator_of("llama3")([trace])
    assert trace == before
