"""What a session put right itself: the corrected call where it could be known, else the look, else nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from composer_replication.pairs.corrections import find_session_pairs
from composer_replication.sites import find_error_sites
from correction_steps import (
    BAD,
    DONE,
    FILE,
    GOOD,
    LONGER,
    NO_FILE,
    NO_MATCH,
    NOT_READ,
    OTHER,
    REFUSED,
    TEXT,
    TWICE,
    bash,
    decided,
    edit,
    read,
    session,
)
from session_pieces import Session


def pairs_of(conversation):
    return list(find_session_pairs(conversation, find_error_sites(conversation)))


def test_an_edit_as_it_worked_is_chosen_where_its_text_had_been_shown():
    assert decided((read(), TEXT), (BAD, NO_MATCH, True), (GOOD, DONE)) == ("corrected", *GOOD)


def test_a_call_whose_argument_had_a_wrong_name_is_corrected_though_it_means_the_same():
    wrong = ("Edit", {"file_path": FILE, "old_text": "return 1", "new_string": "return 2"})
    said = (
        "InputValidationError: Edit failed due to the following issue:\nAn unexpected parameter `old_text` was provided"
    )
    right = edit("return 1", "return 2")
    assert decided((read(), TEXT), (wrong, said, True), (right, DONE)) == ("corrected", *right)


def test_an_edit_of_a_near_name_is_corrected_though_the_right_file_had_been_read():
    near, right = edit("return 1", "return 2", path="/repo/app/carts.py"), edit("return 1", "return 2")
    assert decided((read(), TEXT), (near, NO_FILE, True), (right, DONE)) == ("corrected", *right)


def test_else_the_reading_is_chosen():
    part = read(offset=4, limit=2)
    shown = "     4\tdef best(items):\n     5\t    return 1"
    steps = ((part, shown), (BAD, NO_MATCH, True))
    assert decided(*steps, (read(), TEXT), (GOOD, DONE)) == ("look_first", *read())
    assert decided(*steps, (GOOD, DONE), (read(), TEXT)) is None  # nobody looked before it was put right
    assert decided(*steps, (read(OTHER), TEXT), (GOOD, DONE)) is None  # at another file


def test_what_had_just_been_shown_is_not_to_be_read_again():
    part = read(offset=1, limit=2)
    shown = "     1\tdef total(items):\n     2\t    return sum(items)"
    more = "     1\tdef total(items):\n     2\t    return sum(items)\n     3\t\n     4\tdef best(items):"
    steps = ((part, shown), (BAD, NO_MATCH, True))
    assert decided(*steps, (part, shown)) is None
    assert decided(*steps, (read(limit=4), more)) is None  # more of the file, and nothing new of what the edit is about
    longer = edit("    return  sum(items)\n\ndef worst(items):", "    return 0")
    assert decided(steps[0], (longer, NO_MATCH, True), (read(limit=4), more)) == ("look_first", *read(limit=4))
    changed = (bash("git checkout other"), "Switched to branch 'other'")
    assert decided(steps[0], changed, steps[1], (part, shown)) == ("look_first", *part)


def test_nothing_is_chosen_where_all_of_the_file_had_been_shown_and_the_correction_is_another():
    other = edit("return 1", "return 2")
    assert decided((read(), TEXT), (BAD, NO_MATCH, True), (read(), TEXT), (other, DONE)) is None


def test_of_an_ambiguous_edit_the_one_that_worked_is_chosen_where_it_had_been_shown():
    text = TEXT + "\n     6\t\n     7\tdef again(items):\n     8\t    return sum(items)"
    short = edit("return sum(items)", "return 0")
    assert decided((read(), text), (short, TWICE, True), (LONGER, DONE)) == ("corrected", *LONGER)
    hidden = edit("def hidden():\n    return sum(items)", "def hidden():\n    return 0")
    assert decided((read(), text), (short, TWICE, True), (hidden, DONE)) is None


def test_a_file_that_was_not_read_is_to_be_read_unless_it_had_been():
    assert decided((GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE)) == ("look_first", *read())
    conversation = session((read(), TEXT), (GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE))
    assert [each.source for each in pairs_of(conversation)] == ["acted_at_once"]
    before = "This session is being continued from a previous conversation that ran out of context."
    assert decided(before, (GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE)) == ("look_first", *read())
    named = f"see @{FILE}"  # what is named so may have been shown with the words
    conversation = session(named, (GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE))
    assert not [
        each for each in find_session_pairs(conversation, find_error_sites(conversation)) if each.source == "correction"
    ]


@pytest.mark.parametrize(
    ("look", "text", "is_chosen"),
    [
        (("Glob", {"pattern": "**/basket*"}), "/repo/lib/basket.py", True),
        (("Glob", {"pattern": "**/basket*"}), "No files found", False),
        (("Glob", {"pattern": "app/*.py"}), "/repo/app/cart.py", True),  # the folder it should be in
        (("Glob", {"pattern": "docs/*.md"}), "/repo/docs/a.md", False),
        (("Grep", {"pattern": "basket"}), "/repo/lib/basket.py", True),
        (("Grep", {"pattern": "total", "path": "/repo"}), "/repo/lib/basket.py", False),
        (bash("ls app"), "cart.py\nshop.py", True),
        (bash("ls docs"), "a.md", False),
        (bash("git ls-files | grep basket"), "lib/basket.py", True),
        (read("/repo/lib/basket.py"), TEXT, False),  # where it is had not been shown
    ],
)
def test_a_missing_file_is_to_be_searched_for_by_a_look_that_names_it(look, text, is_chosen):
    steps = ((read("/repo/app/basket.py"), NO_FILE, True), (look, text), (GOOD, DONE))
    assert decided(*steps) == (("look_first", *look) if is_chosen else None)


def test_a_missing_file_that_had_been_shown_elsewhere_is_read_there():
    there = read("/repo/lib/basket.py")
    listed = (("Glob", {"pattern": "lib/*.py"}), "/repo/lib/basket.py\n/repo/lib/tax.py")
    assert decided(listed, (read("/repo/app/basket.py"), NO_FILE, True), (there, TEXT)) == ("corrected", *there)
    other = read("/repo/lib/tax.py")
    assert decided(listed, (read("/repo/app/basket.py"), NO_FILE, True), (other, TEXT)) is None


def test_a_command_is_chosen_as_it_has_to_be_typed():
    wrong, right = (
        bash("git show abc1234 --no-stat", description="Show it"),
        bash("git show abc1234", description="Retry"),
    )
    error = "Exit code 128\nfatal: unrecognized argument: --no-stat"
    assert decided((wrong, error, True), (right, "diff")) == ("corrected", *bash("git show abc1234"))
    assert decided((wrong, error, True), (bash("git status"), "clean")) is None
    assert decided((wrong, error, True), (bash("git show --help"), "usage")) == ("look_first", *bash("git show --help"))


def test_what_a_corrected_command_names_besides_had_been_shown():
    error = "Exit code 128\nfatal: unrecognized argument: --no-stat"
    wrong, right = bash("git show --no-stat --format=fuller HEAD"), bash("git show --format=fuller HEAD app/cart.py")
    assert decided((wrong, error, True), (right, "diff")) is None
    assert decided((bash("ls app/cart.py"), "app/cart.py"), (wrong, error, True), (right, "diff"))[0] == "corrected"


def test_an_option_that_the_error_itself_tells_was_not_known_before():
    wrong, right = bash("git show --no-stat abc1234"), bash("git show --no-patch abc1234")
    error = "Exit code 128\nfatal: unrecognized argument: --no-stat"
    assert decided((wrong, error, True), (right, "diff")) == ("corrected", *right)
    assert decided((wrong, f"{error}\n  try: --no-patch", True), (right, "diff")) is None
    told = (bash("git help show"), "--no-patch  suppress the diff")
    assert decided(told, (wrong, f"{error}\n  try: --no-patch", True), (right, "diff"))[0] == "corrected"


def test_after_a_person_has_spoken_nothing_is_a_correction_of_the_session():
    steps = ((read(), TEXT), (BAD, NO_MATCH, True))
    assert decided(*steps, (GOOD, DONE)) is not None
    assert decided(*steps, "take the other line", (GOOD, DONE)) is None
    asked = (("AskUserQuestion", {"questions": "Which?"}), "The user has answered: the other")
    assert decided(*steps, asked, (GOOD, DONE)) is None


def test_a_refused_edit_is_set_against_the_one_that_the_user_let_through():
    first, second = edit("return sum(items)", "return 0"), edit("return sum(items)", "return sum(items, start=0)")
    said = REFUSED + "don't return zero, use start"
    assert decided((read(), TEXT), (first, said, True), (second, DONE)) == ("corrected", *second)
    assert decided((read(), TEXT), (first, said, True), (edit("return 1", "return 2"), DONE)) is None
    conversation = session((read(), TEXT), (first, said, True), (second, DONE))
    (pair, acted) = find_session_pairs(conversation, find_error_sites(conversation))
    assert (pair.source, pair.kind, acted.source) == ("user", "user_corrected", "acted_at_once")


def test_a_refused_command_is_set_against_the_one_that_the_users_words_name():
    push, pull = bash("git push"), bash("git pull --rebase")
    assert decided((push, REFUSED + "pull rebase first", True), (pull, "ok")) == ("corrected", *pull)
    assert decided((push, REFUSED + "please wait", True), (pull, "ok")) is None
    assert decided((push, REFUSED + "don't push", True), (bash("git push -n"), "ok")) is None  # they are against it


def test_one_pair_for_each_call_of_a_turn_without_words_and_with_one_id_on_both_sides():
    built = Session().user("go")
    other = edit("return 1", "return 2", OTHER)
    built.calls([(*GOOD, NOT_READ, True, None), (*other, NOT_READ, True, None)])
    built.calls([(*read(OTHER), TEXT, False, None), (*read(), TEXT, False, None)])
    conversation = replace(built.conversation(), cwd="/repo")
    found = list(find_session_pairs(conversation, find_error_sites(conversation)))
    assert [(each.turn_number, each.call_number, each.chosen.arguments["file_path"]) for each in found] == [
        (0, 0, FILE),
        (0, 1, OTHER),
    ]
    assert [each.failed.id == each.chosen.id for each in found] == [True, True]


def test_what_a_parallel_call_brought_was_not_known_when_the_turn_was_written():
    built = Session().user("go")
    built.calls([(*read(), TEXT, False, None), (*BAD, NOT_READ, True, None)])
    built.call(*GOOD[:1], DONE, **GOOD[1])
    conversation = replace(built.conversation(), cwd="/repo")
    assert not [
        each for each in find_session_pairs(conversation, find_error_sites(conversation)) if each.source == "correction"
    ]


def test_copied_turns_and_failures_of_others_give_nothing():
    built = Session().user("go")
    built.call(*GOOD[:1], NOT_READ, is_error=True, origin="copied", **GOOD[1])
    built.call("Read", TEXT, file_path=FILE)
    built.call("Bash", "Exit code 1\n3 failed", is_error=True, command="pytest")
    built.call("Bash", "ok", command="pytest -x")
    conversation = replace(built.conversation(), cwd="/repo")
    assert list(find_session_pairs(conversation, find_error_sites(conversation))) == []


def test_where_a_log_uses_ids_again_nobody_knows_whose_result_is_whose():
    steps = ((GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE))
    conversation = session(*steps)
    same = [
        replace(
            turn,
            calls=tuple(replace(each, id="c") for each in turn.calls),
            results=tuple(replace(each, call_id="c") for each in turn.results),
        )
        for turn in conversation.turns
    ]
    assert list(find_session_pairs(conversation, find_error_sites(conversation)))
    conversation = replace(conversation, turns=tuple(same))
    assert list(find_session_pairs(conversation, find_error_sites(conversation))) == []


def test_acting_at_once_is_set_against_the_look_that_was_not_needed():
    conversation = session((("Glob", {"pattern": "app/*.py"}), FILE), (read(), TEXT), (GOOD, DONE))
    path, text = find_session_pairs(conversation, [])
    assert (path.how, path.chosen.arguments, path.failed.name, path.failed.arguments) == (
        "looked_for_path",
        {"file_path": FILE},
        "Glob",
        {"pattern": "**/cart.py"},
    )
    assert (text.how, text.chosen.name, text.failed.name, text.failed.arguments) == (
        "looked_for_text",
        "Edit",
        "Read",
        {"file_path": FILE},
    )
    assert text.source == "acted_at_once"


def test_no_look_is_called_needless_where_nobody_knows_that_it_was():
    part = (read(offset=4, limit=2), "     4\tdef best(items):\n     5\t    return 1")
    assert [each.how for each in find_session_pairs(session(part, (GOOD, DONE)), [])] == []


def test_long_texts_of_one_word_take_no_time():
    """Comparing them letter by letter took half a second for each failure."""
    steps = []
    for number in range(40):
        steps += [(read(), TEXT), (edit(f"{number}  " + "abc " * 400, "some other text " * 100), NO_MATCH, True)]
        steps += [(edit("return 1" + "abd " * 400, "some text " * 100), DONE)]
        steps += [
            (bash("git show --no-stat " + "x/y " * 400), "Exit code 128\nfatal: unrecognized argument: --no", True)
        ]
        steps += [(bash("git show " + "z/y " * 400), "x")]
    conversation = session(*steps)
    failures = find_error_sites(conversation)
    started = time.process_time()
    list(find_session_pairs(conversation, failures))
    assert time.process_time() - started < 5
