"""Run the hint check on all sites of a data set, and store its results as `hint_proof.jsonl`.

Stored results for the same model, sites and settings are reused. While the check runs, the result of each site is
appended to `hint_proof.partial.jsonl`, so that an interrupt loses at most one result.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import distributed, nn

from composer_replication.batch.render.decision import find_matching_decision
from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import ArtefactCorruptError
from composer_replication.runs import RunDir
from composer_replication.runs.journal import Journal, read_journal
from composer_replication.trainer.objective.distributed import max_over_shards
from composer_replication.trainer.objective.fingerprint import compute_fingerprint
from composer_replication.trainer.objective.hint_proof import (
    DecidedCall,
    HintProof,
    ProvableSite,
    is_near,
    prove_hints,
    verdict,
)
from composer_replication.trainer.sessions.phases import Phase, report_phase

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.rendering import GoodCall, KeptSite

SCHEMA, VERSION = "hint_proof", 3
_NAME = "hint_proof"
_PARTIAL = "hint_proof.partial.jsonl"
_SOURCES = ("conversations", "sites")
# Rows of the file also contain derived values and ids, for readers of the file.
_PROOF = tuple(field.name for field in fields(HintProof))
# Good calls per site; fewer of those in other contexts, because each of them costs a separate pass.
_MAX_GOOD_CALLS = 4
_MAX_WITH_OWN_CONTEXT = 2
# How many candidates per group are compared with the site's decision, nearest first.
_MAX_CANDIDATES = 64


def run_hint_check(
    model: nn.Module,
    renderer: Renderer,
    sites: Sequence[KeptSite],
    good_calls: Sequence[GoodCall],
    settings: Mapping[str, Any],
    run: RunDir | None,
    *,
    with_adapter: bool = False,
) -> list[HintProof]:
    """Return the hint check result of each site, reusing results stored in the run for this model and these sites.

    `settings` are the options of `prove_hints` that affect the results. Processes that check the same sites write the
    same file, and every write replaces the whole file. With `with_adapter`, the check uses the weights with their
    trained adapter.
    """
    provable = _checkable_sites(renderer, sites, good_calls, settings["max_context"])
    recorded_settings: dict[str, str] = {}
    if run is not None:
        # As text, like all settings in the metadata of an artifact.
        recorded_settings = {name: str(value) for name, value in settings.items()}
        recorded_settings |= compute_fingerprint(model, renderer, with_adapter=with_adapter)._asdict()
        recorded_settings["sites"] = _sites_digest(provable)
        stored_proofs = _read_stored(run, recorded_settings)
        if stored_proofs is not None and [site.site.id for site in sites] == [proof.site_id for proof in stored_proofs]:
            return stored_proofs
    with _PartialResults.open(run, recorded_settings, provable, model) as partial:
        partial.report_progress()
        options = {**settings, "stored": tuple(partial.proofs), "on_proof": partial.add}
        proofs = prove_hints(model, renderer, provable, **options)
    if run is not None:
        _write_results(run, sites, proofs, recorded_settings)
        partial.remove()
    return proofs


def _checkable_sites(
    renderer: Renderer, sites: Sequence[KeptSite], good_calls: Sequence[GoodCall], max_context: int
) -> list[ProvableSite]:
    return [
        ProvableSite(
            site_id=site.site.id,
            rendered=site.rendered,
            span=site.span,
            hint=site.hint,
            kind=site.site.kind,
            decision=site.decision,
            good_calls=_choose_good_calls(renderer, site, good_calls, max_context),
        )
        for site in sites
    ]


def _choose_good_calls(
    renderer: Renderer, site: KeptSite, good_calls: Sequence[GoodCall], max_context: int
) -> list[DecidedCall]:
    """Return a few good calls to compare with a site's erring call, each decided by as many tokens as the erring call.

    From the site's own session, only calls before the error qualify, because the hint may recommend a later good call.
    Calls that share the site's context are preferred, followed by other calls in the session, and then by calls from
    other sessions. Among these, calls of the same tool come first, then the nearest calls.
    """
    session = site.rendered.conversation_id
    own_calls = [call for call in good_calls if call.rendered.conversation_id == session and call.number < site.number]
    near = [call for call in own_calls if call.rendered is site.rendered and is_near(call.span, site.span, max_context)]
    other_calls = (call for call in good_calls if call.rendered.conversation_id != session)
    for candidates, limit in (
        (near, _MAX_GOOD_CALLS),
        (own_calls, _MAX_WITH_OWN_CONTEXT),
        (other_calls, _MAX_WITH_OWN_CONTEXT),
    ):
        nearest = sorted(
            candidates, key=lambda call: (call.words.name != site.site.tool, abs(call.number - site.number))
        )
        # A generator, because finding the deciding tokens of a call is costly and only the first few calls are needed.
        calls = (
            DecidedCall(candidate.rendered, candidate.span, decision)
            for candidate in nearest[:_MAX_CANDIDATES]
            if (
                decision := find_matching_decision(
                    renderer, candidate.rendered, candidate.span, candidate.words, site.decision
                )
            )
        )
        if chosen := list(islice(calls, limit)):
            return chosen
    return []


def read_hint_checks(run: RunDir) -> list[HintProof]:
    """Return a run's hint check results in site order, or an empty list if an earlier version wrote them."""
    if run.meta(_NAME).version < VERSION:
        return []
    rows = run.read_jsonl(_NAME, schema=SCHEMA, version=VERSION)
    return [HintProof(**{name: cast("Any", row[name]) for name in _PROOF}) for row in rows]


