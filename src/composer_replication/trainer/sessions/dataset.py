"""Logged sessions as a data set: conversations, sites and pairs in, tree batches out, drops accounted for."""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_replication.batch.hint_placement import Placement, hinted_turn, wrong_hints
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.session_batch import SiteHint, session_batches
from composer_replication.batch.tree_batch import CHANNELS, TreeBatch
from composer_replication.batch.windows import plan_packs
from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.files import LoggedPair
from composer_replication.trainer.objective.fingerprint import precision_of
from composer_replication.trainer.objective.hint_proof import HintProof
from composer_replication.trainer.sessions.proof import ProofSettings, prove_sites
from composer_replication.trainer.sessions.reference import reference_logprobs_of_batches
from composer_replication.trainer.sessions.rendering import (
    LoggedSession,
    RenderedSession,
    WindowSettings,
    read_sessions,
    render_session,
)
from composer_replication.trainer.sessions.stored_windows import SessionItem, StoredWindow, store_window
from composer_replication.types import Conversation

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.rendering import (
        KeptPair,
        KeptSite,
        RenderedSession,
        WindowSettings,
    )

__all__ = ["LoggedPair", "LoggedSession", "LoggedSessions", "SessionItem", "sessions_of_run"]


def sessions_of_run(run: RunDir, *, budget: int, **settings: Any) -> tuple[Iterator[LoggedSession], WindowSettings]:
    """The sessions of a run directory with what these settings need of its sites and, where it has some, its pairs."""
    settings.setdefault("use_pairs", run.path("pairs").exists())
    chosen = WindowSettings(budget=budget, **settings)
    has_sites = chosen.responses == "all" and run.path("sites").exists()
    needs_sites = chosen.use_sites or chosen.responses == "good" or has_sites
    # A turn that a pair rejects is not a good one, whether or not channel 3 is on.
    needs_pairs = chosen.use_pairs or (chosen.responses != "none" and run.is_current("pairs"))
    return read_sessions(run, with_sites=needs_sites, with_pairs=needs_pairs), chosen


