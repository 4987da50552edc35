"""Logs that share messages: which of them are copies, and that finding it out costs what the logs are long.

The cost is counted in lines of Python that run and rows that are read, which are the same on every machine.
"""

from __future__ import annotations

import io
import os
import random
import sys

import orjson
import pytest
from claude_records import Log, text
from run_pieces import ingested

from composer_replication.ingestion import ingest_run
from composer_replication.ingestion.read_sessions import GatheredSession
from composer_replication.ingestion.session_sources import COPY, OLDER, SessionSource, extract_facts, prefix_marks
from cpu_time import cpu_seconds

IS_FULL = os.environ.get("CRF_TEST_PROFILE") == "full"
NUM_TURNS = 6
LAST = NUM_TURNS - 1
# Turns of log i of a shape, as the name of each message's id and its text.
SHAPES = {
    "first message": lambda i: [(0, "shared"), *((f"{i}-{at}", f"own {i}") for at in range(1, NUM_TURNS))],
    "ids alone": lambda i: [(at, f"own {i}") for at in range(NUM_TURNS)],
    "forks": lambda i: [*((at, "shared") for at in range(4)), *((f"{i}-{at}", f"own {i}") for at in (4, 5))],
    "chain": lambda i: [(f"{i + at // 3}-{at % 3}", "shared") for at in range(NUM_TURNS)],
    "clusters": lambda i: [(f"{i // 5}-{at}", "shared" if at < 3 else f"own {i}") for at in range(NUM_TURNS)],
    "identical": lambda i: [(at, "shared") for at in range(NUM_TURNS)],
    "growing": lambda i: [(at, "shared") for at in range(1 + i % 20)],
    "other last words": lambda i: [*((at, "shared") for at in range(LAST)), (LAST, f"own {i}")],
    "half written, short to long": lambda i: [*((at, "shared") for at in range(LAST)), (LAST, "x" * (i + 1))],
    "half written, long to short": lambda i: [*((at, "shared") for at in range(LAST)), (LAST, "x" * (2000 - i))],
}


def turn(name, said, *, calls=(), thinking=""):
    calls = [{"id": f"c{at}", "name": "Bash", "arguments": {"command": each}} for at, each in enumerate(calls)]
    calls = [{**each, "raw_arguments": None} for each in calls]
    identity = f"message-with-a-long-id-{name}"
    return {"id": identity, "role": "user", "text": said, "thinking": thinking, "calls": calls, "results": []}


def family(number, conversations):
    """A family of conversations, each an id and its turns, as an ingest has it before copies are dropped."""
    rows = [
        {"id": name, "session_id": None, "format": "claude_code", "parent": None, "turns": turns}
        for name, turns in conversations
    ]
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    facts = [extract_facts(row, frozenset()) for row in rows]
    source = SessionSource(path=f"logs/{number:05}.jsonl", name=f"{number:05}.jsonl", status="kept")
    return GatheredSession(source, True, facts, io.BytesIO(lines), 0)


def settled(families):
    return [each.source.skips[0][0] if each.source.skips else None for each in ingest_run._drop_duplicates(families)]


