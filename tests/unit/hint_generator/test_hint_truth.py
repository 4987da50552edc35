"""A hint claims only what the session shows: each claim beside a session that must not get it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.hint_generator import write_hint
from composer_replication.hint_generator.facts import _find_mistyped_option as near_option
from composer_replication.hint_generator.facts import _unknown_option as unknown_option
from composer_replication.hint_generator.hint_sources import hint_from_user_words
from composer_replication.hint_generator.shell_facts import _advice_for
from composer_replication.hint_generator.templates import hint_file_not_found, hint_shell_path_missing, hint_usage_error
from composer_replication.sites import find_error_sites
from session_pieces import Session, quoted

ROOT = "/home/u/shop"
NO_MATCH = "<tool_use_error>String to replace not found in file.\nString: x</tool_use_error>"
UNREAD = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
FILE = """// Add puts an item into the cart.
func Add(cart *Cart, item Item) error {
	if item.Price < 0 {
		return errPrice
	}
	cart.items = append(cart.items, item)
	return nil
}

// Total sums the prices of the cart.
func Total(cart *Cart) int {
	return sum(cart.items)
}"""


def numbered(text):
    return "".join(f"{number:6}\t{line}\n" for number, line in enumerate(text.split("\n"), 1))


def hint_of(session):
    conversation = replace(session.conversation(), cwd=ROOT)
    site = replace(find_error_sites(conversation)[-1], blame="model")  # whoever is to blame: what is said is true
    return write_hint(site, conversation, inferred_tools={"Glob": {}, "Grep": {}})


def edit(session, old, path="cart.go"):
    session.call("Edit", NO_MATCH, is_error=True, file_path=f"{ROOT}/{path}", old_string=old, new_string="x")
    return hint_of(session)


def reading(text=FILE, path="cart.go"):
    session = Session()
    session.call("Read", numbered(text), file_path=f"{ROOT}/{path}")
    return session


# ---- edits


@pytest.mark.parametrize(
    ("old", "line"),
    [
        # the same statement, which is only longer, or one that stands between the same neighbours
        ("\tcart.items = append(cart.items, item...)", None),
        (
            "\tif item.Price < 0 {\n\t\treturn nil, fail()\n\t}\n\tcart.items = append(cart.items, item)",
            "return errPrice",
        ),
        # another function's line, or its comment
        ("\treturn nil\n}\n\n// Remove takes an item out of the cart.\nfunc Remove(cart *Cart) error {", None),
        ("// Count counts the prices of the cart.\nfunc Count(cart *Cart) int {", None),
        ("\tcart.items = append(cart.items, item)\n\tcart.log.Print(cart)", None),
    ],
)
def test_a_line_is_named_only_where_it_is_the_one_that_was_meant(old, line):
    hint = edit(reading(), old)
    assert hint.facts.get("closest_line") == line
    assert [part for part in quoted(hint.text) if part in FILE] == ([line] if line else [])


@pytest.mark.parametrize("is_error", [True, None])
def test_an_edit_that_was_refused_has_changed_nothing(is_error):
    """With the harness's flag and without it, as rollouts have it."""
    session = reading()
    for _ in range(2):
        session.call(
            "Edit",
            NO_MATCH,
            is_error=is_error,
            file_path=f"{ROOT}/cart.go",
            old_string="\tcart.goods = append(cart.goods, item)",
            new_string="\tcart.goods = with(cart.goods, item)",
        )
    assert hint_of(session).facts["edit_problem"] == "line"  # and not `own_edit`


def test_a_text_of_another_shown_file_is_said_to_be_there():
    session = reading()
    session.call("Read", numbered("func Pay(cart *Cart) error {\n\treturn charge(cart)\n}"), file_path=f"{ROOT}/pay.go")
    hint = edit(session, "func Pay(cart *Cart) error {\n\treturn charge(cart)")
    assert (hint.facts["edit_problem"], quoted(hint.text)) == ("other_file", ["pay.go"])


