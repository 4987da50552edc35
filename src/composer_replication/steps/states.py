"""The states of a run, as `crf replay` asks about them and `crf pairs` compares them; and which of their turns failed.

A state is what a model had seen before a turn, and the turn is what it did then. Both steps read it here, with the
tools that the session is asked about with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from composer_replication.config import ReplayConfig
from composer_replication.ingestion.states import states, trace_state
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.sites import read_sites
from composer_replication.runs.split import NAME as SPLIT
from composer_replication.runs.split import held_out_of
from composer_replication.runs.tools import read_tools
from composer_replication.sites import find_error_sites
from composer_replication.sites.find import NO_FAILURE
from composer_replication.teacher_replay.asked_tools import AskedTools
from composer_replication.types import Conversation, ErrorSite, TraceState, Turn

# Tests that fail, a linter or a compiler that finds something: the call did what it was made for.
PART_OF_THE_WORK = frozenset({"test_failure", "lint_or_typecheck", "compile_error"})


class StateOfTurn(NamedTuple):
    """A state, with the conversation and the turn that its action is, and the kinds of the turn's failing calls."""

    state: TraceState
    conversation_id: str
    turn: Turn
    failures: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether a call of the turn failed, was refused, stopped or blocked, other than as part of the work."""
        return any(kind not in PART_OF_THE_WORK for kind in self.failures)


_Failures = dict[str, tuple[str, ...]]
"""Kinds of failing calls by the id of their turn."""


class RunStates:
    """The states of a run; reading them again gives the same ones as long as the run is the same.

    Sessions that are held out have none here: nobody is asked, or paid, for what nothing may be learnt from.

    `knows_failures`: `failures` of a state are looked up, kept as a site or not, whoever's doing it was. They are those
    of `sites.jsonl`, or found in the conversations where that is not there or older than they are. Error sites are
    found there too if `crf sites` was not run.
    """

    def __init__(self, section: ReplayConfig, run: RunDir, *, knows_failures: bool = False) -> None:
        self._section, self._run, self._held_out = section, run, held_out_of(run)
        knows_failures = knows_failures or section.states == "failed"
        wants_sites = section.states == "sites"
        self.reads_sites = (wants_sites and run.path("sites").exists()) or (knows_failures and run.is_current("sites"))
        self._finds = (wants_sites or knows_failures) and not self.reads_sites
        self._taught: set[tuple[str, str]] = set()
        self._failures: dict[str, _Failures] = defaultdict(dict)
        for site in (site for site, _ in read_sites(run)) if self.reads_sites else ():
            self._take(site, self._failures[site.conversation_id])

    @property
    def sources(self) -> list[str]:
        """Artefacts that these states are made of."""
        split = [SPLIT] if self._run.path(SPLIT).exists() else []
        return ["conversations", *split, *(["sites"] if self.reads_sites else [])]

    def read(
        self,
        only: Iterable[str] | None = None,
        *,
        verify: bool = True,
        along: Callable[[Conversation], None] | None = None,
    ) -> Iterator[StateOfTurn]:
        """Session by session; messages are shared between the states of one. `only`: ids of the states, as read before.

        `verify=False` is for a file whose checksum was compared by an earlier reading. `along` sees every conversation.
        """
        section = self._section
        tools, asked_tools = (read_tools(self._run), AskedTools(self._run)) if section.send_tools else (None, None)
        ids, number = None if only is None else set(only), 0
        for conversation in read_conversations(self._run, verify=verify):
            if along is not None:
                along(conversation)
            if conversation.id in self._held_out:
                continue
            session_tools = (
                asked_tools.of(conversation, tools.of(conversation.format)) if tools and asked_tools else None
            )
            failures = self._failures_of(conversation) if ids is None else {}
            for turn_state in self._of(conversation, failures):
                if not (self._is_wanted(turn_state) if ids is None else turn_state.state["state_id"] in ids):
                    continue
                if section.limit is not None and number >= section.limit:
                    return
                number += 1
                if session_tools:
                    turn_state.state["tools"] = session_tools
                yield turn_state

    def _of(self, conversation: Conversation, failures: _Failures) -> Iterator[StateOfTurn]:
        history = states(conversation, max_history_tokens=self._section.max_history_tokens)
        for index, (messages, turn) in enumerate(history):
            if turn.origin == "meta":  # what the harness wrote in the model's place is nobody's action
                continue
            # A log with a system prompt of its own needs none of ours in front of it.
            is_own = len(messages) > 1 and messages[1].get("role") == "system"
            state = trace_state(f"{conversation.id}::{index:04d}", messages[1:] if is_own else messages, turn)
            state["session_id"], state["cwd"] = conversation.id, conversation.cwd
            yield StateOfTurn(state, conversation.id, turn, failures.get(turn.id, ()))

    def _failures_of(self, conversation: Conversation) -> _Failures:
        if not self._finds:
            return self._failures.get(conversation.id, {})
        failures: _Failures = {}
        for site in find_error_sites(conversation):
            self._take(site, failures)
        return failures

    def _take(self, site: ErrorSite, failures: _Failures) -> None:
        if site.is_kept:
            self._taught.add((site.conversation_id, site.turn_id))
        if site.kind != NO_FAILURE:
            failures[site.turn_id] = (*failures.get(site.turn_id, ()), site.kind)

    def _is_wanted(self, turn_state: StateOfTurn) -> bool:
        if self._section.states == "sites":
            return (turn_state.conversation_id, turn_state.turn.id) in self._taught
        return self._section.states == "all" or turn_state.has_failed
