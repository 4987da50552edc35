"""The expert: looks, reads, changes, runs the tests, finishes. It goes on from any transcript, and solves the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from composer_replication.envs.policies.situation import Move, Situation
from composer_replication.envs.workspace.files import ROOT, absolute
from composer_replication.envs.workspace.task import Edit

_LOOK = ("I look at what is there.", "First I list the files.")
READ = ("I read {name}.", "I read {name} before I change it.")
_READ_TEST = ("I read the test.", "I read {name} to see what is expected.")
EDIT = ("I change {name}.", "Now I change {name}.")
_TEST_FIRST = ("I run the tests to see what fails.",)
_TEST = ("I run the tests.", "Now I run the tests.")
_FINISH = ("It is done.", "The tests pass.")


@dataclass(frozen=True, slots=True)
class Style:
    """How an agent works where it does not matter: with which tool it looks, and which words it chooses."""

    look: str = "Glob"
    words: int = 0

    @staticmethod
    def of(seed: int | str) -> Style:
        random = Random(f"style {seed}")  # noqa: S311 (an episode, not a secret)
        return Style(random.choice(("Glob", "LS")), random.randrange(1000))

    def say(self, sentences: Sequence[str], number: int, **names: str) -> str:
        return sentences[(self.words + number) % len(sentences)].format(**names)


def expert_move(situation: Situation, style: Style) -> Move:
    """What the expert does next. All it knows is the transcript, and the solution."""
    number, edit = len(situation.turns), situation.next_edit()

    def move(sentences: Sequence[str], tool: str, path: str = "", **arguments: str) -> Move:
        text = style.say(sentences, number, name=path.rpartition("/")[2])
        call_arguments = {"file_path": absolute(path), **arguments} if path else arguments
        return Move(text=text, tool=tool, arguments=call_arguments)

    if edit is not None and not situation.has_looked and edit.path not in situation.read:
        return look(situation, style)
    if edit is not None and situation.task.difficulty == "hard":
        if not situation.has_run_tests:
            return move(_TEST_FIRST, "RunTests")
        test = _test_of(situation, edit)
        if test is not None and test not in situation.read:
            return move(_READ_TEST, "Read", test)
    if edit is not None:
        if edit.path in situation.files and edit.path not in situation.read:
            return move(READ, "Read", edit.path)
        if not edit.old:
            return move(EDIT, "Write", edit.path, content=edit.new)
        return move(EDIT, "Edit", edit.path, old_string=edit.old, new_string=edit.new)
    if not situation.is_tested:
        return move(_TEST, "RunTests")
    return move(_FINISH, "Finish")


def look(situation: Situation, style: Style) -> Move:
    """The look at what is there."""
    text = style.say(_LOOK, len(situation.turns))
    arguments = {"path": ROOT} if style.look == "LS" else {"pattern": "**/*", "path": ROOT}
    return Move(text=text, tool=style.look, arguments=arguments)


def _test_of(situation: Situation, edit: Edit) -> str | None:
    """The test that is about the file to be changed, or any."""
    tests = sorted(path for path in situation.files if path.rpartition("/")[2].startswith("test_"))
    stem = edit.path.rpartition("/")[2].removesuffix(".py")
    return next((path for path in tests if stem in path), tests[0] if tests else None)
