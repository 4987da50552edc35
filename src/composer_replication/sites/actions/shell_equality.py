"""Build a key for a shell command: equal keys mean that two commands have the same effect.

A key is JSON built from the syntax tree: quoting is removed, options are sorted, and paths are resolved against the
folder in which each part runs. `cd src && ls -l -a` has the same key as `cd ./src && ls -al`. If the parser does not
support a command, its text is its key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from composer_replication.sites.actions.shell_lexer import (
    Piece,
    Redirect,
    ShellWord,
    UnsupportedShellSyntax,
    literal_word,
)
from composer_replication.sites.actions.shell_parser import (
    Block,
    CommandChain,
    ParsedCommand,
    Pipeline,
    Script,
    Simple,
    nested_script,
    parse_assignment,
    parse_script,
)
from composer_replication.sites.actions.shell_programs import (
    PROGRAMS,
    SAME_SUBCOMMAND,
    SUBCOMMANDS,
    CommandLine,
    Option,
    Program,
    parse_command_line,
)
from composer_replication.sites.actions.tools import normal_path, word_set

Key = list[object]
_LONGEST_FOLDER = 4096
_LONGEST_PATH = 512
_MAX_NESTED_SHELLS = 4  # `bash -c "bash -c …"`
# "1" in "2>&1" and "-" in ">&-"; not "log", which is a file
_DESCRIPTOR = re.compile(r"\d+-?|-")
_FOLDER_CHANGERS = ("pushd", "popd", "cd")


def command_key(text: str, folder: str | None) -> Key:
    """Return the key for a command that runs in `folder` (None: unknown)."""
    return _script_text_key(text, _location_of(folder), 0)


def argv_key(words: list[ShellWord], folder: str | None) -> Key:
    """Return the key for a program started with exactly these words, without a shell."""
    return _ShellWalk(_location_of(folder), 0).script(_script_of(Simple((), tuple(words), ())))


def folder_after(script: Script, folder: str | None) -> str | None:
    """Return the working folder after a script that started in `folder`, or None if it cannot be determined."""
    walk = _ShellWalk(_location_of(folder), 0)
    walk.script(script)
    location = walk.location
    if location.number or not location.folder.startswith("/"):
        return folder if location == _location_of(folder) else None
    return location.folder


def _location_of(folder: str | None) -> _Location:
    return _Location(normal_path(folder or ".", None))


def _script_of(command: ParsedCommand) -> Script:
    return (CommandChain((Pipeline(False, (command,)),), (), False),)


def _script_text_key(text: str, location: _Location, depth: int) -> Key:
    # Nested too deeply or not supported: the text itself is the key, which is never wrong, only too strict.
    if depth > _MAX_NESTED_SHELLS:
        return ["text", text.strip()]
    try:
        script = parse_script(text)
    except UnsupportedShellSyntax:
        return ["text", text.strip()]
    return _ShellWalk(location, depth).script(script)


@dataclass
class _ShellWalk:
    """A walk over a syntax tree in execution order, which builds keys and tracks the working folder."""

    location: _Location
    depth: int
    num_unknown: int = 0

    def script(self, script: Script) -> Key:
        """Return the key for a script, with one entry per chain."""
        return [self._chain(chain) for chain in script if not self._is_no_op(script, chain)]

    def _is_no_op(self, script: Script, chain: CommandChain) -> bool:
        """Return whether a chain is a `cd` to the current folder that is followed by another chain."""
        is_noop = len(chain.pipelines) == 1 and not chain.is_background and self._is_cd_to_here(chain.pipelines[0])
        return is_noop and chain is not script[-1]

    def _is_cd_to_here(self, pipeline: Pipeline) -> bool:
        target = _cd_target(pipeline)
        return target is not None and not self.location.number and self.location.path(target) == self.location.path(".")

    def _chain(self, chain: CommandChain) -> Key:
        """Return the key for a chain, and update the location.

        After the chain, the location is unknown if it depends on which commands failed.
        """
        start, first = self.location, 0
        # A leading `cd .` is a no-op: `cd /repo && ls` in /repo is `ls`.
        while (
            first < len(chain.operators)
            and chain.operators[first] == "&&"
            and self._is_cd_to_here(chain.pipelines[first])
        ):
            first += 1
        key: Key = []
        cd_indexes: list[int] = []
        for index, pipeline in enumerate(chain.pipelines[first:]):
            before = self.location
            key.append(self._pipeline(pipeline))
            cd_indexes += [index] if self.location != before else []
            key += chain.operators[first + index : first + index + 1]
        if chain.is_background:  # runs in a subshell
            self.location = start
            key.append("&")
        elif cd_indexes and ("||" in chain.operators or cd_indexes[-1] > 0):
            self._forget_location()  # which of the `cd`s ran depends on which commands failed
        return key

    def _pipeline(self, pipeline: Pipeline) -> Key:
        if len(pipeline.commands) == 1:
            key: Key = [self._command(pipeline.commands[0])]
        else:
            key = [self._pipeline_stage(command) for command in pipeline.commands]
        return ["!", *key] if pipeline.is_negated else key

    def _pipeline_stage(self, command: ParsedCommand) -> Key:
        """Return the key for a pipeline stage. It runs in a subshell, so its `cd` does not affect other stages."""
        before = self.location
        key = self._command(command)
        self.location = before
        return key

    def _command(self, command: ParsedCommand) -> Key:
        if isinstance(command, Block):
            return self._block(command)
        redirects = _redirect_keys(command.redirects, self.location)
        words, num_env_assignments = command.words, _env_prefix(command.words)
        env_assignments = [
            assignment
            for word in words[1 : 1 + num_env_assignments]
            if (assignment := parse_assignment(word)) is not None
        ]
        words = words[1 + num_env_assignments :] if num_env_assignments else words
        program: Key = self._program(words) if words else []
        return [_assignment_keys([*command.assignments, *env_assignments]), program, redirects]

    def _program(self, words: tuple[ShellWord, ...]) -> Key:
        """Return the key for a program. `cd` changes the location for the commands after it."""
        name = words[0].literal
        if name not in _FOLDER_CHANGERS:
            return _program_key(
                words, self.location, lambda text, location: _script_text_key(text, location, self.depth + 1)
            )
        target = words[1].literal if len(words) == 2 else None
        # The target of pushd, popd, `cd -` and `cd "$X"` cannot be determined from the text.
        if name != "cd" or target is None or target in ("", "-") or target.startswith("-") or self.location.number:
            key: Key = [name, *(_path_key(word, self.location) for word in words[1:])]
            is_absolute = name == "cd" and target is not None and target.startswith("/")
            self.location = _Location(self.location.path(target)) if is_absolute and target else self.location
            if not is_absolute:
                self._forget_location()
            return key
        self.location = _Location(self.location.path(target))
        key = ["cd", self.location.folder]
        if len(self.location.folder) > _LONGEST_FOLDER:
            # A script with a `cd a` on every line would otherwise take quadratic time and space.
            self._forget_location()
        return key

    def _block(self, block: Block) -> Key:
        """Return the key for a compound command, such as a loop or a subshell."""
        before = self.location
        parts = [self.script(part) for part in block.parts]
        names = [word.key for word in block.names]
        if block.kind == "(":  # a subshell: its `cd` has no effect outside
            self.location = before
        elif block.kind != "{" and self.location != before:
            self._forget_location()
        return [block.kind, names, parts, _redirect_keys(block.redirects, before)]

    def _forget_location(self) -> None:
        """Mark the folder as unknown, and as distinct from every other unknown folder."""
        self.num_unknown += 1
        self.location = _Location(number=self.num_unknown)


def _cd_target(pipeline: Pipeline) -> str | None:
    """Return the target of a plain `cd folder`, or None for any other pipeline."""
    command = pipeline.commands[0]
    if len(pipeline.commands) > 1 or pipeline.is_negated or not isinstance(command, Simple):
        return None
    texts = [word.literal for word in command.words]
    is_plain = len(texts) == 2 and texts[0] == "cd" and not command.assignments and not command.redirects
    return texts[1] if is_plain and texts[1] and not texts[1].startswith("-") else None


def _assignment_keys(assignments: list[tuple[str, ShellWord]]) -> Key:
    """Return the keys for assignments. Literal ones to distinct names are sorted, since their order has no effect."""
    keys: Key = [[name, value.key] for name, value in assignments]
    is_order_free = len({name for name, _ in assignments}) == len(assignments) and all(
        value.literal is not None for _, value in assignments
    )
    return sorted(keys, key=json.dumps) if is_order_free else keys


def _redirect_keys(redirects: tuple[Redirect, ...], location: _Location) -> Key:
    """Return the keys for redirections, sorted unless one refers to another, as `2>&1` does."""
    keys = [key for redirect in redirects for key in _redirect_key(redirect, location)]
    is_order_free = len({key[0] for key in keys}) == len(keys) and not any(str(key[1]).endswith("&") for key in keys)
    return sorted(keys, key=json.dumps) if is_order_free else list(keys)


def _redirect_key(redirect: Redirect, location: _Location) -> list[Key]:
    """Return the keys for a redirection. `&> log` has two: `> log` and `2>&1`."""
    op, target = redirect.op, redirect.target
    text = target.literal
    descriptor = redirect.descriptor or ("0" if op.startswith("<") else "1")
    if op == "<<<" and text is not None:  # the shell adds the newline
        return [[descriptor, "<<", f"{text}\n"]]
    if op in ("<<", "<<expanded", "<<<"):
        return [[descriptor, op, target.key]]
    if op in ("<&", ">&") and text is not None and _DESCRIPTOR.fullmatch(text):
        return [[descriptor, op, text]]
    file = _path_key(target, location)
    if op in ("&>", "&>>") or (op == ">&" and not redirect.descriptor):
        return [["1", ">>" if op == "&>>" else ">", file], ["2", ">&", "1"]]
    return [[descriptor, op, file]]


@dataclass(frozen=True, slots=True)
class _Location:
    """The folder where a command runs.

    If the start folder is unknown, `folder` is relative to it. After a `cd` to a folder that cannot be determined,
    `number` distinguishes the unknown folders within a script.
    """

    folder: str = "."
    number: int = 0

    def path(self, text: str) -> str:
        """Return a normalized path, resolved against this location."""
        if self.number and not text.startswith(("/", "~")):
            return f"?{self.number}:{normal_path(text, None)}"
        return normal_path(text, self.folder)


def _words_key(words: Sequence[ShellWord], location: _Location) -> Key:
    """Return the key for a command, in canonical form if the tables cover it and otherwise as plain words."""
    name = words[0].literal
    if name is None:
        return _unknown_program_key(words)
    if name in SUBCOMMANDS and len(words) > 1:
        return _subcommand_key(name, words, location)
    program = PROGRAMS.get(name)
    rest_key = _command_line_key(words[1:], program, location) if program is not None else None
    return [name, rest_key] if rest_key is not None else _unknown_program_key(words, location)


def _unknown_program_key(words: Sequence[ShellWord], location: _Location | None = None) -> Key:
    """Return the key for words in their original order. Only the program name is normalized, if it is a path."""
    first: object = words[0].key
    if location is not None and isinstance(first, str) and "/" in first:
        first = location.path(first)
    return ["words", first, *(word.key for word in words[1:])]


def _command_line_key(words: Sequence[ShellWord], program: Program, location: _Location) -> Key | None:
    """Return the key for the words after a program's name, or None if the program's table does not cover them."""
    line = parse_command_line(words, program)
    if line is None or _has_unknown_options(line, program):
        return None
    names = {option.name for option in line.options}
    operands = list(line.operands)
    # `grep x a` is `grep -e x a`.
    if program.pattern and operands and not names & {program.pattern, *program.no_pattern.split(",")}:
        line.options.append(Option(program.pattern, operands.pop(0)))
        line.dashes_at = None
    # Defaults are made explicit: `ls` is `ls .`, `head a` is `head -n 10 a`.
    if not operands and not line.rest and program.default:
        operands = [literal_word(program.default)]
    if program.assumed and not line.rest and not names & {"n", "c"}:
        line.options.append(Option(program.assumed[0], literal_word(program.assumed[2:])))
    options: Key = [
        [name, None if value is None else value.key]
        for name, value in sorted(line.options, key=lambda option: option.name)
    ]
    operand_keys = _operand_keys(operands, program, location, line.dashes_at)
    # `rm a b` is `rm b a`, unless a word may expand to several, or one operand is inside another.
    if (
        program.any_order
        and not line.rest
        and not names & set(program.ordered_with.split(","))
        and _are_independent(operand_keys)
    ):
        operand_keys.sort(key=json.dumps)
    dashes = line.dashes_at if program.keeps_dashes else None
    return [options, operand_keys, dashes, [word.key for word in line.rest]]


def _path_key(word: ShellWord, location: _Location, *, keeps_slash: bool = False) -> object:
    """Return the key for a path. If it contains a glob, only the folders before the glob are normalized."""
    text = word.literal
    if text is not None:
        if text in ("", "-") or text.startswith(":"):
            return text  # "-" is standard input; ":/" and ":(exclude)…" are magic pathspecs in git
        slash = "/" if keeps_slash and text.endswith("/") else ""
        return location.path(text) + slash
    first = word.pieces[0]
    if first.kind not in ("text", "glob"):
        return word.key
    folder, slash, start = first.text.rpartition("/") if first.kind == "text" else ("", "", "")
    if not slash and first.kind == "text":
        start = first.text
    rest = word.pieces[1:] if first.kind == "text" else word.pieces
    spelling = location.path(f"{folder}{slash}" or ".").removesuffix("/")
    return [list(piece) for piece in (Piece("text", f"{spelling}/{start}"), *rest)]


def _operand_keys(operands: Sequence[ShellWord], program: Program, location: _Location, dashes_at: int | None) -> Key:
    """Return the keys for the operands. The program's table says whether they are paths, words or a mixture of
    these.
    """
    kind = program.operands
    if program.paths_after_dashes and dashes_at is not None:
        names, paths = operands[:dashes_at], operands[dashes_at:]
        return [*(word.key for word in names), *(_path_key(word, location) for word in paths)]
    if kind == "words":
        return [word.key for word in operands]
    if kind == "tests":
        return [_test_key(word, location) for word in operands]
    first_is_path = kind in ("paths", "path then words", "pattern then paths")
    rest_are_paths = kind != "path then words"
    return [
        _path_key(word, location, keeps_slash=program.keeps_slash)
        if (first_is_path if index == 0 else rest_are_paths)
        else word.key
        for index, word in enumerate(operands)
    ]


def _test_key(word: ShellWord, location: _Location) -> object:
    """Return the key for a pytest node id such as `tests/test_a.py::test_b`: only the path is normalized."""
    text = word.literal
    if text is None:
        return word.key
    path, mark, names = text.partition("::")
    return location.path(path) + mark + names


def _has_unknown_options(line: CommandLine, program: Program) -> bool:
    """Return whether the program's table would misread the line.

    That is so for `tail +5`, where an operand is really a number, and for `tar -C`, whose effect depends on its
    position.
    """
    if program.number == "n":
        return any((word.literal or "").startswith("+") for word in line.operands)
    changes_folder = program is PROGRAMS["tar"] and any(option.name == "C" for option in line.options)
    return changes_folder and bool(line.operands)


def _are_independent(keys: Key) -> bool:
    """Return whether no operand is inside another. In `mkdir a a/b` the order matters."""
    paths = {key for key in keys if isinstance(key, str)}
    if any(len(path) > _LONGEST_PATH for path in paths):
        return False
    return not any(path[: slash.start()] in paths for path in paths for slash in re.finditer("/", path))


def _subcommand_key(name: str, words: Sequence[ShellWord], location: _Location) -> Key:
    """Return the key for a program with subcommands, such as git or cargo."""
    settings, at = list[object](), 1
    if name == "git":
        settings, at, location = _git_settings(words, location)
    subcommand = words[at].literal if at < len(words) else None
    if subcommand is None:
        return _unknown_program_key(words, location)
    spelling = SAME_SUBCOMMAND.get(name, {}).get(subcommand, (subcommand,))
    program = SUBCOMMANDS[name].get(spelling[0])
    rest = [*(literal_word(text) for text in spelling[1:]), *words[at + 1 :]]
    rest_key = _command_line_key(rest, program, location) if program is not None else None
    return [name, settings, spelling[0], rest_key if rest_key is not None else ["words", *(word.key for word in rest)]]


def _git_settings(words: Sequence[ShellWord], location: _Location) -> tuple[Key, int, _Location]:
    """Parse the global options in `git -C folder -c key=value --no-pager …`.

    Returns:
        The settings, the index of the subcommand, and the folder in which the subcommand runs.
    """
    settings, at, start = list[object](), 1, location
    while at + 1 < len(words):
        text, value = words[at].literal, words[at + 1].literal
        if text == "-C" and value and not location.number:
            location = _Location(location.path(value))
            at += 2
        elif text == "-c" and value:
            settings.append(["-c", value])
            at += 2
        elif text in ("--no-pager", "-P"):
            settings.append("--no-pager")
            at += 1
        else:
            break
    if location.folder != start.folder:
        settings.append(["-C", location.folder])
    return settings, at, location


# The syntax of the programs below does not fit in a table: launchers of other programs, `find`, `echo`, `python`, `go`.

ShellKey = Callable[[str, _Location], Key]
"""A function that returns the key for a whole script, used for `bash -c script`."""
_MAX_LAUNCHERS = 4  # `sudo nohup timeout 5 time …`
_LAUNCHERS = word_set("sudo nohup time command uv poetry pipenv npx")
_LAUNCHERS_WITH_RUN = word_set("uv poetry pipenv")
_BUILTINS = word_set(
    "cd export source . eval exec set unset alias read type ulimit umask trap shift return exit test [ : builtin"
)
# "CI=" in "CI=1"; not "--name=1"
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
# "5", "2.5s" and "10m", the first operand of timeout; not "5min"
_DURATION = re.compile(r"\d+(?:\.\d+)?[smhd]?")
# "python", "python3" and "python3.11"; not "python-config"
_PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?")
# "s|a/b|c|g" -> delimiter "|", old "a/b", new "c", flags "g"; not "s/a\/b/c/", whose delimiter is escaped
_SUBSTITUTION = re.compile(
    r"s(?P<mark>[^\w\s\\\x01])(?P<old>(?:(?!(?P=mark))[^\\\n\x01])+)(?P=mark)(?P<new>(?:(?!(?P=mark))[^\\\n\x01])*)(?P=mark)"
    r"(?P<flags>[gpIi0-9]*)"
)
_PYTHON_OPTIONS = Program(flags="uBEIsSqvO", valued="WX", permutes=False, operands="path then words")
# Tests in `find` that have no side effects, with the number of their values. Their order does not matter.
_FIND_TESTS = {"-empty": 0} | dict.fromkeys(
    word_set(
        "-name -iname -type -path -ipath -wholename -regex -iregex -size -mtime -mmin -newer -perm -user -group"
        " -maxdepth -mindepth -ctime -atime"
    ),
    1,
)
_GO_FLAGS = word_set("v race short cover x n a json failfast benchmem")
_GO_VALUE_OPTIONS = word_set("run count timeout bench tags p coverprofile o ldflags gcflags parallel cpu mod")


def _program_key(words: Sequence[ShellWord], location: _Location, shell: ShellKey, depth: int = 0) -> Key:
    """Return the key for any program. `depth` counts nested launchers (programs that run another program)."""
    name = words[0].literal
    if name is None or depth > _MAX_LAUNCHERS:
        return _unknown_program_key(words)
    return _special_key(name, words, location, shell, depth) or _words_key(words, location)


def _env_prefix(words: Sequence[ShellWord]) -> int:
    """Return the number of assignments after `env` if it only sets variables for a program, otherwise 0.

    `env A=1 make` is equivalent to `A=1 make`, but `env` cannot run a builtin such as `cd`.
    """
    index = 1
    while index < len(words) and _ASSIGNMENT.match(words[index].raw):
        index += 1
    program = words[index].literal if index < len(words) else None
    is_plain = program is not None and program not in _BUILTINS and not program.startswith("-")
    return index - 1 if is_plain and words[0].literal == "env" else 0


def _special_key(name: str, words: Sequence[ShellWord], location: _Location, shell: ShellKey, depth: int) -> Key | None:
    """Return the key for a program with special syntax, or None for any other program."""
    if name in _LAUNCHERS or name == "timeout":
        return _launcher_key(name, words, location, shell, depth)
    script = nested_script([word.literal for word in words])
    if script is not None:
        return ["shell", name, words[1].literal, shell(script, location)]
    if name == "echo":
        return _echo_key(words)
    if name == "find":
        return _find_key(words, location)
    if _PYTHON.fullmatch(name):
        return _python_key(name, words, location, shell, depth)
    if name == "sed":
        return _words_key([_normalize_delimiter(word) for word in words], location)
    if name == "make":
        return _words_key(_join_job_option(words), location)
    if name == "tar":
        return _words_key(_add_dash_to_letters(words), location)
    return _go_key(words) if name == "go" and len(words) > 1 else None


def _normalize_delimiter(word: ShellWord) -> ShellWord:
    """Return a sed substitution with a canonical delimiter: `s|a|b|` and `s/a/b/` are equal if nothing is escaped."""
    match = _SUBSTITUTION.fullmatch(word.literal or "")
    if match is None:
        return word
    # Neither part can contain \x01: the pattern excludes it.
    return literal_word("\x01".join(("s", match["old"], match["new"], match["flags"])))


def _launcher_key(
    name: str, words: Sequence[ShellWord], location: _Location, shell: ShellKey, depth: int
) -> Key | None:
    """Return the key for `sudo rm -rf x`: the launcher's words, followed by the key for the program it runs."""
    num_launcher_words = 1
    if name == "timeout" or name in _LAUNCHERS_WITH_RUN:
        second = words[1].literal if len(words) > 1 else None
        is_known = (
            second == "run" if name in _LAUNCHERS_WITH_RUN else second is not None and _DURATION.fullmatch(second)
        )
        num_launcher_words = 2 if is_known else 0
    following = words[num_launcher_words].literal if num_launcher_words and num_launcher_words < len(words) else None
    if following is None or following.startswith("-") or _ASSIGNMENT.match(following):
        return None
    if name == "npx":
        return ["runs", name, _words_key(words[num_launcher_words:], location)]
    return [
        "runs",
        *(word.key for word in words[:num_launcher_words]),
        _program_key(words[num_launcher_words:], location, shell, depth + 1),
    ]