def num_lines(families):
    """Lines of the module that ran; a comprehension counts as many as it has items."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename != ingest_run.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        settled(families)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("shape", SHAPES)
def test_twice_as_many_logs_are_twice_the_work(shape):
    families = [family(i, [(f"log-{i}", [turn(*each) for each in SHAPES[shape](i)])]) for i in range(160)]
    assert num_lines(families) < 2.3 * num_lines(families[:80])


@pytest.mark.parametrize("at_the_end", [0, 1])
def test_so_are_twice_as_many_conversations_of_two_families(at_the_end):
    def families(size):
        """The second family has what the first has; its first or last conversation is longer."""
        conversations = [(f"log-{i}", [turn(f"{i}-{at}", f"own {i}") for at in range(2)]) for i in range(size)]
        longer = list(conversations)
        name, turns = longer[-at_the_end]
        longer[-at_the_end] = name, [*turns, turn("more", "more")]
        return [family(0, conversations), family(1, longer)]

    assert settled(families(40)) == [OLDER, None]
    assert num_lines(families(160)) < 2.3 * num_lines(families(80))


def test_a_row_that_may_be_a_copy_is_read_once_to_find_out(monkeypatch):
    num_read = 0

    def counting(row, real=prefix_marks):
        nonlocal num_read
        num_read += 1
        return real(row)

    families = [family(i, [(f"log-{i}", [turn(*each) for each in SHAPES["forks"](i)])]) for i in range(20)]
    monkeypatch.setattr(ingest_run, "prefix_marks", counting)
    assert settled(families) == [None] * 20
    assert num_read == 20


def test_people_whose_paths_look_alike_scrubbed_are_numbered_once_each(tmp_path):
    from composer_replication.ingestion.read_sessions import _Planning
    from composer_replication.ingestion.scrubbing import ScrubFingerprint
    from composer_replication.ingestion.session_sources import EarlierIngest

    class Paths(set):
        num_asked = 0

        def __contains__(self, path):
            Paths.num_asked += 1
            return super().__contains__(path)

    planning = _Planning(tmp_path, EarlierIngest(ScrubFingerprint.of(None)), None, (), False)
    planning._paths = Paths()
    assert [planning._make_unique_path("a") for _ in range(200)] == ["a", *(f"a~{number}" for number in range(2, 201))]
    assert Paths.num_asked <= 400


# What a copy is, by comparing every conversation with every other: what the indexes must agree with.


def is_part(turns, others):
    """Whether turns are the beginning of others, the last one perhaps only half written."""
    if not turns or len(others) < len(turns) or marks(turns)[-1] == marks(others)[-1]:
        return False
    if marks(turns)[-1] in marks(others):
        return True
    last, whole = turns[-1], others[len(turns) - 1]
    return (
        len(turns) > 1
        and marks(turns)[-2] == marks(others)[len(turns) - 2]
        and last["id"] == whole["id"]
        and whole["text"].startswith(last["text"])
        and whole["thinking"].startswith(last["thinking"])
        and whole["calls"][: len(last["calls"])] == last["calls"]
    )


def marks(turns):
    return list(prefix_marks({"turns": turns}))


def have_a_name_in_common(one, other):
    return one[0] == other[0] or (one[1][:1] and other[1][:1] and one[1][0]["id"] == other[1][0]["id"])


def reasons_by_comparing_all(families):
    dropped = {}
    for number, conversations in enumerate(families):
        others = {at: each for at, each in enumerate(families) if at != number and at not in dropped}
        verdicts, waiting, longer = [], [], set()
        for one in conversations:
            mark = marks(one[1])[-1:] or ["whole:"]
            named = [(at, other) for at, each in others.items() for other in each if have_a_name_in_common(one, other)]
            same = {at for at, other in named if marks(other[1])[-1:] == mark}
            here = {at for at, other in named if is_part(one[1], other[1])}
            longer |= here
            anywhere = {at for at, each in others.items() for other in each if marks(other[1])[-1:] == mark}
            equal = same | anywhere if mark[0].startswith("begins:") else same
            if min(equal, default=number) < number:
                verdicts.append(COPY)
            elif here:
                verdicts.append(OLDER)
            elif same:
                waiting.append(same)
            else:
                verdicts = waiting = None
                break
        if verdicts is not None and conversations and all(same & longer for same in waiting):
            dropped[number] = OLDER if OLDER in verdicts else COPY
    return [dropped.get(number) for number in range(len(families))]


def random_families(rng):
    """Few messages and few ids: most families have something in common."""
    whole = [turn(at, "word " * rng.choice([1, 200])) for at in range(5)]
    families = []
    for _ in range(rng.randint(2, 6)):
        conversations = []
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            turns = whole[: rng.randint(0, 5)]
            if turns and rng.random() < 0.5:
                last = rng.choice(["", "a", "ab", "b"]), rng.choice([(), ("ls",), ("ls", "pwd")])
                turns = [*turns[:-1], turn(len(turns) - 1, last[0], calls=last[1], thinking=rng.choice(["", "t"]))]
            if rng.random() < 0.2:
                turns = [*turns, turn(f"own-{rng.randint(0, 1)}", "own")]
            conversations.append((f"id-{rng.randint(0, 9)}", turns))
        families.append(rng.choice(families) if families and rng.random() < 0.2 else conversations)
    return families


def test_the_indexes_agree_with_comparing_every_conversation_with_every_other():
    seen = set()
    for seed in range(3000 if IS_FULL else 300):
        families = random_families(random.Random(seed))
        expected = reasons_by_comparing_all(families)
        assert settled([family(number, each) for number, each in enumerate(families)]) == expected, seed
        seen.update(expected)
    assert seen == {None, COPY, OLDER}


@pytest.mark.skipif(not IS_FULL, reason="ingests 30,000 files: make test-full")
def test_five_thousand_logs_that_share_messages_cost_at_most_twice_as_many_that_share_none(tmp_path):
    def seconds(name, turns_of):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        for i in range(5000):
            log = Log(session=f"{name}-{i}")
            for at, (identity, said) in enumerate(turns_of(i)):
                name_of_message = f"message-with-a-long-id-{identity}"
                if at % 2:
                    log.assistant(name_of_message, text(said), uuid=name_of_message)
                else:
                    log.user(said, uuid=name_of_message)
            (folder / f"log-{i}.jsonl").write_bytes(log.lines())
        return cpu_seconds(lambda: ingested(tmp_path / f"run-{folder.name}", folder))

    alone = seconds("alone", lambda i: [(f"{i}-{at}", f"own {i}") for at in range(NUM_TURNS)])
    for shape in ("first message", "ids alone", "forks", "growing", "half written, long to short"):
        assert seconds(shape, SHAPES[shape]) <= 2 * alone, shape
