"""Commands that could not work as they were typed: options a program does not have, quoting, endpoints, the folder.

They come before the work: a runner that was called wrongly ran nothing. So each message has to be about something that
the command itself says, and to come from a program that everybody has. The project's own program is the work: an
option that it does not have yet is what a run of it is meant to find out.
"""

from __future__ import annotations

import re

from composer_replication.actions.shell.command import FAMILIAR, Command
from composer_replication.sites.rule import FailureRule, rule

_QUOTES = "'\"`‘’“”.,;:)"
_Q = r"['\"`‘“]?"
# What these run is the project's own, or reads options that plugins add.
_RUNS_OTHERS = frozenset(
    {
        ("go", "run"),
        ("cargo", "run"),
        ("npm", "run"),
        ("npm", "start"),
        ("npm", "exec"),
        ("yarn", "run"),
        ("bun", "run"),
    }
    | {("pnpm", "run"), ("uv", "run"), ("poetry", "run"), ("dotnet", "run"), ("mix", "run"), ("docker", "run")}
)
_READS_PLUGINS = frozenset(
    {"pytest", "py.test", "npx", "rails", "mvn", "gradle", "java", "node", "ruby", "php", "make"}
)
_SHELL_SAYS = (
    r"^(?:(?:/\S{0,40}/)?(?:bash|sh|zsh|dash|ksh|fish)(?:: eval)?|-?bash|\(eval\)|eval)(?:: -c)?"
    r"(?:: line \d+|[: ]+\d+)?: "
)


def _is_familiar(command: Command) -> bool:
    """Whether everything it runs is a program that everybody has, and not the one under work."""
    programs = command.programs
    return bool(programs) and all(
        name in FAMILIAR and name not in _READS_PLUGINS and (name, first) not in _RUNS_OTHERS
        for name, first in programs
    )


def _is_typed(match: re.Match[str], command: Command) -> bool:
    """Whether the command says the word that the message complains of."""
    thing = next((each for each in match.groups() if each), "").strip(_QUOTES.replace(".", ""))
    return bool(thing) and thing in command.text


def _is_wrong_use(match: re.Match[str], command: Command) -> bool:
    return _is_familiar(command) and _is_typed(match, command)


def _is_wrong_letter(match: re.Match[str], command: Command) -> bool:
    """A single letter, which stands among others behind one dash."""
    letter = next(each for each in match.groups() if each)
    return _is_familiar(command) and re.search(rf"\s-\w{{0,8}}{re.escape(letter)}", command.text) is not None


def _is_typed_shell(_: re.Match[str], command: Command) -> bool:
    return not command.is_remote


def _is_unquoted(match: re.Match[str], command: Command) -> bool:
    """A word that was not meant as a pattern of files: one that only names files has found none, which is an answer."""
    thing = match[1]
    return thing in command.text and (thing.startswith("-") or any(each in thing for each in "?[=^(#~"))


def _asks_a_service(_: re.Match[str], command: Command) -> bool:
    return command.runs("gh") or command.runs("glab")


def _is_typed_folder(match: re.Match[str], command: Command) -> bool:
    """A package, folder or file that was typed, looked for where the shell stands."""
    looked_for = next(each for each in match.groups() if each).removeprefix("./").rstrip("/.")
    asked = {each.strip("'\"`").removeprefix("./").rstrip("/.") for each in command.text.split()}
    is_there = any(len(each) > 1 and (looked_for == each or looked_for.endswith(f"/{each}")) for each in asked)
    return is_there and _is_familiar(command)


def _shows_its_usage(match: re.Match[str], command: Command) -> bool:
    return _is_familiar(command) and command.calls(match[1]) and "help" not in command.text


def _is_typed_target(match: re.Match[str], command: Command) -> bool:
    return match[1] in command.text.split() and (command.runs("make") or command.runs("gmake"))