def describe_hint_check(proofs: Sequence[HintProof] | None, *, can_warm_up: bool) -> Iterator[str]:
    """Yield how many sites passed the hint check, and whether the model reacts to hints; nothing if `proofs` is
    None.
    """
    if proofs is None:
        return
    reasons = Counter(proof.reason for proof in proofs)
    num_passed = reasons.pop("kept", 0)
    dropped = ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in sorted(reasons.items()))
    yield f"hint check: {num_passed} of {len(proofs)} sites passed" + (f"; dropped: {dropped}" if dropped else "")
    yield verdict(proofs).summary(can_warm_up=can_warm_up)


class _PartialResults:
    """The hint check results so far, in site order. Only the first of several processes writes them to a file."""

    def __init__(self, path: Path | None, total: int, proofs: list[HintProof], journal: Journal | None) -> None:
        self.path, self.proofs, self._total, self._journal = path, proofs, total, journal

    @classmethod
    @contextmanager
    def open(
        cls, run: RunDir | None, settings: dict[str, str], sites: Sequence[ProvableSite], model: nn.Module
    ) -> Generator[_PartialResults]:
        """Yield the results stored by an interrupted check with the same settings and sites, open for appending."""
        if run is None:
            yield cls(None, len(sites), [], None)
            return
        path = run.path(_NAME).with_name(_PARTIAL)
        header = {"settings": settings, "made_of": {name: run.meta(name).sha256 for name in _SOURCES}}
        stored_proofs = _results_of_leading_sites(sites, _read_partial(path, header))
        # Use the minimum over all processes that share the weights, because they must make their passes together.
        least = -max_over_shards([model], [-len(stored_proofs)])[0]
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
            yield cls(path, len(sites), stored_proofs[:least], None)
            return
        if not stored_proofs:  # a file for other settings or sites is replaced
            path.unlink(missing_ok=True)
        with Journal(path) as journal:
            if not stored_proofs:
                journal.append(header)
            yield cls(path, len(sites), stored_proofs[:least], journal)

    def add(self, proof: HintProof) -> None:
        if self._journal is not None:
            self._journal.append(asdict(proof))
        self.proofs.append(proof)
        self.report_progress()

    def report_progress(self) -> None:
        done, total = len(self.proofs), self._total
        report_phase(Phase(name="hint proof", done=done, total=total, items="sites", stored_in=self.path))

    def remove(self) -> None:
        """Delete the partial file once the complete artifact has been written."""
        if self.path is not None and self._journal is not None:
            self.path.unlink(missing_ok=True)


def _read_partial(path: Path, header: Mapping[str, object]) -> list[HintProof]:
    try:
        rows = read_journal(path).rows
    except (FileNotFoundError, ArtefactCorruptError):  # nothing to resume; the check starts over
        return []
    if not rows or rows[0] != header:
        return []
    return [HintProof(**cast("Any", row)) for row in rows[1:]]


def _results_of_leading_sites(sites: Sequence[ProvableSite], proofs: Sequence[HintProof]) -> list[HintProof]:
    """Return the results of the leading sites, up to the first site that has no result.

    Concurrent runs may have interleaved their lines in the file, so it is searched by site id.
    """
    by_site = {proof.site_id: proof for proof in proofs}
    return [by_site[site.site_id] for site in takewhile(lambda site: site.site_id in by_site, sites)]


def _sites_digest(sites: Sequence[ProvableSite]) -> str:
    """Return a digest of the sites with their hints and deciding tokens.

    It also depends on the order of the sites, because that order determines the unrelated hints.
    """
    entries = [
        (site.site_id, site.kind, site.hint, site.decision, [good.decision for good in site.good_calls])
        for site in sites
    ]
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def _read_stored(run: RunDir, recorded_settings: dict[str, str]) -> list[HintProof] | None:
    if not run.path(_NAME).exists() or run.meta(_NAME).settings != recorded_settings or run.lineage(_NAME).stale:
        return None
    return read_hint_checks(run)


def _write_results(
    run: RunDir, sites: Sequence[KeptSite], proofs: Sequence[HintProof], recorded_settings: dict[str, str]
) -> None:
    rows = (
        {
            **asdict(proof),
            "advantage": proof.advantage,
            "advantage_over_good": proof.advantage_over_good,
            "conversation_id": site.site.conversation_id,
            "turn_id": site.site.turn_id,
            "kind": site.site.kind,
        }
        for site, proof in zip(sites, proofs, strict=True)
    )
    reasons = Counter(proof.reason for proof in proofs)
    num_kept, heed_verdict = reasons.pop("kept", 0), verdict(proofs)
    run.write_jsonl(
        _NAME,
        rows,
        schema=SCHEMA,
        version=VERSION,
        sources=_SOURCES,
        counts={
            "sites": len(proofs),
            "kept": num_kept,
            "lowered_more_than_by_another_kind": heed_verdict.over_other,
            "lowered_more_than_good_calls": heed_verdict.over_good,
            "compared_with_good_calls": heed_verdict.num_with_good,
            "compared_with_those_of_other_sessions": heed_verdict.num_elsewhere,
        },
        drops=reasons,
        settings=recorded_settings,
    )
