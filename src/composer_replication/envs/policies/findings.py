"""What sites and pairs have to find in an episode: for every mistake its kind, and what should have been done.

The rule is that of self-corrections: the corrected call where what it names had been shown by then, else the look that
came first and names what was missing, else nothing. It stands in `_choice`, told by what was scripted alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from composer_replication.envs.policies.episode import Episode, Scripted
from composer_replication.envs.policies.mistakes import REPEAT
from composer_replication.envs.policies.situation import Move, is_named

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
