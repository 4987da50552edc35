"""Track what an agent knows from the transcript so far: the files it has read or edited, and the next edit to make."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.workspace.files import below_root
from composer_replication.envs.workspace.task import Edit, Task
from composer_replication.envs.workspace.workspace import Outcome, Workspace

LOOK_TOOLS = frozenset({"LS", "Glob"})
_EDIT_TOOLS = frozenset({"Edit", "Write"})
# One line of a result of RunTests: "reformatted shop/prices.py" -> "shop/prices.py"
_REFORMATTED = re.compile(r"^reformatted (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An agent's turn: a short text and one call."""

    text: str
    tool: str
    arguments: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The path below the root of the file that the call names, or an empty string if it names no file."""
        file_path = self.arguments.get("file_path")
        return (below_root(file_path) or "") if isinstance(file_path, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """A move with its outcome and its role in the script.

    `mistake` names the mistake that the move makes, if any. `corrects` lists the turns whose mistakes it corrects, and
    `could` the mistakes that could have been made instead of it.
    """

    move: Move
    outcome: Outcome
    mistake: str | None = None
    corrects: tuple[int, ...] = ()
    could: tuple[str, ...] = ()


class Situation:
    """The state of an episode after the turns so far, limited to what a scripted agent may use."""

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
        """The current files, whether or not the agent has read them."""
        return self._workspace.files

    @property
    def is_over(self) -> bool:
        return self._workspace.finished

    def take(self, turn: PlayedTurn) -> None:
        """Add a turn to the transcript."""
        self.turns.append(turn)
        # The results of failed calls may contain wrong paths, so they do not count as shown.
        if turn.outcome.failed:
            return
        move = turn.move
        self._shown.append(turn.outcome.text)
        self.has_looked |= move.tool in LOOK_TOOLS
        # To the harness, a file that was written counts as read.
        if move.path and (move.tool == "Read" or move.tool in _EDIT_TOOLS):
            self.read.add(move.path)
        if move.tool == "RunTests":
            self.has_run_tests = self.is_tested = True
            # The workspace refuses an edit of a file that changed after it was read.
            self.read.difference_update(_REFORMATTED.findall(turn.outcome.text))
        elif move.tool in _EDIT_TOOLS:
            self.is_tested = False

    def has_shown(self, path: str) -> bool:
        """Return whether the file was read, or its path below the root was mentioned in the prompt or a result."""
        return path in self.read or is_mentioned(path, self._shown)

    def is_unheard_of(self, path: str) -> bool:
        """Return whether the path belongs to no file and occurs neither in the prompt nor in a result."""
        return path not in self.files and not any(path in text for text in self._shown)

    def next_edit(self) -> Edit | None:
        """Return the first edit of the solution that has not been made yet, or None if the task is solved.

        A file that was changed in some other way is rewritten as a whole: `old` is then empty, and `new` is the whole
        text.
        """
        for path, stages in self._stages.items():
            text = self.files.get(path)
            if text == stages[-1].text:
                continue
            # A file at a stage of the solution needs only the later edits.
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


def is_mentioned(path: str, texts: Sequence[str]) -> bool:
    """Return whether one of the texts mentions a path below the root.

    A path without a folder counts only in the first text, which is the prompt. In a result, such a name may refer to a
    file in any folder.
    """
    # "shop/prices.py" -> "In shop/prices.py, TAX must be 7"; not "my-shop/prices.py" or "shop/prices.pyc"
    pattern = re.compile(rf"(?<![\w-]){re.escape(path)}(?![\w-])")
    return any(pattern.search(text) for text in (texts if "/" in path else texts[:1]))


@dataclass(frozen=True, slots=True)
class _Stage:
    """The text of a file after some edits of the solution, and the next edit, which is None after the last edit."""

    text: str | None
    edit: Edit | None


def _stages(task: Task) -> dict[str, list[_Stage]]:
    """Return the stages of every file: first the files that the solution edits, in the order of its edits, then the
    others.
    """
    stages: dict[str, list[_Stage]] = {}
    for path in dict.fromkeys([*(edit.path for edit in task.solution), *task.files]):
        text = task.files.get(path)
        stages[path] = []
        for edit in (edit for edit in task.solution if edit.path == path):
            stages[path].append(_Stage(text, edit))
            text = edit.new if not edit.old or text is None else text.replace(edit.old, edit.new, 1)
        stages[path].append(_Stage(text, None))
    return stages
