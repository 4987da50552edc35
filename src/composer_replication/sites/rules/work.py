"""Failures that are the work itself: tests, linters, compilers, programs. Found anywhere in a shell's output."""

from __future__ import annotations

import re

from composer_replication.actions.shell.command import Command
from composer_replication.sites.rule import FailureRule, rule

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