class LoggedSessions(torch.utils.data.Dataset[TreeBatch]):
    """Windows of logged sessions, small until they are asked for; see `from_run` and `from_sessions`.

    `counts` says what there is: conversations, windows, tree tokens, sites, pairs, items of each channel, and the notes
    of `session_batches`. `drops` says what is missing, as `channel: reason`. A proof cuts the `rendered` sessions anew;
    nothing is read or rendered twice.
    """

    reference_precision: str | None = None
    """The dtype in which `with_references` computed."""

    def __init__(
        self,
        rendered: Iterable[RenderedSession],
        renderer: Renderer,
        settings: WindowSettings,
        *,
        run: RunDir | None = None,
        pack: bool = False,
        proofs: Sequence[HintProof] | None = None,
    ) -> None:
        self.rendered, self.renderer, self.settings, self.run = tuple(rendered), renderer, settings, run
        self.proofs = None if proofs is None else tuple(proofs)
        self._pack = pack
        unproved = {proof.site_id: proof.reason for proof in proofs or () if not proof.is_kept}
        cut = cut_sessions(renderer, self.rendered, settings, unproved)
        self.windows: list[StoredWindow] = cut.windows
        self.counts: Counter[str] = cut.counts
        self.drops: Counter[str] = cut.drops
        self._items = self._packed()

    @classmethod
    def from_run(
        cls,
        run: RunDir | str | os.PathLike[str],
        renderer: Renderer,
        *,
        budget: int,
        only: Callable[[Conversation], bool] | None = None,
        pack: bool = False,
        **settings: Any,
    ) -> LoggedSessions:
        """The sessions of a run directory, with its sites and, where it has some, its pairs.

        `settings` are those of `WindowSettings`. `only` chooses conversations (a held-out part, say). `pack` lets small
        windows share a tree of at most `budget` tokens.
        """
        opened = run if isinstance(run, RunDir) else RunDir.open(run)
        sessions, chosen = sessions_of_run(opened, budget=budget, **settings)
        return cls(_rendered(sessions, renderer, chosen, only), renderer, chosen, run=opened, pack=pack)

    @classmethod
    def from_sessions(
        cls,
        sessions: Sequence[LoggedSession],
        renderer: Renderer,
        *,
        budget: int,
        only: Callable[[Conversation], bool] | None = None,
        pack: bool = False,
        **settings: Any,
    ) -> LoggedSessions:
        """The same of sessions in memory."""
        chosen = WindowSettings(budget=budget, **settings)
        return cls(_rendered(sessions, renderer, chosen, only), renderer, chosen, pack=pack)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> TreeBatch:
        return self._items[index].batch()

    @property
    def items(self) -> list[SessionItem]:
        """What the numbers stand for, as it is stored."""
        return self._items

    def batches(self, device: str | torch.device = "cpu") -> Iterator[TreeBatch]:
        """A tree batch of every item, in order, one at a time."""
        return (item.batch(device) for item in self._items)

    @property
    def channels(self) -> dict[str, int]:
        """Items of each channel in all windows."""
        return {name: self.counts[name] for name in CHANNELS}

    @property
    def models(self) -> frozenset[str]:
        """Names of the models that wrote the sessions' turns."""
        return frozenset(name for session in self.rendered for name in session.models)

    @property
    def digest(self) -> str:
        """Of every tree's tokens and of what counts in them: a run goes on with the same data or not at all."""
        hasher = hashlib.sha256()
        for item in self._items:
            for window in item.windows:
                small = window.small
                hasher.update(f"{window.conversation_id}:{window.first}:{window.end}".encode())
                for rows in (small.tree.input_ids, small.response.rows, small.student_rows, small.teacher_rows):
                    hasher.update(rows.numpy().tobytes())
                if small.pairs is not None:
                    hasher.update(small.pairs.rows.numpy().tobytes())
        return hasher.hexdigest()

    @property
    def longest_tree(self) -> int:
        """Tokens of the largest item: what memory must be planned for."""
        return max((item.num_tokens for item in self._items), default=0)

    @property
    def has_references(self) -> bool:
        return all(window.has_references for window in self.windows)

    def prove(
        self,
        model: nn.Module,
        margin: float = 0.0,
        *,
        max_context: int | None = None,
        seed: int = 0,
        with_adapter: bool = False,
    ) -> LoggedSessions:
        """Without the sites whose hint does not lower the erring decision by `margin` nats a token more than another's
        hint does and than good calls.

        The figures are in `proofs` and, for a run directory, in its `hint_proof.jsonl`; figures that are there already
        and belong to these weights (with `with_adapter`, to these with their adapter), sites and settings are not
        computed again. `max_context` tokens before a turn are scored; without a number, `budget`.
        """
        used = {site_id for window in self.windows for site_id in window.site_ids}
        sites = [site for session in self.rendered for site in session.sites if site.site.id in used]
        context = self.settings.budget if max_context is None else max_context
        settings = self.settings
        options = ProofSettings(
            margin=margin, placement=settings.placement, part=settings.part, max_context=context, seed=seed
        )
        good = [call for session in self.rendered for call in session.good_calls]
        proofs = prove_sites(model, self.renderer, sites, good, options, self.run, with_adapter=with_adapter)
        return self.with_proofs(proofs)

    def with_proofs(self, proofs: Sequence[HintProof]) -> LoggedSessions:
        """Cut again without the sites that these proofs do not keep. References have to be computed again."""
        return type(self)(self.rendered, self.renderer, self.settings, run=self.run, pack=self._pack, proofs=proofs)

    def shuffled(self, seed: int = 0) -> LoggedSessions:
        """The control of these sessions: hints of another kind, half of the pairs turned; proofs stay those of the
        right hints."""
        rendered = _shuffle_sessions(self.rendered, seed=seed)
        return type(self)(rendered, self.renderer, self.settings, run=self.run, pack=self._pack, proofs=self.proofs)

    def with_references(
        self, model: nn.Module, path: str | Path | None = None, *, with_adapter: bool = False
    ) -> LoggedSessions:
        """With reference log-probs of all pairs under the start weights, in the windows' own contexts.

        With `with_adapter` these are the weights with the adapter that is on them, else those below it. They are stored
        at `path`, by default the run's `ref_logprobs.safetensors`; what is there is taken over if it belongs to these
        weights, this tokenizer, this template and this precision (autocast's, where it is on).
        """
        where = self.run.path("ref_logprobs") if path is None and self.run is not None else path
        pairs = [window.pair_ids() for window in self.windows]
        device = next(model.parameters()).device
        batches = (
            ([pair for window in item.windows for pair in window.pair_ids()], partial(item.batch, device))
            for item in self._items
        )
        options: dict[str, Any] = {"path": where, "with_adapter": with_adapter}
        store = reference_logprobs_of_batches(model, self.renderer, batches, **options)
        looked_up = [[store.lookup(*pair.chosen, *pair.rejected) for pair in window_pairs] for window_pairs in pairs]
        sessions = self._with_windows([w.with_references(r) for w, r in zip(self.windows, looked_up, strict=True)])
        sessions.reference_precision = store.fingerprint.precision
        return sessions

    def check_references(self, model: nn.Module) -> None:
        """References that are there are in the precision of the steps, under whose autocast this is called."""
        reference_precision, used = self.reference_precision, precision_of(model)
        if reference_precision is not None and reference_precision != used:
            fix = "Give the sessions without references, which the trainer computes, or make them under autocast."
            raise StaleArtefactError(
                explain("reference log-probs", got=f"those of {reference_precision}", expected=used, fix=fix)
            )

    def without_responses(self) -> LoggedSessions:
        """With no target for channel 1, where its weight is 0."""
        bare = [window.without_responses() for window in self.windows]
        sessions = self._with_windows([window for window in bare if any(window.counts().values())])
        sessions.counts = self.counts.copy()
        sessions.counts[CHANNELS[0]] = 0
        return sessions

    def only_responses(self, *, hinted_corrections: bool = False) -> LoggedSessions:
        """Cut again for channel 1 alone: without hinted contexts and pairs, which a warm-up has no use for.

        With `hinted_corrections` what worked after an erring turn is a response too, in the context with its hint.
        """
        sessions = self.rendered
        if hinted_corrections:
            placement = self.settings.placement
            sessions = [with_hinted_corrections(self.renderer, session, placement=placement) for session in sessions]
        bare = [replace(session, sites=[], pairs=[], hints=[]) for session in sessions]
        return type(self)(bare, self.renderer, self.settings, pack=self._pack)

    def require_items(self) -> None:
        """Raise where there is nothing to learn from."""
        if not self._items:
            got = (
                f"no window with a target in {self.counts['conversations']} conversations; dropped: {dict(self.drops)}"
            )
            fix = "Check the budget, and what `crf sites` and `crf pairs` kept."
            raise InputError(explain("logged sessions", got=got, expected="at least one", fix=fix))

    def _with_windows(self, windows: list[StoredWindow]) -> LoggedSessions:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.windows = windows
        copy._items = copy._packed()
        return copy

    def _packed(self) -> list[SessionItem]:
        if not self._pack:
            return [SessionItem((window,)) for window in self.windows]
        packs = plan_packs([window.num_tokens for window in self.windows], self.settings.budget)
        return [SessionItem(tuple(self.windows[number] for number in pack)) for pack in packs]


