"""Measure how DiLoCo over a bucket scales: check the simulation with real rounds, simulate 8 to 512 7B replicas.

python benchmarks/diloco_scale.py check        speed of this disk, predicted and measured rounds
python benchmarks/diloco_scale.py plots DIR    the tables of docs/concepts/diloco-scale.md, and its plots in DIR
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from diloco_simulation import (
    Bucket,
    Machine,
    Scenario,
    SimulatedRun,
    Spot,
    Work,
    simulate_bucket,
    simulate_direct,
)

PARAMETERS = 7.6e9
LORA_PARAMETERS = 40e6
PAYLOADS = {
    "LoRA, bf16": (2 * LORA_PARAMETERS, 8 * LORA_PARAMETERS),
    "full, int4": (4.25 / 8 * PARAMETERS, 8 * PARAMETERS),
    "full, bf16": (2 * PARAMETERS, 8 * PARAMETERS),
    "full, fp32": (4 * PARAMETERS, 8 * PARAMETERS),
}
"""Bytes of an offer, and of the state that a replica recovers from: weights and momentum in fp32."""
PLACES = {
    "one region": (Machine(up_mb_s=1200, down_mb_s=1200, latency_s=0.001), Bucket(put_s=0.04, get_s=0.02)),
    "internet, 1 Gb/s": (
        Machine(up_mb_s=110, down_mb_s=110, latency_s=0.04),
        Bucket(put_s=0.1, get_s=0.08, dollars_per_gb_out=0.09),
    ),
    "home, 50/250 Mb/s": (
        Machine(up_mb_s=6, down_mb_s=31, latency_s=0.04, dollars_per_hour=0.5),
        Bucket(put_s=0.1, get_s=0.08, dollars_per_gb_out=0.09),
    ),
}
REPLICAS = (8, 64, 512)
KILLS = (0.0, 0.02, 0.05, 0.1, 0.2)
CHECKED = ((2, 8), (2, 24), (4, 8), (4, 24))
"""Numbers of replicas and megabytes of the real rounds."""
POLL_S, TIMES = 0.1, 5


def in_threads(count: int, call: Callable[[int], float]) -> list[float]:
    """Run `call` in `count` threads at once, and return the results."""
    answers = [0.0] * count
    start = threading.Barrier(count)

    def run(rank: int) -> None:
        start.wait()
        answers[rank] = call(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def median_s(call: Callable[[], object], times: int = 7) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def calibrated(replicas: int, megabytes: int) -> tuple[Machine, Bucket]:
    """Return the speeds of this machine and disk as each of so many busy replicas sees them."""
    import torch

    from composer_replication.diloco.payload import decode_vector, encode_vector
    from composer_replication.diloco.store import open_store

    vector = torch.randn(megabytes * 250_000 // replicas)  # a shard
    data = encode_vector(vector, kind="fp32", about={})
    shard_mb = len(data) / 1e6

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)

        def speed(call: Callable[[int], object]) -> float:
            """Return the seconds of a call per replica."""
            return statistics.mean(in_threads(replicas, lambda rank: median_s(lambda: call(rank))))

        small_s = speed(lambda rank: store.put(f"small/{rank}", b"x" * 200))
        small_get_s = speed(lambda rank: store.get(f"small/{rank}", most_bytes=200))
        put_s = speed(lambda rank: store.put(f"big/{rank}", data))
        get_s = speed(lambda rank: store.get(f"big/{rank}", most_bytes=len(data)))

        def there_and_back(_rank: int) -> object:
            again = encode_vector(vector, kind="fp32", about={})
            for _ in range(2):  # the manifest has the checksum of each shard, which its reader verifies
                hashlib.sha256(again).digest()
            return decode_vector(again, elements=vector.numel(), about={})

        codec_s = speed(there_and_back)
    machine = Machine(
        up_mb_s=shard_mb / max(put_s - small_s, 1e-6),
        down_mb_s=shard_mb / get_s,
        codec_mb_s=2 * shard_mb / codec_s,
    )
    print(
        f"{replicas} at once: put {shard_mb / put_s:.0f} MB/s, get {machine.down_mb_s:.0f} MB/s, "
        f"small put {small_s * 1e3:.1f} ms, codec {machine.codec_mb_s:.0f} MB/s"
    )
    return machine, Bucket(
        put_s=small_s,
        get_s=small_get_s,
        connections=1,
        connection_mb_s=1e9,  # the speeds of the machine already include this and the next
        total_mb_s=1e9,
        poll_s=POLL_S,
    )


def measured_round_s(replicas: int, megabytes: int, rounds: int = 6) -> float:
    """Return the seconds of a real round of the manager: the median over replicas and all rounds but the first."""
    import torch

    from composer_replication.diloco.rounds.manager import ObjectStoreManager

    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:

        def run(rank: int) -> float:
            manager = ObjectStoreManager(
                folder, rank=rank, world_size=replicas, min_replicas=replicas, timeout_s=300, poll_s=POLL_S
            )
            vector = torch.randn(megabytes * 250_000)
            for number in range(rounds):
                manager.start_quorum()
                start = time.perf_counter()
                manager.allreduce(vector).wait()
                manager.should_commit()
                if number:
                    seconds.append(time.perf_counter() - start)
            manager.close()
            return 0.0

        in_threads(replicas, run)
    return statistics.median(seconds)


def check() -> None:
    """Print predicted and measured seconds of small rounds."""
    rows = []
    for replicas, megabytes in CHECKED:
        work = Work(payload_bytes=megabytes * 1e6, state_bytes=0, step_s=0.0, spread=0.0, num_rounds=20)
        pairs = []
        for _ in range(TIMES):  # alternating, so that other work on the machine slows both down
            machine, bucket = calibrated(replicas, megabytes)
            asked = Scenario(replicas=replicas, work=work, machine=machine, bucket=bucket)
            pairs.append((simulate_bucket(asked).round_s, measured_round_s(replicas, megabytes)))
        predicted, measured = (statistics.median(column) for column in zip(*pairs, strict=True))
        rows.append((replicas, megabytes, f"{predicted:.2f}", f"{measured:.2f}", f"{measured / predicted:.2f}"))
    print_table(("replicas", "payload MB", "predicted s", "measured s", "measured / predicted"), rows)


def scenario(replicas: int, payload: str, place: str, kills: float = 0.0, **work: int) -> Scenario:
    payload_bytes, state_bytes = PAYLOADS[payload]
    machine, bucket = PLACES[place]
    done = Work(payload_bytes=payload_bytes, state_bytes=state_bytes, **work)
    return Scenario(replicas=replicas, work=done, machine=machine, bucket=bucket, spot=Spot(kills_per_hour=kills))


def row_of_scale(payload: str, place: str, replicas: int) -> tuple[object, ...]:
    asked = scenario(replicas, payload, place)
    bucket, ring = simulate_bucket(asked), simulate_direct(asked)
    up, down = (each / asked.work.payload_bytes for each in bucket.bytes_per_replica_and_round)
    return (
        payload,
        place,
        replicas,
        f"{bucket.waiting_s:,.0f}",
        f"{bucket.useful_share:.0%}",
        f"{up:.2f} / {down:.2f}",
        f"{bucket.bucket_dollars / bucket.machine_dollars:.1%}",
        f"{ring.waiting_s:,.0f}",
        f"{ring.useful_share:.0%}",
        _verdict(bucket, ring),
    )


def table_of_scale() -> None:
    rows = [row_of_scale(payload, place, replicas) for payload in PAYLOADS for place in PLACES for replicas in REPLICAS]
    headings = ("payload", "place", "replicas", "wait s", "useful", "sent / received", "bucket's cost", "ring: wait s")
    print_table((*headings, "useful", "engine"), rows)


def _verdict(bucket: SimulatedRun, ring: SimulatedRun) -> str:
    """Return what to use: the bucket if it costs at most 10% of the machines' price and 10% of their useful time."""
    cheap = bucket.bucket_dollars <= 0.1 * bucket.machine_dollars
    if cheap and bucket.useful_share >= ring.useful_share - 0.1:
        return "bucket"
    return "network" if ring.useful_share >= 0.5 else "neither: sync less often"


def table_of_kills() -> None:
    rows = []
    for payload in ("LoRA, bf16", "full, int4"):
        for replicas in REPLICAS:
            for kills in KILLS:
                asked = scenario(replicas, payload, "internet, 1 Gb/s", kills)
                bucket, ring = simulate_bucket(asked), simulate_direct(asked)
                shares = (f"{bucket.useful_share:.0%}", bucket.kills, f"{ring.useful_share:.0%}", ring.lost_rounds)
                rows.append((payload, replicas, kills, *shares))
    print_table(
        ("payload", "replicas", "kills an hour", "bucket: useful", "kills", "ring: useful", "rounds lost"), rows
    )


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print("| " + " | ".join(headings) + " |")
    print("|" + "---|" * len(headings))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def plots(folder: Path) -> None:
    import diloco_plots

    table_of_scale()
    table_of_kills()
    diloco_plots.draw(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "plots"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/images"))
    given = parser.parse_args()
    check() if given.what == "check" else plots(given.folder)
