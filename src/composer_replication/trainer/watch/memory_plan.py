"""Estimate a training step's memory before training, compare it with the free memory, and advise what to change.

The coefficients are for dense decoder layers (such as in Qwen2 and Llama) as transformers runs them. They were fitted
to the measured steps in `benchmarks/README.md`, "A whole session", and are within 10% of the measurements.
"""

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
"""A margin for errors in the estimate and for the allocator's fragmentation."""
# The rank that the advice assumes, and the smallest tree that it proposes, in tokens.
_LORA_RANK = 16
_MIN_BUDGET = 256


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A memory estimate: the bytes of each part at the peak, the available bytes, and advice in the order to follow
    it.
    """

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
        total = f"{self.peak / GIB:.2f} GiB of {self.available / GIB:.2f} GiB, with 10% headroom: {verdict}"
        return "\n".join([*rows, total, *(f"- {suggestion}" for suggestion in self.advice)])


def plan_memory(
    model: Any, *, longest_tree: int, available: int | None = None, device: str | torch.device = "cpu", **settings: Any
) -> MemoryPlan:
    """Return a memory estimate for a step on the longest tree (`LoggedSessions.longest_tree` times the batch size).

    `model` is a model or its config, without an adapter. `settings` are fields of `_StepSettings`. `available` is the
    memory in bytes; by default it is the free memory of the device, or of this machine for the CPU.
    """
    settings.setdefault("on_cpu", torch.device(device).type == "cpu")
    step, shape = _StepSettings(longest_tree=longest_tree, **settings), shape_of(model)
    limit = free_memory(device) if available is None else available
    if limit < 1:
        raise InputError(explain("available memory", got=limit, expected="a number of bytes"))
    parts = _estimate_parts(shape, step)
    advice = () if _fits(sum(parts.values()), limit) else tuple(_advice(shape, step, limit))
    return MemoryPlan(parts=parts, available=limit, advice=advice)


def free_memory(device: str | torch.device = "cpu") -> int:
    """Return the free bytes on a GPU, or on this machine within its container's limit.

    Memory that an earlier training run in this process has released counts as free. It must be garbage-collected first,
    since its objects refer to each other, and PyTorch's allocator caches freed memory.
    """
    if torch.device(device).type == "cuda":
        gc.collect()
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached_bytes
    return min(_free_ram(), _free_in_container())


def _fits(peak: int, available: int) -> bool:
    return peak <= available * (1 - _HEADROOM)


def _advice(shape: _Shape, step: _StepSettings, available: int) -> Iterator[str]:
    """Yield cumulative changes until the step fits into memory; if it never does, also yield the largest token
    budget that fits.
    """
    fits = False
    for sentence, changed in _possible_changes(step):
        peak = sum(_estimate_parts(shape, changed).values())
        fits = _fits(peak, available)
        yield f"{sentence}: {peak / GIB:.2f} GiB{', which fits' if fits else ''}."
        step = changed
        if fits:
            break
    budget = _largest_budget(shape, step, available)
    if not fits and budget is None:
        smallest = sum(_estimate_parts(shape, replace(step, longest_tree=_MIN_BUDGET)).values())
        yield f"Not even a tree of {_MIN_BUDGET} tokens fits ({smallest / GIB:.2f} GiB): use a smaller model."
    elif not fits:
        yield f"With all these changes, trees of at most {budget} tokens fit: set budget={budget}."


def _possible_changes(step: _StepSettings) -> Iterator[tuple[str, _StepSettings]]:
    """Yield (advice, changed settings) pairs, the cheapest change first. Each change includes the previous ones."""
    if not step.checkpointing:
        step = replace(step, checkpointing=True)
        advice = "gradient_checkpointing=True (train.optimiser.checkpointing) stores one row per layer and token"
        yield f"{advice} and recomputes the rest", step
    if step.teacher != "live" and step.lora_rank is None:
        with_adapter = replace(step, lora_rank=_LORA_RANK)
        teacher = _teacher_under_adapter(step)
        yield f"An adapter (LoRA, rank {_LORA_RANK}): no gradients for the base weights, and {teacher}", with_adapter
        step = with_adapter
    elif step.lora_rank is None:
        step = replace(step, lora_rank=_LORA_RANK, weight_bytes=min(step.weight_bytes, step.compute_bytes))
        yield f"An adapter (LoRA, rank {_LORA_RANK}): no gradients and no optimizer states for the base weights", step
    if not step.four_bit and not step.on_cpu and step.num_shards == 1:
        step = replace(step, four_bit=True)
        yield 'quantization="4bit" stores the base weights in four bits (bitsandbytes)', step
    if step.longest_tree > 2 * _MIN_BUDGET:
        step = replace(step, longest_tree=step.longest_tree // 2)
        yield f"Half the tokens per step (budget, or per_device_train_batch_size): {step.longest_tree}", step


def _teacher_under_adapter(step: _StepSettings) -> str:
    if step.teacher == "ema":
        return "the teacher averages only the adapter"
    if step.warmed_up:
        return f"the {step.teacher} teacher keeps a copy of only the adapter, as the warm-up left it"
    return f"the {step.teacher} teacher is the model with its adapter off and needs no copy"


def _largest_budget(shape: _Shape, step: _StepSettings, available: int) -> int | None:
    """Return the largest token budget with which a step fits into memory, found by bisection, or None if none fits."""
    low, high = 0, step.longest_tree // _MIN_BUDGET
    while low < high:
        middle = (low + high + 1) // 2
        candidate = replace(step, longest_tree=middle * _MIN_BUDGET)
        if _fits(sum(_estimate_parts(shape, candidate).values()), available):
            low = middle
        else:
            high = middle - 1
    return low * _MIN_BUDGET if low else None


def _free_ram() -> int:
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Without /proc (macOS), all memory counts as free.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_container() -> int:
    """Return the free bytes within the limit of the container's control group, or a huge number if it has no limit."""
    # cgroup v2; in a container without a limit, memory.max contains the word "max".
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if not (limit.exists() and used.exists()):
        return 2**62
    allowed = limit.read_text(encoding="ascii").strip()
    return 2**62 if allowed == "max" else max(0, int(allowed) - int(used.read_text(encoding="ascii")))


