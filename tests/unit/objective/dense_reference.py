"""compose_loss the slow way: the model's own full logits, loops over rows, formulas written out once more."""

from __future__ import annotations

import math

import torch


def log_probs(model, ids):
    return model(input_ids=ids, use_cache=False).logits.to(torch.float64).log_softmax(-1)


def cross_entropy(model, batch):
    logp = log_probs(model, batch["input_ids"])
    losses = []
    for b, t in batch["response_mask"].nonzero().tolist():
        if t > 0:
            losses.append(-logp[b, t - 1, batch["input_ids"][b, t]])
    return torch.stack(losses).mean()


def target_rows(model, batch):
    student = log_probs(model, batch["input_ids"])
    with torch.no_grad():
        teacher = log_probs(model, batch["ctx_teacher_input_ids"])
    rows = zip(batch["sdpo_student_index"].tolist(), batch["sdpo_teacher_index"].tolist(), strict=True)
    return [(student[b, t], teacher[c, u]) for (b, t), (c, u) in rows]


def jsd(model, batch, beta=0.5):
    values = []
    for log_q, log_p in target_rows(model, batch):
        q, p = log_q.exp(), log_p.exp()
        log_m = ((1 - beta) * q + beta * p).log()
        values.append(beta * (p * (log_p - log_m)).sum() + (1 - beta) * (q * (log_q - log_m)).sum())
    return torch.stack(values).mean()


def taid(model, batch, t):
    student = model(input_ids=batch["input_ids"], use_cache=False).logits.double()
    with torch.no_grad():
        teacher = model(input_ids=batch["ctx_teacher_input_ids"], use_cache=False).logits.double()
    values = []
    rows = zip(batch["sdpo_student_index"].tolist(), batch["sdpo_teacher_index"].tolist(), strict=True)
    for (b, i), (c, j) in rows:
        target = ((1 - t) * student[b, i].detach() + t * teacher[c, j]).softmax(-1)
        values.append(-(target * student[b, i].log_softmax(-1)).sum())
    return torch.stack(values).mean()


def entropy_opd(model, batch):
    values = []
    for log_q, log_p in target_rows(model, batch):
        q, p = log_q.exp(), log_p.exp()
        unsure = (-(p * log_p).sum() / math.log(p.numel())).clamp(0, 1)
        values.append(unsure * (p * (log_p - log_q)).sum() + (1 - unsure) * (q * (log_q - log_p)).sum())
    return torch.stack(values).mean()


def sequence_logprobs(model, batch, side):
    ids, mask = batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"]
    logp = log_probs(model, ids)
    sums = []
    for b in range(ids.shape[0]):
        positions = [t for t in range(1, ids.shape[1]) if mask[b, t] == 1]
        sums.append(sum(logp[b, t - 1, ids[b, t]] for t in positions))
    lengths = mask[:, 1:].eq(1).sum(-1)
    return torch.stack(sums), lengths


def dpo(model, batch, beta=0.1):
    chosen, _ = sequence_logprobs(model, batch, "chosen")
    rejected, _ = sequence_logprobs(model, batch, "rejected")
    margin = (chosen - batch["dpo_chosen_ref_logprobs"]) - (rejected - batch["dpo_rejected_ref_logprobs"])
    return (1 + (-beta * margin).exp()).log().mean()


def simpo(model, batch, beta=2.0, gamma=1.0):
    (chosen, n_chosen), (rejected, n_rejected) = (sequence_logprobs(model, batch, s) for s in ("chosen", "rejected"))
    return (1 + (gamma - beta * (chosen / n_chosen - rejected / n_rejected)).exp()).log().mean()


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