def _rendered(
    sessions: Iterable[LoggedSession],
    renderer: Renderer,
    settings: WindowSettings,
    only: Callable[[Conversation], bool] | None,
) -> Iterator[RenderedSession]:
    return (
        render_session(renderer, session, settings)
        for session in sessions
        if only is None or only(session.conversation)
    )


# Rendered sessions cut into windows, each one tree; it is cheap, and done again when a proof drops sites.

_, _SITES, _PAIRS = CHANNELS


@dataclass(eq=False, slots=True)
class _CutSessions:
    """Windows of sessions; what there is, and what was dropped, by channel and reason."""

    windows: list[StoredWindow] = field(default_factory=list[StoredWindow])
    counts: Counter[str] = field(default_factory=Counter[str])
    drops: Counter[str] = field(default_factory=Counter[str])


def cut_sessions(
    renderer: Renderer,
    sessions: Iterable[RenderedSession],
    settings: WindowSettings,
    unproved: Mapping[str, str] | None = None,
) -> _CutSessions:
    """The windows of all sessions, in order; `unproved` are sites that a proof has dropped, and why."""
    sessions, cut = list(sessions), _CutSessions()
    wrong = _wrong_hints(sessions) if settings.contrast else {}
    for session in sessions:
        cut.counts.update(session.counts)
        cut.drops.update(session.drops)
        _cut(renderer, session, settings, unproved or {}, wrong, cut)
    return cut


