"""Who can have said that a command was typed wrongly, and of what: what rules for such messages ask of the command.

Each message has to be about something that the command itself says, and to come from a program that everybody has. The
project's own program is the work: an option that it does not have yet is what a run of it is meant to find out.
"""

from __future__ import annotations

import re

from composer_replication.actions.shell.command import FAMILIAR, Command
from composer_replication.actions.tools import word_set

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
    programs = command.given(thing)
    return all(map(_is_known, programs)) if programs else is_familiar(command)


def is_wrong_bare_option(match: re.Match[str], command: Command) -> bool:
    """An option that the message names without its dashes."""
    thing = thing_of(match).lstrip("-")
    programs = command.given(f"-{thing}")
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
    return is_named_usage(match, command) and _ASKS_FOR_HELP.search(command.text) is None


def is_named_usage(match: re.Match[str], command: Command) -> bool:
    """Whether the usage is that of a program that everybody has and that the command calls."""
    return any(_is_known(program) for program in command.programs if program[0] == match[1])


def is_typed_target(match: re.Match[str], command: Command) -> bool:
    return match[1] in command.text.split() and (command.runs("make") or command.runs("gmake"))


def is_written_inline(_: re.Match[str], command: Command) -> bool:
    """Whether the program stands in the command: handed over with an option, or fed in."""
    return re.search(r"\s-(?:c|e|r|p|E|ne|pe|-eval|-command)\b|<<", command.text) is not None


def is_here(_: re.Match[str], command: Command) -> bool:
    return not command.is_remote


def is_unquoted(match: re.Match[str], command: Command) -> bool:
    """A word that was not meant as a pattern of files: one that only names files has found none, which is an answer."""
    thing = match[1] or match[2]
    return thing in command.text and (thing.startswith("-") or any(character in thing for character in "?[=^(#~"))


def is_unescaped(match: re.Match[str], command: Command) -> bool:
    """Words in backticks inside a text, a command kept in one variable, or a search path that was overwritten."""
    thing, text = thing_of(match), command.text
    if thing.partition(" ")[0] in FAMILIAR and " " not in thing:
        return "not found: " in match[0] and _SEARCH_PATH.search(text) is not None
    quoted = text[: max(0, text.find(f"`{thing}"))]
    in_variable = " " in thing and "$" in text and thing in text
    return '"' in quoted or "<<" in quoted or in_variable


def is_replaced_pattern(_: re.Match[str], command: Command) -> bool:
    return re.search(r"-(?:i?name|path)\s+[^'\"\s\\]*[*?]", command.text) is not None


def asks_a_service(_: re.Match[str], command: Command) -> bool:
    return command.runs("gh") or command.runs("glab")


def asks_elsewhere(_: re.Match[str], command: Command) -> bool:
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
