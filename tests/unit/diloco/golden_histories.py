"""DiLoCo written out by hand for a few small runs, and what it comes to after every step.

`python tests/unit/diloco/golden_histories.py` (with `tests` on PYTHONPATH) writes the file that the test compares
torchft's manager and ours with. Nothing of torchft or of the package is used here but the names of the settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from composer_replication.diloco.training import OuterLoop
from small_replicas import batches, small_model, vector

FILE = Path(__file__).resolve().parents[2] / "data" / "diloco_histories.json"
PLACES = (0, 60, 118)


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: tuple[int, ...]  # of each replica
    settings: OuterLoop = field(default_factory=lambda: OuterLoop(sync_every=4))
    aborted: tuple[int, ...] = ()  # rounds without a commit
    layers: tuple[tuple[int, ...], ...] = ((0, 1, 2),)  # of each fragment


# Halves of the small model by size: the first layer alone has 56 of its 119 numbers.
HALVES = ((0,), (1, 2))
RUNS = {
    "two replicas": Run(steps=(12, 12)),
    "four replicas that average": Run(
        steps=(8,) * 4, settings=OuterLoop(outer_lr=1.0, outer_momentum=0.0, nesterov=False, sync_every=4)
    ),
    "two fragments under way for a step": Run(
        steps=(12, 12), settings=OuterLoop(sync_every=4, num_fragments=2, fragment_sync_delay=1), layers=HALVES
    ),
    "half of the local weights kept": Run(
        steps=(12, 12), settings=OuterLoop(sync_every=4, num_fragments=2, fragment_update_alpha=0.5), layers=HALVES
    ),
    "a replica is gone after the first round": Run(steps=(12, 12, 4)),
    "a round is lost": Run(steps=(16,), aborted=(1,)),
}


def summary(weights: Tensor) -> list[float]:
    chosen = [weights.double().norm(), weights.double().sum(), *(weights[place] for place in PLACES)]
    return [round(float(each), 7) for each in chosen]


class ByHand:
    """One replica: a model, AdamW, and data of its own."""

    def __init__(self, rank: int, run: Run) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = batches(rank, run.steps[rank])
        self.history: list[list[float]] = []
        layers = [each for each in self.model if isinstance(each, nn.Linear)]
        self.fragments = [[each for layer in part for each in layers[layer].parameters()] for part in run.layers]

    def step(self) -> bool:
        batch = next(self.data, None)
        if batch is not None:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
            self.optimizer.step()
        return batch is not None

    def get(self, fragment: int) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.fragments[fragment]])

    def put(self, fragment: int, weights: Tensor) -> None:
        sizes = [each.numel() for each in self.fragments[fragment]]
        for each, values in zip(self.fragments[fragment], weights.split(sizes), strict=True):
            each.data.copy_(values.view_as(each))


def by_hand(run: Run) -> list[list[list[float]]]:
    """A history for each replica: a summary of its weights after every step."""
    settings, replicas = run.settings, [ByHand(rank, run) for rank in range(len(run.steps))]
    shared = [replicas[0].get(part) for part in range(settings.num_fragments)]
    momentum: list[Tensor | None] = [None] * settings.num_fragments
    commits, local, rounds = 0, 0, 0
    given: list[Tensor] = []
    while present := [each for each in replicas if each.step()]:
        local, part = local + 1, commits % settings.num_fragments
        if local == settings.steps_per_commit - settings.fragment_sync_delay:
            given = [shared[part] - each.get(part) for each in present]
        if local == settings.steps_per_commit:
            local, rounds = 0, rounds + 1
            kept = settings.fragment_update_alpha
            if rounds - 1 not in run.aborted:
                commits += 1
                mean = torch.stack(given).double().mean(0).float()
                before = momentum[part]
                moving = mean if before is None else settings.outer_momentum * before + mean
                momentum[part] = moving
                direction = mean + settings.outer_momentum * moving if settings.nesterov else moving
                shared[part] = shared[part] - settings.outer_lr * direction
            else:
                kept = 0.0
            for each in present:
                each.put(part, shared[part] + kept * (each.get(part) - shared[part]))
        for each in present:
            each.history.append(summary(vector(each.model)))
    return [each.history for each in replicas]


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: by_hand(run) for name, run in RUNS.items()}, separators=(",", ":")) + "\n")
