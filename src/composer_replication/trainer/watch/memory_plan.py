"""Will it fit? An estimate of a step's memory before training, against what there is, and what to change if not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from composer_replication.batch.model_folder import catch_load_errors
from composer_replication.errors import InputError, explain

GIB = 2**30
_HEADROOM = 0.10
"""What an estimate may be wrong by, and what an allocator loses between blocks."""
_LORA_RANK = 16
_LEAST_BUDGET = 256


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of each part at the peak, what there is, and what would help, in the order in which to try it."""

    parts: Mapping[str, int]
    available: int
    advice: tuple[str, ...]

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return _fits(self.peak, self.available)

    def __str__(self) -> str:
        rows = [f"  {name:<16} {size / GIB:7.2f} GiB" for name, size in self.parts.items()]
        verdict = "fits" if self.fits else "does not fit"
        total = f"{self.peak / GIB:.2f} GiB of {self.available / GIB:.2f} GiB, a tenth of which is kept free: {verdict}"
        return "\n".join([*rows, total, *(f"- {suggestion}" for suggestion in self.advice)])


def plan_memory(
    model: Any, *, longest_tree: int, available: int | None = None, device: str | torch.device = "cpu", **settings: Any
) -> MemoryPlan:
    """The memory of a step on the longest tree (`LoggedSessions.longest_tree` times the batch size).

    `model` is a model or its config, without an adapter; `settings` are those of `StepSettings`. Without `available`
    (bytes) it is what the device, or this machine, has free now.
    """
    settings.setdefault("on_cpu", torch.device(device).type == "cpu")
    step, shape = StepSettings(longest_tree=longest_tree, **settings), shape_of(model)
    limit = free_memory(device) if available is None else available
    if limit < 1:
        raise InputError(explain("available memory", got=limit, expected="a number of bytes"))
    parts = parts_of(shape, step)
    advice = () if _fits(sum(parts.values()), limit) else tuple(_advice(shape, step, limit))
    return MemoryPlan(parts=parts, available=limit, advice=advice)


def free_memory(device: str | torch.device = "cpu") -> int:
    """Bytes that can be had: of the device's memory, or of this machine's within the limit of its container.

    What an earlier training of this process left is had as well: its objects refer to each other, and the allocator
    keeps what they gave back.
    """
    if torch.device(device).type == "cuda":
        gc.collect()
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached_bytes
    return min(_free_ram(), _free_in_container())


def _fits(peak: int, available: int) -> bool:
    return peak <= available * (1 - _HEADROOM)


def _advice(shape: Shape, step: StepSettings, available: int) -> Iterator[str]:
    """One change after the other, each on top of those before it, until it fits; then what else there is."""
    fits = False
    for sentence, changed in _changes(step):
        peak = sum(parts_of(shape, changed).values())
        fits = _fits(peak, available)
        yield f"{sentence}: {peak / GIB:.2f} GiB{', which fits' if fits else ''}."
        step = changed
        if fits:
            break
    budget = _largest_budget(shape, step, available)
    if not fits and budget is None:
        least = sum(parts_of(shape, replace(step, longest_tree=_LEAST_BUDGET)).values())
        yield f"Not even a tree of {_LEAST_BUDGET} tokens fits ({least / GIB:.2f} GiB): take a smaller model."
    elif not fits:
        yield f"With all of that, trees of at most {budget} tokens fit: set budget={budget}."


def _changes(step: StepSettings) -> Iterator[tuple[str, StepSettings]]:
    """What costs the least first."""
    if not step.checkpointing:
        step = replace(step, checkpointing=True)
        advice = "gradient_checkpointing=True (train.optimiser.checkpointing) keeps one row a layer and token"
        yield f"{advice}, the rest is made again", step
    if step.teacher != "live" and step.lora_rank is None:
        rank = replace(step, lora_rank=_LORA_RANK)
        yield (
            f"An adapter (LoRA, rank {_LORA_RANK}): no gradients of the weights, and {_teacher_under_adapter(step)}",
            rank,
        )
        step = rank
    elif step.lora_rank is None:
        step = replace(step, lora_rank=_LORA_RANK, weight_bytes=min(step.weight_bytes, step.compute_bytes))
        yield f"An adapter (LoRA, rank {_LORA_RANK}): no gradients and no optimiser states of the weights", step
    if not step.four_bit and not step.on_cpu and step.num_shards == 1:
        step = replace(step, four_bit=True)
        yield 'quantization="4bit" keeps the weights below the adapter in four bits (bitsandbytes)', step
    if step.longest_tree > 2 * _LEAST_BUDGET:
        step = replace(step, longest_tree=step.longest_tree // 2)
        yield f"Half the tokens a step (budget, or per_device_train_batch_size): {step.longest_tree}", step


def _teacher_under_adapter(step: StepSettings) -> str:
    if step.teacher == "ema":
        return "the average is one of the adapter alone"
    if step.warmed_up:
        return f"the {step.teacher} teacher keeps a copy of the adapter alone, as the warm-up left it"
    return f"the {step.teacher} teacher is the model with its adapter off and needs no copy"


def _largest_budget(shape: Shape, step: StepSettings, available: int) -> int | None:
    """By halves; memory grows with the tokens."""
    low, high = 0, step.longest_tree // _LEAST_BUDGET
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(step, longest_tree=middle * _LEAST_BUDGET)
        if _fits(sum(parts_of(shape, tried).values()), available):
            low = middle
        else:
            high = middle - 1
    return low * _LEAST_BUDGET if low else None


def _free_ram() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_container() -> int:
    """What a control group leaves; as good as endless where there is none."""
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not (limit.exists() and used.exists()):
        return 2**62
    allowed = limit.read_text(encoding="ascii").strip()
    return 2**62 if allowed == "max" else max(0, int(allowed) - int(used.read_text(encoding="ascii")))


# How much memory a training step takes, part by part, from a model's shape and the largest tree it will meet.
#
# The coefficients are those of dense decoder layers (Qwen2, Llama and the like) as transformers runs them, fitted to
# the measured steps of `benchmarks/README.md`, "A whole session", and hold there within a tenth.

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

    with catch_load_errors(str(getattr(model, "_name_or_path", "")), "config of the model"), torch.device("meta"):
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
