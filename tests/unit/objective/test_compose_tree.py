"""All three channels of a session from one pass over a tree equal those of its flat sequences, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.errors import AlignmentError, BatchKeyError, InputError
from composer_replication.trainer.objective.reference import reference_logprobs, with_reference
from refusals import refusal
from tiny_models import build

TRUNK = [5, 9, 13, 21, 8, 34, 55, 3, 17, 29, 41, 2, 11, 7]
HINT = [60, 61, 62]


def session(references=((-3.0, -4.0), (-2.5, -2.0))):
    """A trunk with two responses, two sites and two pairs, as a tree and as the mapping of the flat path."""
    tree = SessionTargets()
    for start, end in ((2, 5), (8, 12)):
        tree.add_response(TRUNK, start, end)
    sites = [(2, 5), (8, 12)]
    teachers = [TRUNK[: start - 1] + HINT + TRUNK[start - 1 : end] for start, end in sites]
    for (start, end), teacher in zip(sites, teachers, strict=True):
        tree.add_site(TRUNK, start, end, teacher, start + len(HINT))
    chosen = [[*TRUNK[:2], 70, 71, 72, 73], [*TRUNK[:8], 74, 75]]
    rejected = [TRUNK[:5], TRUNK[:12]]
    for number, start in enumerate((2, 8)):
        reference = None if references is None else references[number]
        tree.add_pair(chosen[number], start, rejected[number], start, references=reference)
    return tree.build(), _flat(sites, teachers, chosen, rejected, references)


def _flat(sites, teachers, chosen, rejected, references):
    mask = torch.zeros(1, len(TRUNK), dtype=torch.long)
    for start, end in sites:
        mask[0, start:end] = 1
    student = [[0, row] for start, end in sites for row in range(start - 1, end - 1)]
    teacher = [
        [number, row + len(HINT)] for number, (start, end) in enumerate(sites) for row in range(start - 1, end - 1)
    ]
    batch = {
        "input_ids": torch.tensor([TRUNK]),
        "response_mask": mask,
        "ctx_teacher_input_ids": _padded(teachers),
        "ctx_teacher_attention_mask": _lengths(teachers),
        "sdpo_student_index": torch.tensor(student),
        "sdpo_teacher_index": torch.tensor(teacher),
    }
    for side, ids in (("chosen", chosen), ("rejected", rejected)):
        batch[f"dpo_{side}_input_ids"] = _padded(ids)
        batch[f"dpo_{side}_attention_mask"] = _lengths(ids)
        counted = _lengths(ids).clone()
        for row, start in enumerate((2, 8)):
            counted[row, :start] = 0
        batch[f"dpo_{side}_response_mask"] = counted
        if references is not None:
            index = 0 if side == "chosen" else 1
            batch[f"dpo_{side}_ref_logprobs"] = torch.tensor([each[index] for each in references], dtype=torch.float64)
    return batch


def _padded(ids):
    width = max(map(len, ids))
    return torch.tensor([each + [0] * (width - len(each)) for each in ids])


def _lengths(ids):
    width = max(map(len, ids))
    return torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in ids])


def both(model, tree, flat, **options):
    found = []
    for inputs in (tree, flat):
        model.zero_grad(set_to_none=True)
        components = compose_loss(model, inputs, alpha_sdpo=0.7, beta_replay=0.3, **options)
        components.total.backward()
        grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        found.append((components, grads))
    return found


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen2-untied", "llama-untied", "gemma2-tied"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sdpo_jsd_beta": 1.0, "lm_ce_label_smoothing": 0.1},
        {"sdpo_wrapper": "taid", "taid_t": 0.4},
        {"sdpo_wrapper": "entropy_opd", "sdpo_token_clip": 0.5},
        {"dpo_variant": "simpo"},
    ],
    ids=["default", "kl_st", "taid", "entropy", "simpo"],
)
def test_a_tree_gives_the_numbers_and_gradients_of_its_sequences(family, options):
    model = build(family).double()
    (ours, our_grads), (theirs, their_grads) = both(model, *session(), **options)
    assert ours.active == theirs.active == ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    assert ours.counts == theirs.counts
    for name in ("lm_ce", "sdpo_jsd", "trace_replay_dpo", "total"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=1e-7)
    assert our_grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        assert (our_grads[name] - grad).norm() <= 2e-5 * grad.norm() + 1e-9, name


def test_an_empty_hint_with_a_live_teacher_has_no_loss():
    tree = SessionTargets()
    tree.add_response(TRUNK, 2, 5)
    tree.add_site(TRUNK, 2, 5, TRUNK[:5], 2)
    components = compose_loss(build("qwen2-tied").double(), tree.build(), alpha_sdpo=1.0)
    assert abs(components.sdpo_jsd.item()) < 1e-6
    assert components.counts["sdpo_jsd"] == 3


def test_channels_without_targets_or_weight_do_not_run():
    tree = SessionTargets()
    tree.add_response(TRUNK, 2, 5)
    model = build("qwen2-tied").double()
    assert compose_loss(model, tree.build()).active == ("lm_ce",)
    whole, _ = session()
    assert compose_loss(model, whole, alpha_sdpo=0.0, beta_replay=0.0).active == ("lm_ce",)


def test_a_shift_by_one_is_caught():
    tree = SessionTargets()
    teacher = TRUNK[:1] + HINT + TRUNK[1:5]
    with refusal(AlignmentError, got=str(TRUNK[2:5])):
        tree.add_site(TRUNK, 2, 5, teacher, 2 + len(HINT) - 1)


@pytest.mark.parametrize(("start", "end"), [(0, 3), (3, 3), (4, 2), (2, 99)])
def test_a_range_without_tokens_or_without_a_row_before_it_is_refused(start, end):
    with refusal(InputError, what="target", got=str((start, end))):
        SessionTargets().add_response(TRUNK, start, end)


def test_what_is_missing_or_out_of_range_is_an_error():
    model = build("qwen2-tied").double()
    with refusal(InputError, what="session"):
        SessionTargets().build()
    without, _ = session(references=None)
    with refusal(BatchKeyError, what="reference", got="None"):
        compose_loss(model, without)
    assert "trace_replay_dpo" in compose_loss(model, without, dpo_variant="simpo").active
    wrong = SessionTargets()
    wrong.add_response([1, 2, 10_000], 1, 3)
    with refusal(InputError, what="tree", got="10000"):
        compose_loss(model, wrong.build())
    half = SessionTargets()
    half.add_pair([1, 2, 3], 1, [1, 5], 1, references=(-1.0, -2.0))
    half.add_pair([1, 2, 4], 1, [1, 6], 1)
    with refusal(InputError, what="reference", got="1 of 2"):
        half.build()


@given(st.data())
def test_random_responses_agree_with_the_flat_path(data):
    model = build("qwen2-tied").double()
    ids = data.draw(st.lists(st.integers(3, 90), min_size=4, max_size=12))
    start = data.draw(st.integers(1, len(ids) - 2))
    end = data.draw(st.integers(start + 1, len(ids)))
    tree = SessionTargets()
    tree.add_response(ids, start, end)
    mask = torch.zeros(1, len(ids), dtype=torch.long)
    mask[0, start:end] = 1
    flat = compose_loss(model, {"input_ids": torch.tensor([ids]), "response_mask": mask})
    torch.testing.assert_close(compose_loss(model, tree.build()).lm_ce, flat.lm_ce, rtol=1e-9, atol=1e-9)


def test_references_computed_on_a_batch_are_those_of_its_own_contexts():
    model = build("qwen2-tied").double()
    tree, flat = session(references=None)
    flat |= reference_logprobs(model, flat)
    referenced = with_reference(model, tree)
    for mine, theirs in zip(referenced.pairs.references(), ("chosen", "rejected"), strict=True):
        torch.testing.assert_close(mine, flat[f"dpo_{theirs}_ref_logprobs"], rtol=1e-6, atol=1e-8)
    assert compose_loss(model, referenced).detached()["trace_replay_dpo"] == pytest.approx(math.log(2), abs=1e-5)
    no_pairs = SessionTargets()
    no_pairs.add_response(TRUNK, 2, 5)
    batch = no_pairs.build()
    assert with_reference(model, batch) is batch
