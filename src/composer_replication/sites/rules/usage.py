"""Rules for wrong commands: unknown options and names, wrong argument counts and folders, shell syntax, services.

They are tried before the rules for tests and builds, because a runner that was called incorrectly did not run anything.

A message counts only if it is about something in the command and comes from a familiar program, one that any machine
may have. Programs of the project do not count: if an option does not exist yet, adding it is the work, and the run was
meant to test that. The functions that check this come first; the rules name them as `accept`.
"""

from __future__ import annotations

import re

from composer_replication.sites.actions.shell_command import FAMILIAR_PROGRAMS, Command
from composer_replication.sites.actions.tools import word_set
from composer_replication.sites.rule import FailureRule, rule

_QUOTES = "'\"`‘’“”«»,;:)"
# Programs that run code from the project, or whose plugins add options.
_RUNS_PROJECT_CODE = frozenset(
    (name, "run") for name in ("go", "cargo", "npm", "yarn", "bun", "pnpm", "uv", "poetry", "dotnet", "mix", "docker")
) | {("npm", "start"), ("npm", "exec"), ("deno", "run"), ("deno", "task")}
_HAS_PLUGINS = word_set("pytest py.test npx rails mvn gradle java node ruby php make flask celery alembic task just")
# If these programs do not name the source of an error, it is in a file and thus part of the work.
_READS_PROJECT_FILES = word_set(
    "terraform tofu helm kubectl ansible kustomize docker podman tsc eslint webpack vite cargo rustc javac swift dotnet"
    " bazel cmake ninja gcc g++ clang cc buf protoc sqlc alembic psql mysql sqlite3 mix elixir python python3"
)
# Tests, builds and scripts print messages from the programs that they run.
# "pytest -q"; "./deploy.sh"; not "git status"
_RUNS_TESTS_OR_SCRIPTS = re.compile(
    r"\b(?:tests?|spec|check|lint|vet|make|jest|vitest|mocha|pytest|tox|rspec|ctest|bench|ci|e2e|pre-commit)\b|\.sh\b"
)

# "git commit --help"; "tar -h"; not "ls -hl"
_ASKS_FOR_HELP = re.compile(r"help|\s-[h?](?:\s|$)")
# In zsh, the variable `path` is PATH, so a loop over it makes all programs unavailable.
# "for path in src tests; do ls $path; done"; not "ls $path"
_SETS_ZSH_PATH = re.compile(r"(?:^|[;&\n(]\s{0,8}|\b(?:local|export|for) )path(?:=| in )")


def _is_familiar_program(program: tuple[str, str]) -> bool:
    name = program[0].lower()
    return name in FAMILIAR_PROGRAMS and name not in _HAS_PLUGINS and program not in _RUNS_PROJECT_CODE


def _runs_familiar_only(command: Command) -> bool:
    """Return whether the command runs only familiar programs, and none from the project."""
    return bool(command.programs) and all(map(_is_familiar_program, command.programs))


def _is_from_familiar(match: re.Match[str], command: Command) -> bool:
    """Return whether the message comes from a familiar program: no others are run, or the line begins with its name."""
    return _runs_familiar_only(command) or _begins_with_familiar(match, command)


def captured_name(match: re.Match[str]) -> str:
    """Return the name that the rule captured, without quotes, or "" if it captured none."""
    return next((group for group in match.groups() if group), "").strip(_QUOTES)


def _is_argument(match: re.Match[str], command: Command) -> bool:
    """Return whether the captured name is in the command, as an argument to familiar programs only."""
    name = captured_name(match)
    if not name or name not in command.text:
        return False
    programs = command.programs_with_argument(name)
    return all(map(_is_familiar_program, programs)) if programs else _runs_familiar_only(command)


def _is_option_without_dashes(match: re.Match[str], command: Command) -> bool:
    """Return whether the captured option was passed to familiar programs only.

    The message prints the option without its dashes.
    """
    option = captured_name(match).lstrip("-")
    programs = command.programs_with_argument(f"-{option}")
    return bool(option) and bool(programs) and all(map(_is_familiar_program, programs))


