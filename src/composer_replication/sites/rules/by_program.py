"""Rules for the usage errors of single programs, looked up by the programs in the command.

A runner (`npx`, `make`, `go run`) runs code from the project, whose output belongs to the work. The sentences below
are printed by the runner itself before that code starts. A name in the message must have been typed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from composer_replication.sites.actions.shell_command import Command
from composer_replication.sites.actions.tools import word_set
from composer_replication.sites.rule import FailureRule, rule
from composer_replication.sites.rules.usage import captured_name

# Programs whose arguments contain the name of another program.
_LAUNCHERS = word_set("npx bunx npm pnpm yarn bun uv uvx poetry pipx pdm hatch rye mise asdf direnv dotenv bundle")
_QUOTES = "'\"`\u2018\u2019"
# Each block starts with its programs and the kind of failure. Each line below contains a word that occurs in every such
# message, in lower case, and the pattern of the message after " ~ ". A `'` in a pattern matches any quotation mark.
# For example, under "git: shell_path_missing":
# "fatal: pathspec ':(glob)src/*.rs' did not match any files" -> "src/*.rs";
# not "fatal: pathspec 'src' did not match any files"
_TABLE = r"""
git: git_state
  does not appear to be a git ~ ^fatal: '((?!origin\b)[\w.-]{1,60})' does not appear to be a git repository
  could not access ~ ^error: Could not access '(.{1,200}?)'
  bisect start ~ ^You need to start by .git bisect start
git: shell_path_missing
  did not match any ~ ^(?:error|fatal): pathspec ':\([\w:,]{1,40}\)(.{1,200}?)' did not match any
  can't open patch ~ ^error: can't open patch '(.{1,200}?)'
  bad source ~ ^fatal: bad source, source=(.{1,200}?),
gh: usage_error
  workflows named ~ could not find any workflows named (\S{1,100})
  issue format ~ invalid issue format: '(.{1,100}?)'
  no commits between ~ GraphQL: No commits between
  head ref must ~ GraphQL: Head ref must be a branch
  option requires ~ the '(--[\w-]{1,40})' option requires
gh docker podman kubectl go: shell_syntax
  can't evaluate ~ template: .{0,60}:\d+:\d+: executing .{1,80} at <(.{1,80}?)>: can't evaluate
  template: ~ ^template: .{0,60}:\d+: (?:unexpected|unclosed|function .{1,40} not defined)
  template parsing ~ ^template parsing error
  parsing jsonpath ~ error parsing jsonpath
go: usage_error
  unknown command ~ ^go (\w[\w ]{0,40}): unknown command
  requires a version ~ requires a version when current directory is not in a module
  no packages loaded ~ no packages loaded from (\S{1,200})
  invalid regexp ~ ^testing: invalid regexp for element \d+ of -test\.\w+ \('(.{1,200}?)'\)
go: wrong_folder
  no go files in ~ ^(?:package .{1,200}: )?no Go files in
  cannot find main module ~ ^go: cannot find main module
  go.mod file not found ~ ^go: go\.mod file not found in current directory
  does not contain package ~ ^(?:go: )?main module \(.{1,200}\) does not contain package
go gofmt goimports gofumpt golangci-lint: shell_path_missing
  no such file ~ ^(?:pattern \S{1,200}: )?(?:stat|lstat|open|chdir) (\S{1,400}): no such file
  directory not found ~ ^(?:stat|chdir) (\S{1,400}): directory not found
  is not in ~ ^package (\S{1,200}) is not in (?:std|GOROOT)
golangci-lint: usage_error
  no go files to analyze ~ no go files to analyze
  can't combine ~ can't combine options
cargo: usage_error
  target named ~ ^error: no \w{1,12} target named '(.{1,80}?)'
  which binary ~ could not determine which binary to run
  does not contain th ~ does not contain (?:this|these) features?: ([\w-]{1,80})
  does not have the feature ~ does not have the feature '([\w-]{1,80})'
  could not be found ~ ^error: the crate '(.{1,80}?)' could not be found
  manifest path ~ ^error: manifest path '(.{1,200}?)' does not exist
rustc rustup: usage_error
  couldn't read ~ ^error: couldn't read '?(\S{1,200}?)'?: No such
  component ~ does not (?:contain|support) component '(.{1,60}?)'
npm pnpm yarn bun npx: wrong_folder
  package.json ~ ^npm \S{1,6} enoent .{0,80}open '.{1,300}package\.json'
