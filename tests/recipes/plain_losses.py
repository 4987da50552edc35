"""GRPO and channel 2 by their formulas, on whole logits: slow, and nothing of ours but the numbers that go in.

grpo  = sum over sampled tokens of -min(r A, clip(r, 0.8, 1.2) A) / (B * max_completion_length)     (dr_grpo)
sdpo  = mean over the erring turns' tokens of min(2, r) * KL(student || teacher), full vocabulary
total = grpo + alpha * sdpo;  teacher logits = 0.99 * start weights + 0.01 * live, both after the hint
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes.recorded_steps import SETTINGS, Batch


class Losses(NamedTuple):
    grpo: Tensor
    sdpo: Tensor
    total: Tensor


def load_start() -> nn.Module:
    """The embedded student in fp32, in eval mode (it has no dropout)."""
    from composer_replication.envs.student import load_student

    return load_student(dtype=torch.float32)[0].eval()


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


def completion_logprobs(model: Any, batch: Batch) -> Tensor:
    """(B, C) log-probs of the completions' tokens."""
    return logprobs_in(
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits, batch
    )


def logprobs_in(logits: Tensor, batch: Batch) -> Tensor:
    width = batch.completion_ids.shape[1]
    logprobs = logits[:, -width - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(-1, batch.completion_ids[..., None])[..., 0]


def plain_losses(model: Any, start: Any, batch: Batch, alpha: float) -> Losses:
    """`start` has the start weights, without gradient."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits.float()
    logprobs = logits.log_softmax(-1)
    width = batch.completion_ids.shape[1]
    now = logprobs[:, -width - 1 : -1].gather(-1, batch.completion_ids[..., None])[..., 0]
    grpo = plain_grpo(now, batch)
    student, _, tokens = batch.index_pairs()
    rows = logprobs[student[:, 0], student[:, 1]]
    divergence = (rows.exp() * (rows - teacher_logprobs(model, start, batch))).sum(-1)
    sampled = rows.detach().gather(-1, tokens[:, None])[:, 0]
    place = student[:, 1] + 1 - batch.prompt_ids.shape[1]
    weight = (sampled - batch.old_logprobs[student[:, 0], place]).exp().clamp(max=SETTINGS["is_clip"])
    sdpo = (weight * divergence).mean()
    return Losses(grpo, sdpo, grpo + alpha * sdpo)


def plain_grpo(logprobs: Tensor, batch: Batch) -> Tensor:
    ratio = torch.where(batch.loss_mask, logprobs - batch.old_logprobs, 0.0).exp()
    advantage, epsilon = batch.advantages[:, None], SETTINGS["epsilon"]
    terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
    return (terms * batch.loss_mask).sum() / (len(terms) * SETTINGS["max_completion_length"])


@torch.no_grad()
def teacher_logprobs(model: Any, start: Any, batch: Batch) -> Tensor:
    """(N, V) at the rows of `index_pairs`, each hinted context on its own."""
    share, found = SETTINGS["live_share"], []
    for site in batch.sites:
        before, live = (each(input_ids=site.teacher_ids[None], use_cache=False).logits[0] for each in (start, model))
        logits = (1 - share) * before + share * live
        found.append(logits[site.teacher_start - 1 : site.teacher_start - 1 + site.end - site.start].float())
    return torch.cat(found).log_softmax(-1)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    return {name: torch.zeros(()) if each is None else each for name, each in zip(names, found, strict=True)}


def relative_gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative L2 distance of a tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-12)) for name in wanted)


def assert_same_gradient(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Within 1e-5 as a whole; a single tensor within 2e-5, as rows in a padded batch round otherwise than alone."""
    assert relative_gap(found, wanted) < 2e-5
    whole = [torch.cat([each[name].flatten() for name in wanted]) for each in (found, wanted)]
    assert float((whole[0] - whole[1]).norm() / whole[1].norm()) < 1e-5


def optimiser_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=SETTINGS["learning_rate"],
        betas=SETTINGS["betas"],
        eps=SETTINGS["adam_epsilon"],
        weight_decay=SETTINGS["weight_decay"],
    )
