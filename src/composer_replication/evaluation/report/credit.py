"""Prepare the sessions for the report, turn by turn.

For each error, a page shows the hint, the tokens that the hint affects, the correction, the preference pairs, and the
effect of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.action_text import parse_action_text
from composer_replication.canonical_json import encode_as_written
from composer_replication.evaluation.report.figures import signed
from composer_replication.evaluation.report.findings import failures
from composer_replication.evaluation.report.records import MeanLogprobs, Row, RunRecords, mean_logprobs
from composer_replication.types import Conversation, ErrorSite, Hint, ToolCall, Turn

# Maximum characters of a turn without an error; turns at an error get _MAX_NEAR_SITE.
_MAX_TEXT = 700
# A token's gap gets the next darker shade at each of these sizes, in nats.
_SHADE_STEPS = (0.05, 0.3, 1.0, 3.0)
_MAX_TOKENS, _MAX_MOST_CHANGED, _MAX_SAMPLES = 600, 5, 2
# The reasons why errors with these blames are not trained on.
_BLAME_REASONS = {
    "harness": "the harness refused or stopped it",
    "user": "the user refused or stopped it",
    "task": "failing here is part of the work",
    "env": "the machine or the network failed",
    "unknown": "its cause is unknown",
}
# By role of a decision: its label, the change that is expected of it, and the sign of that change.
_DECISIONS = {
    "erring": ("the erring call", "should become rarer", -1),
    "correction": ("its correction", "should become likelier", 1),
    "good": ("good calls of the session", "should not become rarer", 1),
}
# States of a site; they are classes in the style sheet.
_EXCLUDED, _HELD_OUT, _TRAINED_ON = "out", "held", "taught"


class _CreditedToken(NamedTuple):
    """A target token with its gap before and after training, and the CSS classes that shade the token by these gaps."""

    text: str
    before: float
    after: float
    class_before: str
    class_after: str


class _Gaps(NamedTuple):
    """The target tokens of an error site. `most_moved` holds those with the largest gaps before training."""

    tokens: list[_CreditedToken]
    num_left_out: int
    mean_before: str
    mean_after: str
    most_moved: list[_CreditedToken]


class _DecisionView(NamedTuple):
    """The mean log-probs of the decisions in one role as text, and the change expected from training.

    `state` is "clear" if the change is as expected, "wrong" if it is the opposite, and "open" if it is small.
    """

    what: str
    expected: str
    before: str
    after: str
    control: str
    change: str
    state: str


class _ReportedSite(NamedTuple):
    """An error site with everything that the report shows about it. `why` is the reason for its `state`."""

    site: ErrorSite
    hint: Hint | None
    state: str
    why: str
    proof: list[tuple[str, str]]
    decisions: list[_DecisionView]
    gaps: _Gaps | None
    pairs: list[PairView]
    sampled: list[tuple[str, list[Row]]]


class _TurnView(NamedTuple):
    number: int
    role: str
    who: str
    text: _Text
    thinking: int
    calls: list[tuple[str, _Text]]
    results: list[tuple[bool, _Text]]
    sites: list[_ReportedSite]
    pairs: list[PairView]


class _ConversationPart(NamedTuple):
    """A conversation of a session, divided into stretches of turns that are shown either open or folded."""

    id: str
    what: str
    stretches: list[tuple[bool, list[_TurnView]]]


class Credit:
    """Prepares the conversations of a run for the session pages."""

    def __init__(self, records: RunRecords, meanings: Mapping[str, str]) -> None:
        self._records, self._meanings = records, meanings
        self._sites: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
        for site, hint in failures(records):
            self._sites[site.conversation_id].append((site, hint))

    def parts(self, conversations: Sequence[Conversation]) -> list[_ConversationPart]:
        """Return the conversations of a session in the form in which a page shows them."""
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
        # The result of a failing call may be in a later turn, which is shown at full length as well.
        result_turns = {site.result_turn_id for site, _ in self._sites[conversation.id]}
        assistant_turn = -1
        for number, turn in enumerate(conversation.turns, start=1):
            # Pairs number assistant turns from 0, pages number all turns from 1.
            assistant_turn += turn.role == "assistant"
            pairs = (
                self._records.pairs_at.get((conversation.id, assistant_turn), []) if turn.role == "assistant" else []
            )
            sites = [self._site(*site_and_hint, pairs) for site_and_hint in at_turn.get(turn.id, ())]
            max_chars = _MAX_NEAR_SITE if sites or turn.id in result_turns else _MAX_TEXT
            yield _TurnView(
                number=number,
                role=turn.role,
                who=_speaker(turn),
                text=_shorten(turn.text, max_chars),
                thinking=len(turn.thinking),
                calls=[(call.name, _shorten(_arguments_text(call), max_chars)) for call in turn.calls],
                results=[(bool(result.is_error), _shorten(result.text, max_chars)) for result in turn.results],
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
        """Return the state of an error site, and the reason why it is used for training or not."""
        side = self._records.sides.get(site.conversation_id, {}).get("side", "train")
        proof = self._records.proofs.get(site.id)
        if not site.is_kept:
            return _EXCLUDED, f"not taught: {_BLAME_REASONS.get(site.blame, site.reason)}"
        if hint is None:
            return _EXCLUDED, "not taught: no hint was written for it"
        if side != "train":
            return _HELD_OUT, f"held out for {side}: not trained on"
        if proof is not None and not proof["is_kept"]:
            return _EXCLUDED, f"not taught: {self._meanings.get(proof['reason'], proof['reason'].replace('_', ' '))}"
        # If the training checked no hint, it used all of them.
        if self._records.proofs and proof is None:
            return _EXCLUDED, "not taught: it reached no training batch, so its hint was not checked"
        return _TRAINED_ON, "taught"

    def _sampled(self, site: ErrorSite) -> list[tuple[str, list[Row]]]:
        """Return, for each arm, a few actions sampled at the state before the erring turn."""
        by_arm: dict[str, list[Row]] = defaultdict(list)
        for row in self._records.sampled.get((site.conversation_id, site.turn_id), ()):
            if len(by_arm[row["arm"]]) < _MAX_SAMPLES:
                by_arm[row["arm"]].append({**row, "shown": _shorten(str(row["text"]), _MAX_TEXT)})
        return [(arm, by_arm[arm]) for arm in ("before", "after", "control") if by_arm[arm]]


def _stretches(turns: Iterator[_TurnView]) -> Iterator[tuple[bool, list[_TurnView]]]:
    """Yield stretches of turns, each with a flag for whether it is shown open.

    A turn is open if it contains an error, the result of an error, a preference pair or a user prompt.
    """
    folded: list[_TurnView] = []
    # The turn after an error shows the result of its call, so it is open too.
    follows_error = False
    for turn in turns:
        is_open = bool(turn.sites or turn.pairs or follows_error or (turn.role == "user" and turn.who == "user"))
        follows_error = bool(turn.sites)
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
        _decision(means, *texts)
        for role, texts in _DECISIONS.items()
        if (means := mean_logprobs(rows, role)) is not None
    ]


def _decision(means: MeanLogprobs, what: str, expected: str, sign: int) -> _DecisionView:
    """Return the decisions in one role as the report shows them."""
    before, after, control = ("" if mean is None else signed(mean, "nats") for mean in means)
    change = means.after - means.before
    is_visible = abs(change) >= _SHADE_STEPS[0]
    state = ("clear" if change * sign > 0 else "wrong") if is_visible else "open"
    return _DecisionView(what, expected, before, after, control, signed(change, "nats"), state)


def _gaps(row: Row | None) -> _Gaps | None:
    if row is None or not row["tokens"]:
        return None
    rows = list(zip(row["tokens"], row["before"], row["after"], strict=True))
    tokens = [
        _CreditedToken(_with_visible_whitespace(text), before, after, _shade_class(before), _shade_class(after))
        for text, before, after in rows[:_MAX_TOKENS]
    ]
    largest = sorted(tokens, key=lambda token: -abs(token.before))[:_MAX_MOST_CHANGED]
    return _Gaps(
        tokens=tokens,
        num_left_out=len(rows) - len(tokens),
        mean_before=signed(sum(row["before"]) / len(rows), "nats"),
        mean_after=signed(sum(row["after"]) / len(rows), "nats"),
        most_moved=[token for token in largest if token.class_before],
    )


def _with_visible_whitespace(text: str) -> str:
    """Return the text with a visible mark before each line end and tab."""
    return text.replace("\n", "↵\n").replace("\t", "→\t")


def _shade_class(gap: float) -> str:
    """Return the CSS class that shades a token by its gap.

    The class is one of `d1` to `d4` if the hint makes the token less likely, and one of `u1` to `u4` if more likely.
    """
    depth = sum(abs(gap) >= step for step in _SHADE_STEPS)
    return f"{'d' if gap < 0 else 'u'}{depth}" if depth else ""


# ---- text of turns and pairs

# Maximum characters of a text at an error, or in a pair.
_MAX_NEAR_SITE = 4000


class _Text(NamedTuple):
    """The beginning of a text, and the number of characters that were left out after it."""

    text: str
    num_left_out: int


class PairView(NamedTuple):
    """A preference pair as the report shows it."""

    source: str
    chosen_by: str
    how: str
    chosen: _Text
    rejected: _Text


def _shorten(text: str, max_chars: int) -> _Text:
    # Only newlines are stripped: leading spaces may be indentation.
    text = text.strip("\n")
    return _Text(text[:max_chars], max(len(text) - max_chars, 0))


def pair_view(row: Row) -> PairView:
    metadata = row.get("metadata") or {}
    return PairView(
        source=str(row.get("source") or "teachers"),
        chosen_by=str(row.get("chosen_by") or ""),
        how=str(metadata.get("how") or "").replace("_", " "),
        chosen=_shorten(_readable(str(row["chosen"])), _MAX_NEAR_SITE),
        rejected=_shorten(_readable(str(row["rejected"])), _MAX_NEAR_SITE),
    )


def _readable(text: str) -> str:
    """Return an action in readable form: its text, then each call as its name and one argument per line."""
    action = parse_action_text(text).action
    calls = [f"{call.name}\n{_arguments_text(call)}" for call in action.calls]
    return "\n\n".join(filter(None, [action.text, *calls])) if calls else text


def _arguments_text(call: ToolCall) -> str:
    """Return the arguments of a call, one per line: strings as they are, other values as JSON."""
    # The model's arguments were not a JSON object.
    if call.raw_arguments is not None:
        return call.raw_arguments
    return "\n".join(f"{name}: {_value(value)}" for name, value in call.arguments.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else encode_as_written(value, where="argument").decode()
