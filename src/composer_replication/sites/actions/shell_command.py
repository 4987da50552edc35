"""Describe a shell command: the programs it runs, the words it contains, what it may change, which files it writes.

- `Command` answers questions about one command, such as whether a line of output is a message from the command itself.
- `change_kind`, `is_read_only_command` and `leaves_sources_unchanged` bound the effect of a command on files.
- `files_written_by` returns the files that a successful command is certain to have written.

The answers come from the syntax tree. If the parser does not support a command, its text is split at separators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from composer_replication.sites.actions.shell_lexer import UnsupportedShellSyntax
from composer_replication.sites.actions.shell_parser import (
    ParsedCommand,
    Script,
    Simple,
    commands_in,
    nested_script,
    parse_script,
)
from composer_replication.sites.actions.tools import word_set

_MAX_LENGTH = 20_000
_MAX_WORDS = 24
_MAX_DEPTH = 4
# Fallback if the parser does not support a command: "a && b; $(c" -> "a ", " b", " ", "c"
_COMMAND_SEPARATOR = re.compile(r"&&|\|\||[;|&\n(){}]|\$\(|`")
# "CI=1"; not "--name=1"
_ASSIGNMENT = re.compile(r"^\w+=\S*$")
# "--file=src/a.py;" -> "--file", "src/a.py"
_WORD = re.compile(r"[^\s'\"`()<>|;&,=]+")
_WRAPPERS = word_set(
    "sudo time env nohup exec command xargs timeout nice stdbuf then do else if while ! bash sh zsh -c -lc -e"
)
# Programs that print files and logs. An error in their output is their own only if it begins with their name.
_DISPLAY_PROGRAMS = word_set(
    "cat bat head tail less more grep egrep fgrep rg ag ack sed awk cut sort uniq wc nl tac diff cmp strings xxd od jq"
    " yq echo printf history journalctl dmesg zcat man info type which file stat tree ls find fd ps top df du env"
    " printenv export set column fold tee cd pwd true date curl wget get-content get-childitem select-string"
)
_DISPLAY_SUBCOMMANDS = frozenset(
    ("git", subcommand)
    for subcommand in ("log", "show", "diff", "blame", "grep", "status", "reflog", "cat-file", "branch")
) | frozenset(
    {("docker", "logs"), ("kubectl", "logs"), ("kubectl", "describe"), ("gh", "run")}
    | {("gh", "pr"), ("gh", "issue"), ("gh", "api"), ("heroku", "logs"), ("pm2", "logs"), ("npm", "view")}
)
_LOOP_KEYWORDS = word_set("for done fi break continue case")
_SHELLS = word_set("bash sh zsh dash fish ksh -bash (eval)")
_GIT_PREFIXES = frozenset({"fatal", "error", "warning", "hint", "致命错误", "schwerwiegend", "erreur"})
# "ls: cannot access" -> "ls", "/bin/sh: 1: foo" -> "/bin/sh"; not "no such file"
_MESSAGE_PREFIX = re.compile(r"\s*(?P<name>[^\s:：]{1,80}) ?[:：]")
_REMOTE_PROGRAMS = word_set("ssh vagrant multipass lxc heroku")
_REMOTE_SUBCOMMANDS = frozenset(
    {("docker", "exec"), ("docker", "run"), ("docker", "compose"), ("podman", "exec"), ("kubectl", "exec")}
)
# "make || true" and "make; true"; not "make || exit 1"
_TOLERATED_FAILURE = re.compile(r"\|\|(?!\s*(?:exit|return) [1-9])|;\s*true\s*$")
# "a | b", "a; b" and "echo $(a)", where the exit status may come from another part; not "a && b"
_COMPOUND = re.compile(r"[|;`]|\$\(")
_NEVER_RUN_GIT = word_set("rm cp mv mkdir rmdir touch chmod ln gh")  # not even indirectly, as a build script may
_NEUTRAL_PROGRAMS = word_set("cd pwd true sleep export set source . echo printf tee head tail wait")
# Belongs to the project's set-up, not to the system. If one of these is missing, the machine was not prepared.
SETUP_PROGRAMS = word_set(
    "pytest tox nox jest vitest mocha eslint prettier tsc ruff mypy flake8 black isort pylint pyright phpunit rspec"
    " rubocop npm npx yarn pnpm bun deno cargo rustc rustup go gofmt golangci-lint mvn gradle javac java dotnet"
    " cmake ninja gcc g++ clang cc poetry pipenv uv pip pip3 bundle gem ruby php composer mix elixir iex swift"
    " flutter dart ghc stack cabal sbt lein vite webpack storybook cypress alembic celery gunicorn uvicorn flask"
    " rails bazel just task buf protoc sqlc phpstan asdf ponyc playwright pre-commit coverage hatch pdm node"
)
# Programs that a model may reasonably expect even if this machine lacks them.
UTILITY_PROGRAMS = word_set(
    "tree rg fd ag ack bat batcat jq yq wget curl sed awk gsed gawk grep egrep find cat head tail less more vim vi"
    " nano open pbcopy pbpaste xclip top htop unzip zip tar python python2 sqlite3 make apt apt-get brew yum dnf"
    " which where dir cls ipconfig ifconfig netstat ss lsof telnet nc nmap rsync timeout gtimeout watch column tac"
    " shuf xmllint nslookup dig strings xxd hexdump md5 md5sum shasum sha256sum readlink realpath greadlink gdate"
    " seq bc xdg-open lsd exa"
)
# Agents such as SWE-agent offer their tools as shell commands.
AGENT_COMMANDS = word_set("open edit create insert goto scroll_up scroll_down search_dir search_file find_file submit")
# Widely available programs, so none of them is the program that a project develops.
FAMILIAR_PROGRAMS = (
    UTILITY_PROGRAMS
    | SETUP_PROGRAMS
    | _DISPLAY_PROGRAMS
    | _NEUTRAL_PROGRAMS
    | AGENT_COMMANDS
    | word_set(
        "git gh glab docker podman kubectl helm terraform aws gcloud az heroku ssh scp mise asdf python3 pip3 ls cp mv"
        " rm mkdir rmdir touch ln chmod chown echo xargs tr kill pkill pgrep patch gunzip gzip psql mysql redis-cli"
        " systemctl launchctl osascript defaults sw_vers uname whoami id basename dirname mktemp test [ read wait"
        " set-location get-item remove-item copy-item new-item write-output invoke-webrequest mapfile readarray"
        " declare claude codex gemini opencode aider comm paste join split expand nproc free uptime mount ip ping"
        " crontab screen tmux killall strace gdb lldb objdump nm otool pkg-config meson shellcheck shfmt hadolint"
        " actionlint yamllint tflint semgrep bandit pipx conda virtualenv pyenv nvm rbenv direnv sops vault ansible"
        " tofu pulumi minikube kustomize argocd flyctl vercel netlify wrangler firebase supabase pg_dump createdb"
        " mongosh duckdb grpcurl httpie ffmpeg ffprobe convert magick pandoc pdftotext sips plutil xcodebuild xcrun"
        " openssl gpg ssh-keygen base64 cksum truncate dd gofumpt goimports staticcheck govulncheck dlv svn hg jj"
        " delta fzf hyperfine tokei cloc stylelint biome swiftlint pod fastlane adb goreleaser trivy"
    )
)
WELL_KNOWN_PROGRAMS = sorted(
    UTILITY_PROGRAMS | SETUP_PROGRAMS | word_set("python3 git ls cp mv rm mkdir echo chmod docker kubectl")
)


@dataclass(frozen=True)
class Command:
    """A shell command, possibly with several parts."""

    text: str

    @staticmethod
    @lru_cache(maxsize=64)
    def of(text: str) -> Command:
        """Parse a command. The result is cached, so that repeated questions about a command do not parse it again."""
        return Command(text[:_MAX_LENGTH])

    @cached_property
    def words(self) -> frozenset[str]:
        """The words that may name a file or a program, both with and without their folder."""
        words = _WORD.findall(self.text)
        trimmed = {word.strip("\\.:").rstrip("/") for word in words} | set(words)
        return frozenset(trimmed | {word.rpartition("/")[2] for word in trimmed})

    @cached_property
    def _parts(self) -> tuple[tuple[tuple[str, str], list[str]], ...]:
        parts = ((_program_and_operand(words), words) for words in _command_lines(self.text))
        return tuple((pair, words) for pair, words in parts if pair is not None)

    @cached_property
    def programs(self) -> tuple[tuple[str, str], ...]:
        """The (program, first argument) pair of each part of the command.

        Assignments and wrappers such as `sudo` are skipped.
        """
        return tuple(pair for pair, _ in self._parts)

    def programs_with_argument(self, text: str) -> list[tuple[str, str]]:
        """Return the entries of `programs` whose command has an argument that contains `text`."""
        return [pair for pair, words in self._parts if any(text in word for word in words)]

    @cached_property
    def is_display_only(self) -> bool:
        """Whether the command only prints existing text, such as files or logs."""
        active = [pair for pair in self.programs if pair[0] not in _NEUTRAL_PROGRAMS]
        show_programs = [pair for pair in self.programs if pair[0] in _DISPLAY_PROGRAMS or pair in _DISPLAY_SUBCOMMANDS]
        return bool(show_programs) and all(
            pair[0] in _DISPLAY_PROGRAMS or pair in _DISPLAY_SUBCOMMANDS for pair in active
        )

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        """The words that are paths or file names, with forward slashes."""
        words = {_use_forward_slashes(word) for word in self.words}
        return tuple(word for word in words if is_path(word))

    def names(self, text: str) -> bool:
        """Return whether the command itself contains this path or program.

        If so, an error about it concerns something that was typed, not something that a program encountered.
        """
        text = _use_forward_slashes(text.strip("'\"`‘’“”«»「」 ").rstrip("/\\"))
        if not text:
            return False
        if text in self.words or (len(text) > 2 and text in self.text.replace("\\", "/")):
            return True
        return any(text.endswith(f"/{word}") for word in self._paths)

    @property
    def tolerates_failure(self) -> bool:
        """Whether the command explicitly ignores failure, as in `make || true`."""
        return _TOLERATED_FAILURE.search(self.text) is not None

    @property
    def hides_exit_status(self) -> bool:
        """Whether the exit status may hide a failure in another part, as in `make | tail`."""
        return _COMPOUND.search(self.text) is not None

    def is_own_message(self, line: str) -> bool:
        """Return whether a line of output is a message from the shell or from a program in the command."""
        prefix = _MESSAGE_PREFIX.match(line)
        if prefix is None:
            return False
        name = prefix["name"].rpartition("/")[2].lower()
        if name in _SHELLS:  # "bash: line 1: foo: command not found"
            return True
        programs = {program.lower() for program, _ in self.programs}
        # pytest reports "ERROR: file or directory not found: tests/test_x.py".
        if name == "error" and programs & {"pytest", "py.test"}:
            return True
        return name in programs or ("git" in programs and name in _GIT_PREFIXES)

    def calls(self, name: str) -> bool:
        """Return whether the command runs this program, rather than merely having its name among the arguments."""
        name = name.strip("'\"`‘’").rpartition("/")[2]
        if name in _WRAPPERS and name in self.words:
            return True
        return any(name in (program, program.rpartition("\\")[2]) for program, _ in self.programs)

    @cached_property
    def runs_git_only(self) -> bool:
        """Whether git can only have been run by a typed git command, not by a script, a build or a package manager."""
        active_names = [
            name for name, _ in self.programs if name not in _DISPLAY_PROGRAMS | _NEUTRAL_PROGRAMS | _NEVER_RUN_GIT
        ]
        return "git" in active_names and all(name == "git" for name in active_names)

    @cached_property
    def is_remote(self) -> bool:
        """Whether the command runs on another machine or in a container, so its files are not those of the session."""
        return any(name in _REMOTE_PROGRAMS or (name, first) in _REMOTE_SUBCOMMANDS for name, first in self.programs)

    def runs(self, program: str) -> bool:
        """Return whether one of the programs has exactly this name."""
        return any(name == program for name, _ in self.programs)


def is_path(word: str) -> bool:
    """Return whether a word looks like a path: it contains a slash or a dot."""
    return len(word) > 2 and ("/" in word or "." in word)


def _command_lines(text: str, depth: int = 0) -> Iterator[list[str]]:
    """Yield the words of every command in a text, including those in loops, in `$(…)` and in `bash -c script`."""
    try:
        tree = parse_script(text)
    except UnsupportedShellSyntax:
        yield from (
            [word.strip("'\"") for word in part.split()[:_MAX_WORDS]] for part in _COMMAND_SEPARATOR.split(text)
        )
        return
    for command in (command for _, command in commands_in(tree) if isinstance(command, Simple)):
        words = [word.raw if word.literal is None else word.literal for word in command.words[:_MAX_WORDS]]
        script = nested_script(words)
        if script is None:
            yield words
        pieces = (piece.text for word in command.words for piece in word.pieces if piece.text.startswith("$("))
        scripts = [piece[2:-1] for piece in pieces] if script is None else [script]
        for inner_script in scripts if depth < _MAX_DEPTH else ():
            yield from _command_lines(inner_script, depth + 1)


def _use_forward_slashes(path: str) -> str:
    return path.replace("\\", "/").removeprefix("./")


def _program_and_operand(words: list[str]) -> tuple[str, str] | None:
    """Return the program and its first operand, or None if the command runs no program.

    For example, `sudo timeout 5 make -k test` gives ("make", "test"), and `python -m pytest tests` gives ("pytest",
    "tests").
    """
    while words and (words[0] in _WRAPPERS or _ASSIGNMENT.match(words[0]) or words[0].isdigit() or not words[0]):
        words = words[1:]
    if not words or words[0] in _LOOP_KEYWORDS:
        return None
    name = words[0].lstrip("!").rpartition("/")[2]  # `!ls` in a notebook cell
    rest = [word for word in words[1:] if not word.startswith("-")]
    if name.startswith("python") and "-m" in words[:3] and len(words) > words.index("-m") + 1:
        return words[words.index("-m") + 1], rest[1] if len(rest) > 1 else ""
    return name, rest[0] if rest else ""


_READ_ONLY_PROGRAMS = word_set(
    "ls cat head tail wc grep egrep fgrep rg stat file du df tree pwd which whoami date echo printf diff cmp uniq cut"
    " tr jq basename dirname realpath readlink true nl tac id uname hostname printenv type test ["
)
_READ_ONLY_GIT = word_set("status log diff show blame rev-parse ls-files grep describe shortlog reflog")
_FIND_ACTIONS = word_set("-delete -exec -execdir -ok -okdir -fprint -fprint0 -fprintf -fls")
# "10p" and "10,20p" in `sed -n 10,20p file`; not "s/a/b/p"
_SED_PRINT = re.compile(r"\d+(?:,\d+)?p")
# Tests, checks and installers write caches, objects and packages, but not the files edited in a session.
_CHECK_PROGRAMS = word_set(
    "pytest py.test tox nox jest vitest mocha rspec phpunit mypy pyright flake8 pylint tsc mkdir sleep cd export"
    " pip pip3 curl ps kill lsof wait"
)
_CHECK_SUBCOMMANDS = {
    "git": word_set("add commit push fetch branch remote tag config"),
    "npm": word_set("test t install i ci ls view"),
    "cargo": word_set("test build check clippy"),
    "go": word_set("test build vet list"),
    "ruff": word_set("check"),
    "uv": word_set("pip sync"),
    "mix": word_set("test compile credo deps.get"),
    "make": word_set("test check lint build"),
    "yarn": word_set("test install"),
    "pnpm": word_set("test install"),
    "dotnet": word_set("test build"),
    "mvn": word_set("test"),
    "gradle": word_set("test"),
}
_GIT_PREFIX = r"\bgit (?:-C \S+ |-c \S+ |--no-pager )*"
# "git checkout main" and "git -C lib stash"; not "git log"
_SWITCHES_CHECKOUT = re.compile(
    _GIT_PREFIX
    + r"(?:checkout|switch|pull|merge|rebase|reset|stash|cherry-pick|restore|revert|worktree|clone|mv|rm|am|apply"
    r"|clean|submodule)\b"
)
# "sed -i s/a/b/ x", "go mod tidy", "cp a b", "python3 x.py" and "echo > x"; not "ls 2>&1" or "ls >/dev/null"
_WRITES = re.compile(
    r"\b(?:sed|perl|ruby|gsed)\s+(?:-\S+\s+)*-\S*i|\bgo (?:generate|mod|get|install|build)\b"
    r"|\b(?:npm|pnpm|yarn|npx|tee|mv|cp|rm|rmdir|mkdir|touch|ln|patch|install|unzip|tar|curl|wget|make|rsync)\b"
    r"|\b(?:python|node|bash|sh)[\d.]*\s"
    r"|(?<![0-9&=<-])>>?(?![&>=])(?!\s*/dev/null)"
)
# "gofmt -w .", "cargo fmt", "eslint --fix ." and "black ."; not "gofmt -l ."
_FORMATS = re.compile(
    r"\bgofmt\s+-\w*w|\bgo fmt\b|\bgoimports\b|\bfmt\b|\bformat\b|--fix\b|--write\b"
    r"|\b(?:prettier|black|isort|rustfmt|ruff)\b"
)
ChangeKind = Literal["nothing", "formats", "writes", "moves"]


def change_kind(text: str) -> ChangeKind:
    """Return the upper bound of a command's effect on files, judging by its words.

    Returns:
        `moves`: the whole tree may be replaced (git checkout). `formats`: a formatter ran. `writes`: some files may be
        written. `nothing`: none of these, but without a guarantee, since a program in the project may write anything.
    """
    if _SWITCHES_CHECKOUT.search(text):
        return "moves"
    if _FORMATS.search(text):
        return "formats"
    return "writes" if _WRITES.search(text) else "nothing"


def is_read_only_command(text: str) -> bool:
    """Return whether a command is certain to change nothing, not even the shell's folder or variables."""
    return _all_commands(text, lambda command: _is_read_only(command) and not command.assignments)


