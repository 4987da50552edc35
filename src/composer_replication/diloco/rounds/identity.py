"""Which run a place in the store holds: an id that every record carries, and what all replicas agreed on.

Stored three times; the majority of readable copies wins. A joining replica restores missing copies. Where there is no
majority the run is refused: two replicas must never follow two ids.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from composer_replication.canonical_json import encode
from composer_replication.diloco.rounds.failures import GenerationRefused
from composer_replication.diloco.rounds.patience import PatientStore
from composer_replication.diloco.rounds.reading import read_record
from composer_replication.diloco.rounds.records import (
    MOST_RANKS,
    MOST_RECORD_BYTES,
    Layout,
    OldRecord,
    RecordError,
    pack,
    refusing,
    unpack,
    whole,
)
from composer_replication.diloco.store import MissingObject, ObjectTooLarge
from composer_replication.errors import explain

COPIES = 3
_LOOKS, _PAUSE_S = 2, 0.5  # where copies differ: another replica may be writing them
_RUN = re.compile(r"[0-9a-f]{32}")  # "9f86d081884c7d659a2feaa0c55ad015"


class RunIdentity(NamedTuple):
    """A run that was begun: where its records are, and what its replicas agreed on."""

    layout: Layout
    settings: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return self.settings["world_size"]


def find_run(store: PatientStore, layout: Layout) -> RunIdentity | None:
    """Return the run that this place holds; None where no copy of what it is can be read.

    Raises GenerationRefused for a run of an earlier version of this package, and where readable copies differ and none
    has a majority.
    """
    copies: list[dict[str, Any]] = []
    for look in range(_LOOKS):
        if look:
            time.sleep(_PAUSE_S)
        copies = [about for copy in range(COPIES) if (about := _read(store, layout, copy)) is not None]
        if not copies:
            _refuse_an_old_run(store, layout)
            return None
        counts = Counter(encode(about, where="about") for about in copies)
        about = max(copies, key=lambda about: counts[encode(about, where="about")])
        if 2 * counts[encode(about, where="about")] > len(copies):
            return RunIdentity(replace(layout, run=about["run"]), about)
    got = f"{len(copies)} readable copies of what the run is, of runs {', '.join(about['run'] for about in copies)}"
    fix = f"Delete the copies of the other runs ({layout.about(0)}*), or begin another generation."
    where = f"generation {layout.generation} at {store.uri}"
    raise GenerationRefused(explain(where, got=got, expected="a majority that is equal", fix=fix))


def agree_on_run(store: PatientStore, layout: Layout, settings: Mapping[str, Any]) -> RunIdentity | None:
    """Return the run that this place holds, which begins with these settings if there is none; None as `find_run`."""
    run = find_run(store, layout)
    about = {**settings, "run": uuid.uuid4().hex} if run is None else run.settings
    for copy in range(COPIES):
        if (there := _read(store, layout, copy)) is None:
            store.settle(layout.about(copy), pack("about", layout.address(layout.about(copy)), dict(about)))
            there = _read(store, layout, copy)
        if run is None and there is not None:
            about = there  # whoever wrote the first readable copy has drawn the id
    return find_run(store, layout)


def _read(store: PatientStore, layout: Layout, copy: int) -> dict[str, Any] | None:
    def checked(at: str, data: bytes) -> dict[str, Any]:
        content = unpack("about", at, data)
        with refusing("about"):
            whole(content["world_size"], below=MOST_RANKS)
            if not _RUN.fullmatch(str(content["run"])):
                raise ValueError("no id of a run")
        return content

    return read_record(store, layout, layout.about(copy), checked)


def _refuse_an_old_run(store: PatientStore, layout: Layout) -> None:
    key = layout.about(0)
    try:
        unpack("about", layout.address(key), store.get(key, most_bytes=MOST_RECORD_BYTES))
    except OldRecord as error:
        fix = "End the run with the version that began it, or begin another one in another generation."
        where = f"generation {layout.generation} at {store.uri}"
        expected = "records that hold their own address"
        got = "a run that an earlier version of this package began"
        raise GenerationRefused(explain(where, got=got, expected=expected, fix=fix)) from error
    except (RecordError, MissingObject, ObjectTooLarge):
        return
