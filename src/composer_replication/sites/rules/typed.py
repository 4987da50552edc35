"""Who can have said that a command was typed wrongly, and of what: what rules for such messages ask of the command.

Each message has to be about something that the command itself says, and to come from a program that everybody has. The
project's own program is the work: an option that it does not have yet is what a run of it is meant to find out.
"""

from __future__ import annotations

import re

from composer_replication.sites.actions.shell_command import FAMILIAR, Command
from composer_replication.sites.actions.tools import word_set
from composer_replication.sites.rule import FailureRule, rule

_QUOTES = "'\"`‘’“”«»,;:)"
# What these run is the project's own, or reads options that plugins add.
_RUNS_OTHERS = frozenset(
    (name, "run") for name in ("go", "cargo", "npm", "yarn", "bun", "pnpm", "uv", "poetry", "dotnet", "mix", "docker")
) | {("npm", "start"), ("npm", "exec"), ("deno", "run"), ("deno", "task")}
_READS_PLUGINS = word_set("pytest py.test npx rails mvn gradle java node ruby php make flask celery alembic task just")
# What these complain of without naming it stands in files, which are the work.
_READS_THE_WORK = word_set(
    "terraform tofu helm kubectl ansible kustomize docker podman tsc eslint webpack vite cargo rustc javac swift dotnet"
    " bazel cmake ninja gcc g++ clang cc buf protoc sqlc alembic psql mysql sqlite3 mix elixir python python3"
)
# A run of tests, of a build or of a script prints what was done inside it.
_RUNS_THE_WORK = re.compile(
    r"\b(?:tests?|spec|check|lint|vet|make|jest|vitest|mocha|pytest|tox|rspec|ctest|bench|ci|e2e|pre-commit)\b|\.sh\b"
)

_ASKS_FOR_HELP = re.compile(r"help|\s-[h?](?:\s|$)")
_SEARCH_PATH = re.compile(r"(?:^|[;&\n(]\s{0,8}|\b(?:local|export|for) )path(?:=| in )")  # which is PATH for zsh


def _is_known(program: tuple[str, str]) -> bool:
    name = program[0].lower()
    return name in FAMILIAR and name not in _READS_PLUGINS and program not in _RUNS_OTHERS


def is_familiar(command: Command) -> bool:
    """Whether everything it runs is a program that everybody has, and not the one under work."""
    return bool(command.programs) and all(map(_is_known, command.programs))


def is_said_by_known(match: re.Match[str], command: Command) -> bool:
    """Whether only programs that everybody has can have said this, or one of them says so in its own name."""
    return is_familiar(command) or is_named(match, command)


def thing_of(match: re.Match[str]) -> str:
    """What the message names."""
    return next((group for group in match.groups() if group), "").strip(_QUOTES)


def is_wrong_use(match: re.Match[str], command: Command) -> bool:
    """Whether the thing was given to a program that everybody has, and to no other."""
    thing = thing_of(match)
    if not thing or thing not in command.text:
        return False
    programs = command.programs_with_argument(thing)
    return all(map(_is_known, programs)) if programs else is_familiar(command)


def is_wrong_bare_option(match: re.Match[str], command: Command) -> bool:
    """An option that the message names without its dashes."""
    thing = thing_of(match).lstrip("-")
    programs = command.programs_with_argument(f"-{thing}")
    return bool(thing) and bool(programs) and all(map(_is_known, programs))


def is_wrong_letter(match: re.Match[str], command: Command) -> bool:
    """A single letter, which stands among others behind one dash."""
    letter = re.escape(next(group for group in match.groups() if group))
    is_there = re.search(rf"\s-\w{{0,8}}{letter}", command.text) is not None
    return is_there and (is_familiar(command) or is_named(match, command))


def is_named(match: re.Match[str], command: Command) -> bool:
    """Whether the line begins with the name of a program that everybody has and that the command calls."""
    name = match.string.partition(":")[0].strip().rpartition("/")[2]
    return name in FAMILIAR and name not in _READS_PLUGINS and command.calls(name)


def is_wrong_name(match: re.Match[str], command: Command) -> bool:
    """A name of something that the program should have; a missing script is the runner's own word for it."""
    thing = thing_of(match)
    return is_wrong_use(match, command) or ("script" in match[0].lower() and bool(thing) and thing in command.text)


def is_wrong_count(_: re.Match[str], command: Command) -> bool:
    """Of a program that speaks of its own command line, not of files that it was given."""
    return is_familiar(command) and not any(name in _READS_THE_WORK for name, _first in command.programs)


