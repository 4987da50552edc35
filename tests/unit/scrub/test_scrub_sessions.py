"""Real sessions: almost nothing in them is a secret, and almost nothing is taken for one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest

from composer_replication.privacy import Scrubber

# What the fixtures do hold: signed session tokens of a page (Phoenix), in full or cut off, as session and CSRF values.
TRUE_KINDS = {"PHOENIX_TOKEN"}
PLACEHOLDER = re.compile(r"<([A-Z][A-Z0-9_]*)_\d+>")


class Finding(NamedTuple):
    """Where something was replaced, and as what; never what it was."""

    place: str
    kind: str


@pytest.fixture(scope="module")
def records(shared_dir: Path) -> list[tuple[str, object]]:
    folder = shared_dir / "fixtures" / "sessions"
    return [
        (f"{path.relative_to(folder)}:{number}", orjson.loads(line))
        for path in sorted(folder.rglob("*.jsonl"))
        for number, line in enumerate(path.read_bytes().splitlines(), start=1)
    ]


def strings_of(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | list):
        return sum(map(strings_of, value.values() if isinstance(value, dict) else value))
    return 0


def findings(before: object, after: object, place: str) -> Iterator[Finding]:
    """Every placeholder that the scrubbed value has and the value had not, with the field it stands in."""
    if before is after:
        return
    if isinstance(before, str):
        new = Counter(PLACEHOLDER.findall(str(after))) - Counter(PLACEHOLDER.findall(before))
        yield from (Finding(place, kind) for kind in new.elements())
    elif isinstance(before, dict) and isinstance(after, dict):
        for (key, old), (new_key, new) in zip(before.items(), after.items(), strict=True):
            yield from findings(key, new_key, f"{place} (a key)")
            yield from findings(old, new, f"{place}.{new_key}")
    elif isinstance(before, list) and isinstance(after, list):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from findings(old, new, f"{place}[{index}]")


def test_fewer_than_one_false_positive_in_100_kilobytes(records, note):
    scope, found = Scrubber().scope(), []
    for place, record in records:
        found += findings(record, scope.value(record), place)
    false = [finding for finding in found if finding.kind not in TRUE_KINDS]
    per_100_kb = len(false) / sum(strings_of(record) for _, record in records) * 100_000
    note(f"scrubbed sessions: {len(found)} placeholders, {len(false)} not known to be secrets: {per_100_kb:.2f}/100 KB")
    for finding in false:
        note(f"  {finding.kind} at {finding.place}")
    counted = Counter(finding.kind for finding in found)
    assert counted == {kind: count for kind, count in scope.report.counts.items() if kind != "USER"}
    assert per_100_kb < 1
    # All replacements together stay under the bound too, the true ones included.
    assert len(found) / sum(strings_of(record) for _, record in records) * 100_000 < 1


def test_a_scrubbed_session_is_stable(records):
    scope = Scrubber().scope()
    once = [scope.value(record) for _, record in records[:400]]
    assert [Scrubber().scope().value(record) for record in once] == once
