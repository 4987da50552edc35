"""Random damage in every format: reading never raises, what comes out can be written, and no line costs another."""

from __future__ import annotations

import os
import random
import traceback
from collections import Counter
from pathlib import Path

import pytest
from claude_mutations import KINDS, ONE_LINE, break_utf8, damaged, delete_bytes, flip_bits, insert_bytes, insert_nuls
from claude_mutations import truncate as cut_off
from format_sessions import SAID, SESSIONS

from composer_replication.action_text import action_text
from composer_replication.canonical_json import encode
from composer_replication.ingestion.formats.atif_write import to_atif
from composer_replication.ingestion.source_files import IngestReport, SourceFile
from composer_replication.ingestion.states import states
from composer_replication.runs import files as rows

NUM_MUTATIONS = 2_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 100
ARGUMENT = "an argument of the call"
ARGUMENTS = b'{"path": "%b", "more": [1, {"deep": null}]}' % ARGUMENT.encode()
# Each stands in one record, and says where it comes out whether the record was read.
MARKS = (*SAID, ARGUMENT, "came back")
LINES = {name: each for name, each in SESSIONS.items() if each.is_lines and name != "claude_code"}
DOCUMENTS = {name: each for name, each in SESSIONS.items() if not each.is_lines}
MAX_SHOWN = 5


def duplicate_span(rng, data):
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 10, 200)))
    return data[:end] + data[start:end] + data[end:]


def swap_spans(rng, data):
    one, two, three, four = sorted(rng.randrange(len(data) + 1) for _ in range(4))
    return data[:one] + data[three:four] + data[two:three] + data[one:two] + data[four:]


ON_BYTES = (flip_bits, delete_bytes, insert_bytes, cut_off, insert_nuls, break_utf8, duplicate_span, swap_spans)


def output(session, folder, data):
    """Everything that was read, as it is written; each way out is taken."""
    path = folder / session.name
    path.write_bytes(data)
    assert isinstance(session.module.sniff(data, path), bool)
    written = b""
    for conversation in session.module.read(SourceFile(path, path.name), IngestReport()):
        written += encode(rows.conversation_to_row(conversation), where="row")
        encode(to_atif(conversation), where="document")
        for _, turn in states(conversation):
            action_text(turn)
    return written


def problem(session, folder, data, wanted=()):
    """None, or what went wrong: an exception with its place, or a mark of an intact line that is gone."""
    try:
        written = output(session, folder, data)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "composer_replication" in frame.filename] or frames
        return f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
    gone = [mark for mark in wanted if mark.encode() not in written]
    return f"lost {gone}" if gone else None


def run(mutate, note, name):
    """Counts the problems of all mutations; `mutate` gives what was done, what is wrong with it, and the bytes."""
    rng, problems, examples = random.Random(name), Counter(), {}
    for number in range(NUM_MUTATIONS):
        what, wrong, data = mutate(rng, number)
        if wrong is not None:
            problems[f"{what}: {wrong}"] += 1
            examples.setdefault(f"{what}: {wrong}", data)
    note(f"fuzz {name}: {NUM_MUTATIONS} mutations, {problems.total()} problems (full: 2000)")
    shown = [f"{count} x {what}\n{examples[what]!r}" for what, count in problems.most_common(MAX_SHOWN)]
    assert not problems, "\n".join(shown)


@pytest.mark.parametrize("name", SESSIONS)
def test_every_mark_is_there_before_any_damage(tmp_path, name):
    session = SESSIONS[name]
    marks = [mark for mark in MARKS if any(mark.encode() in line for line in session.lines(ARGUMENTS))]
    assert len(marks) >= 4
    assert problem(session, tmp_path, session.file(ARGUMENTS), marks) is None
    assert problem(session, tmp_path, session.file(ARGUMENTS).replace(SAID[1].encode(), b"?"), marks) is not None


@pytest.mark.parametrize("name", LINES)
def test_damage_in_a_line_never_raises_and_never_costs_another_line(tmp_path, note, name):
    session = LINES[name]
    log = session.lines(ARGUMENTS)

    def mutate(rng, number):
        damage = damaged(rng, KINDS[number % len(KINDS)], log)
        intact = [log[was - 1] for was in damage.intact().values()]
        wanted = [mark for mark in MARKS if any(mark.encode() in line for line in intact)]
        return damage.what, problem(session, tmp_path, damage.file(), wanted), damage.file()

    run(mutate, note, f"{name}, by lines")


@pytest.mark.parametrize("name", [*LINES, *DOCUMENTS])
def test_damaged_bytes_anywhere_never_raise(tmp_path, note, name):
    session = SESSIONS[name]
    plain = session.file(ARGUMENTS)

    def mutate(rng, number):
        damage = ON_BYTES[number % len(ON_BYTES)]
        data = plain
        for _ in range(rng.choice((1, 1, 3))):
            data = damage(rng, data) if data else data
        return damage.__name__, problem(session, tmp_path, data), data

    run(mutate, note, f"{name}, by bytes")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_wrong_values_and_broken_messages_in_a_document_never_raise(tmp_path, note, name):
    """Damage within the JSON, so that an archive around it stays whole."""
    session = DOCUMENTS[name]
    plain = session.text(ARGUMENTS)
    kinds = tuple(ONE_LINE)

    def mutate(rng, number):
        kind = kinds[number % len(kinds)]
        data = session.pack(ONE_LINE[kind](rng, plain))
        return kind, problem(session, tmp_path, data), data

    run(mutate, note, f"{name}, by fields")
