"""One damaged record of a Claude Code log costs only itself; a rewind stays a rewind; a guess is counted as a guess."""

from __future__ import annotations

from itertools import pairwise

import pytest
from claude_records import Log, call, text

from composer_replication.ingestion.formats import claude_code
from composer_replication.ingestion.formats.claude_code.links import GUESSED, GUESSED_END, NO_PARENT, ORPHAN
from composer_replication.ingestion.source_files import IngestReport, SourceFile


def read(path, data):
    path.write_bytes(data)
    report = IngestReport()
    return list(claude_code.read(SourceFile(path, path.name), report)), report


def texts(conversation):
    return [turn.text or [result.text for result in turn.results] for turn in conversation.turns]


def turns(number=8):
    """A plain session: prompt, call, result, answer, again and again."""
    log = Log()
    for at in range(number):
        log.user(f"prompt {at}", uuid=f"p{at}")
        log.assistant(f"m{at}", call(f"c{at}", path=f"{at}.py"), uuid=f"a{at}")
        log.result(f"c{at}", f"content {at}", uuid=f"r{at}")
        log.assistant(f"n{at}", text(f"answer {at}"), uuid=f"e{at}")
    return log


def of(log, uuid):
    return next(record for record in log.records if record["uuid"] == uuid)


@pytest.mark.parametrize(("record", "named"), [("a6", "p1"), ("a6", "r1"), ("r6", "a2"), ("e6", "r0"), ("p6", "a1")])
def test_a_wrong_parent_costs_nothing_and_is_counted_as_a_guess(tmp_path, record, named):
    log = turns()
    [whole], _ = read(tmp_path / "s-1.jsonl", log.lines())
    of(log, record)["parentUuid"] = named
    [conversation], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert texts(conversation) == texts(whole)
    assert dict(report.skipped) == {GUESSED: 1}


def test_a_parent_that_stands_later_or_nowhere_costs_nothing(tmp_path):
    log = turns()
    [whole], _ = read(tmp_path / "s-1.jsonl", log.lines())
    for named in ("e7", "a3", "r2", "p3", "nobody"):
        of(log, "r2")["parentUuid"] = named
        [conversation], report = read(tmp_path / "s-1.jsonl", log.lines())
        assert texts(conversation) == texts(whole), named
        assert dict(report.skipped) == {ORPHAN: 1}, named


def test_a_parent_that_is_missing_costs_nothing_and_is_counted_as_a_guess(tmp_path):
    log = turns()
    [whole], _ = read(tmp_path / "s-1.jsonl", log.lines())
    of(log, "p2")["parentUuid"] = None
    del of(log, "r5")["parentUuid"]
    [conversation], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert texts(conversation) == texts(whole)
    assert dict(report.skipped) == {NO_PARENT: 2}
    for record in log.records:
        record.pop("parentUuid", None)
    [conversation], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert texts(conversation) == texts(whole)
    assert not report.skipped  # a log without links misses none


def test_a_record_copied_anywhere_costs_nothing_and_changes_no_order(tmp_path):
    lines = turns().lines().splitlines(keepends=True)
    [whole], _ = read(tmp_path / "s-1.jsonl", b"".join(lines))
    for at in range(0, len(lines), 3):
        for place in range(0, len(lines) + 1, 4):
            [conversation], report = read(tmp_path / "s-1.jsonl", b"".join([*lines[:place], lines[at], *lines[place:]]))
            assert texts(conversation) == texts(whole), (at, place)
            assert dict(report.skipped) == {"duplicate uuid": 1}


def test_two_neighbours_swapped_are_put_back(tmp_path):
    lines = turns().lines().splitlines(keepends=True)
    [whole], _ = read(tmp_path / "s-1.jsonl", b"".join(lines))
    for at in range(len(lines) - 1):
        swapped = [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]
        [conversation], report = read(tmp_path / "s-1.jsonl", b"".join(swapped))
        assert texts(conversation) == texts(whole), at
        assert not report.skipped, at


def test_two_records_far_apart_swapped_cost_nothing(tmp_path):
    lines = turns(4).lines().splitlines(keepends=True)
    [whole], _ = read(tmp_path / "s-1.jsonl", b"".join(lines))
    for one in range(1, len(lines)):
        for other in range(one + 2, len(lines)):
            swapped = lines.copy()
            swapped[one], swapped[other] = swapped[other], swapped[one]
            [conversation], report = read(tmp_path / "s-1.jsonl", b"".join(swapped))
            assert texts(conversation) == texts(whole), (one, other)
            assert "rewound branch" not in report.skipped


def compacted():
    log = turns(3)
    log.add("system", uuid="b", parent=None, subtype="compact_boundary", logicalParentUuid="e2")
    log.user("so far", uuid="s", isCompactSummary=True)
    log.assistant("m9", text("going on"), uuid="g")
    return log


def test_a_boundary_that_is_swapped_copied_or_names_a_wrong_end_costs_nothing(tmp_path):
    log = compacted()
    whole, _ = read(tmp_path / "s-1.jsonl", log.lines())
    assert [len(each.turns) for each in whole] == [12, 2]
    lines = log.lines().splitlines(keepends=True)
    for at, _ in pairwise(range(len(lines))):
        found, _ = read(tmp_path / "s-1.jsonl", b"".join([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]))
        assert list(map(texts, found)) == list(map(texts, whole)), at
    boundary = 12
    for at in range(boundary):
        found, report = read(tmp_path / "s-1.jsonl", b"".join([*lines[:at], lines[boundary], *lines[at:]]))
        assert list(map(texts, found)) == list(map(texts, whole)), at
    of(log, "b")["logicalParentUuid"] = "a1"
    found, report = read(tmp_path / "s-1.jsonl", log.lines())
    assert list(map(texts, found)) == list(map(texts, whole))
    assert dict(report.skipped) == {GUESSED_END: 1}


