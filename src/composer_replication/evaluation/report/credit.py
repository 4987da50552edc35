"""Show a session turn by turn: at each error the hint, the tokens it affects, the correction, the pairs, and the
result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from composer_replication.evaluation.report.figures import signed
from composer_replication.evaluation.report.findings import failures
from composer_replication.evaluation.report.records import (
    MAX_NEAR_SITE,
    Cut,
    Means,
    PairView,
    Row,
    RunRecords,
    arguments_of,
    cut,
    decision_of,
    pair_view,
)
from composer_replication.types import Conversation, ErrorSite, Hint, Turn

# Characters of a turn without an error; those at an error get MAX_NEAR_SITE.
_MAX_TEXT = 700
_STEPS = (0.05, 0.3, 1.0, 3.0)
"""Nats from which a token's gap is drawn in the next darker shade."""
_MAX_TOKENS, _MAX_MOVED, _MOST_SAMPLES = 600, 5, 2
# Why errors with these blames are not trained on.
_OTHER_BLAMES = {
    "harness": "the harness refused or stopped it",
    "user": "the user refused or stopped it",
    "task": "failing here is part of the work",
    "env": "the machine or the network failed",
    "unknown": "its cause is unknown",
}
# Role of a decision: its label, what should happen to it, and the sign of a good change.
_DECISIONS = {
    "erring": ("the erring call", "should become rarer", -1),
    "correction": ("its correction", "should become likelier", 1),
    "good": ("good calls of the session", "should not become rarer", 1),
}
_OUT, _HELD, _TAUGHT = "out", "held", "taught"


class _CreditedToken(NamedTuple):
    """One target token. `text` shows line ends; the classes say how strongly the hint changes it."""

    text: str
    before: float
    after: float
    class_before: str
    class_after: str


class Gaps(NamedTuple):
    """Target tokens with their gaps; `most_moved` are those that the hint changed most before training."""

    tokens: list[_CreditedToken]
    num_left_out: int
    mean_before: str
    mean_after: str
    most_moved: list[_CreditedToken]


class _DecisionView(NamedTuple):
    """Mean log-probs of the decisions in one role, and which way they should change; `state` as in an interval."""

    what: str
    expected: str
    before: str
    after: str
    control: str
    change: str
    state: str


class _ReportedSite(NamedTuple):
    """Everything known about an error. `state` is taught, held (held out) or out; `why` says it in words."""

    site: ErrorSite
    hint: Hint | None
    state: str
    why: str
    proof: list[tuple[str, str]]
    decisions: list[_DecisionView]
    gaps: Gaps | None
    pairs: list[PairView]
    sampled: list[tuple[str, list[Row]]]


class _TurnView(NamedTuple):
    number: int
    role: str
    who: str
    text: Cut
    thinking: int
    calls: list[tuple[str, Cut]]
    results: list[tuple[bool, Cut]]
    sites: list[_ReportedSite]
    pairs: list[PairView]


class _ConversationPart(NamedTuple):
    """One conversation of a session, in stretches of turns; a stretch without errors is folded."""

    id: str
    what: str
    stretches: list[tuple[bool, list[_TurnView]]]


class Credit:
    """Builds the session pages from a run's records."""

    def __init__(self, records: RunRecords, meanings: Mapping[str, str]) -> None:
        self._records, self._meanings = records, meanings
        self._sites: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
        for site, hint in failures(records):
            self._sites[site.conversation_id].append((site, hint))

    def parts(self, conversations: Sequence[Conversation]) -> list[_ConversationPart]:
        return [
            _ConversationPart(
                conversation.id, _conversation_label(conversation), list(_stretches(self._turns(conversation)))
            )
            for conversation in conversations
        ]

    def _turns(self, conversation: Conversation) -> Iterator[_TurnView]:
        at_turn: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
        for site, hint in self._sites[conversation.id]:
            at_turn[site.turn_id].append((site, hint))
        # The result of a failing call may be in a later turn; it is shown at full length as well.
        shown_by = {site.result_turn_id for site, _ in self._sites[conversation.id]}
        assistant_turn = -1
        for number, turn in enumerate(conversation.turns, start=1):
            # Pairs count assistant turns from 0, pages all turns from 1.
            assistant_turn += turn.role == "assistant"
            pairs = (
                self._records.pairs_at.get((conversation.id, assistant_turn), []) if turn.role == "assistant" else []
            )
            sites = [self._site(*site_and_hint, pairs) for site_and_hint in at_turn.get(turn.id, ())]
            most = MAX_NEAR_SITE if sites or turn.id in shown_by else _MAX_TEXT
            yield _TurnView(
                number=number,
                role=turn.role,
                who=_speaker(turn),
                text=cut(turn.text, most),
                thinking=len(turn.thinking),
                calls=[(call.name, cut(arguments_of(call), most)) for call in turn.calls],
                results=[(bool(result.is_error), cut(result.text, most)) for result in turn.results],
                sites=sites,
                pairs=[] if sites else [pair_view(row) for row in pairs],
            )

    def _site(self, site: ErrorSite, hint: Hint | None, pairs: Sequence[Row]) -> _ReportedSite:
        state, why = self._state(site, hint)
        rows = self._records.evaluated.get(site.id, ())
        return _ReportedSite(
            site=site,
            hint=hint,
            state=state,
            why=why,
            proof=_proof_lines(self._records.proofs.get(site.id)),
            decisions=_decisions(rows),
            gaps=_gaps(self._records.gaps.get(site.id)),
            pairs=[pair_view(row) for row in pairs],
            sampled=self._sampled(site),
        )

    def _state(self, site: ErrorSite, hint: Hint | None) -> tuple[str, str]:
        """Return what became of a site: the first step that excluded it, with the reason."""
        side = self._records.sides.get(site.conversation_id, {}).get("side", "train")
        proof = self._records.proofs.get(site.id)
        if not site.is_kept:
            return _OUT, f"not taught: {_OTHER_BLAMES.get(site.blame, site.reason)}"
        if hint is None:
            return _OUT, "not taught: no hint was written for it"
        if side != "train":
            return _HELD, f"held out for {side}: not trained on"
        if proof is not None and not proof["is_kept"]:
            return _OUT, f"not taught: {self._meanings.get(proof['reason'], proof['reason'].replace('_', ' '))}"
        # Without any check the training took all hints.
        if self._records.proofs and proof is None:
            return _OUT, "not taught: it reached no training batch, so its hint was not checked"
        return _TAUGHT, "taught"

    def _sampled(self, site: ErrorSite) -> list[tuple[str, list[Row]]]:
        """Return a few sampled actions of each arm at the state of the erring turn."""
        by_arm: dict[str, list[Row]] = defaultdict(list)
        for row in self._records.sampled.get((site.conversation_id, site.turn_id), ()):
            if len(by_arm[row["arm"]]) < _MOST_SAMPLES:
                by_arm[row["arm"]].append({**row, "shown": cut(str(row["text"]), _MAX_TEXT)})
        return [(arm, by_arm[arm]) for arm in ("before", "after", "control") if by_arm[arm]]


