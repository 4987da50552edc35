"""Channel 2 with its switches the slow way, and sessions whose sites lie awkwardly: as trees and as flat mappings."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from composer_replication import compose_loss
from composer_replication.batch.tree_batch import SessionTargets

TRUNK = [5, 9, 13, 21, 8, 34, 55, 3, 17, 29, 41, 2, 11, 7]
OTHER = [5, 9, 13, 40, 45, 46, 47, 48]  # leaves the trunk inside its own site
HINTS, WRONG = ([60, 61, 62], [58, 59]), [50, 51, 52, 53]


class Site(NamedTuple):
    ids: list[int]
    start: int
    end: int
    hint: list[int]
    wrong: list[int] | None

    def context(self, hint):
        return self.ids[: self.start - 1] + hint + self.ids[self.start - 1 : self.end]


def sites(wrong="all"):
    """Two hints for one turn, a turn right behind it, one whose hinted copy another sequence splits, one of OTHER."""
    first, second = HINTS
    made = [
        Site(TRUNK, 2, 5, first, WRONG),
        Site(TRUNK, 2, 5, second, WRONG),
        Site(TRUNK, 5, 8, second, WRONG),
        Site(TRUNK, 8, 12, first, WRONG),
        Site(OTHER, 2, 6, first, WRONG),
    ]
    kept = {"all": range(5), "some": (0, 2, 4), "none": ()}[wrong]
    return [site._replace(wrong=site.wrong if number in kept else None) for number, site in enumerate(made)]


POSITIONS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3]


def tree_of(some_sites):
    targets = SessionTargets()
    targets.add_response(TRUNK, 2, 5)
    split = some_sites[3].context(HINTS[0])
    targets.add_response([*split[:-2], 70, 71, 72, 73], len(split) - 2, len(split) + 2)
    for site in some_sites:
        where = {} if site.wrong is None else {"contrast_start": site.start + len(site.wrong)}
        where |= {} if site.wrong is None else {"contrast_ids": site.context(site.wrong)}
        targets.add_site(site.ids, site.start, site.end, site.context(site.hint), site.start + len(site.hint), **where)
    return targets.build()


def flat_of(some_sites):
    students = [TRUNK, OTHER]
    split = some_sites[3].context(HINTS[0])
    responses = [(TRUNK, 2, 5), ([*split[:-2], 70, 71, 72, 73], len(split) - 2, len(split) + 2)]
    ids = _padded([*students, responses[1][0]])
    mask = torch.zeros_like(ids)
    mask[0, 2:5] = mask[2, len(split) - 2 : len(split) + 2] = 1
    batch = {
        "input_ids": ids,
        "attention_mask": _lengths([*students, responses[1][0]]),
        "response_mask": mask,
        "ctx_teacher_input_ids": _padded([each.context(each.hint) for each in some_sites]),
        "ctx_teacher_attention_mask": _lengths([each.context(each.hint) for each in some_sites]),
        "sdpo_student_index": _index((int(each.ids is OTHER), each.start, each) for each in some_sites),
        "sdpo_teacher_index": _index(
            (number, each.start + len(each.hint), each) for number, each in enumerate(some_sites)
        ),
    }
    wrong = [each for each in some_sites if each.wrong is not None]
    if wrong:
        contexts = [each.context(each.wrong) for each in wrong]
        batch |= {"ctx_contrast_input_ids": _padded(contexts), "ctx_contrast_attention_mask": _lengths(contexts)}
        row_of = {number: row for row, number in enumerate(n for n, each in enumerate(some_sites) if each.wrong)}
        index = _index((row_of.get(n, 0), each.start + len(WRONG), each) for n, each in enumerate(some_sites))
        without = torch.tensor([each.wrong is None for each in some_sites for _ in range(each.end - each.start)])
        batch["sdpo_contrast_index"] = index.masked_fill(without[:, None], -1)
    return batch


def _index(places):
    rows = [[row, start - 1 + j] for row, start, site in places for j in range(site.end - site.start)]
    return torch.tensor(rows)


def _padded(ids):
    width = max(map(len, ids))
    return torch.tensor([each + [0] * (width - len(each)) for each in ids])


def _lengths(ids):
    width = max(map(len, ids))
    return torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in ids])


def dense_rows(model, some_sites, shares, weighting):
    """For every row: the student's logits, the teacher's (detached), and the token, each context run by itself."""

    def logits(who, ids, start, site):
        out = who(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        return out[start - 1 : start - 1 + site.end - site.start]

    students, teachers, tokens = [], [], []
    for site in some_sites:
        students.append(logits(model, site.ids, site.start, site))
        tokens += site.ids[site.start : site.end]
        with torch.no_grad():
            summed = 0.0
            for who, share in shares:
                right = logits(who, site.context(site.hint), site.start + len(site.hint), site)
                if weighting.contrast is not None and site.wrong is not None:
                    plain = logits(who, site.ids, site.start, site)
                    wrong = logits(who, site.context(site.wrong), site.start + len(site.wrong), site)
                    right = plain + weighting.contrast * (right - wrong)
                summed = summed + share * right
        teachers.append(summed)
    return torch.cat(students), torch.cat(teachers), tokens


def dense_channel_2(model, some_sites, weighting, *, shares=None, taid_t=None, token_clip=None):
    """kl_st, or TAID's cross-entropy, row by row with the weights written out once more."""
    student, teacher, tokens = dense_rows(model, some_sites, shares or [(model, 1.0)], weighting)
    losses, weights = [], []
    for s, t, token, position in zip(student, teacher, tokens, POSITIONS, strict=True):
        log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
        if taid_t is None:
            value = (log_s.exp() * (log_s - log_t)).sum()
        else:
            value = -(((1 - taid_t) * s.detach() + taid_t * t).softmax(-1) * log_s).sum()
        if token_clip is not None:
            value = value * min(1.0, token_clip / float(value.detach()))
        losses.append(value)
        weights.append(_weight(weighting, log_s.detach(), log_t, token, position))
    scale = sum(weights) / len(weights) if weighting.normalise else 1.0
    return sum(w / scale * value for w, value in zip(weights, losses, strict=True)) / len(losses)


def _weight(weighting, log_s, log_t, token, position):
    weight = 1.0
    if weighting.sigmoid_gate_tau is not None:
        weight *= 2 / (1 + math.exp(-float(log_s[token] - log_t[token]) / weighting.sigmoid_gate_tau))
    if weighting.teacher_entropy:
        entropy = -sum(p * math.log(p) for p in log_t.exp().tolist())
        weight *= min(1.0, max(0.0, 1 - entropy / math.log(log_t.numel())))
    if weighting.position_decay is not None:
        weight *= weighting.position_decay**position
    return weight


def channel_2(model, batch, weighting, **options):
    given = {"alpha_sdpo": 1.0, "beta_replay": 0.0, "sdpo_jsd_beta": 1.0} | options
    components = compose_loss(model, batch, sdpo_weighting=weighting, **given)
    assert "sdpo_jsd" in components.active
    return components


def gradient(model, loss):
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in grads])


def assert_same(ours, theirs, model, tolerance=1e-9):
    """Value, and the gradient of every parameter as one vector."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    mine, other = gradient(model, ours), gradient(model, theirs)
    assert (mine - other).norm() <= tolerance * other.norm() + 1e-12
