"""Will it fit? An estimate of a step's memory before training, against what there is, and what to change if not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from composer_replication.errors import InputError, explain
from composer_replication.trainer.watch.step_memory import Shape, StepSettings, parts_of, shape_of

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
