"""Where logged sessions come from: a run directory's conversations, each with its sites and pairs, one at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composer_replication.actions.parse import parse_action_text
from composer_replication.errors import StaleArtefactError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.pairs import LoggedPair, read_pairs
from composer_replication.runs.sites import read_sites
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.types import Conversation, ErrorSite, Hint, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSession:
    """A conversation, the failures found in it with their hints, and pairs of answers to its states.

    `corrections` are right calls in place of failing ones, by the site's id, where they are known otherwise than from a
    pair that answers the erring turn.
    """

    conversation: Conversation
    sites: Sequence[tuple[ErrorSite, Hint | None]] = ()
    pairs: Sequence[LoggedPair] = ()
    corrections: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])

    def right_call(self, site: ErrorSite) -> ToolCall | None:
        """What should have stood in place of the failing call, where somebody knows: one call for one call."""
        if site.id in self.corrections:
            return self.corrections[site.id]
        assistant_turns = [turn for turn in self.conversation.turns if turn.role == "assistant"] if self.pairs else []
        number = next((at for at, turn in enumerate(assistant_turns) if turn.id == site.turn_id), None)
        here = [pair for pair in self.pairs if pair.turn_number == number and pair.rejects_turn]
        by_call = (pair for pair in here if pair.rejected and pair.rejected.calls[0].id == site.call_id)
        whole = (
            pair
            for pair in here
            if pair.rejected is None and number is not None and len(assistant_turns[number].calls) == 1
        )
        pair = next(by_call, None) or next(whole, None)
        if pair is None:
            return None
        calls = (pair.action or parse_action_text(pair.chosen).action).calls
        return calls[0] if len(calls) == 1 else None


def read_sessions(run: RunDir, *, with_sites: bool, with_pairs: bool) -> Iterator[LoggedSession]:
    """The conversations of a run directory with its sites and pairs, which must be those of these conversations."""
    for name, used in (("sites", with_sites), ("pairs", with_pairs)):
        if used:
            _check_current(run, name)
    sites: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
    for site, hint in read_sites(run) if with_sites else ():
        sites[site.conversation_id].append((site, hint))
    pairs: dict[str, list[LoggedPair]] = defaultdict(list)
    for conversation_id, pair in read_pairs(run) if with_pairs else ():
        pairs[conversation_id].append(pair)
    for conversation in read_conversations(run):
        identity = conversation.id
        yield LoggedSession(conversation=conversation, sites=sites.pop(identity, ()), pairs=pairs.pop(identity, ()))


def _check_current(run: RunDir, name: str) -> None:
    if run.path(SPLIT).exists() and SPLIT not in {source.name for source in run.meta(name).sources}:
        fix = f"What they hold may come from sessions that are held out. Run `{ARTEFACTS[name].command}` again."
        got = f"{name} that were made before the split"
        raise StaleArtefactError(explain(f"{run.path(name)}", got=got, expected="the newest", fix=fix))
    stale = run.lineage(name).stale
    if stale:
        first = stale[0]
        changed = " and ".join(run.changed_sources(first))
        got = f"{' and '.join(stale)} older than what they were made of: {changed} changed since"
        fix = f"Run `{ARTEFACTS[first].command} {run.root}` again."
        raise StaleArtefactError(explain(f"{run.path(name)}", got=got, expected="the newest", fix=fix))
