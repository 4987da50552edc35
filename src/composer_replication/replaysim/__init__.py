"""Stable import path of teacher replay and the pair filters, which are implemented in `teacher_replay` and `pairs`.

normalize  the pair filters, and replay with them
"""

from composer_replication.replaysim.normalize import DJNormalizer, NormalizedDPOPair, replay_and_normalize_trace
from composer_replication.teacher_replay import DPOPair, TeacherCallResult, extract_dpo_pairs, replay_trace

# fmt: off
__all__ = [
    "DJNormalizer", "DPOPair", "NormalizedDPOPair", "TeacherCallResult",
    "extract_dpo_pairs", "replay_and_normalize_trace", "replay_trace",
]
