"""Teachers asked about logged states: what would they have done? Cached, within a hard cap.

teachers         who is asked, where, with which key and at which price
nano_dollars     prices and caps in whole nano-dollars
prices           what an endpoint's models cost, as it says itself
injection_fence  tool results as data in a prompt, and what in them reads like an instruction
requests         the bytes of a request, the most it can cost, and the key of its reply
endpoint/        one attempt, and whether an endpoint is any use
store/           replies and money spent
ask_and_retry    one question: from the store, else within the budget, with patience
concurrency      many sessions at once, so that prompt caches help
votes/           what answers mean together, and whether another one can matter
replay           every teacher at every state
cost_survey      what all of it would ask and cost, before a cent is spent
asked_tools      with which tools a session was asked about
hint_writer      hints that a model writes, checked
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
