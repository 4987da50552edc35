"""Does a hint do anything? Asked where the erring call is decided.

The tokens are those of `batch.render.decision`, scored a token without a hint, with the site's own, and with that of a
site of another kind; and as many of good calls before it in the session without a hint and with the site's own:

    drop(hint, call) = mean over the call's deciding tokens of log p(token) - log p(token | hint)
    advantage           = drop(own, erring) - drop(other, erring)
    advantage_over_good = drop(own, erring) - drop(own, good)

Any text before a turn moves it, and a text that speaks against everything lowers the erring call too: a hint is heeded
where both differences are above the margin. Sums over a call would mostly tell how long it is.

Where whole turns are taught (`part="turn"`), a call is scored as if it were made at once, without the words before it:
who has said "I change lamps.py" has decided, and a hint would have changed these words. Where calls alone are taught,
their words stay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import (
    Part,
    Placement,
    hinted_turn,
    wrong_hints,
)
from composer_replication.batch.render.decision import Decision, decide
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import InputError, explain
from composer_replication.trainer.objective.reference import Response, response_logprobs

HINT_DOES_NOTHING = "hint_does_nothing"
LOWERS_GOOD_CALLS = "hint_lowers_good_calls_too"
NO_OTHER_KIND = "no_hint_of_another_kind"


class DecidedCall(NamedTuple):
    """Where a turn with a call stands, and the tokens that decide it."""

    rendered: RenderedSequence
    span: TurnSpan
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvableSite:
    """An erring turn in its rendering, its hint, and its kind of error.

    Without a `decision` all of the call is scored. `good_calls` are what its hint must not lower as well.
    """

    site_id: str
    rendered: RenderedSequence
    span: TurnSpan
    hint: str
    kind: str
    decision: Decision | None = None
    good_calls: Sequence[DecidedCall] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HintProof:
    """Mean log-probs a token at the erring decision, and at those of good calls; and what they mean for the site.

    `basis` says what the `num_tokens` of the decision are (see `Decision`). The figures of good calls are means over
    `num_good_calls` of them, None without any; `num_good_elsewhere` of them are of other sessions.
    """

    site_id: str
    basis: str
    num_tokens: int
    without_hint: float
    with_hint: float
    with_other_hint: float | None
    other_kind: str | None
    num_good_calls: int
    num_good_elsewhere: int
    good_without_hint: float | None
    good_with_hint: float | None
    is_kept: bool
    reason: str

    @property
    def advantage(self) -> float | None:
        """How much more its own hint lowers the erring decision than another's does, in nats a token."""
        return None if self.with_other_hint is None else self.with_other_hint - self.with_hint

    @property
    def good_effect(self) -> float | None:
        """By how much its own hint moves good calls, in nats a token; below 0 they become less likely."""
        if self.good_with_hint is None or self.good_without_hint is None:
            return None
        return self.good_with_hint - self.good_without_hint

    @property
    def advantage_over_good(self) -> float | None:
        """How much more its own hint lowers the erring decision than good ones, in nats a token."""
        moved = self.good_effect
        return None if moved is None else self.without_hint - self.with_hint + moved


def prove_hints(
    model: nn.Module,
    renderer: Renderer,
    sites: Sequence[ProvableSite],
    *,
    margin: float = 0.0,
    placement: Placement = "before_turn",
    part: Part = "turn",
    max_context: int | None = None,
    seed: int = 0,
    known: Sequence[HintProof] = (),
    on_proof: Callable[[HintProof], None] | None = None,
) -> list[HintProof]:
    """One proof a site, in order. A site without one of another kind beside it cannot be proved, and is not kept.

    `max_context` cuts what stands before the turns; all that is scored for a site shares the rest in one tree. Good
    calls that are further away than half of it, or in another sequence, have that half for themselves. `known` are
    proofs from an earlier call like this one, found by the site's id; `on_proof` is told of each that is made.
    """
    if margin < 0:
        raise InputError(explain("margin", got=margin, expected="0 or more nats"))
    other_sites = wrong_hints(sites, [site.kind for site in sites], seed=seed)
    by_site = {proof.site_id: proof for proof in known}
    proofs: list[HintProof] = []
    for site, other_site in zip(sites, other_sites, strict=True):
        if site.site_id in by_site:
            proofs.append(by_site[site.site_id])
            continue
        proofs.append(_proof(_Scores(model, renderer, site, placement, part, max_context), site, other_site, margin))
        if on_proof is not None:
            on_proof(proofs[-1])
    return proofs