def test_a_text_of_no_shown_file_is_not_said_to_be_in_another():
    session = reading()
    session.call("Read", numbered("func Pay(cart *Cart) error {\n\treturn charge(cart)\n}"), file_path=f"{ROOT}/pay.go")
    assert "pay.go" not in edit(session, "func Refund(cart *Cart) error {\n\treturn charge(cart)").text


@pytest.mark.parametrize(
    ("between", "may_have_changed"),
    [
        (lambda session: session.user("What does Total do?"), False),
        (lambda session: session.user("I have renamed it, go on."), True),
        (lambda session: session.call("Bash", "", command="gofmt -w cart.go"), True),
        (lambda session: session.call("Bash", "", command="git checkout main"), True),
    ],
)
def test_a_file_is_said_to_have_changed_only_where_something_points_to_it(between, may_have_changed):
    session = reading()
    between(session)
    assert (edit(session, "\tcart.items = nil").facts["edit_problem"] == "changed") == may_have_changed


@pytest.mark.parametrize(
    ("before", "again"),
    [
        (lambda session: session.user("This session is being continued from a previous conversation."), True),
        (lambda session: session.call("Bash", "", command="git mv basket.go cart.go"), True),
        (lambda session: session.call("Bash", "", command="git mv basket.go order.go"), False),
        (lambda session: session.user("Add a total to the cart."), False),
    ],
)
def test_a_file_is_to_be_read_again_only_where_an_earlier_reading_was_lost(before, again):
    session = Session()
    before(session)
    session.call("Read", "     1\tx\n", file_path=f"{ROOT}/other.go")
    session.call("Edit", UNREAD, is_error=True, file_path=f"{ROOT}/cart.go", old_string="a", new_string="b")
    hint = hint_of(session)
    assert hint.facts["counts_no_more"] == again
    assert quoted(hint.text) == (["Read"] if again else ["Read", "Edit"])


# ---- commands


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("unknown flag: --stat", "--stat"),
        ("flag provided but not defined: -tag", "-tag"),
        ("error: unrecognized arguments: --fast", "--fast"),
        ("package x: build constraints exclude all Go files in /a", None),
        ("Error: Input must be provided when using --print", None),
    ],
)
def test_an_option_is_unknown_only_where_the_error_says_so(said, option):
    assert unknown_option(said) == option


def test_the_near_option_is_one_alone():
    assert near_option("--colour", ["--color", "--web"]) == "--color"
    assert near_option("--stat", ["--color", "--name-only"]) is None


def test_a_package_without_files_needs_its_tag_and_not_other_options():
    said = "package shop/e2e: build constraints exclude all Go files in /home/u/shop/e2e"
    assert "`-tags`" in str(_advice_for("usage_error", said, "go vet ./e2e"))
    assert "option" not in hint_usage_error({})


@pytest.mark.parametrize(
    ("said", "stated", "not_stated"),
    [
        ("jq: error: syntax error, unexpected //, expecting '}' (Unix shell quoting issues?)", "parentheses", "empty"),
        ("jq: error: syntax error, unexpected '|', expecting '}' at <top-level>", "parentheses", "empty"),
        ('jq: error: Top-level program not given (try ".")\njq: 1 compile error', "empty", "parentheses"),
        ("jq: error: syntax error, unexpected INVALID_CHARACTER (Unix shell quoting issues?)", "quotes", "parentheses"),
    ],
)
def test_what_is_said_of_a_jq_filter_fits_its_error(said, stated, not_stated):
    advice = str(_advice_for("shell_syntax", said, "jq x"))
    assert stated in advice
    assert not_stated not in advice


def shell(command, error, *before):
    session = Session()
    for each, text in before:
        session.call("Bash", text, command=each)
    session.call("Bash", f"Exit code 1\n{error}", is_error=True, command=command)
    return hint_of(session)


LISTING = ("git ls-files", "web/api/routes.py\nweb/api/auth/token.py\ndocs/intro.md")


def test_behind_its_own_cd_a_command_is_not_told_of_earlier_ones():
    missing = "cat: web/api/auth/token.py: No such file or directory"
    own = shell(f"cd {ROOT}/web/api && cat web/api/auth/token.py", missing, LISTING)
    assert quoted(own.text) == ["cd", "web/api", "auth/token.py"]
    earlier = shell("cat web/api/auth/token.py", missing, LISTING, ("cd web/api", ""))
    assert quoted(earlier.text) == ["web/api", "auth/token.py"]


