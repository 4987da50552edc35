"""Play a task with a policy, and derive the error sites and pairs that must be found in the episode.

Mistakes are scripted, so the correct findings are known. `expected_findings` derives these findings from the script
alone, without the rules and heuristics of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer_replication.envs.policies.flawed import REPEAT, Policy
from composer_replication.envs.policies.situation import Move, PlayedTurn, Situation, is_mentioned
from composer_replication.envs.workspace.sandbox import Isolation, TestReport, TestRunner, shared_runner
from composer_replication.envs.workspace.task import Task
from composer_replication.envs.workspace.workspace import Reward, Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """A mistake in an episode: its turn, its name, the kind of failure, and the turn that corrected it, if any."""

    turn: int
    mistake: str
    kind: str
    corrected_at: int | None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A played task: its turns, and the reward for the final files."""

    task: Task
    policy: str
    seed: int
    turns: tuple[PlayedTurn, ...]
    reward: Reward

    @property
    def script(self) -> tuple[Scripted, ...]:
        """The mistakes made in the episode, in the order of their turns."""
        corrections = {turn: number for number, played_turn in enumerate(self.turns) for turn in played_turn.corrects}
        return tuple(
            Scripted(
                turn=number,
                mistake=played_turn.mistake,
                kind=played_turn.outcome.kind or "",
                corrected_at=corrections.get(number),
            )
            for number, played_turn in enumerate(self.turns)
            if played_turn.mistake is not None
        )

    @property
    def opportunities(self) -> Mapping[str, tuple[int, ...]]:
        """For each mistake, the turns at which it was or could have been made."""
        turns: dict[str, tuple[int, ...]] = {}
        for number, turn in enumerate(self.turns):
            for name in turn.could:
                turns[name] = (*turns.get(name, ()), number)
        return turns


class RememberingRunner(TestRunner):
    """A test runner that caches results, because episodes on the same task often test the same files."""

    __test__ = False

    def __init__(self, runner: TestRunner | None = None, *, max_kept: int = 20_000) -> None:
        super().__init__()
        self._runner, self._max_results = runner or shared_runner(), max_kept
        self._results: dict[object, Any] = {}

    @property
    def kind(self) -> Isolation:
        return self._runner.kind

    def close(self) -> None:
        self._runner.close()

    def run_tests(self, files: Mapping[str, str], paths: Sequence[str]) -> TestReport:
        return self._cached(("tests", *files.items(), *paths), lambda: self._runner.run_tests(files, paths))

    def values(self, files: Mapping[str, str], expressions: Sequence[tuple[str, str]]) -> list[str]:
        return self._cached(("values", *files.items(), *expressions), lambda: self._runner.values(files, expressions))

    def _cached(self, key: object, run: Callable[[], Any]) -> Any:
        if key not in self._results:
            if len(self._results) >= self._max_results:
                self._results.clear()
            answer = run()
            # A missing answer is not cached: the process was stopped or lost, and another run may succeed.
            if answer == [] or (isinstance(answer, TestReport) and not answer.ended):
                return answer
            self._results[key] = answer
        return self._results[key]


def play(
    task: Task,
    policy: Policy,
    seed: int = 0,
    *,
    force: Mapping[int, str] | None = None,
    runner: TestRunner | None = None,
    max_calls: int = 40,
) -> Episode:
    """Play a task and return the episode. The same task, policy and seed always give the same episode.

    Args:
        force: Mistakes to make at certain turns (from 0), whatever the policy's rates. Raises InputError for a turn
            without an opportunity. Up to the first forced mistake, the opportunities are those of the same episode
            without `force` (`Episode.opportunities`).
        max_calls: The number of calls after which the episode ends.
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
    """Make these calls (tool names with arguments) in a fresh workspace, and return the resulting situation."""
    workspace = Workspace(task, runner=runner)
    situation = Situation(workspace)
    for tool, arguments in calls:
        # A `Move` needs a mapping. The workspace gets malformed arguments unchanged, because it answers them.
        call_arguments = arguments if isinstance(arguments, Mapping) else {}
        move = Move(text="", tool=tool, arguments=call_arguments)
        situation.take(PlayedTurn(move=move, outcome=workspace.call(tool, arguments)))
    return situation


How = Literal["corrected", "look_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A failed call that is the agent's own error. `chosen` is a better call, or None if the episode shows none.

    `repeats` is the number of earlier failures of the same call, and `how` says how `chosen` was found.
    """

    turn: int
    kind: str
    repeats: int
    how: How | None
    chosen: Move | None