def _is_option_letter(match: re.Match[str], command: Command) -> bool:
    """Return whether the captured letter is in a group of letters after a single dash, as in `ls -lqZ`."""
    letter = re.escape(next(group for group in match.groups() if group))
    # For the letter Z: "ls -lZ"; not "ls --Zero"
    is_typed = re.search(rf"\s-\w{{0,8}}{letter}", command.text) is not None
    return is_typed and (_runs_familiar_only(command) or _begins_with_familiar(match, command))


def _begins_with_familiar(match: re.Match[str], command: Command) -> bool:
    """Return whether the line begins with the name of a familiar program in the command."""
    name = match.string.partition(":")[0].strip().rpartition("/")[2]
    return name in FAMILIAR_PROGRAMS and name not in _HAS_PLUGINS and command.calls(name)


def _is_argument_or_script(match: re.Match[str], command: Command) -> bool:
    """Return whether the captured name was typed in the command.

    It may be an argument to a familiar program or a script, as in `npm run NAME`.
    """
    name = captured_name(match)
    return _is_argument(match, command) or ("script" in match[0].lower() and bool(name) and name in command.text)


def _is_about_command_line(_: re.Match[str], command: Command) -> bool:
    """Return whether the message is about the command line, rather than a file that a program read."""
    return _runs_familiar_only(command) and not any(name in _READS_PROJECT_FILES for name, _first in command.programs)


def _is_typed_path(match: re.Match[str], command: Command) -> bool:
    """Return whether the captured path was typed and a familiar program looked it up in the current folder."""
    path = captured_name(match).removeprefix("./").rstrip("/.")
    words = {word.strip("'\"`").removeprefix("./").rstrip("/.") for word in command.text.split()}
    is_typed = any(len(word) > 1 and (path == word or path.endswith(f"/{word}")) for word in words)
    return is_typed and _runs_familiar_only(command)


def _shows_its_usage(match: re.Match[str], command: Command) -> bool:
    """Return whether the usage text comes from a familiar program in the command.

    The answer is False if the command asked for help.
    """
    is_familiar_usage = any(_is_familiar_program(program) for program in command.programs if program[0] == match[1])
    return is_familiar_usage and _ASKS_FOR_HELP.search(command.text) is None


def _is_typed_target(match: re.Match[str], command: Command) -> bool:
    """Return whether the captured target was typed as an argument to `make`."""
    return match[1] in command.text.split() and (command.runs("make") or command.runs("gmake"))


def _is_written_inline(_: re.Match[str], command: Command) -> bool:
    """Return whether the program text is in the command: after an option such as `-c`, or in a here-document."""
    # "python -c 'x = 1'"; "node <<EOF"; not "python app.py"
    return re.search(r"\s-(?:c|e|r|p|E|ne|pe|-eval|-command)\b|<<", command.text) is not None


def _is_local(_: re.Match[str], command: Command) -> bool:
    """Return whether the command runs on this machine. Over ssh, another shell interprets it."""
    return not command.is_remote


def _is_unquoted_text(match: re.Match[str], command: Command) -> bool:
    """Return whether the word that matched no file was meant as text.

    A plain file pattern may rightly match nothing.
    """
    word = match[1] or match[2]
    return word in command.text and (word.startswith("-") or any(character in word for character in "?[=^(#~"))


def _is_text_run_as_command(match: re.Match[str], command: Command) -> bool:
    """Return whether the shell tried to run text that was not meant as a command, or could not find a common program.

    That is the case for text in backticks, a whole command in a variable, and programs hidden by an overwritten PATH.
    """
    missing_command, text = captured_name(match), command.text
    if missing_command.partition(" ")[0] in FAMILIAR_PROGRAMS and " " not in missing_command:
        return "not found: " in match[0] and _SETS_ZSH_PATH.search(text) is not None
    before = text[: max(0, text.find(f"`{missing_command}"))]
    in_variable = " " in missing_command and "$" in text and missing_command in text
    return '"' in before or "<<" in before or in_variable


def _has_unquoted_find_pattern(_: re.Match[str], command: Command) -> bool:
    """Return whether a pattern for `find` is unquoted, so that the shell may expand it."""
    # "find . -name *.py"; not "find . -name '*.py'"
    return re.search(r"-(?:i?name|path)\s+[^'\"\s\\]*[*?]", command.text) is not None


def _runs_service_client(_: re.Match[str], command: Command) -> bool:
    return command.runs("gh") or command.runs("glab")


