"""Rules for tools that read, search and change files, for other tools, and for failed work in a shell.

Messages from tools are searched only at the start of the result, since a file may contain any text further down. A
shell's output is searched line by line for failed tests, checks, builds and programs.
"""

from __future__ import annotations

import re

from composer_replication.sites.actions.shell_command import AGENT_COMMANDS, Command
from composer_replication.sites.rule import FailureRule, rule

EDITS: tuple[FailureRule, ...] = (
    # "File has not been read yet. Read it first before writing to it."; not "I read the file"
    rule(
        "edit_not_read",
        r".{0,200}(?:has not been read|hasn't been read|must (?:first )?(?:be )?read (?:the file )?(?:first|before)"
        r"|must (?:first )?read .{0,200}(?:before|first)"
        r"|must use (?:the )?\w{0,20} ?(?:tool )?(?:to read )?.{0,40}(?:first|before (?:edit|writ|overwrit)))",
        *("read", "must use"),
        channels="file",
        where="start",
        confidence=0.98,
    ),
    # "File has been modified since it was read, either by the user or by a linter."; not "modified 2 files"
    rule(
        "edit_stale",
        r".{0,200}(?:(?:modified|changed|updated|edited)(?: on disk| externally)? since (?:it was |you |the |last "
        r"|being )?"
        r"(?:last )?(?:read|view|open)|(?:unexpectedly|externally) modified|has changed (?:on disk )?since"
        r"|stale (?:read|content|version))",
        *("since", "modified", "stale"),
        channels="file",
        where="start",
        confidence=0.95,
    ),
    # "Found 3 matches of the string to replace, but replace_all is false"; not "Found 1 matches"
    rule(
        "edit_ambiguous",
        r".{0,200}(?:found (?:[2-9]|\d\d+) (?:matches|occurrences)|multiple (?:occurrences|matches)|(?:is"
        r"|are) not unique"
        r"|must be unique|expected (?:1|one|exactly one) (?:occurrence|match|replacement)s?,? but found (?:[2-9]|\d\d+)"
        r"|(?:appears|occurs|found|matched|matches) (?:[2-9]|\d\d+|multiple|several|more than one) (?:times|places"
        r"|locations|spots)"
        r"|appears (?:more than once|multiple times)|matches more than one)",
        *("found", "multiple", "unique", "appears", "occurs", "match", "times"),
        channels="file",
        where="start",
        confidence=0.97,
    ),
    # "No changes to make: old_string and new_string are exactly the same."; not "12 changes made"
    rule(
        "edit_noop",
        r".{0,200}(?:no changes? (?:to make|to apply|were made|would be made|needed|detected|made)"
        r"|old_?str(?:ing)? (?:and|is) .{0,40}(?:the same|identical|equal)|(?:exactly|are) (?:the same|identical)"
        r"|must be different|identical to (?:the )?(?:old|existing|current|new)|(?:is|are) (?:identical|the same as)"
        r"|(?:would|did) not change (?:the file|anything)|new content is (?:the same|identical))",
        *("no change", "same", "identical", "must be different", "not change", "equal"),
        channels="file",
        where="start",
        confidence=0.96,
    ),
    # apply_patch, also when run by a shell: "Failed to read file to update a.py: No such file or directory"
    rule(
        "file_not_found",
        r".{0,80}Failed to read (?:the )?file to update",
        "failed to read",
        channels="file shell",
        where="start",
        confidence=0.95,
    ),
    # "String to replace not found in file."; "Hunk #2 FAILED at 14."; not "Hunk #2 succeeded at 14"
    rule(
        "edit_no_match",
        r"(?:Text|Cell)\b.{0,100} not found|Text not found|.{0,200}(?:string to replace not found"
        r"|old_?str(?:ing)?\b.{0,80}(?:not found|does not (?:exist|appear|match))"
        r"|did not appear verbatim|failed to find (?:expected lines|context|the)|(?:could not|cannot|can't|couldn't"
        r"|unable to|failed"
        r" to) (?:find|locate|match) (?:the |a |any )?(?:exact |matching )?(?:string|text|match|context|lines?|search"
        r"|old|block|hunk|snippet|target)"
        r"|no (?:\w+ ){0,3}match(?:es)? (?:was |were )?found|0 occurrences|search (?:block|text|string|pattern)"
        r" (?:was )?not found|no replacement (?:was )?(?:performed|made)|invalid context|hunk #?\d+ (?:FAILED|failed"
        r"|does not apply)"
        r"|apply_patch verification failed|patch (?:does not|did not|failed to|cannot be) appl"
        r"|failed to apply (?:the )?"
        r"(?:patch|edit|diff|hunk)|not found in (?:the )?(?:file|content))",
        *("not found", "verbatim", "find", "locate", "match", "0 occurrences", "replacement", "context"),
        *("hunk", "appl"),
        channels="file",
        where="start",
        confidence=0.96,
    ),
)
# The tool itself is broken, whatever it was called with.
TOOL_FAULTS: tuple[FailureRule, ...] = (
    # "Error: spawn /usr/bin/rg ENOENT"; "The kernel died"
    rule(
        "other",
        r".{0,200}(?:\bspawn\b|posix_spawn|uv_cwd|kernel|index(?:ed|ing)?\b|apply model|pdftoppm)",
        *("spawn", "uv_cwd", "kernel", "index", "apply model", "pdftoppm"),
        channels="file",
        where="start",
        blame="harness",
        confidence=0.7,
    ),
    # "connect ECONNREFUSED 127.0.0.1:9000"
    rule(
        "network",
        r".{0,200}\b(?:ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENOTFOUND|EHOSTUNREACH)\b",
        *("econn", "etimedout", "enotfound", "ehostunreach"),
        channels="file",
        where="start",
    ),
)
# Patches applied by a shell command.
PATCHES: tuple[FailureRule, ...] = (
    # "apply_patch verification failed: Failed to find expected lines in a.py"; "Hunk #1 FAILED at 3."
    rule(
        "edit_no_match",
        r"^.{0,80}(?:apply_patch verification failed|Failed to find (?:expected lines|context)|Invalid Context"
        r"|error: patch failed: |error: .{1,200}: patch does not apply|Hunk #\d+ FAILED at)",
        *("apply_patch", "failed to find", "invalid context", "patch failed", "does not apply", "hunk"),
        channels="shell",
        confidence=0.85,
        accept=lambda _, command: any(
            word in command.text for word in ("apply_patch", "git apply", "patch ", "git am")
        ),
    ),
    # File functions called in a Python cell: "ERROR: File src/a.py not found" -> "src/a.py"
    rule(
        "file_not_found",
        r"^(?:\[?ERROR: )?File (\S{1,300}?) (?:not found|does not exist)",
        "file",
        channels="shell",
        confidence=0.85,
        accept=lambda match, command: (
            match[1] in command.text and ("ERROR" in match[0] or any(map(command.calls, AGENT_COMMANDS)))
        ),
    ),
    # The same functions, failing to replace text: "ERROR: No match found"; not "No match found"
    rule(
        "edit_no_match",
        r"^\[?ERROR: .{0,80}(?:No match found|to_replace|did not appear)",
        "error: ",
        channels="shell",
        confidence=0.85,
        accept=lambda _, command: "edit_file" in command.text or "replace" in command.text,
    ),
)
READS: tuple[FailureRule, ...] = (
    # "EACCES: permission denied, open '/etc/shadow'"
    rule(
        "os_permission",
        r".{0,300}(?:EACCES|EPERM|EROFS|permission denied|operation not permitted|access is denied"
        r"|read-only file system)",
        *("eacces", "eperm", "erofs", "denied", "not permitted", "read-only"),
        channels="file",
        where="start",
    ),
    # "Ripgrep search timed out after 20 seconds"; not "timeouts are set to 5"
    rule(
        "timeout",
        r".{0,200}(?:\btimed out\b|\btimeout (?:of|after|exceeded|\d)|\bTimeoutError\b|ETIMEDOUT)",
        *("timed out", "timeout", "time out", "etimedout"),
        channels="file other",
        where="start",
    ),
    # "ENOSPC: no space left on device, write"
    rule(
        "other",
        r".{0,200}(?:ENOSPC|no space left|EMFILE|ENOMEM|too many open files|EBUSY|EIO\b|out of memory)",
        *("enospc", "no space", "emfile", "enomem", "too many open", "ebusy", "eio", "out of memory"),
        channels="file",
        where="start",
        blame="env",
    ),
    # "File content (30000 tokens) exceeds maximum allowed tokens (25000)."; not "The prompt for this file is too long"
    rule(
        "output_too_large",
        r"(?!.{0,80}(?:took|prompt|rate|usage|quota|name) ).{0,120}\b(?:output|results?|response|content|file|lines?"
        r"|image|PDF)\b"
        r".{0,120}(?:exceeds? (?:the )?(?:\S{1,12} )?(?:maximum|max|limit|token|size|allowed)|too (?:large|long|big)"
        r"|larger than (?:the )?(?:maximum|allowed|limit))|.{0,60}too many (?:results|files|matches)",
        *("exceed", "too large", "too long", "too big", "too many", "larger than"),
        channels="file other",
        where="start",
        confidence=0.95,
    ),
    # "EISDIR: illegal operation on a directory, read"; "src is a directory"
    rule(
        "is_directory",
        r".{0,300}(?:EISDIR|is a directory|is a folder|not a (?:regular )?file\b|path is a directory"
        r"|cannot read a directory)",
        *("eisdir", "directory", "folder", "not a file", "regular file"),
        channels="file",
        where="start",
        confidence=0.95,
    ),
    # "File does not exist."; "ENOENT: no such file or directory, open 'a.py'"; not "filed under other"
    rule(
        "file_not_found",
        r".{0,300}(?:(?:file|path|directory|folder|notebook)\b.{0,200}(?:does not exist|doesn't exist|not found"
        r"|could not be found"
        r"|cannot be found|is missing)|ENOENT|no such file|(?:file|path|directory) not found"
        r"|cannot find (?:the )?(?:file|path)"
        r"|invalid .?path.? parameter|not found: /)",
        *("not exist", "n't exist", "not found", "enoent", "no such file", "be found", "cannot find", "path"),
        channels="file",
        where="start",
        confidence=0.94,
    ),
)
# Tools that are neither shells nor file tools. Their messages are too diverse to blame the model.
OTHER_TOOLS: tuple[FailureRule, ...] = (
    # "MCP server github is not connected"
    rule(
        "other",
        r".{0,120}(?:server .{0,60}(?:not connected|disconnected|not running|failed to start)|not enabled for"
        r"|is not authenticated)",
        *("not connected", "disconnected", "not running", "failed to start", "not enabled", "authenticated"),
        channels="other",
        where="start",
        blame="harness",
    ),
    # A diagnostic from a language server: `[{"severity": 1, "message": "unused import"}]`
    rule(
        "lint_or_typecheck",
        r".{0,200}\"(?:diagnostics|severity)\"\s*:",
        *('"diagnostics"', '"severity"'),
        channels="other",
        where="start",
        confidence=0.7,
    ),
    # "fetch failed"; "Request failed with status code 503"; not "status: done"
    rule(
        "network",
        r".{0,300}(?:ECONNREFUSED|ECONNRESET|ENOTFOUND|EAI_AGAIN|ETIMEDOUT|fetch failed|network error"
        r"|connection (?:refused|reset"
        r"|closed|error|failed|lost|timed out)|could not (?:connect|resolve)|unable to (?:connect|reach)"
        r"|failed to connect"
        r"|socket hang up|rate limit|too many requests|quota|service unavailable|bad gateway|gateway timeout|overloaded"
        r"|(?:status(?: code)?:? ?|HTTP(?:/[\d.]+)? ?|error:? )(?:40[138]|429|5\d\d)\b|unauthorized|forbidden)",
        *("econn", "enotfound", "eai_again", "etimedout", "fetch failed", "network", "connect", "resolve"),
        *("socket", "limit", "requests", "quota", "unavailable", "gateway", "overloaded", "status", "http"),
        *("error", "unauthorized", "forbidden"),
        channels="other",
        where="start",
    ),
)