def leaves_sources_unchanged(text: str) -> bool:
    """Return whether a command leaves source files unchanged: it reads, tests, checks or commits."""
    return _all_commands(text, lambda command: _is_read_only(command) or _is_check_command(command))


def _all_commands(text: str, accepts: Callable[[Simple], bool]) -> bool:
    """Return whether `accepts` is true for every command in a text.

    Redirections to a file and background commands are never accepted.
    """
    try:
        commands = list(commands_in(parse_script(text)))
    except UnsupportedShellSyntax:
        return False
    redirects = [redirect for _, command in commands for redirect in command.redirects]
    if any(chain.is_background for chain, _ in commands) or any(
        _redirects_to_file(redirect.op, redirect.target.literal) for redirect in redirects
    ):
        return False
    return bool(commands) and all(accepts(command) for _, command in commands if isinstance(command, Simple))


def _redirects_to_file(op: str, target: str | None) -> bool:
    """Return whether a redirection writes a file, unlike `< x`, `>/dev/null` or `2>&1`."""
    if op.startswith("<") and op != "<>":
        return False
    return not (target == "/dev/null" or (op == ">&" and target is not None and target.isdigit()))


def _is_read_only(command: Simple) -> bool:
    """Return whether a program is certain to change nothing with these arguments."""
    words = [word.literal for word in command.words]
    if any(_runs_command(piece.kind, piece.text) for word in command.words for piece in word.pieces) or not words:
        return False
    name, rest = words[0], words[1:]
    if name == "git":
        return (
            bool(rest) and rest[0] in _READ_ONLY_GIT and not any((word or "").startswith("--output") for word in rest)
        )
    if name == "find":
        return None not in rest and not _FIND_ACTIONS.intersection(word for word in rest if word)
    if name == "sed":
        return len(rest) > 1 and rest[0] == "-n" and _SED_PRINT.fullmatch(rest[1] or "") is not None
    if name == "sort":  # -o names an output file
        return not any((word or "").startswith(("-o", "--output")) for word in rest)
    return name in _READ_ONLY_PROGRAMS