def _names_remote_address(_: re.Match[str], command: Command) -> bool:
    """Return whether the command contains an address outside this machine and the local network."""
    # "curl https://example.invalid/a"; not "curl http://localhost:8000"
    return (
        _runs_familiar_only(command)
        and re.search(r"https?://(?!localhost|127\.|0\.0|\[|\$|10\.|192\.168)", command.text) is not None
    )


def _is_direct_call(_: re.Match[str], command: Command) -> bool:
    """Return whether the command called the program directly. Tests may run it without a terminal on purpose."""
    return _RUNS_TESTS_OR_SCRIPTS.search(command.text) is None


def _is_line_from_familiar(match: re.Match[str], command: Command) -> bool:
    """Return whether the line begins with the name of a familiar program.

    The command must run no other programs.
    """
    return _begins_with_familiar(match, command) and _runs_familiar_only(command)


# ---- Wrong options, names and argument counts, and the wrong folder -------------------------------------------------

# Building blocks of patterns: an opening quote, an option, "unknown" and its synonyms, nouns for options, and a name.
_QUOTE = r"['\"`‘“«]?"
_OPTION = r"--?\w[\w-]{0,60}"
_UNKNOWN = r"(?:unknown|unrecogni[sz]ed|illegal|invalid|bad|unsupported|unexpected|undefined|ambiguous|no such)"
_NOUN = r"(?:option|flag|switch|argument|parameter|primary or operator|predicate)"
_NAME = rf"{_QUOTE}([\w:./@-]{{1,80}})"

OPTIONS: tuple[FailureRule, ...] = (
    # An unknown option: GNU and BSD tools, Go, cobra, clap, argparse, click, npm, PowerShell.
    # "error: unknown option '--colour'" -> "--colour"; "flag provided but not defined: -verbose" -> "-verbose"
    rule(
        "usage_error",
        rf"{_UNKNOWN} (?:(?:shorthand|long|short|global|extra|command[- ]line) ){{0,2}}{_NOUN}s?(?: provided"
        rf"| name)?(?: --)?[:=]?"
        rf"\s{{0,3}}{_QUOTE}({_OPTION})|flag provided but not defined: (-[\w-]{{1,60}})"
        rf"|^\S{{1,40}}: (-[\w-]{{1,40}}): (?:unknown|invalid) (?:primary|option|predicate|expression)"
        rf"|\bUnknown (?:option|argument)s?: {_QUOTE}([\w-]{{1,60}})|Found argument {_QUOTE}({_OPTION})"
        rf"|{_NOUN} {_QUOTE}({_OPTION}){_QUOTE}:? (?:is|was|are) ?(?:not|n't|unknown|ambiguous|badly|unrecognized)"
        rf"|{_QUOTE}({_OPTION}){_QUOTE}:? is not an? (?:\w+ ){{0,2}}(?:option|flag|argument|switch|command)"
        rf"|bad flag {_QUOTE}({_OPTION}){_QUOTE} used|option {_QUOTE}({_OPTION}){_QUOTE} must come before"
        r"|cannot be found that matches parameter name '(\w{1,60})'"
        r"|parameter cannot be found that accepts argument '(.{1,80}?)'",
        *("option", "flag", "switch", "argument", "primary", "predicate", "parameter"),
        channels="shell",
        confidence=0.85,
        accept=_is_argument,
    ),
    # Git prints options without their dashes: "error: unknown option `colour'" -> "colour";
    # not "error: unknown argument"
    rule(
        "usage_error",
        r"^error: (?:unknown|ambiguous) (?:option|switch)[: ]+[`'‘]([\w-]{1,60})|^error: (?:option"
        r"|switch) [`'‘]([\w-]{1,60})['’] "
        r"(?:requires|expects|takes|is)|^fatal: unrecognized argument: (-[\w-]{1,60})",
        *("unknown ", "ambiguous ", "requires", "expects", "takes", "unrecognized argument", "incompatible"),
        channels="shell",
        confidence=0.85,
        accept=_is_option_without_dashes,
    ),
    # A single letter: "ls: invalid option -- 'Z'" -> "Z"; "unknown shorthand flag: 'q' in -q" -> "q"
    rule(
        "usage_error",
        rf"^[\w.+-]{{1,40}}: (?:{_UNKNOWN} option|option requires an argument):? --? ?{_QUOTE}(\w\b|-)"
        r"|unknown shorthand flag: '(\w)'|flag needs an argument: '(\w)'|^[\w.+-]{1,40}: illegal (?:line"
        r"|byte) count -- (-?\w)"
        r"|^(?:[\w.+-]{1,40}: )(?:line \d+: )?(?:[\w.+-]{1,40}: )?-(\w): invalid option",
        *("option", "shorthand", "illegal line", "illegal byte", "needs an argument"),
        channels="shell",
        confidence=0.85,
        accept=_is_option_letter,
    ),
    # An option without its value, or with an invalid value.
    # "error: argument --depth: expected one argument" -> "--depth"; "Invalid value for '--port': eighty" -> "--port"
    rule(
        "usage_error",
        r"invalid argument:? ['\"‘]([^'\"’]{1,80})['\"’] for"
        rf"|{_NOUN} (?:needs|requires)(?: an?)? (?:argument|value|parameter)[: ]+{_QUOTE}({_OPTION})"
        rf"|{_NOUN} {_QUOTE}({_OPTION}){_QUOTE}:? (?:needs|requires|expects?|expected|missing)\b"
        rf"|a value is required for {_QUOTE}({_OPTION})|{_QUOTE}({_OPTION}){_QUOTE}"
        rf": expected (?:one|at least one|\d+) argument"
        rf"|^error: argument (?:-\w/)?({_OPTION}).{{0,40}}: (?:expected|invalid|not allowed|ignored)"
        rf"|invalid (?:\w+ )?(?:value|argument|choice)s?:? .{{0,80}}?"
        rf" for (?:flag |option |argument )?{_QUOTE}({_OPTION})"
        rf"|Invalid value for {_QUOTE}({_OPTION})|invalid (?:\w+ )?(?:value|choice): {_QUOTE}([\w:./-]{{2,80}})"
        r"|(?:required flag\(s\)"
        r"|Missing option) ['\"]([\w-]{1,60})",
        *("requires", "needs", "expect", "value", "invalid ", "required flag", "missing", "not allowed"),
        channels="shell",
        confidence=0.8,
        accept=lambda match, command: (
            _is_argument(match, command)
            or (match[0].startswith(("required", "Missing")) and _runs_familiar_only(command))
        ),
    ),
)

