"""Links below a folder of logs: those that lead out of it are counted, and followed only when asked for."""

from __future__ import annotations

import json
import re

import pytest
from crf import must

from composer_replication.errors import InputError
from composer_replication.ingestion import IngestReport, ingest
from composer_replication.ingestion.registry import LEADS_OUT, TO_A_FOLDER


def write_chat(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")


@pytest.fixture
def places(tmp_path):
    logs, elsewhere = tmp_path / "logs", tmp_path / "elsewhere"
    write_chat(logs / "own.jsonl", "own")
    write_chat(elsewhere / "other.jsonl", "other")
    write_chat(elsewhere / "deep" / "deeper.jsonl", "deeper")
    return logs, elsewhere


def texts(path, **options):
    report = IngestReport()
    found = [each.turns[0].text for each in ingest([path], report, scrubber=None, **options)]
    return sorted(found), dict(report.skipped)


def test_a_link_to_a_file_elsewhere_is_not_read_unless_asked_for(places):
    logs, elsewhere = places
    (logs / "linked.jsonl").symlink_to(elsewhere / "other.jsonl")
    assert texts(logs) == (["own"], {LEADS_OUT: 1})
    assert texts(logs, follow_links=True) == (["other", "own"], {})


def test_a_link_to_a_folder_elsewhere_is_followed_when_asked_for(places):
    logs, elsewhere = places
    (logs / "linked").symlink_to(elsewhere)
    assert texts(logs) == (["own"], {LEADS_OUT: 1})
    assert texts(logs, follow_links=True) == (["deeper", "other", "own"], {})


def test_links_that_stay_inside_are_as_before(places):
    logs, _ = places
    write_chat(logs / "sub" / "more.jsonl", "more")
    (logs / "again").symlink_to(logs / "sub")
    (logs / "same.jsonl").symlink_to(logs / "own.jsonl")
    for follow in (False, True):
        assert texts(logs, follow_links=follow) == (["more", "own", "own"], {TO_A_FOLDER: 1})


def test_circles_end_and_nothing_is_read_twice(places):
    logs, elsewhere = places
    (logs / "out").symlink_to(elsewhere)
    (logs / "out-again").symlink_to(elsewhere / "deep")
    (elsewhere / "back").symlink_to(logs)
    (elsewhere / "self").symlink_to(elsewhere)
    (logs / "up").symlink_to(logs.parent)
    (logs / "round.jsonl").symlink_to(logs / "round.jsonl")
    found, skipped = texts(logs, follow_links=True)
    assert found == ["deeper", "other", "own"]
    assert (skipped.pop(TO_A_FOLDER), list(skipped.values())) == (4, [1])  # the last one leads to itself


def test_what_was_named_may_itself_be_a_link(places):
    logs, elsewhere = places
    (logs.parent / "named").symlink_to(elsewhere)
    (logs.parent / "named.jsonl").symlink_to(elsewhere / "other.jsonl")
    assert texts(logs.parent / "named") == (["deeper", "other"], {})
    assert texts(logs.parent / "named.jsonl") == (["other"], {})


def test_a_folder_of_links_alone_says_how_to_follow_them(places):
    logs, elsewhere = places
    (logs / "own.jsonl").unlink()
    (logs / "linked.jsonl").symlink_to(elsewhere / "other.jsonl")
    assert "--follow-links" in LEADS_OUT
    with pytest.raises(InputError, match=rf"\b1\b.*{re.escape(LEADS_OUT)}"):
        texts(logs)


def test_the_command_counts_them_and_takes_the_flag(places):
    logs, elsewhere = places
    (logs / "linked.jsonl").symlink_to(elsewhere / "other.jsonl")
    told = json.loads(must("ingest", "logs", "-o", "run", "--json", cwd=logs.parent))
    assert told["skipped"] == [{"reason": LEADS_OUT, "number": 1, "first": "linked.jsonl"}]
    told = json.loads(must("ingest", "logs", "-o", "run", "--json", "--follow-links", cwd=logs.parent))
    assert (told["skipped"], told["total"]["sessions"]) == ([], 2)
