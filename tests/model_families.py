"""One tiny model of each family, with random weights wide enough to matter, and what must become of its trees.

`tree`: one masked pass; `flat`: sequence by sequence, for the reason that is named; `refused`: an error that says why.
Reasons are patterns of the names and numbers that they give.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LEAK = r"(?=.*\bbranch)(?=.*\b\d+ of \d+ )"
"""Rows of a path that other tokens in another branch change: how many of how many."""
VOCAB = 96
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


class Family(NamedTuple):
    kind: str
    becomes: Literal["tree", "flat", "refused"]
    because: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    without: tuple[str, ...] = ()
    in_half: tuple[str, str] | None = None
    """What becomes of it in bf16 and why, where that is something else."""


def _tree(kind: str, **options: Any) -> Family:
    return Family(kind, "tree", options=options)


def _flat(kind: str, because: str, *without: str, **options: Any) -> Family:
    return Family(kind, "flat", because, options, without)


_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
_OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4}
_MIXED = ["sliding_attention", "full_attention"]
UNSEEN = r"(?=.*\blayers\b)(?=.*\b2\b)(?=.*\b0\b)"
_WINDOW = r"(?=.*\bwindow\b)(?=.*\b112\b)(?=.*\b32\b)"
_LINEAR = ["linear_attention", "full_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Family] = {
    # attention to the whole path, or to a window that is long enough
    "Qwen2": _tree("qwen2"),
    "Qwen3": _tree("qwen3"),
    "Llama": _tree("llama"),
    "SmolLM2": _tree("llama", tie_word_embeddings=True),
    "SmolLM3": _tree("smollm3"),
    "Mistral": _tree("mistral", sliding_window=200),
    "Ministral-3": _tree("ministral3"),
    "Gemma": _tree("gemma"),
    "Gemma-2": _tree("gemma2", sliding_window=200),
    "Gemma-3": _tree("gemma3_text", sliding_window=200),
    "Phi-3": _tree("phi3"),
    "OLMo-2": _tree("olmo2"),
    "OLMo-3": _tree("olmo3", sliding_window=200),
    "GPT-2": _tree("gpt2", **_OLD),
    "GPT-NeoX": _tree("gpt_neox"),
    "OPT": _tree("opt", ffn_dim=48, word_embed_proj_dim=32),
    "Starcoder2": _tree("starcoder2"),
    "Cohere": _tree("cohere"),
    "Granite": _tree("granite"),
    "GLM-4": _tree("glm4"),
    "StableLM": _tree("stablelm"),
    "Nemotron": _tree("nemotron"),
    "EXAONE-4": _tree("exaone4", sliding_window=200, layer_types=_MIXED),
    # mixtures of experts
    "DeepSeek-V3": _tree("deepseek_v3", **_MLA),
    "Qwen2-MoE": _tree("qwen2_moe"),
    "Qwen3-MoE": _tree("qwen3_moe"),
    "Mixtral": _tree("mixtral"),
    "OLMoE": _tree("olmoe"),
    "gpt-oss": _tree("gpt_oss", sliding_window=200),
    "GraniteMoE": _tree("granitemoe"),
    # a window that a path exceeds
    "Mistral, window 32": _flat("mistral", _WINDOW, sliding_window=32),
    "Gemma-3, window 32": _flat("gemma3_text", _WINDOW, sliding_window=32),
    "GPT-Neo, window 32": _flat("gpt_neo", _WINDOW, attention_types=[[["global", "local"], 1]], window_size=32),
    # attention of their own, by slot or by selection
    "GPT-Neo": _flat("gpt_neo", UNSEEN, attention_types=[[["global", "local"], 1]]),
    "GPT-J": _flat("gptj", UNSEEN, **_OLD, rotary_dim=4),
    "Bloom": _flat("bloom", "too many values to unpack", n_layer=2, n_head=4),
    "MPT": _flat("mpt", UNSEEN, d_model=32, n_heads=4, n_layers=2, max_seq_len=512, expansion_ratio=2),
    "Falcon": _flat("falcon", UNSEEN, "head_dim"),
    "Falcon, ALiBi": _flat("falcon", "ALiBi", "head_dim", alibi=True),
    "Llama-4": _flat(
        "llama4_text",
        "3 chunked_attention of 4",
        intermediate_size_mlp=48,
        attention_chunk_size=32,
        num_hidden_layers=4,
    ),
    "MiniMax-M3": _flat(
        "minimax_m3_vl_text",
        "1 minimax_m3_sparse of 2",
        layer_types=["minimax_m3_sparse", "full_attention"],
        index_block_size=16,
        index_topk_blocks=3,
        index_head_dim=8,
        index_n_heads=2,
    ),
    "DeepSeek-V3.2": _flat(
        "deepseek_v32", "2 indexed_attention of 2", **_MLA, index_topk=24, index_head_dim=8, index_n_heads=16
    ),
    # convolutions and recurrent states, alone or beside attention
    "Qwen3-Next": _flat(
        "qwen3_next",
        "1 linear_attention of 2",
        layer_types=_LINEAR,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "MiniMax": _flat("minimax", "1 linear_attention of 2", layer_types=_LINEAR, block_size=16),
    "Falcon-H1": _flat("falcon_h1", "2 hybrid of 2", **_SSM, mamba_d_ssm=64),
    "LFM2": _flat("lfm2", "1 conv of 2", layer_types=["conv", "full_attention"]),
    "Jamba": _flat(
        "jamba", "1 linear_attention of 2", attn_layer_offset=1, attn_layer_period=2, mamba_d_state=8, mamba_dt_rank=4
    ),
    "Bamba": _flat("bamba", "1 linear_attention of 2", **_SSM, attn_layer_indices=[1]),
    "Granite-4 hybrid": _flat(
        "granitemoehybrid",
        "1 linear_attention of 2",
        **_SSM,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=16,
    ),
    "Nemotron-H": _flat(
        "nemotron_h",
        "1 linear_attention, 1 mlp of 3",
        layers_block_type=["mamba", "attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        num_hidden_layers=3,
    ),
    "Mamba": _flat("mamba", "2 linear_attention of 2", "intermediate_size", state_size=8, time_step_rank=4),
    "Mamba2": _flat(
        "mamba2", "2 linear_attention of 2", num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=16
    ),
    "RecurrentGemma": _flat(
        "recurrent_gemma", "2 recurrent of 3", num_hidden_layers=3, lru_width=32, attention_window_size=200
    ),
    "xLSTM": Family(
        "xlstm",
        "flat",
        UNSEEN,
        {"num_heads": 4, "hidden_size": 64, "qk_dim_factor": 1.0, "chunk_size": 16},
        ("num_attention_heads", "head_dim"),
        in_half=("refused", r"xLSTMForCausalLM.*torch\.bfloat16"),
    ),
    "RWKV": _flat("rwkv", UNSEEN),
    # what no batch of shared prefixes can have right, or what is not the head's own input
    "ModernBERT decoder": Family("modernbert-decoder", "refused", r"ModernBertDecoder.*\bhead\b"),
    "Phi-3, longrope 64": Family(
        "phi3",
        "refused",
        r"\b112\b.*longrope.*\b64\b",
        {"original_max_position_embeddings": 64, "rope_parameters": _LONGROPE},
    ),
    "Doge": Family("doge", "refused", r"\b112\b.*\b24\b", {"keep_window_size": 24}),
}


def build(name: str, dtype: torch.dtype = torch.float32, *, scale: float = 8.0) -> Any:
    """Weights `scale` times as wide as the family's own; what is no matrix gets some noise, or many scores tie."""
    family = FAMILIES[name]
    made = CONFIG_MAPPING[family.kind]
    usual = made()
    sizes = {key: value for key, value in _SIZES.items() if key not in family.without and hasattr(usual, key)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made(**sizes | family.options)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)
