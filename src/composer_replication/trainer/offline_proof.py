"""The hint proof of a data set: figures for every site, kept as `hint_proof.jsonl` and not computed twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from torch import nn

from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.render import Renderer
from composer_replication.objective.fingerprint import fingerprint_of
from composer_replication.objective.hint_proof import HintProof, ProvableSite, prove_hints
from composer_replication.runs import RunDir
from composer_replication.trainer.offline_sessions import KeptSite

SCHEMA, VERSION = "hint_proof", 1
_NAME = "hint_proof"
_SOURCES = ("conversations", "sites")
_PROOF = tuple(each.name for each in fields(HintProof))


@dataclass(frozen=True, kw_only=True)
class ProofSettings:
    """What the figures depend on besides the weights and the sites, and the margin that decides."""

    margin: float
    placement: Placement
    max_context: int
    seed: int


def prove_sites(
    model: nn.Module, renderer: Renderer, sites: Sequence[KeptSite], settings: ProofSettings, run: RunDir | None
) -> list[HintProof]:
    """One proof a site, from the run directory if its figures are those of this model and these sites.

    Processes that prove the same sites write the same file; each write replaces it whole.
    """
    said = _settings_of(model, renderer, settings) if run is not None else {}
    if run is not None:
        known = _stored(run, said)
        if known is not None and [each.site.id for each in sites] == [proof.site_id for proof in known]:
            return known
    provable = [
        ProvableSite(site_id=each.site.id, rendered=each.rendered, span=each.span, hint=each.hint, kind=each.site.kind)
        for each in sites
    ]
    proofs = prove_hints(model, renderer, provable, **asdict(settings))
    if run is not None:
        _store(run, sites, proofs, said)
    return proofs


def read_proofs(run: RunDir) -> list[HintProof]:
    """The proofs of a run, in the order of its sites."""
    rows = run.read_jsonl(_NAME, schema=SCHEMA, version=VERSION)
    return [HintProof(**{name: cast("Any", row[name]) for name in _PROOF}) for row in rows]


def _stored(run: RunDir, said: dict[str, str]) -> list[HintProof] | None:
    if not run.path(_NAME).exists() or run.meta(_NAME).settings != said or run.lineage(_NAME).stale:
        return None
    return read_proofs(run)


def _store(run: RunDir, sites: Sequence[KeptSite], proofs: Sequence[HintProof], said: dict[str, str]) -> None:
    rows = (
        {
            **asdict(proof),
            "advantage": proof.advantage,
            "conversation_id": each.site.conversation_id,
            "turn_id": each.site.turn_id,
            "kind": each.site.kind,
        }
        for each, proof in zip(sites, proofs, strict=True)
    )
    reasons = Counter(proof.reason for proof in proofs)
    kept = reasons.pop("kept", 0)
    run.write_jsonl(
        _NAME,
        rows,
        schema=SCHEMA,
        version=VERSION,
        sources=_SOURCES,
        counts={"sites": len(proofs), "kept": kept},
        drops=reasons,
        settings=said,
    )


def _settings_of(model: nn.Module, renderer: Renderer, settings: ProofSettings) -> dict[str, str]:
    said = {name: str(value) for name, value in asdict(settings).items()}
    return said | fingerprint_of(model, renderer)._asdict()
