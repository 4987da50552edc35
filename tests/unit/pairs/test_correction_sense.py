"""A correction is for the same place and purpose as the call that failed, and knows nothing from after it."""

from __future__ import annotations

import pytest

from correction_steps import (
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
    chosen_of,
    decided,
    edit,
    numbered,
    read,
    turns,
)

TOP, END = ("import os", "import sys", "", "LIMIT = 10"), ("def final_total(items):", "    return sum(items)")


def test_a_look_at_another_place_of_the_file_is_not_for_this_edit():
    top, end = edit("import  sys", "import json"), edit("def final_total(items) :", "def final(items):")
    hit = (bash("grep -n final app/cart.py"), "app/cart.py:90:def final_total(items):")
    seen = ((read(offset=20, limit=1), numbered(20, "# nothing")), hit)
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
    assert decided(wrote, "and now?", (other, NO_MATCH, True), look) is None  # somebody came by: nothing says more
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


@pytest.mark.parametrize("by_shell", [False, True])
def test_no_search_is_made_in_a_file_that_nobody_had_heard_of(by_shell):
    failed = ("Grep", {"pattern": "def total", "path": "/repo/basket"}), "<tool_use_error>Path does not exist: x", True
    call = ("Grep", {"pattern": "def total", "path": "/repo/basket_totals.py"})
    there = (bash('grep -n "def total" /repo/basket_totals.py') if by_shell else call, "12: def total(basket):")
    namesake = (bash("cat /repo/other/list.txt"), "/repo/other/basket_totals.py")
    assert decided(failed, there) is None
    assert decided(namesake, failed, there) is None
    assert decided((bash("ls /repo"), "basket_totals.py\napp"), failed, there) == ("look_first", *there[0])


def test_a_folder_above_what_was_missing_is_searched_only_where_it_had_been_shown():
    """Who guessed a path has guessed the folder that it lies in, too."""
    said = "<tool_use_error>Path does not exist: x"
    failed = ("Grep", {"pattern": "def total", "path": "/repo/site.com/basket"}), said, True
    above = (("Grep", {"pattern": "def total", "path": "/repo/site.com"}), "/repo/site.com/app/cart.py")
    assert decided(failed, above) is None
    assert decided((bash("ls /repo"), "site.com\nREADME.md"), failed, above) == ("look_first", *above[0])


def test_a_list_of_the_very_folder_that_was_read_as_a_file_needs_no_showing():
    failed = read("/repo/logs/today"), "EISDIR: illegal operation on a directory, read", True
    there = (bash("ls -la /repo/logs/today/"), "a.log\nb.log")
    assert decided(failed, there) == ("look_first", *there[0])


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
    asked = (("AskUserQuestion", {"questions": ["What next?"]}), "User has answered: run /plan_review")
    assert decided(asked, (wrong, error, True), (right, "Launching skill")) is None  # the model's own words


def test_no_search_is_for_a_file_that_a_search_of_its_name_did_not_find():
    nothing = (("Glob", {"pattern": "**/basket*"}), "No files found")
    found = (bash("find / -name 'basket*'"), "/opt/other/basket.txt")
    assert decided(MISSING, found) == ("look_first", *found[0])
    assert decided(MISSING, nothing, found) is None


def test_the_same_words_put_at_another_place_are_no_correction():
    text = numbered(1, "def total(items):", "    return sum(items)", "", "class Basket:", "    pass")
    new = "\n\ndef tax(items):\n    return total(items) * RATE_OF_THIS_COUNTRY"
    wrong = edit("def  total(items):\n    return items", "def  total(items):\n    return items" + new)
    beside = edit("def total(items):\n    return sum(items)", "def total(items):\n    return sum(items)" + new)
    elsewhere = edit("class Basket:\n    pass", "class Basket:\n    pass" + new)
    steps = ((read(), text), (wrong, NO_MATCH, True))
    assert decided(*steps, (beside, DONE)) == ("corrected", *beside)
    assert decided(*steps, (elsewhere, DONE)) is None


def test_a_word_that_stands_twice_is_corrected_by_more_of_its_line():
    text = numbered(1, "RATE = 21", "", "def tax(price):", "    return price * RATE")
    new = "RATE = 21\n\n\ndef area(side):\n    return side * side"
    twice = "Found 2 matches of the string to replace, but replace_all is false."
    steps = ((read(), text), (edit("RATE", new), twice, True))
    assert decided(*steps, (edit("RATE = 21", new), DONE)) == ("corrected", *edit("RATE = 21", new))
    other = "def tax(price):\n    return price"
    assert decided(*steps, (edit(other, f"{other} + 1"), DONE)) is None


