"""Turn logged sessions into a data set of tree batches, and count everything that is dropped on the way.

Sessions are rendered once (`rendering`), cut into windows of at most `budget` tokens, and stored compactly with small
integer types. Cutting is cheap, so it is repeated when a hint check drops sites, for a control, and for a warm-up.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.batch.hint_placement import Placement, draw_unrelated_hints, hinted_turn
from composer_replication.batch.pair_tokens import PairIds, ResponseIds
from composer_replication.batch.render.renderer import RenderedSequence, Renderer, TurnSpan
from composer_replication.batch.session_batch import SiteHint, session_batches
from composer_replication.batch.tree import TokenTree
from composer_replication.batch.tree_batch import CHANNELS, TargetRows, TreeBatch, map_tensors, pack_batches
from composer_replication.batch.windows import plan_packs
from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.files import LoggedPair
from composer_replication.trainer.objective.fingerprint import compute_precision
from composer_replication.trainer.objective.hint_proof import HintProof
from composer_replication.trainer.sessions.proof import run_hint_check
from composer_replication.trainer.sessions.reference import reference_logprobs_of_batches
from composer_replication.trainer.sessions.rendering import (
    KeptPair,
    KeptSite,
    LoggedSession,
    RenderedSession,
    WindowSettings,
    read_sessions,
    render_session,
)
from composer_replication.types import Conversation

__all__ = ["LoggedPair", "LoggedSession", "LoggedSessions", "SessionItem", "sessions_of_run"]

_RESPONSES, _SITES, _PAIRS = CHANNELS
HINTED_CORRECTIONS = "hinted_corrections"
OTHER_CONTEXT = "correction_in_another_context"
# Sources of pairs whose chosen side comes from the session itself rather than from a teacher.
_CORRECTION_SOURCES = frozenset({"correction", "user"})
NO_OTHER_KIND = "no_hint_of_another_kind"
SWAPPED_PAIRS = "turned_pairs"


def sessions_of_run(run: RunDir, *, budget: int, **settings: Any) -> tuple[Iterator[LoggedSession], WindowSettings]:
    """Return the run's sessions, with the sites and pairs that the settings require, and the settings."""
    settings.setdefault("use_pairs", run.path("pairs").exists())
    chosen = WindowSettings(budget=budget, **settings)
    # "all" excludes turns with an error site, provided that sites have been found.
    has_sites = chosen.responses == "all" and run.path("sites").exists()
    needs_sites = chosen.use_sites or chosen.responses == "good" or has_sites
    # A turn rejected by a pair is not a good turn, whether or not channel 3 is on.
    needs_pairs = chosen.use_pairs or (chosen.responses != "none" and run.is_current("pairs"))
    return read_sessions(run, with_sites=needs_sites, with_pairs=needs_pairs), chosen