def _wrong_hints(sessions: Iterable[RenderedSession]) -> dict[str, str | None]:
    """For each site that may teach the hint of one of another kind, by the site's id."""
    hints = [hint for session in sessions for hint in session.hints]
    wrong = wrong_hints([text for _, _, text in hints], [kind for _, kind, _ in hints])
    return {site_id: text for (site_id, _, _), text in zip(hints, wrong, strict=True)}


def _cut(
    renderer: Renderer,
    session: RenderedSession,
    settings: WindowSettings,
    unproved: Mapping[str, str],
    wrong: Mapping[str, str | None],
    into: _CutSessions,
) -> None:
    into.drops.update(f"{_SITES}: {unproved[site.site.id]}" for site in session.sites if site.site.id in unproved)
    for number, rendered in enumerate(session.sequences):
        sites = [site for site in session.sites if site.rendered is rendered and site.site.id not in unproved]
        pairs = [pair for pair in session.pairs if pair.rendered is rendered]
        batches = session_batches(
            renderer,
            rendered,
            budget=settings.budget,
            overlap=settings.overlap,
            responses=[span for span in rendered.spans if span.turn_id in session.responses],
            sites=[SiteHint(site.span, site.hint, wrong.get(site.site.id)) for site in sites],
            pairs=[pair.tokens() for pair in pairs],
            placement=settings.placement,
            part=settings.part,
            max_length=settings.max_length,
        )
        dropped = Counter(batches.dropped.values())
        into.counts.update({name: n for name, n in batches.counts.items() if name not in dropped})
        into.drops.update(f"{item.channel}: {reason}" for item, reason in batches.dropped.items())
        for window in batches.windows:
            stored = store_window(
                window.batch,
                conversation_id=session.conversation_id,
                sequence=number,
                span=(window.first, window.end),
                site_ids=[sites[item.number].site.id for item in window.items if item.channel == _SITES],
                state_ids=[pairs[item.number].state_id for item in window.items if item.channel == _PAIRS],
            )
            into.windows.append(stored)
            sizes = {"sites": len(stored.site_ids), "pairs": len(stored.state_ids)}
            into.counts.update(stored.counts() | sizes | {"windows": 1, "tree_tokens": stored.num_tokens})


# Hint, then what worked: the corrections of erring turns as turns for channel 1, in the context with the site's hint.
#
# A small model that has never seen a hint does not heed one. These turns show it what a hint is followed by; they are
# for a warm-up, since the steps after it teach what to do *without* a hint.

HINTED_CORRECTIONS = "hinted_corrections"
OTHER_CONTEXT = "correction_in_another_context"
_SOURCES = frozenset({"correction", "user"})
_RESPONSES = CHANNELS[0]


def with_hinted_corrections(
    renderer: Renderer, session: RenderedSession, *, placement: Placement = "before_turn"
) -> RenderedSession:
    """The session with a sequence more for every site that has a correction; what cannot be is among the drops."""
    sequences: list[RenderedSequence] = []
    drops: Counter[str] = Counter()
    for site in session.sites:
        for pair in session.pairs:
            if not _is_of(pair, site):
                continue
            corrected = _sequence(renderer, site, pair, placement, f"{site.site.id}:{len(sequences)}")
            if isinstance(corrected, str):
                drops[f"{_RESPONSES}: {corrected}"] += 1
            else:
                sequences.append(corrected)
    return replace(
        session,
        sequences=[*session.sequences, *sequences],
        responses=session.responses | {sequence.spans[-1].turn_id for sequence in sequences},
        counts=session.counts + Counter({HINTED_CORRECTIONS: len(sequences)}),
        drops=session.drops + drops,
    )


