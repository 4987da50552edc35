"""Scripted rollouts, first half: what tools can answer, and whose fault it is."""

from __future__ import annotations

from data.scripted_rollout_types import Scripted, call, failed, site

DONE = "I am done."
_MISSING = "[Errno 2] No such file or directory: 'src/mian.py'"

RAISED = (
    Scripted(
        name="no such tool",
        why="the model made a name up; the published example",
        turns=(call("grep", pattern="total"), DONE),
        results=((failed("Tool grep not found."),),),
        sites=(site(0, "tool_not_found", tool="grep"),),
    ),
    Scripted(
        name="missing argument",
        why="the schema requires a path",
        turns=(call("read_file"), DONE),
        results=((failed("Workshop.read_file() missing 1 required positional argument: 'path'"),),),
        sites=(site(0, "input_validation", tool="read_file"),),
    ),
    Scripted(
        name="unexpected argument",
        why="the schema has no such parameter",
        turns=(call("read_file", path="src/main.py", lines=3), DONE),
        results=((failed("Workshop.read_file() got an unexpected keyword argument 'lines'"),),),
        sites=(site(0, "input_validation", tool="read_file"),),
    ),
    Scripted(
        name="wrong type",
        why="the schema says integer; the tool's own words do not name the argument, its schema does",
        turns=(call("add", first="two", second=3), DONE),
        results=((failed('can only concatenate str (not "int") to str'),),),
        sites=(site(0, "input_validation", tool="add"),),
    ),
    Scripted(
        name="arguments are no object",
        why="the arguments are a string, which no tool can take",
        turns=('<tool_call>\n{"name": "add", "arguments": "3 and 4"}\n</tool_call>', DONE),
        results=((failed("rollouts.workshop.Workshop.add() argument after ** must be a mapping, not str"),),),
        sites=(site(0, "input_validation", tool="add"),),
    ),
    Scripted(
        name="value out of range",
        why="a ValueError that names the argument and what it accepts",
        turns=(call("price_of", item="nut", quantity=40), DONE),
        results=((failed("quantity must be from 1 to 9, got 40"),),),
        sites=(site(0, "input_validation", tool="price_of"),),
    ),
    Scripted(
        name="bare KeyError",
        why="a failure, but its text is one word: nobody can say whose it is, so it is not taught",
        turns=(call("price_of", item="nail", quantity=1), DONE),
        results=((failed("'nail'"),),),
        sites=(site(0, "other", "unknown", "price_of"),),
    ),
    Scripted(
        name="file not found",
        why="the path has a typo",
        turns=("Let me look.\n" + call("read_file", path="src/mian.py"), DONE),
        results=((failed(_MISSING),),),
        sites=(site(0, "file_not_found|shell_path_missing", tool="read_file"),),
    ),
    Scripted(
        name="edit without a match",
        why="the model quoted a text that is not in the file",
        turns=(call("edit_file", path="src/main.py", old="sum = 0", new="sum = 1"), DONE),
        results=((failed("String to replace not found in file.\nString: sum = 0"),),),
        sites=(site(0, "edit_no_match", tool="edit_file"),),
    ),
    Scripted(
        name="edit with two matches",
        why="the model's quotation is not unique",
        turns=(call("edit_file", path="src/main.py", old="total = 0", new="total = 1"), DONE),
        results=((failed("Found 2 matches of the string to replace, but replace_all is false."),),),
        sites=(site(0, "edit_ambiguous", tool="edit_file"),),
    ),
    Scripted(
        name="mistyped command",
        why="the shell knows no such command",
        turns=(call("bash", command="pytset -q"), DONE),
        results=((failed("Exit code 127\nbash: line 1: pytset: command not found"),),),
        sites=(site(0, "cmd_not_found", tool="bash"),),
    ),
    Scripted(
        name="shell path missing",
        why="the command names a file that is not there",
        turns=(call("bash", command="cat nowhere.txt"), DONE),
        results=((failed("Exit code 1\ncat: nowhere.txt: No such file or directory"),),),
        sites=(site(0, "shell_path_missing|file_not_found", tool="bash"),),
    ),
    Scripted(
        name="tests fail",
        why="failing tests are the work, not a mistake in the call",
        turns=(call("bash", command="pytest -q"), DONE),
        results=(
            (failed("Exit code 1\nFAILED tests/test_sum.py::test_total - assert 3 == 4\n1 failed, 2 passed in 0.03s"),),
        ),
        sites=(site(0, "test_failure", "task", "bash"),),
    ),
    Scripted(
        name="permission denied",
        why="the system refused; the call was well made",
        turns=(call("read_file", path="store.lock"), DONE),
        results=((failed("[Errno 13] Permission denied: 'store.lock'"),),),
        sites=(site(0, "os_permission|permission_denied", "env", "read_file"),),
    ),
    Scripted(
        name="async timeout",
        why="an async tool fails in the event loop; slowness is the environment's",
        turns=(call("fetch", url="https://slow.example"), DONE),
        results=((failed("Request timed out after 30 s"),),),
        sites=(site(0, "timeout", "env", "fetch"),),
    ),
    Scripted(
        name="async network",
        why="an async tool cannot reach its host",
        turns=(call("fetch", url="https://down.example"), DONE),
        results=((failed("Connection refused: could not reach the host"),),),
        sites=(site(0, "network", "env", "fetch"),),
    ),
    Scripted(
        name="async bad argument",
        why="an async tool refuses what the model gave it",
        turns=(call("fetch", url="ftp://old.example"), DONE),
        results=((failed("Invalid argument: url must start with https://"),),),
        sites=(site(0, "input_validation", tool="fetch"),),
    ),
)

