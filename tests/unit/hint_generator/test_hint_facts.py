"""What a hint states is true: the file that was meant, the line that differs, the folder, names that errors list."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from composer_replication.hint_generator import facts, write_hint
from composer_replication.hint_generator.context import (
    EditProblem,
    listed_choices,
    nearest_name,
    suggested_name,
)
from composer_replication.hint_generator.shell_facts import _advice_for
from composer_replication.hint_generator.templates import (
    hint_edit_ambiguous,
    hint_edit_no_match,
    hint_file_not_found,
    hint_usage_error,
)
from composer_replication.sites import find_error_sites
from cpu_time import least_cpu_seconds
from session_pieces import Session, quoted

MISSING = "<tool_use_error>File does not exist.</tool_use_error>"
NO_MATCH = "<tool_use_error>String to replace not found in file.\nString: x</tool_use_error>"
FILE = "     1\tdef total(items):\n     2\t\tsubtotal = sum(items)\n     3\t\treturn round(subtotal, 2)\n"
ROOT = "/home/u/shop"


def hint_of(session, **options):
    conversation = replace(session.conversation(), cwd=ROOT)
    site = find_error_sites(conversation)[-1]
    assert site.is_kept, site
    return write_hint(site, conversation, **options)


def looking_for(path, *shown, error=MISSING):
    """The hint for a missing file, after a search has found others."""
    session = Session()
    if shown:
        session.call("Glob", "\n".join(f"{ROOT}/{each}" for each in shown), pattern="**/*.py")
    session.call("Read", error, is_error=True, file_path=f"{ROOT}/{path}")
    return hint_of(session)


@pytest.mark.parametrize(
    ("path", "shown", "meant"),
    [
        ("commands/invoice.py", ["shop/invoice.py", "shop/cart.py"], "shop/invoice.py"),  # one of that name alone
        ("shop/commands/invoice.py", ["shop/invoice.py", "old/invoice.py"], "shop/invoice.py"),  # folders agree
        ("commands/invoice.py", ["shop/invoice.py", "old/invoice.py"], None),  # two of that name: nobody knows
        ("commands/utils.py", ["shop/utils.py"], None),  # many files are called so
        ("shop/carts.py", ["shop/cart.py", "shop/order.py"], "shop/cart.py"),  # a slip of the pen
        ("shop/.lint.yml", ["shop/.lint.yaml"], "shop/.lint.yaml"),  # another ending
        ("shop/cart_test.py", ["shop/cart.py"], None),  # another file
        ("shop/parser.py", ["shop/cart.py", "lib/parser.py"], None),  # its folder is known, and has no such file
    ],
)
def test_the_file_that_was_meant_is_named_only_where_one_alone_can_be(path, shown, meant):
    hint = looking_for(path, *shown)
    assert hint.facts.get("meant") == meant
    if meant is not None:
        assert quoted(hint.text) == [meant]


def test_what_the_error_suggests_goes_before_what_the_session_shows():
    error = "<tool_use_error>File does not exist. Did you mean .lint.yaml?</tool_use_error>"
    hint = looking_for(".lint.yml", "other/.lint.yml", error=error)
    assert quoted(hint.text) == [".lint.yaml", "Glob"]


def test_names_that_a_folder_is_known_to_have_are_pointed_to_and_a_search_for_text_is_not_recommended():
    session = Session()
    session.call("Grep", "shop/cart.py", pattern="x", path=f"{ROOT}/shop")
    session.call("Read", "1\tx", file_path=f"{ROOT}/shop/cart.py")
    session.call("Read", MISSING, is_error=True, file_path=f"{ROOT}/shop/parser.py")
    hint = hint_of(session)
    assert hint.facts["names_there"] == ["cart.py"]
    assert hint.text == hint_file_not_found({"names_there": ["cart.py"]}) != hint_file_not_found({})
    assert quoted(hint.text) == []
    known = {"Glob": {}, "Grep": {}}
    assert quoted(hint_of(session, inferred_tools=known).text) == ["Glob"]


def edited(old, *, file=FILE, before=()):
    session = Session()
    session.call("Read", file, file_path=f"{ROOT}/cart.py")
    for each in before:
        session.calls([each])
    session.call("Edit", NO_MATCH, is_error=True, file_path=f"{ROOT}/cart.py", old_string=old, new_string="x")
    return hint_of(session)


@pytest.mark.parametrize(
    ("old", "problem", "stated"),
    [
        ("\treturn round(subtotal)", "line", ["subtotal, 2)"]),
        ("def total(items):\n\tsubtotal = sum(items)\n\treturn subtotal", "line", ["return round(subtotal, 2)"]),
        ("def total(items):\n\tsubtotal = sum(items)\n\treturn -round(subtotal, 2) + 1", "longer", []),
        ("    subtotal = sum(items)\n    return round(subtotal, 2)", "whitespace", ["subtotal = sum…"]),
        ("     2\t\tsubtotal = sum(items)\n     3\t\treturn round(subtotal, 2)", "line_numbers", []),
        ("def total(items):\\n\\tsubtotal = sum(items)", "escapes", []),
        ("class Basket:\n\tpass", "elsewhere", []),
    ],
)
def test_the_line_that_differs_is_named_as_the_file_has_it(old, problem, stated):
    hint = edited(old)
    assert hint.facts["edit_problem"] == problem
    assert quoted(hint.text) == stated
    assert ("1 tab " in hint.text) == (problem == "whitespace")


def test_every_reason_for_which_a_text_is_not_in_the_file_has_words_of_its_own():
    problems = get_args(EditProblem)
    assert len({hint_edit_no_match({"edit_problem": problem}) for problem in problems}) == len(problems)


def test_a_part_that_was_not_shown_is_to_be_read_first():
    hint = edited("def total(items):\n\tsubtotal = 0", file="     1\tdef total(items):\n")
    assert hint.facts["edit_problem"] == "unshown"


def test_text_that_an_earlier_edit_replaced_is_said_to_be_gone():
    worked = {"file_path": f"{ROOT}/cart.py", "old_string": "sum(items)", "new_string": "fsum(items)"}
    rename = {**worked, "old_string": "\tsubtotal = sum(items)", "new_string": "\tamount = fsum(items)"}
    hint = edited(
        "\tsubtotal = sum(items)\n\treturn round(subtotal, 2)", before=[("Edit", rename, "Updated.", None, None)]
    )
    assert hint.facts["edit_problem"] == "own_edit"
    assert quoted(hint.text) == ["amount = fsum("]


def test_nothing_is_claimed_of_a_file_that_somebody_may_have_changed():
    session = Session()
    session.call("Read", FILE, file_path=f"{ROOT}/cart.py")
    session.user("I have reworked it a little.")
    session.call(
        "Edit",
        NO_MATCH,
        is_error=True,
        file_path=f"{ROOT}/cart.py",
        old_string="\treturn round(subtotal)",
        new_string="x",
    )
    hint = hint_of(session)
    assert hint.facts["edit_problem"] == "changed"
    assert "round" not in hint.text


def test_two_places_are_told_apart_by_the_lines_above_them():
    text = "     1\tdef one():\n     2\t\treturn 0\n     3\tdef two():\n     4\t\treturn 0\n"
    session = Session()
    session.call("Read", text, file_path=f"{ROOT}/a.py")
    error = "<tool_use_error>Found 2 matches of the string to replace, but replace_all is false.</tool_use_error>"
    session.call(
        "Edit", error, is_error=True, file_path=f"{ROOT}/a.py", old_string="\treturn 0", new_string="\treturn 1"
    )
    hint = hint_of(session)
    assert hint.facts["num_matches"] == 2
    assert quoted(hint.text) == ["def one():", "def two():", "replace_all"]


def test_a_parameter_that_the_call_has_already_is_not_named():
    session = Session()
    error = "<tool_use_error>Found 2 matches of the string to replace, but replace_all is false.</tool_use_error>"
    edit = {"file_path": f"{ROOT}/a.py", "old_string": "0", "new_string": "1"}
    session.call("Edit", error, is_error=True, **edit, replace_all=False)
    hint = hint_of(session)
    assert "replace" not in hint.text
    assert hint.facts["can_replace_all"]
    assert hint.text != hint_edit_ambiguous({**hint.facts, "can_replace_all": False})


def test_of_a_line_only_what_the_text_does_not_have_is_quoted():
    file = '     1\tlog.Printf("%d items of %s", len(cart.items), cart.owner.name)\n     2\treturn nil\n'
    hint = edited('log.Printf("%d items of %s", len(cart.items), cart.user)\nreturn nil', file=file)
    assert hint.facts["closest_line"] == ".owner.name)"


def shell(command, error, *before):
    session = Session()
    for each, text in before:
        session.call("Bash", text, command=each)
    session.call("Bash", f"Exit code 1\n{error}", is_error=True, command=command)
    return hint_of(session)


def test_the_shells_own_folder_is_named_with_the_path_from_there():
    listing = ("git ls-files", "web/api/routes.py\nweb/api/auth/token.py")
    moved = ("cd web/api", "")
    error = "cat: web/api/auth/token.py: No such file or directory"
    hint = shell("cat web/api/auth/token.py", error, listing, moved)
    assert quoted(hint.text) == ["web/api", "auth/token.py"]
    there = shell("cd web/api && ls", "bash: line 1: cd: web/api: No such file or directory", listing, moved)
    assert quoted(there.text) == ["cd"]


def test_a_program_that_has_worked_is_named_for_a_misspelled_one():
    hint = shell("pytset -q", "bash: line 1: pytset: command not found", ("pytest -q tests", "1 passed"))
    assert quoted(hint.text) == ["pytest"]


def test_an_option_is_named_only_where_it_is_nearly_what_was_typed():
    flags = "      --name-only   names\n  -w, --web         open\n"
    usage = "unknown flag: {}\n\nUsage:  gh pr diff [flags]\n\nFlags:\n" + flags
    near = shell("gh pr diff 104 --name-olny", usage.format("--name-olny"))
    assert quoted(near.text) == ["--name-only", "--help"]
    other = shell("gh pr diff 104 --stat", usage.format("--stat"))
    assert quoted(other.text) == ["--help"]
    assert other.text == hint_usage_error({"is_unknown_option": True}) != hint_usage_error({})
    assert "--name-only" not in other.text


@pytest.mark.parametrize(
    ("said", "choices"),
    [
        ("Agent type 'x' not found. Available agents: Bash, Explore, a:b", ["Bash", "Explore", "a:b"]),
        ("Error: web_search is not a valid tool, try one of [calculator, fetch_page].", ["calculator", "fetch_page"]),
        ("unknown field `t`, expected one of `cmd`, `workdir` at line 1 column 23", ["cmd", "workdir"]),
        ('Unknown JSON field: "x"\nAvailable fields:\n  author\n  body\n', ["author", "body"]),
        ("Tool 's' not found. Available: ['terminal', 'think']", ["terminal", "think"]),
        ("<tool_use_error>Unknown skill: commit</tool_use_error>", []),
        ("One of the tests failed", []),
    ],
)
def test_names_that_an_error_lists_are_read(said, choices):
    assert listed_choices(said) == choices


def test_what_an_error_asks_for_is_read():
    assert suggested_name("File does not exist. Did you mean config.ts?") == "config.ts"
    ubuntu = "Command 'pytset' not found, did you mean:\n  command 'pytest' from deb python3-pytest"
    assert suggested_name(ubuntu) == "pytest"
    assert suggested_name("no such thing") is None
    assert facts._requested_command("Code is not formatted. Run `mise run fmt` first.") == "mise run fmt"
    assert (
        facts._requested_command("has no upstream branch, use\n\n    git push -u origin fix\n")
        == "git push -u origin fix"
    )
    assert facts._listed_options("no usage here\n  --flag x") == []
    assert (
        nearest_name("code-simplifier", ["Bash", "code-simplifier:code-simplifier"])
        == "code-simplifier:code-simplifier"
    )
    assert nearest_name("reed", ["read", "reel"]) is None


def test_advice_is_for_the_message_and_the_command():
    assert "`pulls/comments/ID`" not in str(_advice_for("api_misuse", "gh: Not Found (HTTP 404)", "gh api repos/a/b"))
    single = _advice_for("api_misuse", "gh: Not Found (HTTP 404)", "gh api repos/a/b/pulls/7/comments/123")
    assert "`repos/OWNER/REPO/pulls/comments/ID`" in str(single)
    assert _advice_for("edit_noop", "HTTP 404", "gh api") is None


def test_a_parameter_of_another_name_is_named_as_this_tool_calls_it():
    session = Session()
    error = "<tool_use_error>InputValidationError: An unexpected parameter `file_path` was provided</tool_use_error>"
    session.call("Grep", error, is_error=True, pattern="x", file_path="/repo/a.py")
    known = {"Grep": {"properties": {"pattern": {}, "path": {}, "file_path": {}}}}
    hint = hint_of(session, inferred_tools=known)
    assert quoted(hint.text) == ["Grep", "path"]


HOSTILE = {
    "choices": "Available agents: " + "a, " * 60_000,
    "one of": "must be one of " * 15_000,
    "did you mean": "Did you mean " * 15_000,
    "run": "Run `" * 40_000,
    "usage": "Usage:\n" + "  -a, --b " * 20_000,
    "brackets": "available: [" * 15_000,
    "json": '"expected": "a" "path": [' * 8_000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_message_takes_long_to_be_read(what):
    session = Session()
    session.call("Task", f"InputValidationError: {HOSTILE[what]}", is_error=True, prompt="x", kind="y" * 5000)
    conversation = session.conversation()
    sites = find_error_sites(conversation)
    seconds = least_cpu_seconds(lambda: [write_hint(site, conversation) for site in sites], enough=0.1)
    assert seconds < 0.25