# Tensors that a layer stores per token: four with the MLP's width, and about a dozen with the residual stream's width
# (norms before and after their cast, queries before and after rotation, the attention output).
_MLP_TENSORS, _STREAM_TENSORS = 4, 12
# Additional tensors in a layer's backward pass, each with the stream's width.
_BACKWARD_TENSORS = 13
# A pass without gradients needs three tensors with the MLP's width, and a few with the stream's width.
_PASS_MLP_TENSORS, _PASS_STREAM_TENSORS = 3, 4
# Rows of logits, and rows of the head's fp32 gradient, that exist at the same time (`loss.linear.tiles`).
_SLAB_ROWS, _TILE_ROWS, _CPU_TILE_BYTES = 1024, 256, 8 * 16 * 2**20
_FOUR_BITS = 0.56
"""Bytes per weight: half a byte, and the quantization constants."""
Optimizer = Literal["adamw", "adamw_8bit", "sgd"]
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw_8bit", "sgd")


class _Shape(NamedTuple):
    """The model sizes that memory depends on."""

    num_weights: int
    linear_weights: int
    """The number of weights in the layers' matrices, to which 4-bit quantization applies."""
    adapter_weights_per_rank: int
    layers: int
    hidden: int
    mlp: int
    key_values: int
    vocab: int


@dataclass(frozen=True, kw_only=True)
class _StepSettings:
    """The settings that determine a step's memory in addition to the model's sizes."""

    longest_tree: int
    weight_bytes: int = 2
    compute_bytes: int = 2
    checkpointing: bool = False
    lora_rank: int | None = None
    four_bit: bool = False
    teacher: str = "live"
    warmed_up: bool = False
    """Whether the run follows a warm-up; with an adapter, the teacher is then a copy of the adapter."""
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


def shape_of(model: Any) -> _Shape:
    """Return the sizes of a model. For a config, the model is built without weights."""
    if isinstance(model, nn.Module):
        return _measure_shape(model)
    from transformers import AutoModelForCausalLM

    with catch_load_errors(str(getattr(model, "_name_or_path", "")), "config of the model"), torch.device("meta"):
        return _measure_shape(AutoModelForCausalLM.from_config(model, trust_remote_code=False))


def _measure_shape(model: Any) -> _Shape:
    model_config: Any = model.config
    config = model_config.get_text_config()
    # The output head is excluded, since neither LoRA nor quantization applies to it.
    linear = [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and "lm_head" not in name]
    # Some configs specify the head size, others only imply it.
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return _Shape(
        num_weights=sum(parameter.numel() for parameter in model.parameters()),
        linear_weights=sum(layer.weight.numel() for layer in linear),
        adapter_weights_per_rank=sum(layer.in_features + layer.out_features for layer in linear),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_values=head_size * (getattr(config, "num_key_value_heads", None) or heads),
        vocab=config.vocab_size,
    )


def _estimate_parts(shape: _Shape, settings: _StepSettings) -> dict[str, int]:
    """Return the bytes of each part at the step's peak; they add up to the peak memory."""
    fixed = _fixed_parts(shape, settings)
    gradients = _trainable_bytes(shape, settings) / settings.num_shards
    moments = _candidate_peaks(shape, settings, gradients)
    worst = max(moments, key=lambda moment: sum(moment.values()))
    parts = {**fixed, **worst}
    # A dense boolean mask (1 byte per entry), and an fp32 copy that is added to the scores (4 bytes).
    if settings.on_cpu:
        parts["attention mask"] = settings.longest_tree**2 * 5
    return {name: int(size) for name, size in parts.items() if int(size)}


