"""Predict whether a call will fail, using what is known before it runs.

`Judge.verdict` checks a call against the agent's schemas, earlier attempts, and the rules for file tools, shell
commands, agents and skills. Each verdict names its rule. `_Knowledge` combines the sources: the session so far, earlier
sessions in the project, and a checkout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from composer_replication.sites.actions.edits import Put, Replace, edit_operations
from composer_replication.sites.actions.file_contents import ChangeCertainty, FileText, FileTexts
from composer_replication.sites.actions.known_paths import KnownPaths, PathStatus
from composer_replication.sites.actions.session_state import SessionState, requested_agent_or_skill
from composer_replication.sites.actions.shell_lexer import UnsupportedShellSyntax
from composer_replication.sites.actions.shell_parser import CommandChain, Simple, parse_script
from composer_replication.sites.actions.tools import (
    command_text,
    is_edit,
    normal_path,
    path_argument,
    plain_name,
    tool_channel,
    word_set,
)
from composer_replication.sites.judge.project_files import Checkout, PathKnowledge, remove_blanks
from composer_replication.sites.rule import USUAL_BLAME
from composer_replication.types import ToolCall

Says = Literal["ok", "fails", "risky", "unknown"]
"""The call works, fails, may well fail, or its outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one call, and the rule that produced it. Almost every shell command is `unknown`.

    `kind` is the kind of the predicted failure (`sites.KINDS`), or of the failure that the rule is about. `why` is a
    human-readable explanation.
    """

    says: Says
    rule: str
    kind: str = ""
    why: str = ""


UNKNOWN = Judgement("unknown", "no_rule")


class Judge:
    """A predictor for the outcome of calls in a session. The session's state may grow between predictions."""

    def __init__(
        self, state: SessionState, *, project: PathKnowledge | None = None, checkout: Checkout | None = None
    ) -> None:
        self.state = state
        self._knowledge = _Knowledge(state, project, checkout)

    def verdict(self, call: ToolCall) -> Judgement:
        """Return the outcome that is predicted for a call if it is run now."""
        if call.raw_arguments is not None:
            return Judgement("fails", "arguments_no_json", "input_validation", "the arguments are not a JSON object")
        violation = _schema_violation(call.name, frozenset(call.arguments))
        if violation is not None:
            return Judgement("fails", "schema", "input_validation", violation)
        # Edits are excluded: knowledge about the file predicts their outcome better than the last attempt.
        failure = self.state.attempts.last_failure(call)
        if failure is not None and failure.is_unchanged and _is_repeatable(failure.kind) and not is_edit(call.name):
            return Judgement(
                "fails", "same_again", failure.kind, "the same call failed before, and nothing has changed"
            )
        channel = tool_channel(call.name)
        if channel == "file":
            return _judge_file_call(call, self._knowledge)
        if channel == "shell":
            return _judge_command(command_text(call.name, call.arguments), self._knowledge)
        name = requested_agent_or_skill(call)
        if name is None:
            return UNKNOWN
        kind = "other" if "skill" in name[0].lower() else "input_validation"
        exists = self._knowledge.has_name(name)
        if exists is False:
            return Judgement("fails", "unknown_name", kind, "no agent or skill has this name")
        if exists is None and name[0] == "Skill" and self._knowledge.is_built_in_command(name[1]):
            says = "fails" if name[1] in _NEVER_SKILLS else "risky"
            return Judgement(says, "unknown_name", kind, "the name is a built-in command of the agent, not a skill")
        return Judgement("ok" if exists else "unknown", "name", kind)


def _is_repeatable(kind: str) -> bool:
    """Return whether a failure of this kind is expected to recur if the same call is made again.

    Failing tests, network errors and refusals by the user, for example, need not recur.
    """
    return USUAL_BLAME.get(kind) in ("model", "unknown")


