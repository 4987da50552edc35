"""Slow, independent references for every loss: one row at a time, in float64, from exp, log and sums only.

Nothing here comes from the package or from torch.nn.functional. Every function takes tensors of any float dtype, works
in float64 and is differentiable, so that its gradient is the reference gradient. Row functions take one row of logits
for the student and one for the teacher; batch functions loop over them.
"""

import math

import torch

# ---------------------------------------------------------------- rows


def log_probs(logits_V):
    """log softmax of one row."""
    shifted_V = logits_V.double() - float(logits_V.detach().double().max())
    return shifted_V - torch.log(torch.exp(shifted_V).sum())


def kl(log_p_V, log_q_V):
    """KL(p || q) of two rows of log-probabilities."""
    return (torch.exp(log_p_V) * (log_p_V - log_q_V)).sum()


def jsd_of_log_probs(log_s_V, log_t_V, beta):
    """M = (1-beta) S + beta T; beta KL(T||M) + (1-beta) KL(S||M); the ends are kl_ts and kl_st."""
    if beta == 0:
        return kl(log_t_V, log_s_V)
    if beta == 1:
        return kl(log_s_V, log_t_V)
    log_m_V = torch.log((1 - beta) * torch.exp(log_s_V) + beta * torch.exp(log_t_V))
    return beta * kl(log_t_V, log_m_V) + (1 - beta) * kl(log_s_V, log_m_V)


def top_indices(values_V, k):
    """Indices of the k largest entries, largest first."""
    values = [float(v) for v in values_V.detach()]
    return sorted(range(len(values)), key=lambda v: -values[v])[:k]


def with_tail(log_p_V, kept):
    """The true log-probabilities of the kept entries and, last, of all others; where there are none, upstream's 1e-7.

    Upstream has log(1 - sum of the kept), at least 1e-7: another number where less is left, and no gradient there.
    """
    others = [v for v in range(len(log_p_V)) if v not in kept]
    tail = torch.exp(log_p_V[others]).sum() if others else torch.tensor(-math.expm1(-1e-7), dtype=torch.float64)
    return torch.cat([log_p_V[kept], torch.log(tail).reshape(1)])


def jsd_row(student_V, teacher_V, *, beta=0.5, temperature=1.0, top_k=None):
    """Generalised JSD of one row; top_k keeps the teacher's top-k entries and renormalises both sides on them."""
    student_V, teacher_V = student_V.double() / temperature, teacher_V.double() / temperature
    if top_k is not None:
        kept = top_indices(teacher_V, top_k)
        student_V, teacher_V = student_V[kept], teacher_V[kept]
    return jsd_of_log_probs(log_probs(student_V), log_probs(teacher_V), beta)


def student_top_k_row(student_V, teacher_V, *, beta=1.0, top_k=20, add_tail=True):
    """SDPO's divergence of one row on the student's top-k entries, with a tail bucket or renormalised."""
    log_s_V, log_t_V = log_probs(student_V), log_probs(teacher_V)
    if top_k is None:
        return jsd_of_log_probs(log_s_V, log_t_V, beta)
    kept = top_indices(student_V, top_k)
    if add_tail:
        return jsd_of_log_probs(with_tail(log_s_V, kept), with_tail(log_t_V, kept), beta)
    return jsd_of_log_probs(log_probs(log_s_V[kept]), log_probs(log_t_V[kept]), beta)


def cross_entropy_to_teacher_row(student_V, target_logits_V):
    """-sum_v p_v log q_v with a detached target."""
    return -(torch.exp(log_probs(target_logits_V.detach())) * log_probs(student_V)).sum()


def taid_row(student_V, teacher_V, *, t):
    """p_t = softmax((1-t) sg(student) + t teacher); -sum_v p_t log q."""
    mixed_V = (1 - t) * student_V.detach().double() + t * teacher_V.double()
    return cross_entropy_to_teacher_row(student_V, mixed_V)


def entropy_row(logits_V):
    """Entropy in nats of one row."""
    log_p_V = log_probs(logits_V)
    return -(torch.exp(log_p_V) * log_p_V).sum()


