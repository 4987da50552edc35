"""Logged sessions as a data set: conversations, sites and pairs in, tree batches out, drops accounted for."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.tree_batch import CHANNELS, TreeBatch
from composer_replication.batch.windows import plan_packs
from composer_replication.errors import InputError, StaleArtefactError, explain
from composer_replication.objective.fingerprint import precision_of
from composer_replication.objective.hint_proof import HintProof
from composer_replication.runs import RunDir
from composer_replication.runs.pairs import LoggedPair
from composer_replication.sessions.cutting import cut_sessions
from composer_replication.sessions.hinted_corrections import with_hinted_corrections
from composer_replication.sessions.proof import ProofSettings, prove_sites
from composer_replication.sessions.read_run import LoggedSession, read_sessions
from composer_replication.sessions.reference import reference_logprobs_of_batches
from composer_replication.sessions.rendering import RenderedSession, WindowSettings, render_session
from composer_replication.sessions.shuffled import shuffle_sessions
from composer_replication.sessions.stored_windows import SessionItem, StoredWindow
from composer_replication.types import Conversation

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
        rendered = shuffle_sessions(self.rendered, seed=seed)
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