_UNKNOWN_COMMAND = Judgement("unknown", "shell", why="the effect of a command cannot be predicted")
# Programs that fail if an operand is a missing file.
_READERS = word_set("cat head tail wc less nl stat file diff chmod open du tac xxd shellcheck gofmt")
_READERS_AFTER_PATTERN = word_set("sed grep egrep awk rg jq")  # the first operand is a pattern
_INTERPRETERS = word_set("source . bash sh zsh python python3 node ruby perl")  # only the first operand is a file
# "src/a.py", "./a" and "~/a"; not "*.py", "$DIR" or "s/a b/c/"
_PATH = re.compile(r"[\w@+~][\w.@+/~-]*|\.{1,2}/[\w.@+/~-]+|/[\w.@+/~-]+")
_MAX_COMMAND = 20_000


def _judge_command(command: str, knowledge: _Knowledge) -> Judgement:
    """Judge a command by the steps that are certain to run.

    The command fails if one of these steps fails; otherwise the verdict is unknown. Only missing folders, files and
    programs are predicted.
    """
    cwd, checked_words = knowledge.paths.shell.path, set[str]()
    for step in _unconditional_steps(command):
        name, operands = step.name, step.operands
        if name in knowledge.state.attempts.missing_programs:
            return Judgement("fails", "no_such_program", "cmd_not_found", "the shell did not find this program earlier")
        if cwd is None:
            return _UNKNOWN_COMMAND
        if name == "cd":
            target = operands[0] if len(operands) == 1 else None
            if target is None or target == "-" or not _PATH.fullmatch(target):
                return _UNKNOWN_COMMAND
            folder = knowledge.paths.absolute(target, cwd)
            if _is_missing(target, cwd, knowledge):
                return Judgement("fails", "cd_missing", "shell_path_missing", "the folder does not exist")
            cwd = folder
        elif step.is_shown and any(knowledge.is_relative_to_root(word, cwd) for word in operands):
            return Judgement("fails", "from_another_folder", "shell_path_missing", "the shell is in another folder")
        elif step.is_shown and any(
            _is_missing(word, cwd, knowledge) for word in step.files if word not in checked_words
        ):
            return Judgement("fails", "file_missing", "shell_path_missing", "the file does not exist")
        checked_words.update(
            operands
        )  # `test -f a && cat a`: a file checked by an earlier step may be missing without failure
    return _UNKNOWN_COMMAND


@dataclass(frozen=True, slots=True)
class _CommandStep:
    """One program in a command: its name without a folder, and its literal operands."""

    name: str
    operands: tuple[str, ...]
    is_shown: bool  # its error message is visible, and its failure makes the whole command fail

    @property
    def files(self) -> tuple[str, ...]:
        """The operands that name files which the program reads."""
        paths = tuple(word for word in self.operands if re.search(r"[/.]", word) and _PATH.fullmatch(word))
        if self.name in _READERS:
            return paths
        if self.name in _INTERPRETERS:
            return tuple(path for path in paths if path == self.operands[0])
        return tuple(path for path in paths if path != self.operands[0]) if self.name in _READERS_AFTER_PATTERN else ()


def _unconditional_steps(command: str) -> Iterator[_CommandStep]:
    """Yield the steps at the start of a script that are certain to run if all earlier steps succeed."""
    if len(command) > _MAX_COMMAND:
        return
    try:
        script = parse_script(command)
    except UnsupportedShellSyntax:
        return
    for chain in script:
        if "||" in chain.operators or chain.is_background:
            return
        yield from _chain_steps(chain, is_last=chain is script[-1])


def _chain_steps(chain: CommandChain, *, is_last: bool) -> Iterator[_CommandStep]:
    """Yield the steps at the start of a chain that are certain to run.

    Stop before the first one that may not run or whose program depends on an expansion.
    """
    for pipeline in chain.pipelines:
        first = pipeline.commands[0]
        if not isinstance(first, Simple) or pipeline.is_negated:
            return
        words = [word.literal for word in first.words]
        if not words or words[0] is None:  # the program depends on an expansion
            return
        operands = tuple(word for word in words[1:] if word is not None and not word.startswith("-"))
        is_stderr_redirected = any(
            redirect.descriptor == "2" or redirect.op.startswith("&") for redirect in first.redirects
        )
        is_shown = is_last and len(pipeline.commands) == 1 and not is_stderr_redirected and None not in words
        yield _CommandStep(words[0].rpartition("/")[2], operands, is_shown)


