"""Rollouts with known errors: they judge which turns the trainer takes for error sites, and which tokens it trains.

Written from the design alone, without reading the trainer. A case the trainer fails is a defect of the trainer, or is
argued about here. Every result, token and site is stated or follows from the script's own tokens; no mask of TRL's is
used. `tests/unit/trainer/test_scripted_rollouts_are_well_formed.py` checks the scripts against TRL itself.

    for batch in batches(tokenizer):
        batch.attach(trainer)
        output = trainer._generate_and_score_completions(batch.rows(2))
        for script, found in zip(batch.scripts_of_rows(2), sites_of(output), strict=True):
            assert differences(script, tokenizer, found) == []
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from data.scripted_rollout_types import DEFAULT_LIMIT, Scripted, Site, TurnSpan, completion_ids, limit_of, turn_spans
from data.scripted_rollouts_edges import BUDGETS, SIGNALS, TURNS, UNREADABLE
from data.scripted_rollouts_failures import RAISED, SAID
from rollouts.tiny_policy import ScriptedGeneration

SCRIPTS: tuple[Scripted, ...] = RAISED + SAID + UNREADABLE + TURNS + BUDGETS + SIGNALS

__all__ = [
    "DEFAULT_LIMIT",
    "SCRIPTS",
    "Batch",
    "Found",
    "PlantedSite",
    "Scripted",
    "Site",
    "TurnSpan",
    "batches",
    "completion_ids",
    "differences",
    "expected_sites",
    "limit_of",
    "turn_spans",
]


class PlantedSite(NamedTuple):
    """A site with its tokens: `completion_ids[start:end] == ids` of the erring turn, end-of-turn token included."""

    turn: int
    start: int
    end: int
    ids: tuple[int, ...]
    kinds: frozenset[str]
    blame: str
    tool: str | None
    is_taught: bool


def expected_sites(script: Scripted, tokenizer: Any, *, taught_only: bool = False) -> list[PlantedSite]:
    """The script's failures in order; `taught_only` leaves those out that are not the model's doing."""
    spans = turn_spans(script, tokenizer)
    planted = [PlantedSite(each.turn, *spans[each.turn], *each[1:], each.is_taught) for each in script.sites]
    return [each for each in planted if each.is_taught or not taught_only]


@dataclass(frozen=True)
class Batch:
    """Scripts that one trainer can run together: the same `max_completion_length` and rounds of tools."""

    scripts: tuple[Scripted, ...]
    limit: int
    max_iterations: int | None

    def scripts_of_rows(self, num_generations: int) -> list[Scripted]:
        return [script for script in self.scripts for _ in range(num_generations)]

    def rows(self, num_generations: int) -> list[dict[str, Any]]:
        return [script.row() for script in self.scripts_of_rows(num_generations)]

    def attach(self, trainer: Any) -> ScriptedGeneration:
        """Sets the budgets and makes the trainer follow the scripts."""
        trainer.max_completion_length = trainer.args.max_completion_length = self.limit
        trainer.max_tool_calling_iterations = sys.maxsize if self.max_iterations is None else self.max_iterations
        trainer.args.max_tool_calling_iterations = self.max_iterations
        return ScriptedGeneration(trainer, {script.question: [script.turns] for script in self.scripts})


def batches(tokenizer: Any, scripts: Sequence[Scripted] = SCRIPTS) -> list[Batch]:
    groups: dict[tuple[int, int | None], list[Scripted]] = {}
    for script in scripts:
        groups.setdefault((limit_of(script, tokenizer), script.max_iterations), []).append(script)
    return [Batch(tuple(group), *key) for key, group in groups.items()]


class Found(NamedTuple):
    """What a trainer says about one failure; leave `kind` or `tool` None where it does not say."""

    turn: int
    start: int
    end: int
    ids: tuple[int, ...]
    kind: str | None = None
    tool: str | None = None


def differences(script: Scripted, tokenizer: Any, found: Sequence[Found], *, taught_only: bool = True) -> list[str]:
    """What the trainer's sites have too many, too few, or elsewhere; an empty list is a pass.

    Sites are compared as sets: a turn may be named once for each failing call or once for all of one kind.
    """
    expected = expected_sites(script, tokenizer, taught_only=taught_only)
    wrong = [f"not planted: {each}" for each in found if not any(_fits(plan, each) for plan in expected)]
    missing = [f"not found: {plan}" for plan in expected if not any(_fits(plan, each) for each in found)]
    return [f"{script.name} ({script.why}): {line}" for line in wrong + missing]


def _fits(plan: PlantedSite, found: Found) -> bool:
    return (
        plan[:4] == tuple(found[:4])
        and (found.kind is None or found.kind in plan.kinds)
        and (found.tool is None or plan.tool is None or found.tool == plan.tool)
    )
