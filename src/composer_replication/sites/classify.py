"""One result: did it fail, how, and whose doing was it.

Rules are tried in groups, and a group is tried only where its words can be meant: the harness's own messages where a
result starts; then, for a shell, the work (tests, linters, compilers) before the machine, programs after it, and the
model's slips last. Where rules of different blame agree, the model is the last to be blamed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from composer_replication.sites.actions.session_state import SessionState
from composer_replication.sites.actions.shell_command import Command, is_path
from composer_replication.sites.actions.tools import (
    LINE_NUMBER,
    OLD_TEXT,
    Channel,
    channel_of,
    command_text,
    is_edit,
    is_shell,
    path_argument,
    plain_name,
)
from composer_replication.sites.rule import FailureRule, Verdict, rule
from composer_replication.sites.rules.files import (
    BUILDS,
    CHECKS,
    EDITS,
    ELSEWHERE,
    FAULTS,
    MISSING,
    PATCHES,
    PROGRAMS,
    READS,
    TESTS,
)
from composer_replication.sites.rules.harness import (
    FILE_ARGUMENTS,
    MISUSES,
    OWN_WORDS,
    REFUSALS,
    SERVER_ARGUMENTS,
    TOOL_NAME,
)
from composer_replication.sites.rules.machine import MACHINE, SLIPS, WITHHELD
from composer_replication.sites.rules.own_words import own_words
from composer_replication.sites.rules.typed import SERVICES, SYNTAX
from composer_replication.sites.rules.usage import USAGE
from composer_replication.sites.view import CleanedText

_TYPED = (*USAGE, *SERVICES, *SYNTAX)
_SOFT_CONFIDENCE = 0.5
_HIDDEN_CONFIDENCE = 0.65
_ONE_MESSAGE = 600
_NEAR_AN_END = 12
_ENVELOPE_LINES = 4
_MAY_BE_TYPED = re.compile(
    r"unknown|unrecogni|illegal|invalid|unsupported|usage:|no |not |missing|requires?|needs|syntax|unexpected|must"
    r"|cannot|error|expected|unmatched|bad |ambiguous|denied|outside|could",
    re.IGNORECASE,
)


def classify(
    tool: str,
    arguments: Mapping[str, Any],
    text: str,
    is_error: bool | None,
    *,
    before: SessionState | None = None,
    extra_rules: Iterable[FailureRule] = (),
) -> Verdict:
    """`is_error` is None where the format has no flag: then the text alone decides, and only clear cases count."""
    view, channel = CleanedText.of(text), channel_of(tool)
    # What the call itself says: a message about anything else is not about the call.
    call_text = command_text(tool, arguments) or f"{tool} {plain_name(tool)} {' '.join(map(str, arguments))}"
    result = _Result(
        view,
        channel,
        Command.of(call_text),
        is_error,
        tuple(extra_rules),
        may_be_soft=is_shell(tool),
        is_edit=is_edit(tool),
    )
    verdict = result.verdict()
    return verdict if before is None else _reconsidered(verdict, tool, arguments, text, before)


@dataclass(frozen=True)
class _Result:
    view: CleanedText
    channel: Channel
    command: Command
    is_error: bool | None
    extra_rules: tuple[FailureRule, ...]
    may_be_soft: bool
    is_edit: bool

    def verdict(self) -> Verdict:
        if self.is_error is False and self.channel != "shell":
            return _no_failure("the log says that it worked")
        verdict = self._first(self.extra_rules) or self._from_harness()
        if verdict is None and not (self.view.is_tagged and self.channel == "shell"):
            verdict = self._from_shell() if self.channel == "shell" else self._from_tool()
        if verdict is not None:
            return verdict
        if self.is_error is True or self._begins_with_error():
            return Verdict("other", "unknown", 0.3, (0, 0), False, "it failed, and no rule knows why")
        return _no_failure("nothing in it says that it failed")

    def _begins_with_error(self) -> bool:
        return self.channel == "other" and self.is_error is None and self.view.is_labelled

    def _from_harness(self) -> Verdict | None:
        if self.is_error is False and not self.view.is_tagged:
            return None
        verdict = self._first(REFUSALS) or self._about_the_call()
        # Nothing was run, so it is no soft failure.
        return None if verdict is None else replace(verdict, is_soft=False)

    def _about_the_call(self) -> Verdict | None:
        """No such tool, arguments that do not fit; by rules for whoever may say so here."""
        if self.channel == "shell" and not self.view.is_tagged:
            was_run = self._exit is not None or (self.command.only_shows and len(self.view.text) > _ONE_MESSAGE)
            return None if was_run else self._first(TOOL_NAME) or self._first(OWN_WORDS)
        if self.channel == "other" and self.is_error is None and not self.view.is_labelled:
            is_message = len(self.view.text) < _ONE_MESSAGE
            return self._first((*TOOL_NAME, *OWN_WORDS)) if is_message else None
        if self.channel == "file" and not self._may_speak:
            return None
        rules = (*TOOL_NAME, *OWN_WORDS, *FILE_ARGUMENTS, *(() if self.view.is_tagged else SERVER_ARGUMENTS))
        return self._first(rules)

    @property
    def _may_speak(self) -> bool:
        """Whether a file tool's text can be a message: what was read or found may begin with any words, too."""
        if self.is_error is True or self.view.is_tagged or self.view.is_labelled:
            return True
        return len(self.view.text) < 1000 and (self.is_edit or FULL_MESSAGE.match(self.view.text) is not None)

    def _from_tool(self) -> Verdict | None:
        if self.channel == "other":
            may_speak = self.is_error is True or self.view.is_labelled
            return (self._first(ELSEWHERE) or self._first(READS) or self._first(MISUSES)) if may_speak else None
        if not self._may_speak:
            return None
        is_message = self.is_error is True or self.view.is_tagged or self.view.is_labelled
        verdict = self._first(FAULTS) if is_message else None
        verdict = verdict or (self._first(EDITS) if self.is_edit else None)
        may_read = is_message or FULL_MESSAGE.match(self.view.text) is not None
        return verdict or (self._first((*READS, *MISUSES)) if may_read else None)

    def _from_shell(self) -> Verdict | None:
        if self.is_error is not True and self.view.text.isascii() and not self.view.has_any(TROUBLE):
            return None
        verdict = self._first(WITHHELD)
        verdict = verdict or (self._as_typed() if self._may_be_typed_wrongly else None)
        if verdict is not None:
            return verdict
        if self.command.only_shows:
            return self._from_reader()
        is_expected = not self._failed and self.command.expects_failure
        verdict = self._work() or (None if is_expected else self._from_machine()) or self._outcome(PROGRAMS)
        verdict = verdict or self._first(PATCHES) or (None if is_expected else self._slip())
        return verdict or (self._fallback() if self._failed else None)

    def _as_typed(self) -> Verdict | None:
        """A command that could not work as it was typed says so at once, or as the last thing it does."""
        ends = replace(self, view=self.view.ends(_NEAR_AN_END))
        verdict = ends._first(_TYPED) or ends._first(own_words(self.command))
        if verdict is None or (
            verdict.kind == "shell_syntax" and "\\!" in self.view.text and "\\!" not in self.command.text
        ):
            return None  # some tools put a backslash before each exclamation mark, whatever the quotes
        begin = self.view.here(verdict.span[0])
        first, rest = self.view.text[:begin], self.view.text[begin:]
        if _names_a_place(rest):
            return None
        if verdict.kind != "shell_syntax" and _follows_trouble(first, self.command):
            return None
        if not self._failed and self.may_be_soft:
            return self._behind_a_pipe(verdict, first)
        return verdict

    def _behind_a_pipe(self, verdict: Verdict, first: str) -> Verdict | None:
        """The same where the status is that of another command: only if it is the first thing that was printed."""
        if first.strip():
            return None
        return replace(verdict, confidence=max(verdict.confidence, _HIDDEN_CONFIDENCE))

    @property
    def _may_be_typed_wrongly(self) -> bool:
        """Whether it is worth asking: it failed, has no status, or one that is another's."""
        if self._failed or not self.may_be_soft:
            return True
        begins = self.view.text.lstrip()[:200].partition("\n")[0]
        is_hidden = self.command.hides_status if self.is_error is False else not self.command.only_shows
        return is_hidden and _MAY_BE_TYPED.search(begins) is not None

    def _slip(self, is_own: Callable[[str], bool] | None = None) -> Verdict | None:
        """The model's own, unless something else in the same result speaks against it."""
        verdict = self._first(SLIPS, is_own)
        return None if verdict is None else weighed(verdict, self.view, self.command)

    def _from_machine(self) -> Verdict | None:
        verdict = self._outcome(MACHINE)
        if verdict is not None and verdict.kind == "os_permission" and not self._failed:
            return self._outcome(MACHINE, self.command.is_own)  # a test may well be called "permission denied"
        return verdict

    def _from_reader(self) -> Verdict | None:
        """What it shows is somebody else's text; only a message in its own name is its own."""
        is_own = self.command.is_own
        ended_well = not self._failed and not is_own(self.view.last_line)  # with trouble on the way, perhaps
        verdict = (None if ended_well else self._first(MACHINE, is_own)) or self._slip(is_own)
        searches = any(name in ("grep", "rg") for name, _ in self.command.programs)
        found_nothing = self.is_error is not True and searches  # an answer, though its status is 1
        return verdict or (self._fallback() if self._failed and not found_nothing else None)

    def _work(self) -> Verdict | None:
        missing = self._outcome(MISSING)
        verdict = self._outcome(TESTS) or self._outcome(CHECKS) or self._outcome(BUILDS)
        if missing is not None:
            # Tests that cannot even be collected fail like tests, but not because of the work.
            return replace(missing, kind="test_failure") if verdict and verdict.kind == "test_failure" else missing
        return verdict

    def _outcome(self, rules: Iterable[FailureRule], is_own: Callable[[str], bool] | None = None) -> Verdict | None:
        """`_first` among the rules that, without a flag, can be how this command ended and not something it printed."""
        return self._first(rules if self._failed else self._endings(rules), is_own)

    def _endings(self, rules: Iterable[FailureRule]) -> list[FailureRule]:
        runs_commands = self.may_be_soft
        return [rule for rule in rules if _may_end_in(rule, self.command, self.view, runs_commands=runs_commands)]

    @cached_property
    def _exit(self) -> tuple[int, int] | None:
        return next(EXIT.matches(self.view, self.command), None)

    @cached_property
    def _states_exit(self) -> bool:
        """Whether the tool itself says that the command failed: in its first or its last lines, around the output."""
        if self._exit is None:
            return False
        begin, end = self._exit
        text = self.view.text
        return text.count("\n", 0, begin) <= _ENVELOPE_LINES or text.rstrip().count("\n", end) <= _ENVELOPE_LINES

    @property
    def _failed(self) -> bool:
        return self.is_error is True or self._exit is not None

    def _is_whole(self, span: tuple[int, int]) -> bool:
        """Where the format has no flag: a message that is all that came back is no text that was shown."""
        return self.is_error is None and is_all(span, self.view)

    def _fallback(self) -> Verdict:
        reason = "a command failed without a reason that a rule knows"
        return Verdict("nonzero_exit", "task", 0.5, self.view.place(*(self._exit or (0, 0))), self._is_soft, reason)

    @property
    def _is_soft(self) -> bool:
        return self.may_be_soft and self.is_error is not True

    def _first(self, rules: Iterable[FailureRule], is_own: Callable[[str], bool] | None = None) -> Verdict | None:
        """The first rule that matches; of several blames within a group, one that is not the model's."""
        model_verdict: Verdict | None = None
        for candidate in rules:
            if self.channel not in candidate.channels:
                continue
            span = next(candidate.matches(self.view, self.command, is_own), None)
            if span is None:
                continue
            is_soft = self._is_soft and candidate.whose not in ("user", "harness")
            is_sure = not is_soft or self._states_exit or self._is_whole(span)
            confidence = candidate.confidence * (1.0 if is_sure else _SOFT_CONFIDENCE)
            verdict = Verdict(
                candidate.kind, candidate.whose, confidence, self.view.place(*span), is_soft, f"rule {candidate.kind}"
            )
            if candidate.whose != "model":
                return verdict
            model_verdict = model_verdict or verdict
        return model_verdict