def _is_missing(word: str, cwd: str, knowledge: _Knowledge) -> bool:
    return knowledge.status(knowledge.paths.absolute(word, cwd)).exists is False or knowledge.is_relative_to_root(
        word, cwd
    )


_MIN_LENGTH = 24  # characters; shorter texts may coincide by chance once blanks are removed
_TOOLS_TAKING_FOLDERS = word_set("grep glob ls list list_directory list_dir list_files search_file_content find_file")


def _judge_file_call(call: ToolCall, knowledge: _Knowledge) -> Judgement:
    """Judge a call to a file tool by its path and, for an edit, by whether the file was read and contains the text."""
    argument = path_argument(call.arguments)
    if not argument:
        return Judgement("unknown", "no_path")
    path = knowledge.paths.absolute(argument)
    status = knowledge.status(path)
    takes_folders = plain_name(call.name) in _TOOLS_TAKING_FOLDERS
    if status.is_folder and not takes_folders:
        return Judgement("fails", "a_folder", "is_directory", "the path is a folder")
    if is_edit(call.name):
        return _judge_edit(call, path, knowledge)
    if knowledge.is_relative_to_root(argument, knowledge.paths.shell.path):
        return Judgement("fails", "from_another_folder", "file_not_found", "the shell is in another folder")
    if status.exists is False and knowledge.texts.was_read(path) is not True:
        knowledge.record_missing(path, status)
        return Judgement("fails", status.why, "file_not_found", "the path does not exist")
    if plain_name(call.name) == "read" and not call.arguments.get("limit") and knowledge.is_too_large(path):
        return Judgement("fails", "too_large", "output_too_large", "the file is too large to be shown at once")
    if status.exists:
        return Judgement("ok", status.why, "file_not_found")
    return Judgement("unknown", status.why, "file_not_found", "the path was never shown")


def _judge_edit(call: ToolCall, path: str, knowledge: _Knowledge) -> Judgement:
    """Judge an edit by whether it changes anything, whether the file exists, and whether it was read."""
    operations = edit_operations(call, knowledge.paths.root) or []
    replaces = [operation for operation in operations if isinstance(operation, Replace)]
    if replaces and all(edit.old == edit.new for edit in replaces):
        return Judgement("fails", "edit_noop", "edit_noop", "the old text equals the new text")
    status, was_read = knowledge.status(path), knowledge.texts.was_read(path)
    writes = bool(operations) and all(isinstance(operation, Put) for operation in operations)
    if was_read is True:
        return _judge_edit_of_read_file(call, replaces, path, knowledge)
    if writes and knowledge.texts.has_plan and _PLAN_FOLDER in path:
        return Judgement("fails", "plan_is_there", "edit_not_read", "the session's plan is in this file")
    # Writing a whole file, or replacing an empty text, creates a missing file.
    if writes or (replaces and not replaces[0].old):
        if not status.exists:
            return Judgement("unknown", "new_file", "edit_not_read", "the file may be new")
    elif status.exists is False:
        return Judgement("fails", status.why, "file_not_found", "the path does not exist")
    if call.name not in _TOOLS_REQUIRING_READ:
        return Judgement("unknown", "text_not_shown", "edit_no_match", "the file was never shown")
    if was_read is None and replaces and knowledge.was_probably_not_read(path, replaces[0].old):
        return Judgement(
            "fails", "not_read_since", "edit_not_read", "the file was probably not read before the summary"
        )
    if was_read is None:
        return Judgement("unknown", "read_before", "edit_not_read", "the file may have been read before the log begins")
    return Judgement("fails", "not_read", "edit_not_read", "the agent has not read the file")


def _judge_edit_of_read_file(call: ToolCall, replaces: list[Replace], path: str, knowledge: _Knowledge) -> Judgement:
    """Judge an edit of a file that was read.

    If a command has changed the file since then, the file may count as unread.
    """
    rule, kind = "changed_and_too_large", "edit_not_read"
    change = knowledge.unreadable_change(path) if call.name in _TOOLS_REQUIRING_READ else ""
    if change == "surely":
        return Judgement("fails", rule, kind, "a command changed the file, which is too large to be reread")
    judgement = _judge_text(replaces[0], path, knowledge) if replaces else Judgement("ok", "was_read", "edit_not_read")
    if change == "maybe" and judgement.says != "fails":
        return Judgement("risky", rule, kind, "a formatter ran, and the file is too large to be reread")
    return judgement


