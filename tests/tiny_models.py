"""Tiny causal LMs of several families, built locally; random weights wide enough that predictions differ."""

from __future__ import annotations

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(family: str) -> torch.nn.Module:
    torch.manual_seed(11)
    model = _BUILDERS[family]()
    # Eager attention rounds its softmax to fp32 even in an fp64 model; only Gemma-2's soft-capped attention needs it.
    model.config._attn_implementation = "eager" if family.startswith("gemma2") else "sdpa"
    return model.eval()


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)
    )


_BUILDERS = {
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen2-untied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)),
    # soft-capped logits; the cap is set low so that it bends them
    "gemma2-tied": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_SIZES, head_dim=8, final_logit_softcapping=3.0, query_pre_attn_scalar=8)
    ),
    "gemma2-untied": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_SIZES, head_dim=8, final_logit_softcapping=3.0, query_pre_attn_scalar=8, tie_word_embeddings=False
        )
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**_SIZES, logits_scaling=4.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**_SIZES, logit_scale=0.25)),
    "gpt2": _gpt2,
}
FAMILIES = tuple(_BUILDERS)


def random_batch(seed: int = 0, *, pairs: bool = True) -> dict[str, torch.Tensor]:
    """Two sequences with a hinted context each and two pairs; every target token is shared by both contexts."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(3, VOCAB, shape, generator=generator)

    student, hint = ids(2, 14), ids(2, 5)
    teacher = torch.cat([student[:, :4], hint, student[:, 4:]], dim=1)
    targets = [(sequence, position) for sequence, span in ((0, range(6, 11)), (1, range(9, 14))) for position in span]
    index = torch.tensor(targets)
    response = torch.zeros(2, 14, dtype=torch.long)
    response[0, 6:11] = response[1, 3:5] = response[1, 9:14] = 1
    batch = {
        "input_ids": student,
        "response_mask": response,
        "ctx_teacher_input_ids": teacher,
        "sdpo_student_index": index - torch.tensor([0, 1]),
        "sdpo_teacher_index": index + torch.tensor([0, 4]),
    }
    if pairs:
        for side, length in (("chosen", 12), ("rejected", 9)):
            batch[f"dpo_{side}_input_ids"] = ids(2, length)
            mask = torch.zeros(2, length, dtype=torch.long)
            mask[0, 4:], mask[1, 6:-1] = 1, 1
            batch[f"dpo_{side}_response_mask"] = mask
            batch[f"dpo_{side}_ref_logprobs"] = -torch.rand(2, generator=generator) * 30
    return batch