def test_the_summary_of_a_compaction_with_a_wrong_parent_stays_behind_its_boundary(tmp_path):
    log = compacted()
    whole, _ = read(tmp_path / "s-1.jsonl", log.lines())
    of(log, "s")["parentUuid"] = "e0"
    found, report = read(tmp_path / "s-1.jsonl", log.lines())
    assert list(map(texts, found)) == list(map(texts, whole))
    assert dict(report.skipped) == {GUESSED: 1}


def test_a_record_of_the_main_thread_that_names_one_of_a_sidechain_costs_nothing(tmp_path):
    log = turns(3)
    log.user("look", uuid="x1", parent=None, isSidechain=True)
    log.assistant("s1", text("seen"), uuid="x2", isSidechain=True)
    log.user("last", uuid="z", parent="x2")
    main, side = read(tmp_path / "s-1.jsonl", log.lines())[0]
    assert texts(main)[-2:] == ["answer 2", "last"]
    assert len(main.turns) == 13
    assert texts(side) == ["look", "seen"]


def rewound(named, number=5, usage=None):
    """A session that goes back to `named` and on from there."""
    log = turns(number)
    for at in range(number):
        for name in (f"a{at}", f"e{at}"):
            if usage is not None:
                of(log, name)["message"]["usage"] = {"input_tokens": 15_000 + 5_000 * at, "output_tokens": 50}
    log.user("rather so", parent=named, uuid="x")
    log.assistant("y", text("as you like"), usage={"input_tokens": usage} if usage else None, uuid="y")
    return log


@pytest.mark.parametrize(("named", "kept"), [("e1", 8), ("p2", 9), ("e3", 16)])
def test_a_rewind_is_read_as_one(tmp_path, named, kept):
    [conversation], report = read(tmp_path / "s-1.jsonl", rewound(named).lines())
    assert texts(conversation)[kept:] == ["rather so", "as you like"]
    assert len(conversation.turns) == kept + 2
    assert dict(report.skipped) == {"rewound branch": 20 - kept}


def test_token_counts_tell_a_rewind_from_a_wrong_parent(tmp_path):
    """Behind e1 the context is about 20,000 long, at the end about 35,000."""
    [back], report = read(tmp_path / "s-1.jsonl", rewound("e1", usage=20_200).lines())
    assert (len(back.turns), dict(report.skipped)) == (10, {"rewound branch": 12})
    [on], report = read(tmp_path / "s-1.jsonl", rewound("e1", usage=35_300).lines())
    assert (len(on.turns), dict(report.skipped)) == (22, {GUESSED: 1})


@pytest.mark.parametrize(("seconds", "kept"), [(40, 10), (19.5, 22), (3, 22)])
def test_what_was_written_before_or_with_the_record_before_it_is_no_rewind(tmp_path, seconds, kept):
    log = rewound("e1")
    for at, record in enumerate(log.records[:-2]):
        record["timestamp"] = f"2026-01-01T00:00:{at:02}Z"
    for record in log.records[-2:]:
        record["timestamp"] = f"2026-01-01T00:00:{seconds:04.1f}Z"
    [conversation], _ = read(tmp_path / "s-1.jsonl", log.lines())
    assert len(conversation.turns) == kept


@pytest.mark.parametrize("seconds", [19.2, 40])
def test_a_silent_record_with_a_wrong_parent_is_told_from_a_rewind_by_its_own_time(tmp_path, seconds):
    """A hook's record behind an answer is written with it; what a person does takes longer."""
    log = turns(5)
    for at, record in enumerate(log.records):
        record["timestamp"] = f"2026-01-01T00:00:{at:02}Z"
    log.add("progress", parent="e1", uuid="h", timestamp=f"2026-01-01T00:00:{seconds:04.1f}Z")
    log.user("rather so", timestamp="2026-01-01T00:01:00Z")
    log.assistant("y", text("as you like"), timestamp="2026-01-01T00:01:09Z")
    [conversation], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert dict(report.skipped) == ({GUESSED: 1} if seconds == 19.2 else {"rewound branch": 12})
    assert len(conversation.turns) == (22 if seconds == 19.2 else 10)


def test_a_session_that_goes_on_after_its_exit_leaves_the_command_behind(tmp_path):
    """As Claude Code writes it: the harness answers in the place of the command that ended the session."""
    log = turns(2)
    caveat = log.user("<local-command-caveat>", isMeta=True)
    log.user("<command-name>/exit</command-name>")
    log.user("<local-command-stdout>Bye!</local-command-stdout>")
    log.assistant("z", text("No response requested."), parent=caveat)
    log.records[-1]["message"]["model"] = "<synthetic>"
    log.user("one more thing")
    [conversation], report = read(tmp_path / "s-1.jsonl", log.lines())
    assert texts(conversation)[-3:] == ["<local-command-caveat>", "No response requested.", "one more thing"]
    assert dict(report.skipped) == {"rewound branch": 2}
