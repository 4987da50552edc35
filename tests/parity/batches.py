"""Fixed random batches for the parity tests."""

import torch

DTYPES = (torch.float64, torch.float32)


def logits(seed, *shape, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def pair(seed, num_rows=2, num_tokens=4, vocab=19, dtype=torch.float64):
    """Student and teacher logits (B,T,V); the teacher's temper differs from row to row, so its entropy does too."""
    teacher = logits(seed + 1000, num_rows, num_tokens, vocab)
    teacher = teacher * torch.linspace(0.1, 2.5, num_rows * num_tokens, dtype=torch.float64).reshape(num_rows, -1, 1)
    return logits(seed, num_rows, num_tokens, vocab).to(dtype), teacher.to(dtype)


def keep_mask(seed, num_rows=2, num_tokens=4):
    """(B,T) bool with both values in it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_rows, num_tokens, generator=generator) < 0.6
    mask[0, 0], mask[-1, -1] = True, False
    return mask


def logprobs(seed, *shape, dtype=torch.float64):
    """Log-probabilities in (-2.5, -0.1)."""
    generator = torch.Generator().manual_seed(seed)
    return (-0.1 - 2.4 * torch.rand(*shape, generator=generator, dtype=torch.float64)).to(dtype)
