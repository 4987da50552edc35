"""Processes that race to create the same objects; who won each of them.

python store_race.py URI ROUNDS RACERS [option=value ...]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from composer_replication.diloco.store import open_store


def race(uri: str, *, rounds: int, racers: int, options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Every process creates the object of every round as near to the others as a barrier brings them.

    double: rounds that more than one process won; none: that nobody won; wrong: whose object is not the winner's.
    """
    spawn = multiprocessing.get_context("spawn")
    barrier, answers = spawn.Barrier(racers), spawn.Queue()
    folder = f"race-{os.getpid()}-{time.time_ns()}"
    arguments = (uri, dict(options or {}) or None, folder, rounds, barrier, answers)
    processes = [spawn.Process(target=_racer, args=(name, *arguments)) for name in range(racers)]
    for process in processes:
        process.start()
    wins: dict[int, list[int]] = {number: [] for number in range(rounds)}
    for _ in processes:
        name, won = answers.get(timeout=600)
        for number in won:
            wins[number].append(name)
    for process in processes:
        process.join()
    store = open_store(uri, options=options)
    wrong = [
        number
        for number, names in wins.items()
        if names and store.get(f"{folder}/{number}", most_bytes=99) != str(names[0]).encode()
    ]
    return {
        "rounds": rounds,
        "racers": racers,
        "double": sum(len(names) > 1 for names in wins.values()),
        "none": sum(not names for names in wins.values()),
        "wrong": len(wrong),
        "winners": len({name for names in wins.values() for name in names}),
    }


def _racer(name: int, uri: str, options: dict[str, str] | None, folder: str, rounds: int, barrier: Any, answers: Any):
    store = open_store(uri, options=options)
    won = []
    for number in range(rounds):
        barrier.wait(timeout=120)
        if store.create(f"{folder}/{number}", str(name).encode()):
            won.append(number)
    answers.put((name, won))


if __name__ == "__main__":
    place, count, processes, *pairs = sys.argv[1:]
    given = dict(pair.split("=", 1) for pair in pairs)
    print(json.dumps(race(place, rounds=int(count), racers=int(processes), options=given or None)))