def test_a_file_that_changed_since_it_was_read_is_to_be_read_again():
    changed = "<tool_use_error>File has been modified since read, either by the user or by a linter. Read it again."
    own = (bash(f"sed -i 's/a/b/' {FILE}"), "")
    steps = ((read(), TEXT), own, (GOOD, changed, True))
    assert decided(*steps, (read(), TEXT), (GOOD, DONE)) == ("look_first", *read())
    assert decided(*steps) == ("look_first", *read())  # the agent asks for it, whatever came next


@pytest.mark.parametrize(
    ("right", "is_chosen"),
    [
        ("gofmt -l cmd/", True),  # around what was named
        ("gofmt -l ./cmd/shop", True),
        ("gofmt -l cmd/shop/main.go", False),  # which nobody has shown
        ("gofmt -l internal/", False),  # something else
        ("gofmt -d cmd/", False),
    ],
)
def test_a_command_whose_path_was_of_a_form_it_does_not_take_is_chosen_with_the_folder(right, is_chosen):
    error = "Exit code 2\nstat ./cmd/shop/...: no such file or directory"
    found = decided((bash("gofmt -l ./cmd/shop/..."), error, True), (bash(right), "main.go"))
    assert found == (("corrected", *bash(right)) if is_chosen else None)


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


@pytest.mark.parametrize(
    ("seen", "part", "is_whole"),
    [
        ("def total(items):", {"offset": 80, "limit": 9}, True),  # nobody had said where it stands
        ("app/cart.py:84:def total(items):", {"offset": 80, "limit": 9}, False),
        ("app/other.py:84:def total(items):", {"offset": 80, "limit": 9}, True),
        ("app/cart.py:4:def total(items):", {"limit": 9}, True),  # the agent wants the file, not its top
        ("", {}, True),
    ],
)
def test_a_part_of_a_file_is_read_only_where_its_lines_had_been_numbered(seen, part, is_whole):
    look = (read(**part), numbered(part.get("offset", 1), "def total(items):", "    return sum(items)"))
    steps = ((read(OTHER), TEXT), (bash("grep -rn total ."), seen), (GOOD, NOT_READ, True), look)
    assert decided(*steps) == ("look_first", *(read() if is_whole else read(**part)))


def test_a_missing_file_is_searched_for_by_its_name_where_one_called_so_was_opened_later():
    opened, glob = (read("/repo/lib/basket.py"), TEXT), (("Glob", {"pattern": "*.md"}), "/repo/a.md")
    assert decided(glob, MISSING, opened) == ("look_first", "Glob", {"pattern": "**/basket.py"})
    assert decided(glob, MISSING, (read("/repo/app/basket.pyi"), TEXT)) == (
        "look_first",
        "Glob",
        {"pattern": "**/basket*"},
    )
    assert decided(glob, MISSING, (read("/repo/lib/cart.py"), TEXT)) is None
    assert decided(LIST, MISSING, opened) is None  # a listing had settled it
    assert decided(MISSING, opened) is None  # and nobody knows how this session searches


def test_a_list_of_a_tree_is_for_a_file_that_it_shows_elsewhere_and_that_was_then_opened():
    tree = (("Glob", {"pattern": "**/*.py"}), "/repo/lib/basket.py\n/repo/lib/cart.py")
    assert decided(MISSING, tree, (read("/repo/lib/basket.py"), TEXT)) == ("look_first", *tree[0])
    assert decided(MISSING, tree, (read("/repo/lib/cart.py"), TEXT)) is None
    searched = (("Glob", {"pattern": "*.md"}), "/repo/a.md")
    by_name = ("look_first", "Glob", {"pattern": "**/basket.py"})
    assert decided(searched, MISSING, tree, (read("/repo/lib/basket.py"), TEXT)) == by_name


def test_a_file_that_was_shown_whole_is_not_to_be_read_again_at_its_right_place():
    wrong, right = (read("/repo/cart.py"), NO_FILE, True), (read(), TEXT)
    named = (bash("git ls-files"), "app/cart.py")
    assert decided(named, wrong, right) == ("corrected", *right[0])
    assert decided((read(), TEXT), wrong, right) is None


def test_a_check_that_worked_typed_otherwise_is_chosen_and_a_folder_is_listed_before_a_command_names_it():
    failed = (bash("go build -tags=e2e ./e2e/..."), "Exit code 1\n# r/e2e\ne2e/a.go:4:2: undefined: run", True)
    right = (bash("go test -tags=e2e -c ./e2e/... -o /dev/null"), "")
    assert decided(failed, right) == ("corrected", *right[0])
    missing = (bash("wc -l app/basket.py"), "Exit code 1\nwc: app/basket.py: open: No such file or directory", True)
    assert decided(missing, LIST, (read(), TEXT)) == ("look_first", *LIST[0])
    assert decided(missing, (bash("git status"), "clean")) is None