def _echo_key(words: Sequence[ShellWord]) -> Key | None:
    """Return the key for what echo prints: its words joined by blanks.

    Return None if the output depends on an expansion.
    """
    texts = [word.literal for word in words[1:]]
    num_flags = 0
    while num_flags < len(texts) and texts[num_flags] in ("-n", "-e", "-E", "-ne", "-en"):
        num_flags += 1
    literals = [text for text in texts[num_flags:] if text is not None]
    return ["echo", texts[:num_flags], " ".join(literals)] if len(literals) == len(texts) - num_flags else None


def _find_key(words: Sequence[ShellWord], location: _Location) -> Key | None:
    """Return the key for `find`: its folders, its sorted tests, and its actions unchanged."""
    at, paths = 1, list[object]()
    while at < len(words) and not _starts_expression(words[at]):
        if words[at].splits:
            return None
        paths.append(_path_key(words[at], location))
        at += 1
    tests: list[Key] = []
    while at < len(words):
        negated = words[at].literal in ("!", "-not")
        test = words[at + negated].literal if at + negated < len(words) else None
        size = _FIND_TESTS.get(test or "")
        end = at + negated + 1 + (size or 0)
        if test is None or size is None or end > len(words) or any(word.splits for word in words[at:end]):
            break
        tests.append([test, bool(negated), *(word.key for word in words[end - size : end])])
        at = end
    rest = [word.key for word in words[at:]]
    # Without an action, `find` prints the paths.
    return ["find", paths or [location.path(".")], _sorted_tests(tests), [] if rest == ["-print"] else rest]


