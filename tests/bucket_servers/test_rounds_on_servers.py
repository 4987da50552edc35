"""Four replicas over a bucket of a real server: to the bit as over files, and within 1e-6 as over torchft's Manager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bucket_servers import servers
from composer_replication.diloco.store import ObjectStore, open_store
from composer_replication.diloco.training import OuterLoop
from small_replicas import AVERAGING, TORCHFTS_OWN_WARNINGS, largest_gap, store_replicas, torchft_replicas
from unit.diloco.toy_replicas import check_run, in_threads, run_replica

pytestmark = [pytest.mark.diloco, *TORCHFTS_OWN_WARNINGS]
pytest.importorskip("obstore")

STEPS = 3
SLOW: dict[str, Any] = {"grace_s": 60.0, "timeout_s": 240.0}  # nobody is left out on a busy machine
OUTER = {"averaging": AVERAGING, "nesterov": OuterLoop(sync_every=4)}


@pytest.fixture(scope="module", params=["moto", "azurite"])
def bucket(request) -> Iterator[Callable[[str], ObjectStore]]:
    """A store of each name, in one bucket."""
    with getattr(servers, request.param)() as (uri, options):
        yield lambda name: open_store(f"{uri}/{name}", options=options)


@functools.cache
def over_torchft(outer: str) -> list[list[torch.Tensor]]:
    return torchft_replicas(4, settings=OUTER[outer])


def test_replicas_over_a_real_bucket_end_as_those_over_files(bucket, tmp_path):
    def ends(store):
        runs = [functools.partial(run_replica, store, rank, 4, STEPS, min_replicas=4, **SLOW) for rank in range(4)]
        loops = in_threads(runs, timeout_s=240)
        check_run(store, loops)  # every mean worked out anew
        return [loop.final() for loop in loops]

    over_bucket, over_files = ends(bucket("toy")), ends(open_store(str(tmp_path)))
    for (rank, step, ours), (other_rank, other_step, theirs) in zip(over_bucket, over_files, strict=True):
        assert (rank, step) == (other_rank, other_step)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("outer", OUTER)
def test_every_step_over_a_real_bucket_is_that_over_torchfts_manager(bucket, note, outer):
    pytest.importorskip("torchft")
    store = bucket(outer)
    ours = store_replicas(4, store, settings=OUTER[outer], manager={**SLOW, "first_grace_s": 60.0})
    ends = [each[-1] for each in ours]
    assert all(torch.equal(each, ends[0]) for each in ends)
    gap = largest_gap(ours, over_torchft(outer))
    note(f"four replicas, {outer}, {store.uri}: {gap:.1e} at most from torchft's Manager at any of 12 steps")
    assert gap < 1e-6