def _judge_text(edit: Replace, path: str, knowledge: _Knowledge) -> Judgement:
    """Judge an edit by the number of times its old text occurs in the file."""
    text, source = knowledge.text(path)
    if text is None:
        return Judgement("unknown", "text_not_shown", "edit_no_match")
    count = _num_matches(text, edit.old)
    if count > 1 and not edit.everywhere:
        says = "fails" if text.doubt < 2 else "risky"
        return Judgement(says, f"ambiguous{source}", "edit_ambiguous", f"the text occurs {count} times")
    if count:
        rule = "found_in_whole_file" if text.is_whole and not text.doubt else "found_in_part"
        return Judgement("ok", f"{rule}{source}", "edit_no_match")
    return _judge_missing_text(edit, path, text, source, knowledge)


def _judge_missing_text(edit: Replace, path: str, text: FileText, source: str, knowledge: _Knowledge) -> Judgement:
    """Judge an edit whose old text does not occur in the known content of the file."""
    why, old = "the text is not in the file", edit.old.replace("\r\n", "\n")
    if text.is_whole and not text.doubt:
        return Judgement("fails", f"no_match{source}", "edit_no_match", why)
    if text.is_whole and text.doubt < 2:
        # A person may have changed the file. Most such changes are committed, so a text that is in no commit is not in
        # the file, unless the user mentioned a change.
        is_sure = not text.may_be_reworked and knowledge.is_in_no_commit(path, old)
        rule = "no_match_in_any_commit" if is_sure else f"no_match_long_ago{source}"
        return Judgement("fails" if is_sure else "risky", rule, "edit_no_match", why)
    if not text.doubt and _differs_only_in_blanks(text, old):
        says = "fails" if knowledge.is_in_no_commit(path, old, but_for_blanks=False) else "risky"
        return Judgement(says, "other_blanks", "edit_no_match", "the file has this text with different whitespace")
    if not text.doubt and text.contradicts(old):
        says = "fails" if knowledge.is_in_no_commit(path, old) else "risky"
        return Judgement(says, "contradicts", "edit_no_match", "the file continues differently after the first line")
    return Judgement("unknown", "text_not_shown", "edit_no_match")


def _differs_only_in_blanks(text: FileText, old: str) -> bool:
    squeezed = remove_blanks(old)
    return len(squeezed) >= _MIN_LENGTH and squeezed in remove_blanks(text.text)


def _num_matches(text: FileText, old: str) -> int:
    plain = old.replace("\r\n", "\n")
    # An edit is also tried without its final newline.
    return text.count(plain) or (text.count(plain.rstrip("\n")) if plain.rstrip("\n") else 0)


# A checkout belongs to the session's project if it has this fraction of the files shown, given at least this many.
_MIN_SHOWN, _MIN_SHARE = 3, 0.5
_MAX_SHOWN = 50
# Claude Code's reader refuses files with more than 25,000 tokens. In program text, the number of pieces (words, digits
# and runs of symbols) is about 0.78 times the number of tokens. Files with very short lines were not measured, so they
# are not judged.
_MAX_PIECES = 19_500
_MIN_PIECES_PER_LINE = 5
# "x1 = foo()\n" -> "x", "1", "=", "foo", "()", "\n"
_PIECE = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+|\n+")
# How fully the session has mentioned a path -> the sources to trust if they report that the path does not exist. The
# more of the path was mentioned, the more likely it was created in the meantime.
_TRUSTED_SOURCES = {
    "only_its_name": ("not_in_checkout", "missing_in_earlier_session"),
    "unseen": ("not_in_checkout", "missing_in_earlier_session", "in_no_earlier_session"),
}
# "src/a.py" and "src/lib/"; not "a.py" or "/src/a.py"
_RELATIVE_PATH = re.compile(r"[\w@+][\w.@+-]*(?:/[\w.@+-]+)+/?")