def _sorted_tests(tests: list[Key]) -> list[Key]:
    """Return tests sorted by name and value. Depth limits keep their order, because the last one wins."""
    return sorted(tests, key=lambda test: [str(test[0]), "" if "depth" in str(test[0]) else repr(test)])


def _starts_expression(word: ShellWord) -> bool:
    return bool(word.pieces) and word.pieces[0].text.startswith(("-", "(", "!")) and word.pieces[0].kind == "text"


def _python_key(name: str, words: Sequence[ShellWord], location: _Location, shell: ShellKey, depth: int) -> Key | None:
    """Return the key for python with a module (`-m`), code (`-c`) or a script."""
    texts = [word.literal for word in words]
    at = next((index for index, text in enumerate(texts[1:], start=1) if not _is_python_flag(text)), len(words))
    flags = sorted(str(text) for text in texts[1:at])
    if at + 1 < len(words) and texts[at] == "-m":
        return [name, flags, "-m", _program_key(words[at + 1 :], location, shell, depth + 1)]
    if at < len(words) and texts[at] == "-c":
        return [name, flags, "-c", [word.key for word in words[at + 1 :]]]
    script_key = _command_line_key(words[at:], _PYTHON_OPTIONS, location)
    return [name, flags, script_key] if script_key is not None else None


