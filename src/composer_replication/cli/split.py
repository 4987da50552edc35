"""`crf split RUN`: which sessions are learnt from, and which judge what was learnt."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from composer_replication.cli.console import add_config_arguments, add_short, config_of, log, print_json, show, table
from composer_replication.config import SplitConfig
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations
from composer_replication.runs.split import (
    NAME,
    SCHEMA,
    VERSION,
    PlacedConversation,
    place_conversations,
)
from composer_replication.sites.actions.equality import State, StateIndex, states_of
from composer_replication.types import Conversation

_WHAT_FOR = {
    "train": "learnt from",
    "validation": "choose when to stop and what to keep; learnt from where nothing asks",
    "test": "seen by the evaluation alone",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory with conversations in it")
    add_short(parser, "--by", key="split.by", metavar="WHAT")
    add_short(parser, "--test", key="split.test")
    add_short(parser, "--validation", key="split.validation")
    add_config_arguments(parser, "split")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(args: argparse.Namespace) -> int:
    section, run_dir = config_of(args).split, RunDir.open(args.run)
    done = write_split(section, run_dir)
    counts = done.counts()
    if args.json:
        states = {"test_states": done.num_test_states, "near_duplicates": done.num_near_duplicates}
        print_json({"run": str(run_dir.root), "sides": counts, **states})
        return 0
    rows = [
        (count.side, count.sessions, count.conversations, *((time or "")[:10] for time in (count.first, count.last)))
        for count in counts
    ]
    columns = ("side", "sessions", "contexts", "first began", "last began", "what for")
    show(table("Sessions", columns, [(*row, _WHAT_FOR[row[0]]) for row in rows]))
    log(
        f"{run_dir.path('split')}: of {done.num_test_states:,} states of the test {done.num_near_duplicates:,} stand in"
        " sessions that are learnt from as well, nearly word for word: an evaluation leaves them out"
    )
    return 0


# `crf split`: which sessions are learnt from, which choose among what was learnt, and which judge it at the end.
#
# It comes right after the ingest: whatever is made of the sessions later can then keep off the test. A state of the
# test that stands, nearly word for word, in a session which is learnt from would ask about what was learnt by heart.
# Such states are found (`actions.near_duplicates`) and named, so that an evaluation leaves them out.

TEST = 0.2
"""Share of the sessions that judge, where the config names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SideCount:
    """One row of the table: a side, how many sessions and conversations it has, and when they began."""

    side: str
    sessions: int
    conversations: int
    first: str | None
    last: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitOfRun:
    """The rows of `split.jsonl`, and how many states of the test stand in what is learnt from as well."""

    rows: list[PlacedConversation]
    num_test_states: int
    num_near_duplicates: int

    def counts(self) -> list[_SideCount]:
        return [_side_count(side, [row for row in self.rows if row.side == side]) for side in _SIDES]


_SIDES = ("train", "validation", "test")


def write_split(section: SplitConfig, run: RunDir) -> _SplitOfRun:
    """Draw the sides of the run's sessions, compare the test's states with the others', and write both down."""
    states: dict[str, list[tuple[str, State]]] = {}

    def conversations() -> Iterator[Conversation]:
        for conversation in read_conversations(run):
            states[conversation.id] = list(states_of(conversation))
            yield conversation

    made_of = [run.source("conversations")]
    test = TEST if section.test is None else section.test
    drawn = place_conversations(conversations(), validation=section.validation, test=test, by=section.by)
    learnt = StateIndex()
    for state in (state for row in drawn if row.side != "test" for _, state in states[row.conversation_id]):
        learnt.add(state)
    by_id = {row.conversation_id: _with_near_duplicates(row, states, learnt) for row in drawn}
    rows = [by_id[identity] for identity in states]  # in the order of the conversations
    num_test = sum(len(states[row.conversation_id]) for row in rows if row.side == "test")
    done = _SplitOfRun(
        rows=rows, num_test_states=num_test, num_near_duplicates=sum(len(row.near_duplicates) for row in rows)
    )
    run.write_jsonl(
        NAME,
        ({**row._asdict(), "near_duplicates": list(row.near_duplicates)} for row in rows),
        schema=SCHEMA,
        version=VERSION,
        sources=made_of,
        counts={
            **{f"sessions: {side_count.side}": side_count.sessions for side_count in done.counts()},
            "states: test": num_test,
            "near-duplicate states: test": done.num_near_duplicates,
        },
        settings={**asdict(section), "test": test},
    )
    return done


def _side_count(side: str, rows: list[PlacedConversation]) -> _SideCount:
    times = sorted(row.began for row in rows if row.began is not None)
    first, last = (times[0], times[-1]) if times else (None, None)
    return _SideCount(
        side=side, sessions=len({row.session for row in rows}), conversations=len(rows), first=first, last=last
    )


def _with_near_duplicates(
    row: PlacedConversation, states: Mapping[str, Sequence[tuple[str, State]]], learnt: StateIndex
) -> PlacedConversation:
    if row.side != "test":
        return row
    return row._replace(near_duplicates=tuple(turn for turn, state in states[row.conversation_id] if learnt.has(state)))
