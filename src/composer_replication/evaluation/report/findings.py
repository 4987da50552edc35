"""Count error sites by kind, blame and project, summarize the hint check, and pick the sites to review first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from composer_replication.evaluation.report.figures import signed
from composer_replication.evaluation.report.plots import ONE, QUIET, scatter
from composer_replication.evaluation.report.records import Row, RunRecords, decision_of
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.rule import KINDS
from composer_replication.types import ErrorSite, Hint

MEANINGS: Mapping[str, str] = KINDS
# Sites in the list to review.
_MOST_TO_LOOK_AT = 12
_WORTH_A_LOOK, _SURE = 0.05, 0.9
"""Nats/token below which a change is noise; the confidence from which a rule needs no review."""
_NATS = "nats"
# Reasons why a hint was not checked.
HELD_OUT, NOT_REACHED = "its session is held out", "it reached no training batch"
NO_TRAINING, NO_PROOF = "no training has begun", "the training made no proof"
PROOF_AHEAD, PROOF_UNFINISHED = "the training has not reached the proof", "the proof was begun, and not ended"


class Group(NamedTuple):
    """The sites of one kind, blame or project."""

    name: str
    meaning: str
    number: int
    num_kept: int
    num_hinted: int
    num_proved: int


def by_kind(records: RunRecords) -> list[Group]:
    return _groups(records, lambda site: site.kind)


def by_blame(records: RunRecords) -> list[Group]:
    return _groups(records, lambda site: site.blame)


def by_project(records: RunRecords, project_of: Mapping[str, str]) -> list[Group]:
    """Return the sites by project; `project_of` maps conversations to projects."""
    return _groups(records, lambda site: project_of.get(site.conversation_id, ""))


def _groups(records: RunRecords, name_of: Callable[[ErrorSite], str]) -> list[Group]:
    """Return the groups of all error sites, the largest first."""
    grouped: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
    for site, hint in failures(records):
        grouped[name_of(site)].append((site, hint))
    groups = [
        Group(
            name=name,
            meaning=MEANINGS.get(name, ""),
            number=len(sites),
            num_kept=sum(site.is_kept for site, _ in sites),
            num_hinted=sum(site.is_kept and hint is not None for site, hint in sites),
            num_proved=sum(records.proofs.get(site.id, {}).get("is_kept", False) for site, _ in sites),
        )
        for name, sites in grouped.items()
    ]
    return sorted(groups, key=lambda group: (-group.number, group.name))


def failures(records: RunRecords) -> Iterator[tuple[ErrorSite, Hint | None]]:
    """Yield the error sites with their hints, without false alarms."""
    return (site_and_hint for site_and_hint in records.sites if site_and_hint[0].kind != NO_FAILURE)


class HintTests(NamedTuple):
    """The hints of errors by the result of their check: `proved` are trained on, `not_proved` failed it.

    `not_tested` counts the others by reason.
    """

    proved: int
    not_proved: int
    not_tested: Mapping[str, int]

    @property
    def num_not_tested(self) -> int:
        return sum(self.not_tested.values())


def hint_tests(records: RunRecords) -> HintTests:
    """Return the result of every error's hint check, from the training's checks and settings."""
    proved, untested = Counter[bool](), Counter[str]()
    why = _why_not_tested(records)
    for site, hint in failures(records):
        if not site.is_kept or hint is None:
            continue
        if (row := records.proofs.get(site.id)) is not None:
            proved[bool(row["is_kept"])] += 1
            continue
        side = records.sides.get(site.conversation_id, {}).get("side", "train")
        untested[why or (HELD_OUT if side != "train" else NOT_REACHED)] += 1
    return HintTests(proved[True], proved[False], dict(untested.most_common()))


def _why_not_tested(records: RunRecords) -> str:
    """Return why no hint of this run was checked; empty if they were."""
    if records.why_no_proof or records.proofs:
        return records.why_no_proof
    if records.training_record is not None:
        return NO_PROOF
    # The check writes this journal until it has finished.
    if (records.run.root / "hint_proof.partial.jsonl").exists():
        return PROOF_UNFINISHED
    if records.metrics.rows or records.path("checkpoints").exists():
        return PROOF_AHEAD
    return NO_TRAINING


class _Proof(NamedTuple):
    """The hint checks of all sites: how many by reason, and the median hint effects in nats/token."""

    num_sites: int
    by_reason: list[tuple[str, int]]
    on_erring: str
    on_good: str
    on_other: str
    svg: str


def proof_of(records: RunRecords) -> _Proof | None:
    rows = list(records.proofs.values())
    if not rows:
        return None
    return _Proof(
        num_sites=len(rows),
        by_reason=Counter(str(row["reason"]) for row in rows).most_common(),
        on_erring=_median(row["with_hint"] - row["without_hint"] for row in rows),
        on_good=_median(effect for row in rows if (effect := _good_effect(row)) is not None),
        on_other=_median(
            row["with_other_hint"] - row["without_hint"] for row in rows if row["with_other_hint"] is not None
        ),
        svg=_scatter(rows),
    )


def _scatter(rows: list[Row]) -> str:
    groups = {
        is_kept: [
            (effect, row["with_hint"] - row["without_hint"])
            for row in rows
            if row["is_kept"] is is_kept and (effect := _good_effect(row)) is not None
        ]
        for is_kept in (False, True)
    }
    if not any(groups.values()):
        return ""
    described = (
        f"{len(groups[True])} sites that the proof kept and {len(groups[False])} that it dropped, by what their "
    )
    described += "hint does to good calls and to the erring one"
    styled_groups = {"dropped": (groups[False], QUIET), "kept": (groups[True], ONE)}
    return scatter(styled_groups, name="proof", description=described)


def _good_effect(row: Row) -> float | None:
    if row["good_with_hint"] is None or row["good_without_hint"] is None:
        return None
    return row["good_with_hint"] - row["good_without_hint"]


def _median(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return signed(ordered[len(ordered) // 2], _NATS) if ordered else "not known"


class _Suspect(NamedTuple):
    """A site in training that may be wrong, and why it deserves a review."""

    site: ErrorSite
    hint: Hint | None
    why: str


def worst_misfires(records: RunRecords) -> list[_Suspect]:
    """Return sites in training to review: first those where training worked backward, then bad hints, then unsure
    rules.
    """
    taught = [
        (site, hint)
        for site, hint in failures(records)
        if site.is_kept and hint is not None and records.proofs.get(site.id, {}).get("is_kept", True)
    ]
    ranked: list[tuple[int, float, _Suspect]] = []
    for site, hint in taught:
        # Only the gravest doubt of a site is shown.
        for rank, (badness, why) in enumerate(_doubts(records, site)):
            if why:
                ranked.append((rank, -badness, _Suspect(site, hint, why)))
                break
    # The id breaks ties, so that the report has the same bytes every time.
    ranked.sort(key=lambda entry: (*entry[:2], entry[2].site.id))
    return [suspect for _, _, suspect in ranked[:_MOST_TO_LOOK_AT]]


def _doubts(records: RunRecords, site: ErrorSite) -> Iterator[tuple[float, str]]:
    """Yield the size of each doubt and its sentence, the gravest first; the sentence is empty if there is no doubt."""
    moved = decision_of(records.evaluated.get(site.id, ()), "erring")
    change = moved.after - moved.before if moved else 0.0
    sentence = f"after training the erring call is more likely: {signed(change, _NATS)} nats/token"
    yield change, sentence if change >= _WORTH_A_LOOK else ""
    proof = records.proofs.get(site.id)
    # A hint that lowers good calls as well is too general.
    effect = _good_effect(proof) if proof else None
    harm = -effect if effect is not None else 0.0
    sentence = f"its hint also makes good calls less likely: {signed(-harm, _NATS)} nats/token"
    yield harm, sentence if harm >= _WORTH_A_LOOK else ""
    sentence = f"the rule that found it is only {site.confidence:.0%} sure"
    yield 1 - site.confidence, sentence if site.confidence < _SURE else ""
