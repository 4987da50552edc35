"""Slash commands that were typed while Claude Code worked: each is there once, in the form of its own record."""

from __future__ import annotations

import pytest
from claude_records import text
from test_claude_beside import spoken, working
from test_claude_code import read

NAMED = "<command-message>review is running…</command-message>\n<command-name>/review</command-name>"


@pytest.mark.parametrize(
    ("typed", "record"),
    [
        ("/review", NAMED),
        ("/review @a.py all of it", f"{NAMED}\n<command-args>@a.py all of it</command-args>"),
        ("/review two\nlines ", f"{NAMED}\n<command-args>two\nlines</command-args>"),
        ("/review all", "<command-name>review</command-name>\n  <command-args>all</command-args>"),
        ("/home/me/a.py is wrong", "/home/me/a.py is wrong"),
    ],
)
def test_a_queued_command_that_follows_in_its_tags_is_there_once(tmp_path, typed, record):
    log = working()
    log.queue("enqueue", typed)
    log.result("c1")
    log.assistant("m2", text("Done."))
    log.queue("dequeue")
    log.user(record)
    log.assistant("m3", text("Reviewed."))
    [conversation], report = read(tmp_path, log.lines())
    assert spoken(conversation)[-3:] == ["Done.", record, "Reviewed."]
    assert not report.counts["queued messages placed"]


@pytest.mark.parametrize("other", [NAMED, f"{NAMED}\n<command-args>b.py</command-args>"])
def test_another_command_is_not_taken_for_the_one_that_was_queued(tmp_path, other):
    log = working()
    log.queue("enqueue", "/review a.py")
    log.result("c1")
    log.queue("dequeue")
    log.assistant("m2", text("Reviewed a.py."))
    log.user(other)
    log.assistant("m3", text("Reviewed."))
    [conversation], _ = read(tmp_path, log.lines())
    assert spoken(conversation)[-4:] == ["/review a.py", "Reviewed a.py.", other, "Reviewed."]
