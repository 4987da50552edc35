"""What can go wrong in a round, by name.

    RoundError (RuntimeError)
    ├── RoundTimeout (TimeoutError)     a round did not end in time; says who is missing
    │   └── QuorumLeft                  so many replicas have finished that no round can be held any more
    ├── RankTaken (ValueError)          another living process holds this rank
    ├── Replaced                        another process took this rank while this one was away
    ├── GenerationRefused (ValueError)  the prefix holds a run of another shape, or one that was closed
    ├── StaleRound (ValueError)         the prefix holds rounds of an earlier run
    ├── StateUnreadable                 no published state could be read, and the rounds since are gone
    └── OfferUnreadable                 what this replica offers cannot be read back, however often it is written

A vector of another shape or type is a ShapeError; what a store refuses is a StoreError.
"""

from __future__ import annotations

from composer_replication.errors import ComposerError


class RoundError(ComposerError, RuntimeError):
    """A round of the protocol cannot go on for this replica."""


class RoundTimeout(RoundError, TimeoutError):
    """A round did not end within its time."""


class QuorumLeft(RoundTimeout):
    """So many replicas have finished that no round can be held any more: it is not waited for."""


class RankTaken(RoundError, ValueError):
    """Another living process holds this rank."""


class Replaced(RoundError):
    """Another process took this rank while this one was away."""


class GenerationRefused(RoundError, ValueError):
    """The prefix holds a run of another shape, or one that was closed."""


class StaleRound(RoundError, ValueError):
    """The prefix holds rounds of an earlier run."""


class StateUnreadable(RoundError):
    """No published state could be read, and the rounds since are gone."""


class OfferUnreadable(RoundError):
    """What this replica offers cannot be read back, and without it there is no quorum."""
