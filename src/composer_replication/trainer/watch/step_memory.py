"""How much memory a training step takes, part by part, from a model's shape and the largest tree it will meet.

The coefficients are those of dense decoder layers (Qwen2, Llama and the like) as transformers runs them, fitted to the
measured steps of `benchmarks/README.md`, "A whole session", and hold there within a tenth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from composer_replication.batch.model_folder import reading
from composer_replication.errors import InputError, explain

# A layer keeps, for each token, four tensors of the MLP's width, and about a dozen of the residual stream's: norms
# before and after their cast, queries before and after rotation, the attention's output.
_MLP_TENSORS, _STREAM_TENSORS = 4, 12
# What a layer's backward holds beside what its forward kept, in tensors of the stream's width.
_BACKWARD_TENSORS = 13
# A pass without gradient: the MLP's three tensors, and a few of the stream's.
_PASS_MLP_TENSORS, _PASS_STREAM_TENSORS = 3, 4
# Rows of logits that exist at once (`loss.linear.tiles`), and the head's gradient in fp32 beside its own dtype.
_SLAB_ROWS, _TILE_ROWS, _CPU_TILE_BYTES = 1024, 256, 8 * 16 * 2**20
_FOUR_BITS = 0.56
"""Bytes a weight: half a byte, and the scales."""

Optimizer = Literal["adamw", "adamw_8bit", "sgd"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw_8bit", "sgd")


class Shape(NamedTuple):
    """The numbers of a model that memory depends on."""

    num_weights: int
    linear_weights: int
    """Those of the layers' matrices, which 4 bits are for."""
    adapter_weights_a_rank: int
    layers: int
    hidden: int
    mlp: int
    key_values: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What decides the memory of a step besides the model."""

    longest_tree: int
    weight_bytes: int = 2
    compute_bytes: int = 2
    checkpointing: bool = False
    lora_rank: int | None = None
    four_bit: bool = False
    teacher: str = "live"
    warmed_up: bool = False
    """The start is a model after a warm-up: under an adapter its teacher is a copy of the adapter."""
    optimizer: Optimizer = "adamw"
    accumulation: int = 1
    num_shards: int = 1
    on_cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("longest_tree", "accumulation", "num_shards"):
            if getattr(self, name) < 1:
                raise InputError(explain(name, got=getattr(self, name), expected="1 or more"))
        if self.optimizer not in OPTIMIZERS:
            raise InputError(explain("optimizer", got=repr(self.optimizer), expected=f"one of {OPTIMIZERS}"))


def shape_of(model: Any) -> Shape:
    """Of a model, or of a config, which is built without weights."""
    if isinstance(model, nn.Module):
        return _shape(model)
    from transformers import AutoModelForCausalLM

    with reading(str(getattr(model, "_name_or_path", "")), "config of the model"), torch.device("meta"):
        return _shape(AutoModelForCausalLM.from_config(model, trust_remote_code=False))


def _shape(model: Any) -> Shape:
    whole: Any = model.config
    config = whole.get_text_config()
    linear = [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "lm_head" not in name]
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Shape(
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        linear_weights=sum(layer.weight.numel() for layer in linear),
        adapter_weights_a_rank=sum(layer.in_features + layer.out_features for layer in linear),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_values=head_size * (getattr(config, "num_key_value_heads", None) or heads),
        vocab=config.vocab_size,
    )


def parts_of(shape: Shape, settings: StepSettings) -> dict[str, int]:
    """Bytes of each part at the moment of the step that takes the most; they add up to the peak."""
    fixed = _fixed_parts(shape, settings)
    gradients = _trainable_bytes(shape, settings) / settings.num_shards
    moments = _moments(shape, settings, gradients)
    worst = max(moments, key=lambda moment: sum(moment.values()))
    parts = {**fixed, **worst}
    if settings.on_cpu:  # a dense mask, and the same once more as numbers to add
        parts["attention mask"] = settings.longest_tree**2 * 5
    return {name: int(size) for name, size in parts.items() if int(size)}


def _fixed_parts(shape: Shape, settings: StepSettings) -> dict[str, float]:
    """Weights and what is kept of them from step to step."""
    trainable = _trainable_bytes(shape, settings)
    adapter = trainable if settings.lora_rank else 0.0
    base = float(shape.num_weights * settings.weight_bytes)
    if settings.four_bit:
        base = shape.linear_weights * _FOUR_BITS + (shape.num_weights - shape.linear_weights) * settings.weight_bytes
    per_weight: Mapping[str, float] = {"adamw": 2.0, "adamw_8bit": 2.0 / _trainable_size(settings), "sgd": 0.0}
    kept_start = (trainable if settings.warmed_up else 0.0) if settings.lora_rank else base
    copies = {"ema": trainable}.get(settings.teacher, kept_start)
    shards = settings.num_shards
    return {
        "weights": (base + adapter) / shards,
        "optimiser": trainable * per_weight[settings.optimizer] / shards,
        "teacher's copy": 0.0 if settings.teacher == "live" else copies / shards,
    }


def _moments(shape: Shape, settings: StepSettings, gradients: float) -> list[dict[str, float]]:
    """The moments of a step that may be its peak: the head, the teacher's pass, the first and last layer backward."""
    tokens = settings.longest_tree
    stream = tokens * shape.hidden * (settings.compute_bytes + max(settings.compute_bytes, settings.weight_bytes)) / 2
    mlp, key_values = tokens * shape.mlp * settings.compute_bytes, tokens * shape.key_values * settings.compute_bytes
    layer = _MLP_TENSORS * mlp + _STREAM_TENSORS * stream + 2 * key_values
    activations = shape.layers * (stream if settings.checkpointing else layer)
    before = gradients if settings.accumulation > 1 else 0.0  # those of the micro-batches before
    head_gradient = 0.0 if settings.lora_rank else shape.vocab * shape.hidden * settings.weight_bytes
    backward = (layer if settings.checkpointing else 0.0) + _BACKWARD_TENSORS * stream
    in_forward, in_backward = _autocast_copies(shape, settings)
    moments = [
        {
            "activations": activations,
            "head": _head_bytes(shape, settings),
            "gradients": before,
            "cast weights": in_forward,
        },
        {"activations": activations + backward, "gradients": max(before, head_gradient), "cast weights": in_backward},
        {"activations": layer + _BACKWARD_TENSORS * stream, "gradients": gradients},
    ]
    if settings.teacher != "live":
        passing = _PASS_MLP_TENSORS * mlp + _PASS_STREAM_TENSORS * stream
        passes = {
            "activations": activations,
            "teacher's pass": passing,
            "gradients": before,
            "cast weights": in_forward,
        }
        moments.append(passes)
    if not settings.checkpointing:  # a layer's own are among those kept, and are freed as it goes
        moments[1]["activations"] = activations
    return moments