def _is_of(pair: KeptPair, site: KeptSite) -> bool:
    """Whether the pair's rejected side is the site's turn, and its chosen one what the session itself made of it."""
    is_correction = pair.kind.partition(" ")[0] in _SOURCES
    return is_correction and pair.rendered is site.rendered and pair.turn_id == site.span.turn_id


def _sequence(
    renderer: Renderer, site: KeptSite, pair: KeptPair, placement: Placement, name: str
) -> RenderedSequence | str:
    """The session up to the turn, the hint, and the correction; or why not."""
    chosen, span = pair.chosen, site.span
    if (chosen.num_shared, chosen.start) != (span.start, span.start):
        return OTHER_CONTEXT
    hinted = hinted_turn(renderer, site.rendered, span, site.hint, placement=placement)
    if isinstance(hinted, str):
        return hinted
    context = hinted.context
    ids = [*context.ids[: context.start], *chosen.rest]
    before = [turn_span for turn_span in site.rendered.spans if turn_span.end <= context.hint_start]
    corrected = TurnSpan(
        turn_id=f"{name}:corrected",
        header_start=context.start - (span.start - span.header_start),
        start=context.start,
        end=len(ids),
        call_start=None,
        call_end=None,
        text="",
        previous_role=span.previous_role,
        is_verbatim=False,
    )
    return RenderedSequence(
        conversation_id=site.rendered.conversation_id, ids=ids, spans=[*before, corrected], notes={}
    )


# A control for channels 2 and 3: the same sites with hints about something else, the same pairs turned by a coin.
#
# What such a training does to a model is what any training of this size does. Only what the real one does beyond it
# belongs to what the hints and the pairs say.

_, _SHUFFLED_SITES, _ = CHANNELS
NO_OTHER_KIND = "no_hint_of_another_kind"
TURNED = "turned_pairs"


def _shuffle_sessions(sessions: Iterable[RenderedSession], *, seed: int = 0) -> list[RenderedSession]:
    """Each site with the hint of one of another kind; of the pairs, and of each kind of them, half turned round.

    A site that has none of another kind beside it is left out, and counted. Nothing else changes.
    """
    sessions = list(sessions)
    sites = [site for session in sessions for site in session.sites]
    wrong = iter(wrong_hints([site.hint for site in sites], [site.site.kind for site in sites], seed=seed))
    turned = _turned([pair for session in sessions for pair in session.pairs], seed)
    return [_shuffled(session, [next(wrong) for _ in session.sites], turned) for session in sessions]


def _shuffled(session: RenderedSession, hints: list[str | None], turned: set[int]) -> RenderedSession:
    sites = [site._replace(hint=hint) for site, hint in zip(session.sites, hints, strict=True) if hint is not None]
    drops = session.drops.copy()
    if len(sites) < len(session.sites):
        drops[f"{_SHUFFLED_SITES}: {NO_OTHER_KIND}"] += len(session.sites) - len(sites)
    counts = session.counts.copy()
    counts[TURNED] = sum(id(pair) in turned for pair in session.pairs)  # also where none is: it is a control
    pairs = [
        pair._replace(chosen=pair.rejected, rejected=pair.chosen) if id(pair) in turned else pair
        for pair in session.pairs
    ]
    return replace(session, sites=sites, pairs=pairs, counts=counts, drops=drops)


def _turned(pairs: list[KeptPair], seed: int) -> set[int]:
    """Which pairs are turned: one of every two, which are of one kind wherever that is possible."""
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    order = sorted(pairs, key=lambda pair: (pair.kind, draw.random()))
    couples = [order[at : at + 2] for at in range(0, len(order), 2)]
    return {id(draw.choice(couple)) for couple in couples if len(couple) == 2}
