"""What is kept of a row while it is decided which rows stay: hashes by which its content is known again, and its tools.

The turns are hashed in a chain, so that a conversation that goes on has the mark of the shorter one among its own.
Marks are made of scrubbed content: a hash of what was scrubbed away would let a short password be guessed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from composer_replication.actions.tool_schemas import ToolSchemas

Row = Mapping[str, Any]
_SIZE = 32
# A greeting and its answer begin many conversations: so short a one is known only as a whole.
_SHORTEST_BEGINNING = 400
_OPTIONS = orjson.OPT_SORT_KEYS


class RowFacts(NamedTuple):
    """So much of a row that it need not be read back: its id without suffix, the mark of the whole, and the rest.

    `beginning` and `last_turn` are the ids of its first and last turn, where a log gave them one; `mark_before_last` is
    the mark of all turns but the last, empty where there is no other.
    """

    id: str
    mark: str
    num_turns: int
    beginning: str
    mark_before_last: str
    last_turn: str
    is_forgotten: bool
    tools: ToolSchemas


def facts_of(row: Row, forgotten: frozenset[str]) -> RowFacts:
    marks = list(marks_along(row))
    turns, whole = row["turns"], marks[-1] if marks else "whole:"
    tools = ToolSchemas()
    tools.add_row(row)
    return RowFacts(
        id=row["id"],
        mark=whole,
        num_turns=len(turns),
        beginning=turns[0]["id"] if turns else "",
        mark_before_last=marks[-2] if len(marks) > 1 else "",
        last_turn=turns[-1]["id"] if turns else "",
        is_forgotten=is_forgotten(row, marks, forgotten),
        tools=tools,
    )


def marks_along(row: Row) -> Iterator[str]:
    """One mark per turn: of the conversation up to there."""
    digest, length = hashlib.sha256(), 0
    for turn in row["turns"]:
        content = _content(turn)
        digest.update(content)
        length += len(content)
        kind = "begins" if length >= _SHORTEST_BEGINNING else "whole"
        yield f"{kind}:{digest.hexdigest()[:_SIZE]}"


def mark_of(row: Row) -> str:
    """The mark of the whole conversation."""
    return deque(marks_along(row), maxlen=1)[0] if row["turns"] else "whole:"


def is_marked(marks: Sequence[str], known: frozenset[str] | set[str]) -> bool:
    """Whether a conversation with these marks is one that is known, or goes on from one."""
    if not marks or not known:
        return False
    return marks[-1] in known or any(mark in known for mark in marks if mark.startswith("begins:"))


def id_mark(kind: str, identity: str) -> str:
    """A mark of an id: of a `session`, or of a `conversation`."""
    return f"{kind}:{hashlib.sha256(identity.encode('utf-8', 'surrogatepass')).hexdigest()[:_SIZE]}"


def forgotten_marks(dead: Iterable[Row], living: Iterable[Row]) -> set[str]:
    """What tells rows that are forgotten from all others, wherever they turn up again.

    Ids count only where the log gave them: many are nothing but a file's name and a number. The id of a session counts
    only when the whole of it goes.
    """
    dead = list(dead)
    alive = {row["session_id"] for row in living}
    marks = {mark_of(row) for row in dead}
    for row in dead:
        session = row["session_id"]
        if session is not None:
            marks.add(id_mark("conversation", row["id"]))
            if session not in alive:
                marks.add(id_mark("session", session))
    return marks


def is_forgotten(row: Row, marks: Sequence[str], known: frozenset[str] | set[str]) -> bool:
    """Whether a row must not come back."""
    if not known:
        return False
    session = row["session_id"]
    if session is None:
        return is_marked(marks, known)
    if {id_mark("conversation", row["id"]), id_mark("session", session)} & known:
        return True
    # Another session may well say the same few words; one that repeats many has copied them.
    return is_marked([mark for mark in marks if mark.startswith("begins:")], known)


def _content(turn: Row) -> bytes:
    calls = [[call["name"], call["arguments"], call["raw_arguments"]] for call in turn["calls"]]
    results = [[result["text"], result["is_error"]] for result in turn["results"]]
    return orjson.dumps([turn["role"], turn["text"], turn["thinking"], calls, results], option=_OPTIONS)