def is_typed_folder(match: re.Match[str], command: Command) -> bool:
    """A package, folder or file that was typed, looked for where the shell stands."""
    looked_for = thing_of(match).removeprefix("./").rstrip("/.")
    words = {word.strip("'\"`").removeprefix("./").rstrip("/.") for word in command.text.split()}
    is_there = any(len(word) > 1 and (looked_for == word or looked_for.endswith(f"/{word}")) for word in words)
    return is_there and is_familiar(command)


def shows_its_usage(match: re.Match[str], command: Command) -> bool:
    return _is_named_usage(match, command) and _ASKS_FOR_HELP.search(command.text) is None


def _is_named_usage(match: re.Match[str], command: Command) -> bool:
    """Whether the usage is that of a program that everybody has and that the command calls."""
    return any(_is_known(program) for program in command.programs if program[0] == match[1])


def is_typed_target(match: re.Match[str], command: Command) -> bool:
    return match[1] in command.text.split() and (command.runs("make") or command.runs("gmake"))


def _is_written_inline(_: re.Match[str], command: Command) -> bool:
    """Whether the program stands in the command: handed over with an option, or fed in."""
    return re.search(r"\s-(?:c|e|r|p|E|ne|pe|-eval|-command)\b|<<", command.text) is not None


def is_here(_: re.Match[str], command: Command) -> bool:
    return not command.is_remote


def _is_unquoted(match: re.Match[str], command: Command) -> bool:
    """A word that was not meant as a pattern of files: one that only names files has found none, which is an answer."""
    thing = match[1] or match[2]
    return thing in command.text and (thing.startswith("-") or any(character in thing for character in "?[=^(#~"))


def _is_unescaped(match: re.Match[str], command: Command) -> bool:
    """Words in backticks inside a text, a command kept in one variable, or a search path that was overwritten."""
    thing, text = thing_of(match), command.text
    if thing.partition(" ")[0] in FAMILIAR and " " not in thing:
        return "not found: " in match[0] and _SEARCH_PATH.search(text) is not None
    quoted = text[: max(0, text.find(f"`{thing}"))]
    in_variable = " " in thing and "$" in text and thing in text
    return '"' in quoted or "<<" in quoted or in_variable


def _is_replaced_pattern(_: re.Match[str], command: Command) -> bool:
    return re.search(r"-(?:i?name|path)\s+[^'\"\s\\]*[*?]", command.text) is not None


def _asks_a_service(_: re.Match[str], command: Command) -> bool:
    return command.runs("gh") or command.runs("glab")


def _asks_elsewhere(_: re.Match[str], command: Command) -> bool:
    """Whether an address was typed that is nobody's on this machine."""
    return (
        is_familiar(command)
        and re.search(r"https?://(?!localhost|127\.|0\.0|\[|\$|10\.|192\.168)", command.text) is not None
    )


def has_no_terminal(_: re.Match[str], command: Command) -> bool:
    """Whether the program itself was called for: tests may well try without a terminal."""
    return _RUNS_THE_WORK.search(command.text) is None


def is_own_familiar(match: re.Match[str], command: Command) -> bool:
    """Said in its own name, and by nothing else that may call the same program."""
    return is_named(match, command) and is_familiar(command)


# What could not be read as it was typed: by the shell, or by a program that was handed a script with the command.