class _Knowledge:
    """Everything that a verdict may use: the session so far, earlier sessions in the project, a checkout."""

    def __init__(self, state: SessionState, project: PathKnowledge | None, checkout: Checkout | None) -> None:
        self.state, self._project, self._checkout = state, project, checkout
        self._reported_missing: dict[str, set[str]] = {}  # source -> paths that it reported missing in a verdict

    @property
    def paths(self) -> KnownPaths:
        """The paths known to the session."""
        return self.state.paths

    @property
    def texts(self) -> FileTexts:
        """The file contents known to the session."""
        return self.state.texts

    def status(self, path: str) -> PathStatus:
        """Return whether a path exists according to the session or else to the other sources."""
        status, relative = self.paths.status(path), self.paths.relative(path)
        if status.exists is not None or relative is None:
            return status
        by_project = self._project.standing(relative, self.paths.relative_files()) if self._project else None
        answers = [answer for answer in (self._status_in_checkout(relative), by_project) if answer is not None]
        # A single source that has seen the path outweighs all that have not.
        if any(answer.exists for answer in answers):
            return next(answer for answer in answers if answer.exists)
        is_another_file = self._checkout is not None and _may_be_other_file(relative, status.why, self._checkout.files)
        trusted = _TRUSTED_SOURCES.get("only_its_name" if is_another_file else status.why, ())
        answers = [answer for answer in answers if answer.why in trusted]
        if not answers or self._is_outdated(answers[0]):
            return status
        return answers[0]

    def record_missing(self, path: str, status: PathStatus) -> None:
        """Record that a source other than the session reported a path as missing, and that a verdict relied on it.

        If the path turns up later, the source is no longer trusted.
        """
        self._reported_missing.setdefault(status.why, set()).add(path)

    def _is_outdated(self, answer: PathStatus) -> bool:
        """Return whether the session has shown a path that the source of this answer had reported as missing."""
        missing_paths = self._reported_missing.get(answer.why, ())
        return any(path in self.paths.files or path in self.paths.folders for path in missing_paths)

    def _status_in_checkout(self, relative: str) -> PathStatus | None:
        if self._checkout is None or not self._is_checkout_of_project(relative, self._checkout):
            return None
        exists = self._checkout.exists(relative)
        if relative in self._checkout.folders:
            return PathStatus(True, "folder")
        # A missing file that is not normally committed may still exist in the work tree.
        if exists is None or (not exists and not _is_normally_committed(relative, self._checkout.files)):
            return None
        return PathStatus(exists, "in_checkout" if exists else "not_in_checkout")

    def _is_checkout_of_project(self, relative: str, checkout: Checkout) -> bool:
        """Return whether the checkout belongs to the session's project, judging by its files or the path's folder."""
        shown_paths = list(islice((path for path in self.paths.relative_files() if "/" in path), _MAX_SHOWN))
        if len(shown_paths) >= _MIN_SHOWN:
            return sum(path in checkout.files for path in shown_paths) >= _MIN_SHARE * len(shown_paths)
        parts = relative.split("/")
        return len(parts) > 2 and "/".join(parts[:2]) in checkout.folders

    def has_name(self, name: tuple[str, str]) -> bool | None:
        """Return whether an agent or skill with this name exists.

        The sources are the session, the agent's own list, and earlier sessions.
        """
        attempts = self.state.attempts
        if name in attempts.names:
            return attempts.names[name]
        # Unlike the list of skills, the list of agents is complete: an error message prints all of them.
        if name[0] in ("Task", "Agent") and (name[1] in _BUILT_IN_AGENTS or attempts.agents is not None):
            return name[1] in _BUILT_IN_AGENTS | (attempts.agents or frozenset())
        return self._project.has_name(name, self.paths.relative_files()) if self._project else None

    def is_built_in_command(self, name: str) -> bool:
        """Return whether this is a built-in command of the agent, and the project has no such skill or command."""
        definitions = (f".claude/skills/{name}/SKILL.md", f".claude/commands/{name}.md")
        return name in _BUILT_IN_COMMANDS and not (self._checkout and self._checkout.files.intersection(definitions))

    def is_relative_to_root(self, word: str, cwd: str | None) -> bool:
        """Return whether a path is relative to the project's root although the shell is in a subfolder.

        `cat src/a.py` in /repo/src fails if only /repo/src/a.py exists.
        """
        root = self.paths.root
        if root is None or cwd is None or not cwd.startswith(f"{root}/") or not _RELATIVE_PATH.fullmatch(word):
            return False
        from_root, from_here = self.paths.absolute(word, root), self.paths.absolute(word, cwd)
        if not self.paths.status(from_root).exists or self.paths.status(from_here).exists:
            return False
        parent = from_here.rpartition("/")[0]
        return parent == cwd or not self.paths.status(parent).exists

    def text(self, path: str) -> tuple[FileText | None, str]:
        """Return what is known about a file, and the source of this knowledge.

        The source is a suffix for the rule name, which is "" for the session. If the session knows only part of a file,
        the other lines come from a checkout or an earlier session that agrees with the known lines.
        """
        file_text = self.texts.get(path)
        if file_text is None or file_text.is_whole or file_text.doubt == 2:
            return file_text, ""
        for source, whole in self._whole_texts(path):
            rebuilt = _apply_edits(whole, self.texts.edits(path))
            if rebuilt is not None and file_text.is_part_of(rebuilt):
                completed = FileText()
                completed.write(rebuilt)
                completed.doubt, completed.may_be_reworked = file_text.doubt, file_text.may_be_reworked
                return completed, source
        return file_text, ""

    def is_in_no_commit(self, path: str, text: str, *, but_for_blanks: bool = True) -> bool:
        """Return whether the file has been committed, but no version of it in any commit contains this text."""
        relative = self.paths.relative(path)
        if relative is None or self._checkout is None or not self._is_checkout_of_project(relative, self._checkout):
            return False
        return self._checkout.has_ever_held(relative, text, but_for_blanks=but_for_blanks) is False

    def was_probably_not_read(self, path: str, text: str) -> bool:
        """Return whether a session that continues after a summary has probably not read this file before the summary.

        That is so if the earlier part is known and did not read the file, or if the text is the same on the default
        branch: a session mostly reads the files that it changes.
        """
        relative = self.paths.relative(path)
        if not self.texts.is_continued or self.texts.was_mentioned(path):
            return False
        before = self._project.read_before if self._project and self.texts.starts_with_summary else None
        if before is not None and normal_path(path, self.texts.cwd) not in before:
            return True
        if relative is None or self._checkout is None:
            return False
        is_same = text in (self._checkout.text(relative) or "") and self._checkout.is_trunks(relative, text)
        return is_same and self._is_checkout_of_project(relative, self._checkout)

    def _whole_texts(self, path: str) -> list[tuple[str, str]]:
        relative = self.paths.relative(path)
        if relative is None:
            return []
        checkout = self._checkout.text(relative) if self._checkout else None
        project = self._project.text(relative, self.paths.relative_files()) if self._project else None
        return [
            (source, text) for source, text in (("_in_checkout", checkout), ("_in_earlier_session", project)) if text
        ]

    def is_too_large(self, path: str) -> bool:
        """Return whether a file is too large to be shown in one call, judging by any session or the checkout."""
        if path in self.paths.too_large:
            return True
        relative = self.paths.relative(path)
        if relative is None or self.texts.was_read_in_full(path):  # shown in one call, so it is not too large
            return False
        was_refused = self._project is not None and self._project.is_too_large(relative, self.paths.relative_files())
        return was_refused or self._is_large_in_checkout(relative)

    def unreadable_change(self, path: str) -> ChangeCertainty:
        """Return how a command has changed a file since it was read, if the file is too large to be read again.

        Claude Code rereads a changed file automatically. If it cannot, the file counts as unread.
        """
        relative = self.paths.relative(path)
        change = "" if relative is None else self.texts.change_by_command(path)
        if relative is None or not change:
            return ""
        return change if path in self.paths.too_large or self._is_large_in_checkout(relative) else ""

    def _is_large_in_checkout(self, relative: str) -> bool:
        text = self._checkout.text(relative) if self._checkout is not None else None
        if text is None or self._checkout is None or len(text) <= _MAX_PIECES:
            return False
        min_pieces = max(_MAX_PIECES + 1, _MIN_PIECES_PER_LINE * text.count("\n"))
        return self._is_checkout_of_project(relative, self._checkout) and len(_PIECE.findall(text)) >= min_pieces


