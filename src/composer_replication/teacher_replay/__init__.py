"""Teachers: other models are asked what they would have done in logged states, cached and within a spending cap.

teachers       which models are asked, where, with which key and at which price
prices         looks up what an endpoint's models cost
requests       the bytes of a request, with tool results fenced as data, its highest cost and its cache key
endpoint       one HTTP attempt: a reply, or a failure and what it means for retrying and money
ask_and_retry  one question: from the store, else within the cap, with retries; many sessions at once
ledger         the store: replies and money spent, shared by processes
tables         the tables of the store, and the check of a whole store
votes          what the answers agree on, and whether another answer can matter
replay         every teacher at every state
cost_survey    what a replay would ask and cost, before anything is sent
forget         removes sessions from the store, and remembers the tools that a session was asked about with
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
