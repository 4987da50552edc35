"""A small policy and a batch of unequal prompts, for tests that hold kept keys against transformers' own loop."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

EOS, PAD, VOCAB = 2, 0, 60


def small_model(**changes: Any) -> Any:
    """Wide weights and few tokens, so that rows end early and at different lengths."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "initializer_range": 0.2,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    return Qwen2ForCausalLM(Qwen2Config(**sizes | changes)).eval()


def random_rows(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for length in lengths]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    """As TRL pads them: on the left."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def new_tokens(found: Tensor, rows: list[list[int]]) -> list[list[int]]:
    """What was generated behind each row, up to its end."""
    width = max(map(len, rows))
    return [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in found[:, width:].tolist()]


def end_an_autocast_elsewhere(kind: str) -> None:
    """One that ends in any thread gives back the copies of weights that all autocasts have in common."""

    def autocast() -> None:
        with torch.autocast(kind, torch.bfloat16):
            pass

    thread = threading.Thread(target=autocast)
    thread.start()
    thread.join()
