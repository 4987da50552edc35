"""Sites of simulated sessions with a known mean effect: sizes and shapes that real logs have."""

from __future__ import annotations

import math

import numpy as np


def planted(rng, *, sessions, sizes, shape, effect, alike=0.3):
    """(values, names of their sessions): spread 1, of which a share is the sessions' own."""
    if sizes == "equal":
        numbers = np.full(sessions, 4)
    elif sizes == "unequal":
        numbers = rng.geometric(0.2, sessions)
    else:
        numbers = np.maximum(1, np.round(np.exp(rng.normal(1, 1, sessions)))).astype(int)

    def noise(number):
        return rng.normal(size=number) if shape == "normal" else rng.exponential(size=number) - 1.0

    own = noise(sessions) * math.sqrt(alike)
    values = [effect + own[at] + noise(number) * math.sqrt(1 - alike) for at, number in enumerate(numbers)]
    names = [f"session-{at}" for at, number in enumerate(numbers) for _ in range(number)]
    return [float(each) for several in values for each in several], names


def planted_repeats(rng, *, repeats, luck, own=0.3, **case):
    """(a list of values for each repeat, names of their sessions): the same sites, measured several times over.

    `luck` is the spread of what a repeat does to all sites, `own` of what it does to one of them.
    """
    values, names = planted(rng, **case)
    lucks = rng.normal(size=(repeats, 1)) * luck
    return (np.asarray(values) + lucks + rng.normal(size=(repeats, len(values))) * own).tolist(), names
