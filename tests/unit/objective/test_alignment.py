"""The alignment of channel 2 (algorithms.md 2): what must not matter does not, and what is off by one is caught."""

from __future__ import annotations

import pytest
import torch

from composer_replication import compose_loss
from composer_replication.errors import AlignmentError
from refusals import refusal
from tiny_models import VOCAB, build, random_batch


@pytest.fixture(scope="module")
def model():
    return build("qwen2-untied").double()


def sdpo(model, batch):
    return compose_loss(model, batch, alpha_sdpo=1.0).sdpo_jsd


def gradient_norm(model, value):
    return torch.stack([g.norm() for g in torch.autograd.grad(value, list(model.parameters()))]).norm().item()


def test_an_empty_hint_gives_no_loss_and_no_gradient(model):
    batch = random_batch(pairs=False)
    hinted = sdpo(model, batch)
    same = {**batch, "ctx_teacher_input_ids": batch["input_ids"], "sdpo_teacher_index": batch["sdpo_student_index"]}
    unhinted = sdpo(model, same)
    assert abs(unhinted.item()) < 1e-6 < hinted.item()
    assert gradient_norm(model, unhinted) < 1e-5 * gradient_norm(model, hinted)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("shift", [-1, 1])
def test_one_side_shifted_by_one_position_is_caught(model, side, shift):
    batch = random_batch(pairs=False)
    index = batch[f"sdpo_{side}_index"].clone()
    index[:, 1] += shift
    index[:, 1].clamp_(max=12 if side == "student" else 17)
    with refusal(AlignmentError, what=str(tuple(index[0].tolist()))):
        sdpo(model, {**batch, f"sdpo_{side}_index": index})


def padded(batch, *, left, right):
    """The same batch with padding; masks say where it is, and its ids are nothing special."""
    filler = 5

    def pad(ids, value):
        return torch.nn.functional.pad(ids, (left, right), value=value)

    out = dict(batch)
    for ids_key, mask_key in (
        ("input_ids", "attention_mask"),
        ("ctx_teacher_input_ids", "ctx_teacher_attention_mask"),
        ("dpo_chosen_input_ids", "dpo_chosen_attention_mask"),
        ("dpo_rejected_input_ids", "dpo_rejected_attention_mask"),
    ):
        out[mask_key] = pad(torch.ones_like(batch[ids_key]), 0)
        out[ids_key] = pad(batch[ids_key], filler)
    for key in ("response_mask", "dpo_chosen_response_mask", "dpo_rejected_response_mask"):
        out[key] = pad(batch[key], 0)
    for key in ("sdpo_student_index", "sdpo_teacher_index"):
        out[key] = batch[key] + torch.tensor([0, left])
    return out


@pytest.mark.parametrize(("left", "right"), [(0, 7), (6, 0), (3, 4)])
@pytest.mark.parametrize("family", ["qwen2-untied", "gpt2"])
def test_padding_on_either_side_changes_nothing(family, left, right):
    model, batch = build(family).double(), random_batch()
    want = compose_loss(model, batch).detached()
    got = compose_loss(model, padded(batch, left=left, right=right)).detached()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, abs=1e-9), name


def test_the_order_of_sequences_and_of_index_pairs_changes_nothing(model):
    batch = random_batch()
    want = compose_loss(model, batch).detached()
    flipped = {key: value.flip(0) for key, value in batch.items()}
    for key in ("sdpo_student_index", "sdpo_teacher_index"):
        flipped[key] = torch.stack([1 - flipped[key][:, 0], flipped[key][:, 1]], dim=1)
    got = compose_loss(model, flipped).detached()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, abs=1e-12), name


