"""Malformed batches and knobs: a typed error that names the culprit, never a NaN and never silence."""

from __future__ import annotations

import re

import pytest
import torch

from composer_replication import compose_loss
from composer_replication.errors import AlignmentError, BatchKeyError, InputError, NonFiniteError, ShapeError
from refusals import refusal
from tiny_models import build, random_batch


@pytest.fixture(scope="module")
def model():
    return build("qwen2-tied")


def changed(key, change):
    batch = random_batch()
    batch[key] = change(batch[key])
    return batch


def dropped(*keys):
    return {key: value for key, value in random_batch().items() if key not in keys}


HALF_CHANNELS = [
    (("ctx_teacher_input_ids",), "ctx_teacher_input_ids"),
    (("sdpo_student_index",), "sdpo_student_index"),
    (("sdpo_teacher_index",), "sdpo_teacher_index"),
    (("dpo_chosen_response_mask",), "dpo_chosen_response_mask"),
    (("dpo_rejected_input_ids",), "dpo_rejected_input_ids"),
    (("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs"), "ref_logprobs"),
    (("dpo_rejected_ref_logprobs",), "dpo_rejected_ref_logprobs"),
    (("response_mask",), "response_mask"),
    (("input_ids",), "input_ids"),
]


@pytest.mark.parametrize(("keys", "named"), HALF_CHANNELS, ids=lambda value: str(value))
def test_half_of_a_channels_keys_is_an_error(model, keys, named):
    with pytest.raises(BatchKeyError, match=named):
        compose_loss(model, dropped(*keys))


def test_missing_reference_logprobs_are_no_matter_to_simpo(model):
    batch = dropped("dpo_chosen_ref_logprobs", "dpo_rejected_ref_logprobs")
    assert "trace_replay_dpo" in compose_loss(model, batch, dpo_variant="simpo").active


WRONG_SHAPES = [
    ("response_mask", lambda mask: mask[:, :-1], "response_mask", "(2, 13)"),
    ("input_ids", lambda ids: ids[0], "input_ids", "(14,)"),
    ("input_ids", lambda ids: ids.float(), "input_ids", "torch.float32"),
    ("sdpo_student_index", lambda index: index[:, 0], "sdpo_student_index", "(10,)"),
    ("sdpo_student_index", lambda index: index[:-1], "sdpo", "(9, 10)"),
    ("sdpo_teacher_index", lambda index: index.float(), "sdpo_teacher_index", "torch.float32"),
    ("dpo_chosen_response_mask", lambda mask: mask[:, 1:], "dpo_chosen_response_mask", "(2, 11)"),
    ("dpo_rejected_ref_logprobs", lambda logps: logps[None], "dpo_rejected_ref_logprobs", "(1, 2)"),
]


@pytest.mark.parametrize(("key", "change", "named", "got"), WRONG_SHAPES)
def test_shapes_and_dtypes_that_do_not_fit_are_named(model, key, change, named, got):
    with refusal(ShapeError, what=named, got=got):
        compose_loss(model, changed(key, change))


def set_at(where, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[where] = value
        return tensor

    return change


WRONG_VALUES = [
    ("sdpo_student_index", set_at((0, 1), 13), r"sdpo_student_index\[0\]", "[0, 13]"),
    ("sdpo_student_index", set_at((3, 1), -1), r"sdpo_student_index\[3\]", "[0, -1]"),
    ("sdpo_teacher_index", set_at((2, 0), 2), r"sdpo_teacher_index\[2\]", "[2, 12]"),
    ("response_mask", set_at((0, 5), 2), "response_mask", "2"),
    ("dpo_chosen_response_mask", lambda mask: mask * 0, r"dpo_chosen_response_mask\b.*\b0", ""),
]


@pytest.mark.parametrize(("key", "change", "named", "got"), WRONG_VALUES)
def test_values_out_of_range_are_named(model, key, change, named, got):
    with refusal(InputError, got=got) as caught:
        compose_loss(model, changed(key, change))
    assert re.search(named, caught.value.what)


def test_targets_inside_padding_are_refused(model):
    batch = random_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 7:] = 0
    with pytest.raises(InputError, match="padding"):
        compose_loss(model, batch)


