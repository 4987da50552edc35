"""A failure in the course of its session: known before, brought about by somebody else, or a look before writing.

The rules say what a message means; here stands what the calls before it, and the file that is written after it, say.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from composer_replication.canonical_json import encode
from composer_replication.errors import InputError
from composer_replication.sites.actions.shell_command import Command, is_path
from composer_replication.sites.actions.tools import (
    channel_of,
    command_text,
    is_edit,
    normal_path,
    only_looks,
    path_argument,
    plain_name,
    word_set,
)
from composer_replication.sites.rule import Verdict
from composer_replication.types import (
    Blame,
    Conversation,
    ErrorSite,
    ToolCall,
    ToolResult,
)

_SURE = 0.7
_WRITES_NEW = word_set("write write_file create create_file write_to_file")
# What changes a file that the command names. Commits and runs do not, though a hook of theirs may.
_CHANGES_FILES = re.compile(
    r"\b(?:sed|perl|awk)\b.{0,80}\s-\w{0,4}i|--(?:in-place|write|fix)\b|\s-w\b|\b(?:tee|mv|cp|patch|python3?|node|ruby)\b"
    r"|(?<![&2=-])>(?![&=]|\s*/dev/)"
)
# A formatter changes files that nobody named; these change what the model asked for.
_MOVES_THE_TREE = frozenset(
    ("git", subcommand)
    for subcommand in word_set("checkout restore switch stash reset rebase merge pull cherry-pick revert apply am")
)
_REWRITES_HISTORY = re.compile(r"\bgit\b.{0,60}\b(?:rebase|commit\b.{0,80}--amend|reset|filter-branch)\b")
_PUSH_REFUSED = re.compile(r"\[rejected\]|non-fast-forward|failed to push some refs|tip of your current")
_PUSHES = re.compile(r"\bgit\b.{0,40}\bpush\b")
_FORCED = re.compile(r"\s(?:-f|--force|--force-with-lease)\b|\s\+\w")
# `create a/b.py`, `new file: b.py`, `b.py (new)`
_PLANNED = re.compile(
    r"\b(?:creat(?:e|ing)|new file)\b[ :`'\"*]{1,4}(?:(?:a|the|new|file) ){0,3}[`'\"*]{0,3}([\w./-]{1,200}\.\w{1,10})\b"
    r"|\b([\w./-]{1,200}\.\w{1,10})[`'\"*]{0,3} \((?:new|create|to be created)\b",
    re.IGNORECASE,
)
_MAX_SAID = 20_000


class Course:
    """Grows with the session: `at` and `heard` as turns come, `judge` and `counted` with every result."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation, self._cwd = conversation, conversation.cwd
        self._calls = _CallsSoFar()
        self._known = _KnownFailures(self._calls)
        self.counted = self._known.counted
        self._gates: dict[str, int] = {}  # what a hook refused -> since when that is known
        self._touched: dict[str, int] = {}  # a file -> the call that read or wrote it last
        self._said: list[str] = []  # not looked through yet
        self._planned: set[str] = set()
        self._written: dict[str, int] | None = None

    def at(self, turn: int, text: str, calls: tuple[ToolCall, ...]) -> None:
        """Turn number `turn`, with what it says and asks for."""
        self._calls.at(turn, calls)
        if text:
            self._said.append(text)

    def heard(self, text: str) -> None:
        """Somebody but the model spoke."""
        if text.strip():
            self._calls.heard_at = self._calls.turn

    def judge(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> Verdict:
        """The verdict on the next result in the order of the session, as far as its course changes it."""
        self._calls.number += 1
        path = path_argument(call.arguments) if channel_of(call.name) == "file" else None
        name = normal_path(path, self._cwd) if path else ""
        if verdict.is_failure:
            changed = next(self._second_thoughts(call, result, verdict, name), verdict)
            self._known.note(call, result, verdict, name)
            return changed
        self._known.forget(call, name)
        self._calls.add_worked(call)
        if name:
            self._touched[name] = self._calls.number
        return verdict

    def _second_thoughts(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> Iterator[Verdict]:
        command, kind, blame = command_of(call), verdict.kind, verdict.blame
        gate = gate_of(verdict, command, result.text)
        if gate and self._gates.setdefault(gate, self._calls.turn) < self._calls.made(call):
            yield _as_convention(verdict)
        if _goes_round(verdict, command):
            yield _as_convention(verdict, WENT_ROUND)
        if kind in ("file_not_found", "shell_path_missing") and self._looks_before_writing(call, result, verdict, name):
            yield _others(verdict, "task", "a look at a file that is to be written")
        for reason in self._known.reasons(call, result, verdict, name):
            yield _models(verdict, reason)
        if kind == "edit_stale" and name in self._touched and not self._changed_it_itself(name):
            yield _others(verdict, "unknown", "somebody else, or a formatter, had changed the file")
        if kind == "edit_no_match" and blame == "unknown" and name in self._touched and self._changed_it_itself(name):
            yield _models(verdict, "a command of its own had changed the file since it was read")
        if kind == "git_state" and blame == "unknown" and self._pushes_rewritten(result, command):
            yield _models(verdict, "the session itself had rewritten what was pushed")
        if kind == "usage_error" and blame == "model" and self._is_about(command):
            yield _others(verdict, "unknown", "the project may be this program's")

    def _looks_before_writing(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> bool:
        if is_edit(call.name) and call.arguments.get("command") != "view":
            return False
        if self._written is None:
            self._written = _written_files(self._conversation)
        for text in self._said:
            planned_paths = (first or second for first, second in _PLANNED.findall(text[:_MAX_SAID]))
            self._planned.update(path.rpartition("/")[2] for path in planned_paths)
        self._said.clear()
        message = result.text[slice(*verdict.span)]
        typed = (word for word in command_of(call).words if word in message and is_path(word))
        names = [name] if name else [normal_path(word, self._cwd) for word in typed]
        call_turn = self._calls.made(call)
        return any(
            path.rpartition("/")[2] in self._planned or self._written.get(path, -1) > call_turn for path in names
        )

    def _changed_it_itself(self, name: str) -> bool:
        """Whether a command of the model's had changed the file since it was last read or written."""
        commands = map(command_of, self._calls.worked_since(self._touched[name]))
        file = name.rpartition("/")[2]
        return any(
            (file in command.text and _CHANGES_FILES.search(command.text))
            or not _MOVES_THE_TREE.isdisjoint(command.programs)
            for command in commands
            if command.text
        )

    def _pushes_rewritten(self, result: ToolResult, command: Command) -> bool:
        """Whether a push was refused because the session had changed commits that were there, and did not say so."""
        if _PUSH_REFUSED.search(result.text) is None or _FORCED.search(command.text) is not None:
            return False
        commands = (command_of(call).text for call in self._calls.worked_since(0))
        since = itertools.takewhile(lambda text: _PUSHES.search(text) is None, commands)
        return any(_REWRITES_HISTORY.search(text) is not None for text in since)

    def _is_about(self, command: Command) -> bool:
        folders = frozenset((self._cwd or "").lower().split("/"))
        return any(name in folders for name, _ in command.programs)


def _models(verdict: Verdict, reason: str) -> Verdict:
    return replace(verdict, blame="model", confidence=max(verdict.confidence, _SURE), reason=reason)


def _others(verdict: Verdict, blame: Blame, reason: str) -> Verdict:
    return replace(verdict, blame=blame, reason=reason)


def _written_files(conversation: Conversation) -> dict[str, int]:
    """Files that a tool wrote as a whole, with the turn of the last time."""
    return {
        normal_path(path, conversation.cwd): number
        for number, turn in enumerate(conversation.turns)
        for call in turn.calls
        if (plain_name(call.name) in _WRITES_NEW or call.arguments.get("command") == "create")
        and (path := path_argument(call.arguments))
    }


# Failures that were known: the same call, the same message, the same broken tool, with nothing done about it.

_SAID_ABOUT = frozenset({"description", "timeout", "run_in_background", "explanation"})
_WORTH_ANOTHER_TRY = frozenset(
    ["network", "timeout", "os_permission", "test_failure", "lint_or_typecheck", "compile_error", "python_exception"]
)
_ALWAYS_THE_SAME = frozenset(["lint_or_typecheck", "compile_error"])  # unlike tests, if nothing was changed
_REFUSALS = frozenset(["permission_denied", "hook_blocked", "sibling_cancelled"])
# These ask again until something has happened, or run what is being worked on.
_ASKS_ON = re.compile(
    r"\b(?:sleep|watch|wait|checks?|status|logs?|ps|pgrep|curl|run|tests?|lint|build|make|compile|vet|fmt|go|cargo|npm"
    r"|python3?|node|pytest)\b"
)
_NOT_APPLIED = re.compile(r"Your proposed edit has introduced")  # a linter's word, but the tool refused the edit
_INSTALLS = re.compile(
    r"\b(?:install|add|get|use|brew|apt|apt-get|dnf|yum|pip3?|npm|asdf|mise|export|source)\b|\bPATH="
)
_ESCAPED = "\\!"  # what some tools make of each exclamation mark, whatever the quotes


@dataclass(frozen=True, slots=True)
class _Failure:
    """The last failure of a call: site, what came back, the number of the call, and since which turn it is known."""

    site: ErrorSite
    text: str
    number: int
    known_at: int


class _KnownFailures:
    """What had failed so far, each with when, and since which turn the model could know it."""

    def __init__(self, calls: _CallsSoFar) -> None:
        self._calls = calls
        self._failed: dict[bytes, _Failure] = {}
        self._told: dict[tuple[str, str], tuple[int, int]] = {}  # kind and message
        self._missing: dict[str, int] = {}  # paths
        self._faults: list[tuple[tuple[str, str], int, int]] = []  # of tools that are broken
        self._escaped_at: int | None = None

    def reasons(self, call: ToolCall, result: ToolResult, verdict: Verdict, path: str) -> Iterator[str]:
        """Why a failure is the model's, whatever it is taken for."""
        if self._is_again(call, result, verdict):
            yield "the same call had just failed in the same way, and nothing was done in between"
        if self._is_broken(call, result, verdict):
            yield "this tool had just failed twice in this way, whatever it was asked for"
        if self._was_told(call, result, verdict) or self._is_missing(call, verdict, path):
            yield "the session had shown that this is not there"
        if self._escaped_at is not None and self._escaped_at < self._calls.made(call) and _is_escaped(call, result):
            yield "the session had shown what becomes of an exclamation mark"

    def note(self, call: ToolCall, result: ToolResult, verdict: Verdict, path: str) -> None:
        """A failure, once it has been judged."""
        if path and verdict.kind == "file_not_found":
            self._missing.setdefault(path, self._calls.turn)
        self._told[verdict.kind, _message(result, verdict)] = (self._calls.number, self._calls.turn)
        fault = _fault(call, result, verdict)
        self._faults += [(fault, self._calls.number, self._calls.turn)] if fault is not None else []
        if self._escaped_at is None and _is_escaped(call, result):
            self._escaped_at = self._calls.turn

    def forget(self, call: ToolCall, path: str) -> None:
        """The call has worked, on this file."""
        if self._failed:
            self._failed.pop(_key(call), None)
        self._missing.pop(path, None)

    def counted(self, site: ErrorSite, call: ToolCall, result: ToolResult) -> ErrorSite:
        """A failure, with its repetitions counted: calls made when it was known, not parallel ones."""
        key, number = _key(call), self._calls.number
        earlier = self._failed.get(key)
        if earlier is not None and earlier.site.kind == site.kind and earlier.known_at < self._calls.made(call):
            between = number - earlier.number - 1
            site = replace(site, repeats=earlier.site.repeats + 1, repeat_of=earlier.site.id, between=between)
        self._failed[key] = _Failure(site, result.text, number, self._calls.turn)
        return site

    def _is_again(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether the failure of this very call was known, and nothing was done since but looking.

        Whatever the first failure was, the second is the model's: nothing had changed. Not where the user or the
        harness refused it, where trying again is right (networks, timeouts, tests), or where it asks how things stand
        by now.
        """
        earlier = self._failed.get(_key(call)) if self._failed else None
        if earlier is None or earlier.site.kind != verdict.kind or earlier.known_at >= self._calls.made(call):
            return False
        if self._calls.heard_at >= earlier.known_at or not self._calls.only_looked_since(earlier.number):
            return False
        if _NOT_APPLIED.search(result.text[:400]):
            return True
        if verdict.kind in _ALWAYS_THE_SAME and verdict.blame == "task":
            return earlier.text == result.text and not verdict.is_soft
        if verdict.blame in ("model", "user") or verdict.kind in _REFUSALS | _WORTH_ANOTHER_TRY or verdict.is_soft:
            return False
        return _ASKS_ON.search(command_text(call.name, call.arguments)) is None

    def _was_told(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether a program or a path was missing in these very words, and nothing was done about it."""
        number, known_at = self._told.get((verdict.kind, _message(result, verdict)), (0, self._calls.turn))
        if known_at >= self._calls.made(call) or self._calls.heard_at >= known_at or verdict.is_soft:
            return False
        if verdict.kind == "cmd_not_found" and verdict.blame == "env":
            since = self._calls.worked_since(number)
            return not any(_INSTALLS.search(command_of(later_call).text) for later_call in since)
        is_path = verdict.kind == "shell_path_missing" and verdict.blame == "unknown"
        return is_path and self._calls.only_looked_since(number)

    def _is_missing(self, call: ToolCall, verdict: Verdict, path: str) -> bool:
        """Whether this path had been refused as missing, and nobody has said anything since."""
        known_at = self._missing.get(path)
        is_excused = verdict.kind == "file_not_found" and verdict.blame == "unknown"
        return is_excused and known_at is not None and self._calls.heard_at < known_at < self._calls.made(call)

    def _is_broken(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Whether the last two calls were of this tool, too, and failed in these words: not for what they asked."""
        fault, last = _fault(call, result, verdict), self._faults[-2:]
        is_same = [earlier_fault == fault and number >= self._calls.number - 2 for earlier_fault, number, _ in last]
        return fault is not None and is_same == [True, True] and last[-1][2] < self._calls.made(call)


def _message(result: ToolResult, verdict: Verdict) -> str:
    return result.text[slice(*verdict.span)]


def _fault(call: ToolCall, result: ToolResult, verdict: Verdict) -> tuple[str, str] | None:
    """The tool and its words, where the tool itself is broken."""
    if verdict.kind != "other" or verdict.blame != "harness":
        return None
    return call.name, _message(result, verdict)[:80]


def _is_escaped(call: ToolCall, result: ToolResult) -> bool:
    return _ESCAPED in result.text[:2000] and _ESCAPED not in command_text(call.name, call.arguments)


def _key(call: ToolCall) -> bytes:
    """Equal for calls that ask the same of the same tool, however they describe it."""
    command = command_text(call.name, call.arguments)
    request = command or {key: value for key, value in call.arguments.items() if key not in _SAID_ABOUT}
    try:
        return encode([call.name, request, call.raw_arguments or ""], where="call")
    except InputError:
        return repr((call.name, call.raw_arguments, sorted(call.arguments, key=str))).encode("utf-8", "replace")


# The calls of a session in the order of their results: which were made when, which worked, who spoke in between.

_WRITES = re.compile(r"\bsed\b.{0,80}\s-\w{0,4}i|\btee\b|(?<![&2=-])>(?![&=]|\s*/dev/)")


class _CallsSoFar:
    """`turn` and `number` are those of the turn and of the call that is being looked at."""

    def __init__(self) -> None:
        self.turn = self.number = 0
        self.heard_at = -1  # the last turn in which somebody but the model spoke
        self._made_at: dict[str, int] = {}
        self._worked: list[tuple[int, ToolCall]] = []

    def made(self, call: ToolCall) -> int:
        """The turn in which the call was made: what came back in it, or later, was not known then."""
        return self._made_at.get(call.id, self.turn)

    def at(self, turn: int, calls: tuple[ToolCall, ...]) -> None:
        self.turn = turn
        for call in calls:
            self._made_at[call.id] = turn

    def add_worked(self, call: ToolCall) -> None:
        self._worked.append((self.number, call))

    def worked_since(self, number: int) -> Iterator[ToolCall]:
        """Calls that worked after call number `number`, the last one first."""
        later = itertools.takewhile(lambda entry: entry[0] > number, reversed(self._worked))
        return (call for _, call in later)

    def only_looked_since(self, number: int) -> bool:
        return all(map(_looks, self.worked_since(number)))


def command_of(call: ToolCall) -> Command:
    return Command.of(command_text(call.name, call.arguments))


def _looks(call: ToolCall) -> bool:
    command = command_of(call)
    if not command.text:
        return only_looks(call.name, call.arguments)
    return command.only_shows and _WRITES.search(command.text) is None


# Hooks and gates: what one refuses for the second time in a project is a convention that was not kept.
#
# Within a conversation that is known as it goes. Over the conversations of a project it is known when all of them have
# been read: they are then put in the order of time.

CONFIDENCE = 0.7
REFUSED_BEFORE = "a hook or gate had refused the same before"
WENT_ROUND = "it goes round a gate, and was refused"
_REFUSED_ELSEWHERE = "a hook or gate had refused the same in an earlier session of this project"
_GATED = frozenset({("git", "commit"), ("git", "push")})
_PARTICULAR = re.compile(r"\S*[/\d.]\S*")  # paths, numbers, hashes: what differs between two refusals of one kind
# A hook that could not run has refused nothing.
_IS_BROKEN = re.compile(
    r"No stderr output|No such file|not found\b|Traceback \(most|can't open file|Permission denied|timed out"
    r"|SyntaxError|Cannot find module|ModuleNotFoundError|hook execution (?:failed|cancelled)",
    re.IGNORECASE,
)
_LOOKED_AT = 400
_MARKS = "'\"`.,:;()[]"
_MAX_WORDS = 12  # a refusal's kind stands at its beginning; what follows is cut at different places
_WORKTREE = re.compile(r"/\.(?:claude/)?worktrees/.*")  # of the same project
_GOES_ROUND = re.compile(r"\s--no-verify\b|\bHUSKY=0|\bSKIP=\w|\bLEFTHOOK=0|\bcommit\b.{0,80}\s-n\b|--no-hooks\b")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first refusal of one kind in a conversation: where, when, and the site that it is if it was not the first."""

    project: str
    gate: str
    time: str
    site: ErrorSite


def gate_of(verdict: Verdict, command: Command, text: str) -> str:
    """What a hook or a gate refused, without names and numbers; empty where none did."""
    by_git = command.only_git and any(pair in _GATED for pair in command.programs)
    if verdict.kind != "hook_blocked" and not (by_git and verdict.kind == "lint_or_typecheck"):
        return ""
    start, end = verdict.span
    if _IS_BROKEN.search(text[start : end + _LOOKED_AT]):
        return ""
    words = _PARTICULAR.sub("", text[start:end]).split()
    terms = [word for word in words if word.strip(_MARKS) not in command.words]  # the rest is what this command says
    return " ".join(terms[:_MAX_WORDS])


def _as_convention(verdict: Verdict, reason: str = REFUSED_BEFORE) -> Verdict:
    return replace(verdict, kind="hook_blocked", blame="model", confidence=CONFIDENCE, reason=reason)


def _goes_round(verdict: Verdict, command: Command) -> bool:
    """Whether a command that leaves the checks out was refused: by a hook, or by the agent's own rules."""
    return verdict.kind in ("hook_blocked", "permission_denied") and _GOES_ROUND.search(command.text) is not None


def refusal(conversation: Conversation, gate: str, site: ErrorSite, *, min_confidence: float) -> Refusal:
    """`site` is what the rules say of the first refusal; kept here is what it is if the project had had one before."""
    turn = next(turn for turn in conversation.turns if turn.id == site.turn_id)
    convention = replace(
        site,
        kind="hook_blocked",
        blame="model",
        confidence=CONFIDENCE,
        is_kept=min_confidence <= CONFIDENCE and turn.origin != "copied",
        reason=_REFUSED_ELSEWHERE,
    )
    return Refusal(_WORKTREE.sub("", conversation.cwd or ""), gate, turn.timestamp or "", convention)


def conventions(refusals: Sequence[Refusal], *, held_out: Set[str] = frozenset()) -> dict[str, ErrorSite]:
    """By id, the sites that were not the first of their kind in their project; without a time nobody can tell.

    What conversations show that are `held_out` is known to them alone.
    """
    learnt = [refusal for refusal in refusals if refusal.site.conversation_id not in held_out]
    later = _later(refusals) if held_out else {}
    return _later(learnt) | {key: site for key, site in later.items() if site.conversation_id in held_out}


def _later(refusals: Iterable[Refusal]) -> dict[str, ErrorSite]:
    first: dict[tuple[str, str], Refusal] = {}
    dated_refusals = sorted(
        (refusal for refusal in refusals if refusal.time and refusal.project),
        key=lambda refusal: (refusal.time, refusal.site.id),
    )
    later = dict[str, ErrorSite]()
    for refusal in dated_refusals:
        earliest = first.setdefault((refusal.project, refusal.gate), refusal)
        if earliest.time < refusal.time and earliest.site.conversation_id != refusal.site.conversation_id:
            later[refusal.site.id] = refusal.site
    return later
