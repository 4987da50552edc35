"""Each switch of channel 2 against a dense reference in fp64, values and gradients; trees against flat batches."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import wrapped_worker
from switch_cases import POSITIONS, assert_same, channel_2, dense_channel_2, flat_of, gradient, sites, tree_of
from window_checks import model_for, renderer_of

from composer_replication import compose_loss
from composer_replication.errors import InputError
from composer_replication.trainer.objective.row_weighting import RowWeighting, WeightedTeacher
from refusals import refusal

SWITCHES = {
    "gate": RowWeighting(sigmoid_gate_tau=0.7),
    "entropy": RowWeighting(teacher_entropy=True),
    "position": RowWeighting(position_decay=0.6),
    "contrast": RowWeighting(contrast=1.0),
    "stronger contrast": RowWeighting(contrast=2.5),
    "all": RowWeighting(sigmoid_gate_tau=1.5, teacher_entropy=True, position_decay=0.8, contrast=0.5),
    "all, not normalised": RowWeighting(1.5, True, 0.8, 0.5, normalise=False),
}


@pytest.fixture(scope="module")
def model():
    """Exact in fp64: norms of its own kind round to fp32."""
    return model_for(renderer_of("llama3"))


@pytest.fixture(scope="module")
def reference(model):
    return moved(model)


def moved(model):
    other = copy.deepcopy(model).requires_grad_(False)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


CASES = [(name, "all") for name in SWITCHES] + [(name, "some") for name in ("contrast", "all", "all, not normalised")]


@pytest.mark.parametrize(("name", "wrong"), CASES)
def test_every_switch_has_the_value_and_gradient_of_its_definition(model, name, wrong):
    wanted = dense_channel_2(model, sites(wrong), SWITCHES[name])
    for batch in (flat_of(sites(wrong)), tree_of(sites(wrong))):
        components = channel_2(model, batch, SWITCHES[name])
        assert_same(components.sdpo_jsd, wanted, model)
        if SWITCHES[name].contrast is not None:
            assert components.counts["sites_without_contrast"] == {"all": 0, "some": 2}[wrong]
        else:
            assert "sites_without_contrast" not in components.counts


@pytest.mark.parametrize("name", ["contrast", "all"])
def test_a_reference_teacher_has_no_hint_rows_of_its_own(model, reference, name):
    shares = [(reference, 0.8), (model, 0.2)]
    wanted = dense_channel_2(model, sites("some"), SWITCHES[name], shares=shares)
    teachers = [WeightedTeacher(reference, 0.8), WeightedTeacher(None, 0.2)]
    for batch in (flat_of(sites("some")), tree_of(sites("some"))):
        assert_same(channel_2(model, batch, SWITCHES[name], sdpo_teachers=teachers).sdpo_jsd, wanted, model)


def test_an_adapter_that_is_off_is_contrasted_as_the_weights_below_it():
    model, strength = wrapped_worker.build(lora=True).eval(), 1.7
    flat = wrapped_worker.flat(0, wrong_hint=True)

    def logits(context, index):
        return model(input_ids=flat[context]).logits[0, flat[index][:, 1]].double()

    def contrasted():
        right = logits("ctx_teacher_input_ids", "sdpo_teacher_index")
        wrong = logits("ctx_contrast_input_ids", "sdpo_contrast_index")
        return (logits("input_ids", "sdpo_student_index") + strength * (right - wrong)).detach()

    with model.disable_adapter():
        below = contrasted()
    log_t = (0.9 * below + 0.1 * contrasted()).log_softmax(-1)
    log_s = logits("input_ids", "sdpo_student_index").log_softmax(-1)
    wanted = (log_s.exp() * (log_s - log_t)).sum(-1).mean()
    teachers = [WeightedTeacher(None, 0.9, without_adapter=True), WeightedTeacher(None, 0.1)]
    for batch in (flat, wrapped_worker.session(0, wrong_hint=True)):
        got = channel_2(model, batch, RowWeighting(contrast=strength), sdpo_teachers=teachers).sdpo_jsd
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wrong", ["all", "some"])
def test_taid_and_the_cap_work_beside_the_switches(model, wrong):
    taid = {"sdpo_wrapper": "taid", "taid_t": 0.4}
    for options, knobs in ((taid, {"taid_t": 0.4}), ({"sdpo_token_clip": 0.4}, {"token_clip": 0.4})):
        wanted = dense_channel_2(model, sites(wrong), SWITCHES["all"], **knobs)
        for batch in (flat_of(sites(wrong)), tree_of(sites(wrong))):
            assert_same(channel_2(model, batch, SWITCHES["all"], **options).sdpo_jsd, wanted, model)


def test_rows_without_a_wrong_hint_keep_their_plain_teacher(model):
    """As many wrong hints fewer, and the rest of the loss is the plain one, row by row."""
    batch = flat_of(sites("none"))
    plain = channel_2(model, batch, None).sdpo_jsd
    for each in (batch, tree_of(sites("none"))):
        components = channel_2(model, each, RowWeighting(contrast=3.0))
        torch.testing.assert_close(components.sdpo_jsd, plain, rtol=1e-12, atol=1e-12)
        assert components.counts["sites_without_contrast"] == 5


def test_a_right_hint_that_is_the_wrong_one_teaches_nothing(model):
    same = [site._replace(wrong=site.hint) for site in sites()]
    teachers = channel_2(model, tree_of(same), None).sdpo_jsd
    contrasted = channel_2(model, tree_of(same), RowWeighting(contrast=2.0)).sdpo_jsd
    assert teachers > 0.1
    assert abs(contrasted.item()) < 1e-12
    assert gradient(model, contrasted).norm() < 1e-10 * gradient(model, teachers).norm()


def test_positions_count_the_tokens_of_a_site_however_its_rows_lie(model):
    tree = tree_of(sites())
    assert tree.site_position.tolist() == POSITIONS
    begins = [position == 0 for position in POSITIONS[1:]]
    for rows in (tree.student_rows, tree.teacher_rows):  # the rows of a tree do not tell its sites apart
        assert (rows[1:] - rows[:-1] != 1).tolist() != begins
    tokens = [token for site in sites() for token in site.ids[site.start : site.end]]
    assert tree.target_tokens.tolist() == tokens
    decays = RowWeighting(position_decay=0.5)
    assert_same(channel_2(model, flat_of(sites()), decays).sdpo_jsd, channel_2(model, tree, decays).sdpo_jsd, model)


@pytest.mark.parametrize("form", [flat_of, tree_of])
def test_switches_that_are_off_leave_every_bit_as_it_is(model, form):
    off = channel_2(model, form(sites()), None)
    for weighting in (RowWeighting(), RowWeighting(normalise=False)):
        other = channel_2(model, form(sites()), weighting)
        assert other.counts == off.counts
        assert torch.equal(off.total, other.total)
        assert torch.equal(gradient(model, off.total), gradient(model, other.total))


def test_a_weight_that_is_the_same_everywhere_changes_nothing_when_normalised(model):
    plain = channel_2(model, tree_of(sites()), None).sdpo_jsd
    for weighting in (RowWeighting(position_decay=1.0), RowWeighting(sigmoid_gate_tau=1e12)):
        assert_same(channel_2(model, tree_of(sites()), weighting).sdpo_jsd, plain, model)


def test_micro_batches_add_up_without_normalisation(model):
    weighting = dataclasses.replace(SWITCHES["all"], normalise=False)
    whole = flat_of(sites("some"))
    count = len(POSITIONS)
    parts = []
    for rows in (slice(0, 9), slice(9, count)):
        part = {key: value[rows] if key.endswith("index") else value for key, value in whole.items()}
        parts.append(channel_2(model, part, weighting, denominators={"sdpo_jsd": count}).sdpo_jsd)
    assert_same(sum(parts), channel_2(model, whole, weighting).sdpo_jsd, model)


def test_no_teacher_has_dropout_not_even_the_live_one_without_a_hint():
    model = wrapped_worker.build(lora=False)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    flat, strength = wrapped_worker.flat(0, with_pairs=False, wrong_hint=True), 1.3
    weighting = RowWeighting(contrast=strength)

    def logits(context, index):
        return model(input_ids=flat[context], use_cache=False).logits[0, flat[index][:, 1]].double()

    model.eval()
    with torch.no_grad():
        right = logits("ctx_teacher_input_ids", "sdpo_teacher_index")
        wrong = logits("ctx_contrast_input_ids", "sdpo_contrast_index")
        teacher = (logits("input_ids", "sdpo_student_index") + strength * (right - wrong)).log_softmax(-1)
    model.train()
    channel_2(model, flat, weighting)  # the first call also looks at the head and for noise
    torch.manual_seed(5)
    got = channel_2(model, flat, weighting).sdpo_jsd
    torch.manual_seed(5)
    log_s = logits("input_ids", "sdpo_student_index").log_softmax(-1)
    wanted = (log_s.exp() * (log_s - teacher)).sum(-1).mean()
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


BAD_KNOBS = [
    {"sigmoid_gate_tau": 0.0},
    {"sigmoid_gate_tau": math.nan},
    {"position_decay": 0.0},
    {"position_decay": 1.5},
    {"contrast": 0.0},
    {"contrast": -1.0},
    {"contrast": math.inf},
    {"teacher_entropy": 1.0},
    {"normalise": None},
]


@pytest.mark.parametrize("knobs", BAD_KNOBS, ids=str)
def test_an_unsuitable_knob_is_named(knobs):
    with pytest.raises(InputError, match=next(iter(knobs))):
        RowWeighting(**knobs)


def test_what_is_not_a_weighting_is_refused_before_the_first_pass(model):
    with pytest.raises(InputError, match="sdpo_weighting"):
        compose_loss(model, tree_of(sites()), sdpo_weighting={"contrast": 1.0})
    by_hand = dataclasses.replace(tree_of(sites()), site_position=None, target_tokens=None)
    for weighting, what in (
        ("position", "position"),
        ("gate", "token"),
        ("entropy", "token"),
    ):
        with refusal(InputError, what=what, got="None"):
            channel_2(model, by_hand, SWITCHES[weighting])