npm pnpm yarn bun: usage_error
  not in this registry ~ 404\s+'(@?[\w./-]{1,100})(?:@[^']{0,60})?' is not in this registry
  no matching version ~ No matching version found for (\S{1,100}?)\.?$
  no workspaces found ~ No workspaces found:?$
  no projects matched ~ ^No projects matched the filters
  adding_to_root ~ ERR_PNPM_ADDING_TO_ROOT
node: usage_error
  bad option ~ ^\S{0,100}node: bad option: (-\S{1,60})
  requires an argument ~ ^\S{0,100}node: (-\S{1,60}) requires an argument
node deno bun: shell_path_missing
  cannot find module ~ ^(?:Error: )?Cannot find module '(/[^']{1,400})'
  module not found ~ Module not found 'file://(/[^']{1,400})'
tsc: usage_error
  ts502 ~ ^error TS502[35]: Unknown compiler option '(--?\S{1,60}?)'
  ts6053 ~ ^error TS6053: File '(.{1,200}?)' not found
  ts5058 ~ ^error TS5058: .{0,60}does not exist: '(.{1,200}?)'
  ts5057 ~ ^error TS5057: .{1,200}: '(.{1,200}?)'
  ts5042 ~ ^error TS5042:
  ts6044 ~ ^error TS6044: Compiler option '(.{1,60}?)' expects
eslint prettier stylelint biome: usage_error
  no files matching ~ No files matching (?:the pattern )?(?:were found: )?'([^'\s]{1,200})
  invalid option ~ ^Invalid option '(--?\S{1,60}?)'
  unknown option ~ Ignored unknown option (--?\S{1,60}?)\.?$
jest vitest mocha playwright: usage_error
  0 matches ~ ^Pattern: (\S.{0,200}?) - 0 matches
  filter: ~ ^filter: +(\S{1,200})$
  unknown option ~ [Uu]nknown option '(--?\S{1,60}?)'
  was replaced ~ Option '([\w-]{1,60})' was replaced
  unrecognized ~ Unrecognized (?:CLI Parameter|option) '([\w-]{1,60})'
pytest py.test: usage_error
  expression passed to ~ Wrong expression passed to '-[km]':
  error: not found: ~ ^ERROR: not found: \S{1,300}::(\w{1,100})
  error: argument - ~ ^pytest: error: argument -\S{1,30}: (?:expected|invalid)
  0 selected ~ ^collected \d+ items? / \d+ deselected / 0 selected
