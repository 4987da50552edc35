"""Sessions for tests of corrections: steps, turns of several calls, and what is chosen in them."""

from __future__ import annotations

from dataclasses import replace

from composer_replication.pairs.corrections import find_correction, find_session_pairs
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
    found = find_correction(conversation, sites[0])
    return found and (found.how, found.chosen.name, dict(found.chosen.arguments))


GOOD, BAD = edit("return sum(items)", "return sum(items) or 0"), edit("return  sum(items)", "return sum(items) or 0")
LONGER = edit("def total(items):\n    return sum(items)", "def total(items):\n    return 0")


def turns(*batches):
    """A session of several calls at once; every batch is a turn."""
    built = Session().user("go")
    for batch in batches:
        built.calls([(*call, text, bool(failed), None) for call, text, *failed in batch])
    return replace(built.conversation(), cwd="/repo")


def chosen_of(conversation):
    found = find_session_pairs(conversation, find_error_sites(conversation))
    return [dict(each.chosen.arguments) for each in found if each.source == "correction"]


def numbered(first, *lines):
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))