def test_a_loss_mask_that_disagrees_with_the_index_pairs_is_refused(model):
    batch = random_batch()
    batch["sdpo_loss_mask"] = batch["response_mask"]
    with refusal(BatchKeyError, what="sdpo_loss_mask") as caught:
        compose_loss(model, batch)
    assert "sdpo_student_index" in caught.value.what
    assert re.findall(r"\d+", caught.value.got) == ["12", "10"]


def test_a_longer_teacher_without_index_pairs_is_refused(model):
    with refusal(ShapeError, what="ctx_teacher_input_ids", got="(2, 19)", expected="(2, 14)", fix="sdpo_student_index"):
        compose_loss(model, dropped("sdpo_student_index", "sdpo_teacher_index"))


def test_different_numbers_of_chosen_and_rejected_are_refused(model):
    batch = random_batch()
    for key in ("dpo_chosen_input_ids", "dpo_chosen_response_mask", "dpo_chosen_ref_logprobs"):
        batch[key] = batch[key][:1]
    with refusal(ShapeError, what="dpo_rejected", got="(1, 2)"):
        compose_loss(model, batch)


KNOBS = [
    ({"dpo_variant": "ipo"}, "dpo_variant"),
    ({"sdpo_wrapper": "tiad"}, "sdpo_wrapper"),
    ({"sdpo_wrapper": "taid"}, "taid_t"),
    ({"sdpo_wrapper": "taid", "taid_t": 1.01}, "taid_t"),
    ({"sdpo_wrapper": "taid", "taid_t": float("nan")}, "taid_t"),
    ({"taid_t": -0.1}, "taid_t"),
    ({"sdpo_jsd_beta": 1.5}, "sdpo_jsd_beta"),
    ({"sdpo_temperature": 0.0}, "sdpo_temperature"),
    ({"sdpo_token_clip": 0.0}, "sdpo_token_clip"),
    ({"alpha_sdpo": -1.0}, "alpha_sdpo"),
    ({"beta_replay": float("nan")}, "beta_replay"),
    ({"replay_dpo_beta": 0.0}, "replay_dpo_beta"),
    ({"simpo_beta": -1.0}, "simpo_beta"),
    ({"lm_ce_label_smoothing": 1.0}, "label_smoothing"),
    ({"entropy_opd_h_max": -1.0, "sdpo_wrapper": "entropy_opd"}, "entropy_opd_h_max"),
    ({"denominators": {"lm_ce": 0.0}}, "denominators"),
    ({"denominators": {"lm_ce": -1.0}}, "denominators"),
    ({"denominators": {"sdpo": 3.0}}, "denominators"),
]


@pytest.mark.parametrize(("knobs", "named"), KNOBS, ids=str)
def test_wrong_knobs_are_value_errors_that_name_the_knob(model, knobs, named):
    with pytest.raises(ValueError, match=named):
        compose_loss(model, random_batch(), **knobs)


def test_a_reference_logprob_that_is_nan_raises(model):
    with pytest.raises(NonFiniteError, match="dpo_loss"):
        compose_loss(model, changed("dpo_chosen_ref_logprobs", set_at((1,), float("nan"))))


def with_masks(**padding):
    """Attention masks that call the named positions of every sequence padding."""
    batch = random_batch()
    for key, ids_key in (
        ("attention_mask", "input_ids"),
        ("ctx_teacher_attention_mask", "ctx_teacher_input_ids"),
        ("dpo_chosen_attention_mask", "dpo_chosen_input_ids"),
    ):
        batch[key] = torch.ones_like(batch[ids_key])
        batch[key][:, padding.get(key, slice(0, 0))] = 0
    return batch


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("ctx_teacher_attention_mask", "sdpo_teacher_index"),
        ("dpo_chosen_attention_mask", "dpo_chosen_response_mask"),
        ("attention_mask", "response_mask"),
    ],
)
def test_a_target_in_any_sequences_padding_is_refused(model, key, named):
    assert compose_loss(model, with_masks()).active  # the masks alone are fine
    with refusal(InputError, what=named, got="attention_mask"):
        compose_loss(model, with_masks(**{key: slice(8, None)}))