def _no_failure(reason: str) -> Verdict:
    return Verdict("", "unknown", 0.0, (0, 0), False, reason)


# What stands around a message in the same result, and what that says about it.

# Of a file, which a compiler or a linter speaks of.
_PLACE = re.compile(r"\s*[\w./+-]{1,200}\.\w{1,8}:\d+|.{0,200}\.\w{1,8}:\d+:\d+:")
_LISTS_COMMANDS = re.compile(r"[;\n]|\|\|")
# What an agent's shell prints after every command.
_PROMPT = re.compile(r"^\(Open file: .{0,400}\)$|^\(Current directory: .{0,400}\)$|^bash-\$\s*$", re.MULTILINE)
_STREAMS = re.compile(r"^(?:Error|Stderr|Output|Stdout): (?:\(none\)|\(empty\))?\s*$", re.MULTILINE)  # of an envelope
# Looks whether something is there: that it is not is the answer.
_PROBES = re.compile(r"\s*(?:/\S{1,40}/)?(?:ls|find|stat|test|\[|file|du|lsd|exa|gls): ")
_REPEATS_COMMAND = re.compile(r"^Command: .*", re.MULTILINE)  # an envelope that says what was run
_HOOK = re.compile(r"husky|pre-commit|lint-staged|commit-msg|\bhook\b", re.IGNORECASE)
# An installation, a download or a build that failed makes what comes after it fail too.
_TROUBLE_BEFORE = re.compile(
    r"^(?:E: |W: |Err:|Error|ERROR|error:|curl: \(|wget: |fatal:|npm ERR|Traceback|╷|│ Error|Warning: No )"
    r"|unable to locate"
    r"|not created successfully|is not compatible|no formula|could not (?:get lock|open lock)|returned error: \d"
    r"|pull access denied|command not found|not found in",
    re.MULTILINE | re.IGNORECASE,
)


