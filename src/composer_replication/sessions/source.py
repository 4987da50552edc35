"""Where logged sessions come from: a run directory's conversations, each with its sites and pairs, one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from composer_replication.errors import StaleArtefactError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.sites import read_sites
from composer_replication.types import Action, Conversation, ErrorSite, Hint, ToolCall

_PAIR_SCHEMA, _PAIR_VERSION = "dpo_pair", 3


class LoggedPair(NamedTuple):
    """What the teachers would have done instead of assistant turn `turn_number` (counted from 0) of a conversation.

    Without an `action`, it is read from the `chosen` text, which does not always say where thinking ends.
    """

    state_id: str
    turn_number: int
    chosen: str
    action: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSession:
    """A conversation, the failures found in it with their hints, and pairs of answers to its states."""

    conversation: Conversation
    sites: Sequence[tuple[ErrorSite, Hint | None]] = ()
    pairs: Sequence[LoggedPair] = ()


def read_sessions(run: RunDir, *, with_sites: bool, with_pairs: bool) -> Iterator[LoggedSession]:
    """The conversations of a run directory with its sites and pairs, which must be those of these conversations."""
    for name, used in (("sites", with_sites), ("pairs", with_pairs)):
        if used:
            _check_current(run, name)
    sites: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
    for site, hint in read_sites(run) if with_sites else ():
        sites[site.conversation_id].append((site, hint))
    pairs: dict[str, list[LoggedPair]] = defaultdict(list)
    for conversation_id, pair in _read_pairs(run) if with_pairs else ():
        pairs[conversation_id].append(pair)
    for conversation in read_conversations(run):
        identity = conversation.id
        yield LoggedSession(conversation=conversation, sites=sites.pop(identity, ()), pairs=pairs.pop(identity, ()))


def has_artefact(run: RunDir, name: str) -> bool:
    return run.path(name).exists()


def is_current(run: RunDir, name: str) -> bool:
    """Whether an artefact is there and not older than what it was made of."""
    return has_artefact(run, name) and not run.lineage(name).stale


def _check_current(run: RunDir, name: str) -> None:
    stale = run.lineage(name).stale
    if stale:
        command = ARTEFACTS[stale[0]].command
        got = f"{' and '.join(stale)} older than what they were made of"
        fix = f"Turns may have moved since. Run `{command}` again."
        raise StaleArtefactError(explain(f"{run.path(name)}", got=got, expected="the newest", fix=fix))


def _read_pairs(run: RunDir) -> Iterator[tuple[str, LoggedPair]]:
    rows = cast("Iterator[dict[str, Any]]", run.read_jsonl("pairs", schema=_PAIR_SCHEMA, version=_PAIR_VERSION))
    for row in rows:
        action = _action(row.get("chosen_action"))
        yield row["conversation_id"], LoggedPair(row["state_id"], row["turn_number"], row["chosen"], action)


def _action(row: dict[str, Any] | None) -> Action | None:
    """None in rows of version 2, and where the text holds thinking."""
    return None if row is None else Action(text=row["text"], calls=tuple(ToolCall(**call) for call in row["calls"]))
