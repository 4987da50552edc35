"""Four replicas over a bucket of a real server end as those over files do, to the bit."""

from __future__ import annotations

import functools

import pytest

from bucket_servers import servers
from composer_replication.diloco.store import open_store

pytestmark = pytest.mark.diloco
pytest.importorskip("obstore")

STEPS = 3


@pytest.mark.parametrize("server", ["moto", "azurite"])
def test_replicas_over_a_real_bucket_end_as_those_over_files(tmp_path, server):
    import torch

    from unit.diloco.toy_replicas import check_run, in_threads, run_replica

    slow = {"min_replicas": 4, "grace_s": 60.0, "timeout_s": 240.0}  # nobody is left out on a busy machine

    def ends(store):
        runs = [functools.partial(run_replica, store, rank, 4, STEPS, **slow) for rank in range(4)]
        loops = in_threads(runs, timeout_s=240)
        check_run(store, loops)  # every mean worked out anew
        return [loop.final() for loop in loops]

    with getattr(servers, server)() as (uri, options):
        over_bucket = ends(open_store(uri, options=options))
    over_files = ends(open_store(str(tmp_path)))
    for (rank, step, ours), (other_rank, other_step, theirs) in zip(over_bucket, over_files, strict=True):
        assert (rank, step) == (other_rank, other_step)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