def weighed(found: Verdict, view: CleanedText, command: Command) -> Verdict:
    """A slip, with the blame taken back where something else had gone wrong before, or where it was a question."""
    if found.kind == "git_state":
        by_hook = _HOOK.search(view.text) is not None
        return replace(found, blame="unknown", reason="a hook may have said this") if by_hook else found
    begin = view.here(found.span[0])
    before = _STREAMS.sub("", _REPEATS_COMMAND.sub("", view.text[:begin]))
    message = view.text[begin : begin + 300].partition("\n")[0]
    if _TROUBLE_BEFORE.search(before) is not None:
        return replace(found, blame="unknown", reason="something else in the command had failed before")
    if found.kind == "shell_path_missing" and _PROBES.match(message) is not None:
        return replace(found, blame="task", reason="a look whether the path is there")
    listed = any(is_path(word) and word in before and word in message for word in command.words)
    return replace(found, blame="unknown", reason="the same result shows this path") if listed else found


def _follows_trouble(before: str, command: Command) -> bool:
    """Whether another command, which runs before this one however it ends, had failed."""
    return _LISTS_COMMANDS.search(command.text) is not None and _TROUBLE_BEFORE.search(before) is not None


def _names_a_place(line: str) -> bool:
    """Whether a line begins with the place in a file that it is about."""
    return _PLACE.match(line) is not None