_SHELL_SAYS = (
    r"^(?:(?:/\S{0,40}/)?(?:bash|sh|zsh|dash|ksh|fish)(?:: eval)?|-?bash|\(eval\)|eval)(?:: -c)?(?::[\w\[]{1,20})?"
    r"(?:: line \d+|[: ]+\d+)?: "
)
SYNTAX: tuple[FailureRule, ...] = (
    rule(  # bash, zsh, dash, fish
        "shell_syntax",
        _SHELL_SAYS + r".{0,80}(?:syntax error|unexpected EOF|unexpected end of file|parse error|unmatched|unterminated"
        r"|bad substitution|bad pattern|event not found|bad math expression|not a valid identifier"
        r"|unknown file attribute"
        r"|bad option|conditional|read-only variable|missing end|unknown condition|not valid in this context"
        r"|number expected"
        r"|expected (?:a |an )?(?:command|string|variable)|=+ not found|bad set of key|Unsupported use of"
        r"|here-document"
        r"|ambiguous redirect|unary operator expected|binary operator expected|integer expression expected"
        r"|bad array subscript|bad floating point|value too great for base|division by 0|failed glob|bad range"
        r"|is not the exit status|no coprocess|-[\w-]: invalid option|bad assignment|command not found: #$"
        r"|Variables cannot be bracketed|Command substitutions not allowed|Expected "
        r"|can only .{0,12}(?:be used in|from) a fun"
        r"|cd: too many arguments|invalid (?:number|directive)$|\$\(\.\.\.\) is not supported"
        r"|(?:\[\[|source|shopt|mapfile|readarray|declare|local|pushd|setopt|function): (?:command )?not found$"
        r"|command not found: (?:mapfile|readarray|shopt|compgen|complete)$)"
        r"|^(?:bash|sh|zsh|\(eval\))(?::\d+| line \d+|: line \d+)?: \[+: .{1,80}|^sh: \d+: Syntax error",
        *("syntax error", "unexpected", "parse error", "unmatched", "unterminated", "bad "),
        *("event not found", "identifier", "attribute", "conditional", "read-only variable", "missing "),
        *("unknown condition", "not valid", "expected", " not found", "unsupported use", "here-document"),
        *("ambiguous", "too great", "division by", "failed glob", "[: ", "exit status", "bracketed"),
        *("not allowed", "coprocess", "invalid ", "can only ", "too many", "not supported"),
        channels="shell",
        confidence=0.85,
        accept=is_here,
    ),
    rule(  # PowerShell and cmd
        "shell_syntax",
        r"is not a valid statement separator|^The string is missing the terminator"
        r"|^Unexpected token '.{1,40}' in expression"
        r"|^\s*\+ .{0,40}FullyQualifiedErrorId : (?:UnexpectedToken|MissingEnd|TerminatorExpected|InvalidVariable"
        r"|Missing|Ampersand)"
        r"|^Missing (?:closing '[)}]' in|argument in parameter list|expression after)"
        r"|^The '<' operator is reserved for future use"
        r"|^The ampersand \(&\) character is not allowed|^The syntax of the command is incorrect"
        r"|^\S{1,40} was unexpected at this time"
        r"|^You must provide a value expression following",
        *("separator", "missing ", "unexpected", "errorid", "reserved for", "ampersand"),
        *("command is incorrect", "value expression"),
        channels="shell",
        confidence=0.85,
        accept=is_here,
    ),
    rule(
        "shell_syntax",
        rf"{_SHELL_SAYS}no matches found: (\S.{{0,300}}?)\s*$|^fish: No matches for wildcard '(.{{1,300}}?)'",
        "no matches",
        channels="shell",
        confidence=0.8,
        accept=_is_unquoted,
    ),
    rule(  # words in backticks, or in a variable, that the shell took for a command
        "shell_syntax",
        rf"{_SHELL_SAYS}(?:(?:command not found|no such file or directory|permission denied"
        rf"|is a directory): (.{{1,200}}?)"
        r"|(.{1,200}?): (?:command not found|No such file or directory|Permission denied|Is a directory))$",
        *("not found", "no such file", "permission denied", "is a directory"),
        channels="shell",
        confidence=0.8,
        accept=_is_unescaped,
    ),
    rule(  # a pattern that the shell replaced by names
        "shell_syntax",
        r"^find: (\S{1,200}): unknown primary|^find: paths must precede expression",
        *("unknown primary", "precede"),
        channels="shell",
        confidence=0.8,
        accept=_is_replaced_pattern,
    ),
    rule(  # programs that are handed a script of their own
        "shell_syntax",
        r"^jq: error: (?:syntax error|\S{1,60}/\d+ is not defined)|^jq: \d+ compile errors?"
        r"|failed to parse jq expression"
        r"|^sed: (?:first RE|RE error: (?!illegal byte)|-e expression #\d+, char \d+|\d+: \").{0,300}"
        r"|^g?awk: (?:cmd\. line:\d+: .{0,200}"
        r"|.{0,40})(?:syntax error"
        r"|unterminated|non-terminated|calling undefined function|illegal statement|bailing out)"
        r"|^g?awk: .{0,80} source line \d+|^(?:e|f|z"
        r"|g)?grep: (?:unmatched"
        r"|invalid (?:repetition|character|regular|preceding|back|range)|parentheses not balanced|brackets"
        r"|repetition-operator"
        r"|trailing backslash|empty \(sub\)expression|exceeded)|^rg: (?:regex parse error|error parsing"
        r"|the literal)|^regex parse error:"
        r"|^perl: syntax error|syntax error at -e line \d|^Substitution (?:replacement|pattern) not terminated at -e"
        r"|^yq: .{0,40}(?:bad expression|lexer error)|^Error: bad expression",
        *("jq", "sed: ", "awk: ", "grep: ", "regex parse", "rg: ", "at -e", "perl", "bad expression"),
        "lexer error",
        channels="shell",
        confidence=0.85,
    ),
    rule(  # interpreters
        "shell_syntax",
        r'^\s*File "<(?:string|stdin)>", line \d+\s*$'
        r"|^-e:\d+: syntax error|^\[(?:eval|stdin)\]:\d+$|Parse error: .{0,120} in Command line code"
        r"|^syntax error at - line \d|^file:///\S{0,80}\[eval\d\]:\d+",
        *('file "<st', "-e:", "[eval", "[stdin]", "command line code", "at - line"),
        channels="shell",
        confidence=0.75,
        accept=_is_written_inline,
    ),
    rule(  # a cell
        "shell_syntax",
        r"\s*(?:Cell In ?\[\d{1,6}\], line \d{1,6}|File \"<ipython-input\S{1,80}, line \d{1,6})\n(?:.{0,300}\n){1,4}?"
        r"\s*(?:SyntaxError|IndentationError|TabError): ",
        *("syntaxerror", "indentationerror", "taberror"),
        channels="shell",
        where="start",
        confidence=0.75,
    ),
    rule(  # statements of SQL
        "shell_syntax",
        r"^(?:psql:<stdin>:\d+: )?ERROR: +syntax error at or near"
        r"|^(?:Parse error: |Error: )?(?:in prepare, )?near .{1,60}: syntax error"
        r"|^ERROR 1064 \(42000\)",
        *("syntax error", "error 1064"),
        channels="shell",
        confidence=0.8,
        accept=lambda _, command: (
            is_familiar(command) and "<" not in command.text.replace("<<", "") and " -f" not in command.text
        ),
    ),
)


