"""One task played by one policy: the turns, the reward, and what was scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.envs.policies.flawed import Policy
from composer_replication.envs.policies.situation import Move, PlayedTurn, Situation
from composer_replication.envs.workspace.sandbox import TestReport, TestRunner, Wall, shared_runner
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