def _is_written_inline(_: re.Match[str], command: Command) -> bool:
    """Whether the program stands in the command: handed over with an option, or fed in."""
    return re.search(r"\s-(?:c|e|-eval|-command)\b|<<", command.text) is not None


_OPTION = r"(?P<thing>--?[\w][\w-]{0,60})"
TYPED: tuple[FailureRule, ...] = (
    rule(
        "usage_error",
        rf"(?:unknown|unrecogni[sz]ed|illegal|invalid|bad|unsupported|unexpected"
        rf"|no such) (?:shorthand )?(?:long )?(?:command[- ]line )?"
        rf"(?:option|flag|switch|arguments?|parameter"
        rf"|primary or operator)(?: provided)?(?: --)?s?[:=]?\s{{0,3}}{_Q}{_OPTION}"
        rf"|flag provided but not defined: (?P<flag>-[\w-]{{1,60}})"
        rf"|^\S{{1,40}}: (?P<primary>-[\w-]{{1,40}}): unknown (?:primary|option|predicate)"
        rf"|\bUnknown (?:option|argument)s?: (?P<other>[\w-]{{1,60}})"
        rf"|unknown predicate {_Q}(?P<predicate>-[\w-]{{1,40}})"
        r"|cannot be found that matches parameter name '(?P<shellparameter>\w{1,60})'",
        *("option", "flag", "switch", "argument", "primary", "predicate", "parameter name"),
        channels="shell",
        confidence=0.85,
        accept=_is_wrong_use,
    ),
    rule(
        "usage_error",
        rf"^[\w.+-]{{1,40}}: (?:invalid|illegal|unknown|unrecognized) option:? --? ?{_Q}(\w)\b"
        r"|unknown shorthand flag: '(\w)'|^[\w.+-]{1,40}: illegal line count -- (-?\w)"
        r"|^[\w.+-]{1,40}: -(\w): invalid option",
        *("option", "shorthand", "illegal line"),
        channels="shell",
        confidence=0.85,
        accept=_is_wrong_letter,
    ),
    rule(
        "usage_error",
        rf"unknown (?:sub)?command:? {_Q}([\w:-]{{1,60}})|no such (?:sub)?command:? {_Q}([\w:-]{{1,60}})"
        rf"|unrecognized subcommand {_Q}([\w:-]{{1,60}})"
        rf"|invalid choice: {_Q}([\w:.-]{{1,60}})|unknown json field: {_Q}(\w{{1,60}})"
        rf"|{_Q}([\w:-]{{1,60}}){_Q} is not a \w{{1,20}} command"
        rf"|no task {_Q}([\w:./-]{{1,60}}){_Q} found|task {_Q}([\w:./-]{{1,60}}){_Q} (?:not found"
        rf"|does not exist)|missing script: {_Q}([\w:./-]{{1,60}})"
        r"|named files must (?:all )?be .{1,60}: (\S{1,200})|invalid argument:? ['\"‘]([^'\"’]{1,80})['\"’] for",
        *(
            "command",
            "invalid choice",
            "json field",
            "no task",
            "task ",
            "missing script",
            "named files",
            "invalid argument",
        ),
        channels="shell",
        confidence=0.8,
        accept=lambda match, command: _is_typed(match, command) and (_is_familiar(command) or "cript: " in match[0]),
    ),
    rule(
        "usage_error",
        r"^[\w.+-]{1,40}: (?:missing (?:file )?operand|too (?:many|few) arguments"
        r"|option requires an argument)|accepts (?:at most |between )?\d+ arg\(s\), received"
        r"|requires (?:at least |exactly )?\d+ arg(?:ument)?(?:s|\(s\))?\b"
        r"|^(?:error: )?the following (?:required )?arguments (?:are required|were not provided)"
        r"|^specify only one of|cannot be used with|can't be used together|are mutually exclusive"
        r"|flags in the group \[",
        *(
            "operand",
            "arguments",
            "argument",
            "arg(s)",
            "specify only",
            "used with",
            "used together",
            "mutually",
            "flags in",
        ),
        channels="shell",
        confidence=0.8,
        accept=lambda _, command: _is_familiar(command),
    ),
    rule(
        "shell_syntax",
        _SHELL_SAYS + r".{0,80}(?:syntax error|unexpected EOF|unexpected end of file|parse error|unmatched|unterminated"
        r"|bad substitution|bad pattern|event not found|bad math expression|not a valid identifier"
        r"|unknown file attribute"
        r"|bad option|conditional|read-only variable|missing end|unknown condition|not valid in this context"
        r"|number expected"
        r"|expected (?:a |an )?(?:command|string|variable)|=+ not found|bad set of key|Unsupported use of)"
        r"|^sh: \d+: Syntax error|is not a valid statement separator|^The string is missing the terminator"
        r"|^Unexpected token '.{1,40}' in expression"
        r"|^\s*\+ .{0,40}FullyQualifiedErrorId : (?:UnexpectedToken|MissingEnd|TerminatorExpected)"
        r"|^Missing closing '[)}]' in",
        *(
            "syntax error",
            "unexpected",
            "parse error",
            "unmatched",
            "unterminated",
            "bad ",
            "event not found",
            "identifier",
        ),
        *(
            "attribute",
            "conditional",
            "read-only variable",
            "missing ",
            "unknown condition",
            "not valid",
            "number expected",
        ),
        *("expected", " not found", "separator", "unsupported use"),
        channels="shell",
        confidence=0.85,
        accept=_is_typed_shell,
    ),
    rule(
        "shell_syntax",
        rf"{_SHELL_SAYS}no matches found: (\S.{{0,300}}?)\s*$|^fish: No matches for wildcard '(.{{1,300}}?)'",
        *("no matches",),
        channels="shell",
        confidence=0.8,
        accept=_is_unquoted,
    ),
    rule(
        "shell_syntax",
        r"^jq: error: (?:syntax error|\S{1,60}/\d+ is not defined)|^jq: \d+ compile errors?"
        r"|failed to parse jq expression"
        r"|^sed: (?:-e expression #\d+, char \d+|\d+: \").{0,300}|^g?awk: (?:cmd\. line:\d+: .{0,200}"
        r"|.{0,40})(?:syntax error|unterminated|non-terminated)"
        r"|^(?:e|f|z|g)?grep: (?:unmatched|invalid (?:repetition|character|regular|preceding|back|range)"
        r"|parentheses not balanced|brackets|repetition-operator|trailing backslash|empty \(sub\)expression)"
        r"|^rg: regex parse error|^perl: syntax error|syntax error at -e line \d",
        *("jq", "sed: ", "awk: ", "grep: ", "regex parse", "at -e line", "perl"),
        channels="shell",
        confidence=0.85,
    ),
    rule(  # a pattern that the program takes for the name of a file
        "usage_error",
        r"(?:stat|lstat|open|access|^[\w.+-]{1,40}:) ['\"‘]?(\S{0,300}(?:/\.\.\.|\*)\S{0,100}?)['\"’]?: no such file",
        "no such file",
        channels="shell",
        confidence=0.8,
        accept=_is_wrong_use,
    ),
    rule(
        "shell_path_missing",
        r"^(?:.{0,200}: )?(?:stat|lstat|open|chdir) (\S{1,400}): (?:directory not found|no such file or directory)"
        r"|^Error: Cannot find module '(/[^']{1,400})'|^(?:go: "
        r"|pattern )?package (\S{1,200}) is not in (?:std|GOROOT)",
        *("directory not found", "no such file", "cannot find module", "is not in "),
        channels="shell",
        confidence=0.8,
        accept=_is_typed_folder,
    ),
    rule(
        "wrong_folder",
        r"cannot find main module|go\.mod file not found in current directory|^no Go files in"
        r"|does not contain (?:main module|modules listed)"
        r"|could not find [`'\"]?Cargo\.toml|Could not read package\.json|no [`'\"]?package\.json"
        r"|No (?:configuration|tasks?) file found"
        r"|No targets specified and no makefile found|Could not locate Gemfile|requires a project to execute"
        r"|no pyproject\.toml",
        *(
            "main module",
            "go.mod",
            "no go files",
            "does not contain",
            "cargo.toml",
            "package.json",
            "file found",
            "makefile",
        ),
        *("gemfile", "requires a project", "pyproject"),
        channels="shell",
        confidence=0.75,
        accept=lambda _, command: _is_familiar(command),
    ),
    rule(
        "usage_error",
        r"^\s*usage:\s+(?:\S{0,60}/)?([\w.+-]{1,40})",
        "usage:",
        channels="shell",
        confidence=0.75,
        accept=_shows_its_usage,
    ),
    rule(
        "usage_error",
        r"(?:must provide|required|requires?) .{0,120}when not running interactively"
        r"|must first push the current branch"
        r"|a pull request for branch .{1,200} already exists|the input device is not a TTY"
        r"|build constraints exclude all Go|doesn't have a resource type"
        r"|^curl: (?:option \S{1,60}: is unknown|\(3\) )|^no such service: ",
        *("interactively", "first push", "already exists", "not a tty", "build constraints", "resource type", "curl: "),
        "no such service",
        channels="shell",
        confidence=0.75,
        accept=lambda _, command: _is_familiar(command),
    ),
    rule(
        "api_misuse",
        r"no such (?:table|column): ([\w.]{1,80})|ERROR: +(?:column|relation) \"([\w.]{1,80})\" does not exist",
        *("no such table", "no such column", "does not exist"),
        channels="shell",
        confidence=0.75,
        accept=_is_wrong_use,
    ),
    rule(
        "usage_error",
        r"No rule to make target [`'‘]([\w:./-]{1,80})['’]",
        "no rule to make",
        channels="shell",
        confidence=0.75,
        accept=_is_typed_target,
    ),
    rule(
        "usage_error",
        r"^cp: .{0,60}omitting directory|^cp: .{1,200} is a directory \(not copied\)|^(?:head|tail|sleep"
        r"|date|seq|kill|mktemp|touch): (?:invalid|illegal)\b"
        r"|^(?:xargs|sed|sort|find|tar|zip|curl|wget|rsync|chmod): .{0,80}(?:may not be used|cannot be used"
        r"|can only be used|must (?:be|specify)|not supported|try '|missing argument|paths must precede)",
        *(
            "omitting",
            "not copied",
            "invalid",
            "illegal",
            "used",
            "must ",
            "not supported",
            "try '",
            "missing argument",
            "precede",
        ),
        channels="shell",
        confidence=0.75,
        accept=lambda match, command: _is_familiar(command) and command.is_own(match.string),
    ),
    rule(
        "shell_syntax",
        r'^\s*File "<(?:string|stdin)>", line \d+\s*$|^-e:\d+: syntax error',
        *('file "<st', "-e:"),
        channels="shell",
        confidence=0.75,
        accept=_is_written_inline,
    ),
    rule(
        "api_misuse",
        r"^gh: .{0,200}\(HTTP (?:404|422|400)\)|\bHTTP (?:404|422|400): .{0,200}\(https?://"
        r"|^glab: .{0,80}\b(?:404|422|400)\b",
        *("http 4", "glab"),
        channels="shell",
        confidence=0.75,
        accept=_asks_a_service,
    ),
    rule(
        "api_misuse",
        r"^gh: (?:Field|Variable|Argument|Expected|Parse error|Unknown|Type mismatch)\b.{0,200}"
        r"|Field '\w{1,60}' (?:doesn't exist on type|is missing required arguments)"
        r"|Could not resolve to an? \w{1,40} with the",
        *("field", "variable", "argument", "parse error", "mismatch", "could not resolve to"),
        channels="shell",
        confidence=0.75,
        accept=_asks_a_service,
    ),
)
