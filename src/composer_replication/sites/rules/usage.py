"""Rules for programs that were called incorrectly: unknown options and names, wrong argument counts, the wrong folder.

They are tried before the rules for tests and builds, because a runner that was called incorrectly did not run anything.
The `accept` functions, which check that the message concerns the command, are in `typed`.
"""

from __future__ import annotations

from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.rules.typed import (
    is_about_command_line,
    is_argument,
    is_argument_or_script,
    is_direct_call,
    is_from_familiar,
    is_from_familiar_alone,
    is_option_letter,
    is_option_without_dashes,
    is_typed_path,
    is_typed_target,
    runs_familiar_only,
    shows_its_usage,
)

# Building blocks of patterns: an opening quote, an option, "unknown" and its synonyms, nouns for options, and a name.
_Q = r"['\"`‘“«]?"
_OPTION = r"--?\w[\w-]{0,60}"
_WRONG = r"(?:unknown|unrecogni[sz]ed|illegal|invalid|bad|unsupported|unexpected|undefined|ambiguous|no such)"
_KINDS = r"(?:option|flag|switch|argument|parameter|primary or operator|predicate)"
_NAME = rf"{_Q}([\w:./@-]{{1,80}})"

OPTIONS: tuple[FailureRule, ...] = (
    # An unknown option: GNU and BSD tools, Go, cobra, clap, argparse, click, npm, PowerShell.
    # "error: unknown option '--colour'" -> "--colour"; "flag provided but not defined: -verbose" -> "-verbose"
    rule(
        "usage_error",
        rf"{_WRONG} (?:(?:shorthand|long|short|global|extra|command[- ]line) ){{0,2}}{_KINDS}s?(?: provided"
        rf"| name)?(?: --)?[:=]?"
        rf"\s{{0,3}}{_Q}({_OPTION})|flag provided but not defined: (-[\w-]{{1,60}})"
        rf"|^\S{{1,40}}: (-[\w-]{{1,40}}): (?:unknown|invalid) (?:primary|option|predicate|expression)"
        rf"|\bUnknown (?:option|argument)s?: {_Q}([\w-]{{1,60}})|Found argument {_Q}({_OPTION})"
        rf"|{_KINDS} {_Q}({_OPTION}){_Q}:? (?:is|was|are) ?(?:not|n't|unknown|ambiguous|badly|unrecognized)"
        rf"|{_Q}({_OPTION}){_Q}:? is not an? (?:\w+ ){{0,2}}(?:option|flag|argument|switch|command)"
        rf"|bad flag {_Q}({_OPTION}){_Q} used|option {_Q}({_OPTION}){_Q} must come before"
        r"|cannot be found that matches parameter name '(\w{1,60})'"
        r"|parameter cannot be found that accepts argument '(.{1,80}?)'",
        *("option", "flag", "switch", "argument", "primary", "predicate", "parameter"),
        channels="shell",
        confidence=0.85,
        accept=is_argument,
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
        accept=is_option_without_dashes,
    ),
    # A single letter: "ls: invalid option -- 'Z'" -> "Z"; "unknown shorthand flag: 'q' in -q" -> "q"
    rule(
        "usage_error",
        rf"^[\w.+-]{{1,40}}: (?:{_WRONG} option|option requires an argument):? --? ?{_Q}(\w\b|-)"
        r"|unknown shorthand flag: '(\w)'|flag needs an argument: '(\w)'|^[\w.+-]{1,40}: illegal (?:line"
        r"|byte) count -- (-?\w)"
        r"|^(?:[\w.+-]{1,40}: )(?:line \d+: )?(?:[\w.+-]{1,40}: )?-(\w): invalid option",
        *("option", "shorthand", "illegal line", "illegal byte", "needs an argument"),
        channels="shell",
        confidence=0.85,
        accept=is_option_letter,
    ),
    # An option without its value, or with an invalid value.
    # "error: argument --depth: expected one argument" -> "--depth"; "Invalid value for '--port': eighty" -> "--port"
    rule(
        "usage_error",
        r"invalid argument:? ['\"‘]([^'\"’]{1,80})['\"’] for"
        rf"|{_KINDS} (?:needs|requires)(?: an?)? (?:argument|value|parameter)[: ]+{_Q}({_OPTION})"
        rf"|{_KINDS} {_Q}({_OPTION}){_Q}:? (?:needs|requires|expects?|expected|missing)\b"
        rf"|a value is required for {_Q}({_OPTION})|{_Q}({_OPTION}){_Q}: expected (?:one|at least one|\d+) argument"
        rf"|^error: argument (?:-\w/)?({_OPTION}).{{0,40}}: (?:expected|invalid|not allowed|ignored)"
        rf"|invalid (?:\w+ )?(?:value|argument|choice)s?:? .{{0,80}}? for (?:flag |option |argument )?{_Q}({_OPTION})"
        rf"|Invalid value for {_Q}({_OPTION})|invalid (?:\w+ )?(?:value|choice): {_Q}([\w:./-]{{2,80}})"
        r"|(?:required flag\(s\)"
        r"|Missing option) ['\"]([\w-]{1,60})",
        *("requires", "needs", "expect", "value", "invalid ", "required flag", "missing", "not allowed"),
        channels="shell",
        confidence=0.8,
        accept=lambda match, command: (
            is_argument(match, command)
            or (match[0].startswith(("required", "Missing")) and runs_familiar_only(command))
        ),
    ),
)

