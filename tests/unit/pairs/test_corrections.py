"""What a session put right itself: the corrected call where it could be known, else the look, else nothing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from composer_replication.pairs.corrections import correction_of, own_pairs
from composer_replication.sites import find_error_sites
from session_pieces import Session

FILE, OTHER = "/repo/app/cart.py", "/repo/app/shop.py"
TEXT = (
    "     1\tdef total(items):\n     2\t    return sum(items)\n     3\t\n     4\tdef best(items):\n     5\t    return 1"
)
NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
NO_MATCH = "<tool_use_error>String to replace not found in file.\nString: x</tool_use_error>"
TWICE = (
    "<tool_use_error>Found 2 matches of the string to replace, but replace_all is false. To replace all occurrences, "
    "set replace_all to true.</tool_use_error>"
)
NO_FILE = "<tool_use_error>File does not exist.</tool_use_error>"
REFUSED = (
    "The user doesn't want to proceed with this tool use. The tool use was rejected (eg. if it was a file edit, the "
    "new_string was NOT written to the file). To tell you how to proceed, the user said:\n"
)
DONE = "The file has been updated."


def edit(old, new, path=FILE, **more):
    return "Edit", {"file_path": path, "old_string": old, "new_string": new, **more}


def read(path=FILE, **more):
    return "Read", {"file_path": path, **more}


def bash(command, **more):
    return "Bash", {"command": command, **more}


def session(*steps, cwd="/repo"):
    """Steps are (call, result), with True behind it where it failed; a text is what the user says."""
    built = Session().user("fix the cart")
    for step in steps:
        if isinstance(step, str):
            built.user(step)
            continue
        (tool, arguments), text, *failed = step
        built.call(tool, text, is_error=bool(failed), **arguments)
    return replace(built.conversation(), cwd=cwd)


def decided(*steps):
    """(how, tool, arguments) of what is chosen for the only failure that may be taught."""
    conversation = session(*steps)
    sites = [site for site in find_error_sites(conversation) if site.is_kept]
    assert len(sites) == 1, [(site.kind, site.reason) for site in find_error_sites(conversation)]
    found = correction_of(conversation, sites[0])
    return found and (found.how, found.chosen.name, dict(found.chosen.arguments))


GOOD, BAD = edit("return sum(items)", "return sum(items) or 0"), edit("return  sum(items)", "return sum(items) or 0")
LONGER = edit("def total(items):\n    return sum(items)", "def total(items):\n    return 0")


def test_an_edit_as_it_worked_is_chosen_where_its_text_had_been_shown():
    assert decided((read(), TEXT), (BAD, NO_MATCH, True), (GOOD, DONE)) == ("corrected", *GOOD)


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
    assert [each.source for each in own_pairs(conversation, find_error_sites(conversation))] == ["acted_at_once"]
    before = "This session is being continued from a previous conversation that ran out of context."
    assert decided(before, (GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE)) == ("look_first", *read())
    named = f"see @{FILE}"  # what is named so may have been shown with the words
    conversation = session(named, (GOOD, NOT_READ, True), (read(), TEXT), (GOOD, DONE))
    assert not [each for each in own_pairs(conversation, find_error_sites(conversation)) if each.source == "correction"]


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


def test_a_refused_edit_is_set_against_the_one_that_the_user_let_through():
    first, second = edit("return sum(items)", "return 0"), edit("return sum(items)", "return sum(items, start=0)")
    said = REFUSED + "don't return zero, use start"
    assert decided((read(), TEXT), (first, said, True), (second, DONE)) == ("corrected", *second)
    assert decided((read(), TEXT), (first, said, True), (edit("return 1", "return 2"), DONE)) is None
    conversation = session((read(), TEXT), (first, said, True), (second, DONE))
    (pair, acted) = own_pairs(conversation, find_error_sites(conversation))
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
    found = list(own_pairs(conversation, find_error_sites(conversation)))
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
    assert not [each for each in own_pairs(conversation, find_error_sites(conversation)) if each.source == "correction"]


def test_copied_turns_and_failures_of_others_give_nothing():
    built = Session().user("go")
    built.call(*GOOD[:1], NOT_READ, is_error=True, origin="copied", **GOOD[1])
    built.call("Read", TEXT, file_path=FILE)
    built.call("Bash", "Exit code 1\n3 failed", is_error=True, command="pytest")
    built.call("Bash", "ok", command="pytest -x")
    conversation = replace(built.conversation(), cwd="/repo")
    assert list(own_pairs(conversation, find_error_sites(conversation))) == []


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
    assert list(own_pairs(conversation, find_error_sites(conversation)))
    conversation = replace(conversation, turns=tuple(same))
    assert list(own_pairs(conversation, find_error_sites(conversation))) == []


def test_acting_at_once_is_set_against_the_look_that_was_not_needed():
    conversation = session((("Glob", {"pattern": "app/*.py"}), FILE), (read(), TEXT), (GOOD, DONE))
    path, text = own_pairs(conversation, [])
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
    assert [each.how for each in own_pairs(session(part, (GOOD, DONE)), [])] == []


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
    list(own_pairs(conversation, failures))
    assert time.process_time() - started < 5


def turns(*batches):
    """A session of several calls at once; every batch is a turn."""
    built = Session().user("go")
    for batch in batches:
        built.calls([(*call, text, bool(failed), None) for call, text, *failed in batch])
    return replace(built.conversation(), cwd="/repo")


def chosen_of(conversation):
    found = own_pairs(conversation, find_error_sites(conversation))
    return [dict(each.chosen.arguments) for each in found if each.source == "correction"]


def numbered(first, *lines):
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


TOP, END = ("import os", "import sys", "", "LIMIT = 10"), ("def final_total(items):", "    return sum(items)")


def test_a_look_at_another_place_of_the_file_is_not_for_this_edit():
    top, end = edit("import  sys", "import json"), edit("def final_total(items) :", "def final(items):")
    seen = ((read(offset=20, limit=1), numbered(20, "# nothing")),)
    looks = ((read(offset=90, limit=2), numbered(90, *END)), (read(limit=4), numbered(1, *TOP)))
    asked = ((top, NO_MATCH, True), (end, NO_MATCH, True))
    assert chosen_of(turns(seen, asked, looks)) == [looks[1][0][1], looks[0][0][1]]
    assert chosen_of(turns(seen, asked, looks[:1])) == [looks[0][0][1]]


def test_a_search_in_a_file_does_not_read_it():
    found = (("Grep", {"pattern": "sum", "path": FILE}), "2:    return sum(items)")
    steps = ((read(OTHER), TEXT), (GOOD, NOT_READ, True), found)
    assert decided(*steps, (read(), TEXT)) == ("look_first", *read())
    assert decided(*steps) == ("look_first", *read())  # read by nobody: as the session reads files
    assert decided(*steps[1:]) is None  # and nobody knows how it does


def test_what_the_agent_wrote_itself_is_not_to_be_read():
    text = "def total(items):\n    return sum(items)\n"
    wrote = (("Write", {"file_path": FILE, "content": text}), "File created successfully")
    look = (read(), numbered(1, *text.split("\n")))
    other = edit("def total(items):\n    return  sum(items)\n", "pass", FILE)
    assert decided(wrote, (other, NO_MATCH, True), look) is None
    moved = (bash("git checkout other"), "Switched to branch 'other'")
    assert decided(wrote, moved, (other, NO_MATCH, True), look) == ("look_first", *read())


def test_where_the_change_had_been_made_no_call_was_needed():
    first, again = edit("return 1", "return best_of(items)"), edit("return 1 ", "return best_of(items)")
    later = edit("return best_of(items)", "return best_of(items) or 1")
    steps = (((read(), TEXT),), ((first, DONE),), ((again, NO_MATCH, True),), ((later, DONE),))
    assert chosen_of(turns(*steps)) == []
    assert chosen_of(turns(steps[0], *steps[2:3], ((edit("return 1", "return best_of(items)"), DONE),))) == [first[1]]


def test_an_edit_that_a_parallel_one_spoiled_is_no_wrong_edit():
    first = edit("def total(items):\n    return sum(items)", "def total(items):\n    return 0")
    again = edit("    return 0", "    return sum(items) or 0")
    spoiled = (((read(), TEXT),), ((first, DONE), (GOOD, NO_MATCH, True)), ((again, DONE),))
    assert chosen_of(turns(*spoiled)) == []


def test_every_call_of_a_turn_has_its_own_correction():
    pair = edit("return  sum(items)", "return sum(items) or 0"), edit("return  1", "return sum(items) or 1")
    right = edit("return 1", "return sum(items) or 1"), edit("return sum(items)", "return sum(items) or 0")
    asked = tuple((each, NO_MATCH, True) for each in pair)
    found = chosen_of(turns(((read(), TEXT),), asked, tuple((each, DONE) for each in right)))
    assert found == [right[1][1], right[0][1]]


def test_all_copies_are_replaced_only_where_more_than_one_had_been_shown():
    short, everywhere = edit("return sum(items)", "return 0"), edit("return sum(items)", "return 0", replace_all=True)
    both = TEXT + "\n     6\tdef again(items):\n     7\t    return sum(items)"
    assert decided((read(), both), (short, TWICE, True), (everywhere, DONE)) == ("corrected", *everywhere)
    part = read(limit=5)
    assert decided((part, TEXT), (short, TWICE, True), (everywhere, DONE)) is None
    assert decided((part, TEXT), (short, TWICE, True), (LONGER, DONE)) is None


def test_a_name_that_was_made_after_the_failure_was_not_known_before():
    first, second = edit("return 1", "return len(items)"), edit("return 1", "return item_count(items)")
    said = REFUSED + "use a helper instead"
    helper = edit("def shop():", "def item_count(items):\n    return len(items)\n\ndef shop():", OTHER)
    steps = ((read(), TEXT), (first, said, True))
    assert decided(*steps, (helper, DONE), (second, DONE)) is None
    assert decided((bash("cat lib.py"), "def item_count(items): ..."), *steps, (helper, DONE), (second, DONE)) == (
        "corrected",
        *second,
    )


MISSING = (read("/repo/app/basket.py"), NO_FILE, True)
LIST = (bash("ls app"), "cart.py\nshop.py")


def test_a_list_of_the_folder_is_for_a_file_only_where_something_of_it_was_opened():
    assert decided(MISSING, LIST, (read(), TEXT)) == ("look_first", *LIST[0])
    assert decided(MISSING, LIST, (read("/repo/docs/a.md"), "text")) is None


def test_what_an_earlier_look_has_settled_is_not_looked_for():
    assert decided(LIST, MISSING, (bash("ls -a app"), LIST[1]), (read(), TEXT)) is None
    found = (("Glob", {"pattern": "**/basket*"}), "/repo/lib/basket.py")
    assert decided(LIST, MISSING, found) == ("look_first", *found[0])
    assert decided((("Glob", {"pattern": "lib/*"}), "/repo/lib/basket.py"), MISSING, found) is None


def test_a_search_for_text_is_made_elsewhere_and_not_turned_into_a_list():
    failed = ("Grep", {"pattern": "def total", "path": "/repo/src"}), "<tool_use_error>Path does not exist: x", True
    same = (("Grep", {"pattern": "def total", "path": "/repo"}), "/repo/app/cart.py")
    assert decided(failed, same) == ("look_first", *same[0])
    assert decided(failed, (bash("ls /repo"), "app\ncart.py"), (read("/repo/cart.py"), TEXT)) is None


@pytest.mark.parametrize(
    ("right", "is_chosen"),
    [
        ("git diff main", True),
        ("git diff main | head", False),  # another program
        ("git log main", False),
        ("git diff other", False),  # of something else
        ("git diff main -- v1.2.3", False),  # which nobody has shown
    ],
)
def test_a_corrected_command_serves_the_same_purpose(right, is_chosen):
    error = "Exit code 128\nerror: invalid option: --no-stat"
    found = decided((bash("git diff --no-stat main"), error, True), (bash(right), "diff"))
    assert found == (("corrected", *bash(right)) if is_chosen else None)


def test_a_skill_is_chosen_by_a_name_that_had_been_shown():
    wrong, right = (
        ("Skill", {"skill": "tools:plan_review", "args": "a.md"}),
        ("Skill", {"skill": "plan_review", "args": "a.md"}),
    )
    error = "<tool_use_error>Unknown skill: tools:plan_review</tool_use_error>"
    assert decided((wrong, error, True), (right, "Launching skill")) is None
    assert decided("run /plan_review", (wrong, error, True), (right, "Launching skill")) == ("corrected", *right)


def test_a_command_is_repeated_from_where_the_shell_stands():
    moved = (bash("cd app/web && ls"), "cart.py")
    failed = (bash("cd app/web && wc -l cart.py"), "Exit code 1\n(eval):cd:1: no such file or directory: app/web", True)
    right = bash("wc -l cart.py")
    assert decided(moved, failed, (right, "7 cart.py")) == ("corrected", *right)
    longer = bash("cd /repo/app/web && wc -l cart.py")
    assert decided((read("/repo/app/web/cart.py"), TEXT), moved, failed, (longer, "7")) == ("corrected", *longer)
    assert decided(moved, failed, (bash("cd /srv/web && wc -l cart.py"), "7")) is None


def test_a_user_who_is_against_a_part_of_a_command_gets_it_without():
    wrong, right = bash("make test slow"), bash("make test")
    assert decided((wrong, REFUSED + "don't run the slow ones", True), (right, "ok")) == ("corrected", *right)
    assert decided((wrong, REFUSED + "please run it in docker", True), (right, "ok")) is None
