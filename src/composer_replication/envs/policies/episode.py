"""One task played by one policy: the turns, the reward, and what was scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer_replication.envs.policies.flawed import REPEAT, Policy
from composer_replication.envs.policies.situation import (
    Move,
    PlayedTurn,
    Situation,
    is_named,
)
from composer_replication.envs.workspace.sandbox import (
    TestReport,
    TestRunner,
    Wall,
    shared_runner,
)
from composer_replication.envs.workspace.task import Task
from composer_replication.envs.workspace.workspace import Reward, Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """A mistake that was made: at which turn, of which kind, and the turn that put it right, if one did."""

    turn: int
    mistake: str
    kind: str
    corrected_at: int | None


@dataclass(frozen=True, kw_only=True)
class Episode:
    task: Task
    policy: str
    seed: int
    turns: tuple[PlayedTurn, ...]
    reward: Reward

    @property
    def script(self) -> tuple[Scripted, ...]:
        """The mistakes in order."""
        put_right = {turn: number for number, played_turn in enumerate(self.turns) for turn in played_turn.corrects}
        return tuple(
            Scripted(
                turn=number,
                mistake=played_turn.mistake,
                kind=played_turn.outcome.kind or "",
                corrected_at=put_right.get(number),
            )
            for number, played_turn in enumerate(self.turns)
            if played_turn.mistake is not None
        )

    @property
    def opportunities(self) -> Mapping[str, tuple[int, ...]]:
        """At which turns each mistake could have been made, made or not."""
        turns: dict[str, tuple[int, ...]] = {}
        for number, turn in enumerate(self.turns):
            for name in turn.could:
                turns[name] = (*turns.get(name, ()), number)
        return turns


class RememberingRunner(TestRunner):
    """Runs the same tests of the same files once: test runs are pure, and most episodes of a task pass by the same."""

    __test__ = False

    def __init__(self, runner: TestRunner | None = None, *, max_kept: int = 20_000) -> None:
        super().__init__()
        self._runner, self._max_kept = runner or shared_runner(), max_kept
        self._known: dict[object, Any] = {}

    @property
    def kind(self) -> Wall:
        return self._runner.kind

    def close(self) -> None:
        self._runner.close()

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:
        return self._once(("tests", *files.items(), *paths), lambda: self._runner.run_tests(files, paths))

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:
        return self._once(("values", *files.items(), *expressions), lambda: self._runner.values(files, expressions))

    def _once(self, key: object, run: Callable[[], Any]) -> Any:
        if key not in self._known:
            if len(self._known) >= self._max_kept:
                self._known.clear()
            answer = run()
            if answer == [] or (isinstance(answer, TestReport) and not answer.ended):
                return answer  # the process was stopped or lost, which says nothing about the next run
            self._known[key] = answer
        return self._known[key]


def play(
    task: Task,
    policy: Policy,
    seed: int = 0,
    *,
    force: Mapping[int, str] | None = None,
    runner: TestRunner | None = None,
    max_calls: int = 40,
) -> Episode:
    """The episode of a policy: the same for the same task, policy and seed.

    `force` maps turns (from 0) to mistakes that are made there, whatever the rates; a turn without an opportunity for
    it is an error. `Episode.opportunities` says which turns have one: up to the first forced mistake, those of the same
    episode without `force`.
    """
    workspace = Workspace(task, runner=runner, max_calls=max_calls)
    situation = Situation(workspace)
    player = policy.start(f"{task.difficulty}/{task.seed}/{seed}", force or {})
    while not workspace.finished:
        choice = player.choose(situation)
        outcome = workspace.call(choice.move.tool, choice.move.arguments)
        situation.take(
            PlayedTurn(
                move=choice.move,
                outcome=outcome,
                mistake=choice.mistake,
                corrects=choice.corrects,
                could=choice.could,
            )
        )
    return Episode(task=task, policy=policy.name, seed=seed, turns=tuple(situation.turns), reward=workspace.reward())


def retrace(task: Task, calls: Iterable[tuple[str, Any]], *, runner: TestRunner | None = None) -> Situation:
    """The situation after these calls of anybody: tool names with their arguments, run in a fresh workspace."""
    workspace = Workspace(task, runner=runner)
    situation = Situation(workspace)
    for tool, arguments in calls:
        call_arguments = arguments if isinstance(arguments, Mapping) else {}
        move = Move(text="", tool=tool, arguments=call_arguments)
        situation.take(PlayedTurn(move=move, outcome=workspace.call(tool, arguments)))
    return situation


# What sites and pairs have to find in an episode: for every mistake its kind, and what should have been done.
#
# The rule is that of self-corrections: the corrected call where what it names had been shown by then, else the look
# that came first and names what was missing, else nothing. It stands in `_choice`, told by what was scripted alone.

How = Literal["corrected", "look_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A failure of the agent's own. `chosen` is None where nobody can say what should have been done."""

    turn: int
    kind: str
    repeats: int
    how: How | None
    chosen: Move | None