def test_one_branch_per_site_equals_the_mean_over_sites(model):
    """Two sites of one session have two hinted contexts; neither sees the other's hint."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (1, 20), generator=generator)
    hints = torch.randint(3, VOCAB, (2, 4), generator=generator)
    sites = [(5, range(6, 9)), (13, range(14, 18))]
    batch = {"input_ids": ids, "response_mask": torch.zeros_like(ids)}
    branches, student, teacher = [], [], []
    for number, (cut, span) in enumerate(sites):
        branches.append(torch.cat([ids[0, :cut], hints[number], ids[0, cut : span.stop]]))
        student += [[0, t - 1] for t in span]
        teacher += [[number, t + 3] for t in span]
    width = max(len(branch) for branch in branches)
    together = torch.stack([torch.nn.functional.pad(branch, (0, width - len(branch))) for branch in branches])
    both = sdpo(model, {**batch, **channel_2(together, student, teacher)}).item()
    separate = 0.0
    for number, (_, span) in enumerate(sites):
        rows = [n for n, (row, _) in enumerate(teacher) if row == number]
        alone = channel_2(branches[number][None], [student[n] for n in rows], [[0, teacher[n][1]] for n in rows])
        separate += sdpo(model, {**batch, **alone}).item() * len(span)
    assert both == pytest.approx(separate / 7, abs=1e-12)


def channel_2(teacher_ids, student_index, teacher_index):
    return {
        "ctx_teacher_input_ids": teacher_ids,
        "sdpo_student_index": torch.tensor(student_index),
        "sdpo_teacher_index": torch.tensor(teacher_index),
    }


@pytest.mark.parametrize("span", [(1, 2), (1, 5), (13, 14), (5, 14)])
def test_targets_at_the_first_and_last_position_are_scored(model, span):
    ids = random_batch()["input_ids"][:1]
    other = ids.clone()
    other[0, 0] = 7 if int(ids[0, 0]) != 7 else 8  # a different context of the same length
    mask = torch.full_like(ids, -100)
    mask[0, slice(*span)] = 1
    batch = {"input_ids": ids, "response_mask": torch.zeros_like(ids), "ctx_teacher_input_ids": other}
    components = compose_loss(model, {**batch, "sdpo_loss_mask": mask})
    assert components.counts["sdpo_jsd"] == span[1] - span[0]
    index = torch.tensor([[0, t - 1] for t in range(*span)])
    by_index = compose_loss(model, {**batch, "sdpo_student_index": index, "sdpo_teacher_index": index})
    assert by_index.sdpo_jsd.item() == components.sdpo_jsd.item() > 0


def test_the_old_equal_shape_form_without_a_mask_scores_every_token(model):
    ids = random_batch()["input_ids"]
    other = ids.clone()
    other[:, 0] = 3
    components = compose_loss(
        model, {"input_ids": ids, "response_mask": torch.ones_like(ids), "ctx_teacher_input_ids": other}
    )
    assert components.counts["sdpo_jsd"] == 2 * 13  # nothing predicts a first token
    assert components.counts["lm_ce"] == 2 * 13


def test_the_rl_stand_in_is_bit_identical_with_channel_2_off(model):
    batch = random_batch()
    on, off = compose_loss(model, batch), compose_loss(model, batch, alpha_sdpo=0.0)
    assert on.lm_ce.item() == off.lm_ce.item()
    assert on.trace_replay_dpo.item() == off.trace_replay_dpo.item()


def test_a_mark_on_the_first_real_token_selects_no_row_on_either_side_of_padding(model):
    """Nothing predicts it: behind left padding the row before it is padding."""
    batch = {"input_ids": random_batch()["input_ids"]}
    batch["response_mask"] = torch.ones_like(batch["input_ids"])
    want = compose_loss(model, batch)
    for left, right in ((4, 0), (0, 4)):
        ids = torch.nn.functional.pad(batch["input_ids"], (left, right), value=5)
        mask = torch.nn.functional.pad(batch["response_mask"], (left, right))
        got = compose_loss(model, {"input_ids": ids, "response_mask": mask, "attention_mask": mask})
        assert got.counts["lm_ce"] == want.counts["lm_ce"] == 26
        assert got.lm_ce.item() == pytest.approx(want.lm_ce.item(), abs=1e-9)
