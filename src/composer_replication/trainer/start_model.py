"""The model an offline run trains: loaded or given, with an adapter or without, its weights whole or in 4 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from composer_replication.batch.model_folder import load_model
from composer_replication.errors import ConfigError, InputError, MissingExtraError, explain
from composer_replication.objective.distributed import is_sharded
from composer_replication.objective.model_head import causal_lm_of
from composer_replication.optional import available, require
from composer_replication.trainer.same_start import share_start_weights
from composer_replication.trainer.token_rows import settle_token_rows, with_token_rows

Quantization = Literal["none", "4bit"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "4bit")
_HALVES = (torch.bfloat16, torch.float16)
_ROUTER = re.compile(r"\.(router|gate)\.")


def weight_dtype(*, bf16: bool, has_adapter: bool) -> torch.dtype:
    """What weights are loaded in: whole where they are trained, and `bf16` is then what autocast computes in.

    bf16 keeps 8 bits of a weight, and most steps of an optimiser are smaller than that.
    """
    return torch.bfloat16 if bf16 and has_adapter else torch.float32


def prepare_model(
    model: str | nn.Module,
    args: Any,
    *,
    peft_config: Any | None,
    quantization: Quantization,
    adapter_follows: bool = False,
    token_rows: Callable[[nn.Module], Sequence[int]] | None = None,
) -> nn.Module:
    """What `OfflineTrainer` trains. A name is loaded as `load_model` does it, without running anybody's code.

    With `adapter_follows` the caller puts an adapter on later, and the weights are loaded as those below one. Weights
    to train in half precision are refused. `token_rows` says of the loaded model which rows of embedding and head the
    adapter trains as well.
    """
    if quantization not in QUANTIZATIONS:
        raise InputError(explain("quantization", got=repr(quantization), expected=f"one of {QUANTIZATIONS}"))
    if quantization == "4bit":
        check_quantization(model, peft_config)
    has_adapter = adapter_follows or peft_config is not None
    dtype = weight_dtype(bf16=args.bf16, has_adapter=has_adapter)
    prepared_model = _load(model, quantization, dtype) if isinstance(model, str) else model
    share_start_weights(prepared_model)  # before anything is copied or computed from them
    if peft_config is not None:
        if token_rows is not None:
            peft_config = with_token_rows(peft_config, prepared_model, token_rows(prepared_model))
        prepared_model = _adapted(prepared_model, args, peft_config, quantization)
        share_start_weights(prepared_model)
    if not adapter_follows:
        check_weights_to_train(prepared_model)
    return prepared_model


def shard_model(model: nn.Module, args: Any) -> None:
    """Spread the weights over all processes, a layer at a time (FSDP2), on the devices that they train on.

    Half precision is what a layer's weights are cast to as they are gathered: autocast would keep a copy of every layer
    until the backward pass. Raise ConfigError for weights in 4 bits and for a model whose layers nobody names.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    causal_lm = causal_lm_of(model)
    if any(parameter.dtype == torch.uint8 for parameter in model.parameters()):
        fix = 'Set train.adapter.kind = "lora", or train.fsdp.on = false.'
        raise ConfigError(explain("train.fsdp.on", got="true, with weights in 4 bits", expected="false", fix=fix))
    names = set(getattr(causal_lm, "_no_split_modules", None) or ())
    layers = [module for module in causal_lm.modules() if type(module).__name__ in names]
    if not layers:
        fix = "Set train.fsdp.on = false, or shard the model with torch.distributed.fsdp.fully_shard before."
        got = f"{type(causal_lm).__name__}, whose layers transformers does not name (_no_split_modules)"
        raise ConfigError(explain("train.fsdp.on", got=got, expected="a model of layers", fix=fix))
    half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=None if half is None else torch.float32)
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    for module in (*layers, causal_lm):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def check_weights_to_train(model: nn.Module) -> None:
    """Those that an optimiser changes are in fp32 or better: none here keeps whole copies of halves."""
    trained = [(name, parameter.dtype) for name, parameter in model.named_parameters() if parameter.requires_grad]
    half = [f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in trained if dtype in _HALVES]
    if half:
        got = f"{len(half)} of {len(trained)} in half precision, the first {half[0]}"
        fix = (
            "Most steps would round to nothing. Give model.float(), or its name, and compute in half precision with"
            " bf16=True; or give a peft_config, and train an adapter on these weights."
        )
        raise ConfigError(explain("weights to train", got=got, expected="float32", fix=fix))


def check_router_loss(model: nn.Module) -> str | None:
    """Refuse a mixture of experts whose config asks for its router's auxiliary loss, which is not added here.

    A sentence where the routers are trained without it because the config does not ask.
    """
    config: Any = causal_lm_of(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight = getattr(text, "router_aux_loss_coef", 0.0)
    if not hasattr(text, "output_router_logits") or not weight:
        return None
    if text.output_router_logits:
        fix = (
            'Set "output_router_logits": false in the config.json of train.model (or model.config), and keep the'
            ' routers as they are with an adapter on other layers; or train with rollouts (train.mode = "grpo"): TRL'
            " adds it."
        )
        got = f"true, which asks for the router's auxiliary loss ({weight:g} times)"
        raise ConfigError(explain("output_router_logits on logged sessions", got=got, expected="false", fix=fix))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and _ROUTER.search(name)]
    if not trained:
        return None
    return f"routers are trained without their auxiliary loss ({len(trained)} weights, the first {trained[0]})"


def _adapted(model: nn.Module, args: Any, peft_config: Any, quantization: Quantization) -> nn.Module:
    peft = require("peft", extra="train")
    if isinstance(model, peft.PeftModel):
        fix = "Give the model without its adapter, or no peft_config."
        raise ConfigError(explain("peft_config", got="one, and a model that has an adapter", expected="one", fix=fix))
    if is_sharded(model):
        fix = "Put the adapter on first, then shard."
        raise ConfigError(explain("peft_config", got="one, and a sharded model", expected="a whole model", fix=fix))
    if quantization == "4bit":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=args.gradient_checkpointing)
    check_targets(model, peft_config)
    try:
        adapted = peft.get_peft_model(model, peft_config)
    except ValueError as error:
        raise adapter_refused(error, model) from error
    settle_token_rows(adapted)
    if args.bf16 or args.fp16:  # PEFT makes its own weights whole, but not its copies (`modules_to_save`)
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.dtype in _HALVES:
                parameter.data = parameter.data.float()
    return adapted


def check_targets(model: nn.Module, peft_config: Any) -> None:
    """PEFT says so where no target is a layer's name; of one among others it says nothing."""
    targets = getattr(peft_config, "target_modules", None)
    if not isinstance(targets, list | tuple | set) or not targets:
        return
    names = [name for name, _ in model.named_modules()]
    unknown = sorted(target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names))
    if unknown:
        raise adapter_refused(ValueError(f"targets that no layer has: {', '.join(unknown)}"), model)


def adapter_refused(error: Exception, model: nn.Module) -> ConfigError:
    """What PEFT refuses: mostly layers by names that the model does not have."""
    got = (str(error).strip().splitlines() or [type(error).__name__])[0]
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = f"names of this model's layers: {', '.join(sorted(linear - {'lm_head'}))}, or all-linear"
    fix = "Set train.adapter.targets to some of them (target_modules of a peft_config)."
    return ConfigError(explain("train.adapter", got=got, expected=expected, fix=fix))


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


def _load(name: str, quantization: Quantization, dtype: torch.dtype) -> nn.Module:
    options: dict[str, Any] = {"dtype": dtype}
    if quantization == "4bit":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return load_model(name, what=f"model {name!r}", **options)