def _stretches(turns: Iterator[_TurnView]) -> Iterator[tuple[bool, list[_TurnView]]]:
    """Yield stretches of turns: open with errors, their results, pairs or user prompts; folded without."""
    folded: list[_TurnView] = []
    # The turn after an error shows its result, so it stays open.
    follows = False
    for turn in turns:
        is_open = bool(turn.sites or turn.pairs or follows or (turn.role == "user" and turn.who == "user"))
        follows = bool(turn.sites)
        if not is_open:
            folded.append(turn)
            continue
        if folded:
            yield False, folded
            folded = []
        yield True, [turn]
    if folded:
        yield False, folded


def _conversation_label(conversation: Conversation) -> str:
    if conversation.parent is None:
        return "session"
    return {"subagent": "sub-agent", "sidechain": "sub-agent", "compaction": "after a compaction"}.get(
        conversation.parent.kind, conversation.parent.kind.replace("_", " ")
    )


def _speaker(turn: Turn) -> str:
    labels = {"human": "user", "model": "model", "tool": "result", "meta": "harness", "summary": "summary"}
    return labels.get(turn.origin, turn.origin)


def _proof_lines(row: Row | None) -> list[tuple[str, str]]:
    if row is None:
        return []
    without = row["without_hint"]
    lines = [("its own hint, on the erring call", row["with_hint"] - without)]
    if row["with_other_hint"] is not None:
        lines.append((f"a hint of another kind ({row['other_kind']})", row["with_other_hint"] - without))
    if row["good_with_hint"] is not None and row["good_without_hint"] is not None:
        lines.append(("its own hint, on good calls", row["good_with_hint"] - row["good_without_hint"]))
    return [(what, signed(value, "nats")) for what, value in lines]


def _decisions(rows: Sequence[Row]) -> list[_DecisionView]:
    return [
        _decision(means, *words) for role, words in _DECISIONS.items() if (means := decision_of(rows, role)) is not None
    ]


def _decision(means: Means, what: str, expected: str, sign: int) -> _DecisionView:
    """Return one row; a change counts from the size at which it is no noise, for good calls only a decrease."""
    before, after, control = ("" if mean is None else signed(mean, "nats") for mean in means)
    change = means.after - means.before
    is_seen = abs(change) >= _STEPS[0]
    state = ("clear" if change * sign > 0 else "wrong") if is_seen else "open"
    return _DecisionView(what, expected, before, after, control, signed(change, "nats"), state)


def _gaps(row: Row | None) -> Gaps | None:
    if row is None or not row["tokens"]:
        return None
    whole = list(zip(row["tokens"], row["before"], row["after"], strict=True))
    tokens = [
        _CreditedToken(_with_visible_whitespace(text), b, a, _shade_class(b), _shade_class(a))
        for text, b, a in whole[:_MAX_TOKENS]
    ]
    most_moved = sorted(tokens, key=lambda token: -abs(token.before))[:_MAX_MOVED]
    return Gaps(
        tokens=tokens,
        num_left_out=len(whole) - len(tokens),
        mean_before=signed(sum(row["before"]) / len(whole), "nats"),
        mean_after=signed(sum(row["after"]) / len(whole), "nats"),
        most_moved=[token for token in most_moved if token.class_before],
    )


def _with_visible_whitespace(text: str) -> str:
    """Return the text with visible line ends and tabs that still work as such."""
    return text.replace("\n", "↵\n").replace("\t", "→\t")


def _shade_class(gap: float) -> str:
    """Return the CSS class of a gap: `d1` to `d4` if the hint lowers the token, `u1` to `u4` if it raises it."""
    depth = sum(abs(gap) >= step for step in _STEPS)
    return f"{'d' if gap < 0 else 'u'}{depth}" if depth else ""
