"""Check for each site whether its hint makes the error less likely, before channel 2 trains on it.

The tokens that decide the erring call (`batch.render.decision`) are scored without a hint, with the site's own hint,
and with an unrelated hint, taken from a site with a different kind of error. Good calls earlier in the session are
scored without a hint and with the site's own hint:

    effect(hint, call)  = mean over the call's deciding tokens of log p(token) - log p(token | hint)
    advantage           = effect(own, erring) - effect(unrelated, erring)
    advantage_over_good = effect(own, erring) - effect(own, good)

Any text before a turn changes its probability, and a text that discourages every call discourages the erring call too.
So a hint passes only if both differences exceed the margin. They are means per token, because sums over a call mostly
measure its length.

Where channel 2 trains on whole turns (`part="turn"`), a call is scored without the words before it, as if it came first
in its turn. After "I change lamps.py" the call is already decided, and the hint would have changed these words too.
Where it trains only on calls (`part="call"`), the words stay.

`verdict` compares the results of all sites with chance: does this model react to hints on these logs?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from torch import nn

from composer_replication.batch.hint_placement import Part, Placement, draw_unrelated_hints, hinted_turn
from composer_replication.batch.render.decision import Decision, find_decision
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.errors import InputError, explain
from composer_replication.trainer.objective.reference import Response, response_logprobs

HINT_DOES_NOTHING = "hint_does_nothing"
LOWERS_GOOD_CALLS = "hint_lowers_good_calls_too"
NO_OTHER_KIND = "no_hint_of_another_kind"
# With fewer sites than this, all of them could pass by chance.
_MIN_SITES = 4


class DecidedCall(NamedTuple):
    """A turn with a call, the rendering that contains it, and the tokens that decide the call."""

    rendered: RenderedSequence
    span: TurnSpan
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvableSite:
    """An erring turn with its hint, the kind of its error, and the rendering that contains it.

    Without a `decision`, the whole call is scored. `good_calls` are calls that the hint should not make less likely.
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
    """The result of the hint check for one site, with mean log-probs per token of the erring call and of good calls.

    Only the tokens that decide a call are scored. `basis` says which tokens of the erring call these are (see
    `Decision`), and `num_tokens` how many. The log-probs of good calls are means over `num_good_calls` calls, of which
    `num_good_elsewhere` are from other sessions. They are None if there are no good calls.
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
        """How much more the own hint lowers the erring call's log-prob than an unrelated hint, in nats/token."""
        return None if self.with_other_hint is None else self.with_other_hint - self.with_hint

    @property
    def good_effect(self) -> float | None:
        """The change in the log-prob of good calls under the site's own hint, in nats/token; positive if it rises."""
        if self.good_with_hint is None or self.good_without_hint is None:
            return None
        return self.good_with_hint - self.good_without_hint

    @property
    def advantage_over_good(self) -> float | None:
        """How much more the own hint lowers the erring call's log-prob than that of good calls, in nats/token."""
        good_effect = self.good_effect
        return None if good_effect is None else self.without_hint - self.with_hint + good_effect


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
    stored: Sequence[HintProof] = (),
    on_proof: Callable[[HintProof], None] | None = None,
) -> list[HintProof]:
    """Return one result per site, in order. A site is rejected if no site with a different kind of error has a hint.

    `max_context` limits the number of tokens before a turn. All calls that are scored for a site share this context in
    one tree. Good calls that are further than half of it before the site, or in another sequence, get a context of
    their own, which is half as long. `stored` results from an earlier call with the same arguments are reused.
    `on_proof` is called with every new result.
    """
    if margin < 0:
        raise InputError(explain("margin", got=margin, expected="0 or more nats"))
    # Chosen among all sites, so that the choice does not depend on which proofs are stored.
    other_sites = draw_unrelated_hints(sites, [site.kind for site in sites], seed=seed)
    by_site = {proof.site_id: proof for proof in stored}
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
    """Return whether a call precedes a site in the same sequence by at most half of `max_context` tokens."""
    return 0 <= site.header_start - call.header_start <= max_context // 2


class _Scores:
    """Computes the mean log-probs per token of one site's erring call and good calls, in one pass."""

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
        self.decision = site.decision or find_decision(renderer, site.rendered, site.span, None)
        self._own = DecidedCall(site.rendered, site.span, self.decision)
        self._max_context = max_context

    def of(self, hints: Sequence[str]) -> tuple[list[float], list[tuple[DecidedCall, float, float]]]:
        """Return the means of the erring call under each hint, and of each good call without and with the own hint."""
        erring = [self._responses(self._own, hint) for hint in hints]
        for variant, hint in zip(erring, hints, strict=True):
            if isinstance(variant, str):
                what = f"hint of site {self._site.site_id}" if hint else f"turn of site {self._site.site_id}"
                raise InputError(explain(what, got=variant, expected="a turn that can be trained on"))
        # Good calls that cannot be rendered with the hint are skipped; only the erring call must work.
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
        """Return one response for each stretch of a call's deciding tokens, after the hint.

        If the call cannot be rendered with the hint, return the reason as a string.
        """
        first = self._first_token(call)
        turn = hinted_turn(self._renderer, call.rendered, call.span, hint, placement=self._placement, first=first)
        if isinstance(turn, str):
            return turn
        # Positions of the decision refer to the rendering; `shift` translates them to the hinted context.
        shift, ids = turn.teacher_start - turn.start, turn.context.ids
        text_length = 0 if self._part == "call" or call.span.call_start is None else call.span.call_start - turn.start
        # With part="turn" the words before the call are left out.
        before, at_once = ids[: turn.teacher_start], ids[turn.teacher_start + text_length :]
        from_there = shift - turn.teacher_start - text_length
        return [
            ([*before, *at_once[: end + from_there]], begin + shift - text_length)
            for begin, end in call.decision.stretches
        ]

    def _first_token(self, call: DecidedCall) -> int:
        """Return the index at which the call's context begins; calls near the site share the site's context."""
        if self._max_context is None:
            return 0
        if call.rendered is self._own.rendered and is_near(call.span, self._own.span, self._max_context):
            return max(0, self._own.span.header_start - self._max_context)
        return max(0, call.span.header_start - self._max_context // 2)

    def _means(self, response_groups: Sequence[list[Response]]) -> list[float]:
        # One pass for all groups, since they share most of their contexts.
        sums = iter(
            response_logprobs(self._model, [response for group in response_groups for response in group]).tolist()
        )
        sizes = [[len(ids) - start for ids, start in group] for group in response_groups]
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
        # Set by `_judged`, from the properties of the proof.
        is_kept=False,
        reason="",
    )
    return _judged(proof, margin)


