"""Real sessions: almost nothing in them is a secret, and almost nothing is taken for one."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from composer_replication.privacy import Scrubber

# What the fixtures do hold: signed session tokens of a page (Phoenix), one of them cut off, and a key in a test config.
KNOWN = {"PHOENIX_TOKEN", "KEY_VALUE", "SECRET"}


@pytest.fixture(scope="module")
def records(shared_dir: Path) -> list[object]:
    files = sorted((shared_dir / "fixtures" / "sessions").rglob("*.jsonl"))
    return [orjson.loads(line) for path in files for line in path.read_bytes().splitlines()]


def strings_of(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(strings_of, value.values() if isinstance(value, dict) else value))
    return 0


def test_fewer_than_one_placeholder_in_100_kilobytes(records):
    scope = Scrubber().scope()
    for record in records:
        scope.value(record)
    found = {kind: count for kind, count in scope.report.counts.items() if kind != "USER"}
    assert set(found) <= KNOWN
    assert sum(found.values()) / sum(map(strings_of, records)) * 100_000 < 1


def test_a_scrubbed_session_is_stable(records):
    scope = Scrubber().scope()
    once = [scope.value(record) for record in records[:400]]
    assert [Scrubber().scope().value(record) for record in once] == once
