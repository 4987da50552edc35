"""Hooks and gates: what one refuses for the second time in a project is a convention that was not kept.

Within a conversation that is known as it goes. Over the conversations of a project it is known when all of them have
been read: they are then put in the order of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from composer_replication.actions.shell.command import Command
from composer_replication.sites.taxonomy import Verdict
from composer_replication.types import Conversation, ErrorSite

CONFIDENCE = 0.7
REFUSED_BEFORE = "a hook or gate had refused the same before"
WENT_ROUND = "it goes round a gate, and was refused"
_REFUSED_ELSEWHERE = "a hook or gate had refused the same in an earlier session of this project"
_GATED = frozenset({("git", "commit"), ("git", "push")})
_PARTICULAR = re.compile(r"\S*[/\d.]\S*")  # paths, numbers, hashes: what differs between two refusals of one kind
# A hook that could not run has refused nothing.
_IS_BROKEN = re.compile(
    r"No stderr output|No such file|not found\b|Traceback \(most|can't open file|Permission denied|timed out"
    r"|SyntaxError|Cannot find module|ModuleNotFoundError|hook execution (?:failed|cancelled)",
    re.IGNORECASE,
)
_LOOKED_AT = 400
_MARKS = "'\"`.,:;()[]"
_MAX_WORDS = 12  # a refusal's kind stands at its beginning; what follows is cut at different places
_WORKTREE = re.compile(r"/\.(?:claude/)?worktrees/.*")  # of the same project
_GOES_ROUND = re.compile(r"\s--no-verify\b|\bHUSKY=0|\bSKIP=\w|\bLEFTHOOK=0|\bcommit\b.{0,80}\s-n\b|--no-hooks\b")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first refusal of one kind in a conversation: where, when, and the site that it is if it was not the first."""

    project: str
    gate: str
    time: str
    site: ErrorSite


def gate_of(verdict: Verdict, command: Command, text: str) -> str:
    """What a hook or a gate refused, without names and numbers; empty where none did."""
    by_git = command.only_git and any(pair in _GATED for pair in command.programs)
    if verdict.kind != "hook_blocked" and not (by_git and verdict.kind == "lint_or_typecheck"):
        return ""
    start, end = verdict.span
    if _IS_BROKEN.search(text[start : end + _LOOKED_AT]):
        return ""
    words = _PARTICULAR.sub("", text[start:end]).split()
    terms = [word for word in words if word.strip(_MARKS) not in command.words]  # the rest is what this command says
    return " ".join(terms[:_MAX_WORDS])


def as_convention(verdict: Verdict, reason: str = REFUSED_BEFORE) -> Verdict:
    return replace(verdict, kind="hook_blocked", blame="model", confidence=CONFIDENCE, reason=reason)


def goes_round(verdict: Verdict, command: Command) -> bool:
    """Whether a command that leaves the checks out was refused: by a hook, or by the agent's own rules."""
    return verdict.kind in ("hook_blocked", "permission_denied") and _GOES_ROUND.search(command.text) is not None


def refusal(conversation: Conversation, gate: str, site: ErrorSite, *, min_confidence: float) -> Refusal:
    """`site` is what the rules say of the first refusal; kept here is what it is if the project had had one before."""
    turn = next(turn for turn in conversation.turns if turn.id == site.turn_id)
    convention = replace(
        site,
        kind="hook_blocked",
        blame="model",
        confidence=CONFIDENCE,
        is_kept=min_confidence <= CONFIDENCE and turn.origin != "copied",
        reason=_REFUSED_ELSEWHERE,
    )
    return Refusal(_WORKTREE.sub("", conversation.cwd or ""), gate, turn.timestamp or "", convention)


def conventions(refusals: Sequence[Refusal], *, held_out: Set[str] = frozenset()) -> dict[str, ErrorSite]:
    """By id, the sites that were not the first of their kind in their project; without a time nobody can tell.

    What conversations show that are `held_out` is known to them alone.
    """
    learnt = [refusal for refusal in refusals if refusal.site.conversation_id not in held_out]
    later = _later(refusals) if held_out else {}
    return _later(learnt) | {key: site for key, site in later.items() if site.conversation_id in held_out}


def _later(refusals: Iterable[Refusal]) -> dict[str, ErrorSite]:
    first: dict[tuple[str, str], Refusal] = {}
    dated_refusals = sorted(
        (refusal for refusal in refusals if refusal.time and refusal.project),
        key=lambda refusal: (refusal.time, refusal.site.id),
    )
    later = dict[str, ErrorSite]()
    for refusal in dated_refusals:
        earliest = first.setdefault((refusal.project, refusal.gate), refusal)
        if earliest.time < refusal.time and earliest.site.conversation_id != refusal.site.conversation_id:
            later[refusal.site.id] = refusal.site
    return later
