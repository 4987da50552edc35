"""Revise verdicts using the rest of the session: earlier calls and failures, and files that are written later.

A rule sees only one result. The session may show, for example, that the same call had just failed (then the model is to
blame), that a formatter had changed the file (then it is not), or that a missing file was merely looked up before
being created.

Hooks and other checks are tracked across all conversations in a project. If a check refuses the same thing twice, the
model has broken a convention that it could have known (`repeated_refusals`).
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
    command_text,
    is_edit,
    is_read_only_tool_call,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
    word_set,
)
from composer_replication.sites.rule import Verdict
from composer_replication.types import Blame, Conversation, ErrorSite, ToolCall, ToolResult

# Lower bound of the confidence if the session itself shows that the model is to blame.
_MIN_CONFIDENCE = 0.7
_WRITING_TOOLS = word_set("write write_file create create_file write_to_file")
# Commands that change the files they name. Commits are excluded, although their hooks may change files.
# "sed -i s/a/b/ x.py"; "echo 1 > x.py"; not "sed -n 1p x.py"; not "make > /dev/null"
_CHANGES_FILES = re.compile(
    r"\b(?:sed|perl|awk)\b.{0,80}\s-\w{0,4}i|--(?:in-place|write|fix)\b|\s-w\b|\b(?:tee|mv|cp|patch|python3?|node|ruby)\b"
    r"|(?<![&2=-])>(?![&=]|\s*/dev/)"
)
# Unlike a formatter, these change files because the model intended it, even if the files are not named.
_CHECKOUT_COMMANDS = frozenset(
    ("git", subcommand)
    for subcommand in word_set("checkout restore switch stash reset rebase merge pull cherry-pick revert apply am")
)
# "git commit --amend"; "git rebase main"; not "git commit -m x"
_REWRITES_HISTORY = re.compile(r"\bgit\b.{0,60}\b(?:rebase|commit\b.{0,80}--amend|reset|filter-branch)\b")
# Git rejects a push without --force: " ! [rejected] main -> main (non-fast-forward)"
_PUSH_REFUSED = re.compile(r"\[rejected\]|non-fast-forward|failed to push some refs|tip of your current")
# "git push origin main"; not "git pull"
_PUSHES = re.compile(r"\bgit\b.{0,40}\bpush\b")
# "git push --force"; "git push origin +main"; not "git push origin main"
_FORCED = re.compile(r"\s(?:-f|--force|--force-with-lease)\b|\s\+\w")
# A file that the model announces it will write.
# "create a/b.py" -> "a/b.py"; "new file: b.py" -> "b.py"; "b.py (new)" -> "b.py"; not "open b.py"
_PLANNED = re.compile(
    r"\b(?:creat(?:e|ing)|new file)\b[ :`'\"*]{1,4}(?:(?:a|the|new|file) ){0,3}[`'\"*]{0,3}([\w./-]{1,200}\.\w{1,10})\b"
    r"|\b([\w./-]{1,200}\.\w{1,10})[`'\"*]{0,3} \((?:new|create|to be created)\b",
    re.IGNORECASE,
)
# Number of characters of a message that are searched for such files.
_MAX_PLAN = 20_000


class VerdictReviser:
    """A reviser of the verdicts on one conversation, based on what the conversation had shown before each result.

    Call `begin_turn` for every turn, `add_message` for every message that was not written by the model, and `revise`
    for every result, in the order of the conversation. After `revise`, call `count_repeats` if the result is an error
    site.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation, self._cwd = conversation, conversation.cwd
        self._calls = _CallHistory()
        self._failures = _FailureHistory(self._calls)
        self.count_repeats = self._failures.count_repeats
        self._first_refusal_turns: dict[str, int] = {}  # refused check -> turn of the first refusal
        self._last_used: dict[str, int] = {}  # file -> number of the last call that read or wrote it
        self._unscanned_texts: list[str] = []  # messages that have not been searched for planned files yet
        self._planned_names: set[str] = set()
        self._writing_turns: dict[str, int] | None = None

    def begin_turn(self, turn: int, text: str, calls: tuple[ToolCall, ...]) -> None:
        """Start turn number `turn`, with this text and these calls."""
        self._calls.begin_turn(turn, calls)
        if text:
            self._unscanned_texts.append(text)

    def add_message(self, text: str) -> None:
        """Record a message from the user or the harness in this turn."""
        if text.strip():
            self._calls.last_message_turn = self._calls.turn

    def revise(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> Verdict:
        """Return the verdict on the next result, revised if the conversation so far contradicts it."""
        self._calls.number += 1
        path = path_argument(call.arguments) if tool_channel(call.name) == "file" else None
        name = normal_path(path, self._cwd) if path else ""
        if verdict.is_failure:
            revised = next(self._revisions(call, result, verdict, name), verdict)
            self._failures.add(call, result, verdict, name)
            return revised
        self._failures.remove(call, name)
        self._calls.add_success(call)
        if name:
            self._last_used[name] = self._calls.number
        return verdict

    def _revisions(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> Iterator[Verdict]:
        """Yield revised verdicts, the one with the strongest reason first. The reasons are stored with the sites."""
        command, kind, blame = _parse_command(call), verdict.kind, verdict.blame
        # Parallel calls in a turn could not learn from each other's refusals, hence the comparison of turns.
        check = refused_check(verdict, command, result.text)
        if check and self._first_refusal_turns.setdefault(check, self._calls.turn) < self._calls.turn_of_call(call):
            yield _blame_repeated_refusal(verdict)
        if _bypasses_checks(verdict, command):
            yield _blame_repeated_refusal(verdict, _BYPASSED)
        is_missing = kind in ("file_not_found", "shell_path_missing")
        if is_missing and self._is_existence_check(call, result, verdict, name):
            yield _reassign(verdict, "task", "a look at a file that is to be written")
        for reason in self._failures.reasons_to_blame_model(call, result, verdict, name):
            yield _blame_model(verdict, reason)
        if kind == "edit_stale" and name in self._last_used and not self._has_changed_file(name):
            yield _reassign(verdict, "unknown", "somebody else, or a formatter, had changed the file")
        if kind == "edit_no_match" and blame == "unknown" and name in self._last_used and self._has_changed_file(name):
            yield _blame_model(verdict, "a command of its own had changed the file since it was read")
        if kind == "git_state" and blame == "unknown" and self._pushes_rewritten_commits(result, command):
            yield _blame_model(verdict, "the session itself had rewritten what was pushed")
        if kind == "usage_error" and blame == "model" and self._is_project_program(command):
            yield _reassign(verdict, "unknown", "the project may be this program's")

    def _is_existence_check(self, call: ToolCall, result: ToolResult, verdict: Verdict, name: str) -> bool:
        """Return whether the call merely checked whether a new file already existed.

        That is so if the missing file had been announced as a new file, or is written later in the session.
        """
        if is_edit(call.name) and call.arguments.get("command") != "view":
            return False
        # Few conversations reach this point, so the files are collected lazily.
        if self._writing_turns is None:
            self._writing_turns = _find_written_files(self._conversation)
        for text in self._unscanned_texts:
            planned_paths = (first or second for first, second in _PLANNED.findall(text[:_MAX_PLAN]))
            self._planned_names.update(path.rpartition("/")[2] for path in planned_paths)
        self._unscanned_texts.clear()
        message = result.text[slice(*verdict.span)]
        typed = (word for word in _parse_command(call).words if word in message and is_path(word))
        names = [name] if name else [normal_path(word, self._cwd) for word in typed]
        call_turn = self._calls.turn_of_call(call)
        return any(
            path.rpartition("/")[2] in self._planned_names or self._writing_turns.get(path, -1) > call_turn
            for path in names
        )

    def _has_changed_file(self, name: str) -> bool:
        """Return whether a command from the model has changed the file since it was last read or written."""
        commands = map(_parse_command, self._calls.succeeded_since(self._last_used[name]))
        file_name = name.rpartition("/")[2]
        return any(
            (file_name in command.text and _CHANGES_FILES.search(command.text))
            or not _CHECKOUT_COMMANDS.isdisjoint(command.programs)
            for command in commands
            if command.text
        )

    def _pushes_rewritten_commits(self, result: ToolResult, command: Command) -> bool:
        """Return whether the command is an unforced push that was rejected because of rewritten commits.

        The session itself must have rewritten commits that had already been pushed.
        """
        if _PUSH_REFUSED.search(result.text) is None or _FORCED.search(command.text) is not None:
            return False
        commands = (_parse_command(call).text for call in self._calls.succeeded_since(0))
        # The calls are in reverse order: only those after the last successful push matter.
        since_push = itertools.takewhile(lambda text: _PUSHES.search(text) is None, commands)
        return any(_REWRITES_HISTORY.search(text) is not None for text in since_push)

    def _is_project_program(self, command: Command) -> bool:
        """Return whether the command runs the program that this project develops, judging by its folder's name."""
        folders = frozenset((self._cwd or "").lower().split("/"))
        return any(name in folders for name, _ in command.programs)


def _blame_model(verdict: Verdict, reason: str) -> Verdict:
    """Return the verdict with the model blamed."""
    return replace(verdict, blame="model", confidence=max(verdict.confidence, _MIN_CONFIDENCE), reason=reason)


def _reassign(verdict: Verdict, blame: Blame, reason: str) -> Verdict:
    """Return the verdict with the blame shifted to `blame`."""
    return replace(verdict, blame=blame, reason=reason)


def _find_written_files(conversation: Conversation) -> dict[str, int]:
    """Return the files that a tool wrote in full, each with the last turn in which it was written."""
    return {
        normal_path(path, conversation.cwd): number
        for number, turn in enumerate(conversation.turns)
        for call in turn.calls
        if (plain_name(call.name) in _WRITING_TOOLS or call.arguments.get("command") == "create")
        and (path := path_argument(call.arguments))
    }


# ---- Failures that the model had seen before -------------------------------------------------------------------------

# Arguments that do not affect what a call does.
_DESCRIPTIVE_ARGUMENTS = frozenset({"description", "timeout", "run_in_background", "explanation"})
# The same call may well succeed the second time.
_RETRYABLE = frozenset(
    ["network", "timeout", "os_permission", "test_failure", "lint_or_typecheck", "compile_error", "python_exception"]
)
_DETERMINISTIC = frozenset(["lint_or_typecheck", "compile_error"])  # unlike tests, as long as no file changes
_REFUSALS = frozenset(["permission_denied", "hook_blocked", "sibling_cancelled"])
# Commands that poll for an event, or run the code being developed.
# "sleep 5 && cat log"; "npm run build"; not "ls src"
_POLLS_OR_RUNS_CODE = re.compile(
    r"\b(?:sleep|watch|wait|checks?|status|logs?|ps|pgrep|curl|run|tests?|lint|build|make|compile|vet|fmt|go|cargo|npm"
    r"|python3?|node|pytest)\b"
)
# SWE-agent's linter rejected the edit, so the file is unchanged.
# "Your proposed edit has introduced new syntax error(s)."
_EDIT_REFUSED = re.compile(r"Your proposed edit has introduced")
# Commands that may install a missing program: "pip install ruff"; "PATH=$PATH:~/bin ls"; not "ls"
_INSTALLS = re.compile(
    r"\b(?:install|add|get|use|brew|apt|apt-get|dnf|yum|pip3?|npm|asdf|mise|export|source)\b|\bPATH="
)
# Some agents' shell tools escape every exclamation mark, regardless of quotes.
_ESCAPED_EXCLAMATION = "\\!"


@dataclass(frozen=True, slots=True)
class _EarlierFailure:
    """The most recent failure of a call, as the model could see it."""

    site: ErrorSite
    text: str
    number: int
    """The sequence number of the call."""
    visible_from: int
    """The turn with the result. Only calls in later turns were made with knowledge of it."""


class _FailureHistory:
    """The failures so far, each with the first turn in which the model could have seen it."""

    def __init__(self, calls: _CallHistory) -> None:
        self._calls = calls
        self._last_failures: dict[bytes, _EarlierFailure] = {}  # by the `_call_key` of the call
        self._messages: dict[tuple[str, str], tuple[int, int]] = {}  # (kind, message) -> (call number, turn)
        self._reported_missing: dict[str, int] = {}  # path -> turn
        self._tool_faults: list[tuple[tuple[str, str], int, int]] = []  # ((tool, message), call number, turn)
        self._escaped_at: int | None = None

    def reasons_to_blame_model(self, call: ToolCall, result: ToolResult, verdict: Verdict, path: str) -> Iterator[str]:
        """Yield the reasons to blame the model for a failure, whatever the rules say."""
        if self._is_repetition(call, result, verdict):
            yield "the same call had just failed in the same way, and nothing was done in between"
        if self._is_tool_broken(call, result, verdict):
            yield "this tool had just failed twice in this way, whatever it was asked for"
        if self._repeats_missing_path_error(call, result, verdict) or self._is_missing_file(call, verdict, path):
            yield "the session had shown that this is not there"
        if (
            self._escaped_at is not None
            and self._escaped_at < self._calls.turn_of_call(call)
            and _has_escaped_exclamation_mark(call, result)
        ):
            yield "the session had shown what becomes of an exclamation mark"

    def add(self, call: ToolCall, result: ToolResult, verdict: Verdict, path: str) -> None:
        """Record a failure. Must be called after `reasons_to_blame_model`, which considers earlier failures only."""
        if path and verdict.kind == "file_not_found":
            self._reported_missing.setdefault(path, self._calls.turn)
        self._messages[verdict.kind, _failure_message(result, verdict)] = (self._calls.number, self._calls.turn)
        fault = _tool_fault(call, result, verdict)
        self._tool_faults += [(fault, self._calls.number, self._calls.turn)] if fault is not None else []
        if self._escaped_at is None and _has_escaped_exclamation_mark(call, result):
            self._escaped_at = self._calls.turn

    def remove(self, call: ToolCall, path: str) -> None:
        """Forget earlier failures of this call and this path, because the call has succeeded."""
        if self._last_failures:
            self._last_failures.pop(_call_key(call), None)
        self._reported_missing.pop(path, None)

    def count_repeats(self, site: ErrorSite, call: ToolCall, result: ToolResult) -> ErrorSite:
        """Return the site with its repetition count. Parallel calls do not count: they had not seen the failure."""
        key, number = _call_key(call), self._calls.number
        earlier = self._last_failures.get(key)
        if (
            earlier is not None
            and earlier.site.kind == site.kind
            and earlier.visible_from < self._calls.turn_of_call(call)
        ):
            between = number - earlier.number - 1
            site = replace(site, repeats=earlier.site.repeats + 1, repeat_of=earlier.site.id, between=between)
        self._last_failures[key] = _EarlierFailure(site, result.text, number, self._calls.turn)
        return site

    def _is_repetition(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Return whether this exact call had failed visibly, and the model has only read since then.

        Whoever was to blame for the first failure, the model is to blame for the second, because nothing had changed.
        Exceptions are refusals by the user or the harness, failures worth a retry (network, timeouts, tests), and
        commands that poll.
        """
        earlier = self._last_failures.get(_call_key(call)) if self._last_failures else None
        if (
            earlier is None
            or earlier.site.kind != verdict.kind
            or earlier.visible_from >= self._calls.turn_of_call(call)
        ):
            return False
        if self._calls.last_message_turn >= earlier.visible_from or not self._calls.has_only_read_since(earlier.number):
            return False
        # Looks like a failed check, which is worth a retry, but the edit was not applied.
        if _EDIT_REFUSED.search(result.text[:400]):
            return True
        if verdict.kind in _DETERMINISTIC and verdict.blame == "task":
            return earlier.text == result.text and not verdict.is_soft
        if verdict.blame in ("model", "user") or verdict.kind in _REFUSALS | _RETRYABLE or verdict.is_soft:
            return False
        return _POLLS_OR_RUNS_CODE.search(command_text(call.name, call.arguments)) is None

    def _repeats_missing_path_error(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Return whether the same missing program or path had been reported before, and nothing was done about it."""
        number, visible_from = self._messages.get(
            (verdict.kind, _failure_message(result, verdict)), (0, self._calls.turn)
        )
        is_visible = self._calls.last_message_turn < visible_from < self._calls.turn_of_call(call)
        if not is_visible or verdict.is_soft:
            return False
        if verdict.kind == "cmd_not_found" and verdict.blame == "env":
            since = self._calls.succeeded_since(number)
            return not any(_INSTALLS.search(_parse_command(later_call).text) for later_call in since)
        is_missing_path = verdict.kind == "shell_path_missing" and verdict.blame == "unknown"
        return is_missing_path and self._calls.has_only_read_since(number)

    def _is_missing_file(self, call: ToolCall, verdict: Verdict, path: str) -> bool:
        """Return whether this path had been reported as missing, and no message has arrived since then."""
        visible_from = self._reported_missing.get(path)
        is_excused = verdict.kind == "file_not_found" and verdict.blame == "unknown"
        return (
            is_excused
            and visible_from is not None
            and self._calls.last_message_turn < visible_from < self._calls.turn_of_call(call)
        )

    def _is_tool_broken(self, call: ToolCall, result: ToolResult, verdict: Verdict) -> bool:
        """Return whether the last two calls hit the same fault in the same tool, so the arguments are not the cause."""
        fault, last = _tool_fault(call, result, verdict), self._tool_faults[-2:]
        is_same = [earlier_fault == fault and number >= self._calls.number - 2 for earlier_fault, number, _ in last]
        return fault is not None and is_same == [True, True] and last[-1][2] < self._calls.turn_of_call(call)


def _failure_message(result: ToolResult, verdict: Verdict) -> str:
    return result.text[slice(*verdict.span)]


def _tool_fault(call: ToolCall, result: ToolResult, verdict: Verdict) -> tuple[str, str] | None:
    """Return the tool and its message if the tool itself is broken, otherwise None."""
    if verdict.kind != "other" or verdict.blame != "harness":
        return None
    return call.name, _failure_message(result, verdict)[:80]


def _has_escaped_exclamation_mark(call: ToolCall, result: ToolResult) -> bool:
    """Return whether the tool escaped an exclamation mark in the command."""
    command = command_text(call.name, call.arguments)
    return _ESCAPED_EXCLAMATION in result.text[:2000] and _ESCAPED_EXCLAMATION not in command


def _call_key(call: ToolCall) -> bytes:
    """Return a key that is equal for calls with the same tool and the same request, ignoring descriptions."""
    command = command_text(call.name, call.arguments)
    request = command or {key: value for key, value in call.arguments.items() if key not in _DESCRIPTIVE_ARGUMENTS}
    try:
        return encode([call.name, request, call.raw_arguments or ""], where="call")
    except InputError:
        return repr((call.name, call.raw_arguments, sorted(call.arguments, key=str))).encode("utf-8", "replace")


# ---- The calls so far, in the order of their results -----------------------------------------------------------------

# "echo 1 > a.txt"; "ls | tee a.txt"; not "ls 2>&1"; not "ls > /dev/null"
_WRITES_FILES = re.compile(r"\bsed\b.{0,80}\s-\w{0,4}i|\btee\b|(?<![&2=-])>(?![&=]|\s*/dev/)")


class _CallHistory:
    """The calls so far: the turn in which each was made, and whether it succeeded.

    `turn` is the current turn, and `number` counts the results so far.
    """

    def __init__(self) -> None:
        self.turn = self.number = 0
        self.last_message_turn = -1  # the last turn with a message from the user or the harness
        self._turn_by_call: dict[str, int] = {}
        self._successes: list[tuple[int, ToolCall]] = []

    def turn_of_call(self, call: ToolCall) -> int:
        """Return the turn in which the call was made. By then, the model had seen only results of earlier turns."""
        return self._turn_by_call.get(call.id, self.turn)

    def begin_turn(self, turn: int, calls: tuple[ToolCall, ...]) -> None:
        self.turn = turn
        for call in calls:
            self._turn_by_call[call.id] = turn

    def add_success(self, call: ToolCall) -> None:
        self._successes.append((self.number, call))

    def succeeded_since(self, number: int) -> Iterator[ToolCall]:
        """Yield the calls that succeeded after call number `number`, the latest first."""
        later = itertools.takewhile(lambda entry: entry[0] > number, reversed(self._successes))
        return (call for _, call in later)

    def has_only_read_since(self, number: int) -> bool:
        return all(map(_is_read_only, self.succeeded_since(number)))


def _parse_command(call: ToolCall) -> Command:
    return Command.of(command_text(call.name, call.arguments))


def _is_read_only(call: ToolCall) -> bool:
    command = _parse_command(call)
    if not command.text:
        return is_read_only_tool_call(call.name, call.arguments)
    return command.is_display_only and _WRITES_FILES.search(command.text) is None


# ---- Hooks and other checks: a second refusal for the same reason is a broken convention -----------------------------

_CONFIDENCE = 0.7
_REFUSED_BEFORE = "a hook or gate had refused the same before"
_BYPASSED = "it goes round a gate, and was refused"
_REFUSED_ELSEWHERE = "a hook or gate had refused the same in an earlier session of this project"
_HOOKED_COMMANDS = frozenset({("git", "commit"), ("git", "push")})
# Paths, numbers and hashes, which differ between two refusals of the same kind: "src/a.py"; "3"; "v1.2"; not "tests"
_SPECIFIC = re.compile(r"\S*[/\d.]\S*")
# A hook that could not run has not refused anything.
# "sh: ./check: No such file or directory"; not "2 tests failed"
_HOOK_FAILED_TO_RUN = re.compile(
    r"No stderr output|No such file|not found\b|Traceback \(most|can't open file|Permission denied|timed out"
    r"|SyntaxError|Cannot find module|ModuleNotFoundError|hook execution (?:failed|cancelled)",
    re.IGNORECASE,
)
# Number of characters after the message that are searched for signs of a broken hook.
_NUM_CHARACTERS_AFTER = 400
_PUNCTUATION = "'\"`.,:;()[]"
# Two refusals of the same kind begin alike, but they may be truncated at different positions.
_MAX_WORDS = 12
# A worktree belongs to the project that contains it: "/srv/app/.claude/worktrees/fix-login"; "/srv/app/.worktrees/a"
_WORKTREE = re.compile(r"/\.(?:claude/)?worktrees/.*")
# "git commit --no-verify"; "HUSKY=0 git push"; "git commit -m x -n"; not "git commit -m x"
_BYPASSES_CHECKS = re.compile(r"\s--no-verify\b|\bHUSKY=0|\bSKIP=\w|\bLEFTHOOK=0|\bcommit\b.{0,80}\s-n\b|--no-hooks\b")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first refusal of a given kind in a conversation."""

    project: str
    """The project's folder."""
    gate: str
    """The refused check, as returned by `refused_check`."""
    time: str
    site: ErrorSite
    """The error site to report if an earlier conversation in the project had the same refusal."""


def refused_check(verdict: Verdict, command: Command, text: str) -> str:
    """Return what a hook or another check refused, as words without names and numbers.

    The result is "" if no check refused the call.
    """
    by_git = command.runs_git_only and any(pair in _HOOKED_COMMANDS for pair in command.programs)
    if verdict.kind != "hook_blocked" and not (by_git and verdict.kind == "lint_or_typecheck"):
        return ""
    start, end = verdict.span
    if _HOOK_FAILED_TO_RUN.search(text[start : end + _NUM_CHARACTERS_AFTER]):
        return ""
    words = _SPECIFIC.sub("", text[start:end]).split()
    terms = [
        word for word in words if word.strip(_PUNCTUATION) not in command.words
    ]  # without the words of this command
    return " ".join(terms[:_MAX_WORDS])


def _blame_repeated_refusal(verdict: Verdict, reason: str = _REFUSED_BEFORE) -> Verdict:
    return replace(verdict, kind="hook_blocked", blame="model", confidence=_CONFIDENCE, reason=reason)


def _bypasses_checks(verdict: Verdict, command: Command) -> bool:
    """Return whether the refused command bypasses checks, such as `git commit --no-verify`."""
    return verdict.kind in ("hook_blocked", "permission_denied") and _BYPASSES_CHECKS.search(command.text) is not None


def first_refusal(conversation: Conversation, gate: str, site: ErrorSite, *, min_confidence: float) -> Refusal:
    """Return the record of a conversation's first refusal. `site` is its error site according to the rules."""
    turn = next(turn for turn in conversation.turns if turn.id == site.turn_id)
    convention = replace(
        site,
        kind="hook_blocked",
        blame="model",
        confidence=_CONFIDENCE,
        is_kept=min_confidence <= _CONFIDENCE and turn.origin != "copied",
        reason=_REFUSED_ELSEWHERE,
    )
    return Refusal(_WORKTREE.sub("", conversation.cwd or ""), gate, turn.timestamp or "", convention)


def repeated_refusals(refusals: Sequence[Refusal], *, held_out: Set[str] = frozenset()) -> dict[str, ErrorSite]:
    """Return, by id, the sites of refusals that were not the first of their kind in their project.

    Conversations are ordered by time; those without a time are skipped. Refusals in `held_out` conversations count only
    for other held-out conversations, so that nothing leaks from them into the training data.
    """
    training = [refusal for refusal in refusals if refusal.site.conversation_id not in held_out]
    later = _repeated_refusals_by_id(refusals) if held_out else {}
    return _repeated_refusals_by_id(training) | {
        key: site for key, site in later.items() if site.conversation_id in held_out
    }


def _repeated_refusals_by_id(refusals: Iterable[Refusal]) -> dict[str, ErrorSite]:
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