def _judged(proof: HintProof, margin: float) -> HintProof:
    if proof.advantage is None:
        return replace(proof, reason=NO_OTHER_KIND)
    if _exceeds_margin(proof.advantage, proof.advantage_over_good, margin):
        return replace(proof, is_kept=True, reason="kept")
    # If the comparison with the unrelated hint succeeded, the comparison with good calls must have failed.
    return replace(proof, reason=LOWERS_GOOD_CALLS if proof.advantage > margin else HINT_DOES_NOTHING)


def _exceeds_margin(over_other: float | None, over_good: float | None, margin: float = 0.0) -> bool:
    """Return whether the site's own hint lowers the error by more than `margin` in every available comparison."""
    return over_other is not None and over_other > margin and (over_good is None or over_good > margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HintVerdict:
    """The verdict on whether a model reacts to the hints in some logs, over all sites that could be compared.

    The model reacts to hints if the sites' own hints win all comparisons at more than half of the sites, and at more
    sites than chance would explain (by two standard deviations). If hints had no effect, a hint would win at half of
    the sites without good calls, where there is one comparison, and at a third of those with good calls, where there
    are two.
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
        """The expected number of sites at which the own hint would win if hints had no effect."""
        return self.num_with_good / 3 + (self.num_sites - self.num_with_good) / 2

    @property
    def num_needed(self) -> int:
        """The minimum number of sites at which the own hint must win for the model to count as reacting to hints."""
        # Variances of a Bernoulli variable: 1/3 * 2/3 = 2/9 with good calls, 1/4 without.
        deviation = math.sqrt(self.num_with_good * 2 / 9 + (self.num_sites - self.num_with_good) / 4)
        return max(self.num_sites // 2 + 1, math.ceil(self.by_chance + 2 * deviation))

    @property
    def heeds(self) -> bool | None:
        """Whether the model reacts to hints more than by chance, or None if there are too few sites to tell."""
        return None if self.num_sites < _MIN_SITES else self.over_both >= self.num_needed

    def summary(self, *, can_warm_up: bool = True) -> str:
        """Return one sentence with the verdict, the measurements, and advice if the model does not react to hints."""
        if self.heeds is None:
            return f"cannot tell whether this model reacts to hints: only {self.num_sites} sites could be compared"
        if self.heeds:
            return f"this model reacts to hints on these logs: {self._measurements()}"
        comparisons = "both comparisons hold" if self.num_with_good else "the comparison holds"
        chance = f"by chance: {self.by_chance:.0f}; needed: {self.num_needed}"
        advice = "warm up first (train.warmup), " if can_warm_up else ""
        return (
            f"this model does not react to hints on these logs beyond chance: {comparisons} at {self.over_both} sites "
            f"({chance}): {self._measurements()}. "
            f"Channel 2 has little to teach: {advice}use a larger model, or rely on pairs (channel 3)"
        )

    def _measurements(self) -> str:
        share = _share(self.over_other, self.num_sites)
        text = f"own hints lower the erring decision more than unrelated hints at {share}"
        if self.good_effect is not None:
            text += f", and more than good calls at {_share(self.over_good, self.num_with_good)}"
            if self.num_elsewhere:  # sites without an earlier good call in their session
                text += f" ({self.num_elsewhere} compared with good calls of other sessions)"
            text += f"; good calls change by {self.good_effect:+.2f} nats/token"
        if self.num_with_good < self.num_sites:
            text += f"; {self.num_sites - self.num_with_good} sites have no good call to compare with"
        return text


def verdict(proofs: Sequence[HintProof]) -> _HintVerdict:
    """Return the verdict over all sites that could be compared, whether they were kept or not; margins are ignored."""
    compared = [proof for proof in proofs if proof.advantage is not None]
    with_good = [proof for proof in compared if proof.good_effect is not None]
    effects = [proof.good_effect or 0.0 for proof in with_good]
    return _HintVerdict(
        num_sites=len(compared),
        over_other=sum((proof.advantage or 0.0) > 0 for proof in compared),
        num_with_good=len(with_good),
        num_elsewhere=sum(proof.num_good_elsewhere > 0 for proof in with_good),
        over_good=sum((proof.advantage_over_good or 0.0) > 0 for proof in with_good),
        over_both=sum(_exceeds_margin(proof.advantage, proof.advantage_over_good) for proof in compared),
        good_effect=fmean(effects) if effects else None,
    )


def _share(number: int, total: int) -> str:
    return f"{number / total:.0%} of {total} sites"
