"""From states to pairs worth training on in one call: teachers asked, pairs of what they agree on, filtered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from composer_replication import teacher_replay
from composer_replication.errors import InputError
from composer_replication.pairs.normalise.normalizer import DJNormalizer, NormalizedDPOPair
from composer_replication.teacher_replay.replay import check_threshold
from composer_replication.teacher_replay.teachers import DEFAULT_TEACHERS
from composer_replication.types import TeacherCallResult, TeacherSpec, TraceState


async def replay_and_normalize_trace(
    *,
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] | None = None,
    agreement_threshold: int = 2,
    max_total_usd: float = 5.0,
    normalizer: DJNormalizer | None = None,
    **replay_kwargs: Any,
) -> tuple[list[TeacherCallResult], list[NormalizedDPOPair]]:
    """`replay_trace`, `extract_dpo_pairs`, then the normalizer, by default with the shipped recipe.

    `replay_kwargs` go to `replay_trace`; `teachers=None` are its own. What was dropped is in the normalizer's `counts`.
    """
    normalizer = normalizer or DJNormalizer()  # before a cent is spent: its recipe may be wrong
    teacher_options: dict[str, Any] = {} if teachers is None else {"teachers": teachers}
    check_threshold(len(DEFAULT_TEACHERS if teachers is None else teachers), agreement_threshold)
    actions = await teacher_replay.replay_trace(states, max_total_usd=max_total_usd, **teacher_options, **replay_kwargs)
    pairs = teacher_replay.extract_dpo_pairs(states, actions, agreement_threshold=agreement_threshold)
    return actions, normalizer.normalize(pairs)


def replay_and_normalize_trace_sync(
    *,
    states: Sequence[TraceState],
    teachers: Sequence[TeacherSpec] | None = None,
    agreement_threshold: int = 2,
    max_total_usd: float = 5.0,
    normalizer: DJNormalizer | None = None,
    **replay_kwargs: Any,
) -> tuple[list[TeacherCallResult], list[NormalizedDPOPair]]:
    """`replay_and_normalize_trace` for code without an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        work = replay_and_normalize_trace(
            states=states,
            teachers=teachers,
            agreement_threshold=agreement_threshold,
            max_total_usd=max_total_usd,
            normalizer=normalizer,
            **replay_kwargs,
        )
        return asyncio.run(work)
    raise InputError("an event loop runs here already. Write `await replay_and_normalize_trace(...)` instead")
