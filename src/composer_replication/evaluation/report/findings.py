"""Sites in tables, what the hint proof said of them, and those that a person should look at first."""

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
_MOST_TO_LOOK_AT = 12
_WORTH_A_LOOK, _SURE = 0.05, 0.9
"""Nats a token below which a change is noise, and a share from which a rule is as sure as rules are."""
_NATS = "nats"
# Why a hint was not tested.
HELD_OUT, NOT_REACHED = "its session is held out", "it reached no training batch"
NO_TRAINING, NO_PROOF = "no training has begun", "the training made no proof"
PROOF_AHEAD, PROOF_UNFINISHED = "the training has not reached the proof", "the proof was begun, and not ended"


class Group(NamedTuple):
    """Sites of one kind, blame or project."""

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
    """`project_of` is by conversation."""
    return _groups(records, lambda site: project_of.get(site.conversation_id, ""))


def _groups(records: RunRecords, name_of: Callable[[ErrorSite], str]) -> list[Group]:
    """The largest first."""
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
    """Sites without what looked like a failure and was none."""
    return (site_and_hint for site_and_hint in records.sites if site_and_hint[0].kind != NO_FAILURE)


class HintTests(NamedTuple):
    """The hints of mistakes by what became of their test: `proved` may teach, `not_proved` were tested and dropped.

    `not_tested` counts the others by the reason.
    """

    proved: int
    not_proved: int
    not_tested: Mapping[str, int]

    @property
    def num_not_tested(self) -> int:
        return sum(self.not_tested.values())


def hint_tests(records: RunRecords) -> HintTests:
    """Return what became of the hint of every mistake, by the proof and the settings of the training."""
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
    """What holds for all hints of this run; empty where the proof was made."""
    if records.why_no_proof or records.proofs:
        return records.why_no_proof
    if records.training_record is not None:
        return NO_PROOF
    if (records.run.root / "hint_proof.partial.jsonl").exists():
        return PROOF_UNFINISHED
    if records.metrics.rows or records.path("checkpoints").exists():
        return PROOF_AHEAD
    return NO_TRAINING


class _Proof(NamedTuple):
    """What the proof said of all sites: how many by reason, and the median effects of hints in nats a token."""

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
    drawn = {"dropped": (groups[False], QUIET), "kept": (groups[True], ONE)}
    return scatter(drawn, name="proof", description=described)


def _good_effect(row: Row) -> float | None:
    if row["good_with_hint"] is None or row["good_without_hint"] is None:
        return None
    return row["good_with_hint"] - row["good_without_hint"]


def _median(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return signed(ordered[len(ordered) // 2], _NATS) if ordered else "not known"


class _Suspect(NamedTuple):
    """A taught site that may be wrong, and why it is worth a look."""

    site: ErrorSite
    hint: Hint | None
    why: str


def worst_misfires(records: RunRecords) -> list[_Suspect]:
    """Taught sites where training worked against what was meant, then hints that harm, then unsure verdicts."""
    taught = [
        (site, hint)
        for site, hint in failures(records)
        if site.is_kept and hint is not None and records.proofs.get(site.id, {}).get("is_kept", True)
    ]
    ranked: list[tuple[int, float, _Suspect]] = []
    for site, hint in taught:
        for rank, (badness, why) in enumerate(_doubts(records, site)):
            if why:
                ranked.append((rank, -badness, _Suspect(site, hint, why)))
                break
    ranked.sort(key=lambda entry: (*entry[:2], entry[2].site.id))
    return [suspect for _, _, suspect in ranked[:_MOST_TO_LOOK_AT]]


def _doubts(records: RunRecords, site: ErrorSite) -> Iterator[tuple[float, str]]:
    """How bad each doubt is, and its sentence; an empty one where there is none. The gravest kind comes first."""
    moved = decision_of(records.evaluated.get(site.id, ()), "erring")
    change = moved.after - moved.before if moved else 0.0
    sentence = f"after training the erring call is likelier: {signed(change, _NATS)} nats a token"
    yield change, sentence if change >= _WORTH_A_LOOK else ""
    proof = records.proofs.get(site.id)
    effect = _good_effect(proof) if proof else None
    harm = -effect if effect is not None else 0.0
    sentence = f"its hint makes good calls rarer, too: {signed(-harm, _NATS)} nats a token"
    yield harm, sentence if harm >= _WORTH_A_LOOK else ""
    sentence = f"the rule that found it is only {site.confidence:.0%} sure"
    yield 1 - site.confidence, sentence if site.confidence < _SURE else ""
