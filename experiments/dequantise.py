"""Quantised weights of a Qwen2 model (GGUF) as a folder that `from_pretrained` reads, in bf16.

    python experiments/dequantise.py MODEL.gguf OUT      # needs the package gguf beside torch and transformers

The file holds the embeddings twice; the output's copy is the finer one, and both places get it: the model ties them.
The experiments name the files by their sha256. The tokenizer and its template come from the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen2Config

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE = {"output_norm": "model.norm", "output": "model.embed_tokens"}
COARSER = "token_embd"


def name_of(stored: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    place, _, kind = stored.rpartition(".")
    if place.startswith("blk."):
        _, layer, part = place.split(".", 2)
        return f"model.layers.{layer}.{NAMES[part]}.{kind}"
    return f"{OUTSIDE[place]}.{kind}"


def weights_of(reader: Any) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf.quants import dequantize

    def read(tensor: Any) -> tuple[str, torch.Tensor]:
        values = dequantize(tensor.data, tensor.tensor_type).copy()
        return name_of(tensor.name), torch.from_numpy(values).to(torch.bfloat16)

    with ThreadPoolExecutor() as pool:
        yield from pool.map(read, [each for each in reader.tensors if not each.name.startswith(COARSER)])


def config_of(reader: Any) -> Qwen2Config:
    def field(name: str) -> Any:
        return reader.fields[name].contents()

    if field("general.architecture") != "qwen2":
        raise SystemExit(f"got {field('general.architecture')} weights, expected qwen2")
    theta = field("qwen2.rope.freq_base")
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=field("qwen2.embedding_length"),
        intermediate_size=field("qwen2.feed_forward_length"),
        num_hidden_layers=field("qwen2.block_count"),
        num_attention_heads=field("qwen2.attention.head_count"),
        num_key_value_heads=field("qwen2.attention.head_count_kv"),
        max_position_embeddings=field("qwen2.context_length"),
        rms_norm_eps=field("qwen2.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def main() -> None:
    from gguf import GGUFReader

    parser = argparse.ArgumentParser(description="A GGUF file of Qwen2 as a folder of transformers.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    reader = GGUFReader(given.gguf)
    given.out.mkdir(parents=True)
    save_file(dict(weights_of(reader)), given.out / "model.safetensors", metadata={"format": "pt"})
    config_of(reader).save_pretrained(given.out)
    tokenizer = AutoTokenizer.from_pretrained(given.gguf.parent, gguf_file=given.gguf.name, trust_remote_code=False)
    tokenizer.chat_template = reader.fields["tokenizer.chat_template"].contents()
    tokenizer.save_pretrained(given.out)
    print(f"{given.out}: {len(reader.tensors) - 1} weights")


if __name__ == "__main__":
    main()
