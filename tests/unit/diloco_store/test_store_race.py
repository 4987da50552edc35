"""Of processes that create one object at the same moment, one wins: 1,000 rounds in `make test-full`."""

from __future__ import annotations

import os

import pytest

from store_race import race

ROUNDS = {"ci": {4: 40}, "full": {2: 1000, 4: 1000, 8: 1000}}[os.environ.get("CRF_TEST_PROFILE", "ci")]


@pytest.mark.parametrize("racers", sorted(ROUNDS))
def test_no_round_has_two_winners(tmp_path, note, racers):
    result = race(str(tmp_path), rounds=ROUNDS[racers], racers=racers)
    note(f"race to create, files: {result}")
    assert (result["double"], result["none"], result["wrong"]) == (0, 0, 0)
    assert result["winners"] > 1  # else they did not race