def _runs_command(kind: str, text: str) -> bool:
    """Return whether part of a word runs a command: `$(…)`, backticks or a process substitution."""
    return kind == "raw" or (kind in ("split", "kept") and (text.startswith("`") or "(" in text))


def _is_check_command(command: Simple) -> bool:
    """Return whether a program tests, checks, installs or commits without editing sources."""
    words = [word.literal for word in command.words]
    if not words:
        return False
    # A linter with --fix edits sources.
    if any(word is not None and (word.startswith("--fix") or word == "--write") for word in words):
        return False
    if words[0] in ("python", "python3") and words[1:2] == ["-m"]:
        words = words[2:]
    name = words[0] if words else None
    second = words[1] if len(words) > 1 else None
    return name in _CHECK_PROGRAMS or (name in _CHECK_SUBCOMMANDS and second in _CHECK_SUBCOMMANDS[name])


_EXPANDED_WORD = "\0"  # replaces a word whose value depends on an expansion
_FOLDER_CHANGERS = word_set("cd pushd popd")
_SHELL_ENDERS = word_set("exit return exec")
# "-i", "-i.bak", "-ni" and "--in-place=.bak"; not "-n"
_SED_IN_PLACE = re.compile(r"-[nErsuz]*i|--in-place\b")
# "-e", "-ne" and "--expression", whose value is the next word; not "-es/a/b/", which contains its value
_SED_VALUE_OPTION = re.compile(r"-[nErsuz]*[efl]|--expression|--file|--line-length")
# "-e", "-ne" and "--expression": with any of these, the first operand is a file; not "-l"
_SED_SCRIPT_OPTION = re.compile(r"-[nErsuz]*[ef]|--expression|--file")
# Only letters without a value may precede the "i": what follows `-M`, `-I` and `-r` is the name of a module or folder.
# "-i", "-pi.bak" and "-0pi"; not "-Mstrict"
_PERL_IN_PLACE = re.compile(r"-[pnlaws0-7]*i")
# "-p", "-ne" and "-0pi": with any of these, the script runs once per line; not "-e"
_PERL_LOOP = re.compile(r"-[laws0-7]*[pn]")
# "-e" and "-pe", whose value is the next word; not "-pi"
_PERL_SCRIPT_OPTION = re.compile(r"-[pnlaws0-7]*[eE]")
# Options with which cp and mv may skip the last operand: "-t", "-rn", "--update"; not "-r"
_MAY_SKIP_TARGET = re.compile(r"-[a-zA-Z]*[tnui]|--(?:target-directory|no-clobber|update|interactive)\b")
_INFO_OPTIONS = word_set("--help --version")
_DRY_RUN_OPTIONS = word_set("--check --check-only --diff --verify-no-changes --dry-run --list-different")
_FORMATTERS = word_set("black isort rustfmt")
_FORMAT_OPTIONS = {
    **dict.fromkeys(("gofmt", "gofumpt", "goimports"), "-w"),
    **dict.fromkeys(("prettier", "biome"), "--write"),
    **dict.fromkeys(("eslint", "stylelint", "ruff", "golangci-lint"), "--fix"),
}
_FORMAT_SUBCOMMANDS = word_set("fmt format")
_TASK_RUNNERS = word_set("cargo go make just ruff dotnet deno")
_SCRIPT_RUNNERS = word_set("npm pnpm yarn bun mise")  # `npm run format`
_LAUNCHERS = (("npx",), ("bunx",), ("uvx",), ("uv", "run"), ("poetry", "run"), ("python", "-m"), ("python3", "-m"))