# What was asked of somebody else's service, of a database or of data, and is not there: endpoints, tables, fields.

SERVICES: tuple[FailureRule, ...] = (
    rule(
        "usage_error",
        r"must first push the current branch|a pull request for branch .{1,200} already exists"
        r"|build constraints exclude all Go"
        r"|none of the git remotes configured|no git remotes found",
        *("first push", "already exists", "build constraints", "git remotes"),
        channels="shell",
        confidence=0.75,
        accept=is_said_by_known,
    ),
    rule(
        "api_misuse",
        r"no such (?:table|column|function): ([\w.]{1,80})|ERROR: +(?:column|relation|table"
        r"|function) \"?([\w.]{1,80})\b.{0,80} does not exist"
        r"|ERROR 1(?:054|146|064) \(\w{5}\).{0,40}? '?([\w.]{2,80})'",
        *("no such table", "no such column", "no such function", "does not exist", "error 1"),
        channels="shell",
        confidence=0.75,
        accept=is_wrong_use,
    ),
    rule(
        "api_misuse",
        r"^gh: .{0,200}\(HTTP (?:404|422|400)\)|\bHTTP (?:404|422|400): .{0,200}\(https?://"
        r"|^glab: .{0,80}\b(?:404|422|400)\b"
        r"|^gh: (?:Field|Variable|Argument|Expected|Parse error|Unknown|Type mismatch|Problems parsing)\b.{0,200}"
        r"|Field '\w{1,60}' (?:doesn't exist on type|is missing required arguments)"
        r"|Could not resolve to an? \w{1,40} with the"
        r"|^(?:expected an object but got: |cannot (?:iterate|index)\b)",
        *("http 4", "glab", "field", "variable", "argument", "parse error", "mismatch"),
        *("could not resolve to", "parsing", "but got: ", "cannot iterate", "cannot index"),
        channels="shell",
        confidence=0.75,
        accept=_asks_a_service,
    ),
    rule(
        "api_misuse",
        r"^curl: \(22\) .{0,80}\b(?:404|400|405|422)\b|ERROR (?:404|400|405|422): ",
        *("curl: (22)", "error 4"),
        channels="shell",
        confidence=0.7,
        accept=_asks_elsewhere,
    ),
    rule(  # a filter that does not fit what it is given
        "usage_error",
        r"^jq: error \(at .{1,40}\): (?:Cannot (?:index|iterate)|.{0,200}(?:cannot be|has no keys"
        r"|and .{1,80} cannot))",
        "jq: error (at",
        channels="shell",
        confidence=0.7,
        accept=lambda _, command: is_familiar(command),
    ),
)