def expected_findings(episode: Episode) -> list[Finding]:
    """In the order of the turns. All of them are the model's, and may be taught."""
    findings: list[Finding] = []
    first: Scripted | None = None  # of which a repetition is one
    for scripted in episode.script:
        first = first if scripted.mistake == REPEAT and first is not None else scripted
        how, chosen = _choice(episode, scripted, first.mistake) or (None, None)
        findings.append(Finding(turn=scripted.turn, kind=scripted.kind, repeats=0, how=how, chosen=chosen))
    return [replace(finding, repeats=_num_before(episode, finding)) for finding in findings]


def _num_before(episode: Episode, finding: Finding) -> int:
    """How often the very same call had failed in the same way since it last worked, if ever."""
    number = 0
    for turn in episode.turns[: finding.turn]:
        move, failed = turn.move, episode.turns[finding.turn].move
        if (move.tool, move.arguments) == (failed.tool, failed.arguments):
            number = number + 1 if turn.outcome.kind == finding.kind else 0
    return number


def _choice(episode: Episode, scripted: Scripted, mistake: str) -> tuple[How, Move] | None:
    failed = episode.turns[scripted.turn].move
    right = None if scripted.corrected_at is None else episode.turns[scripted.corrected_at].move
    if mistake == "edit_unread":  # what the harness asks for whatever comes next; as the agent reads files, if it has
        has_read = any(_is_read(episode, number) for number in range(scripted.turn))
        look = right or Move(text="", tool="Read", arguments={"file_path": failed.arguments["file_path"]})
        return ("look_first", look) if right is not None or has_read else None
    if right is None or mistake in ("made_before", "unknown_tool"):
        return None  # nothing was put right; no call was needed; and another tool is no correction of a name
    if mistake == "read_folder":
        return "look_first", right
    if mistake == "guessed_path" and right.tool == "Glob":
        return "look_first", right
    if mistake in ("guessed_path", "near_name", "wrong_folder"):
        if _knew(episode, right.path, scripted.turn):
            return "corrected", right
        # Known to be missing it is not searched for; nor by another name, nor by an agent that had not searched yet.
        has_searched = any(
            turn.move.tool == "Glob" and not turn.outcome.failed for turn in episode.turns[: scripted.turn]
        )
        pattern = f"**/{right.path.rpartition('/')[2]}"
        search = Move(text="", tool="Glob", arguments={"pattern": pattern})
        return ("look_first", search) if mistake == scripted.mistake == "wrong_folder" and has_searched else None
    if not failed.arguments or (right.tool == "Write" and not _knew(episode, right.path, scripted.turn)):
        return None  # two calls without a word in common; a new file of which nothing was known
    return "corrected", right


def _knew(episode: Episode, path: str, turn: int) -> bool:
    """Whether the path had been named before the turn, or the file been read."""
    before = episode.turns[:turn]
    shown_texts = [
        episode.task.prompt,
        *(played_turn.outcome.text for played_turn in before if not played_turn.outcome.failed),
    ]
    was_read = any(_is_read(episode, number) and before[number].move.path == path for number in range(turn))
    return was_read or is_named(path, shown_texts)


def _is_read(episode: Episode, number: int) -> bool:
    turn = episode.turns[number]
    return turn.move.tool == "Read" and not turn.outcome.failed