def test_a_misaligned_context_of_equal_shape_is_caught_without_index_pairs(model):
    batch = dropped("sdpo_student_index", "sdpo_teacher_index")
    shifted = batch["input_ids"].roll(1, dims=1)
    with refusal(AlignmentError, what="(0, 5)"):
        compose_loss(model, {**batch, "ctx_teacher_input_ids": shifted, "sdpo_loss_mask": batch["response_mask"]})


ID_KEYS = ["input_ids", "ctx_teacher_input_ids", "dpo_chosen_input_ids", "dpo_rejected_input_ids"]


@pytest.mark.parametrize("bad", [-100, -1, 97])
@pytest.mark.parametrize("key", ID_KEYS)
def test_token_ids_without_an_embedding_are_named_with_their_place(model, key, bad):
    with refusal(InputError, what=f"{key}[1, 2]", got=str(bad)):
        compose_loss(model, changed(key, set_at((1, 2), bad)))


@pytest.mark.parametrize("key", ["input_ids", "response_mask"])
def test_a_required_key_that_is_none_counts_as_missing(model, key):
    with pytest.raises(BatchKeyError, match=key):
        compose_loss(model, {**random_batch(), key: None})


def test_optional_keys_that_are_none_count_as_absent(model):
    batch = {**random_batch(), "attention_mask": None, "sdpo_loss_mask": None}
    assert "sdpo_jsd" in compose_loss(model, batch).active
    off = dict.fromkeys(("ctx_teacher_input_ids", "sdpo_student_index", "sdpo_teacher_index"))
    assert "sdpo_jsd" not in compose_loss(model, {**random_batch(), **off}).active


def test_a_boolean_index_is_refused(model):
    with pytest.raises(ShapeError, match="sdpo_student_index"):
        compose_loss(model, changed("sdpo_student_index", lambda index: index.bool()))


@pytest.mark.parametrize(
    "knobs",
    [
        {"alpha_sdpo": float("inf")},
        {"sdpo_temperature": float("inf")},
        {"denominators": {"lm_ce": float("inf")}},
        {"sdpo_token_clip": -1.0},
        {"replay_dpo_beta": -1.0},
        {"simpo_beta": float("nan")},
    ],
    ids=str,
)
def test_impossible_knobs_are_refused_even_when_their_channel_has_nothing_to_do(model, knobs):
    alone = {key: value for key, value in random_batch().items() if key in ("input_ids", "response_mask")}
    ((name, value),) = knobs.items()
    with refusal(InputError, what=name, got=str(value["lm_ce"] if name == "denominators" else value)):
        compose_loss(model, alone, **knobs)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("dpo_choosen_input_ids", "dpo_chosen_input_ids"),
        ("sdpo_mask", "sdpo_loss_mask"),
        ("ctx_teacher_ids", "ctx_teacher"),
    ],
)
def test_a_misspelt_key_is_an_error_with_a_suggestion_and_not_a_channel_less(model, typo, meant):
    batch = random_batch()
    with refusal(BatchKeyError, got=typo, fix=f"'{meant}"):
        compose_loss(model, {**batch, typo: batch["input_ids"]})


def test_keys_of_other_tools_are_left_alone_and_position_ids_refused(model):
    batch = random_batch()
    extra = {"labels": batch["input_ids"], "rewards": torch.ones(2)}
    assert compose_loss(model, {**batch, **extra}).detached() == compose_loss(model, batch).detached()
    with pytest.raises(BatchKeyError, match="position_ids"):
        compose_loss(model, {**batch, "position_ids": batch["input_ids"]})


def test_lists_and_empty_batches_are_shape_errors(model):
    with refusal(ShapeError, what="input_ids", got="list"):
        compose_loss(model, {**random_batch(), "input_ids": [[1, 2]]})
    with refusal(ShapeError, what="input_ids", got="(0, 4)"):
        compose_loss(model, {"input_ids": torch.zeros(0, 4).long(), "response_mask": torch.zeros(0, 4)})