def is_all(span: tuple[int, int], view: CleanedText) -> bool:
    """Whether nothing but this, and what a shell prints after every command, came back."""
    rest = view.text[: span[0]] + view.text[span[1] :]
    return not _PROMPT.sub("", rest).strip()


# Where a log has no flag: what says that a call failed, and which failures can be how a command ended.
#
# Without a flag a failure has to be the outcome of what was run, not something that was printed on the way.

EXIT = rule(
    "nonzero_exit",
    r"^(?:Error: )?(?:exit (?:code|status)|(?:command |process )?(?:exited|finished|failed) with (?:exit )?(?:code"
    r"|status))"
    r"[ :=]+\(?[1-9]\d{0,2}\b|^<returncode>[1-9]|^\[?(?:The )?command .{0,80}exit code:? [1-9]",
    *("exit", "returncode"),
    channels="shell",
    confidence=0.7,
)
_RUNS = {
    "test_failure": re.compile(
        r"\b(?:py\.?test|unittest|tox|nox|jest|vitest|mocha|rspec|phpunit|ctest|tests?|spec|check)\b"
    ),
    "lint_or_typecheck": re.compile(
        r"\b(?:tsc|eslint|ruff|mypy|flake8|pylint|pyright|credo|dialyzer|clippy|lint|rubocop|edit)\b"
    ),
    "compile_error": re.compile(
        r"\b(?:build|compile|make|cmake|gcc|g\+\+|clang|cargo|go|javac|tsc|webpack|vite|mvn|gradle)\b"
    ),
    "python_exception": re.compile(r"\b(?:python[\d.]*|node|ruby|php|java|deno|bun|uv|poetry)\b|\./"),
    "network": re.compile(
        r"\b(?:curl|wget|git|pip|npm|yarn|pnpm|cargo|docker|apt|apt-get|ssh|gh|go|clone|pull|push|install)\b"
    ),
    "timeout": re.compile(r""),
    "os_permission": re.compile(r""),
    "git_state": re.compile(r"\bgit\b"),
}
# One of these is in every English message of a failure that carries no flag; most output has none of them.
TROUBLE = (
    *("error", "fail", "no such", "not found", "denied", "fatal", "exit", "returncode", "exception", "traceback"),
    *("cannot", "can't", "unable", "timed out", "too long", "could not", "not ", "nothing", "reject", "problem"),
    *("is a directory", "refused", "reformat", "conflict", "ignored", "killed", "unknown", "timeout", "usage: "),
)
_WORKED = re.compile(r"^(?:Exit code:? 0\b|<returncode>0<|Process exited with code 0\b)", re.IGNORECASE | re.MULTILINE)
# Sentences with which tools that read and find begin a failure, where the format has no flag.
FULL_MESSAGE = re.compile(
    r"\s*(?:File \S{1,300} (?:not found|does not exist)|File (?:does not exist|not found)|ENOENT|EISDIR"
    r"|No such (?:file|tool)"
    r"|(?:The )?path \S{1,300} (?:does not exist|is a directory)|Invalid `|Directory \S{1,300} (?:not found"
    r"|does not exist)"
    r"|unsupported call"
    r"|Unknown tool|failed to parse|Tool \S{1,100} (?:is not|not found|does not)|The user|\[Request|File (?:size"
    r"|content)|Error validating"
    r"|The tool execution failed)",
    re.IGNORECASE,
)


