"""Known holes in the pinned packages: `make audit`.

With a network pip-audit asks PyPI. Without one, ADVISORIES names a checkout of pypa/advisory-database (or any
folder of OSV files, YAML or JSON), and every pin of constraints/*.txt is looked up there. Exit 1: a pin is affected, or
nothing could be asked: an audit that did not happen is not a clean one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def pins() -> dict[str, set[str]]:
    """Every version that a constraints file pins, by the package's normal name."""
    found: dict[str, set[str]] = {}
    for file in sorted((ROOT / "constraints").glob("*.txt")):
        for name, version in _PIN.findall(file.read_text()):
            found.setdefault(normal(name), set()).add(version)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def advisories(folder: Path) -> Iterator[dict[str, Any]]:
    """OSV records below a folder."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".yaml", ".yml", ".json"):
            text = file.read_text(encoding="utf-8")
            record = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
            if isinstance(record, dict) and record.get("affected"):
                yield record


def is_affected(version: str, affected: dict[str, Any]) -> bool:
    if version in (affected.get("versions") or ()):
        return True
    ranges = [each for each in affected.get("ranges") or () if each.get("type") == "ECOSYSTEM"]
    return any(_in_range(Version(version), each.get("events") or ()) for each in ranges)


def _in_range(version: Version, events: list[dict[str, str]]) -> bool:
    """OSV: a version is affected from `introduced` on, until `fixed` or after `last_affected`."""
    inside = False
    for event in events:
        (kind, value) = next(iter(event.items()))
        try:
            limit = Version(value)
        except InvalidVersion:
            continue
        if kind == "introduced" and version >= limit:
            inside = True
        elif (kind == "fixed" and version >= limit) or (kind == "last_affected" and version > limit):
            inside = False
    return inside


def offline(folder: Path) -> int:
    pinned, num_records, hits = pins(), 0, []
    for record in advisories(folder):
        num_records += 1
        if record.get("withdrawn"):
            continue
        for affected in record["affected"]:
            name = normal(str(affected.get("package", {}).get("name", "")))
            hits += [(name, each, record["id"]) for each in pinned.get(name, ()) if is_affected(each, affected)]
    if num_records == 0:
        print(f"audit: got no advisory in {folder}, expected OSV files; nothing was checked", file=sys.stderr)
        return 1
    for name, version, identity in sorted(set(hits)):
        print(f"{name} {version}: {identity}")
    print(f"audit: {sum(map(len, pinned.values()))} pins, {num_records} advisories, {len(set(hits))} affected")
    return int(bool(hits))


def main() -> int:
    given = os.environ.get("ADVISORIES", "")
    if given:
        return offline(Path(given))
    files = [
        argument
        for file in ("main", "replaysim", "verifiers", "openenv")
        for argument in ("-r", str(ROOT / "constraints" / f"{file}.txt"))
    ]
    try:
        asked = subprocess.run(
            ["pip-audit", "--no-deps", "--disable-pip", "--strict", *files], check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        print("audit: pip-audit is not installed. Type: pip install pip-audit", file=sys.stderr)
        return 1
    if asked.returncode:
        print("audit: without a network, set ADVISORIES to a checkout of pypa/advisory-database", file=sys.stderr)
    return asked.returncode


if __name__ == "__main__":
    sys.exit(main())
