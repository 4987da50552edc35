"""Every step of a few small runs: by hand, over torchft's manager and over a store, against numbers on file."""

from __future__ import annotations

import json

import pytest
import torch
from golden_histories import FILE, RUNS, by_hand, summary

from composer_replication.diloco.store import MemoryStore
from small_replicas import TORCHFTS_OWN_WARNINGS, OneReplica, largest_gap, run_replica, store_replicas, torchft_replicas

pytest.importorskip("torchft")
pytestmark = TORCHFTS_OWN_WARNINGS
GOLDEN = json.loads(FILE.read_text())
TOLERANCE = 1e-5  # sums of 119 numbers of about 1/3, in fp32
OVER_TORCHFT = [name for name, run in RUNS.items() if not run.aborted]


def close_to_golden(name: str, histories) -> None:
    wanted = GOLDEN[name]
    assert [len(each) for each in histories] == [len(each) for each in wanted]
    for mine, golden in zip(histories, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(golden), rtol=0, atol=TOLERANCE)


def steps_of(history: list[torch.Tensor]) -> list[list[float]]:
    return [summary(each) for each in history[:-1]]


def test_every_run_is_on_file():
    assert [*GOLDEN] == [*RUNS]


@pytest.mark.parametrize("name", RUNS)
def test_by_hand(name):
    close_to_golden(name, by_hand(RUNS[name]))


def test_a_lost_round_over_a_manager_of_one():
    run = RUNS["a round is lost"]
    history = run_replica(OneReplica(aborted=run.aborted), steps=run.steps[0], settings=run.settings)
    close_to_golden("a round is lost", [steps_of(history)])


@pytest.mark.parametrize("name", OVER_TORCHFT)
def test_over_torchft_and_over_a_store(name):
    run = RUNS[name]
    number, quorum = len(run.steps), sum(each == max(run.steps) for each in run.steps)
    theirs = torchft_replicas(number, quorum=quorum, steps=run.steps, settings=run.settings)
    ours = store_replicas(number, MemoryStore(), steps=run.steps, settings=run.settings)
    close_to_golden(name, [steps_of(each) for each in theirs])
    close_to_golden(name, [steps_of(each) for each in ours])
    last = [each[-1] for each, steps in zip(ours, run.steps, strict=True) if steps == max(run.steps)]
    assert all(torch.equal(each, last[0]) for each in last)
    assert largest_gap(ours, theirs) < 1e-6


def test_four_replicas_over_files_end_bit_equal_and_as_over_torchft(tmp_path):
    """Over S3 and Azure: tests/bucket_servers/test_rounds_on_servers.py."""
    ours, theirs = store_replicas(4, str(tmp_path), steps=8), torchft_replicas(4, steps=8)
    assert all(torch.equal(each[-1], ours[0][-1]) for each in ours)
    assert largest_gap(ours, theirs) < 1e-6


def test_one_replica_over_files_is_plain_torchft(tmp_path):
    [ours], [theirs] = store_replicas(1, str(tmp_path), steps=8), torchft_replicas(1, steps=8)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
