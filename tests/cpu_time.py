"""CPU seconds of a piece of work, for tests that bound them.

The garbage collector is off meanwhile: after thousands of tests one full collection takes half a second, and it is not
what is measured. The least of a few rounds counts, and no more rounds are run than it takes to be below the limit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    was_on = gc.isenabled()
    gc.disable()
    try:
        begin = time.process_time()
        work()
        return time.process_time() - begin
    finally:
        if was_on:
            gc.enable()


def least_cpu_seconds(work: Callable[[], object], *, enough: float, rounds: int = 5) -> float:
    """The least of up to `rounds` measurements; the first below `enough` ends it."""
    least = cpu_seconds(work)
    for _ in range(rounds - 1):
        if least < enough:
            break
        least = min(least, cpu_seconds(work))
    return least
