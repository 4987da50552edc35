"""What the teacher pool's actor does: asks teachers what they would have done, all runs of it under one budget.

The cap is `teacher_replay`'s: reserved before a request is sent, kept in a store on the disk. A pool that is killed and
started anew asks nobody twice for what was answered, and what it may have spent unseen counts as spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, explain
from composer_replication.teacher_replay import extract_dpo_pairs
from composer_replication.teacher_replay.nano_dollars import to_dollars
from composer_replication.teacher_replay.replay import ReplayOptions, replay_trace
from composer_replication.teacher_replay.store.ledger import TeacherStore
from composer_replication.types import DPOPair, TeacherCallResult, TeacherSpec, TraceState


@dataclass(frozen=True, kw_only=True)
class TeacherPoolSettings:
    """Who is asked, and how much all of it may cost. Keys are looked up in the environment, never sent along."""

    folder: str
    teachers: tuple[TeacherSpec, ...]
    max_total_usd: float = 5.0
    agreement_threshold: int = 2
    max_concurrency: int = 16

    def __post_init__(self) -> None:
        if not self.teachers:
            raise InputError(explain("teachers", got="none", expected="at least one"))


class TeacherPool:
    """Teachers, and the store that holds what they said and what it cost."""

    def __init__(self, settings: TeacherPoolSettings) -> None:
        self.settings = settings
        self._store = Path(settings.folder) / "teachers.sqlite"

    async def replay(self, states: Sequence[TraceState]) -> list[TeacherCallResult]:
        """Every teacher's answer at every state; fewer where the budget ends."""
        settings = self.settings
        options = ReplayOptions(cache=self._store, max_concurrency=settings.max_concurrency)
        return await replay_trace(list(states), settings.teachers, settings.max_total_usd, options=options)

    async def pairs(self, states: Sequence[TraceState]) -> list[DPOPair]:
        """What the teachers agreed on against what the student did."""
        answers = await self.replay(states)
        return extract_dpo_pairs(states, answers, self.settings.agreement_threshold)

    async def spent(self) -> dict[str, Any]:
        """Of the one budget, over every process that ever used it."""
        with TeacherStore(self._store) as store:
            meter = store.meter()
        return {
            "spent_usd": to_dollars(meter.spent),
            "unknown_usd": to_dollars(meter.unknown),
            "max_total_usd": self.settings.max_total_usd,
        }