class _WrittenFiles(NamedTuple):
    """The files that a command has written.

    `names` are relative to the shell's folder. `formats` is set if a formatter ran and no other program did; the
    formatter may have found nothing to change.
    """

    names: frozenset[str]
    formats: Literal["", "alone", "among_others"]


def files_written_by(text: str) -> _WrittenFiles:
    """Return the files that a successful command is certain to have written, and whether it ran a formatter.

    Only the first command of a list is certain to run: what follows `&&`, `||`, `then` or `do` may have been skipped.
    And only the last list determines the exit status, so an earlier command may have failed before it wrote anything.
    """
    names, num_formatters = set[str](), 0
    try:
        script = parse_script(text)
    except UnsupportedShellSyntax:
        return _WrittenFiles(frozenset(), "")
    for command, has_moved, is_success_certain in _unconditional_commands(script):
        # The shell creates the targets of redirections even if the program fails.
        targets = [redirect.target.literal or "" for redirect in command.redirects if redirect.op in (">", ">>", ">|")]
        if isinstance(command, Simple):
            name, *rest = _command_words(command) or [""]
            targets += _written_operands(name, rest) if is_success_certain or name == "tee" else []
            num_formatters += _is_formatter(name, rest)
        # After a `cd`, relative names are no longer relative to the folder where the command began.
        names.update(target for target in targets if target.startswith("/") or not has_moved)
    is_alone = num_formatters and len(list(commands_in(script))) == 1
    names = {name for name in names - {"", "/dev/null"} if _EXPANDED_WORD not in name}
    return _WrittenFiles(frozenset(names), "alone" if is_alone else "among_others" if num_formatters else "")


