"""Messages of tools that read, find and change files, and of tools that do something else altogether.

They are looked for at the start of the result: what a file holds further down is not a message.
"""

from __future__ import annotations

import re

from composer_replication.sites.actions.shell_command import AGENT_COMMANDS, Command
from composer_replication.sites.rule import FailureRule, rule

EDITS: tuple[FailureRule, ...] = (
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
    rule(
        "file_not_found",
        r".{0,80}Failed to read (?:the )?file to update",
        "failed to read",
        channels="file shell",
        where="start",
        confidence=0.95,
    ),
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
# What broke behind the tool.
FAULTS: tuple[FailureRule, ...] = (
    rule(
        "other",
        r".{0,200}(?:\bspawn\b|posix_spawn|uv_cwd|kernel|index(?:ed|ing)?\b|apply model|pdftoppm)",
        *("spawn", "uv_cwd", "kernel", "index", "apply model", "pdftoppm"),
        channels="file",
        where="start",
        blame="harness",
        confidence=0.7,
    ),
    rule(
        "network",
        r".{0,200}\b(?:ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENOTFOUND|EHOSTUNREACH)\b",
        *("econn", "etimedout", "enotfound", "ehostunreach"),
        channels="file",
        where="start",
    ),
)
# Patches that were applied through a shell.
PATCHES: tuple[FailureRule, ...] = (
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
    rule(  # functions for files, called in a cell of Python
        "file_not_found",
        r"^(?:\[?ERROR: )?File (\S{1,300}?) (?:not found|does not exist)",
        "file",
        channels="shell",
        confidence=0.85,
        accept=lambda match, command: (
            match[1] in command.text and ("ERROR" in match[0] or any(map(command.calls, AGENT_COMMANDS)))
        ),
    ),
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
    rule(
        "os_permission",
        r".{0,300}(?:EACCES|EPERM|EROFS|permission denied|operation not permitted|access is denied"
        r"|read-only file system)",
        *("eacces", "eperm", "erofs", "denied", "not permitted", "read-only"),
        channels="file",
        where="start",
    ),
    rule(
        "timeout",
        r".{0,200}(?:\btimed out\b|\btimeout (?:of|after|exceeded|\d)|\bTimeoutError\b|ETIMEDOUT)",
        *("timed out", "timeout", "time out", "etimedout"),
        channels="file other",
        where="start",
    ),
    rule(
        "other",
        r".{0,200}(?:ENOSPC|no space left|EMFILE|ENOMEM|too many open files|EBUSY|EIO\b|out of memory)",
        *("enospc", "no space", "emfile", "enomem", "too many open", "ebusy", "eio", "out of memory"),
        channels="file",
        where="start",
        blame="env",
    ),
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
    rule(
        "is_directory",
        r".{0,300}(?:EISDIR|is a directory|is a folder|not a (?:regular )?file\b|path is a directory"
        r"|cannot read a directory)",
        *("eisdir", "directory", "folder", "not a file", "regular file"),
        channels="file",
        where="start",
        confidence=0.95,
    ),
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
# Tools that are neither shell nor files: only what cannot be the model's.
ELSEWHERE: tuple[FailureRule, ...] = (
    rule(
        "other",
        r".{0,120}(?:server .{0,60}(?:not connected|disconnected|not running|failed to start)|not enabled for"
        r"|is not authenticated)",
        *("not connected", "disconnected", "not running", "failed to start", "not enabled", "authenticated"),
        channels="other",
        where="start",
        blame="harness",
    ),
    rule(
        "lint_or_typecheck",
        r".{0,200}\"(?:diagnostics|severity)\"\s*:",
        *('"diagnostics"', '"severity"'),
        channels="other",
        where="start",
        confidence=0.7,
    ),
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


# Failures that are the work itself: tests, linters, compilers, programs. Found anywhere in a shell's output.

TESTS: tuple[FailureRule, ...] = (
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
    rule(
        "test_failure",
        r"(?<!port )\b[1-9]\d* (?:(?:tests?|specs?|scenarios?|examples?|suites?) )?(?:failed|failing|failures?)\b"
        r"|failures?: ?[1-9]\d*\b|tests run: ?\d+.{0,40}(?:failures|errors): ?[1-9]|[1-9]\d* errors? during collection"
        r"|(?:tests?|specs?) failed\b|[1-9]\d* (?:tests?|assertions?).{0,40}, [1-9]\d* failures?",
        *("fail", "errors:", "during collection"),
        channels="shell",
        confidence=0.85,
        # "[==== 1 expected failures" and "1 xfailed" are passes, and so is a sentence about a connection that failed.
        accept=lambda match, _: "expected" not in match[0],
    ),
    rule(
        "test_failure",
        r"\bAssertionError\b|\bassert(?:ion)? .{0,60}failed|panicked at",
        *("assert", "panicked"),
        channels="shell",
        confidence=0.8,
    ),
)
CHECKS: tuple[FailureRule, ...] = (
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


def _is_foreign(match: re.Match[str], command: Command) -> bool:
    """Whether a missing module is somebody else's package: the project's own has its folder in paths and commands."""
    name = next((group for group in match.groups() if group), "").strip("'\"").partition(".")[0]
    own_pattern = re.compile(rf"(?:^|[/\s\"'.]){re.escape(name)}(?:/|\.py\b|\.\w)") if name else None
    return own_pattern is None or (
        own_pattern.search(command.text) is None and own_pattern.search(match.string[: match.start()]) is None
    )


# A run that cannot begin because something is not installed is not the work.
MISSING: tuple[FailureRule, ...] = (
    rule(
        "nonzero_exit",
        r"(?:^|/)python[\d.]*: No module named (\S{1,80})",
        "no module named",
        channels="shell",
        blame="env",
    ),
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
        accept=_is_foreign,
    ),
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
    rule(  # named in what failed; a checker that found nothing is named too, so this alone shows no failure
        "lint_or_typecheck",
        r"\b(?:credo|dialyzer|golangci|ESLint|eslint|mypy|pylint|pyright|rubocop|stylelint)\b",
        *("credo", "dialyzer", "golangci", "lint", "mypy", "pyright", "rubocop"),
        channels="shell",
        ignore_case=False,
        confidence=0.6,
    ),
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
    rule(
        "nonzero_exit",
        r"Segmentation fault|core dumped|^g?make(?:\[\d+\])?: \*\*\* ",
        *("segmentation", "core dumped", "make"),
        channels="shell",
        confidence=0.7,
    ),
)