NAMES: tuple[FailureRule, ...] = (
    # An unknown subcommand, task, target or other name.
    # "unknown command: 'statuss'" -> "statuss"; "npm ERR! missing script: biuld" -> "biuld"
    rule(
        "usage_error",
        rf"(?:unknown|unrecogni[sz]ed|no such|invalid) (?:sub)?command:? {_NAME}|has no command named {_NAME}"
        rf"|(?:sub)?command {_QUOTE}([\w:-]{{1,60}}){_QUOTE} (?:wasn't recognized|not found|does not exist"
        rf"|is not (?:recognized|defined))"
        rf"|{_QUOTE}([\w:-]{{1,60}}){_QUOTE} is not a \w{{1,20}} command|unknown json field: {_NAME}"
        rf"|unknown linters?: {_NAME}"
        rf"|no task {_QUOTE}([\w:./-]{{1,60}}){_QUOTE} found|"
        rf"(?:task|recipe|target|job|stage|service|profile|environment"
        rf"|context|label) {_NAME}{_QUOTE} "
        rf"(?:not found|does not exist|is not defined|could not be found)|does not contain recipe {_NAME}"
        rf"|missing script: {_NAME}|(?:script named|Script not found) {_NAME}|no such (?:service|tool|container"
        rf"|image|network|volume"
        rf"|object|target|recipe|task|module|package|label)(?: named)?:? {_NAME}|no (?:test|bin|example|bench"
        rf"|library) target named {_NAME}"
        rf"|package ID specification {_NAME}|not a known dependency: {_NAME}|^doc: no (?:symbol|such package"
        rf"|exported)\b.{{0,40}}? (\w{{2,80}})"
        rf"|resource type {_NAME}|named files must (?:all )?be .{{1,60}}: (\S{{1,200}})|^could not add label: {_NAME}"
        r"|\"(\S{1,200})\" matched no packages|invalid version: unknown revision (\S{1,80})"
        r"|unrecognized file type: (\w{1,40})"
        r"|^(?:failed to update .{1,40}: )?'([\w:./ -]{1,80})' not found$"
        r"|ERROR: not found: \S{0,300}::(\w{1,100})|expected the \"\[HOST/\]OWNER/REPO\" format, got \"(.{1,100}?)\"",
        *("command", "json field", "linter", "task", "recipe", "target", "job", "stage", "service"),
        *("profile", "environment", "context", "label", "script", "no such", "package id", "dependency"),
        *("doc: no", "resource type", "named files", "error: not found", "[host/]", "matched no", "invalid version"),
        *("file type", "' not found"),
        channels="shell",
        confidence=0.8,
        accept=_is_argument_or_script,
    ),
    # Printed before git's message about the whole push: "error: src refspec mian does not match any" -> "mian"
    rule(
        "git_state",
        r"^error: src refspec (\S{1,200}) does not match any",
        "src refspec",
        channels="shell",
        confidence=0.8,
        accept=_is_argument,
    ),
    # "make: *** No rule to make target 'tets'.  Stop." -> "tets"
    rule(
        "usage_error",
        r"No rule to make target [`'‘]([\w:./-]{1,80})['’]",
        "no rule to make",
        channels="shell",
        confidence=0.75,
        accept=_is_typed_target,
    ),
    # A pattern that the program interprets as a file name.
    # "stat ./cmd/...: no such file or directory" -> "./cmd/..."; not "stat ./cmd: no such file or directory"
    rule(
        "usage_error",
        r"(?:stat|lstat|open|access|^[\w.+-]{1,40}:) ['\"‘]?(\S{0,300}(?:/\.\.\.|\*)\S{0,100}?)['\"’]?: no such file"
        r"|No files matching (?:the pattern )?['\"]?([^\s'\"]{1,200})",
        *("no such file", "no files matching"),
        channels="shell",
        confidence=0.8,
        accept=_is_argument,
    ),
)

