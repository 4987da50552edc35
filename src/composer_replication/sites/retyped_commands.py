"""Find failed commands that worked after they were retyped differently: the command was wrong, not the work.

The output of a failed command often does not reveal that it was mistyped: a build without its tag, tests in the wrong
folder, a build of files that only tests use. But if a corrected command then works and no file has changed in between,
or if the model itself says that the command was wrong, the model is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from composer_replication.sites.actions.shell_command import leaves_sources_unchanged
from composer_replication.sites.actions.shell_lexer import UnsupportedShellSyntax
from composer_replication.sites.actions.shell_parser import Simple, commands_in, parse_script
from composer_replication.sites.actions.tools import command_text, is_read_only_tool_call, is_shell, word_set
from composer_replication.types import Conversation, ErrorSite, ToolCall, Turn

_CONFIDENCE = 0.7
# Maximum number of calls between a failed command and its correction.
_MAX_CALLS_BETWEEN = 4
_MAY_BE_MISTYPED = frozenset(["compile_error", "nonzero_exit", "other", "lint_or_typecheck", "test_failure"])
# These kinds are usually caused by the work, so a different path in the command is not enough evidence.
_WORK_KINDS = frozenset(["compile_error", "lint_or_typecheck", "test_failure"])
# Options that select the files of a build. Other options may suppress findings, or avoid what the machine lacks.
# "--tags=e2e"; "-tags"; not "--verbose"
_CHOOSES_BUILD_FILES = re.compile(r"--?(?:tags|build-tags|features|all-features|all-targets|workspace)\b")
# Options that select the folder: "-C"; "--prefix=web"; not "--parallel"
_CHOOSES_FOLDER = re.compile(r"-C\b|--(?:cwd|prefix|dir|directory|manifest-path|project|rootdir|chdir)\b")
# Programs that only set up for a command or filter its output.
_FILTERS = word_set("head tail grep cat wc sort tee sed awk cut uniq cd echo true pwd export set")
# Subcommands that compile the same files. `go vet` checks test files, which `go build` skips.
_CHECKS = {"go": word_set("build vet test"), "cargo": word_set("build check test")}
_WRAPPERS = word_set("time timeout env nice sudo")
# What a model writes when it notices that its command was wrong.
# "I ran this in the wrong directory"; "I forgot the build tag"; not "the test is wrong"
_ADMISSION = re.compile(
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
# An admission about the folder: "wrong folder"; "need to cd into web"; not "wrong flag"
_ABOUT_FOLDER = re.compile(r"director|folder|worktree|path|\bcd\b|from", re.IGNORECASE)
# Number of characters at the start of a message that are searched for an admission.
_MAX_ADMISSION = 300


@dataclass(frozen=True)
class _TypedCommand:
    """A command with a single program, ignoring filters and set-up."""

    words: tuple[str, ...]
    """The program and its arguments."""
    folder: str
    """The target of the command's own `cd`; empty without a `cd`."""

    @cached_property
    def options(self) -> frozenset[str]:
        return frozenset(word for word in self.words if word.startswith("-"))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_normalize_path(word) for word in self.words[1:] if not word.startswith("-"))

    @property
    def rest(self) -> tuple[str, ...]:
        """The operands after the subcommand, without the output file given by `-o`."""
        output_files = {word for option, word in zip(self.words, self.words[1:], strict=False) if option == "-o"}
        return tuple(word for word in self.operands[1:] if word not in output_files)


def blame_retyped_commands(
    conversation: Conversation, sites: Sequence[ErrorSite], *, min_confidence: float
) -> list[ErrorSite]:
    """Return the sites, with the model blamed for those whose command was mistyped."""
    candidates = {
        site.call_id: site
        for site in sites
        if is_shell(site.tool) and site.kind in _MAY_BE_MISTYPED and site.blame in ("task", "unknown") and site.call_id
    }
    if not candidates:
        return list(sites)
    failed = {site.call_id for site in sites}
    kinds = dict(_find_mistyped(conversation.turns, candidates, failed))
    return [
        _blame_model(site, kinds[site.call_id], conversation, min_confidence) if site.call_id in kinds else site
        for site in sites
    ]


def _blame_model(site: ErrorSite, kind: str, conversation: Conversation, min_confidence: float) -> ErrorSite:
    is_copied = any(turn.id == site.turn_id and turn.origin == "copied" for turn in conversation.turns)
    reason = "what came next shows that the command was wrong, not what it ran"
    return replace(
        site,
        kind=kind,
        blame="model",
        confidence=_CONFIDENCE,
        is_kept=min_confidence <= _CONFIDENCE and not is_copied,
        reason=reason,
    )


@dataclass
class _PendingFailure:
    """A failed command that one of the next calls may correct."""

    site: ErrorSite
    command: str
    typed: _TypedCommand | None
    num_calls_left: int = _MAX_CALLS_BETWEEN
    is_fresh: bool = True  # whether the model has written nothing since the failure


