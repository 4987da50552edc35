"""Ask other models (teachers) what they would have done in logged states, with a cache and a spending cap.

teachers       the models to ask, with their endpoints, keys and prices
prices         look up the prices of an endpoint's models
requests       build requests, with tool results fenced as data, a maximum cost and a cache key
endpoint       one HTTP attempt: a reply, or a failure and its consequences for retries and costs
ask_and_retry  one question: answered from the store, or asked within the cap and retried; many sessions at once
ledger         the store of replies and of money spent, shared by processes
tables         the tables of the store, upgrades, and integrity checks
votes          count votes for equal actions, and decide whether further votes can matter
replay         ask every teacher in every state
cost_survey    estimate the requests and costs of a replay before anything is sent
forget         remove sessions from the store; record the tools with which a session was asked about
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "DEFAULT_TEACHERS": "composer_replication.teacher_replay.teachers",
    "DPOPair": "composer_replication.types",
    "ReplayOptions": "composer_replication.teacher_replay.replay",
    "TeacherCallResult": "composer_replication.types",
    "TeacherSpec": "composer_replication.types",
    "TraceState": "composer_replication.types",
    "extract_dpo_pairs": "composer_replication.pairs.extract",
    "replay_trace": "composer_replication.teacher_replay.replay",
    "save_pairs": "composer_replication.pairs.extract",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
