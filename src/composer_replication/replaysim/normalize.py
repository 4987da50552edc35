"""Stable import path of the pair filters, which are implemented in `pairs`."""

from composer_replication.pairs.export import replay_and_normalize_trace, replay_and_normalize_trace_sync
from composer_replication.pairs.normalise import DEFAULT_RECIPE, DJNormalizer, NormalizedDPOPair

__all__ = [
    "DEFAULT_RECIPE",
    "DJNormalizer",
    "NormalizedDPOPair",
    "replay_and_normalize_trace",
    "replay_and_normalize_trace_sync",
]