def is_near(call: TurnSpan, site: TurnSpan, max_context: int) -> bool:
    """Whether a call before a site of its sequence can be shown in the site's context, and still has half of it."""
    return 0 <= site.header_start - call.header_start <= max_context // 2


def count_reasons(proofs: Sequence[HintProof]) -> Counter[str]:
    """How many sites were kept, and why the others were not."""
    return Counter(proof.reason for proof in proofs)


class _Scores:
    """Means of log-probs a token at the decisions around one site, all of one pass."""

    def __init__(
        self,
        model: nn.Module,
        renderer: Renderer,
        site: ProvableSite,
        placement: Placement,
        part: Part,
        max_context: int | None,
    ) -> None:
        self._model, self._renderer, self._site = model, renderer, site
        self._placement: Placement = placement
        self._part: Part = part
        self.decision = site.decision or decide(renderer, site.rendered, site.span, None)
        self._own = DecidedCall(site.rendered, site.span, self.decision)
        self._max_context = max_context

    def of(self, hints: Sequence[str]) -> tuple[list[float], list[tuple[DecidedCall, float, float]]]:
        """At the erring decision with each hint; at each good one without any and with the site's own."""
        erring = [self._responses(self._own, hint) for hint in hints]
        for variant, hint in zip(erring, hints, strict=True):
            if isinstance(variant, str):
                what = f"hint of site {self._site.site_id}" if hint else f"turn of site {self._site.site_id}"
                raise InputError(explain(what, got=variant, expected="a turn that can be taught"))
        pairs = [
            (call, [self._responses(call, hint) for hint in ("", self._site.hint)]) for call in self._site.good_calls
        ]
        good = [(call, pair) for call, pair in pairs if not any(isinstance(variant, str) for variant in pair)]
        scored = [
            variant
            for variant in (*erring, *(variant for _, pair in good for variant in pair))
            if not isinstance(variant, str)
        ]
        means = iter(self._means(scored))
        return [next(means) for _ in hints], [(call, next(means), next(means)) for call, _ in good]

    def _responses(self, call: DecidedCall, hint: str) -> list[Response] | str:
        """The context with a hint up to the end of each stretch; or why the turn cannot be shown with it."""
        first = self._first_token(call)
        turn = hinted_turn(self._renderer, call.rendered, call.span, hint, placement=self._placement, first=first)
        if isinstance(turn, str):
            return turn
        shift, ids = turn.teacher_start - turn.start, turn.context.ids
        text_length = 0 if self._part == "call" or call.span.call_start is None else call.span.call_start - turn.start
        before, at_once = ids[: turn.teacher_start], ids[turn.teacher_start + text_length :]
        from_there = shift - turn.teacher_start - text_length
        return [
            ([*before, *at_once[: end + from_there]], begin + shift - text_length)
            for begin, end in call.decision.stretches
        ]

    def _first_token(self, call: DecidedCall) -> int:
        """The site's own where at least half of the context is left from there, so that all share it."""
        if self._max_context is None:
            return 0
        if call.rendered is self._own.rendered and is_near(call.span, self._own.span, self._max_context):
            return max(0, self._own.span.header_start - self._max_context)
        return max(0, call.span.header_start - self._max_context // 2)

    def _means(self, response_groups: Sequence[list[Response]]) -> list[float]:
        sums = iter(
            response_logprobs(self._model, [response for several in response_groups for response in several]).tolist()
        )
        sizes = [[len(ids) - start for ids, start in several] for several in response_groups]
        return [sum(next(sums) for _ in lengths) / sum(lengths) for lengths in sizes]


def _proof(scores: _Scores, site: ProvableSite, other_site: ProvableSite | None, margin: float) -> HintProof:
    hints = ["", site.hint, *([] if other_site is None else [other_site.hint])]
    erring, good = scores.of(hints)
    proof = HintProof(
        site_id=site.site_id,
        basis=scores.decision.basis,
        num_tokens=scores.decision.num_tokens,
        without_hint=erring[0],
        with_hint=erring[1],
        with_other_hint=None if other_site is None else erring[2],
        other_kind=None if other_site is None else other_site.kind,
        num_good_calls=len(good),
        num_good_elsewhere=sum(call.rendered.conversation_id != site.rendered.conversation_id for call, _, _ in good),
        good_without_hint=fmean(before for _, before, _ in good) if good else None,
        good_with_hint=fmean(after for _, _, after in good) if good else None,
        is_kept=False,
        reason="",
    )
    return _judged(proof, margin)


def _judged(proof: HintProof, margin: float) -> HintProof:
    if proof.advantage is None:
        return replace(proof, reason=NO_OTHER_KIND)
    if _stands_out(proof.advantage, proof.advantage_over_good, margin):
        return replace(proof, is_kept=True, reason="kept")
    return replace(proof, reason=LOWERS_GOOD_CALLS if proof.advantage > margin else HINT_DOES_NOTHING)


def _stands_out(over_other: float | None, over_good: float | None, margin: float = 0.0) -> bool:
    """Whether an own hint lowers the error by more than all that it is compared with."""
    return over_other is not None and over_other > margin and (over_good is None or over_good > margin)


# Does a model heed hints on some logs at all? The proofs of all their sites, counted against chance.

_FEWEST_SITES = 4
"""Of fewer all could be won by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeedVerdict:
    """Whether a model heeds hints on some logs; `heeds` is None where there are too few sites to tell.

    It does where own hints stand out from all they are compared with at more than half of the sites, and at more than
    chance has it, by two standard deviations: without an effect one of two is the larger at half of the sites, and one
    of three, where there are good calls, at a third.
    """

    num_sites: int
    over_other: int
    num_with_good: int
    num_elsewhere: int
    over_good: int
    over_both: int
    good_effect: float | None

    @property
    def by_chance(self) -> float:
        """At how many sites own hints would stand out if hints did nothing."""
        return self.num_with_good / 3 + (self.num_sites - self.num_with_good) / 2

    @property
    def num_needed(self) -> int:
        """At how many they have to."""
        deviation = math.sqrt(self.num_with_good * 2 / 9 + (self.num_sites - self.num_with_good) / 4)
        return max(self.num_sites // 2 + 1, math.ceil(self.by_chance + 2 * deviation))

    @property
    def heeds(self) -> bool | None:
        return None if self.num_sites < _FEWEST_SITES else self.over_both >= self.num_needed

    def in_words(self, *, can_warm_up: bool = True) -> str:
        """One sentence: whether it does, by which figures, and what to do if not."""
        if self.heeds is None:
            return f"whether this model heeds hints cannot be told from {self.num_sites} sites that could be compared"
        if self.heeds:
            return f"this model heeds hints on these logs: {self._figures()}"
        what = "all of what follows is so" if self.num_with_good else "what follows is so"
        counted = f"{what} at {self.over_both} sites; chance alone makes it {self.by_chance:.0f}"
        advice = "warm up first (train.warmup), " if can_warm_up else ""
        return (
            f"this model does not heed hints on these logs by more than chance: {counted}, and {self.num_needed} are "
            f"needed: {self._figures()}: channel 2 has little to teach with; {advice}use a larger model, or rely on "
            "pairs (channel 3)"
        )

    def _figures(self) -> str:
        figures = (
            f"own hints lower the erring decision more than another kind's at {_share(self.over_other, self.num_sites)}"
        )
        if self.good_effect is not None:
            elsewhere_text = f" ({self.num_elsewhere} of them by calls of other sessions, having none before it)"
            figures += (
                f", and more than they lower good calls before it in the same sessions at "
                f"{_share(self.over_good, self.num_with_good)}{elsewhere_text if self.num_elsewhere else ''}, "
                f"which they move by {self.good_effect:+.2f} nats a token"
            )
        if self.num_with_good < self.num_sites:
            figures += f"; there is no good call to compare with at {self.num_sites - self.num_with_good} sites"
        return figures


def verdict(proofs: Sequence[HintProof]) -> _HeedVerdict:
    """From all sites that could be compared, kept or not; the margin plays no part."""
    compared = [proof for proof in proofs if proof.advantage is not None]
    with_good = [proof for proof in compared if proof.good_effect is not None]
    effects = [proof.good_effect or 0.0 for proof in with_good]
    return _HeedVerdict(
        num_sites=len(compared),
        over_other=sum((proof.advantage or 0.0) > 0 for proof in compared),
        num_with_good=len(with_good),
        num_elsewhere=sum(proof.num_good_elsewhere > 0 for proof in with_good),
        over_good=sum((proof.advantage_over_good or 0.0) > 0 for proof in with_good),
        over_both=sum(_stands_out(proof.advantage, proof.advantage_over_good) for proof in compared),
        good_effect=fmean(effects) if effects else None,
    )


def _share(number: int, total: int) -> str:
    return f"{number / total:.0%} of {total} sites"