COUNTS: tuple[FailureRule, ...] = (
    # "accepts 1 arg(s), received 2"; "error: the following arguments are required: name"; not "2 arguments"
    rule(
        "usage_error",
        r"accepts (?:at most |between )?\d+(?: and \d+)? arg\(s\), received"
        r"|requires (?:at least |exactly |at most )?\d+ arg(?:ument)?(?:s|\(s\))?\b|flags in the group \["
        r"|^(?:\S{1,40}: )?(?:error: )?the following (?:required )?arguments (?:are required|were not provided)"
        r"|^(?:error: )?specify only one of|cannot be used (?:with|together)|can't be (?:used together|combined)"
        r"|are mutually exclusive|cannot use (?:the )?[`'\"]?--?\w[\w-]{0,40}[`'\"]? (?:with|and|together)"
        r"|^(?:\S{1,40}: )?(?:error: )?(?:Got unexpected extra argument|Missing argument ['\"]|not enough arguments"
        r"|wrong number of arguments|cannot use path@version|argument \S{1,40}: Invalid choice, valid choices"
        r"|cannot write multiple packages|-o \S{1,200} is a)|named files must all be in one directory",
        *("arg(s)", "argument", "specify only", "used with", "used together", "be combined", "mutually"),
        *("flags in", "cannot use", "multiple packages", "-o ", "named files"),
        channels="shell",
        confidence=0.8,
        accept=_is_from_familiar,
    ),
    # "cp: missing file operand"; "Try 'grep --help' for more information."
    rule(
        "usage_error",
        r"^[\w.+-]{1,40}: (?:missing (?:\w+ )?operand|extra operand|too (?:many|few) arguments"
        r"|not enough arguments|no \w+ specified"
        r"|You must (?:specify|provide)|must specify|no URL specified|try '\S{1,40} --help')"
        r"|^Try '\S{1,40}(?: \w+)? --help'",
        *("operand", "arguments", "specif", "you must", "try '"),
        channels="shell",
        confidence=0.75,
        accept=lambda match, command: (
            _is_line_from_familiar(match, command) if ":" in match[0] else _runs_familiar_only(command)
        ),
    ),
    # "Error: You must specify a region"; "a namespace must be provided"
    rule(
        "usage_error",
        r"^(?:Error: |error: )?[\w ,`'\"-]{1,80}\b(?:must|has to|have to|needs to) be (?:provided|specified|given"
        r"|supplied)\b"
        r"|^(?:Error: |error: )?(?:You must|must|Please) (?:specify|provide|supply|give|pass) ",
        *("provided", "specif", "given", "suppl", "provide ", "pass "),
        channels="shell",
        confidence=0.75,
        accept=_is_about_command_line,
    ),
    # Only the usage text, without a message: "usage: git-lfs [options]" -> "git-lfs"; not "see the usage notes"
    rule(
        "usage_error",
        r"^\s*usage:\s+(?:\S{0,60}/)?([\w.+-]{1,40})",
        "usage:",
        channels="shell",
        confidence=0.75,
        accept=_shows_its_usage,
    ),
    # Usage errors from standard tools: "cp: src is a directory (not copied)"; "head: illegal line count -- -x";
    # "mkdir: build: File exists"
    rule(
        "usage_error",
        r"^cp: .{0,60}omitting directory|^cp: .{1,200} is a directory \(not copied\)|^(?:mkdir"
        r"|ln): .{1,300}: File exists"
        r"|^(?:rm|unlink): .{1,300}: is a directory|^rmdir: .{1,300}(?:not empty)|^(?:head|tail|sleep|date|seq"
        r"|kill|mktemp|touch"
        r"|cut|split|fold|nl|ps|stat|base64|tr|chmod|chown|timeout"
        r"|printf): (?:\S{1,20} )?(?:.{0,40}: )?(?:invalid|illegal|bad|failed conversion)\b"
        r"|^(?:xargs|sed|sort|find|tar|zip|curl|wget|rsync|chmod|grep|ssh|scp|ls|du|cut|tr|uniq|awk|jq"
        r"|column): .{0,120}"
        r"(?:may not be used|cannot be used|can only be used|must (?:be|specify)|not supported|missing argument"
        r"|paths must precede"
        r"|conflict|incompatible|badly|is unknown)|^curl: \(3\) ",
        *("omitting", "not copied", "file exists", "a directory", "not empty", "invalid", "illegal", "bad"),
        *("used", "must ", "not supported", "conversion", "missing argument", "precede", "conflict"),
        *("incompatible", "is unknown", "curl: ("),
        channels="shell",
        confidence=0.75,
        accept=_is_line_from_familiar,
    ),
    # Something that needs a terminal, an editor or an answer, none of which is available here.
    # "could not open a new TTY: open /dev/tty: device not configured"; not "opened a pty"
    rule(
        "usage_error",
        r"could not open a new TTY|the input device is not a TTY|(?:stdin|stdout|input|output) is not a (?:tty"
        r"|terminal)"
        r"|open /dev/tty: |Raw mode is not supported|Terminal is dumb, but EDITOR unset"
        r"|There was a problem with the editor"
        r"|cannot run in (?:a )?non-interactive|when not running interactively"
        r"|requires? (?:an? )?(?:interactive )?(?:TTY|terminal)\b",
        *("tty", "not a terminal", "raw mode", "editor", "interactive", "a terminal"),
        channels="shell",
        confidence=0.75,
        accept=_is_direct_call,
    ),
)

