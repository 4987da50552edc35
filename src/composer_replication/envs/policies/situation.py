"""What a transcript says so far: what was read, what was changed, what was shown; and the moves that come next."""

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
_REFORMATTED = re.compile(r"^reformatted (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A turn as an agent makes it: a few words, then one call."""

    text: str
    tool: str
    arguments: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The file that the call names, below the root; empty where it names none."""
        file_path = self.arguments.get("file_path")
        return (below_root(file_path) or "") if isinstance(file_path, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """A move and what came back, with what was scripted: the mistake it was, the turns it puts right.

    `could` are the mistakes that could have been made here: the turn was an opportunity of each of them.
    """

    move: Move
    outcome: Outcome
    mistake: str | None = None
    corrects: tuple[int, ...] = ()
    could: tuple[str, ...] = ()


class Situation:
    """Grows with every turn. Files are as the workspace holds them: what the agent would see if it read them now."""

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
        """The next turn of the transcript."""
        self.turns.append(turn)
        if turn.outcome.failed:
            return
        move = turn.move
        self._shown.append(turn.outcome.text)
        self.has_looked |= move.tool in LOOKS
        if move.path and (move.tool == "Read" or move.tool in CHANGES):
            self.read.add(move.path)
        if move.tool == "RunTests":
            self.has_run_tests = self.is_tested = True
            self.read.difference_update(_REFORMATTED.findall(turn.outcome.text))  # as it was read, it is no more
        elif move.tool in CHANGES:
            self.is_tested = False

    def has_shown(self, path: str) -> bool:
        """Whether the task, or what came back, has named this path below the root, or the file was read."""
        return path in self.read or is_named(path, self._shown)

    def is_unheard_of(self, path: str) -> bool:
        """Whether no such file is there, and no text holds anything like its path."""
        return path not in self.files and not any(path in text for text in self._shown)

    def next_edit(self) -> Edit | None:
        """What is still to be changed: the first edit of the solution that its file does not have yet.

        Of a file that somebody changed otherwise it is all of it: `old` is empty then, and `new` the whole text.
        """
        for path, stages in self._stages.items():
            text = self.files.get(path)
            if text == stages[-1].text:
                continue
            current_stage = next((stage for stage in stages if stage.text == text), None)
            if current_stage is None or current_stage.edit is None or not current_stage.edit.old:
                return Edit(path=path, old="", new=stages[-1].text or "")
            return current_stage.edit
        return None

    def done_edits(self) -> Sequence[Edit]:
        """Edits of the solution that the agent has made."""
        moves = [turn.move for turn in self.turns if turn.move.tool == "Edit" and not turn.outcome.failed]
        done = {(move.path, move.arguments["old_string"], move.arguments["new_string"]) for move in moves}
        return [edit for edit in self.task.solution if (edit.path, edit.old, edit.new) in done]


def is_named(path: str, texts: Sequence[str]) -> bool:
    """Whether one of the texts names a path below the root; a bare name may be any folder's, but in the first text."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(path)}(?![\w-])")
    return any(pattern.search(text) for text in (texts if "/" in path else texts[:1]))


@dataclass(frozen=True, slots=True)
class _Stage:
    """A file's text on the way to the solution, and the edit that comes next."""

    text: str | None
    edit: Edit | None


def _stages(task: Task) -> dict[str, list[_Stage]]:
    """Every file: those of the solution in its order, and then those that are to stay as they are."""
    stages: dict[str, list[_Stage]] = {}
    for path in dict.fromkeys([*(edit.path for edit in task.solution), *task.files]):
        text = task.files.get(path)
        stages[path] = []
        for edit in (edit for edit in task.solution if edit.path == path):
            stages[path].append(_Stage(text, edit))
            text = edit.new if not edit.old or text is None else text.replace(edit.old, edit.new, 1)
        stages[path].append(_Stage(text, None))
    return stages
