"""Results nobody would write on purpose: huge, binary, coloured, nested, in any language. Classified, and in time."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.sites import BLAMES, classify
from composer_replication.sites.cleaned_text import CleanedText
from cpu_time import least_cpu_seconds

MB = 1_000_000
LIMIT_S = 0.05
PIECES = {
    "one letter": "a",
    "blanks": " ",
    "line ends": "\n",
    "colons": ": ",
    "the word error": "error: ",
    "errors in lines": "error: x\n",
    "missing files in lines": "No such file or directory\n",
    "missing files in one line": "x: y: No such file or directory ",
    "stack traces": "    at x (a:1:2)\n",
    "failures": "1 failed\n",
    "quotes": "'",
    "escape codes": "\x1b[31m",
    "escapes that never end": "\x1b]0;",
    "carriage returns": "\r",
    "carriage returns between letters": "\ra",
    "NULs": "\x00",
    "exit codes": "exit code ",
    "open envelopes": '{"output": ',
    "a letter whose lower case is longer": "İ",
    "required": "required parameter ",
    "slashes": "/",
    "unknown commands": "bash: foo: command not found\n",
    "git": "fatal: not a git\n",
    "backticks": "`a",
}
CALLS = [
    ("Bash", {"command": "cat x.txt && git push && pytest foo/bar"}, True),
    ("Bash", {"command": "pytest foo; git status"}, False),
    ("Bash", {"command": "a/b 'c " * 4000}, True),
    ("Edit", {"file_path": "/a"}, True),
    ("mcp__x__y", {}, True),
]


@pytest.mark.parametrize("name", PIECES)
def test_a_megabyte_of_anything_is_classified_in_time(name, note):
    text = (PIECES[name] * (MB // len(PIECES[name]) + 1))[:MB]
    best_s = {}
    for number, (tool, arguments, flag) in enumerate(CALLS):
        best_s[number] = least_cpu_seconds(partial(classify, tool, arguments, text, flag), enough=LIMIT_S / 4)
    worst = max(best_s.values())
    note(f"1 MB of {name}: {worst * 1e3:.0f} ms at worst (limit {LIMIT_S * 1e3:.0f} ms)")
    assert worst < LIMIT_S


@given(
    st.text(max_size=400),
    st.sampled_from(["Bash", "Edit", "shell", "x"]),
    st.sampled_from([True, False, None]),
    st.text(max_size=80),
)
def test_any_text_is_classified_with_a_span_inside_it(text, tool, flag, command):
    verdict = classify(tool, {"command": command, "file_path": command}, text, flag)
    assert verdict.blame in BLAMES
    assert 0 <= verdict.confidence <= 1
    start, end = verdict.span
    assert 0 <= start <= end <= len(text)
    assert verdict.is_failure or flag is not True


@given(
    st.recursive(st.none() | st.text(max_size=20), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_nested_json_errors_are_classified(value):
    assert classify("mcp__a__b", {}, json.dumps({"error": value}), True).is_failure
    assert classify("shell", {"command": ["x"]}, json.dumps({"output": value, "metadata": value}), None) is not None


COLOURED = "Exit code 127\r\n\x1b[1m\x1b[31mbash: pyhton: command not found\x1b[0m\r\n"


def test_colours_and_line_ends_do_not_hide_a_failure_and_the_place_is_that_of_the_original():
    verdict = classify("Bash", {"command": "pyhton x.py"}, COLOURED, True)
    assert (verdict.kind, verdict.blame) == ("cmd_not_found", "model")
    start, end = verdict.span
    assert COLOURED[start:end].startswith("bash: pyhton: command not found")


@given(st.text(alphabet="ab\n\r\x1b[0m;", max_size=60), st.sampled_from([None, 1, 2, 3]))
def test_every_place_of_a_cleaned_text_is_the_same_character_in_the_original(text, num_lines):
    view = CleanedText.of(text) if num_lines is None else CleanedText.of(text).first_and_last_lines(num_lines)
    for index, letter in enumerate(view.text):
        start, end = view.to_original(index, index + 1)
        between = num_lines is not None and letter == "\n"  # the line end that stands for what was left out
        assert between or text[start:end] == letter or (letter == "\n" and text[start] == "\r")


def test_the_ends_of_a_text_are_its_first_and_last_lines():
    text = "\n".join(map(str, range(9)))
    assert CleanedText.of(text).first_and_last_lines(2).text == "0\n1\n7\n8"
    assert (
        CleanedText.of(text).first_and_last_lines(5).text
        == CleanedText.of(text + "\n").first_and_last_lines(5).text.rstrip()
        == text
    )


def test_of_a_very_long_result_the_end_is_read_and_placed_rightly():
    text = "compiling\n" * 20_000 + "bash: pyhton: command not found\n"
    verdict = classify("Bash", {"command": "make && pyhton x.py"}, text, True)
    start, end = verdict.span
    assert text[start:end] == "bash: pyhton: command not found"


def test_an_envelope_is_opened_and_the_place_is_inside_it():
    text = json.dumps({"output": "bash: line 1: rg: command not found\n", "metadata": {"exit_code": 127}})
    verdict = classify("shell", {"command": ["bash", "-lc", "rg x"]}, text, None)
    start, end = verdict.span
    assert (verdict.kind, text[start:end]) == ("cmd_not_found", "bash: line 1: rg: command not found")