FOLDERS: tuple[FailureRule, ...] = (
    # "stat ./cmd/srv: directory not found" -> "./cmd/srv"; "package ./intern is not in std" -> "./intern"
    rule(
        "shell_path_missing",
        r"^(?:.{0,200}: )?(?:stat|lstat|open|chdir) (\S{1,400}): (?:directory not found|no such file or directory)"
        r"|^(?:Error: )?Cannot find module '(/[^']{1,400})'|^(?:go: |pattern )?package (\S{1,200}) is not in (?:std"
        r"|GOROOT)"
        r"|\[Errno 2\] No such file or directory: '?(\S{1,400}?)'?$|^(?:error"
        r"|fatal): could not open '(.{1,300}?)' for reading"
        r"|Could not open file (\S{1,300}): No such file|could not chdir to '(.{1,300}?)'"
        r"|^cp: directory (\S{1,300}) does not exist"
        r"|E902 \S{0,80}.{0,80} (\S{1,300})$|^no required module provides package (\S{1,200});",
        *("directory not found", "no such file", "cannot find module", "is not in ", "could not open"),
        *("no required module", "could not chdir", "does not exist"),
        channels="shell",
        confidence=0.8,
        accept=_is_typed_path,
    ),
    # "go: cannot find main module"; "npm ERR! Could not read package.json"; not "package.json was updated"
    rule(
        "wrong_folder",
        r"cannot find main module|go\.mod file not found in current directory|^no Go files in"
        r"|outside main module or its selected"
        r"|does not contain (?:main module|modules listed)|could not find [`'\"]?Cargo\.toml"
        r"|Could not read package\.json"
        r"|no [`'\"]?package\.json|No (?:configuration|tasks?|projects?) files? found"
        r"|No targets specified and no makefile found"
        r"|Could not locate Gemfile|requires a project to execute|no pyproject\.toml"
        r"|no configuration file provided: not found"
        r"|failed to read dockerfile: open|^No configuration files|Couldn't find a package\.json"
        r"|No such file or directory: 'pyproject"
        r"|no tasks? defined in",
        *("main module", "go.mod", "no go files", "does not contain", "cargo.toml", "package.json"),
        *("file found", "files found", "makefile", "gemfile", "requires a project", "pyproject"),
        *("configuration file", "dockerfile", "no task"),
        channels="shell",
        confidence=0.75,
        accept=_is_from_familiar,
    ),
)