def expected_findings(episode: Episode) -> list[Finding]:
    """Return the errors that must be found in an episode: one per scripted mistake, ordered by turn."""
    findings: list[Finding] = []
    first: Scripted | None = None  # the mistake that a repetition repeats
    for scripted in episode.script:
        first = first if scripted.mistake == REPEAT and first is not None else scripted
        how, chosen = _better_call(episode, scripted, first.mistake) or (None, None)
        findings.append(Finding(turn=scripted.turn, kind=scripted.kind, repeats=0, how=how, chosen=chosen))
    return [replace(finding, repeats=_num_repeats(episode, finding)) for finding in findings]


def _num_repeats(episode: Episode, finding: Finding) -> int:
    """Return how often the same call has failed with the same kind of failure since it last succeeded."""
    number = 0
    for turn in episode.turns[: finding.turn]:
        move, failed = turn.move, episode.turns[finding.turn].move
        # Only the same call counts. If it succeeded in between, counting starts again.
        if (move.tool, move.arguments) == (failed.tool, failed.arguments):
            number = number + 1 if turn.outcome.kind == finding.kind else 0
    return number


def _better_call(episode: Episode, scripted: Scripted, mistake: str) -> tuple[How, Move] | None:
    """Return the call that should have been made instead, or None if the episode does not show one.

    It is the corrected call if the path in this call had been shown before the mistake. Otherwise it is a call that
    would have shown the path, if the episode has such a call.
    """
    failed = episode.turns[scripted.turn].move
    right = None if scripted.corrected_at is None else episode.turns[scripted.corrected_at].move
    if mistake == "edit_unread":
        # The error message asks for a read, so an agent that has read files before knows how, even if it gave up.
        has_read = any(_is_read(episode, number) for number in range(scripted.turn))
        look = right or Move(text="", tool="Read", arguments={"file_path": failed.arguments["file_path"]})
        return ("look_first", look) if right is not None or has_read else None
    if right is None or mistake in ("made_before", "unknown_tool"):
        # Nothing was corrected, no call was needed, or another tool was used instead of the unknown one.
        return None
    if mistake == "read_folder":
        return "look_first", right
    if mistake == "guessed_path" and right.tool == "Glob":
        return "look_first", right
    # A wrong path: the corrected call is better if the path was known, and otherwise perhaps a search by name.
    if mistake in ("guessed_path", "near_name", "wrong_folder"):
        if _was_shown(episode, right.path, scripted.turn):
            return "corrected", right
        # A search is better only if the file name was right, the failure is new, and the agent uses searches.
        has_searched = any(
            turn.move.tool == "Glob" and not turn.outcome.failed for turn in episode.turns[: scripted.turn]
        )
        pattern = f"**/{right.path.rpartition('/')[2]}"
        search = Move(text="", tool="Glob", arguments={"pattern": pattern})
        return ("look_first", search) if mistake == scripted.mistake == "wrong_folder" and has_searched else None
    if not failed.arguments or (right.tool == "Write" and not _was_shown(episode, right.path, scripted.turn)):
        return None  # the calls have no common argument, or the right call writes a file that was never shown
    return "corrected", right


def _was_shown(episode: Episode, path: str, turn: int) -> bool:
    """Return whether the path was mentioned, or the file was read, before the turn."""
    before = episode.turns[:turn]
    shown_texts = [
        episode.task.prompt,
        *(played_turn.outcome.text for played_turn in before if not played_turn.outcome.failed),
    ]
    was_read = any(_is_read(episode, number) and before[number].move.path == path for number in range(turn))
    return was_read or is_mentioned(path, shown_texts)


def _is_read(episode: Episode, number: int) -> bool:
    turn = episode.turns[number]
    return turn.move.tool == "Read" and not turn.outcome.failed