def _is_normally_committed(relative: str, files: Collection[str]) -> bool:
    """Return whether a file at this path is likely to be committed to the repository.

    In a folder, it is unless part of the folder's path is hidden. At the root, it is if a committed file has the same
    name, ignoring extensions: any other file may be a private note.
    """
    folder, _, name = relative.rpartition("/")
    if folder:
        return not any(part.startswith(".") for part in folder.split("/"))
    stem = name.rpartition(".")[0] or name
    return any(file.rpartition(".")[0] == stem for file in files)


def _may_be_other_file(relative: str, why: str, files: Collection[str]) -> bool:
    """Return whether a mention of a path may refer to another file, since people omit the beginning of paths."""
    if why not in ("its_end_named", "named") or "/" not in relative:
        return False
    end = "/" + (relative if why == "named" else "/".join(relative.split("/")[-2:]))
    return any(f"/{path}".endswith(end) for path in files if path != relative)


def _apply_edits(text: str, edits: Sequence[Replace]) -> str | None:
    """Return the text after applying edits that succeeded in the session.

    Return None if one of them does not apply, since the text then cannot be the right one.
    """
    for edit in edits:
        count = text.count(edit.old) if edit.old else 0
        if not count or (count > 1 and not edit.everywhere):
            return None
        text = text.replace(edit.old, edit.new)
    return text


