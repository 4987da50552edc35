"""Every family of models: all three channels of a tree as the plain model gives them, or flat, or refused by name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets
from composer_replication.errors import UnsupportedModelError
from composer_replication.trainer.objective.attention.forward import tree_hidden_states
from composer_replication.trainer.objective.model_head import get_body
from model_families import FAMILIES, VOCAB, build

REFERENCES = (-20.0, -30.0)
WEIGHTS = {"alpha_sdpo": 0.5, "beta_replay": 0.5, "sdpo_jsd_beta": 1.0}


def _some(number: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (number,), generator=torch.Generator().manual_seed(seed)).tolist()


# A turn that answers, a turn that errs, the same with a hint before it, and two endings of an earlier state.
SESSION, HINT = _some(100, 0), _some(12, 1)
TAUGHT = SESSION[:78] + HINT + SESSION[78:]
CHOSEN, REJECTED = SESSION[:60] + _some(9, 2), SESSION[:60] + _some(14, 3)


@cache
def batch():
    targets = SessionTargets()
    targets.add_response(SESSION, 60, 80)
    targets.add_site(SESSION, 80, 100, TAUGHT, 92)
    targets.add_pair(CHOSEN, 60, REJECTED, 60, references=REFERENCES)
    return targets.build()


def plain_losses(model):
    """From the logits of the plain model, each sequence by itself; nothing of this package."""

    def logprobs(ids):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)

    def summed(ids):
        return logprobs(ids)[range(59, len(ids) - 1), ids[60:]].sum()

    student, teacher = logprobs(SESSION), logprobs(TAUGHT).detach()
    lm_ce = -student[range(59, 79), SESSION[60:80]].mean()
    ours, theirs = student[79:99], teacher[91:111]
    sdpo = (ours.exp() * (ours - theirs)).sum(-1).mean()
    margin = (summed(CHOSEN) - REFERENCES[0]) - (summed(REJECTED) - REFERENCES[1])
    return lm_ce, sdpo, -F.logsigmoid(0.1 * margin)


def gradients(model, total):
    """Of the first, a middle and the last matrix that took part."""
    parameters = [each for each in model.parameters() if each.dim() >= 2 and each.requires_grad]
    chosen = [parameters[0], parameters[len(parameters) // 2], parameters[-1]]
    return torch.autograd.grad(total, chosen, allow_unused=True)


def refused(name, model, because):
    with pytest.raises(UnsupportedModelError) as caught:
        compose_loss(model, batch(), **WEIGHTS)
    assert re.search(because, str(caught.value)), name


def as_expected(ran_as, becomes, because):
    assert ran_as == "tree (dense)" if becomes == "tree" else re.match(f"flat: .*{because}", ran_as), ran_as


def test_there_are_forty_families_and_more_and_the_guide_says_what_becomes_of_each():
    assert len(FAMILIES) >= 40
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "batches.md").read_text()
    for name, family in FAMILIES.items():
        family_name = re.compile(rf"[| ]{re.escape(name.split(',')[0])}( and|[,; ])")
        (row, *_) = [line for line in guide.splitlines() if line.startswith("|") and family_name.search(line)]
        # A window or a frequency that a path exceeds is in the table's own words, in another row.
        if "," not in name:
            said = re.search("tree|flat|refused", row.split("|")[2])
            assert said, row
            assert said[0] == family.becomes, name


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_gradients_are_those_of_the_plain_model(name):
    family, model = FAMILIES[name], build(name)
    if family.becomes == "refused":
        return refused(name, model, family.because)
    wanted = plain_losses(model)
    wanted_gradients = gradients(model, wanted[0] + 0.5 * wanted[1] + 0.5 * wanted[2])
    got = compose_loss(model, batch(), **WEIGHTS)
    as_expected(got.ran_as, family.becomes, family.because)
    for ours, theirs in zip((got.lm_ce, got.sdpo_jsd, got.trace_replay_dpo), wanted, strict=True):
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-5)
    for ours, theirs in zip(gradients(model, got.total), wanted_gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_in_half_precision_rows_are_as_near_to_the_exact_ones_as_those_of_the_plain_model(name):
    family, model = FAMILIES[name], build(name, torch.bfloat16)
    becomes, because = family.in_half or (family.becomes, family.because)
    if becomes == "refused":
        return refused(name, model, because)
    exact_model = build(name, torch.bfloat16).float()
    with torch.no_grad():
        got = tree_hidden_states(model, batch().tree)
        as_expected("tree (dense)" if got.flat_because is None else f"flat: {got.flat_because}", becomes, because)
        for rows in batch().tree.rows:
            ids = batch().tree.input_ids[rows][None]
            plain, exact = (get_body(each)(input_ids=ids).last_hidden_state[0] for each in (model, exact_model))
            ours, theirs = ((each.float() - exact).norm() / exact.norm() for each in (got.hidden[rows], plain))
            assert ours <= 1.5 * theirs + 2e-3
