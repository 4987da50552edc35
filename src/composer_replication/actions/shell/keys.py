"""Shell commands in one spelling: quoting off, options sorted, paths against the folder each part runs in.

A key is made of the parsed tree; a command outside the language that is read here is its own text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from composer_replication.actions.paths import normal_path
from composer_replication.actions.shell.argv import Key, Place, path_key
from composer_replication.actions.shell.dollars import NotUnderstood
from composer_replication.actions.shell.special import env_prefix, program_key
from composer_replication.actions.shell.tree import (
    Block,
    Chain,
    Command,
    Pipeline,
    Script,
    Simple,
    assignment_in,
    parse_script,
)
from composer_replication.actions.shell.words import Redirect, Word

_LONGEST_FOLDER = 4096
_MAX_SHELLS = 4  # a shell in a shell in a shell
_DESCRIPTOR = re.compile(r"\d+-?|-")
_MOVERS = ("pushd", "popd", "cd")


def command_key(text: str, folder: str | None) -> Key:
    """The key of a command that is run in `folder`; None where that is not known."""
    return _script_text_key(text, _place(folder), 0)


def argv_key(words: list[Word], folder: str | None) -> Key:
    """The key of a program that is started with these very words, without a shell."""
    return _Walk(_place(folder), 0).script(_script_of(Simple((), tuple(words), ())))


def folder_after(script: Script, folder: str | None) -> str | None:
    """Where a shell stands after a script that began in `folder`; None where that cannot be said."""
    walk = _Walk(_place(folder), 0)
    walk.script(script)
    location = walk.place
    if location.number or not location.folder.startswith("/"):
        return folder if location == _place(folder) else None
    return location.folder


def _place(folder: str | None) -> Place:
    return Place(normal_path(folder or ".", None))


def _script_of(command: Command) -> Script:
    return (Chain((Pipeline(False, (command,)),), (), False),)


def _script_text_key(text: str, location: Place, depth: int) -> Key:
    if depth > _MAX_SHELLS:
        return ["text", text.strip()]
    try:
        script = parse_script(text)
    except NotUnderstood:
        return ["text", text.strip()]
    return _Walk(location, depth).script(script)


@dataclass
class _Walk:
    """Goes through a tree in the order it runs, and knows where the shell stands."""

    place: Place
    depth: int
    num_unknown: int = 0

    def script(self, script: Script) -> Key:
        return [self._chain(chain) for chain in script if not self._does_nothing(script, chain)]

    def _does_nothing(self, script: Script, chain: Chain) -> bool:
        """`cd` to where the shell is already, with something after it."""
        stays = len(chain.pipelines) == 1 and not chain.is_background and self._stays(chain.pipelines[0])
        return stays and chain is not script[-1]

    def _stays(self, pipeline: Pipeline) -> bool:
        target = _cd_target(pipeline)
        return target is not None and not self.place.number and self.place.path(target) == self.place.path(".")

    def _chain(self, chain: Chain) -> Key:
        start, first = self.place, 0
        while first < len(chain.joints) and chain.joints[first] == "&&" and self._stays(chain.pipelines[first]):
            first += 1
        key: Key = []
        moves: list[int] = []
        for number, pipeline in enumerate(chain.pipelines[first:]):
            before = self.place
            key.append(self._pipeline(pipeline))
            moves += [number] if self.place != before else []
            key += chain.joints[first + number : first + number + 1]
        if chain.is_background:
            self.place = start
            key.append("&")
        elif moves and ("||" in chain.joints or moves[-1] > 0):
            self._lose_place()  # which of the moves were made depends on what ran
        return key

    def _pipeline(self, pipeline: Pipeline) -> Key:
        if len(pipeline.commands) == 1:
            key: Key = [self._command(pipeline.commands[0])]
        else:
            key = [self._inside(command) for command in pipeline.commands]
        return ["!", *key] if pipeline.is_negated else key

    def _inside(self, command: Command) -> Key:
        """A part of a pipeline runs in a shell of its own: where it goes, the others do not follow."""
        before = self.place
        key = self._command(command)
        self.place = before
        return key

    def _command(self, command: Command) -> Key:
        if isinstance(command, Block):
            return self._block(command)
        redirects = _redirect_keys(command.redirects, self.place)
        words, num_set = command.words, env_prefix(command.words)
        added = [assigned for word in words[1 : 1 + num_set] if (assigned := assignment_in(word)) is not None]
        words = words[1 + num_set :] if num_set else words
        program: Key = self._program(words) if words else []
        return [_set_keys([*command.sets, *added]), program, redirects]

    def _program(self, words: tuple[Word, ...]) -> Key:
        name = words[0].literal
        if name not in _MOVERS:
            return program_key(
                words, self.place, lambda text, location: _script_text_key(text, location, self.depth + 1)
            )
        target = words[1].literal if len(words) == 2 else None
        if name != "cd" or target is None or target in ("", "-") or target.startswith("-") or self.place.number:
            key: Key = [name, *(path_key(word, self.place) for word in words[1:])]
            is_absolute = name == "cd" and target is not None and target.startswith("/")
            self.place = Place(self.place.path(target)) if is_absolute and target else self.place
            if not is_absolute:
                self._lose_place()
            return key
        self.place = Place(self.place.path(target))
        key = ["cd", self.place.folder]
        if len(self.place.folder) > _LONGEST_FOLDER:
            self._lose_place()  # deeper with every line, so that each path would be as long as all lines before it
        return key

    def _block(self, block: Block) -> Key:
        before = self.place
        parts = [self.script(part) for part in block.parts]
        names = [word.key for word in block.names]
        if block.kind == "(":
            self.place = before
        elif block.kind != "{" and self.place != before:
            self._lose_place()
        return [block.kind, names, parts, _redirect_keys(block.redirects, before)]

    def _lose_place(self) -> None:
        self.num_unknown += 1
        self.place = Place(number=self.num_unknown)


def _cd_target(pipeline: Pipeline) -> str | None:
    """The folder of a plain `cd folder`."""
    command = pipeline.commands[0]
    if len(pipeline.commands) > 1 or pipeline.is_negated or not isinstance(command, Simple):
        return None
    texts = [word.literal for word in command.words]
    is_plain = len(texts) == 2 and texts[0] == "cd" and not command.sets and not command.redirects
    return texts[1] if is_plain and texts[1] and not texts[1].startswith("-") else None


def _set_keys(sets: list[tuple[str, Word]]) -> Key:
    """Assignments; of plain ones to different names the order does not matter."""
    keys: Key = [[name, value.key] for name, value in sets]
    is_free = len({name for name, _ in sets}) == len(sets) and all(value.literal is not None for _, value in sets)
    return sorted(keys, key=json.dumps) if is_free else keys


def _redirect_keys(redirects: tuple[Redirect, ...], location: Place) -> Key:
    """Redirections by descriptor; in order, unless none of them refers to another."""
    keys = [key for redirect in redirects for key in _redirect_key(redirect, location)]
    is_free = len({key[0] for key in keys}) == len(keys) and not any(str(key[1]).endswith("&") for key in keys)
    return sorted(keys, key=json.dumps) if is_free else list(keys)


def _redirect_key(redirect: Redirect, location: Place) -> list[Key]:
    op, target = redirect.op, redirect.target
    text = target.literal
    descriptor = redirect.descriptor or ("0" if op.startswith("<") else "1")
    if op == "<<<" and text is not None:
        return [[descriptor, "<<", f"{text}\n"]]
    if op in ("<<", "<<expanded", "<<<"):
        return [[descriptor, op, target.key]]
    if op in ("<&", ">&") and text is not None and _DESCRIPTOR.fullmatch(text):
        return [[descriptor, op, text]]
    file = path_key(target, location)
    if op in ("&>", "&>>") or (op == ">&" and not redirect.descriptor):
        return [["1", ">>" if op == "&>>" else ">", file], ["2", ">&", "1"]]
    return [[descriptor, op, file]]