def _may_end_in(each: FailureRule, command: Command, view: CleanedText, *, runs_commands: bool) -> bool:
    """Whether this failure can be how the command ended."""
    runs = _RUNS.get(each.kind)
    least = 0.85 if each.kind in ("test_failure", "python_exception") and each.whose == "task" else 0.7
    if runs is None or each.confidence < least:
        return False
    if each.whose == "env" and each.kind != "timeout" and _WORKED.search(view.text):
        return False
    return not runs_commands or runs.search(command.text) is not None


# What a session had shown until a failure, and what that says about one that looks like the model's.
#
# A path that the session showed and that is missing now was not made up; a tool or a command that worked before does
# exist; text copied from the file as it was last read was copied rightly. Such failures are somebody else's, and nobody
# can tell whose.

_NOT_BUILT = "the step that makes this path had failed"
_PRODUCT = re.compile(r"(?:^|/)(?:build|dist|target|out|bin|obj|\.next|node_modules|coverage|_build)/")
_CHANGES_FOLDER = re.compile(
    r"(?:^|[\s:)])cd(?::\d+)?: |can't cd to|Set-Location", re.IGNORECASE
)  # bash, zsh, sh, fish
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w{0,60})\}?")
_ABOUT_WORDS = frozenset(
    ["shell_path_missing", "wrong_folder", "usage_error", "git_state", "api_misuse", "is_directory"]
)
_LOOKED_FOR = re.compile(r"(?:stat|lstat|open|chdir) (/\S{1,400}): ")
_SHELL_SAYS = re.compile(r"\s*(?:/\S*/)?(?:bash|sh|zsh|dash)\b")


