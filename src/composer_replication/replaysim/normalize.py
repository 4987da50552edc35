"""Known import path of the pair filters; the code lives in `pairs/normalise/` and `teacher_replay/`."""

from composer_replication.pairs.normalise.normalizer import DEFAULT_RECIPE, DJNormalizer, NormalizedDPOPair
from composer_replication.pairs.replayed import replay_and_normalize_trace, replay_and_normalize_trace_sync

__all__ = [
    "DEFAULT_RECIPE",
    "DJNormalizer",
    "NormalizedDPOPair",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
]
