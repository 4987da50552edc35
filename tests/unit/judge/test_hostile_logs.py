"""Logs that name what no reader expects: line 0, a glob full of stars, a branch no command can hold, other zones."""

from __future__ import annotations

import subprocess

import pytest

from composer_replication.sites.actions.known_paths import remove_reminders
from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.judge import Judge, Repository
from composer_replication.sites.judge.project_files import EarlierSessions
from composer_replication.types import Conversation, Provenance, ToolCall, Turn
from cpu_time import least_cpu_seconds

REMINDER = "<system-reminder>x</system-reminder>"


def call(name, **arguments):
    return ToolCall(id="c", name=name, arguments=arguments)


def test_a_search_that_shows_a_line_0_is_read():
    state = SessionState("/w")
    state.add(call("Edit", file_path="/w/a.yml", old_string="a", new_string="b"), "updated", failed=False)
    state.add(call("Grep", pattern="start", path="/w/a.yml", output_mode="content"), "0: start\n1: stop", failed=False)
    assert state.texts.get("/w/a.yml") is not None


def test_a_glob_full_of_stars_takes_no_time():
    state = SessionState("/w")
    state.add(call("Glob", pattern="*a*a*a*a*b"), "No files found", failed=False)
    read = call("Read", file_path="/w/" + "a" * 250)
    assert least_cpu_seconds(lambda: Judge(state).verdict(read), enough=0.05) < 0.5


def test_reminders_are_taken_off_in_time_that_grows_with_the_text():
    half = REMINDER * 20_000
    assert remove_reminders(f"text\n{half}") == "text"
    seconds = least_cpu_seconds(lambda: remove_reminders(half), enough=0.05)
    assert least_cpu_seconds(lambda: remove_reminders(half * 2), enough=0.1) < 3 * max(seconds, 0.1)


@pytest.mark.parametrize("branch", ["a\0b", "a\udc80b"])
def test_a_branch_that_no_command_can_hold_is_no_branch(tmp_path, branch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, capture_output=True)
    assert Repository(tmp_path).at("2026-01-01T10:00:00Z", branch) is None


def test_what_ended_later_in_another_zone_is_not_known_yet():
    """14:30 in Greenwich, written as 09:30 of New York, is after 10:00."""
    known = EarlierSessions()
    for when, name in (("2025-01-01T09:30:00-05:00", "later"), ("2025-01-01T09:30:00+00:00", "earlier")):
        state = SessionState("/w")
        for number in range(4):
            state.add(call("Read", file_path=f"/w/{name}/{number}.py"), "     1\tx", failed=False)
        known.add(_conversation(when), state)
    known.sort()
    now = known.before(_conversation("2025-01-01T10:00:00Z"))
    shown = [f"{name}/{number}.py" for name in ("later", "earlier") for number in range(4)]
    assert now is not None
    assert now.standing("earlier/0.py", shown).exists is True
    assert now.standing("later/0.py", shown) is None


def _conversation(when):
    turn = Turn(
        id="t", role="user", origin="human", text="go", provenance=Provenance(file="log", lines=(1,)), timestamp=when
    )
    return Conversation(id=when, format="claude_code", turns=(turn,), cwd="/w")
