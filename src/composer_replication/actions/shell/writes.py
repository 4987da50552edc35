"""Files that a command surely writes, and whether it may have formatted whatever there is.

Only the first command of a list surely runs: what stands behind `&&`, `||`, `then` or `do` may not have. Whether it
worked is told by the whole only if it is of the last list. A formatter may have found nothing to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.tree import Command, Script, Simple, commands_in, parse_script
from composer_replication.actions.tools import word_set

_UNKNOWN = "\0"  # stands for a word that only the shell knows
_MOVERS = word_set("cd pushd popd")
_ENDERS = word_set("exit return exec")

_SED_IN_PLACE = re.compile(r"-[nErsuz]*i|--in-place\b")
_SED_TAKES_NEXT = re.compile(r"-[nErsuz]*[efl]|--expression|--file|--line-length")
_SED_SCRIPT = re.compile(r"-[nErsuz]*[ef]|--expression|--file")
# Letters that take no word of their own: `-M…`, `-I…` and `-r…` are names of modules and folders.
_LOOP_IN_PLACE = re.compile(r"-[pnlaws0-7]*i")
_LOOP = re.compile(r"-[laws0-7]*[pn]")
_LOOP_SCRIPT = re.compile(r"-[pnlaws0-7]*[eE]")
_KEEPS_TARGET = re.compile(r"-[a-zA-Z]*[tnui]|--(?:target-directory|no-clobber|update|interactive)\b")

_TELLS = word_set("--help --version")
_ONLY_LOOKS = word_set("--check --check-only --diff --verify-no-changes --dry-run --list-different")
_FORMATTERS = word_set("black isort rustfmt")
_FORMAT_IF_TOLD = {
    **dict.fromkeys(("gofmt", "gofumpt", "goimports"), "-w"),
    **dict.fromkeys(("prettier", "biome"), "--write"),
    **dict.fromkeys(("eslint", "stylelint", "ruff", "golangci-lint"), "--fix"),
}
_FORMAT_WORDS = word_set("fmt format")
_RUNNERS = word_set("cargo go make just ruff dotnet deno")
_RUN_RUNNERS = word_set("npm pnpm yarn bun mise")  # the word behind `run` says what
_STARTERS = (("npx",), ("bunx",), ("uvx",), ("uv", "run"), ("poetry", "run"), ("python", "-m"), ("python3", "-m"))


class Written(NamedTuple):
    """`names` as they are called where the shell stood; `formats` is `alone` where a formatter is all that runs."""

    names: frozenset[str]
    formats: Literal["", "alone", "among_others"]


def written_by(text: str) -> Written:
    """What a command that worked has done to files."""
    names, num_formatters = set[str](), 0
    try:
        script = parse_script(text)
    except NotUnderstood:
        return Written(frozenset(), "")
    for command, has_moved, is_told in _sure_commands(script):
        targets = [redirect.target.literal or "" for redirect in command.redirects if redirect.op in (">", ">>", ">|")]
        if isinstance(command, Simple):
            name, *rest = _words(command) or [""]
            targets += _written_operands(name, rest) if is_told or name == "tee" else []
            num_formatters += _formats(name, rest)
        names.update(target for target in targets if target.startswith("/") or not has_moved)
    is_alone = num_formatters and len(list(commands_in(script))) == 1
    names = {name for name in names - {"", "/dev/null"} if _UNKNOWN not in name}
    return Written(frozenset(names), "alone" if is_alone else "among_others" if num_formatters else "")


def _sure_commands(script: Script) -> Iterator[tuple[Command, bool, bool]]:
    """The commands that run whatever the others do.

    Each with whether the shell may have moved before it, and whether it has worked if the script has.
    """
    has_moved = False
    for chain in script:
        first = chain.pipelines[0]
        is_told = chain is script[-1] and not first.is_negated
        if not chain.is_background and "||" not in chain.joints:
            yield from ((command, has_moved, is_told and command is first.commands[-1]) for command in first.commands)
        names = {(_words(command) or [""])[0] for _, command in commands_in((chain,)) if isinstance(command, Simple)}
        if names & _ENDERS:
            return
        has_moved = has_moved or bool(names & _MOVERS)


def _words(command: Simple) -> list[str]:
    return [_UNKNOWN if word.literal is None else word.literal for word in command.words]


def _written_operands(name: str, rest: list[str]) -> list[str]:
    if _TELLS.intersection(rest):
        return []
    if name in ("sed", "gsed"):
        return _edited_by_sed(rest)
    if name in ("perl", "ruby"):
        return _edited_by_loop(rest)
    operands = [word for word in rest if word and not word.startswith("-")]
    if name == "tee":  # it opens its files first
        return operands
    is_put = name in ("mv", "cp") and len(operands) > 1 and not any(_KEEPS_TARGET.match(word) for word in rest)
    return operands[-1:] if is_put else []


def _edited_by_sed(rest: list[str]) -> list[str]:
    """The files of `sed -i`, whose options may stand anywhere; the first operand is the script where no option is."""
    operands, words = list[str](), iter(rest)
    for word in words:
        if _SED_TAKES_NEXT.fullmatch(word):
            next(words, None)
        elif word and not word.startswith("-"):
            operands.append(word)
    has_script = any(_SED_SCRIPT.fullmatch(word.partition("=")[0]) for word in rest)
    return operands[0 if has_script else 1 :] if any(_SED_IN_PLACE.match(word) for word in rest) else []


def _edited_by_loop(rest: list[str]) -> list[str]:
    """The files of `perl -pi` and `ruby -pi`, whose own options end where the program or the first file stands."""
    options, has_script, index = list[str](), False, 0
    while index < len(rest) and rest[index].startswith("-"):
        options.append(rest[index])
        has_own = _LOOP_SCRIPT.fullmatch(rest[index]) is not None
        has_script, index = has_script or has_own, index + 1 + has_own
    is_edit = any(map(_LOOP_IN_PLACE.match, options)) and any(map(_LOOP.match, options))
    return rest[index + (not has_script) :] if is_edit else []


def _formats(name: str, rest: list[str]) -> bool:
    if _ONLY_LOOKS.intersection(rest):
        return False
    words = [name, *rest]
    start = next((len(starter) for starter in _STARTERS if tuple(words[: len(starter)]) == starter), 0)
    name, *rest = words[start:] or [""]
    if name in _FORMATTERS or _FORMAT_IF_TOLD.get(name) in rest:
        return True
    operands = [word for word in rest if not word.startswith("-")]
    if name in _RUN_RUNNERS:
        return operands[:1] == ["run"] and bool(_FORMAT_WORDS.intersection(operands[1:2]))
    return name in _RUNNERS and bool(_FORMAT_WORDS.intersection(operands[:1]))
