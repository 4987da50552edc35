"""Results of other agents than Claude Code, written by hand in the shape that each agent's tools print.

There is no real log of such failures among the fixtures. A row is (agent, tool, arguments, text, flag, kind, blame);
`table` counts by kind and agent how many the rules get right.
"""

from __future__ import annotations

from collections import Counter

from composer_replication.sites.classify import classify


def _codex(output: str, code: int = 1) -> str:
    head = f"Chunk ID: a41f3c\nWall time: 0.0512 seconds\nProcess exited with code {code}\nOriginal token count: 12"
    return f"{head}\nOutput:\n{output}"


def _gemini(command: str, stderr: str, code: int = 1) -> str:
    return (
        f"Command: {command}\nDirectory: (root)\nStdout: (empty)\nStderr: {stderr}\nError: (none)\nExit Code: {code}\n"
        "Signal: (none)\nBackground PIDs: (none)\nProcess Group PGID: 4242"
    )


def _mini(output: str, code: int = 1) -> str:
    return f"<returncode>{code}</returncode>\n<output>\n{output}\n</output>"


def _swe(output: str) -> str:
    return f"{output}\n(Open file: n/a)\n(Current directory: /testbed)\nbash-$"


_SHELL_FAILURES = [
    # command, what it printed, code, kind, blame
    ("cat src/a.py", "cat: src/a.py: No such file or directory", 1, "shell_path_missing", "model"),
    ("cd srcc && ls", "bash: line 1: cd: srcc: No such file or directory", 1, "shell_path_missing", "model"),
    ("gh pr diff 4 --stat", "unknown flag: --stat\n\nUsage:  gh pr diff", 1, "usage_error", "model"),
    ("echo 'a", "bash: -c: line 1: unexpected EOF while looking for matching `''", 2, "shell_syntax", "model"),
    ("rg -n main src", "bash: line 1: rg: command not found", 127, "cmd_not_found", "model"),
    ("git comit -m x", "git: 'comit' is not a git command. See 'git --help'.", 1, "usage_error", "model"),
    ("git switch nope", "fatal: invalid reference: nope", 128, "git_state", "model"),
    ("pytest -q", "1 failed, 2 passed in 0.10s", 1, "test_failure", "task"),
    ("ruff check .", "a.py:1:1: F401 `os` imported but unused\nFound 1 error.", 1, "lint_or_typecheck", "task"),
    ("curl https://api.host.dev", "curl: (6) Could not resolve host: api.host.dev", 6, "network", "env"),
    ("./app --brief", "unknown flag: --brief", 1, "nonzero_exit", "task"),
    ("ls src/lib", "ls: cannot access 'src/lib': No such file or directory", 2, "shell_path_missing", "task"),
]
ROWS = [
    row
    for command, output, code, kind, blame in _SHELL_FAILURES
    for row in [
        ("Codex", "exec_command", {"cmd": command}, _codex(output, code), None, kind, blame),
        (
            "Codex",
            "shell",
            {"command": ["bash", "-lc", command]},
            f"Exit code: {code}\nWall time: 0.1 seconds\nOutput:\n{output}\n",
            None,
            kind,
            blame,
        ),
        ("Gemini CLI", "run_shell_command", {"command": command}, _gemini(command, output, code), False, kind, blame),
        (
            "OpenHands",
            "execute_bash",
            {"command": command},
            f"{output}\n[The command completed with exit code {code}.]\n[Current working directory: /r]",
            True,
            kind,
            blame,
        ),
        ("mini-swe-agent", "bash", {"command": command}, _mini(output, code), None, kind, blame),
    ]
] + [
    (
        "Codex",
        "apply_patch",
        {"input": "*** Begin Patch"},
        "apply_patch verification failed: Failed to find expected lines in /r/a.py:\n  x",
        None,
        "edit_no_match",
        "model",
    ),
    (
        "Codex",
        "update_plan",
        {},
        "failed to parse function arguments: missing field `plan` at line 1 column 2",
        None,
        "input_validation",
        "model",
    ),
    ("Codex", "read_files", {}, "unsupported call: read_files", None, "tool_not_found", "model"),
    (
        "Gemini CLI",
        "replace",
        {"file_path": "/r/a.py"},
        "Failed to edit, could not find the string to replace.",
        True,
        "edit_no_match",
        "model",
    ),
    (
        "Gemini CLI",
        "replace",
        {"file_path": "/r/a.py"},
        "Failed to edit, Expected 1 occurrence but found 2.",
        True,
        "edit_ambiguous",
        "model",
    ),
    (
        "Gemini CLI",
        "read_file",
        {"absolute_path": "/r/b.py"},
        "File not found: /r/b.py",
        True,
        "file_not_found",
        "model",
    ),
    (
        "Gemini CLI",
        "read_file",
        {},
        "params must have required property 'absolute_path'",
        True,
        "input_validation",
        "model",
    ),
    (
        "Gemini CLI",
        "write_file",
        {"file_path": "/r/a.py"},
        "[Operation Cancelled] Reason: User did not allow tool call",
        True,
        "user_rejected",
        "user",
    ),
    (
        "OpenHands",
        "run_ipython",
        {"code": "open_file('src/a.py')"},
        "ERROR: File src/a.py not found.",
        None,
        "file_not_found",
        "model",
    ),
    (
        "OpenHands",
        "run_ipython",
        {"code": "edit_file_by_replace('a.py', to_replace='x', new_content='y')"},
        "ERROR: No match found for to_replace in a.py",
        None,
        "edit_no_match",
        "model",
    ),
    (
        "OpenHands",
        "run_ipython",
        {"code": "print('a'"},
        "  Cell In[3], line 1\n    print('a'\n             ^\nSyntaxError: incomplete input\n",
        None,
        "shell_syntax",
        "model",
    ),
    (
        "OpenHands",
        "run_ipython",
        {"code": "!rg x src"},
        "/bin/bash: line 1: rg: command not found\n",
        None,
        "cmd_not_found",
        "model",
    ),
    (
        "OpenHands",
        "run_ipython",
        {"code": "df.summ()"},
        "-----\nAttributeError       Traceback (most recent call last)\nCell In[2], line 1\n----> 1 df.summ()",
        None,
        "python_exception",
        "task",
    ),
    (
        "OpenHands",
        "str_replace_editor",
        {"command": "str_replace", "path": "/r/a.py"},
        "ERROR:\nNo replacement was performed, old_str `x` did not appear verbatim in /r/a.py.",
        None,
        "edit_no_match",
        "model",
    ),
    (
        "SWE-agent",
        "bash",
        {"input": "cat src/a.py"},
        _swe("cat: src/a.py: No such file or directory"),
        None,
        "shell_path_missing",
        "model",
    ),
    ("SWE-agent", "bash", {"input": "rg x src"}, _swe("bash: rg: command not found"), None, "cmd_not_found", "model"),
    ("SWE-agent", "bash", {"input": "open src/a.py"}, _swe("File src/a.py not found"), None, "file_not_found", "model"),
    (
        "SWE-agent",
        "bash",
        {"input": "edit 3:1\nx\nend_of_edit"},
        _swe("Usage: edit <start_line>:<end_line>"),
        None,
        "usage_error",
        "model",
    ),
    ("SWE-agent", "open", {"path": "src/a.py"}, "File src/a.py not found", None, "file_not_found", "model"),
    (
        "SWE-agent",
        "edit",
        {"search": "x", "replace": "y"},
        "Text x not found in displayed lines. Please modify your search string.",
        None,
        "edit_no_match",
        "model",
    ),
    (
        "SWE-agent",
        "bash",
        {"input": "edit 3:3\nx(\nend_of_edit"},
        _swe("Your proposed edit has introduced new syntax error(s). Please read on.\n\nERRORS:\n- E999 SyntaxError"),
        None,
        "lint_or_typecheck",
        "task",
    ),
    (
        "SWE-agent",
        "bash",
        {"input": "python -m pytest"},
        _swe("1 failed, 2 passed in 0.10s"),
        None,
        "test_failure",
        "task",
    ),
]


def judged():
    """Each row with what the rules say of it: kind and blame."""
    for row in ROWS:
        _, tool, arguments, text, flag, _, _ = row
        verdict = classify(tool, arguments, text, flag)
        yield row, (verdict.kind, verdict.blame)


def table():
    """Right of all, by kind and agent, as lines of Markdown."""
    right, total = Counter(), Counter()
    for (agent, _, _, _, _, kind, blame), found in judged():
        total[kind, agent] += 1
        right[kind, agent] += found == (kind, blame)
    agents, kinds = (sorted({each[place] for each in total}) for place in (1, 0))
    cells = {key: f"{right[key]} of {number}" for key, number in total.items()}
    lines = [f"| kind | {' | '.join(agents)} |", "|---|" + "---|" * len(agents)]
    return lines + [f"| {kind} | {' | '.join(cells.get((kind, agent), '') for agent in agents)} |" for kind in kinds]
