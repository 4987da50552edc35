"""The model an offline run trains: loaded or given, with an adapter or without, its weights whole or in 4 bits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from composer_replication.errors import ConfigError, InputError, MissingExtraError, explain
from composer_replication.objective.wrapped import is_sharded
from composer_replication.optional import available, require

Quantization = Literal["none", "4bit"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "4bit")


def prepare_model(
    model: str | nn.Module, args: Any, *, peft_config: Any | None, quantization: Quantization
) -> nn.Module:
    """What `OfflineTrainer` trains. A name is loaded from disk or the hub, without running anybody's code."""
    if quantization not in QUANTIZATIONS:
        raise InputError(explain("quantization", got=repr(quantization), expected=f"one of {QUANTIZATIONS}"))
    if quantization == "4bit":
        check_quantization(model, peft_config)
    found = _load(model, quantization, args.bf16) if isinstance(model, str) else model
    if peft_config is None:
        return found
    peft = require("peft", extra="train")
    if isinstance(found, peft.PeftModel):
        fix = "Give the model without its adapter, or no peft_config."
        raise ConfigError(explain("peft_config", got="one, and a model that has an adapter", expected="one", fix=fix))
    if is_sharded(found):
        fix = "Put the adapter on first, then shard."
        raise ConfigError(explain("peft_config", got="one, and a sharded model", expected="a whole model", fix=fix))
    if quantization == "4bit":
        found = peft.prepare_model_for_kbit_training(found, use_gradient_checkpointing=args.gradient_checkpointing)
    return peft.get_peft_model(found, peft_config)


def check_quantization(model: str | nn.Module, peft_config: Any | None) -> None:
    """4 bits can be had where bitsandbytes is, for weights that are loaded here and stay as they are."""
    if not available("bitsandbytes"):
        fix = 'Type: pip install bitsandbytes. Or train without quantization: LoRA alone, `quantization="none"`.'
        raise MissingExtraError(f'quantization="4bit": bitsandbytes is not installed. {fix}', name="bitsandbytes")
    if not isinstance(model, str):
        got = f"a {type(model).__name__} that is loaded already"
        raise ConfigError(explain('model with quantization="4bit"', got=got, expected="its name or folder"))
    if peft_config is None:
        fix = "Weights in 4 bits cannot be trained; give a peft.LoraConfig."
        raise ConfigError(explain('peft_config with quantization="4bit"', got=None, expected="an adapter", fix=fix))


def _load(name: str, quantization: Quantization, bf16: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    options: dict[str, Any] = {"dtype": dtype}
    if quantization == "4bit":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return AutoModelForCausalLM.from_pretrained(name, **options)
