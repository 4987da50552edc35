"""Pairs that the sessions of a run give without any adviser: their corrections, and as many of the opposite.

Most corrections say to look first. For each of them there is a pair from a state where acting at once was right, of the
same session where it has one, so that the two keep each other in balance: one that says not to look for a text once
more for one that says to look for it, and the same for paths. What has no opposite is counted. Sessions that are held
out balance each other, and no others.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from composer_replication.actions.write import text_of
from composer_replication.ingestion.states import states
from composer_replication.pairs.corrections import ACTED, Correction, own_pairs
from composer_replication.pairs.extract import PairRecord
from composer_replication.runs import RunDir
from composer_replication.runs.sites import read_sites
from composer_replication.runs.split import held_out_of
from composer_replication.runs.tools import read_tools
from composer_replication.sites import find_error_sites
from composer_replication.types import Action, Conversation, DPOPair, ErrorSite

_LOOK_FIRST = {True: "looked_for_text", False: "looked_for_path"}  # what an edit needed, and what other calls did
MOST_SPARE, _MOST_OF_A_SESSION = 64, 4
"""Pairs of a kind that are kept for other sessions: each holds the messages before it."""
WORKED = "rejected_action_worked"


class OwnPair(NamedTuple):
    """A pair, and what its row says of the rejected side besides."""

    record: PairRecord
    facts: Mapping[str, Any]


class _Balance:
    """What sessions that may balance each other have too much of, and too little."""

    def __init__(self) -> None:
        self.owed: Counter[str] = Counter()  # pairs of the opposite, by what was looked for
        self.spare: dict[str, list[OwnPair]] = {how: [] for how in _LOOK_FIRST.values()}

    def spare_ones(self) -> Iterator[OwnPair]:
        return (pair for how, pairs in self.spare.items() for pair in pairs[: self.owed[how]])


class OwnPairs:
    """Takes one conversation after the other; `pairs` are those so far, `num_failures` what they could be made of."""

    def __init__(self, run: RunDir) -> None:
        self.pairs: list[OwnPair] = []
        self.num_failures = 0
        self._tools = read_tools(run)
        self._sites: dict[str, list[ErrorSite]] | None = None
        self._held_out = held_out_of(run)
        self._balances = {is_held_out: _Balance() for is_held_out in (False, True)}
        if run.is_current("sites"):
            self._sites = defaultdict(list)
            for site, _ in read_sites(run):
                self._sites[site.conversation_id].append(site)

    @property
    def reads_sites(self) -> bool:
        return self._sites is not None

    def take(self, conversation: Conversation) -> None:
        """The pairs of a conversation, and of what it has too much to balance others with a few."""
        sites = find_error_sites(conversation) if self._sites is None else self._sites[conversation.id]
        self.num_failures += sum(site.is_kept for site in sites)
        candidates = list(own_pairs(conversation, sites))
        corrections = [correction for correction in candidates if correction.source != ACTED]
        balance = self._balances[conversation.id in self._held_out]
        balance.owed.update(
            _looked_for(correction.kind) for correction in corrections if correction.how == "look_first"
        )
        acted = sorted(
            (correction for correction in candidates if correction.source == ACTED),
            key=lambda correction: _order(conversation, correction),
        )
        chosen: list[Correction] = []
        spare: list[Correction] = []
        room = {
            how: min(MOST_SPARE - len(spare_pairs), _MOST_OF_A_SESSION) for how, spare_pairs in balance.spare.items()
        }
        for correction in acted:
            if balance.owed[correction.how] > 0:
                balance.owed[correction.how] -= 1
                chosen.append(correction)
            elif room[correction.how] > 0:
                room[correction.how] -= 1
                spare.append(correction)
        pairs = self._made(conversation, [*corrections, *chosen, *spare])
        self.pairs += pairs[: len(pairs) - len(spare)]
        for correction, pair in zip(spare, pairs[len(pairs) - len(spare) :], strict=True):
            balance.spare[correction.how].append(pair)

    def balanced(self) -> list[OwnPair]:
        """All pairs, with spare ones of other sessions for what is still owed."""
        return [*self.pairs, *(pair for balance in self._balances.values() for pair in balance.spare_ones())]

    def _made(self, conversation: Conversation, chosen: Iterable[Correction]) -> list[OwnPair]:
        turn_numbers = {correction.turn_number for correction in chosen}
        before = {}
        for number, (messages, _) in enumerate(states(conversation)) if turn_numbers else ():
            if number in turn_numbers:
                # A log with a system prompt of its own needs none of ours in front of it.
                is_own = len(messages) > 1 and messages[1].get("role") == "system"
                before[number] = messages[1:] if is_own else messages
        tools = self._tools.of(conversation.format)
        return [_pair(conversation, correction, before[correction.turn_number], tools) for correction in chosen]


def without_opposite(pairs: Iterable[tuple[PairRecord, Mapping[str, Any]]]) -> dict[str, int]:
    """Of pairs with what their rows say: how many more say to look first than not to, by what was looked for."""
    more: Counter[str] = Counter()
    for record, facts in pairs:
        if record.source == ACTED:
            more[facts["how"]] -= 1
        elif facts.get("how") == "look_first":
            more[_looked_for(facts["rejected_failures"][0])] += 1
    return dict(+more)


def _looked_for(kind: str) -> str:
    return _LOOK_FIRST[kind.startswith("edit_")]


def _order(conversation: Conversation, correction: Correction) -> bytes:
    """The same in every run, and of no meaning: states from all over a session."""
    return hashlib.sha256(f"{conversation.id}::{correction.turn_number}".encode("utf-8", "replace")).digest()


def _pair(conversation: Conversation, correction: Correction, messages: list[Any], tools: Any) -> OwnPair:
    chosen, rejected = (Action(text="", calls=(call,)) for call in (correction.chosen, correction.failed))
    pair = DPOPair(
        state_id=f"{conversation.id}::{correction.turn_number:04d}.{correction.call_number}",
        state_messages=messages,
        chosen=text_of(chosen),
        rejected=text_of(rejected),
        n_teachers_agreeing=0,
    )
    record = PairRecord(
        pair=pair,
        chosen_by=correction.source,
        teachers=(),
        classes=(),
        student_kind=correction.failed.name,
        chosen_kind=correction.chosen.name,
        chosen_action=chosen,
        rejected_action=rejected,
        source=correction.source,
    )
    about = {WORKED: False, "rejected_failures": [correction.kind] if correction.kind else [], "how": correction.how}
    return OwnPair(record, {**about, **({"tools": tools} if tools else {})})