def _unconditional_commands(script: Script) -> Iterator[tuple[ParsedCommand, bool, bool]]:
    """Yield the commands that run regardless of the outcome of the others.

    Each comes with two flags: whether the working folder may have changed before it, and whether it must have succeeded
    if the script did.
    """
    has_moved = False
    for chain in script:
        first = chain.pipelines[0]
        is_success_certain = chain is script[-1] and not first.is_negated
        if not chain.is_background and "||" not in chain.operators:
            yield from (
                (command, has_moved, is_success_certain and command is first.commands[-1]) for command in first.commands
            )
        names = {
            (_command_words(command) or [""])[0] for _, command in commands_in((chain,)) if isinstance(command, Simple)
        }
        if names & _SHELL_ENDERS:  # nothing after it is certain to run
            return
        has_moved = has_moved or bool(names & _FOLDER_CHANGERS)


def _command_words(command: Simple) -> list[str]:
    return [_EXPANDED_WORD if word.literal is None else word.literal for word in command.words]


def _written_operands(name: str, rest: list[str]) -> list[str]:
    """Return the operands that a program is certain to have written."""
    if _INFO_OPTIONS.intersection(rest):
        return []
    if name in ("sed", "gsed"):
        return _edited_by_sed(rest)
    if name in ("perl", "ruby"):
        return _edited_by_perl(rest)
    operands = [word for word in rest if word and not word.startswith("-")]
    if name == "tee":  # tee opens its files before reading, so they are written even if it fails later
        return operands
    writes_target = (
        name in ("mv", "cp") and len(operands) > 1 and not any(_MAY_SKIP_TARGET.match(word) for word in rest)
    )
    return operands[-1:] if writes_target else []


