"""Twenty steps of our trainer in TRL on the workspace, as any engine needs them to make the same steps.

A batch of rollouts is trained on twice (`ITERATIONS`), so every second step has ratios that are not 1. Tensors are in
`tests/data/recipes/twenty_steps.safetensors`, the rest in `twenty_steps.json` beside it.

    batches = recorded_batches()            # 10 of them; batches[step // ITERATIONS] is what `step` trained on
    steps = recorded_steps()                # 20 of them: alpha, losses, gradient norm, sums of the weights after it
    batch = fixed_batch(drift=0.3)          # one batch for values and gradients, some of whose ratios are clipped
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FOLDER = Path(__file__).resolve().parents[1] / "data" / "recipes"
STEPS, ITERATIONS = 20, 2
GROUP, ROWS = 4, 8
"""Rollouts of one prompt, and rows of a batch."""
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "betas": (0.9, 0.999),
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    "epsilon": 0.2,
    "max_completion_length": 512,
    "temperature": 1.0,
    "seed": 7,
    "alpha_sdpo": 0.1,
    "sdpo_jsd_beta": 1.0,
    "is_clip": 2.0,
    "live_share": 0.01,
}
"""AdamW with a constant rate; channel 2 is kl_st with the trust-region teacher, its weight falls to 0 (`alpha`)."""


class Site(NamedTuple):
    """An erring turn: tokens [start, end) of an unpadded row, and the same from `teacher_start` of the hinted ids."""

    row: int
    start: int
    end: int
    teacher_start: int
    teacher_ids: Tensor
    kind: str
    hint: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Rollouts of one generation, padded as TRL does: prompts at their left, completions at their right.

    `tool_mask` marks what the policy sampled (within `completion_mask`). Rows of one `group` share their prompt and
    are not side by side: TRL shuffles them, and `place` is where each was before. `old_logprobs` are those of the
    weights that sampled, 0 in the padding.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    tool_mask: Tensor
    rewards: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    group: Tensor
    task_seeds: Tensor
    place: Tensor
    sites: tuple[Site, ...]

    @property
    def input_ids(self) -> Tensor:
        return torch.cat([self.prompt_ids, self.completion_ids], 1)

    @property
    def attention_mask(self) -> Tensor:
        return torch.cat([self.prompt_mask, self.completion_mask], 1)

    @property
    def loss_mask(self) -> Tensor:
        """(B, C): the sampled tokens."""
        return (self.completion_mask * self.tool_mask).bool()

    def row_ids(self, row: int) -> list[int]:
        """Prompt and completion of one row, without padding."""
        return self.input_ids[row][self.attention_mask[row].bool()].tolist()

    def prompt_length(self, row: int) -> int:
        return int(self.prompt_mask[row].sum())

    def index_pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """(N, 2) rows of the padded batch, (N, 2) (number of the site, row of its ids), (N,) the token both predict."""
        first = (self.prompt_mask.shape[1] - self.prompt_mask.sum(1)).tolist()
        student, teacher, tokens = [], [], []
        for number, site in enumerate(self.sites):
            for offset in range(site.end - site.start):
                position = first[site.row] + site.start - 1 + offset
                student.append((site.row, position))
                teacher.append((number, site.teacher_start - 1 + offset))
                tokens.append(int(self.input_ids[site.row, position + 1]))
        return torch.tensor(student), torch.tensor(teacher), torch.tensor(tokens)


class Step(NamedTuple):
    """What came out of one optimiser step; `weights` are those of `weight_sums` after it."""

    alpha: float
    grpo: float
    sdpo: float
    total: float
    grad_norm: float
    weights: Tensor


_TENSORS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "rewards", "advantages")
_TENSORS += ("old_logprobs", "group", "task_seeds", "place")
_SMALL = {"prompt_ids", "completion_ids", "group", "place"}
_MASKS = {"prompt_mask", "completion_mask", "tool_mask"}


def weight_sums(model: nn.Module, start: dict[str, Tensor]) -> Tensor:
    """(tensors, 3) in fp64: the sum and the norm of each parameter, and how far it is from its start."""
    return torch.stack(
        [
            torch.stack([each.sum(), each.norm(), (each - start[name].double()).norm()])
            for name, each in ((name, value.detach().double()) for name, value in model.named_parameters())
        ]
    )


def start_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def save_record(batches: list[Batch], steps: list[Step], names: list[str], folder: Path = FOLDER) -> None:
    """Both files; ids as int16 (the student has 1,971 tokens), masks as bytes."""
    tensors: dict[str, Tensor] = {"weights": torch.stack([each.weights for each in steps])}
    for number, batch in enumerate(batches):
        for name in _TENSORS:
            value: Tensor = getattr(batch, name)
            kind = torch.int16 if name in _SMALL else torch.uint8 if name in _MASKS else value.dtype
            tensors[f"{number}.{name}"] = value.to(kind).contiguous()
        for place, site in enumerate(batch.sites):
            tensors[f"{number}.site.{place}"] = site.teacher_ids.to(torch.int16).contiguous()
    said = {
        "settings": SETTINGS,
        "parameters": names,
        "sites": [[_plain(site) for site in batch.sites] for batch in batches],
        "steps": [{name: getattr(each, name) for name in Step._fields if name != "weights"} for each in steps],
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "twenty_steps.safetensors")
    (folder / "twenty_steps.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def _plain(site: Site) -> dict[str, Any]:
    return {name: value for name, value in site._asdict().items() if name != "teacher_ids"}


@cache
def _files() -> tuple[dict[str, Tensor], dict[str, Any]]:
    said = json.loads((FOLDER / "twenty_steps.json").read_text(encoding="utf-8"))
    return load_file(FOLDER / "twenty_steps.safetensors"), said


def recorded_batches() -> list[Batch]:
    tensors, said = _files()
    return [_batch(tensors, number, sites) for number, sites in enumerate(said["sites"])]


def _batch(tensors: dict[str, Tensor], number: int, sites: list[dict[str, Any]]) -> Batch:
    values = {name: tensors[f"{number}.{name}"] for name in _TENSORS}
    ids = {name: value.long() for name, value in values.items() if name in _SMALL | _MASKS}
    turns = [Site(**site, teacher_ids=tensors[f"{number}.site.{place}"].long()) for place, site in enumerate(sites)]
    return Batch(**{**values, **ids}, sites=tuple(turns))


def one_group(batch: Batch) -> Batch:
    """The rows of the first group that has erring turns and rewards that differ: a batch of its own, padded no further.

    Half the work of a whole batch, for checks that make both sides of a comparison themselves.
    """
    erring = {site.row for site in batch.sites}
    groups = [(batch.group == number).nonzero()[:, 0].tolist() for number in range(ROWS // GROUP)]
    rows = next(rows for rows in groups if erring & {*rows} and bool(batch.advantages[rows].any()))
    prompt, completion = (int(mask[rows].sum(1).max()) for mask in (batch.prompt_mask, batch.completion_mask))
    kept = {name: getattr(batch, name)[rows] for name in _TENSORS}
    kept |= {name: kept[name][:, -prompt:] for name in ("prompt_ids", "prompt_mask")}
    across = ("completion_ids", "completion_mask", "tool_mask", "old_logprobs")
    kept |= {name: kept[name][:, :completion] for name in across}
    sites = [site._replace(row=rows.index(site.row)) for site in batch.sites if site.row in rows]
    return Batch(**kept, sites=tuple(sites))


def recorded_steps() -> list[Step]:
    tensors, said = _files()
    return [Step(**each, weights=weights) for each, weights in zip(said["steps"], tensors["weights"], strict=True)]


def parameter_names() -> list[str]:
    """In the order of `Step.weights`."""
    return _files()[1]["parameters"]


def fixed_batch(*, drift: float = 0.0) -> Batch:
    """The first batch, for the start weights. With a drift, its old log-probs are moved by up to that much: at 0.3 some
    ratios are clipped below, some above, some not at all."""
    batch = recorded_batches()[0]
    wave = torch.sin(torch.arange(batch.old_logprobs.numel()).view_as(batch.old_logprobs) * 0.7)
    return replace(batch, old_logprobs=torch.where(batch.loss_mask, batch.old_logprobs + drift * wave, 0.0))