def _reconsidered(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> Verdict:
    """The verdict, with the model's blame taken back where the session says otherwise."""
    if verdict.blame != "model":
        return verdict
    if verdict.kind in _ABOUT_WORDS and _has_lost_variable(verdict, tool, arguments, text, before):
        return replace(verdict, blame="unknown", reason="a variable that had been set was empty")
    if verdict.kind == "shell_path_missing" and _is_elsewhere(tool, arguments, text[slice(*verdict.span)], before):
        return replace(verdict, kind="wrong_folder", reason="the session had shown this path from another folder")
    path = path_argument(arguments)
    if verdict.kind == "file_not_found" and path and not path.startswith(("/", "~")) and before.is_from_elsewhere(path):
        return replace(verdict, kind="wrong_folder", reason="the session had shown this path from another folder")
    reason = next(_excuses(verdict, tool, arguments, text, before), None)
    if reason is None:
        return verdict
    return replace(verdict, blame="task" if reason == _NOT_BUILT else "unknown", reason=reason)


def _excuses(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> Iterator[str]:
    message = text[slice(*verdict.span)]
    kind, path = verdict.kind, path_argument(arguments)
    command = Command.of(command_text(tool, arguments))
    if kind == "tool_not_found" and tool in before.tools:
        yield "this tool had answered before"
    if kind == "cmd_not_found" and any(name in before.programs and name in message for name, _ in command.programs):
        yield "this command had worked before"
    if kind == "file_not_found" and path and before.has_shown(path):
        yield "the session had shown this path"
    if kind == "shell_path_missing" and _CHANGES_FOLDER.search(message) is None:
        paths = [word for word in command.words if word in message and is_path(word) and _ends_in(message, word)]
        if any(before.has_shown(typed_path) for typed_path in paths):
            yield "the session had shown this path"
        if before.build_failed and any(
            _PRODUCT.search(typed_path) or _SHELL_SAYS.match(message) for typed_path in paths
        ):
            yield _NOT_BUILT
    if kind == "edit_not_read" and path and before.has_touched(path):
        yield "the session had read or written this file"
    if kind == "output_too_large" and path and not before.had_failed(path):
        yield "nothing had shown how large this file is"
    if kind == "api_misuse" and any(before.has_shown(url) for url in _urls(arguments)):
        yield "the session had shown this address"
    if kind == "usage_error" and any(before.has_shown(name) for name in _names(message, command)):
        yield "the session had shown this name"
    if kind == "edit_no_match" and path and any(_had(before, path, arguments.get(key)) for key in OLD_TEXT):
        yield "the text was copied from the file as it was last read"


def _ends_in(message: str, path: str) -> bool:
    """Whether the message speaks of this path, and not of something inside it."""
    return re.search(rf"{re.escape(path)}(?![\w/-])", message) is not None


def _is_elsewhere(tool: str, arguments: Mapping[str, Any], message: str, before: SessionState) -> bool:
    """Whether a relative path was typed that the session had shown, and the shell stands in another folder."""
    command = Command.of(command_text(tool, arguments))
    looked_for = _LOOKED_FOR.search(message)
    words = (word.strip("'\"").removeprefix("./").rstrip("/.") for word in command.text.split())
    typed = {
        word for word in words if word in message and (is_path(word) or looked_for or _CHANGES_FOLDER.search(message))
    }
    for path in typed:
        if path.startswith(("/", "~")) or not path:
            continue
        if (
            looked_for is not None
            and looked_for[1].endswith(f"/{path}")
            and _is_doubled(looked_for[1].removesuffix(f"/{path}"), path)
        ):
            return True
        if before.is_from_elsewhere(path) or (_CHANGES_FOLDER.search(message) and before.has_shown(path)):
            return True
    return False


def _has_lost_variable(
    verdict: Verdict, tool: str, arguments: Mapping[str, Any], text: str, before: SessionState
) -> bool:
    """Whether the message fits a command whose variables were empty, though it or an earlier one had set them.

    Of a path the message shows what was left of the word; of other things it does not say what came in.
    """
    command = command_text(tool, arguments)
    variables = {
        name for name in _VARIABLE.findall(command) if _is_set(name, command) or before.was_in_a_command(f"{name}=")
    }
    if not variables:
        return False
    if verdict.kind not in ("shell_path_missing", "wrong_folder", "is_directory"):
        return True
    words = {word.strip("'\"") for word in command.split() if variables.intersection(_VARIABLE.findall(word))}
    remainders = {_VARIABLE.sub("", word).strip("'\"") for word in words}
    message = re.split(r"[\s:'\"`‘’]+", text[slice(*verdict.span)])
    return any(word in message for word in remainders if word) or "" in remainders


def _is_set(name: str, command: str) -> bool:
    return re.search(rf"(?:^|[\s;&(]){name}=|\bfor {name} in\b|\bread (?:-\w+ )*{name}\b", command) is not None


def _is_doubled(folder: str, path: str) -> bool:
    """Whether the shell stands inside the very folders that the path begins with."""
    names = path.split("/")
    return any(folder.endswith("/" + "/".join(names[:number])) for number in range(1, len(names) + 1))


def _urls(arguments: Mapping[str, Any]) -> list[str]:
    return [
        value for value in arguments.values() if isinstance(value, str) and value.startswith(("http://", "https://"))
    ]


def _names(message: str, command: Command) -> list[str]:
    """Names of tasks and scripts that the command gives and the message does not know; options are no names."""
    words = (word.strip("'\"`.,:;") for word in message.split())
    return [
        word for word in words if len(word) > 2 and not word.startswith("-") and word in command.words and ":" in word
    ]


def _had(before: SessionState, path: str, old_text: Any) -> bool:
    # Line numbers in what was wanted are the model's slip; those in front of what was shown are the tool's.
    return (
        isinstance(old_text, str)
        and bool(old_text.strip())
        and old_text in LINE_NUMBER.sub("", before.read.get(path, ""))
    )