# ---- The work itself: failed tests, linters, compilers and programs, anywhere in a shell's output --------------------

TESTS: tuple[FailureRule, ...] = (
    # Lines printed by test runners: "FAILED tests/test_a.py::test_b"; "--- FAIL: TestParse (0.00s)"; "not ok 3 parses";
    # not "0 failed"
    rule(
        "test_failure",
        r"^FAILED\b|^FAIL\b[:\s]|^FAIL$|^--- FAIL:|^\s*(?:FAILED|ERROR) \S+::|^not ok \d|test result: FAILED|^FAILURES!"
        r"|^=+ (?:FAILURES|ERRORS) =+|\bFAILED \((?:failures|errors)=\d|\bTEST FAILED\b|^E\s{3,}\S"
        r"|^\s*Test(?: Suite)?s?(?: Files)?:?\s.{0,80}\b[1-9]\d* failed|^(?:ℹ|#) fail [1-9]|Failed: +[1-9]\d*, +Passed"
        r"|^There (?:was|were) [1-9]\d* (?:failure|error)s?:|^\s*[✗✕×✖]\s(?!\d+ problem)",
        *("fail", "not ok", "e  ", "error", "✗", "✕", "×", "✖", "there w"),
        channels="shell",
        ignore_case=False,
    ),
    # The summary: "3 failed, 12 passed"; "failures: 2"; not "0 failed, 12 passed"; not "port 8 failed"
    rule(
        "test_failure",
        r"(?<!port )\b[1-9]\d* (?:(?:tests?|specs?|scenarios?|examples?|suites?) )?(?:failed|failing|failures?)\b"
        r"|failures?: ?[1-9]\d*\b|tests run: ?\d+.{0,40}(?:failures|errors): ?[1-9]|[1-9]\d* errors? during collection"
        r"|(?:tests?|specs?) failed\b|[1-9]\d* (?:tests?|assertions?).{0,40}, [1-9]\d* failures?",
        *("fail", "errors:", "during collection"),
        channels="shell",
        confidence=0.85,
        # "1 expected failures" is a pass. "1 xfailed" does not match, nor does "port 8080 failed" to connect.
        accept=lambda match, _: "expected" not in match[0],
    ),
    # "AssertionError: 1 != 2"; "thread 'main' panicked at src/lib.rs:3"
    rule(
        "test_failure",
        r"\bAssertionError\b|\bassert(?:ion)? .{0,60}failed|panicked at",
        *("assert", "panicked"),
        channels="shell",
        confidence=0.8,
    ),
)
CHECKS: tuple[FailureRule, ...] = (
    # "a.ts(3,1): error TS2304: Cannot find name 'x'."; "a.py:3:1: F401 unused import"; "Found 2 errors";
    # not "Found 0 errors"
    rule(
        "lint_or_typecheck",
        r"error TS\d{3,5}|^\S+:\d+:\d+:? [A-Z]{1,4}\d{2,4}\b|\bSC\d{4}\b|^\s*(?:\[ERROR\] )?Found [1-9]\d* (?:errors?"
        r"|issues?|problems?)"
        r"|^\S+:\d+(?::\d+)?: (?:error|note|warning): .*\[[\w-]+\]\s*$|[✖×] [1-9]\d* problems?(?! \(0 errors)"
        r"|^\s*\d+:\d+\s+error\s|would (?:be )?reformat|Code style issues|[1-9]\d* offenses? detected"
        r"|^[1-9]\d* errors?, \d+ warnings?|not formatted|Code Readability|Software Design|^- hook id:|clippy::"
        r"|found [1-9]\d* (?:refactoring|design|readability|consistency|warning|code)|pattern_match|can never match"
        r"|^Your code has been rated|proposed edit has introduced|^- E\d{3} |^[\w./-]+\.\w+:\d+: error: ",
        *("error", "warning", "problem", "reformat", "style", "offense", "issue", "format", "credo"),
        *("dialyzer", "readability", "design", "hook id", "clippy", "golangci", "rated", "lint", "mypy"),
        *("pyright", "rubocop", "found ", "pattern", "never match", "proposed edit", ": e", ": w", ": f"),
        *(": c", ": b", ": n", ": d", ": s", ": r", ": u", ": i", "sc1", "sc2"),
        channels="shell",
        ignore_case=False,
        confidence=0.85,
    ),
)
_ERROR = r"(?:error|Fehler|erreur|エラー|错误|오류|ошибка)"
BUILDS: tuple[FailureRule, ...] = (
    # "a.c:3:1: error: expected ';'"; "main.go:3:1: undefined: x"; "error[E0308]: mismatched types"
    rule(
        "compile_error",
        rf"\bSyntaxError\b|\bIndentationError\b|error\[E\d{{3,5}}\]|:\d+(?::\d+)?: (?:fatal "
        rf"|schwerwiegender )?{_ERROR} ?[:：]"
        r"|^error: (?:could not compile|aborting due|expected|cannot find|linking)|^\S+\.go:\d+:\d+: |error CS\d{4}"
        r"|\berror C\d{4}|cannot find symbol|undefined reference to|compil(?:e|ation) (?:error|failed)"
        r"|failed to compile"
        r"|BUILD FAIL(?:ED|URE)|\bCompileError\b|\bTokenMissingError\b|^ERROR in |Module build failed"
        r"|Module not found: "
        r"|Parse error|^✘ \[ERROR\]|Could not resolve \"|ninja: build stopped|error during build"
        r"|failed to resolve import"
        r"|error: linker|^# [\w./-]+/[\w.-]+$",
        *("error", "fehler", "erreur", "エラー", "错误", "오류", "ошибка", "cannot find symbol"),
        *("undefined reference", "compil", "build", "module", ".go:", "could not resolve"),
        *("failed to resolve", "# "),
        channels="shell",
        confidence=0.85,
    ),
)