def _fixed_parts(shape: _Shape, settings: _StepSettings) -> dict[str, float]:
    """Return the parts that persist between steps: weights, optimizer states, teacher."""
    trainable = _trainable_bytes(shape, settings)
    adapter = trainable if settings.lora_rank else 0.0
    base = float(shape.num_weights * settings.weight_bytes)
    if settings.four_bit:
        base = shape.linear_weights * _FOUR_BITS + (shape.num_weights - shape.linear_weights) * settings.weight_bytes
    per_weight: Mapping[str, float] = {"adamw": 2.0, "adamw_8bit": 2.0 / _trainable_size(settings), "sgd": 0.0}
    start_copy = (trainable if settings.warmed_up else 0.0) if settings.lora_rank else base
    copies = {"ema": trainable}.get(settings.teacher, start_copy)
    shards = settings.num_shards
    return {
        "weights": (base + adapter) / shards,
        "optimiser": trainable * per_weight[settings.optimizer] / shards,
        "teacher's copy": 0.0 if settings.teacher == "live" else copies / shards,
    }


def _candidate_peaks(shape: _Shape, settings: _StepSettings, gradients: float) -> list[dict[str, float]]:
    """Return the memory by part at each moment that may be the peak.

    These moments are the head's pass, the backward passes of the last and the first layer, and the teacher's pass.
    """
    tokens = settings.longest_tree
    stream = tokens * shape.hidden * (settings.compute_bytes + max(settings.compute_bytes, settings.weight_bytes)) / 2
    mlp, key_values = tokens * shape.mlp * settings.compute_bytes, tokens * shape.key_values * settings.compute_bytes
    layer = _MLP_TENSORS * mlp + _STREAM_TENSORS * stream + 2 * key_values
    activations = shape.layers * (stream if settings.checkpointing else layer)
    # Gradients accumulated over earlier micro-batches.
    earlier = gradients if settings.accumulation > 1 else 0.0
    head_gradient = 0.0 if settings.lora_rank else shape.vocab * shape.hidden * settings.weight_bytes
    backward = (layer if settings.checkpointing else 0.0) + _BACKWARD_TENSORS * stream
    in_forward, in_backward = _autocast_copies(shape, settings)
    moments = [
        {
            "activations": activations,
            "head": _head_bytes(shape, settings),
            "gradients": earlier,
            "cast weights": in_forward,
        },
        {"activations": activations + backward, "gradients": max(earlier, head_gradient), "cast weights": in_backward},
        {"activations": layer + _BACKWARD_TENSORS * stream, "gradients": gradients},
    ]
    if settings.teacher != "live":
        teacher_pass = _PASS_MLP_TENSORS * mlp + _PASS_STREAM_TENSORS * stream
        passes = {
            "activations": activations,
            "teacher's pass": teacher_pass,
            "gradients": earlier,
            "cast weights": in_forward,
        }
        moments.append(passes)
    # All layers' activations are already stored, and are freed during the backward pass.
    if not settings.checkpointing:
        moments[1]["activations"] = activations
    return moments


def _autocast_copies(shape: _Shape, settings: _StepSettings) -> tuple[float, float]:
    """Return the bytes of autocast's copies of weights at two moments: the end of the forward pass, and the backward
    pass.

    The graph holds the copies used in its multiplications, and autocast caches copies of trainable weights until its
    context ends. There are none under FSDP2, which casts weights as it gathers them, and none of 4-bit weights, which
    are dequantized to the compute dtype.
    """
    if settings.compute_bytes >= settings.weight_bytes or settings.four_bit or settings.num_shards > 1:
        return 0.0, 0.0
    copies = float(shape.linear_weights * settings.compute_bytes)
    # With checkpointing, no layer keeps its graph from the forward pass to the backward pass.
    in_graph = 0.0 if settings.checkpointing else copies
    return (in_graph if settings.lora_rank else copies), in_graph


def _head_bytes(shape: _Shape, settings: _StepSettings) -> float:
    """Return the bytes for a few rows of logits, and for the head's gradient if the head is trained."""
    tiles = float(shape.vocab * (_SLAB_ROWS * settings.compute_bytes + _TILE_ROWS * 8))
    if settings.on_cpu:
        tiles = float(_CPU_TILE_BYTES)
    trained = 0 if settings.lora_rank else shape.vocab * shape.hidden * (4 + settings.weight_bytes)
    return tiles + trained


def _trainable_size(settings: _StepSettings) -> int:
    return 4 if settings.lora_rank else settings.weight_bytes  # adapters are stored in fp32


def _trainable_bytes(shape: _Shape, settings: _StepSettings) -> float:
    number = shape.adapter_weights_per_rank * settings.lora_rank if settings.lora_rank else shape.num_weights
    return float(number * _trainable_size(settings))
