"""Rules for shell commands: a folder, file or program that is not there. What a command does otherwise is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.tree import Chain, Simple, parse_script
from composer_replication.actions.tools import word_set
from composer_replication.judge.known import Known
from composer_replication.judge.verdict import Judgement

UNKNOWN_COMMAND = Judgement("unknown", "shell", why="what a command does cannot be said beforehand")
# Programs that fail where a file they are given is not there; of the second kind the first operand is no path, of the
# third only it is.
_READERS = word_set("cat head tail wc less nl stat file diff chmod open du tac xxd shellcheck gofmt")
_READERS_AFTER_PATTERN = word_set("sed grep egrep awk rg jq")
_RUN_THEIR_FIRST = word_set("source . bash sh zsh python python3 node ruby perl")
_PATH = re.compile(r"[\w@+~][\w.@+/~-]*|\.{1,2}/[\w.@+/~-]+|/[\w.@+/~-]+")
_MAX_COMMAND = 20_000


def judge_command(command: str, known: Known) -> Judgement:
    """The first part of a command that surely runs, surely fails, and takes the whole command with it."""
    here, tested = known.paths.shell.path, set[str]()
    for step in _sure_steps(command):
        name, operands = step.name, step.operands
        if name in known.state.attempts.missing_programs:
            return Judgement("fails", "no_such_program", "cmd_not_found", "the shell did not know it before")
        if here is None:
            return UNKNOWN_COMMAND
        if name == "cd":
            target = operands[0] if len(operands) == 1 else None
            if target is None or target == "-" or not _PATH.fullmatch(target):
                return UNKNOWN_COMMAND
            folder = known.paths.absolute(target, here)
            if _is_missing(target, here, known):
                return Judgement("fails", "cd_missing", "shell_path_missing", "the folder is not there")
            here = folder
        elif step.is_shown and any(known.is_doubled(word, here) for word in operands):
            return Judgement("fails", "from_another_folder", "shell_path_missing", "the shell stands in another folder")
        elif step.is_shown and any(_is_missing(word, here, known) for word in step.files if word not in tested):
            return Judgement("fails", "file_missing", "shell_path_missing", "the file is not there")
        tested.update(operands)
    return UNKNOWN_COMMAND


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    operands: tuple[str, ...]
    is_shown: bool  # whether what it complains of is seen, and its failure is that of the command

    @property
    def files(self) -> tuple[str, ...]:
        """The operands that are files to be read."""
        paths = tuple(word for word in self.operands if re.search(r"[/.]", word) and _PATH.fullmatch(word))
        if self.name in _READERS:
            return paths
        if self.name in _RUN_THEIR_FIRST:
            return tuple(path for path in paths if path == self.operands[0])
        return tuple(path for path in paths if path != self.operands[0]) if self.name in _READERS_AFTER_PATTERN else ()


def _sure_steps(command: str) -> Iterator[_Step]:
    """The commands at the start of a script that all run, each only if those before it worked."""
    if len(command) > _MAX_COMMAND:
        return
    try:
        script = parse_script(command)
    except NotUnderstood:
        return
    for chain in script:
        if "||" in chain.joints or chain.is_background:
            return
        yield from _steps_of(chain, is_last=chain is script[-1])


def _steps_of(chain: Chain, *, is_last: bool) -> Iterator[_Step]:
    for pipeline in chain.pipelines:
        first = pipeline.commands[0]
        if not isinstance(first, Simple) or pipeline.is_negated:
            return
        words = [word.literal for word in first.words]
        if not words or words[0] is None:
            return
        operands = tuple(word for word in words[1:] if word is not None and not word.startswith("-"))
        is_hidden = any(redirect.descriptor == "2" or redirect.op.startswith("&") for redirect in first.redirects)
        is_shown = is_last and len(pipeline.commands) == 1 and not is_hidden and None not in words
        yield _Step(words[0].rpartition("/")[2], operands, is_shown)


def _is_missing(word: str, here: str, knowledge: Known) -> bool:
    return knowledge.standing(knowledge.paths.absolute(word, here)).is_there is False or knowledge.is_doubled(
        word, here
    )
