"""How calls go wrong, mechanism by mechanism: beside each slip of the model its look-alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.sites import classify, find_error_sites
from session_pieces import Session

NOT_READ = "<tool_use_error>File has not been read yet. Read it first before writing to it.</tool_use_error>"
NO_FILE = "<tool_use_error>File does not exist.</tool_use_error>"
TOO_LARGE = "File content (26800 tokens) exceeds maximum allowed tokens (25000). Please use offset and limit parameters"

# mechanism, command, what it printed, kind, blame
COMMANDS = [
    ("option", "gh pr view 7 --oneline", "unknown flag: --oneline\n\nUsage:  gh pr view", "usage_error", "model"),
    ("option of the project's own program", "./app show --brief", "unknown flag: --brief", "nonzero_exit", "task"),
    (
        "option inside a script",
        "make lint",
        "ruff: unknown option: --fixx\nmake: *** [lint] Error 2",
        "nonzero_exit",
        "task",
    ),
    ("run of the project", "go run ./cmd/app --x", "flag provided but not defined: -x", "nonzero_exit", "task"),
    (
        "GNU option elsewhere",
        "grep -oP 'a' f.txt",
        "grep: invalid option -- P\nusage: grep [-abc]",
        "usage_error",
        "model",
    ),
    ("GNU option of find", "find . -printf '%p'", "find: -printf: unknown primary or operator", "usage_error", "model"),
    ("task name", "mise run lint:all", "mise ERROR no task lint:all found", "usage_error", "model"),
    ("script name", "npm run lint:all", 'npm error Missing script: "lint:all"', "usage_error", "model"),
    ("script that fails", "npm run lint", "error: task failed\n1 issues:", "nonzero_exit", "task"),
    ("make target", "make tests-all", "make: *** No rule to make target 'tests-all'.  Stop.", "usage_error", "model"),
    (
        "make's own file",
        "make",
        "make: *** No rule to make target 'gen.h', needed by 'x.o'.  Stop.",
        "nonzero_exit",
        "task",
    ),
    ("pattern for a file", "gofmt -l ./pkg/...", "stat ./pkg/...: no such file or directory", "usage_error", "model"),
    (
        "bash quoting",
        "echo 'a",
        "bash: -c: line 1: unexpected EOF while looking for matching `''",
        "shell_syntax",
        "model",
    ),
    ("zsh quoting", 'echo "a', '(eval):1: unmatched "', "shell_syntax", "model"),
    ("zsh pattern", "gh api repos/a/b?page=2", "(eval):1: no matches found: repos/a/b?page=2", "shell_syntax", "model"),
    ("zsh, files", "rm build/*.o", "(eval):1: no matches found: build/*.o", "nonzero_exit", "task"),
    ("fish", "set x=1", "fish: Unsupported use of '='. In fish, please use 'set x 1'.", "shell_syntax", "model"),
    (
        "PowerShell",
        "a && b",
        "The token '&&' is not a valid statement separator in this version.",
        "shell_syntax",
        "model",
    ),
    (
        "a script's syntax",
        "./build.sh",
        "./build.sh: line 3: syntax error near unexpected token `fi'",
        "nonzero_exit",
        "task",
    ),
    (
        "jq",
        "cat a.json | jq '.a |'",
        "jq: error: syntax error, unexpected end of file\njq: 1 compile error",
        "shell_syntax",
        "model",
    ),
    (
        "python, inline",
        "python3 -c 'if'",
        '  File "<string>", line 1\n    if\nSyntaxError: invalid syntax',
        "shell_syntax",
        "model",
    ),
    (
        "python, file",
        "python3 a.py",
        '  File "a.py", line 1\n    if\nSyntaxError: invalid syntax',
        "compile_error",
        "task",
    ),
    (
        "harness escapes",
        "gh api x --jq 'a != 1'",
        "failed to parse jq expression (line 1)\n    a \\!= 1",
        "nonzero_exit",
        "task",
    ),
    ("endpoint", "gh api repos/a/b/pull/1", "gh: Not Found (HTTP 404)", "api_misuse", "model"),
    ("service down", "gh api repos/a/b", "gh: Service Unavailable (HTTP 503)", "network", "env"),
    ("failed checks", "gh pr checks 7", "test\tfail\t7m\thttps://host/x", "nonzero_exit", "task"),
    ("probe, ls", "ls src/lib", "ls: src/lib: No such file or directory", "shell_path_missing", "task"),
    (
        "probe, stat",
        "stat a/b.txt",
        "stat: cannot statx 'a/b.txt': No such file or directory",
        "shell_path_missing",
        "task",
    ),
    ("no probe", "cat src/lib.c", "cat: src/lib.c: No such file or directory", "shell_path_missing", "model"),
    (
        "package",
        "go test ./store",
        "# ./store\nstat /r/store/store: directory not found\nFAIL",
        "shell_path_missing",
        "model",
    ),
    ("no module here", "go test ./...", "go: cannot find main module, but found .git in /r", "wrong_folder", "model"),
    ("tests fail", "go test ./store", "--- FAIL: TestX (0.00s)\n    unknown flag: --x\nFAIL", "test_failure", "task"),
    (
        "not interactive",
        "gh pr create",
        "must provide `--title` when not running interactively",
        "usage_error",
        "model",
    ),
    ("a table", "sqlite3 a.db 'select * from t'", "Error: in prepare, no such table: t", "api_misuse", "model"),
    ("a project's table", "./app load", "Error: no such table: t", "nonzero_exit", "task"),
    ("BSD mv", "mv a/b.c c.c", "mv: rename a/b.c to c.c: No such file or directory", "shell_path_missing", "model"),
    ("git, other words", "git stash pop stash@{9}", "fatal: log for 'stash' only has 2 entries", "git_state", "model"),
    ("git asks", "git rev-parse --verify x", "fatal: Needed a single revision", "nonzero_exit", "task"),
    ("git in a script", "./release.sh", "fatal: log for 'stash' only has 2 entries", "nonzero_exit", "task"),
    ("cd, zsh", "cd a/b && make", "(eval):cd:1: no such file or directory: a/b", "shell_path_missing", "model"),
    (
        "commit message, redirected",
        "git commit -m \"$(cat <<'EOF'\nFix it\nEOF\n)\" 2>&1",
        "On branch main\nnothing to commit, working tree clean",
        "git_state",
        "model",
    ),
]


@pytest.mark.parametrize(("name", "command", "text", "kind", "blame"), COMMANDS, ids=[each[0] for each in COMMANDS])
def test_a_command_that_could_not_work_as_typed_is_told_from_work_that_fails(name, command, text, kind, blame):
    verdict = classify("Bash", {"command": command}, f"Exit code 1\n{text}", True)
    assert (verdict.kind, verdict.blame) == (kind, blame)


def _last(session: Session):
    return find_error_sites(session.conversation())[-1]


def _conversation_in(session: Session, folder: str):
    return replace(session.conversation(), cwd=folder)


@pytest.mark.parametrize("tool", ["Read", "Write", "Edit"])
@pytest.mark.parametrize("failing", ["Edit", "Write"])
def test_a_file_that_was_read_written_or_edited_is_known_whatever_the_harness_says(tool, failing):
    session = Session()
    session.call(tool, "done", file_path="/repo/./src/a.py")
    session.call(failing, NOT_READ, is_error=True, file_path="/repo/src/a.py")
    assert (_last(session).kind, _last(session).blame) == ("edit_not_read", "unknown")
    session.call("Edit", NOT_READ, is_error=True, file_path="/repo/src/b.py")
    assert _last(session).is_kept


def test_the_first_refusal_of_a_large_file_tells_its_size_and_the_second_is_the_models():
    session = Session()
    session.call("Read", TOO_LARGE, is_error=True, file_path="/repo/big.go")
    assert not _last(session).is_kept
    session.call("Glob", "/repo/big.go", pattern="*")
    session.call("Read", TOO_LARGE, is_error=True, file_path="/repo/big.go")
    assert _last(session).is_kept


@pytest.mark.parametrize(
    ("said", "path", "blame"),
    [
        ("look at src/store/save.py", "/repo/src/store/save.py", "unknown"),
        ("look at save.py", "/repo/save.py", "unknown"),
        ("look at src/store/save.py", "/repo/src/store", "unknown"),  # its folder
        ("look at src/store/save.py", "/repo/src/store/load.py", "model"),
        ("look at src/store/save.py", "/repo/src/sto", "model"),
    ],
)
def test_a_path_that_the_task_names_from_the_working_folder_is_known(said, path, blame):
    session = Session().user(said)
    session.call("Read", NO_FILE, is_error=True, file_path=path)
    (site,) = find_error_sites(_conversation_in(session, "/repo"))
    assert site.blame == blame


@pytest.mark.parametrize(
    ("before", "kind", "blame"),
    [
        ([("cd app", ""), ("grep -rl x .", "store/save.py")], "shell_path_missing", "unknown"),
        ([("cd app && grep -rl x .", "store/save.py"), ("cd /repo", "")], "wrong_folder", "model"),
        ([("git ls-files", "app/store/save.py")], "wrong_folder", "model"),
        ([("git ls-files", "/repo/store/save.py")], "shell_path_missing", "unknown"),
        ([("git ls-files", "app/store/load.py")], "shell_path_missing", "model"),
    ],
)
def test_a_path_that_is_there_from_another_folder_is_the_wrong_folder(before, kind, blame):
    session = Session()
    for command, output in before:
        session.call("Bash", output, command=command)
    missing = "Exit code 1\ncat: store/save.py: No such file or directory"
    session.call("Bash", missing, is_error=True, command="cat store/save.py")
    site = find_error_sites(_conversation_in(session, "/repo"))[-1]
    assert (site.kind, site.blame) == (kind, blame)


def test_a_folder_that_the_shell_already_stands_in():
    session = Session()
    text = "Exit code 1\n# ./store\nstat /repo/store/store: directory not found\nFAIL\t./store [setup failed]"
    session.call("Bash", text, is_error=True, command="go test ./store 2>&1")
    site = _last(session)
    assert (site.kind, site.blame) == ("wrong_folder", "model")


@pytest.mark.parametrize(
    ("command", "text", "between", "blame"),
    [
        ("gh pr merge 7", "GraphQL: merging is blocked", None, "model"),
        ("gh pr merge 7", "GraphQL: merging is blocked", "user", "task"),
        ("gh pr merge 7", "GraphQL: merging is blocked", "call", "task"),
        ("gh pr checks 7", "test\tfail", None, "task"),
        ("pytest", "1 failed", None, "task"),
        ("curl -f http://h/", "curl: (6) Could not resolve host: h", None, "env"),
    ],
)
def test_the_same_call_again_with_nothing_in_between_is_the_models(command, text, between, blame):
    session = Session()
    session.call("Bash", f"Exit code 1\n{text}", is_error=True, command=command)
    if between == "user":
        session.user("try again")
    elif between == "call":
        session.call("Bash", "", command="git fetch")
    session.call("Bash", f"Exit code 1\n{text}", is_error=True, command=command)
    first, second = find_error_sites(session.conversation())
    assert (first.blame, second.blame) == ("env" if blame == "env" else "task", blame)


@pytest.mark.parametrize(
    ("tool", "text", "kind", "blame"),
    [
        ("Task", "Agent type 'explorer' not found. Available agents: Explore, Plan", "input_validation", "model"),
        ("Skill", "<tool_use_error>Unknown skill: deploy</tool_use_error>", "input_validation", "model"),
        ("StructuredOutput", "Output does not match required schema: /x: must be array", "input_validation", "model"),
        ("WebFetch", "Request failed with status code 404", "other", "unknown"),
        ("WebFetch", "Request failed with status code 503", "network", "env"),
        ("Grep", "rg: unrecognized file type: golang", "input_validation", "model"),
        ("Grep", "rg: error parsing glob '{a': unclosed alternate group; missing '}'", "input_validation", "model"),
        ("Glob", "<tool_use_error>Path is not a directory: /r/x.go</tool_use_error>", "input_validation", "model"),
        (
            "Read",
            '<tool_use_error>Invalid pages parameter: "9-". Pages are 1-indexed.</tool_use_error>',
            "input_validation",
            "model",
        ),
        (
            "Read",
            '<tool_use_error>Page range "1-90" exceeds maximum of 20 pages.</tool_use_error>',
            "input_validation",
            "model",
        ),
        ("Write", "<tool_use_error>File path must be absolute</tool_use_error>", "input_validation", "model"),
        ("WebSearch", "Error: Cannot specify both allowed_domains and blocked_domains", "input_validation", "model"),
        ("BashOutput", "<tool_use_error>No shell found with ID: a1</tool_use_error>", "other", "unknown"),
    ],
)
def test_what_a_tool_does_not_offer_is_told_from_what_it_could_not_do(tool, text, kind, blame):
    verdict = classify(tool, {}, text, True)
    assert (verdict.kind, verdict.blame) == (kind, blame)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("git commit -m x", "Exit code 1\nsrc/{}.go is not formatted\n"),
        ("deploy", "PreToolUse:Bash hook error: {}: code is not formatted, run the formatter first"),
    ],
)
def test_what_a_gate_refuses_a_second_time_is_a_convention_that_was_not_kept(command, text):
    session = Session()
    for name in ("a1", "b2"):
        session.call("Bash", text.format(name), is_error=True, command=command)
        session.call("Bash", "", command=f"touch {name}")
    first, second = find_error_sites(session.conversation())
    assert not first.is_kept
    assert (second.kind, second.is_kept) == ("hook_blocked", True)


def test_another_refusal_is_not_the_second_of_its_kind():
    session = Session()
    session.call("Bash", "PreToolUse:Bash hook error: no force pushes", is_error=True, command="git push -f")
    session.call("Bash", "PreToolUse:Bash hook error: run the formatter first", is_error=True, command="git push")
    assert not any(site.is_kept for site in find_error_sites(session.conversation()))


# Written by hand after the agents' envelopes: there is no log of such a failure among the fixtures.
AGENTS = [
    (
        "exec_command",
        {"cmd": "cat src/a.py"},
        "Chunk ID: a1\nWall time: 0.1 seconds\nProcess exited with code 1\nOriginal token count: 9\nOutput:\n"
        "cat: src/a.py: No such file or directory\n",
        "shell_path_missing",
    ),
    (
        "run_shell_command",
        {"command": "cat src/a.py"},
        "Command: cat src/a.py\nDirectory: (root)\nStdout: (empty)\nStderr: cat: src/a.py: No such file or directory\n"
        "Error: (none)\nExit Code: 1\nSignal: (none)",
        "shell_path_missing",
    ),
    (
        "run_shell_command",
        {"command": "cat src/a.py"},
        "Command: cat src/a.py\nDirectory: (root)\nOutput: (empty)\nError: cat: src/a.py: No such file or directory\n"
        "Exit Code: 1",
        "shell_path_missing",
    ),
    ("run_ipython", {"code": "open_file('src/a.py')"}, "ERROR: File src/a.py not found.", "file_not_found"),
]


@pytest.mark.parametrize(("tool", "arguments", "text", "kind"), AGENTS, ids=[each[0] for each in AGENTS])
def test_a_tool_that_states_the_exit_code_needs_no_flag(tool, arguments, text, kind):
    session = Session()
    session.call(tool, text, **arguments)
    (site,) = find_error_sites(session.conversation())
    assert (site.kind, site.blame, site.is_kept) == (kind, "model", True)


def test_an_exit_code_that_a_command_printed_is_not_the_tools_word():
    printed = "line\n" * 30 + "Exit code: 1\ncat: src/a.py: No such file or directory\n" + "line\n" * 30
    session = Session()
    session.call("exec_command", printed, cmd="sh -c 'cat src/a.py'; seq 30")
    assert not any(site.is_kept for site in find_error_sites(session.conversation()))