def _edited_by_sed(rest: list[str]) -> list[str]:
    """Return the files edited by `sed -i`. The first operand is the script, unless an option contains it."""
    operands, words = list[str](), iter(rest)
    for word in words:
        if _SED_VALUE_OPTION.fullmatch(word):
            next(words, None)
        elif word and not word.startswith("-"):
            operands.append(word)
    has_script = any(_SED_SCRIPT_OPTION.fullmatch(word.partition("=")[0]) for word in rest)
    return operands[0 if has_script else 1 :] if any(_SED_IN_PLACE.match(word) for word in rest) else []


def _edited_by_perl(rest: list[str]) -> list[str]:
    """Return the files edited by `perl -pi` or `ruby -pi`, whose options end at the script or the first file."""
    options, has_script, index = list[str](), False, 0
    while index < len(rest) and rest[index].startswith("-"):
        options.append(rest[index])
        has_value = _PERL_SCRIPT_OPTION.fullmatch(rest[index]) is not None
        has_script, index = has_script or has_value, index + 1 + has_value
    is_edit = any(map(_PERL_IN_PLACE.match, options)) and any(map(_PERL_LOOP.match, options))
    return rest[index + (not has_script) :] if is_edit else []


def _is_formatter(name: str, rest: list[str]) -> bool:
    """Return whether a command runs a formatter on files: `black .`, `npx prettier --write .`, `npm run format`."""
    if _DRY_RUN_OPTIONS.intersection(rest):
        return False
    words = [name, *rest]
    start = next((len(launcher) for launcher in _LAUNCHERS if tuple(words[: len(launcher)]) == launcher), 0)
    name, *rest = words[start:] or [""]
    if name in _FORMATTERS or _FORMAT_OPTIONS.get(name) in rest:
        return True
    operands = [word for word in rest if not word.startswith("-")]
    if name in _SCRIPT_RUNNERS:
        return operands[:1] == ["run"] and bool(_FORMAT_SUBCOMMANDS.intersection(operands[1:2]))
    return name in _TASK_RUNNERS and bool(_FORMAT_SUBCOMMANDS.intersection(operands[:1]))
