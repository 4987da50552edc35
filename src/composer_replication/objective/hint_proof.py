"""Does a hint do anything? An erring call is scored without a hint, with its own, and with that of another kind.

Any text in front of a turn lowers its probability a little, so a hint has to lower it by more than the hint of a site
of another kind does:

    drop(hint) = log p(call) - log p(call | hint)        kept if drop(own) - drop(other) > margin

The span is the call alone, tool name and arguments (the whole turn where there is no call): reasoning would dilute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.taught_turns import hinted_turn, wrong_hints
from composer_replication.errors import InputError, explain
from composer_replication.objective.reference import Response, response_logprobs

HINT_DOES_NOTHING = "hint_does_nothing"
NO_OTHER_KIND = "no_hint_of_another_kind"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvableSite:
    """An erring turn in its rendering, its hint, and its kind of error."""

    site_id: str
    rendered: RenderedSequence
    span: TurnSpan
    hint: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HintProof:
    """Log-probs of the erring call, summed over its tokens, and what they mean for the site."""

    site_id: str
    num_tokens: int
    without_hint: float
    with_hint: float
    with_other_hint: float | None
    other_kind: str | None
    is_kept: bool
    reason: str

    @property
    def advantage(self) -> float | None:
        """How much more its own hint lowers the call than another's does, in nats."""
        return None if self.with_other_hint is None else self.with_other_hint - self.with_hint


def prove_hints(
    model: nn.Module,
    renderer: Renderer,
    sites: Sequence[ProvableSite],
    *,
    margin: float = 0.0,
    placement: Placement = "before_turn",
    max_context: int | None = None,
    seed: int = 0,
    known: Sequence[HintProof] = (),
    on_proof: Callable[[HintProof], None] | None = None,
) -> list[HintProof]:
    """One proof a site, in order. A site without one of another kind beside it cannot be proved, and is not kept.

    `max_context` cuts what stands before the turn; the three variants of a site share the rest in one tree. `known` are
    proofs from an earlier call like this one, found by the site's id; `on_proof` is told of each that is made.
    """
    if margin < 0:
        raise InputError(explain("margin", got=margin, expected="0 or more nats"))
    others = wrong_hints(sites, [site.kind for site in sites], seed=seed)
    by_site = {proof.site_id: proof for proof in known}
    proofs: list[HintProof] = []
    for site, other in zip(sites, others, strict=True):
        if site.site_id in by_site:
            proofs.append(by_site[site.site_id])
            continue
        variants = [_variant(renderer, site, hint, placement, max_context) for hint in ("", site.hint)]
        if other is not None:
            variants.append(_variant(renderer, site, other.hint, placement, max_context))
        found = response_logprobs(model, variants).tolist()
        proofs.append(_proof(site, other, found, len(variants[0][0]) - variants[0][1], margin))
        if on_proof is not None:
            on_proof(proofs[-1])
    return proofs


def count_reasons(proofs: Sequence[HintProof]) -> Counter[str]:
    """How many sites were kept, and why the others were not."""
    return Counter(proof.reason for proof in proofs)


def _variant(
    renderer: Renderer, site: ProvableSite, hint: str, placement: Placement, max_context: int | None
) -> Response:
    """The context with a hint, up to the end of the call; and where the call begins."""
    first = 0 if max_context is None else max(0, site.span.header_start - max_context)
    turn = hinted_turn(renderer, site.rendered, site.span, hint, placement=placement, part="call", first=first)
    if isinstance(turn, str):
        raise InputError(explain(f"hint of site {site.site_id}", got=turn, expected="a turn that can be taught"))
    return turn.ids, turn.teacher_start


def _proof(
    site: ProvableSite, other: ProvableSite | None, found: list[float], num_tokens: int, margin: float
) -> HintProof:
    with_other = found[2] if other is not None else None
    is_kept = with_other is not None and with_other - found[1] > margin
    reason = "kept" if is_kept else NO_OTHER_KIND if with_other is None else HINT_DOES_NOTHING
    return HintProof(
        site_id=site.site_id,
        num_tokens=num_tokens,
        without_hint=found[0],
        with_hint=found[1],
        with_other_hint=with_other,
        other_kind=None if other is None else other.kind,
        is_kept=is_kept,
        reason=reason,
    )
