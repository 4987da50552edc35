"""Teachers asked about logged states, and the preference pairs of what they agree on."""

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
