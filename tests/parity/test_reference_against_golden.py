"""The slow references agree with the upstream implementations: this is what makes them references."""

import pytest
import reference
from closeness import assert_gradient, assert_value, value_and_gradients
from golden_cases import PRESENT, WHY_SKIPPED, load_cases, name_of, of_kind

if not PRESENT:
    pytest.skip(WHY_SKIPPED, allow_module_level=True)

CASES = load_cases()


def each(kind):
    return pytest.mark.parametrize("case", of_kind(CASES, kind), ids=name_of)


def check(case, fn, inputs, gradients):
    value, grads = value_and_gradients(fn, *(case["inputs"][name] for name in inputs))
    assert_value(value, case["outputs"]["loss"])
    for grad, name in zip(grads, gradients, strict=True):
        assert_gradient(grad, case["outputs"][name])


@each("opsd_jsd")
def test_the_jsd_reference_is_upstream(case):
    params, labels = dict(case["params"]), case["inputs"].get("labels")
    params.pop("masked")

    def loss(student):
        value = reference.jsd(student, case["inputs"]["teacher"], labels, **params)
        return value[labels != -100] if params["reduction"] == "none" and labels is not None else value

    check(case, loss, ["student"], ["grad_student"])


@each("taid_loss")
def test_the_taid_reference_is_upstream(case):
    inputs, t = case["inputs"], case["params"]["t"]
    check(case, lambda s: reference.taid(s, inputs["teacher"], inputs["mask"], t=t), ["student"], ["grad_student"])


@each("taid_schedule")
def test_the_taid_schedule_reference_is_upstream(case):
    assert_value(reference.taid_schedule(case["inputs"]["losses"].tolist(), **case["params"]), case["outputs"]["t"])


@each("sdpo_loss")
def test_the_sdpo_reference_is_upstream(case):
    params, inputs = dict(case["params"]), case["inputs"]
    assert params.pop("aggregation") == "token-mean"
    params["beta"] = params.pop("alpha")
    rest = {name: inputs[name] for name in ("token_ids", "old_logprobs")}
    check(
        case,
        lambda s: reference.sdpo(s, inputs["teacher"], inputs["mask"], **rest, **params),
        ["student"],
        ["grad_student"],
    )


@each("prime_rl_default")
def test_the_prime_rl_reference_is_upstream(case):
    inputs, params = case["inputs"], dict(case["params"])
    params["high"], params["low"] = params.pop("dppo_mask_high"), params.pop("dppo_mask_low")

    def loss(trainer):
        rest = (inputs[name] for name in ("inference_logprobs", "advantages", "loss_mask"))
        return reference.prime_rl_default(trainer, *rest, **params)

    check(case, loss, ["trainer_logprobs"], ["grad_trainer"])


@each("prime_rl_ref_kl")
def test_the_prime_rl_ref_kl_reference_is_upstream(case):
    rest = [case["inputs"][name] for name in ("inference_logprobs", "ref_logprobs", "loss_mask")]
    check(case, lambda x: reference.prime_rl_ref_kl(x, *rest), ["trainer_logprobs"], ["grad_trainer"])


@each("simpo")
def test_the_simpo_reference_is_upstream(case):
    check(
        case,
        lambda c, r: reference.simpo(c, r, **case["params"]),
        ["chosen", "rejected"],
        ["grad_chosen", "grad_rejected"],
    )
