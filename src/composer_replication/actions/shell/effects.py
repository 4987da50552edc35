"""Commands that surely change nothing, those that change no source file (tests, commits), and what others may do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.tree import Simple, commands_in, parse_script
from composer_replication.actions.tools import word_set

_LOOKS = word_set(
    "ls cat head tail wc grep egrep fgrep rg stat file du df tree pwd which whoami date echo printf diff cmp uniq cut"
    " tr jq basename dirname realpath readlink true nl tac id uname hostname printenv type test ["
)
_GIT_LOOKS = word_set("status log diff show blame rev-parse ls-files grep describe shortlog reflog")
_FIND_ACTS = word_set("-delete -exec -execdir -ok -okdir -fprint -fprint0 -fprintf -fls")
_PRINTS_LINES = re.compile(r"\d+(?:,\d+)?p")
# These write caches, objects and packages, not the files a session edits.
_KEEPS_SOURCES = word_set(
    "pytest py.test tox nox jest vitest mocha rspec phpunit mypy pyright flake8 pylint tsc mkdir sleep cd export"
    " pip pip3 curl ps kill lsof wait"
)
_KEEPS_PAIRS = {
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

_GIT = r"\bgit (?:-C \S+ |-c \S+ |--no-pager )*"
_MOVES_TREE = re.compile(
    _GIT + r"(?:checkout|switch|pull|merge|rebase|reset|stash|cherry-pick|restore|revert|worktree|clone|mv|rm|am|apply"
    r"|clean|submodule)\b"
)
_WRITES = re.compile(
    r"\b(?:sed|perl|ruby|gsed)\s+(?:-\S+\s+)*-\S*i|\bgo (?:generate|mod|get|install|build)\b"
    r"|\b(?:npm|pnpm|yarn|npx|tee|mv|cp|rm|rmdir|mkdir|touch|ln|patch|install|unzip|tar|curl|wget|make|rsync)\b|\b(?:python|node|bash|sh)[\d.]*\s"
    r"|(?<![0-9&=<-])>>?(?![&>=])(?!\s*/dev/null)"
)
_FORMATS = re.compile(
    r"\bgofmt\s+-\w*w|\bgo fmt\b|\bgoimports\b|\bfmt\b|\bformat\b|--fix\b|--write\b"
    r"|\b(?:prettier|black|isort|rustfmt|ruff)\b"
)
Change = Literal["nothing", "formats", "writes", "moves"]


def may_change(text: str) -> Change:
    """The most that a command's words let one expect: files formatted, some written, or the whole tree moved.

    `nothing` is no promise: a program of the project may write what it likes.
    """
    if _MOVES_TREE.search(text):
        return "moves"
    if _FORMATS.search(text):
        return "formats"
    return "writes" if _WRITES.search(text) else "nothing"


def only_reads(text: str) -> bool:
    """Whether a command surely changes nothing, the shell's own folder and variables included."""
    return _all_commands(text, lambda command: _looks(command) and not command.sets)


def keeps_sources(text: str) -> bool:
    """Whether a command leaves the files that were read as they were."""
    return _all_commands(text, lambda command: _looks(command) or _runs_checks(command))


def _all_commands(text: str, accepts: Callable[[Simple], bool]) -> bool:
    """Whether all that runs is accepted, and nothing of it writes or runs in the background."""
    try:
        commands = list(commands_in(parse_script(text)))
    except NotUnderstood:
        return False
    redirects = [redirect for _, command in commands for redirect in command.redirects]
    if any(chain.is_background for chain, _ in commands) or any(
        _writes(redirect.op, redirect.target.literal) for redirect in redirects
    ):
        return False
    return bool(commands) and all(accepts(command) for _, command in commands if isinstance(command, Simple))


def _writes(op: str, target: str | None) -> bool:
    if op.startswith("<") and op != "<>":
        return False
    return not (target == "/dev/null" or (op == ">&" and target is not None and target.isdigit()))


def _looks(command: Simple) -> bool:
    words = [word.literal for word in command.words]
    if any(_runs_inside(piece.kind, piece.text) for word in command.words for piece in word.pieces) or not words:
        return False
    name, rest = words[0], words[1:]
    if name == "git":
        return bool(rest) and rest[0] in _GIT_LOOKS and not any((word or "").startswith("--output") for word in rest)
    if name == "find":
        return None not in rest and not _FIND_ACTS.intersection(word for word in rest if word)
    if name == "sed":
        return len(rest) > 1 and rest[0] == "-n" and _PRINTS_LINES.fullmatch(rest[1] or "") is not None
    if name == "sort":
        return not any((word or "").startswith(("-o", "--output")) for word in rest)
    return name in _LOOKS


def _runs_inside(kind: str, text: str) -> bool:
    """Whether a word runs a command of its own."""
    return kind == "raw" or (kind in ("split", "kept") and (text.startswith("`") or "(" in text))


def _runs_checks(command: Simple) -> bool:
    words = [word.literal for word in command.words]
    if not words:
        return False
    if any(word is not None and (word.startswith("--fix") or word == "--write") for word in words):
        return False
    if words[0] in ("python", "python3") and words[1:2] == ["-m"]:
        words = words[2:]
    name = words[0] if words else None
    second = words[1] if len(words) > 1 else None
    return name in _KEEPS_SOURCES or (name in _KEEPS_PAIRS and second in _KEEPS_PAIRS[name])
