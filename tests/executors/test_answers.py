"""Services that say nothing, say it late, or say what a terminal would act upon."""

from __future__ import annotations

import re
import threading
import time

import pytest

from composer_replication.diloco.serverless.executor import (
    _describe_exit,
    _describe_failure,
    _without_control_characters,
    in_brief,
    within,
)
from composer_replication.errors import RunError
from refusals import refusal


def test_an_answer_in_time_is_handed_on_and_so_is_an_error():
    assert within(10, "a service", lambda: 7) == 7
    assert within(10, "a service", lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(10, "a service", lambda: 1 // 0)


def test_a_service_that_hangs_is_not_waited_for():
    never = threading.Event()
    started = time.monotonic()
    with refusal(RunError, what="a service", got="0.2 s"):
        within(0.2, "a service", never.wait)
    assert time.monotonic() - started < 5
    never.set()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07", "\ufffd]0;title\ufffd"),
        ("\x1b[2J\x9b2J", "\ufffd[2J\ufffd2J"),
        ("a\u202eb\u2066c", "a\ufffdb\ufffdc"),
        ("ä漢字🙂", "ä漢字🙂"),
    ],
)
def test_what_a_terminal_would_act_upon_is_taken_out(text, shown):
    assert _without_control_characters(text) == shown


def test_an_error_is_told_in_one_short_harmless_line():
    assert in_brief(ValueError("one\ntwo")) == "ValueError: one"
    assert in_brief(ValueError()) == "ValueError"
    assert in_brief(ValueError("\x1b[2J" + "x" * 1000)) == f"ValueError: \ufffd[2J{'x' * 284}"


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        (-9, ["9", "SIGKILL", "memory"]),
        (137, ["9", "SIGKILL", "memory"]),
        (-15, ["15", "SIGTERM"]),
        (124, []),
        (78, ["78"]),
        (7, ["7"]),
        (None, []),
    ],
)
def test_an_exit_status_is_told_in_words(code, facts):
    assert re.findall(r"\d+|SIG\w+|memory", _describe_exit(code)) == facts


def test_each_way_to_end_has_words_of_its_own():
    assert len({_describe_exit(code) for code in (-9, -15, 124, 78, 7, None)}) == 6
    assert _describe_exit(78).replace("78", "7") != _describe_exit(7)


TRACEBACK = "Traceback (most recent call last):\n  File 'x'\n    y\nmod.TheError: why\n"


@pytest.mark.parametrize(
    ("code", "log", "told"),
    [
        (1, TRACEBACK, ["TheError: why"]),
        (1, f"{TRACEBACK}more of it\n", ["TheError: why", "more of it"]),
        (1, TRACEBACK.replace("mod.", "Early") + TRACEBACK, ["TheError: why"]),
        (1, "step 3\n\n", ["step 3"]),
        (1, "", []),
        # One that was killed did not know it: neither an error of before nor its last line is the cause.
        (-9, f"{TRACEBACK}step 3\n", ["step 3"]),
        (7, f"{TRACEBACK}step 3\n", ["step 3"]),
        (1, "x" * 1000, ["x" * 300]),
    ],
)
def test_a_failure_is_told_with_the_last_error_and_the_last_line_as_what_they_are(code, log, told):
    ended, *parts = _describe_failure(code, log).split("; ")
    assert ended == _describe_exit(code)
    for part, fact in zip(parts, told, strict=True):
        assert part.endswith(fact)
        assert (part == fact) == fact.startswith("TheError")  # a last line is said to be one