USAGE: tuple[FailureRule, ...] = (*OPTIONS, *NAMES, *COUNTS, *FOLDERS)


# ---- Syntax errors from the shell, or from a program that takes a script ---------------------------------------------

# The prefix of a shell's message: "bash: line 3: ", "zsh:1: ", "(eval):1: ", "/bin/sh: 1: ".
_SHELL_PREFIX = (
    r"^(?:(?:/\S{0,40}/)?(?:bash|sh|zsh|dash|ksh|fish)(?:: eval)?|-?bash|\(eval\)|eval)(?:: -c)?(?::[\w\[]{1,20})?"
    r"(?:: line \d+|[: ]+\d+)?: "
)
SYNTAX: tuple[FailureRule, ...] = (
    # Syntax errors in bash, zsh, dash and fish.
    # "bash: -c: line 1: syntax error near unexpected token `('"; "zsh: event not found: /usr";
    # not "syntax error in main.go"
    rule(
        "shell_syntax",
        _SHELL_PREFIX
        + r".{0,80}(?:syntax error|unexpected EOF|unexpected end of file|parse error|unmatched|unterminated"
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
        accept=_is_local,
    ),
    # PowerShell and cmd: "The string is missing the terminator: '."; "The syntax of the command is incorrect."
    rule(
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
        accept=_is_local,
    ),
    # "zsh: no matches found: a[0]=b" -> "a[0]=b"; "zsh:1: no matches found: src/*.rs" -> "src/*.rs"
    rule(
        "shell_syntax",
        rf"{_SHELL_PREFIX}no matches found: (\S.{{0,300}}?)\s*$|^fish: No matches for wildcard '(.{{1,300}}?)'",
        "no matches",
        channels="shell",
        confidence=0.8,
        accept=_is_unquoted_text,
    ),
    # Words in backticks, or in a variable, that the shell interpreted as a command.
    # "zsh: command not found: make test" -> "make test"; "bash: line 3: a.yaml: command not found" -> "a.yaml"
    rule(
        "shell_syntax",
        rf"{_SHELL_PREFIX}(?:(?:command not found|no such file or directory|permission denied"
        rf"|is a directory): (.{{1,200}}?)"
        r"|(.{1,200}?): (?:command not found|No such file or directory|Permission denied|Is a directory))$",
        *("not found", "no such file", "permission denied", "is a directory"),
        channels="shell",
        confidence=0.8,
        accept=_is_text_run_as_command,
    ),
    # An unquoted pattern that the shell expanded to file names.
    # "find: paths must precede expression: b.py"; "find: b.py: unknown primary or operator" -> "b.py"
    rule(
        "shell_syntax",
        r"^find: (\S{1,200}): unknown primary|^find: paths must precede expression",
        *("unknown primary", "precede"),
        channels="shell",
        confidence=0.8,
        accept=_has_unquoted_find_pattern,
    ),
    # Programs with a scripting language of their own.
    # "jq: error: syntax error, unexpected INVALID_CHARACTER"; "sed: -e expression #1, char 4: unknown command";
    # "rg: regex parse error:"; not "jq: error (at <stdin>:1): Cannot index number"
    rule(
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
    # Interpreters, for a program on the command line or on stdin.
    # `  File "<string>", line 1`; "-e:1: syntax error"; not `  File "app.py", line 1`
    rule(
        "shell_syntax",
        r'^\s*File "<(?:string|stdin)>", line \d+\s*$'
        r"|^-e:\d+: syntax error|^\[(?:eval|stdin)\]:\d+$|Parse error: .{0,120} in Command line code"
        r"|^syntax error at - line \d|^file:///\S{0,80}\[eval\d\]:\d+",
        *('file "<st', "-e:", "[eval", "[stdin]", "command line code", "at - line"),
        channels="shell",
        confidence=0.75,
        accept=_is_written_inline,
    ),
    # A cell of a notebook: "Cell In[3], line 2\n    x = = 1\nSyntaxError: invalid syntax"
    rule(
        "shell_syntax",
        r"\s*(?:Cell In ?\[\d{1,6}\], line \d{1,6}|File \"<ipython-input\S{1,80}, line \d{1,6})\n(?:.{0,300}\n){1,4}?"
        r"\s*(?:SyntaxError|IndentationError|TabError): ",
        *("syntaxerror", "indentationerror", "taberror"),
        channels="shell",
        where="start",
        confidence=0.75,
    ),
    # `ERROR:  syntax error at or near "FORM"`; "Error: in prepare, near FORM: syntax error"
    rule(
        "shell_syntax",
        r"^(?:psql:<stdin>:\d+: )?ERROR: +syntax error at or near"
        r"|^(?:Parse error: |Error: )?(?:in prepare, )?near .{1,60}: syntax error"
        r"|^ERROR 1064 \(42000\)",
        *("syntax error", "error 1064"),
        channels="shell",
        confidence=0.8,
        accept=lambda _, command: (
            _runs_familiar_only(command) and "<" not in command.text.replace("<<", "") and " -f" not in command.text
        ),
    ),
)


# ---- Services, databases and data: endpoints, tables and fields that do not exist ------------------------------------

SERVICES: tuple[FailureRule, ...] = (
    # "fatal: no git remotes found"; "must first push the current branch to a remote"
    rule(
        "usage_error",
        r"must first push the current branch|a pull request for branch .{1,200} already exists"
        r"|build constraints exclude all Go"
        r"|none of the git remotes configured|no git remotes found",
        *("first push", "already exists", "build constraints", "git remotes"),
        channels="shell",
        confidence=0.75,
        accept=_is_from_familiar,
    ),
    # "Error: no such table: user" -> "user"; "ERROR:  relation users does not exist" -> "users"
    rule(
        "api_misuse",
        r"no such (?:table|column|function): ([\w.]{1,80})|ERROR: +(?:column|relation|table"
        r"|function) \"?([\w.]{1,80})\b.{0,80} does not exist"
        r"|ERROR 1(?:054|146|064) \(\w{5}\).{0,40}? '?([\w.]{2,80})'",
        *("no such table", "no such column", "no such function", "does not exist", "error 1"),
        channels="shell",
        confidence=0.75,
        accept=_is_argument,
    ),
    # "gh: Not Found (HTTP 404)"; "Could not resolve to a Repository with the name"; not "gh: HTTP 500"
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
        accept=_runs_service_client,
    ),
    # "curl: (22) The requested URL returned error: 404"; not "curl: (7) Failed to connect"
    rule(
        "api_misuse",
        r"^curl: \(22\) .{0,80}\b(?:404|400|405|422)\b|ERROR (?:404|400|405|422): ",
        *("curl: (22)", "error 4"),
        channels="shell",
        confidence=0.7,
        accept=_names_remote_address,
    ),
    # A jq filter that does not match its input: "jq: error (at <stdin>:1): Cannot iterate over null (null)"
    rule(
        "usage_error",
        r"^jq: error \(at .{1,40}\): (?:Cannot (?:index|iterate)|.{0,200}(?:cannot be|has no keys"
        r"|and .{1,80} cannot))",
        "jq: error (at",
        channels="shell",
        confidence=0.7,
        accept=lambda _, command: _runs_familiar_only(command),
    ),
)