def _autocast_copies(shape: Shape, settings: StepSettings) -> tuple[float, float]:
    """Whole weights as autocast casts them, at the end of the forward and at the beginning of the backward.

    The graph keeps what it multiplied by; and autocast itself, to its end, what it cast of weights that are trained.
    FSDP2 casts what it gathers, and 4 bits are made whole in the right dtype.
    """
    if settings.compute_bytes >= settings.weight_bytes or settings.four_bit or settings.num_shards > 1:
        return 0.0, 0.0
    copies = float(shape.linear_weights * settings.compute_bytes)
    in_graph = 0.0 if settings.checkpointing else copies
    return (in_graph if settings.lora_rank else copies), in_graph


def _head_bytes(shape: Shape, settings: StepSettings) -> float:
    """Logits of a few rows at a time, and the gradient of the head where it is trained."""
    tiles = float(shape.vocab * (_SLAB_ROWS * settings.compute_bytes + _TILE_ROWS * 8))
    if settings.on_cpu:
        tiles = float(_CPU_TILE_BYTES)
    trained = 0 if settings.lora_rank else shape.vocab * shape.hidden * (4 + settings.weight_bytes)
    return tiles + trained


def _trainable_size(settings: StepSettings) -> int:
    return 4 if settings.lora_rank else settings.weight_bytes  # an adapter is kept in fp32


def _trainable_bytes(shape: Shape, settings: StepSettings) -> float:
    number = shape.adapter_weights_a_rank * settings.lora_rank if settings.lora_rank else shape.num_weights
    return float(number * _trainable_size(settings))
