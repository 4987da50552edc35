"""Every golden vector of the upstream implementations: value and gradient, at the fp32 tolerances of the design."""

from types import SimpleNamespace

import pytest
import torch
from closeness import assert_gradient, assert_value, value_and_gradients
from golden_cases import NUM_CASES, PRESENT, WHY_SKIPPED, load_cases, name_of, num_cases_per_kind, of_kind

from composer_replication.distillation import TAIDScheduler, sdpo_loss, simpo_loss, taid_loss
from composer_replication.loss.jsd import generalized_jsd_loss
from composer_replication.recipes.prime_rl.composer_loss import loss_fn

if not PRESENT:
    pytest.skip(WHY_SKIPPED, allow_module_level=True)

CASES = load_cases()


def each(kind):
    return pytest.mark.parametrize("case", of_kind(CASES, kind), ids=name_of)


def prime_rl_inputs(trainer, tensors, **changes):
    names = ("inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
    return SimpleNamespace(trainer_logprobs=trainer, **({name: tensors.get(name) for name in names} | changes))


def test_the_golden_folder_holds_every_case_we_know_of():
    assert num_cases_per_kind(CASES) == NUM_CASES
    assert len({case["id"] for case in CASES}) == sum(NUM_CASES.values())


@each("opsd_jsd")
def test_jsd_agrees_with_upstream(case):
    params, labels = dict(case["params"]), case["inputs"].get("labels")
    assert params.pop("masked") == (labels is not None)
    value, (grad,) = value_and_gradients(
        lambda s: generalized_jsd_loss(s, case["inputs"]["teacher"], labels, **params), case["inputs"]["student"]
    )
    if params["reduction"] == "none" and labels is not None:
        assert int(torch.count_nonzero(value[labels == -100])) == 0
        value = value[labels != -100]
    assert_value(value, case["outputs"]["loss"])
    assert_gradient(grad, case["outputs"]["grad_student"])


@each("taid_loss")
def test_taid_agrees_with_upstream(case):
    inputs, t = case["inputs"], case["params"]["t"]
    value, (grad,) = value_and_gradients(
        lambda s: taid_loss(s, inputs["teacher"], inputs["mask"], t=t), inputs["student"]
    )
    assert_value(value, case["outputs"]["loss"])
    assert_gradient(grad, case["outputs"]["grad_student"])


@each("taid_schedule")
def test_the_taid_schedule_agrees_with_upstream(case):
    scheduler, history = TAIDScheduler(**case["params"]), []
    for step, loss in enumerate(case["inputs"]["losses"]):
        scheduler.update_t(loss, step)
        history.append(scheduler.t)
    assert_value(history, case["outputs"]["t"])


@each("sdpo_loss")
def test_sdpo_agrees_with_upstream(case):
    params, inputs = dict(case["params"]), case["inputs"]
    assert params.pop("aggregation") == "token-mean"
    params["beta"] = params.pop("alpha")
    rest = {name: inputs[name] for name in ("token_ids", "old_logprobs")}
    value, (grad,) = value_and_gradients(
        lambda s: sdpo_loss(s, inputs["teacher"], inputs["mask"], **rest, **params), inputs["student"]
    )
    assert_value(value, case["outputs"]["loss"])
    assert_gradient(grad, case["outputs"]["grad_student"])


@each("prime_rl_default")
def test_the_prime_rl_loss_agrees_with_upstream(case):
    inputs = case["inputs"]
    value, (grad,) = value_and_gradients(
        lambda x: loss_fn(prime_rl_inputs(x, inputs), **case["params"]).loss, inputs["trainer_logprobs"]
    )
    assert_value(value, case["outputs"]["loss"])
    assert_gradient(grad, case["outputs"]["grad_trainer"])


@each("prime_rl_ref_kl")
def test_alpha_sdpo_adds_upstreams_ref_kl(case):
    # With advantages 0 and kl_tau 0 the default loss is 0 and only the added term is left.
    inputs = case["inputs"]
    silent = {"advantages": torch.zeros_like(inputs["trainer_logprobs"])}
    value, (grad,) = value_and_gradients(
        lambda x: loss_fn(prime_rl_inputs(x, inputs, **silent), alpha_sdpo=1.0, kl_tau=0.0).loss,
        inputs["trainer_logprobs"],
    )
    assert_value(value, case["outputs"]["loss"])
    assert_gradient(grad, case["outputs"]["grad_trainer"])


@each("simpo")
def test_simpo_agrees_with_upstream(case):
    inputs = case["inputs"]
    value, (grad_chosen, grad_rejected) = value_and_gradients(
        lambda c, r: simpo_loss(c, r, **case["params"]), inputs["chosen"], inputs["rejected"]
    )
    assert_value(value, case["outputs"]["loss"])
    assert_gradient(grad_chosen, case["outputs"]["grad_chosen"])
    assert_gradient(grad_rejected, case["outputs"]["grad_rejected"])
