"""Commands that were typed anew and then worked, with nothing done in between: it was not the work that failed.

What a failed command prints often does not say that it was typed wrongly: a build without its tag, tests of another
folder, a build of files that only tests use. That the same then works, typed otherwise and with no file changed, does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from composer_replication.sites.actions.shell_command import keeps_sources
from composer_replication.sites.actions.shell_tree import Simple, commands_in, parse_script
from composer_replication.sites.actions.shell_words import NotUnderstood
from composer_replication.sites.actions.tools import (
    command_text,
    is_shell,
    only_looks,
    word_set,
)
from composer_replication.types import (
    Conversation,
    ErrorSite,
    ToolCall,
    Turn,
)

CONFIDENCE = 0.7
_LOOKS_AHEAD = 4  # calls
_MAY_BE_MISTAKEN = frozenset(["compile_error", "nonzero_exit", "other", "lint_or_typecheck", "test_failure"])
_IS_THE_WORK = frozenset(["compile_error", "lint_or_typecheck", "test_failure"])
# What belongs to the build: without it other files are looked at. Other options may hide what a check found, or do
# without what the machine does not have.
_CHOOSES_FILES = re.compile(r"--?(?:tags|build-tags|features|all-features|all-targets|workspace)\b")
_NAMES_A_PLACE = re.compile(r"-C\b|--(?:cwd|prefix|dir|directory|manifest-path|project|rootdir|chdir)\b")
_FILTERS = word_set("head tail grep cat wc sort tee sed awk cut uniq cd echo true pwd export set")
_CHECKS = {"go": word_set("build vet test"), "cargo": word_set("build check test")}
_WRAPPERS = word_set("time timeout env nice sudo")
# What one says who sees that the command was wrong, not what it ran.
_ADMITS = re.compile(
    r"\b(?:in|from) the (?:wrong|right|correct|root) (?:directory|folder|worktree)|\bpath is wrong\b"
    r"|\bwrong (?:(?:build|test|shell) )?(?:directory|folder|worktree|command|flag|option|syntax|package|path)\b"
    r"|\bneed to (?:change (?:the )?director|cd |be in the (?:\w+ )?(?:director|folder)|run (?:it|this|that) from)"
    r"|\bneed to (?:rebuild|quote|escape)\b|\b(?:correct|right|proper) (?:way to|command|syntax|flag|build tag)"
    r"|\bneeds? (?:to (?:use|add|pass|specify|set) )?(?:the )?(?:`?--?(?!f|no-|skip)[a-z][\w-]*\b|(?:\S+ )?build tag)"
    r"|\bforgot (?:to|the) (?:\S+ )?(?:build|tag|cd|flag|-)|\bbinary (?:is|was)(?:n't| not) rebuilt\b|\bstale binary\b"
    r"|\b(?:flag|option|subcommand)\b.{0,40}(?:doesn't|does not|isn't|is not|not) (?:exist|valid|supported)"
    r"|\b(?P<quotes>quoting|escaping) (?:issue|problem|error)",
    re.IGNORECASE,
)
_PLACE = re.compile(r"director|folder|worktree|path|\bcd\b|from", re.IGNORECASE)
_FIRST_WORDS = 300


@dataclass(frozen=True)
class _Typed:
    """The one program that a command is about; `folder` is where its own `cd` goes."""

    words: tuple[str, ...]
    folder: str

    @cached_property
    def options(self) -> frozenset[str]:
        return frozenset(word for word in self.words if word.startswith("-"))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_plain(word) for word in self.words[1:] if not word.startswith("-"))

    @property
    def rest(self) -> tuple[str, ...]:
        """Operands behind the subcommand, without what an option for the output takes."""
        behind = {word for option, word in zip(self.words, self.words[1:], strict=False) if option == "-o"}
        return tuple(word for word in self.operands[1:] if word not in behind)


def as_retyped(conversation: Conversation, sites: Sequence[ErrorSite], *, min_confidence: float) -> list[ErrorSite]:
    """The sites, with failures that were due to how the command was typed as the model's."""
    candidates = {
        site.call_id: site
        for site in sites
        if is_shell(site.tool) and site.kind in _MAY_BE_MISTAKEN and site.blame in ("task", "unknown") and site.call_id
    }
    if not candidates:
        return list(sites)
    failed = {site.call_id for site in sites}
    kinds = dict(_retyped(conversation.turns, candidates, failed))
    return [_as_models(site, kinds, conversation, min_confidence) if site.call_id in kinds else site for site in sites]


def _as_models(
    site: ErrorSite, kinds: Mapping[str, str], conversation: Conversation, min_confidence: float
) -> ErrorSite:
    is_copied = any(turn.id == site.turn_id and turn.origin == "copied" for turn in conversation.turns)
    reason = "what came next shows that the command was wrong, not what it ran"
    return replace(
        site,
        kind=kinds[site.call_id],
        blame="model",
        confidence=CONFIDENCE,
        is_kept=min_confidence <= CONFIDENCE and not is_copied,
        reason=reason,
    )


@dataclass
class _Waiting:
    """A failed command, for as long as what is called next may be the same, typed otherwise."""

    site: ErrorSite
    command: str
    typed: _Typed | None
    calls_left: int = _LOOKS_AHEAD
    is_fresh: bool = True  # nothing was said since