NAMES: tuple[FailureRule, ...] = (
    # An unknown subcommand, task, target or other name.
    # "unknown command: 'statuss'" -> "statuss"; "npm ERR! missing script: biuld" -> "biuld"
    rule(
        "usage_error",
        rf"(?:unknown|unrecogni[sz]ed|no such|invalid) (?:sub)?command:? {_NAME}|has no command named {_NAME}"
        rf"|(?:sub)?command {_Q}([\w:-]{{1,60}}){_Q} (?:wasn't recognized|not found|does not exist"
        rf"|is not (?:recognized|defined))"
        rf"|{_Q}([\w:-]{{1,60}}){_Q} is not a \w{{1,20}} command|unknown json field: {_NAME}"
        rf"|unknown linters?: {_NAME}"
        rf"|no task {_Q}([\w:./-]{{1,60}}){_Q} found|(?:task|recipe|target|job|stage|service|profile|environment"
        rf"|context|label) {_NAME}{_Q} "
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
        accept=is_argument_or_script,
    ),
    # Printed before git's message about the whole push: "error: src refspec mian does not match any" -> "mian"
    rule(
        "git_state",
        r"^error: src refspec (\S{1,200}) does not match any",
        "src refspec",
        channels="shell",
        confidence=0.8,
        accept=is_argument,
    ),
    # "make: *** No rule to make target 'tets'.  Stop." -> "tets"
    rule(
        "usage_error",
        r"No rule to make target [`'‘]([\w:./-]{1,80})['’]",
        "no rule to make",
        channels="shell",
        confidence=0.75,
        accept=is_typed_target,
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
        accept=is_argument,
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
        accept=is_from_familiar,
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
            is_from_familiar_alone(match, command) if ":" in match[0] else runs_familiar_only(command)
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
        accept=is_about_command_line,
    ),
    # Only the usage text, without a message: "usage: git-lfs [options]" -> "git-lfs"; not "see the usage notes"
    rule(
        "usage_error",
        r"^\s*usage:\s+(?:\S{0,60}/)?([\w.+-]{1,40})",
        "usage:",
        channels="shell",
        confidence=0.75,
        accept=shows_its_usage,
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
        accept=is_from_familiar_alone,
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
        accept=is_direct_call,
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
        accept=is_typed_path,
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
        accept=is_from_familiar,
    ),
)

USAGE: tuple[FailureRule, ...] = (*OPTIONS, *NAMES, *COUNTS, *FOLDERS)
