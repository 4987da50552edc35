"""Of processes that create one object at the same moment, one wins: 1,000 rounds in `make test-full`.

Here in a folder and in a repository of the Hub; in buckets of S3 and Azure: tests/bucket_servers.
"""

from __future__ import annotations

import os

import pytest

from hub_loopback import serving
from store_race import race

PROFILE = os.environ.get("CRF_TEST_PROFILE", "ci")
ROUNDS = {"ci": {4: 40}, "full": {2: 1000, 4: 1000, 8: 1000}}[PROFILE]
ROUNDS_ON_HUB = {"ci": {4: 10}, "full": {2: 1000, 8: 1000}}[PROFILE]


@pytest.mark.parametrize("racers", sorted(ROUNDS))
def test_no_round_has_two_winners(tmp_path, note, racers):
    result = race(str(tmp_path), rounds=ROUNDS[racers], racers=racers)
    note(f"race to create, files: {result}")
    assert (result["double"], result["none"], result["wrong"]) == (0, 0, 0)
    assert result["winners"] > 1  # else they did not race


@pytest.mark.parametrize("racers", sorted(ROUNDS_ON_HUB))
def test_no_round_in_a_repository_of_the_hub_has_two_winners(note, monkeypatch, racers):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # read by the racers when they begin, and here long ago
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving() as repository:
        place = {"endpoint": repository.url, "token": "hf_of_nobody"}
        result = race("hf://owner/runs/a", rounds=ROUNDS_ON_HUB[racers], racers=racers, options=place)
        late = repository.late_commits - racers - 1  # without the probes of those who opened it
    note(f"race to create, a repository of the Hub: {result}, {late} commits on a head that had moved")
    assert (result["double"], result["none"], result["wrong"]) == (0, 0, 0)
    assert late > 0  # else they did not race
