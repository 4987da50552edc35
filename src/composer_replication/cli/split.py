"""`crf split RUN`: split the sessions into train, validation and test.

The split is made right after ingestion, so that no later step uses the test set. Test states that also occur nearly
word for word in a training session would only measure memorization. split.jsonl lists them (`sites.actions.equality`
finds them), and the evaluation leaves them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from composer_replication.cli.console import (
    add_config_arguments,
    add_config_flag,
    config_from_args,
    log,
    print_json,
    show,
    table,
)
from composer_replication.config import SplitConfig
from composer_replication.runs import RunDir
from composer_replication.runs.files import read_conversations
from composer_replication.runs.split import NAME, SCHEMA, VERSION, SplitRow, split_into_rows
from composer_replication.sites.actions.equality import State, StateIndex, conversation_states
from composer_replication.types import Conversation

_WHAT_FOR = {
    "train": "training",
    "validation": "early stopping and selection; used for training if no option needs it",
    "test": "evaluation only",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory with ingested conversations (`crf ingest`)")
    add_config_flag(parser, "--by", key="split.by", metavar="WHAT")
    add_config_flag(parser, "--test", key="split.test")
    add_config_flag(parser, "--validation", key="split.validation")
    add_config_arguments(parser, "split")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(args: argparse.Namespace) -> int:
    section, run_dir = config_from_args(args).split, RunDir.open(args.run)
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
        f"{run_dir.path('split')}: {done.num_near_duplicates:,} of {done.num_test_states:,} test states are near"
        " duplicates of training states; the evaluation leaves them out"
    )
    return 0


TEST = 0.2
"""Share of sessions in the test split, unless the config sets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SideCount:
    """A row of the table: the size of one part of the split, and the start times of its first and last sessions."""

    side: str
    sessions: int
    conversations: int
    first: str | None
    last: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitOfRun:
    """The rows of split.jsonl, the number of test states, and the number of near-duplicates among these states."""

    rows: list[SplitRow]
    num_test_states: int
    num_near_duplicates: int

    def counts(self) -> list[_SideCount]:
        return [_side_count(side, [row for row in self.rows if row.side == side]) for side in _SIDES]


_SIDES = ("train", "validation", "test")


def write_split(section: SplitConfig, run: RunDir) -> _SplitOfRun:
    """Split the run's sessions, find near-duplicates among the test states, and write split.jsonl."""
    states: dict[str, list[tuple[str, State]]] = {}

    def conversations() -> Iterator[Conversation]:
        for conversation in read_conversations(run):
            states[conversation.id] = list(conversation_states(conversation))
            yield conversation

    sources = [run.source("conversations")]
    test = TEST if section.test is None else section.test
    placed_rows = split_into_rows(conversations(), validation=section.validation, test=test, by=section.by)
    train_states = StateIndex()
    for state in (state for row in placed_rows if row.side != "test" for _, state in states[row.conversation_id]):
        train_states.add(state)
    by_id = {row.conversation_id: _with_near_duplicates(row, states, train_states) for row in placed_rows}
    rows = [by_id[conversation_id] for conversation_id in states]  # in the order of the conversations
    num_test = sum(len(states[row.conversation_id]) for row in rows if row.side == "test")
    done = _SplitOfRun(
        rows=rows, num_test_states=num_test, num_near_duplicates=sum(len(row.near_duplicates) for row in rows)
    )
    run.write_jsonl(
        NAME,
        ({**row._asdict(), "near_duplicates": list(row.near_duplicates)} for row in rows),
        schema=SCHEMA,
        version=VERSION,
        sources=sources,
        counts={
            **{f"sessions: {side_count.side}": side_count.sessions for side_count in done.counts()},
            "states: test": num_test,
            "near-duplicate states: test": done.num_near_duplicates,
        },
        settings={**asdict(section), "test": test},
    )
    return done


def _side_count(side: str, rows: list[SplitRow]) -> _SideCount:
    times = sorted(row.began for row in rows if row.began is not None)
    first, last = (times[0], times[-1]) if times else (None, None)
    return _SideCount(
        side=side, sessions=len({row.session for row in rows}), conversations=len(rows), first=first, last=last
    )


def _with_near_duplicates(
    row: SplitRow, states: Mapping[str, Sequence[tuple[str, State]]], train_states: StateIndex
) -> SplitRow:
    if row.side != "test":
        return row
    turn_ids = (turn_id for turn_id, state in states[row.conversation_id] if train_states.has(state))
    return row._replace(near_duplicates=tuple(turn_ids))