class _Parameters(NamedTuple):
    """The parameters of a tool."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()


# The documented parameters of Claude Code's tools, since logs contain no schemas. Only tools that reject unknown
# parameters are listed.
_TOOL_PARAMETERS = {
    "Read": _Parameters(word_set("file_path"), word_set("offset limit pages")),
    "Edit": _Parameters(word_set("file_path old_string new_string"), word_set("replace_all")),
    "Write": _Parameters(word_set("file_path content")),
    "Glob": _Parameters(word_set("pattern"), word_set("path")),
    "Grep": _Parameters(
        word_set("pattern"),
        word_set("path glob type output_mode -A -B -C -n -i -o head_limit offset multiline context"),
    ),
    "Bash": _Parameters(
        word_set("command"),
        word_set("description timeout run_in_background dangerouslyDisableSandbox sandbox _simulatedSedEdit"),
    ),
}
_TOOLS_REQUIRING_READ = word_set("Edit MultiEdit Write NotebookEdit")
"""The tools that refuse a file that was not read first. Other agents' editors accept any file."""
_PLAN_FOLDER = "/.claude/plans/"
"""The folder where Claude Code stores plans. A session that carries out a plan has the same plan file."""
_BUILT_IN_AGENTS = word_set("general-purpose Explore Plan Bash statusline-setup claude-code-guide output-style-setup")
# The built-in commands of Claude Code. Its Skill tool refuses these names, unless a skill with that name exists.
_BUILT_IN_COMMANDS = word_set(
    "add-dir agents clear compact config context cost doctor exit export help hooks ide login logout mcp memory model"
    " output-style permissions plugin resume rewind status statusline terminal-setup usage vim"
)
_NEVER_SKILLS = word_set("add-dir clear compact exit logout rewind terminal-setup")
"""The built-in commands that are never skills. The other names may belong to skills in a home folder or a plug-in."""


def _schema_violation(tool: str, arguments: frozenset[str]) -> str | None:
    """Return which parameters are missing or unknown, or None if the call fits the schema or no schema is known."""
    parameters = _TOOL_PARAMETERS.get(tool)
    if parameters is None:
        return None
    missing, unexpected = parameters.required - arguments, arguments - parameters.required - parameters.optional
    words = [f"{name} is missing" for name in sorted(missing)] + [f"{name} is unknown" for name in sorted(unexpected)]
    return "; ".join(words)[:200] or None