def _is_foreign_package(match: re.Match[str], command: Command) -> bool:
    """Return whether a missing module is an external package: project modules appear in the paths or in the command."""
    name = next((group for group in match.groups() if group), "").strip("'\"").partition(".")[0]
    if not name:
        return True
    # For the module parser: "src/parser/lex.py"; "python parser.py"; not "import parser"
    project_path = re.compile(rf"(?:^|[/\s\"'.]){re.escape(name)}(?:/|\.py\b|\.\w)")
    return project_path.search(command.text) is None and project_path.search(match.string[: match.start()]) is None


# The run could not start because a package is not installed, so the machine is the cause, not the work.
NOT_INSTALLED: tuple[FailureRule, ...] = (
    # "/usr/bin/python3: No module named pytest" -> "pytest"; not "ModuleNotFoundError: No module named 'pytest'"
    rule(
        "nonzero_exit",
        r"(?:^|/)python[\d.]*: No module named (\S{1,80})",
        "no module named",
        channels="shell",
        blame="env",
    ),
    # "ImportError: No module named yaml" -> "yaml"; "Error: Cannot find module 'left-pad'" -> "left-pad";
    # not "Error: Cannot find module './local'"
    rule(
        "python_exception",
        r"(?:ModuleNotFoundError|ImportError): No module named (\S{1,80})|^Error: Cannot find (?:module"
        r"|package) '([^./][^']{0,80})'"
        r"|cannot load such file -- (\S{1,80})|ClassNotFoundException",
        *("modulenotfound", "importerror", "cannot find module", "cannot find package", "cannot load"),
        "classnotfound",
        channels="shell",
        blame="env",
        confidence=0.75,
        accept=_is_foreign_package,
    ),
    # "browserType.launch: Executable doesn't exist at /ms-playwright"; "Please run npm install"
    rule(
        "nonzero_exit",
        r"Executable doesn't exist at|dependency is not available|SDK location not found|Please run .{0,40}install"
        r"|in locally installed gems|is not installed\b|have you run .{0,20}install|Unchecked dependencies"
        r"|missing dependencies",
        *("executable", "dependenc", "sdk location", "install", "gems"),
        channels="shell",
        blame="env",
        confidence=0.75,
    ),
)
PROGRAMS: tuple[FailureRule, ...] = (
    # Checkers named in a failure. A successful checker is named too, so this alone does not prove a failure.
    # "error Command failed: eslint ."
    rule(
        "lint_or_typecheck",
        r"\b(?:credo|dialyzer|golangci|ESLint|eslint|mypy|pylint|pyright|rubocop|stylelint)\b",
        *("credo", "dialyzer", "golangci", "lint", "mypy", "pyright", "rubocop"),
        channels="shell",
        ignore_case=False,
        confidence=0.6,
    ),
    # "Traceback (most recent call last):"; "ValueError: bad input"; "panic: runtime error"; not "no panic"
    rule(
        "python_exception",
        r"Traceback \(most recent call last\)|^\s+at .{1,200}[(:]\d+:\d+\)?$|Exception in thread \"|^panic: "
        r"|thread '.{1,80}' panicked|^Unhandled |^Uncaught |UnhandledPromiseRejection|^Fatal error: "
        r"|^(?:[\w.]+\.)?[A-Z]\w+(?:Error|Exception): ",
        *("traceback", "   at ", "exception", "panic", "unhandled", "uncaught", "fatal error", "error: "),
        channels="shell",
        ignore_case=False,
        confidence=0.85,
    ),
    # "Segmentation fault (core dumped)"; "make: *** [Makefile:3: all] Error 1"
    rule(
        "nonzero_exit",
        r"Segmentation fault|core dumped|^g?make(?:\[\d+\])?: \*\*\* ",
        *("segmentation", "core dumped", "make"),
        channels="shell",
        confidence=0.7,
    ),
)