SAID = (
    Scripted(
        name="error as plain text",
        why="the tool says in words that the file does not exist, and raises nothing",
        turns=(call("open_page", path="src/mian.py"), DONE),
        results=(("Error: File does not exist: src/mian.py",),),
        sites=(site(0, "file_not_found|shell_path_missing", tool="open_page"),),
    ),
    Scripted(
        name="text about errors",
        why="a document that explains errors was read without one",
        turns=(call("read_file", path="docs/errors.md"), DONE),
        results=(("# Errors\nValueError: raised if the file does not exist.\nError: no such tool means a typo.\n",),),
    ),
    Scripted(
        name="page about errors",
        why="an async tool succeeded; its page is about errors",
        turns=(call("fetch", url="https://fine.example"), DONE),
        results=(("a page about error handling: how to fail, and how to recover from an exception",),),
    ),
    Scripted(
        name="error key that is empty",
        why="the result has a key `error` whose value is None: it succeeded",
        turns=(call("price_of", item="nut", quantity=2), DONE),
        results=((str({"error": None, "price": 4}),),),
    ),
    Scripted(
        name="record of an old failure",
        why="the file read is itself the text of a failed call; reading it succeeded",
        turns=(call("read_file", path="last_run.json"), DONE),
        results=(("{'error': 'Tool grep not found.'}",),),
        is_hard=True,
    ),
    Scripted(
        name="no error at all",
        why="two calls, both fine",
        turns=(call("add", first=3, second=4), call("bash", command="ls"), "The sum is 7."),
        results=(("7",), ("ran ls",)),
    ),
    Scripted(name="no call at all", why="the model answers at once", turns=("Nothing has to be done.",)),
    Scripted(
        name="JSON in prose",
        why="an object that looks like a call, quoted in an answer, is no call",
        turns=('The settings are {"name": "add", "arguments": {"first": 1}} and they are wrong: error, failed.',),
    ),
    Scripted(
        name="error words in the model's text",
        why="the model talks about errors; its call is fine",
        turns=("Error: that failed before, no such file. Now it works.\n" + call("add", first=1, second=1), DONE),
        results=(("2",),),
    ),
)