def test_who_types_absolute_paths_is_not_advised_to():
    hint = shell("cat /srv/data/x.csv", "cat: /srv/data/x.csv: No such file or directory", LISTING, ("cd web/api", ""))
    assert hint.facts["is_absolute"]
    assert hint.text == hint_shell_path_missing({"is_absolute": True}) != hint_shell_path_missing({})
    assert "absolute" not in hint.text
    assert "shell" not in hint.text


def test_a_path_without_cd_is_not_told_to_leave_one_out():
    said = "stat /home/u/shop/web/api/web/api: directory not found"
    hint = shell(
        "go test ./web/api", f"# ./web/api\n{said}\nFAIL\t./web/api [setup failed]", LISTING, ("cd web/api", "")
    )
    assert quoted(hint.text) == ["."]


def test_git_in_another_folder_is_told_of_the_folder():
    said = "fatal: pathspec 'web/api/routes.py' did not match any files"
    moved = shell("git add web/api/routes.py", said, LISTING, ("cd web/api", ""))
    assert quoted(moved.text) == ["web/api", "routes.py"]
    stayed = _advice_for(
        "git_state", "error: pathspec 'nwe' did not match any file(s) known to git", "git checkout nwe"
    )
    assert "`git branch -a`" in str(stayed)


# ---- files and words


SEARCH_WIDELY = hint_file_not_found({"tool_name": "Grep"})


def test_a_search_without_a_finder_has_words_of_its_own_and_so_has_a_folder_with_other_names():
    assert quoted(SEARCH_WIDELY) == []
    with_finder = {"finder_tool": "Glob"}
    texts = [SEARCH_WIDELY, *map(hint_file_not_found, ({}, with_finder, {**with_finder, "names_there": ["a.py"]}))]
    assert len(set(texts)) == 4


def test_a_search_in_a_guessed_folder_is_sent_to_the_root_and_a_reader_to_a_finder():
    missing = "<tool_use_error>Path does not exist: {}</tool_use_error>"
    hints = {}
    for tool, extra in (("Grep", {"pattern": "x", "path": f"{ROOT}/shop/commands"}), ("Read", {})):
        session = Session()
        session.call("Glob", f"{ROOT}/shop/cart.py\n{ROOT}/shop/order.py", pattern="shop/*.py")
        call = extra or {"file_path": f"{ROOT}/shop/parser.py"}
        said = missing.format("x") if extra else "<tool_use_error>File does not exist.</tool_use_error>"
        session.call(tool, said, is_error=True, **call)
        hints[tool] = hint_of(session).text
    assert hints["Grep"] == SEARCH_WIDELY
    assert hints["Read"] == hint_file_not_found({"finder_tool": "Glob", "names_there": ["cart.py", "order.py"]})
    assert quoted(hints["Read"]) == ["Glob"]


def test_a_search_in_a_folder_that_is_none_is_not_sent_to_the_one_file_of_that_name():
    """What is searched may lie in the file's siblings."""
    session = Session()
    session.call("Glob", f"{ROOT}/shop/cart.py\n{ROOT}/shop/cart_totals.py", pattern="shop/*.py")
    said = f"<tool_use_error>Path does not exist: {ROOT}/shop/cart</tool_use_error>"
    session.call("Grep", said, is_error=True, pattern="def total", path=f"{ROOT}/shop/cart")
    assert hint_of(session).text == SEARCH_WIDELY


@pytest.mark.parametrize("words", ["that", "No.", "not that!", "fix this", "why?", "no, don't do it", "…"])
def test_a_fragment_is_no_hint(words):
    assert hint_from_user_words(words) is None


@pytest.mark.parametrize("words", ["use pnpm", "don't commit", "pull first", "no new files", "请用中文"])
def test_words_with_a_meaning_of_their_own_are_kept(words):
    assert words in hint_from_user_words(words).text