def _is_python_flag(text: str | None) -> bool:
    return text in ("-u", "-B", "-I", "-s", "-S", "-E", "-q", "-O")


def _join_job_option(words: Sequence[ShellWord]) -> list[ShellWord]:
    """Return the words of a make command, with the two words `-j 4` joined into `-j4`."""
    joined: list[ShellWord] = []
    for word in words:
        if joined and joined[-1].literal == "-j" and (word.literal or "").isdigit():
            joined[-1] = literal_word(f"-j{word.literal}")
        else:
            joined.append(word)
    return joined


def _add_dash_to_letters(words: Sequence[ShellWord]) -> Sequence[ShellWord]:
    """Rewrite `tar xzf a` as `tar -xzf a`, if only the last letter takes a value."""
    letters = words[1].literal if len(words) > 1 else None
    # "xzf" and "xv"; not "xfz", whose value would have to move
    is_old_style = letters is not None and re.fullmatch(r"[xctzjJvpk]+f?", letters) is not None
    return [words[0], literal_word(f"-{letters}"), *words[2:]] if is_old_style else words


def _go_key(words: Sequence[ShellWord]) -> Key | None:
    """Return the key for `go test`, `go build` or `go vet`, or None for other commands.

    Options have a single dash, `-run X` or `-run=X`. Only `go test` accepts options after the packages.
    """
    command, options, packages, at = words[1].literal, list[tuple[str, object]](), list[object](), 2
    if command not in ("test", "build", "vet"):
        return None
    while at < len(words):
        text = words[at].literal
        if text is None or text == "-args":
            return None
        name, equals, value = text.lstrip("-").partition("=")
        at += 1
        if not text.startswith("-"):
            packages.append(text)
        elif packages and command != "test":
            return None
        elif equals and name in _GO_VALUE_OPTIONS:
            options.append((name, value))
        elif name in _GO_FLAGS and not equals:
            options.append((name, None))
        elif name in _GO_VALUE_OPTIONS and at < len(words) and not words[at].splits:
            options.append((name, words[at].key))
            at += 1
        else:
            return None
    return ["go", command, sorted(options, key=lambda option: option[0]), packages]
