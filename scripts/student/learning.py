"""Trains the student on stored episodes: plain cross-entropy on what the assistant says, on a GPU in minutes.

python scripts/student/learning.py DATA OUT [--steps N]

DATA has `tokens.npz` and the tokenizer, as `lessons.py` writes them; OUT gets a folder that `from_pretrained` reads.
Only kernels that sum in one order are used: the same data give the same weights, bit by bit, on the same kind of GPU
with the same libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from composer_replication.envs.student import TRAINED_CONTEXT, student_folder

SEED = 16
STEPS = 4000
BATCH = 65_536  # tokens, padding with them
_BATCHES_AT_ONCE = 24
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


class Episodes(NamedTuple):
    """All episodes in one line: their ids, which of them are targets, and where each episode begins."""

    ids: np.ndarray
    is_target: np.ndarray
    starts: np.ndarray

    @classmethod
    def read(cls, folder: Path) -> Episodes:
        with np.load(folder / "tokens.npz", allow_pickle=False) as held:
            ids, lengths = held["ids"], held["lengths"]
            is_target = np.unpackbits(held["targets"], count=len(ids)).astype(bool)
        return cls(ids, is_target, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    @property
    def lengths(self) -> np.ndarray:
        return np.minimum(np.diff(self.starts), TRAINED_CONTEXT)


class Batch(NamedTuple):
    """Episodes of about one length, padded at the right, where a causal model never looks."""

    ids: Tensor
    is_target: Tensor
    is_context: Tensor


def batches(episodes: Episodes, tokens: int) -> Iterator[Batch]:
    """Epoch after epoch, each in an order of its own."""
    draw, lengths = np.random.default_rng(SEED), episodes.lengths
    at_once = max(1, int(_BATCHES_AT_ONCE * tokens / lengths.mean()))
    while True:
        order = draw.permutation(len(lengths))
        for first in range(0, len(order), at_once):
            chosen = order[first : first + at_once]
            chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
            groups = list(_groups(chosen, lengths, tokens))
            for group in draw.permutation(len(groups)):
                yield _padded(episodes, groups[group], lengths)


def _groups(chosen: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Neighbours in a sorted list, as many as the budget holds with their padding."""
    first = 0
    for at in range(1, len(chosen) + 1):
        if at == len(chosen) or int(lengths[chosen[at]]) * (at - first + 1) > tokens:
            yield chosen[first:at]
            first = at


def _padded(episodes: Episodes, group: np.ndarray, lengths: np.ndarray) -> Batch:
    shape = (len(group), int(lengths[group].max()))
    ids, is_target, is_real = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, bool)
    for row, number in enumerate(group.tolist()):
        first, length = int(episodes.starts[number]), int(lengths[number])
        ids[row, :length] = episodes.ids[first : first + length]
        is_target[row, :length] = episodes.is_target[first : first + length]
        is_real[row, :length] = True
    return Batch(*(torch.from_numpy(each) for each in (ids, is_target, is_real & ~is_target)))


def new_model(vocabulary: int, pad: int, end: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        **SIZES,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def losses_of(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean over the assistant's tokens, and over all others: copying is learnt sooner with a little of those."""
    hidden = model.model(input_ids=batch.ids, use_cache=False)[0]
    logits = model.lm_head(hidden[:, :-1]).flatten(0, 1).float()
    each = F.cross_entropy(logits, batch.ids[:, 1:].flatten(), reduction="none")
    is_target, is_context = batch.is_target[:, 1:].flatten(), batch.is_context[:, 1:].flatten()
    return (each * is_target).sum() / is_target.sum(), (each * is_context).sum() / is_context.sum()


def rate_at(progress: float, peak: float) -> float:
    """Up over a twentieth of the way, then a cosine down to a hundredth of the peak."""
    if progress < 0.05:
        return peak * (0.02 + progress / 0.05)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.05) / 0.95))))


def learn(model: Qwen3ForCausalLM, episodes: Episodes, options: argparse.Namespace) -> None:
    """AdamW with bf16 arithmetic on fp32 weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=device == "cuda")
    began, recent = time.perf_counter(), list[Tensor]()
    for step, batch in enumerate(islice(batches(episodes, options.tokens), options.steps)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step / options.steps, options.rate)
        on_device = Batch(*(_sent(each, device) for each in batch))
        with torch.autocast(device, torch.bfloat16), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            wanted, context = losses_of(model, on_device)
            (wanted + options.context_weight * context).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.stack([wanted.detach(), context.detach()]))
        if (step + 1) % min(200, options.steps) == 0:
            means = torch.stack(recent).mean(0).tolist()
            recent.clear()
            spent = time.perf_counter() - began
            print(f"step {step + 1:5d}  loss {means[0]:.4f}  context {means[1]:.4f}  {spent:6.1f} s", flush=True)


def _sent(values: Tensor, device: str) -> Tensor:
    """From pinned memory, so that the host goes on to the next step while this one is computed."""
    return values.pin_memory().to(device, non_blocking=True) if device == "cuda" else values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, help="a folder of weights to go on from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens", type=int, default=BATCH)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--context-weight", type=float, default=0.1)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.data)
    episodes = Episodes.read(options.data)
    torch.manual_seed(SEED)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    if options.start:
        model = Qwen3ForCausalLM.from_pretrained(options.start, dtype=torch.float32)
    else:
        model = new_model(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(episodes.lengths):,} episodes,")
    print(f"{len(episodes.ids):,} tokens, {int(episodes.is_target.sum()):,} of them targets", flush=True)
    learn(model, episodes, options)
    model.to("cpu", torch.bfloat16).eval()
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    digest, committed = (
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        for folder in (options.out, student_folder())
    )
    print(f"weights sha256 {digest}: {'the' if digest == committed else 'not the'} committed ones")


if __name__ == "__main__":
    main()
