"""Which turns channel 1 may learn: the model's own that nothing speaks against, and what speaks against the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer_replication.actions.write import text_follows_call
from composer_replication.batch.render.renderer import TEXT_FOLLOWS_CALL
from composer_replication.sessions.read_run import LoggedSession
from composer_replication.sites.find import NO_FAILURE
from composer_replication.types import ErrorSite, Turn

REFUSED, BLOCKED, INTERRUPTED = "refused_call", "blocked_call", "interrupted"
FAILED, FAILED_AS_WORK = "failed_call", "call_failed_as_part_of_the_work"
REJECTED = "rejected_side_of_a_pair"
IMAGE, UNSEEN = "image_before_it", "unseen_context_before_it"
_BY_KIND = {
    "user_rejected": REFUSED,
    "user_corrected": REFUSED,
    "permission_denied": REFUSED,
    "hook_blocked": BLOCKED,
    "user_interrupt": INTERRUPTED,
}
_ORDER = (REFUSED, BLOCKED, INTERRUPTED, FAILED, FAILED_AS_WORK, REJECTED, IMAGE, UNSEEN, TEXT_FOLLOWS_CALL)
_INTERRUPTION = "[Request interrupted by user"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodTurns:
    """Ids of the turns to learn, and of the model's other turns with the reason why they are not."""

    good: frozenset[str]
    not_good: dict[str, str]


def good_turns(session: LoggedSession, *, work_failures: bool = False) -> GoodTurns:
    """The model's own turns, told apart.

    Not good is a turn with a call that failed, was refused, blocked or interrupted (a site says so, kept or not, or the
    result's own flag), one that is the rejected side of a pair, one behind something that a text model does not see,
    and one that no template writes in its order. With `work_failures` a call that failed as part of the work (a site
    that blames the task) speaks against nothing. Turns that were copied from another conversation are neither.
    """
    against = _Against(session, work_failures)
    reasons = {turn.id: reason for turn, reason in against.reasons()}
    return GoodTurns(
        good=frozenset(turn_id for turn_id, reason in reasons.items() if not reason),
        not_good={turn_id: reason for turn_id, reason in reasons.items() if reason},
    )


def rejected_turn_ids(session: LoggedSession) -> set[str]:
    """The turns that the session's pairs reject."""
    assistant_ids = [turn.id for turn in session.conversation.turns if turn.role == "assistant"]
    rejecting = (pair.turn_number for pair in session.pairs if pair.rejects_turn)
    return {assistant_ids[number] for number in rejecting if 0 <= number < len(assistant_ids)}


def taught_otherwise(session: LoggedSession) -> set[str]:
    """Turns that channel 2 or 3 moves the model away from: never a target of channel 1, whatever is asked for."""
    return rejected_turn_ids(session) | {site.turn_id for site, _ in session.sites if site.is_kept}


class _Against:
    def __init__(self, session: LoggedSession, work_failures: bool) -> None:
        self._turns, self._work_failures = session.conversation.turns, work_failures
        self._rejected = rejected_turn_ids(session)
        self._sites: dict[str, list[ErrorSite]] = defaultdict(list)
        for site, _ in session.sites:
            if site.kind != NO_FAILURE:  # looked like one, and is none
                self._sites[site.turn_id].append(site)
        self._flagged = _failed_calls(self._turns)

    def reasons(self) -> Iterator[tuple[Turn, str]]:
        """Each of the model's turns with the first reason against it, or an empty one."""
        has_image = False
        for number, turn in enumerate(self._turns):
            if turn.origin == "model" and turn.role == "assistant":
                objections = set(self._of_calls(turn))
                objections |= {INTERRUPTED} if self._is_interrupted(number) else set()
                objections |= {REJECTED} if turn.id in self._rejected else set()
                objections |= {IMAGE} if has_image else set()
                objections |= {UNSEEN} if turn.extra.get("unseen_context") else set()
                objections |= {TEXT_FOLLOWS_CALL} if not turn.token_ids and text_follows_call(turn) else set()
                yield turn, next((reason for reason in _ORDER if reason in objections), "")
            has_image = has_image or bool(turn.extra.get("images"))

    def _of_calls(self, turn: Turn) -> Iterator[str]:
        sites = self._sites[turn.id]
        for site in sites:
            if site.blame != "task":
                yield _BY_KIND.get(site.kind, FAILED)
            elif not self._work_failures:
                yield FAILED_AS_WORK
        explained = {site.call_id for site in sites}
        if any((turn.id, call.id) in self._flagged and call.id not in explained for call in turn.calls):
            yield FAILED

    def _is_interrupted(self, number: int) -> bool:
        """Whether the user stopped the agent before its next turn."""
        for turn in _up_to_next_answer(self._turns[number + 1 :]):
            if turn.role == "user" and turn.text.lstrip().startswith(_INTERRUPTION):
                return True
        return False


def _failed_calls(turns: Sequence[Turn]) -> set[tuple[str, str]]:
    """(turn, call) of results marked as failed; some logs use an id again, and then the latest call of it is meant."""
    caller: dict[str, str] = {}
    failed: set[tuple[str, str]] = set()
    for turn in turns:
        caller |= {call.id: turn.id for call in turn.calls}
        failed |= {(caller.get(result.call_id, ""), result.call_id) for result in turn.results if result.is_error}
    return failed


def _up_to_next_answer(turns: Sequence[Turn]) -> Iterator[Turn]:
    for turn in turns:
        if turn.role == "assistant":
            return
        yield turn
