"""Which turns of a run failed or were refused: the sites of `crf sites`, or found here where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from composer_replication.hint_generator.run_sites import read_sites
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.types import ErrorSite

# Tests that fail, a linter or a compiler that finds something: the call did what it was made for.
PART_OF_THE_WORK = frozenset({"test_failure", "lint_or_typecheck", "compile_error"})
TurnName = tuple[str, str]
"""The ids of a conversation and of a turn in it."""


class Failures(NamedTuple):
    """The kinds of failing calls by turn, and whether `sites.jsonl` said so."""

    kinds: Mapping[TurnName, tuple[str, ...]]
    is_from_sites: bool

    def kinds_of(self, turn: TurnName) -> tuple[str, ...]:
        return self.kinds.get(turn, ())

    def has_failed(self, turn: TurnName) -> bool:
        """Whether a call of the turn failed, was refused, stopped or blocked, other than as part of the work."""
        return any(kind not in PART_OF_THE_WORK for kind in self.kinds_of(turn))


def read_failures(run: RunDir) -> Failures:
    """Every failure counts, kept as a site or not, whoever's doing it was."""
    is_current = has_current_sites(run)
    found: dict[TurnName, tuple[str, ...]] = {}
    for site in (site for site, _ in read_sites(run)) if is_current else _found_anew(run):
        if site.kind != NO_FAILURE:
            name = (site.conversation_id, site.turn_id)
            found[name] = (*found.get(name, ()), site.kind)
    return Failures(found, is_current)


def has_current_sites(run: RunDir) -> bool:
    """Whether `sites.jsonl` says which turns failed; else they are found in the conversations."""
    return run.path("sites").exists() and not run.lineage("sites").stale


def _found_anew(run: RunDir) -> Iterator[ErrorSite]:
    for conversation in read_conversations(run):
        yield from find_error_sites(conversation)
