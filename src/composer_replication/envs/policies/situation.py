"""Track what a transcript has shown so far: which files were read or edited, and which edit comes next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.workspace.files import Outcome, below_root
from composer_replication.envs.workspace.task import Edit, Task
from composer_replication.envs.workspace.workspace import Workspace

LOOKS = frozenset({"LS", "Glob"})
CHANGES = frozenset({"Edit", "Write"})
# One line of a result of RunTests: "reformatted shop/prices.py" -> "shop/prices.py"
_REFORMATTED = re.compile(r"^reformatted (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What an agent does in one turn: a short text, then one call."""

    text: str
    tool: str
    arguments: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The path below the root of the file that the call names, or "" if it names none."""
        file_path = self.arguments.get("file_path")
        return (below_root(file_path) or "") if isinstance(file_path, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """A move with its outcome and with what the script says about it.

    `mistake` is the mistake that the move makes, `corrects` the turns whose mistakes it corrects, and `could` the
    mistakes that could have been made here: the turn was an opportunity for each of them.
    """

    move: Move
    outcome: Outcome
    mistake: str | None = None
    corrects: tuple[int, ...] = ()
    could: tuple[str, ...] = ()


class Situation:
    """What is known after the turns so far.

    `files` are the workspace's current files, whether or not the agent has read them.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.task: Task = workspace.task
        self.turns: list[PlayedTurn] = []
        self.read: set[str] = set()
        self.has_looked = self.has_run_tests = self.is_tested = False
        self._workspace = workspace
        self._shown = [self.task.prompt]
        self._stages = _stages(self.task)

    @property
    def files(self) -> Mapping[str, str]:
        return self._workspace.files

    @property
    def is_over(self) -> bool:
        return self._workspace.finished

    def take(self, turn: PlayedTurn) -> None:
        """Add the next turn of the transcript."""
        self.turns.append(turn)
        # Results of failed calls, such as an error message with a wrong path, do not count as shown.
        if turn.outcome.failed:
            return
        move = turn.move
        self._shown.append(turn.outcome.text)
        self.has_looked |= move.tool in LOOKS
        # The harness counts a file that was written as read.
        if move.path and (move.tool == "Read" or move.tool in CHANGES):
            self.read.add(move.path)
        if move.tool == "RunTests":
            self.has_run_tests = self.is_tested = True
            # The workspace refuses an edit of a file that changed after it was read.
            self.read.difference_update(_REFORMATTED.findall(turn.outcome.text))
        elif move.tool in CHANGES:
            self.is_tested = False

    def has_shown(self, path: str) -> bool:
        """Return whether the file was read, or the prompt or a result has named its path below the root."""
        return path in self.read or is_named(path, self._shown)

    def is_unheard_of(self, path: str) -> bool:
        """Return whether the file does not exist and no prompt or result contains the path."""
        return path not in self.files and not any(path in text for text in self._shown)

    def next_edit(self) -> Edit | None:
        """Return the first edit of the solution that has not been made yet, or None if the task is solved.

        A file that was changed in another way is rewritten: then `old` is empty and `new` is the whole text.
        """
        for path, stages in self._stages.items():
            text = self.files.get(path)
            if text == stages[-1].text:
                continue
            # A file at a stage of the solution only needs the edits after it.
            current_stage = next((stage for stage in stages if stage.text == text), None)
            if current_stage is None or current_stage.edit is None or not current_stage.edit.old:
                return Edit(path=path, old="", new=stages[-1].text or "")
            return current_stage.edit
        return None

    def done_edits(self) -> Sequence[Edit]:
        """Return the edits of the solution that the agent has made."""
        moves = [turn.move for turn in self.turns if turn.move.tool == "Edit" and not turn.outcome.failed]
        done = {(move.path, move.arguments["old_string"], move.arguments["new_string"]) for move in moves}
        return [edit for edit in self.task.solution if (edit.path, edit.old, edit.new) in done]


def is_named(path: str, texts: Sequence[str]) -> bool:
    """Return whether one of the texts names a path below the root.

    A path without a folder counts only in the first text, the prompt: in a result it may be a file of any folder.
    """
    # "shop/prices.py" -> "In shop/prices.py, TAX must be 7"; not "my-shop/prices.py" or "shop/prices.pyc"
    pattern = re.compile(rf"(?<![\w-]){re.escape(path)}(?![\w-])")
    return any(pattern.search(text) for text in (texts if "/" in path else texts[:1]))


@dataclass(frozen=True, slots=True)
class _Stage:
    """A file's text after some edits of the solution, and the next edit; None after the last one."""

    text: str | None
    edit: Edit | None


def _stages(task: Task) -> dict[str, list[_Stage]]:
    """Return the stages of every file: first the files of the solution in its order, then those that stay unchanged."""
    stages: dict[str, list[_Stage]] = {}
    for path in dict.fromkeys([*(edit.path for edit in task.solution), *task.files]):
        text = task.files.get(path)
        stages[path] = []
        for edit in (edit for edit in task.solution if edit.path == path):
            stages[path].append(_Stage(text, edit))
            text = edit.new if not edit.old or text is None else text.replace(edit.old, edit.new, 1)
        stages[path].append(_Stage(text, None))
    return stages