def _retyped(turns: Sequence[Turn], sites: Mapping[str, ErrorSite], failed: set[str]) -> Iterator[tuple[str, str]]:
    """Ids of calls, and what was wrong with each."""
    waiting: list[_Waiting] = []
    words: tuple[str, ...] = ()  # of the model, since something came back
    for turn in turns:
        if turn.role == "user" and turn.text.strip():
            waiting.clear()
        if turn.role != "assistant":
            words = ()
            continue
        words = (*words, turn.thinking[:_FIRST_WORDS], turn.text[:_FIRST_WORDS])
        if turn.calls and waiting:
            yield from _admitted(words, turn.calls[0], waiting)
        call_commands = [(call, command_text(call.name, call.arguments)) for call in turn.calls]
        for call, command in call_commands if waiting else ():
            if command and call.id not in failed:
                yield from _worked(command, waiting)
            if not _changes_nothing(call):
                waiting.clear()
            for failure in waiting:
                failure.calls_left -= 1
        waiting = [failure for failure in waiting if failure.calls_left > 0]
        waiting += [_Waiting(sites[call.id], text, _typed(text)) for call, text in call_commands if call.id in sites]


def _worked(command: str, waiting: Sequence[_Waiting]) -> Iterator[tuple[str, str]]:
    typed = _typed(command) if waiting else None
    for failure in waiting:
        kind = None if typed is None or failure.typed is None else _mistake(failure.typed, typed, failure.site.kind)
        if kind is not None:
            yield failure.site.call_id, kind


def _admitted(words: Sequence[str], call: ToolCall, waiting: Sequence[_Waiting]) -> Iterator[tuple[str, str]]:
    """What the model itself calls a wrong command, in the words right after it, and types anew."""
    fresh = [failure for failure in waiting if failure.is_fresh]
    for failure in fresh:
        failure.is_fresh = False
    admission = next(filter(None, map(_ADMITS.search, words)), None)
    if admission is None or len(fresh) != 1 or not is_shell(call.name):
        return
    site, typed = fresh[0].site, fresh[0].typed
    again = _typed(command_text(call.name, call.arguments))
    is_same = typed is not None and again is not None and typed.words[0] == again.words[0]
    is_place = _PLACE.search(admission[0]) is not None
    if admission["quotes"] and "!" in fresh[0].command:  # which some tools escape, whatever the quotes
        return
    if is_same or (is_place and site.kind not in _IS_THE_WORK):
        yield site.call_id, "wrong_folder" if is_place else "usage_error"


def _changes_nothing(call: ToolCall) -> bool:
    command = command_text(call.name, call.arguments)
    return keeps_sources(command) if command else only_looks(call.name, call.arguments)


def _mistake(first: _Typed, second: _Typed, kind: str) -> str | None:
    if first.words[0] != second.words[0] or first == second:
        return None
    if first.words == second.words:
        return "wrong_folder" if second.folder else None
    if first.operands == second.operands and first.options < second.options:
        added = second.options - first.options
        if all(map(_NAMES_A_PLACE.match, added)):
            return "wrong_folder"
        return "usage_error" if all(map(_CHOOSES_FILES.match, added)) else None
    if kind == "compile_error" and first.rest and set(first.rest) == set(second.rest) and _checks_more(first, second):
        return "usage_error"
    if first.options == second.options and len(first.operands) == len(second.operands) and kind not in _IS_THE_WORK:
        pairs = list(zip(first.operands, second.operands, strict=True))
        same = sum(one == other_operand for one, other_operand in pairs)
        moved = [pair for pair in pairs if pair[0] != pair[1] and _is_end(*pair)]
        return "wrong_folder" if moved and same + len(moved) == len(pairs) else None
    return None


def is_typed_otherwise(command: str, other: str) -> bool:
    """Whether a command is another one with what it lacked: its folder, its tag, a check that sees the same files."""
    first, second = _typed(command), _typed(other)
    return first is not None and second is not None and _mistake(first, second, "compile_error") is not None


def _checks_more(first: _Typed, second: _Typed) -> bool:
    """Whether another check of the same program was run on the same, with all the tags of the first."""
    verbs = _CHECKS.get(first.words[0], frozenset())
    tags = {option for option in first.options if _CHOOSES_FILES.match(option)}
    is_pair = first.operands[:1] != second.operands[:1] and {first.operands[0], second.operands[0]} <= verbs
    return is_pair and tags <= second.options


def _is_end(one: str, other_path: str) -> bool:
    """Whether one of two paths is the end of the other: the same, called from another folder."""
    shorter, longer = sorted((one, other_path), key=len)
    return bool(shorter) and longer.endswith(f"/{shorter}") and ("/" in shorter or "." in shorter)


def _typed(command: str) -> _Typed | None:
    """The one program of a command, filters of its output left out; None where there are several or none."""
    if not command or len(command) > 2000:
        return None
    try:
        simple = [
            shell_command
            for _, shell_command in commands_in(parse_script(command))
            if isinstance(shell_command, Simple)
        ]
    except NotUnderstood:
        return None
    lines = [
        [word.raw if word.literal is None else word.literal for word in shell_command.words] for shell_command in simple
    ]
    folder = next((line[1] for line in lines if line[:1] == ["cd"] and len(line) > 1), "")
    programs = [line for line in lines if line and line[0] not in _FILTERS]
    if len(programs) != 1 or programs[0][0] in _WRAPPERS:
        return None
    return _Typed(tuple(programs[0]), folder)


def _plain(word: str) -> str:
    return word.removeprefix("./").removesuffix("/...").rstrip("/") or word
