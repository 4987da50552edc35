"""Deaths, pauses, late joins and a bad store at once: no wrong mean, no hang, survivors equal to the bit."""

from __future__ import annotations

import pytest
from chaos import Run, Scenario

NUM_QUICK, NUM_FULL = 8, 180
# The threads of a killed replica end where they are.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def play(seed: int) -> None:
    run = Run(Scenario(seed))
    run.play()
    run.check()


@pytest.mark.parametrize("seed", range(NUM_QUICK))
def test_chaos(seed):
    play(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(NUM_QUICK, NUM_FULL))
def test_more_chaos(seed):
    play(seed)
