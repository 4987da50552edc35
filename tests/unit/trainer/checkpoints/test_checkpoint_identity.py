"""A checkpoint of another model is refused, and the message says what differs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import ABOUT, MODEL, change_manifest, checkpoint

from composer_replication.errors import StaleArtefactError
from composer_replication.trainer.checkpoints import weights_digest
from composer_replication.trainer.checkpoints.run_checkpoints import _check_fits, check_identity, model_identity
from composer_replication.trainer.objective import fingerprint
from kill_and_resume.small_runs import small_model
from refusals import refusal


def difference(saved, now):
    with pytest.raises(StaleArtefactError) as refused:
        check_identity(model_identity(saved), model_identity(now), Path("checkpoint-1"))
    return refused.value.got


@pytest.mark.parametrize("lora", [False, True])
def test_the_same_model_built_again_is_the_same(lora):
    one, other = (model_identity(small_model(lora=lora)) for _ in range(2))
    assert one == other
    check_identity(one, other, Path("checkpoint-1"))


def test_weights_that_a_checkpoint_holds_do_not_matter():
    check_identity(model_identity(small_model(seed=1)), model_identity(small_model(seed=2)), Path("checkpoint-1"))


def test_another_width_is_said_as_config_and_shapes():
    found = difference(small_model(hidden=16), small_model(hidden=32))
    assert re.search(r"\bconfig\.n_embd 16\b[^;]*\b32\b", found)
    assert re.search(r"\b23\b", found)  # those that are not named


def test_another_config_of_the_same_shapes_is_said():
    other = small_model()
    other.config.attn_pdrop = 0.5
    assert re.search(r"\bconfig\.attn_pdrop 0\.1\b[^;]*\b0\.5\b", difference(small_model(), other))


def test_a_parameter_more_is_said_and_so_is_another_dtype():
    more = small_model()
    more.extra = torch.nn.Linear(2, 2)
    assert re.search(r"\bextra\.bias\b[^;]*\bfloat32 \[2\]", difference(small_model(), more))
    halved = difference(small_model(), small_model().bfloat16())
    assert re.search(r"\bfloat32 \[16, 48\][^;]*\bbfloat16 \[16, 48\]", halved)


def test_an_adapter_or_none_is_said():
    assert re.search(r"\badapters default\b", difference(small_model(lora=True), small_model()))
    assert re.search(r"\badapters (?!default)[^;]*\bdefault\b", difference(small_model(), small_model(lora=True)))


def test_other_frozen_weights_below_an_adapter_are_said():
    other = small_model(lora=True)
    with torch.no_grad():
        other.get_base_model().transformer.h[1].mlp.c_fc.weight[3, 5] += 1e-3
    assert "base_weights" in difference(small_model(lora=True), other)


def test_what_the_loop_itself_sets_in_a_config_does_not_matter():
    other = small_model()
    other.config.use_cache, other.config.pad_token_id = False, 9
    check_identity(model_identity(small_model()), model_identity(other), Path("checkpoint-1"))


@pytest.mark.parametrize("lora", [False, True])
def test_the_digest_of_weights_is_that_of_the_same_weights_in_another_wrapper(lora):
    one, other = small_model(lora=lora), torch.compile(small_model(lora=lora), backend="eager")
    assert weights_digest(one) == weights_digest(other)
    assert len(weights_digest(one)) == 64


def test_the_digest_of_weights_tells_a_change_of_any_parameter():
    model = small_model()
    seen = {weights_digest(model)}
    parameters = list(model.parameters())
    for parameter in parameters:
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-3
        seen.add(weights_digest(model))
    assert len(seen) == 1 + len(parameters)


def test_the_digest_of_weights_reads_every_value():
    layer = torch.nn.Linear(1024, 64, bias=False)
    seen = {weights_digest(layer)}
    for place in (0, 1, 17, 1024 * 64 - 1):
        with torch.no_grad():
            layer.weight.view(-1)[place] += 1.0
        seen.add(weights_digest(layer))
    assert len(seen) == 5


def test_one_changed_value_below_an_adapter_is_said_wherever_it_is():
    """A tensor of more values than a sample would have read."""
    one, other = small_model(lora=True), small_model(lora=True)
    weight = other.get_base_model().transformer.h[0].mlp.c_fc.weight
    with torch.no_grad():
        weight.view(-1)[1] += 1e-3
    assert "base_weights" in difference(one, other)


def test_weights_are_hashed_once_and_again_when_they_change(monkeypatch):
    model, hashed = small_model(), []
    whole = fingerprint._hash_tensors
    monkeypatch.setattr(fingerprint, "_hash_tensors", lambda *given: hashed.append(1) or whole(*given))
    first = weights_digest(model)
    assert (weights_digest(model), weights_digest(torch.compile(model, backend="eager")), len(hashed)) == (
        first,
        first,
        1,
    )
    with torch.no_grad():
        model.lm_head.weight.view(-1)[1] += 1.0
    second = weights_digest(model)
    model.lm_head.weight.data.mul_(2.0)  # no count of changes sees it, a sample does
    assert len({first, second, weights_digest(model)}) == len(hashed) == 3
    assert weights_digest(small_model()) == first


def test_the_digest_of_weights_tells_dtype_shape_and_name():
    first, wide = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        first.weight.zero_(), wide.weight.zero_()
    named = torch.nn.Sequential(first)
    half = torch.nn.Linear(4, 6, bias=False).bfloat16()
    with torch.no_grad():
        half.weight.zero_()
    assert len({weights_digest(each) for each in (first, wide, named, half)}) == 4


def test_weights_without_values_have_a_digest():
    with torch.device("meta"):
        one, other = torch.nn.Linear(4, 6), torch.nn.Linear(4, 7)
    assert weights_digest(one) != weights_digest(other)
    assert weights_digest(torch.nn.ParameterList([torch.nn.Parameter(torch.empty(0, 3))])) != weights_digest(one)


def fits(folder, identity):
    args = SimpleNamespace(ignore_data_skip=False)
    _check_fits(SimpleNamespace(args=args), folder, identity, ABOUT["data"])


@pytest.mark.parametrize("version", [1, 2])
def test_a_digest_of_some_values_which_an_earlier_version_kept_is_not_compared_and_that_is_said(
    tmp_path, caplog, version
):
    folder = checkpoint(tmp_path, 1)
    about = ABOUT | {"model": MODEL | {"base_weights": "of some values"}}
    change_manifest(folder, version=version, about=about)
    now = MODEL | {"base_weights": "of all bytes"}
    if version == 1:
        fits(folder, now)
        [warning] = [each.getMessage() for each in caplog.records]
        assert str(folder) in warning
        assert "adapter" in warning
    else:
        with refusal(StaleArtefactError, what=str(folder), got="base_weights"):
            fits(folder, now)