pip pip3: usage_error
  from versions: ~ requirement (\S{1,100}) \(from versions: \d
  invalid requirement ~ ^ERROR: Invalid requirement: '(.{1,200}?)'
  at least one requirement ~ ^ERROR: You must give at least one requirement
pip pip3 uv poetry pdm: wrong_folder
  python project ~ ^ERROR: .{1,300} does not appear to be a Python project
  pyproject.toml ~ ^(?:error: )?No '?pyproject\.toml'? found
  find a pyproject.toml ~ could not find a pyproject\.toml
uv: usage_error
  defined in the project ~ ^error: (?:Group|Extra) '(.{1,60}?)' is not defined in the project
mypy pyright: shell_path_missing
  can't read file ~ ^mypy: can't read file '(.{1,200}?)'
  does not exist ~ ^File or directory '(.{1,300}?)' does not exist
alembic: usage_error
  locate revision ~ Can't locate revision identified by '(.{1,80}?)'
make gmake: wrong_folder
  no makefile found ~ ^g?make: \*\*\* No targets specified and no makefile found
make gmake: shell_path_missing
  no such file ~ ^g?make: \*\*\* (\S{1,200}): No such file or directory\.
make gmake: usage_error
  option ~ ^g?make: (?:unrecognized|illegal|invalid) option (?:-- )?'?(-{0,2}[\w-]{1,40})
just task rake: usage_error
  contain recipe ~ ^error: justfile does not contain recipe '?([\w:-]{1,60})
  no justfile ~ ^error: No justfile found
  does not exist ~ ^task: Task '(.{1,60}?)' does not exist
  how to build task ~ Don't know how to build task '(.{1,60}?)'
kubectl: usage_error
  the path ~ ^error: the path '(.{1,200}?)' does not exist
  expected ' ~ ^error: expected '\w
  container name must ~ ^error: a container name must be specified
  no context exists ~ no context exists with the name: '(.{1,80}?)'
  printer suitable ~ a printer suitable for the output format '(.{1,60}?)'
  no name was ~ ^error: resource\(s\) were provided, but no name
curl jq yq: usage_error
  when reading a file ~ ^curl: option -.{1,40}: error encountered when reading a file
  takes ~ ^jq: (--\S{1,40}) takes \w+ parameter
  unexpected ~ ^(?:Error: )?\d+:\d+: unexpected
awk gawk grep egrep: shell_syntax
  cmd. line ~ ^g?awk: cmd\. line:\d+: .{0,80}\^\s
  not balanced ~ ^e?grep: \w+ not balanced
awk gawk: shell_path_missing
  open ~ ^g?awk: (?:can't open file |cannot open (?:file )?')([^'\s]{1,200})
tar unzip open sqlite3: shell_path_missing
  cannot open ~ ^tar(?: \(child\))?: (\S{1,200}): Cannot open: No such
  failed to open ~ ^tar: .{0,40}Failed to open '(.{1,200}?)'
  find or open ~ ^unzip:  cannot find or open (\S{1,200}?),
  does not exist ~ ^The file (/.{1,300}) does not exist\.$
  unable to open ~ unable to open database '(.{1,200}?)'
rg: shell_path_missing
  os error 2 ~ ^(?:rg: )?(\S{1,200}): .{0,200}No such file or directory \(os error 2\)
cd type dir copy move del: shell_path_missing
  cannot find the ~ ^The system cannot find the (?:path|file) specified
grep egrep: usage_error
  context length ~ ^e?grep: (\S{1,60}): invalid context length
  invalid argument ~ ^e?grep: (\S{1,60}): Invalid argument
  option requires ~ ^e?grep: option requires an argument
find: usage_error
  terminating ~ ^find: -\w+: no terminating
  arguments to - ~ ^find: Arguments to -
  unknown type ~ ^find: -\w+: (\S{1,40}): unknown type
  positive decimal ~ ^find: Expected a positive decimal
  parse date ~ ^find: Can't parse date/time
sort cp mv ln ps lsof pgrep stat plutil: usage_error
  field start ~ ^sort: invalid number at field start
  is not a directory ~ ^(?:cp|mv|ln): (?:target )?'?([^'\s]{1,200})'? is not a directory
  : not a directory ~ ^mv: .{1,200}: Not a directory
  option ~ ^error: (?:unknown gnu long option|unsupported option)|^(-\w{1,40}): invalid option$
  unacceptable ~ ^lsof: unacceptable
  matching criteria ~ ^pgrep: no matching criteria
  file system information ~ ^stat: cannot read file system information for '(%.{0,40}?)'
psql sqlite3: api_misuse
  group by ~ ^ERROR:  column .{1,80} must appear in the GROUP BY
  input syntax ~ ^ERROR:  invalid input syntax for
  operator does not exist ~ ^ERROR:  operator does not exist
  from-clause ~ ^ERROR:  missing FROM-clause
  invalid arguments ~ unknown command or invalid arguments: +'(.{1,40}?)'
  ambiguous column ~ ambiguous column name: (\S{1,80})
"""


def _is_typed(match: re.Match[str], command: Command) -> bool:
    """Return whether the name in the message was typed in the command.

    For a path, it is enough that its end was typed, since programs print absolute paths.
    """
    name = captured_name(match)
    if not name or name in command.text or name.lstrip("-") in command.words:
        return True
    ends = (word.removeprefix("./").rstrip("/.") for word in command.words)
    return any(len(word) > 1 and name.endswith(f"/{word}") for word in ends)


def _match_any_quotes(pattern: str) -> str:
    """Return the pattern with every `'`, even in a negated class, replaced by a class of all quotation marks."""
    return f"[^{_QUOTES}".join(part.replace("'", f"[{_QUOTES}]") for part in pattern.split("[^'"))


def _rules_by_program() -> Mapping[str, tuple[FailureRule, ...]]:
    """Return the rules in the table by program. Each block becomes one rule."""
    by_program: dict[str, list[FailureRule]] = defaultdict(list)
    for block in re.split(r"\n(?=\w)", _TABLE.strip()):
        head, *rows = block.split("\n")
        programs, _, kind = head.partition(": ")
        pairs = [row[2:].split(" ~ ", 1) for row in rows]
        pattern = "|".join(_match_any_quotes(pattern) for _, pattern in pairs)
        needles = tuple(needle for needle, _ in pairs)
        failure_rule = rule(kind, pattern, *needles, channels="shell", confidence=0.75, accept=_is_typed)
        for program in programs.split():
            by_program[program].append(failure_rule)
    return {program: tuple(rules) for program, rules in by_program.items()}


_RULES = _rules_by_program()


def rules_for_command(command: Command) -> Iterator[FailureRule]:
    """Yield the rules for the programs in this command."""
    names = {name for name, _ in command.programs}
    if not names.isdisjoint(_LAUNCHERS):
        names |= command.words & _RULES.keys()
    for name in sorted(names & _RULES.keys()):
        yield from _RULES[name]