def _find_mistyped(
    turns: Sequence[Turn], sites: Mapping[str, ErrorSite], failed: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield (call id, kind) for the calls whose command was mistyped."""
    pending: list[_PendingFailure] = []
    texts: tuple[str, ...] = ()  # what the model wrote since the last result
    for turn in turns:
        if turn.role == "user" and turn.text.strip():
            # A user message may have changed the task, and with it which commands work.
            pending.clear()
        if turn.role != "assistant":
            texts = ()
            continue
        texts = (*texts, turn.thinking[:_MAX_ADMISSION], turn.text[:_MAX_ADMISSION])
        if turn.calls and pending:
            yield from _find_admitted(texts, turn.calls[0], pending)
        call_commands = [(call, command_text(call.name, call.arguments)) for call in turn.calls]
        for call, command in call_commands if pending else ():
            if command and call.id not in failed:
                yield from _find_corrected(command, pending)
            if not _leaves_files_unchanged(call):
                pending.clear()
            for failure in pending:
                failure.num_calls_left -= 1
        pending = [failure for failure in pending if failure.num_calls_left > 0]
        pending += [
            _PendingFailure(sites[call.id], text, _parse_typed(text))
            for call, text in call_commands
            if call.id in sites
        ]


def _find_corrected(command: str, pending: Sequence[_PendingFailure]) -> Iterator[tuple[str, str]]:
    """Yield the failures that this successful command corrects."""
    typed = _parse_typed(command) if pending else None
    for failure in pending:
        kind = None if typed is None or failure.typed is None else _diagnose(failure.typed, typed, failure.site.kind)
        if kind is not None:
            yield failure.site.call_id, kind


def _find_admitted(
    texts: Sequence[str], call: ToolCall, pending: Sequence[_PendingFailure]
) -> Iterator[tuple[str, str]]:
    """Yield the failure if the model, right afterwards, admits a wrong command and retypes it differently."""
    fresh = [failure for failure in pending if failure.is_fresh]
    for failure in fresh:
        failure.is_fresh = False
    admission = next(filter(None, map(_ADMISSION.search, texts)), None)
    if admission is None or len(fresh) != 1 or not is_shell(call.name):
        return
    site, typed = fresh[0].site, fresh[0].typed
    retyped = _parse_typed(command_text(call.name, call.arguments))
    is_same = typed is not None and retyped is not None and typed.words[0] == retyped.words[0]
    is_about_folder = _ABOUT_FOLDER.search(admission[0]) is not None
    # Some tools escape exclamation marks, regardless of quotes: not the model's error.
    if admission["quotes"] and "!" in fresh[0].command:
        return
    if is_same or (is_about_folder and site.kind not in _WORK_KINDS):
        yield site.call_id, "wrong_folder" if is_about_folder else "usage_error"


def _leaves_files_unchanged(call: ToolCall) -> bool:
    command = command_text(call.name, call.arguments)
    return leaves_sources_unchanged(command) if command else is_read_only_tool_call(call.name, call.arguments)


def _diagnose(first: _TypedCommand, second: _TypedCommand, kind: str) -> str | None:
    """Return what was wrong with the first command, judging by the second, which worked.

    Return None if that is unclear.
    """
    if first.words[0] != second.words[0] or first == second:
        return None
    if first.words == second.words:
        return "wrong_folder" if second.folder else None
    if first.operands == second.operands and first.options < second.options:
        added = second.options - first.options
        if all(map(_CHOOSES_FOLDER.match, added)):
            return "wrong_folder"
        return "usage_error" if all(map(_CHOOSES_BUILD_FILES.match, added)) else None
    if (
        kind == "compile_error"
        and first.rest
        and set(first.rest) == set(second.rest)
        and _is_broader_check(first, second)
    ):
        return "usage_error"
    if first.options == second.options and len(first.operands) == len(second.operands) and kind not in _WORK_KINDS:
        pairs = list(zip(first.operands, second.operands, strict=True))
        num_equal = sum(before == after for before, after in pairs)
        moved = [pair for pair in pairs if pair[0] != pair[1] and _is_path_suffix(*pair)]
        return "wrong_folder" if moved and num_equal + len(moved) == len(pairs) else None
    return None


def corrects_typed_command(command: str, later_command: str) -> bool:
    """Return whether the later command corrects the earlier one.

    The correction may be another folder, another tag, or a check that covers the same files.
    """
    first, second = _parse_typed(command), _parse_typed(later_command)
    return first is not None and second is not None and _diagnose(first, second, "compile_error") is not None


def _is_broader_check(first: _TypedCommand, second: _TypedCommand) -> bool:
    """Return whether the second command runs another check with the same program.

    It must include all tags of the first command.
    """
    verbs = _CHECKS.get(first.words[0], frozenset())
    tags = {option for option in first.options if _CHOOSES_BUILD_FILES.match(option)}
    is_pair = first.operands[:1] != second.operands[:1] and {first.operands[0], second.operands[0]} <= verbs
    return is_pair and tags <= second.options


def _is_path_suffix(path_a: str, path_b: str) -> bool:
    """Return whether one of two paths ends in the other, so they may be the same file relative to different folders."""
    shorter, longer = sorted((path_a, path_b), key=len)
    return bool(shorter) and longer.endswith(f"/{shorter}") and ("/" in shorter or "." in shorter)


def _parse_typed(command: str) -> _TypedCommand | None:
    """Parse a command with a single program, ignoring output filters. Return None if it has no or several programs."""
    if not command or len(command) > 2000:
        return None
    try:
        simple = [
            shell_command
            for _, shell_command in commands_in(parse_script(command))
            if isinstance(shell_command, Simple)
        ]
    except UnsupportedShellSyntax:
        return None
    lines = [
        [word.raw if word.literal is None else word.literal for word in shell_command.words] for shell_command in simple
    ]
    folder = next((line[1] for line in lines if line[:1] == ["cd"] and len(line) > 1), "")
    programs = [line for line in lines if line and line[0] not in _FILTERS]
    if len(programs) != 1 or programs[0][0] in _WRAPPERS:
        return None
    return _TypedCommand(tuple(programs[0]), folder)


def _normalize_path(word: str) -> str:
    """Return a path without `./`, a trailing slash or Go's `/...`, none of which change the target."""
    return word.removeprefix("./").removesuffix("/...").rstrip("/") or word