def soft_gate_row(student_V, teacher_V, *, h_max=None, temperature=1.0):
    """w kl_ts + (1-w) kl_st with w = clamp(H_T / h_max, 0, 1)."""
    student_V, teacher_V = student_V.double() / temperature, teacher_V.double() / temperature
    h_max = math.log(len(teacher_V)) if h_max is None else h_max
    w = min(max(float(entropy_row(teacher_V.detach())) / h_max, 0.0), 1.0)
    log_s_V, log_t_V = log_probs(student_V), log_probs(teacher_V)
    return w * kl(log_t_V, log_s_V) + (1 - w) * kl(log_s_V, log_t_V)


def hard_gate_row(student_V, teacher_V, *, temperature=1.0, tau=1.0, top_k=16):
    """kl_st + 1[H_T > tau] KL(T||S) over the teacher's top-k entries and a tail bucket."""
    student_V, teacher_V = student_V.double() / temperature, teacher_V.double() / temperature
    log_s_V, log_t_V = log_probs(student_V), log_probs(teacher_V)
    loss = kl(log_s_V, log_t_V)
    if float(entropy_row(teacher_V.detach())) > tau:
        kept = top_indices(teacher_V, top_k)
        loss = loss + kl(with_tail(log_t_V, kept), with_tail(log_s_V, kept))
    return loss


def smoothed_cross_entropy_row(logits_V, token_id, *, label_smoothing=0.0):
    """(1-eps) (-log p_y) + eps mean_v(-log p_v)."""
    log_p_V = log_probs(logits_V)
    return -(1 - label_smoothing) * log_p_V[int(token_id)] - label_smoothing * log_p_V.sum() / len(log_p_V)


# ---------------------------------------------------------------- rows to batches


def linear_logits(hidden_NH, weight_VH, bias_V=None, scale=1.0, softcap=None):
    """z = scale (h W^T + b); softcap tanh(z / softcap) when set."""
    z_NV = hidden_NH.double() @ weight_VH.double().T
    if bias_V is not None:
        z_NV = z_NV + bias_V.double()
    z_NV = scale * z_NV
    return z_NV if softcap is None else softcap * torch.tanh(z_NV / softcap)


def per_token(row_fn, student_BTV, teacher_BTV, keep_BT=None):
    """(B,T) of row_fn, 0 where not kept; the rows that are not kept are never looked at."""
    zero = torch.zeros((), dtype=torch.float64)
    num_rows, num_tokens = student_BTV.shape[:2]
    rows = [
        torch.stack(
            [
                row_fn(student_BTV[b, i], teacher_BTV[b, i]) if keep_BT is None or bool(keep_BT[b, i]) else zero
                for i in range(num_tokens)
            ]
        )
        for b in range(num_rows)
    ]
    return torch.stack(rows)


def cap(values, token_clip):
    """d * min(1, cap / sg(d)): the value is capped, the gradient keeps its direction."""
    if token_clip is None:
        return values
    factors = [min(1.0, token_clip / float(v)) if float(v) > 0 else 1.0 for v in values.detach().reshape(-1)]
    return values * torch.tensor(factors, dtype=torch.float64).reshape(values.shape)


def reduce(values_BT, reduction, num_kept, num_entries):
    """num_kept: kept tokens, or the batch size where there are no labels; num_entries: kept tokens x vocabulary."""
    if reduction == "none":
        return values_BT
    return values_BT.sum() / {"sum": 1, "batchmean": num_kept, "mean": num_entries}[reduction]


def jsd(
    student, teacher, labels=None, *, beta=0.5, temperature=1.0, reduction="batchmean", top_k=None, token_clip=None
):
    """generalized_jsd_loss."""
    keep = None if labels is None else labels != -100
    values = per_token(
        lambda s, t: jsd_row(s, t, beta=beta, temperature=temperature, top_k=top_k), student, teacher, keep
    )
    num_kept = student.shape[0] if keep is None else int(keep.sum())
    num_tokens = values.numel() if keep is None else num_kept
    return reduce(cap(values, token_clip), reduction, num_kept, num_tokens * (top_k or student.shape[-1]))


def masked_mean(values_BT, mask_BT):
    return (values_BT * mask_BT.double()).sum() / float(mask_BT.double().sum())


