"""Malformed batches and knobs: a typed error that names the culprit, never a NaN and never silence."""

from __future__ import annotations

import pytest
import torch

from composer_replication import compose_loss
from composer_replication.errors import BatchKeyError, InputError, NonFiniteError, ShapeError, UnsupportedModelError
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
    ("response_mask", lambda mask: mask[:, :-1], "response_mask shape"),
    ("input_ids", lambda ids: ids[0], "input_ids shape"),
    ("input_ids", lambda ids: ids.float(), "input_ids dtype"),
    ("sdpo_student_index", lambda index: index[:, 0], "sdpo_student_index"),
    ("sdpo_student_index", lambda index: index[:-1], "equal lengths"),
    ("sdpo_teacher_index", lambda index: index.float(), "sdpo_teacher_index"),
    ("dpo_chosen_response_mask", lambda mask: mask[:, 1:], "dpo_chosen_response_mask shape"),
    ("dpo_rejected_ref_logprobs", lambda logps: logps[None], "dpo_rejected_ref_logprobs"),
]


@pytest.mark.parametrize(("key", "change", "named"), WRONG_SHAPES)
def test_shapes_and_dtypes_that_do_not_fit_are_named(model, key, change, named):
    with pytest.raises(ShapeError, match=named):
        compose_loss(model, changed(key, change))


def set_at(where, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[where] = value
        return tensor

    return change


WRONG_VALUES = [
    ("sdpo_student_index", set_at((0, 1), 13), "sdpo_student_index.0. out of range"),
    ("sdpo_student_index", set_at((3, 1), -1), "sdpo_student_index.3. out of range"),
    ("sdpo_teacher_index", set_at((2, 0), 2), "sdpo_teacher_index.2. out of range"),
    ("response_mask", set_at((0, 5), 2), "response_mask values"),
    ("dpo_chosen_response_mask", lambda mask: mask * 0, "dpo_chosen_response_mask of pair 0"),
]


@pytest.mark.parametrize(("key", "change", "named"), WRONG_VALUES)
def test_values_out_of_range_are_named(model, key, change, named):
    with pytest.raises(InputError, match=named):
        compose_loss(model, changed(key, change))


def test_targets_inside_padding_are_refused(model):
    batch = random_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, 7:] = 0
    with pytest.raises(InputError, match="padding"):
        compose_loss(model, batch)


def test_a_loss_mask_that_disagrees_with_the_index_pairs_is_refused(model):
    batch = random_batch()
    batch["sdpo_loss_mask"] = batch["response_mask"]
    with pytest.raises(BatchKeyError, match="sdpo_loss_mask and sdpo_student_index"):
        compose_loss(model, batch)


def test_a_longer_teacher_without_index_pairs_is_refused(model):
    with pytest.raises(ShapeError, match="index pairs"):
        compose_loss(model, dropped("sdpo_student_index", "sdpo_teacher_index"))


def test_different_numbers_of_chosen_and_rejected_are_refused(model):
    batch = random_batch()
    for key in ("dpo_chosen_input_ids", "dpo_chosen_response_mask", "dpo_chosen_ref_logprobs"):
        batch[key] = batch[key][:1]
    with pytest.raises(ShapeError, match="number of pairs"):
        compose_loss(model, batch)


KNOBS = [
    ({"dpo_variant": "ipo"}, "dpo_variant"),
    ({"sdpo_wrapper": "tiad"}, "sdpo_wrapper"),
    ({"sdpo_wrapper": "taid"}, "taid_t"),
    ({"sdpo_wrapper": "taid", "taid_t": 1.01}, "taid_t"),
    ({"sdpo_wrapper": "taid", "taid_t": float("nan")}, "taid_t"),
    ({"taid_t": -0.1}, "taid_t"),
    ({"sdpo_jsd_beta": 1.5}, "beta"),
    ({"sdpo_temperature": 0.0}, "temperature"),
    ({"sdpo_token_clip": 0.0}, "token_clip"),
    ({"alpha_sdpo": -1.0}, "alpha_sdpo"),
    ({"beta_replay": float("nan")}, "beta_replay"),
    ({"replay_dpo_beta": 0.0}, "beta"),
    ({"lm_ce_label_smoothing": 1.0}, "label_smoothing"),
    ({"entropy_opd_h_max": -1.0, "sdpo_wrapper": "entropy_opd"}, "h_max"),
    ({"denominators": {"lm_ce": 0.0}}, "denominators"),
    ({"denominators": {"sdpo": 3.0}}, "denominators"),
]


@pytest.mark.parametrize(("knobs", "named"), KNOBS, ids=str)
def test_wrong_knobs_are_value_errors_that_name_the_knob(model, knobs, named):
    with pytest.raises(ValueError, match=named):
        compose_loss(model, random_batch(), **knobs)


def test_nan_weights_raise_instead_of_training():
    model = build("llama-untied")
    compose_loss(model, random_batch())
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="row 0"):
        compose_loss(model, random_batch())


def test_a_reference_logprob_that_is_nan_raises(model):
    with pytest.raises(NonFiniteError, match="dpo_loss"):
        compose_loss(model, changed("dpo_chosen_ref_logprobs", set_at((1,), float("nan"))))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedModelError, match="causal LM"):
        compose_loss(torch.nn.Linear(3, 3), random_batch())


def test_a_head_that_is_not_a_plain_linear_layer_is_refused():
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return 2.0 * super().forward(hidden)

    model = build("qwen2-untied")
    model.lm_head = Scaled(32, 97, bias=False)
    with pytest.raises(UnsupportedModelError, match="Scaled"):
        compose_loss(model, random_batch())


def test_logits_that_no_scale_or_cap_reproduces_are_refused():
    model = build("llama-untied")
    forward = type(model).forward

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            outputs = forward(self, *args, **kwargs)
            outputs.logits = outputs.logits + 0.5 * outputs.logits.square()
            return outputs

    model.__class__ = Odd
    with pytest.raises(UnsupportedModelError, match="no known scale or soft-cap"):
        compose_loss(model, random_batch())
