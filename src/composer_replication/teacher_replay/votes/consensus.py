"""Votes of teachers over classes of equal actions, and when the votes still to come cannot change the pair.

The class with the most votes wins if it has the threshold; a tie at the top is no consensus. A teacher that failed has
no vote. The pair's chosen text is that of the winning class's first teacher in the order they are asked. So those asked
so far must be the first ones of that order: then a class that has won whatever the others say has a teacher among them,
and everyone not yet asked stands behind that teacher. The chosen text cannot change either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from composer_replication.actions.reply import parse_reply
from composer_replication.actions.write import text_of
from composer_replication.errors import InputError, explain
from composer_replication.types import Action, TeacherCallResult


class Voter(NamedTuple):
    """`action` is None where there is no vote; then `reason` says why: error, unreadable or empty."""

    action: Action | None
    reason: str = ""


def is_unsent(result: TeacherCallResult) -> bool:
    """Return whether a call was kept back (the cap, a stop, a secret in it), so that nobody was asked."""
    return result["error"] is not None and result.get("attempts") == 0


def voter_of(result: TeacherCallResult) -> Voter:
    """What a teacher did: by the structured message where there is one, else by its text."""
    if result["error"] is not None:
        return Voter(None, "error")
    message = cast("Mapping[str, Any]", result).get("message")
    try:
        action = parse_reply(message if isinstance(message, Mapping) else result["response_text"] or "")
    except InputError:
        return Voter(None, "unreadable")
    return Voter(action) if action.calls or action.text.strip() else Voter(None, "empty")


def reply_text(result: TeacherCallResult, action: Action) -> str:
    """A teacher's own words, with the calls that only the message holds written behind them."""
    text = result["response_text"] or ""
    if not action.calls or len(parse_reply(text).calls) == len(action.calls):
        return text or action.text
    return text_of(action)


Reason = Literal["consensus", "tie", "below_threshold", "no_votes"]


@dataclass(frozen=True, slots=True)
class VoteClass:
    """Teachers that did the same, in the order they were asked."""

    key: str
    teachers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Vote:
    """`classes` are ordered by votes, then by who was asked first; `winner` is one of them or None."""

    winner: VoteClass | None
    reason: Reason
    classes: tuple[VoteClass, ...]

    @property
    def num_votes(self) -> int:
        return sum(len(vote_class.teachers) for vote_class in self.classes)

    @property
    def num_agreeing_pairs(self) -> int:
        """Pairs of teachers that did the same, of num_votes * (num_votes - 1) / 2."""
        return sum(len(vote_class.teachers) * (len(vote_class.teachers) - 1) // 2 for vote_class in self.classes)


def count_votes(keys_by_teacher: Mapping[str, str | None], threshold: int = 2) -> Vote:
    """The vote of teachers in the order of the mapping, by the keys of their actions; None is a teacher that failed."""
    _check_threshold(threshold)
    teachers: dict[str, list[str]] = {}
    for teacher, key in keys_by_teacher.items():
        if key is not None:
            teachers.setdefault(key, []).append(teacher)
    ordered = sorted(teachers.items(), key=lambda entry: -len(entry[1]))
    classes = tuple(VoteClass(key, tuple(names)) for key, names in ordered)
    if not ordered:
        return Vote(None, "no_votes", ())
    top = len(ordered[0][1])
    if top < threshold:
        return Vote(None, "below_threshold", classes)
    if len(ordered) > 1 and len(ordered[1][1]) == top:
        return Vote(None, "tie", classes)
    return Vote(classes[0], "consensus", classes)


def can_still_change(
    votes: Iterable[str | None],
    student: str,
    threshold: int,
    num_remaining: int,
    *,
    count_matters: bool = False,
) -> bool:
    """Whether some way for the remaining teachers to vote or fail gives another pair than the votes so far.

    `votes` are the keys of the teachers asked so far (None: failed), `student` is the key of what the student did. Two
    pairs are the same if both are missing or both choose the same class; with `count_matters`, if as many agree.
    """
    _check_threshold(threshold)
    counts = Counter(key for key in votes if key is not None)
    ordered = counts.most_common(2)
    top = ordered[0][1] if ordered else 0
    second = ordered[1][1] if len(ordered) > 1 else 0
    if num_remaining <= 0:
        return False
    if top >= threshold and top > second and ordered[0][0] != student:
        # A pair stands. What may undo it is a rival that comes level; one nobody has voted for yet counts as well.
        return count_matters or second + num_remaining >= top
    # No pair stands. It takes a class other than the student's that reaches the threshold and leaves all others behind.
    new_class = num_remaining >= threshold and num_remaining > top
    return new_class or any(
        number + num_remaining >= threshold and number + num_remaining > _highest_but(key, counts)
        for key, number in counts.items()
        if key != student
    )


def _highest_but(key: str, counts: Counter[str]) -> int:
    return max((number for other_key, number in counts.items() if other_key != key), default=0)


def _check_threshold(threshold: int) -> None:
    if type(threshold) is not int or threshold < 1:
        raise InputError(explain("agreement threshold", got=repr(threshold), expected="an integer of at least 1"))