class LoggedSessions(torch.utils.data.Dataset[TreeBatch]):
    """Windows of logged sessions, stored compactly and built into batches on demand.

    Create it with `from_run` or `from_sessions`. `counts` has the numbers of conversations, windows, tree tokens,
    sites, pairs and items of each channel, and the notes from `session_batches`. `drops` counts what was left out, as
    `channel: reason`. Methods that change the data return new `LoggedSessions`; sessions are never read or rendered
    twice.
    """

    reference_precision: str | None = None
    """The dtype in which `with_references` computed the reference log-probs."""

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
        """Create the data set from the sessions in a run directory, with their sites and any pairs.

        `settings` are those of `WindowSettings`. `only` selects conversations, for example one part of the split. With
        `pack`, small windows share a tree of at most `budget` tokens.
        """
        opened = run if isinstance(run, RunDir) else RunDir.open(run)
        sessions, chosen = sessions_of_run(opened, budget=budget, **settings)
        return cls(_render_sessions(sessions, renderer, chosen, only), renderer, chosen, run=opened, pack=pack)

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
        """Create the data set from sessions in memory; the options are those of `from_run`."""
        chosen = WindowSettings(budget=budget, **settings)
        return cls(_render_sessions(sessions, renderer, chosen, only), renderer, chosen, pack=pack)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> TreeBatch:
        return self._items[index].batch()

    @property
    def items(self) -> list[SessionItem]:
        """The stored items, in the order of their indices."""
        return self._items

    def batches(self, device: str | torch.device = "cpu") -> Iterator[TreeBatch]:
        """Yield the tree batch of every item, in order."""
        return (item.batch(device) for item in self._items)

    @property
    def channels(self) -> dict[str, int]:
        """The number of items of each channel in all windows."""
        return {name: self.counts[name] for name in CHANNELS}

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that wrote the turns in these sessions."""
        return frozenset(name for session in self.rendered for name in session.models)

    @property
    def digest(self) -> str:
        """A hash of all tokens and target rows; a run is only resumed if its data set has the same hash."""
        # Target rows are included, because the same tokens with other targets are different data.
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
        """The number of tokens in the largest item, which must fit into memory."""
        return max((item.num_tokens for item in self._items), default=0)

    @property
    def has_references(self) -> bool:
        """Whether all pairs have reference log-probs."""
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
        """Return the sessions without the sites whose hints fail the hint check.

        To pass, a hint has to lower the log-prob of the erring decision by `margin` nats/token more than an unrelated
        hint does, and by `margin` nats/token more than it lowers the log-prob of good calls. The results are in
        `proofs` and, for a run directory, in `hint_proof.jsonl`. Stored results are reused if the weights (including
        the adapter, if `with_adapter`), the sites and the settings are the same. `max_context` limits the number of
        tokens before a turn; None means `budget`.
        """
        used = {site_id for window in self.windows for site_id in window.site_ids}
        sites = [site for session in self.rendered for site in session.sites if site.site.id in used]
        context = self.settings.budget if max_context is None else max_context
        settings = self.settings
        options = {"margin": margin, "placement": settings.placement, "part": settings.part}
        options |= {"max_context": context, "seed": seed}
        good = [call for session in self.rendered for call in session.good_calls]
        proofs = run_hint_check(model, self.renderer, sites, good, options, self.run, with_adapter=with_adapter)
        return self.with_proofs(proofs)

    def with_proofs(self, proofs: Sequence[HintProof]) -> LoggedSessions:
        """Return the sessions without the sites that these hint check results reject.

        The returned sessions have no reference log-probs; call `with_references` to compute them.
        """
        return type(self)(self.rendered, self.renderer, self.settings, run=self.run, pack=self._pack, proofs=proofs)

    def shuffled(self, seed: int = 0) -> LoggedSessions:
        """Return the control for these sessions, with unrelated hints and with half of the pairs swapped.

        The control keeps the hint check results of the original hints.
        """
        rendered = _shuffle_sessions(self.rendered, seed=seed)
        return type(self)(rendered, self.renderer, self.settings, run=self.run, pack=self._pack, proofs=self.proofs)

    def with_references(
        self, model: nn.Module, path: str | Path | None = None, *, with_adapter: bool = False
    ) -> LoggedSessions:
        """Return the sessions with the log-probs of all pairs under the initial model, in their windows' contexts.

        The adapter is part of the initial model only if `with_adapter` is true. The log-probs are stored at `path`, by
        default in the run's `ref_logprobs.safetensors`. Stored values are reused if they were computed with the same
        weights, tokenizer and template, and in the same precision (that of autocast, if it is on).
        """
        store_path = self.run.path("ref_logprobs") if path is None and self.run is not None else path
        pairs = [window.pair_ids() for window in self.windows]
        device = next(model.parameters()).device
        # A generator of functions, so that at most one batch exists at a time.
        batches = (
            ([pair for window in item.windows for pair in window.pair_ids()], partial(item.batch, device))
            for item in self._items
        )
        options: dict[str, Any] = {"path": store_path, "with_adapter": with_adapter}
        store = reference_logprobs_of_batches(model, self.renderer, batches, **options)
        looked_up = [[store.lookup(*pair.chosen, *pair.rejected) for pair in window_pairs] for window_pairs in pairs]
        sessions = self._with_windows([w.with_references(r) for w, r in zip(self.windows, looked_up, strict=True)])
        sessions.reference_precision = store.fingerprint.precision
        return sessions

    def check_references(self, model: nn.Module) -> None:
        """Raise StaleArtefactError if the reference log-probs have another precision than the training steps.

        Call this under the autocast of the steps.
        """
        reference_precision, used = self.reference_precision, compute_precision(model)
        if reference_precision is not None and reference_precision != used:
            # If references are missing, the trainer computes them itself, in its own precision.
            fix = (
                "Call with_references under the trainer's autocast, or pass sessions without references to the trainer."
            )
            raise StaleArtefactError(
                explain(
                    "reference log-probs", got=f"precision {reference_precision}", expected=f"precision {used}", fix=fix
                )
            )

    def without_responses(self) -> LoggedSessions:
        """Return the sessions without targets for channel 1, and without the windows that have no targets left."""
        bare = [window.without_responses() for window in self.windows]
        sessions = self._with_windows([window for window in bare if any(window.counts().values())])
        sessions.counts = self.counts.copy()  # `_with_windows` shares the counter
        sessions.counts[CHANNELS[0]] = 0
        return sessions

    def only_responses(self, *, hinted_corrections: bool = False) -> LoggedSessions:
        """Return the sessions for a warm-up: only the responses of channel 1, without hinted contexts and pairs.

        With `hinted_corrections`, the known corrections of erring turns become responses too, each in a context that
        contains the hint.
        """
        sessions = self.rendered
        if hinted_corrections:
            placement = self.settings.placement
            sessions = [_with_hinted_corrections(self.renderer, session, placement=placement) for session in sessions]
        bare = [replace(session, sites=[], pairs=[], hints=[]) for session in sessions]
        return type(self)(bare, self.renderer, self.settings, pack=self._pack)

    def require_items(self) -> None:
        """Raise InputError if no window has a target for any channel."""
        if not self._items:
            got = f"no training target in {self.counts['conversations']} conversations (dropped: {dict(self.drops)})"
            fix = "Raise the budget, or check the results of `crf sites` and `crf pairs`."
            raise InputError(explain("logged sessions", got=got, expected="at least one target", fix=fix))

    def _with_windows(self, windows: list[StoredWindow]) -> LoggedSessions:
        # Bypass __init__, which would cut the sessions into windows again.
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


def _render_sessions(
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


@dataclass(eq=False, slots=True)
class _CutSessions:
    """The windows of sessions, with counts of their contents and of what was dropped, by channel and reason."""

    windows: list[StoredWindow]
    counts: Counter[str]
    drops: Counter[str]


def cut_sessions(
    renderer: Renderer,
    sessions: Iterable[RenderedSession],
    settings: WindowSettings,
    unproved: Mapping[str, str] | None = None,
) -> _CutSessions:
    """Return the windows of all sessions, in order.

    `unproved` maps the id of each site that the hint check rejected to the reason.
    """
    sessions, cut = list(sessions), _CutSessions([], Counter(), Counter())
    wrong = _wrong_hints(sessions) if settings.contrast else {}
    for session in sessions:
        cut.counts.update(session.counts)
        cut.drops.update(session.drops)
        _cut_session(renderer, session, settings, unproved or {}, wrong, cut)
    return cut


def _wrong_hints(sessions: Iterable[RenderedSession]) -> dict[str, str | None]:
    """Return an unrelated hint for each site that is trained on, keyed by site id."""
    hints = [hint for session in sessions for hint in session.hints]
    wrong = draw_unrelated_hints([text for _, _, text in hints], [kind for _, kind, _ in hints])
    return {site_id: text for (site_id, _, _), text in zip(hints, wrong, strict=True)}


def _cut_session(
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
        # Items that did not fit are drops; the remaining counts are notes from `session_batches`.
        dropped = Counter(batches.dropped.values())
        into.counts.update({name: n for name, n in batches.counts.items() if name not in dropped})
        into.drops.update(f"{item.channel}: {reason}" for item, reason in batches.dropped.items())
        for window in batches.windows:
            stored = StoredWindow.from_batch(
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


def _with_hinted_corrections(
    renderer: Renderer, session: RenderedSession, *, placement: Placement = "before_turn"
) -> RenderedSession:
    """Return the session with one additional sequence for each correction of a site: context, hint, correction.

    The corrections are targets of channel 1. They teach a small model to follow hints, which it cannot do if it has
    never seen one. They are only for a warm-up; the steps after it train the model to act without hints. Corrections
    that cannot be rendered after the hint are counted as drops.
    """
    sequences: list[RenderedSequence] = []
    drops: Counter[str] = Counter()
    for site in session.sites:
        for pair in session.pairs:
            # The pair rejects the site's turn, and its chosen side comes from the session itself.
            is_correction = pair.kind.partition(" ")[0] in _CORRECTION_SOURCES
            if not (is_correction and pair.rendered is site.rendered and pair.turn_id == site.span.turn_id):
                continue
            corrected = _corrected_sequence(renderer, site, pair, placement, f"{site.site.id}:{len(sequences)}")
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


def _corrected_sequence(
    renderer: Renderer, site: KeptSite, pair: KeptPair, placement: Placement, name: str
) -> RenderedSequence | str:
    """Return the session up to the erring turn, followed by the hint and the correction.

    If such a sequence is impossible, return the reason as a string.
    """
    chosen, span = pair.chosen, site.span
    # The correction has to continue the same context as the erring turn.
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
        # The length of the turn's header is unchanged.
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


def _shuffle_sessions(sessions: Iterable[RenderedSession], *, seed: int = 0) -> list[RenderedSession]:
    """Return the control: each site gets a hint for another kind of error, and half of the pairs of each kind are
    swapped.

    Training on the control has the effects that any training of this size has, so an effect is due to the content of
    hints and pairs only as far as it is larger on the real data. Sites for which there is no hint for another kind of
    error are dropped and counted. Nothing else changes.
    """
    sessions = list(sessions)
    sites = [site for session in sessions for site in session.sites]
    wrong = iter(draw_unrelated_hints([site.hint for site in sites], [site.site.kind for site in sites], seed=seed))
    swapped = _pairs_to_swap([pair for session in sessions for pair in session.pairs], seed)
    return [_shuffle_session(session, [next(wrong) for _ in session.sites], swapped) for session in sessions]


def _shuffle_session(session: RenderedSession, hints: list[str | None], swapped: set[int]) -> RenderedSession:
    sites = [site._replace(hint=hint) for site, hint in zip(session.sites, hints, strict=True) if hint is not None]
    drops = session.drops.copy()
    if len(sites) < len(session.sites):
        drops[f"{_SITES}: {NO_OTHER_KIND}"] += len(session.sites) - len(sites)
    counts = session.counts.copy()
    counts[SWAPPED_PAIRS] = sum(id(pair) in swapped for pair in session.pairs)  # even a count of 0 marks a control
    pairs = [
        pair._replace(chosen=pair.rejected, rejected=pair.chosen) if id(pair) in swapped else pair
        for pair in session.pairs
    ]
    return replace(session, sites=sites, pairs=pairs, counts=counts, drops=drops)


def _pairs_to_swap(pairs: list[KeptPair], seed: int) -> set[int]:
    """Return the `id()` of every pair to swap.

    Pairs are grouped in twos, within their kind as far as possible, and one pair of each two is chosen at random.
    """
    draw = random.Random(seed)  # noqa: S311 (a choice, not a secret)
    order = sorted(pairs, key=lambda pair: (pair.kind, draw.random()))
    # By id(), because pairs contain lists and are not hashable.
    couples = [order[at : at + 2] for at in range(0, len(order), 2)]
    return {id(draw.choice(couple)) for couple in couples if len(couple) == 2}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StoredWindow:
    """One window of a rendered conversation: its tree, and the ids of the sites and pairs that it contains."""

    conversation_id: str
    sequence: int
    first: int
    end: int
    site_ids: tuple[str, ...]
    state_ids: tuple[str, ...]
    small: TreeBatch
    """The batch with 32-bit integers, and with rows encoded as runs (R, 2)."""

    @classmethod
    def from_batch(
        cls,
        batch: TreeBatch,
        *,
        conversation_id: str,
        sequence: int,
        span: tuple[int, int],
        site_ids: Sequence[str],
        state_ids: Sequence[str],
    ) -> StoredWindow:
        """Store a tree batch in compact form."""
        tree = replace(batch.tree, rows=tuple(_row_runs(rows) for rows in batch.tree.rows))
        return cls(
            conversation_id=conversation_id,
            sequence=sequence,
            first=span[0],
            end=span[1],
            site_ids=tuple(site_ids),
            state_ids=tuple(state_ids),
            small=map_tensors(
                replace(batch, tree=tree),
                # Ids and rows fit into 32 bits; masks and floats keep their dtype.
                lambda tensor: tensor.to("cpu", torch.int32) if tensor.dtype == torch.int64 else tensor.cpu(),
            ),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.small.tree)

    @property
    def has_references(self) -> bool:
        """Whether all pairs have reference log-probs."""
        return self.small.pairs is None or self.small.pairs.chosen_reference is not None

    def counts(self) -> dict[str, int]:
        """Return the item count of each channel: response tokens, erring tokens, pairs."""
        return self.small.counts()

    def batch(self, device: str | torch.device = "cpu") -> TreeBatch:
        """Rebuild the tree batch that was stored."""
        rows = tuple(torch.cat([torch.arange(*run) for run in runs.tolist()]) for runs in self.small.tree.rows)
        tree = replace(self.small.tree, rows=rows)
        return map_tensors(
            replace(self.small, tree=tree),
            lambda tensor: tensor.to(device, torch.int64 if tensor.dtype == torch.int32 else tensor.dtype),
        )

    def pair_ids(self) -> list[PairIds]:
        """Return the token ids of both responses of each pair, with their context in this window."""
        batch = self.batch()
        pairs = batch.pairs
        if pairs is None:
            return []
        masks = [pairs.response == side for side in range(2 * pairs.num_pairs)]
        sides = [_path_ids(batch.tree, pairs.rows[mask], pairs.targets[mask]) for mask in masks]
        # All chosen sides come first, followed by all rejected sides.
        return [PairIds(*sides[number :: pairs.num_pairs]) for number in range(pairs.num_pairs)]

    def with_references(self, references: Sequence[tuple[float, float]]) -> StoredWindow:
        """Return the window with these reference log-probs, one (chosen, rejected) tuple per pair, in order."""
        pairs = self.small.pairs
        if pairs is None:
            return self
        if len(references) != pairs.num_pairs:
            expected = f"one for each of {pairs.num_pairs} pairs"
            raise InputError(explain("reference log-probs", got=len(references), expected=expected))
        chosen, rejected = torch.tensor(references, dtype=torch.float64).unbind(1)
        referenced_pairs = replace(pairs, chosen_reference=chosen, rejected_reference=rejected)
        return replace(self, small=replace(self.small, pairs=referenced_pairs))

    def without_responses(self) -> StoredWindow:
        """Return the window without targets for channel 1."""
        empty = TargetRows(*(tensor[:0] for tensor in self.small.response))
        return replace(self, small=replace(self.small, response=empty))


@dataclass(frozen=True, eq=False, slots=True)
class SessionItem:
    """One item of a data set: a single window, or several windows that share a tree batch."""

    windows: tuple[StoredWindow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(window.num_tokens for window in self.windows)

    def batch(self, device: str | torch.device = "cpu") -> TreeBatch:
        """Return the windows as one batch."""
        return pack_batches([window.batch(device) for window in self.windows])


def _row_runs(rows: Tensor) -> Tensor:
    """Return the runs of consecutive rows as (start, end) pairs, (R, 2); `end` is exclusive."""
    # A run ends where the next row is not its successor.
    breaks = (rows.diff() != 1).nonzero().flatten()
    first = torch.cat([rows[:1], rows[breaks + 1]])
    last = torch.cat([rows[breaks], rows[-1:]])
    return torch.stack([first, last + 1], dim=1)


def _path_ids(tree: TokenTree, rows: Tensor, targets: Tensor) -> ResponseIds:
    """Return the token ids of a response with its context, and the index at which the response starts.

    The ids are those on the path to the response's last row, followed by the token that this row predicts.
    """
    # All paths through the last row have the same tokens up to it.
    last = int(rows[-1])
    depth = int(tree.position_ids[last])
    path = next(candidate for candidate in tree.rows if candidate.numel() > depth and int(candidate[depth]) == last)
    start = int(tree.position_ids[int(rows[0])]) + 1
    return ResponseIds([*tree.input_ids[path[: depth + 1]].tolist(), int(targets[-1])], start)