def sdpo(student, teacher, mask, *, token_ids=None, old_logprobs=None, is_clip=None, sampled_token=False, **knobs):
    """sdpo_loss; knobs: beta, top_k, add_tail."""
    knobs = {"beta": 1.0, "top_k": None, "add_tail": True} | knobs
    values = per_token(lambda s, t: student_top_k_row(s, t, **knobs), student, teacher, mask)
    if token_ids is not None:
        log_s, log_t = token_log_probs(student, token_ids), token_log_probs(teacher, token_ids)
    if sampled_token:
        values = (log_s - log_t).detach() * log_s
    if is_clip is not None:
        log_ratio = (log_s - old_logprobs.double()).detach()
        values = values * torch.exp(log_ratio.clamp(-20.0, 20.0)).clamp(max=is_clip)
    return masked_mean(values, mask)


def token_log_probs(logits_BTV, token_ids_BT):
    rows = zip(logits_BTV.reshape(-1, logits_BTV.shape[-1]), token_ids_BT.reshape(-1).tolist(), strict=True)
    return torch.stack([log_probs(row_V)[i] for row_V, i in rows]).reshape(token_ids_BT.shape)


def taid(student, teacher, mask=None, *, t):
    """taid_loss."""
    mask = torch.ones(student.shape[:2]) if mask is None else mask
    return masked_mean(per_token(lambda s, r: taid_row(s, r, t=t), student, teacher, mask), mask)


def entropy_opd(student, teacher, labels=None, *, gate="soft", reduction="sum", **knobs):
    """entropy_aware_opd_loss; knobs of the gate's row function."""
    row_fn = {"soft": soft_gate_row, "hard": hard_gate_row}[gate]
    values = per_token(lambda s, t: row_fn(s, t, **knobs), student, teacher, labels)
    num_kept = student.shape[0] if labels is None else int(labels.sum())
    return reduce(values, reduction, num_kept, num_kept * student.shape[-1])


# ---------------------------------------------------------------- schedules and preferences


def taid_schedule(losses, num_train_steps, *, t_start=0.4, t_end=1.0, alpha=5e-4, beta=0.99, disable_adaptive=False):
    """t after each update; step i is passed as global_step=i."""
    t, previous, momentum, history = t_start, None, 0.0, []
    for step, loss in enumerate(losses):
        if previous is not None:
            momentum = beta * momentum + (1 - beta) * (previous - loss) / (previous + 1e-15)
            delta = alpha / (1 + math.exp(-momentum)) * (1 - t)
            target = t_start + (t_end - t_start) * step / num_train_steps
            t = target if disable_adaptive else min(t_end, max(target, t + delta))
        previous = loss
        history.append(t)
    return history


def softplus_of_minus(x):
    """-log sigmoid(x)."""
    return torch.log(1 + torch.exp(-x.double()))


def simpo(chosen_B, rejected_B, *, beta=2.0, gamma=1.0):
    terms = [
        softplus_of_minus(beta * (c.double() - r.double()) - gamma) for c, r in zip(chosen_B, rejected_B, strict=True)
    ]
    return sum(terms) / len(terms)


def dpo(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, *, beta=0.1):
    gaps = [
        (c.double() - rc.double()) - (r.double() - rr.double())
        for c, r, rc, rr in zip(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, strict=True)
    ]
    return sum(softplus_of_minus(beta * gap) for gap in gaps) / len(gaps)


def prime_rl_default(
    trainer, inference, advantages, mask, weights=None, *, high=0.2, low=0.2, adv_tau=1.0, kl_tau=1e-3
):
    """PRIME-RL's default loss, one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(trainer)):
        lt, li, a = trainer[i].double(), float(inference[i]), float(advantages[i])
        d = math.exp(float(lt.detach())) - math.exp(li)
        dropped = (a > 0 and d > high) or (a <= 0 and d < -low)
        term = -adv_tau * a * torch.exp(lt - li) * (0.0 if dropped else 1.0) + kl_tau * (lt - li) ** 2
        total = total + term * float(mask[i]) * (1.0 if weights is None else float(weights[i]))
    return total


def prime_rl_ref_kl(trainer, inference, ref, mask, weights=None):
    """PRIME-RL's ref_kl loss, one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(trainer)):
        lt, li = trainer[i].double(), float(inference[i])
        kept = 0.0 if math.exp(float(lt.detach())) - math.exp(li) < -0.2 else 1.0
        term = -kept * (float(ref[i]) - float(lt.detach())) * torch.exp(lt - li) + 1e-3 * (lt - li) ** 2
        total = total + term * float(mask[i]) * (1.0 if weights is None else float(weights[i]))
    return total
