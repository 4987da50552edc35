"""What the tests of the smaller formats share: reading a file, counting what was read, and damage."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from composer_replication.ingestion.source_files import IngestReport, SourceFile

SHARED = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "sessions" / "other"


def _nested(levels):
    value = "deep"
    for _ in range(levels):
        value = [value]
    return value


JUNK = (None, 5, "text", [], {}, [[]], {"role": 7, "source": [], "action": {}, "content": None}, _nested(400))


def sample(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip("the shared samples are not here")
    return path


def read_path(module, path):
    report = IngestReport()
    return list(module.read(SourceFile(path, path.name), report)), report


def read_bytes(module, tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data)
    return read_path(module, path)


def read_json(module, tmp_path, name, value):
    return read_bytes(module, tmp_path, name, json.dumps(value).encode())


def tally(conversations):
    """(assistant messages, other messages without results, calls, results, errors)."""
    turns = [turn for conversation in conversations for turn in conversation.turns]
    results = [result for turn in turns for result in turn.results]
    return (
        sum(turn.role == "assistant" for turn in turns),
        sum(turn.role in ("system", "user") for turn in turns),
        sum(len(turn.calls) for turn in turns),
        len(results),
        sum(result.is_error is True for result in results),
    )


def replaced(items):
    """Each item replaced by each kind of junk: (its index, the list)."""
    for index in range(len(items)):
        for junk in JUNK:
            yield index, [*items[:index], junk, *items[index + 1 :]]


def flipped(data, n, seed=0):
    """The bytes with some of them changed, cut out or cut off."""
    rng = random.Random(seed)
    for _ in range(n):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if rng.random() < 0.3:
            del damaged[rng.randrange(len(damaged)) :]
        yield bytes(damaged)
