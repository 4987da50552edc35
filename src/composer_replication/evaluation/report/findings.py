"""Prepare the error sites for the report: counts, the results of the hint check, and the sites to review first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from composer_replication.evaluation.report.figures import signed
from composer_replication.evaluation.report.plots import ONE, QUIET, scatter
from composer_replication.evaluation.report.records import Row, RunRecords, mean_logprobs
from composer_replication.sites.find import NO_FAILURE
from composer_replication.sites.rule import KINDS
from composer_replication.types import ErrorSite, Hint

# Maximum length of the list of sites to review.
_MAX_SUSPECTS = 12
# Nats/token; smaller changes are noise.
_MIN_CHANGE = 0.05
# Sites whose rule is at least this sure need no review.
_SURE_CONFIDENCE = 0.9
_NATS = "nats"
# Reasons why a hint was not checked.
HELD_OUT, NOT_REACHED = "its session is held out", "it reached no training batch"
NO_TRAINING, NO_PROOF = "no training has begun", "the training made no proof"
PROOF_AHEAD, PROOF_UNFINISHED = "the training has not reached the proof", "the proof was begun, and not ended"


def site_values(records: RunRecords, project_by_conversation: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that the page templates need to show the error sites and their hints."""
    groups = _group_sites(records, lambda site: site.kind)
    return {
        "kinds": groups,
        "blames": _group_sites(records, lambda site: site.blame),
        "projects": _group_sites(records, lambda site: project_by_conversation.get(site.conversation_id, "")),
        "num_failures": sum(group.number for group in groups),
        "misfires": _sites_to_review(records),
        "proof": _summarize_proofs(records),
        "hint_tests": _count_hint_tests(records),
    }


class _Group(NamedTuple):
    """Counts of the error sites that share a kind, blame or project."""

    name: str
    meaning: str
    number: int
    num_kept: int
    num_hinted: int
    num_proved: int


def _group_sites(records: RunRecords, group_name: Callable[[ErrorSite], str]) -> list[_Group]:
    """Count the error sites in groups, with the largest group first.

    `group_name` returns the name of a site's group.
    """
    grouped: dict[str, list[tuple[ErrorSite, Hint | None]]] = defaultdict(list)
    for site, hint in failures(records):
        grouped[group_name(site)].append((site, hint))
    groups = [
        _Group(
            name=name,
            meaning=KINDS.get(name, ""),
            number=len(sites),
            num_kept=sum(site.is_kept for site, _ in sites),
            num_hinted=sum(site.is_kept and hint is not None for site, hint in sites),
            num_proved=sum(records.proofs.get(site.id, {}).get("is_kept", False) for site, _ in sites),
        )
        for name, sites in grouped.items()
    ]
    return sorted(groups, key=lambda group: (-group.number, group.name))


def failures(records: RunRecords) -> Iterator[tuple[ErrorSite, Hint | None]]:
    """Yield the error sites with their hints, except false alarms."""
    return (site_and_hint for site_and_hint in records.sites if site_and_hint[0].kind != NO_FAILURE)


class HintTests(NamedTuple):
    """The numbers of hints that passed the hint check (and were trained on), failed it, or were not checked, by
    reason.
    """

    proved: int
    not_proved: int
    not_tested: Mapping[str, int]

    @property
    def num_not_tested(self) -> int:
        return sum(self.not_tested.values())


def _count_hint_tests(records: RunRecords) -> HintTests:
    """Count the hints of all kept error sites by the result of the hint check."""
    num_checked, untested = Counter[bool](), Counter[str]()
    why_none = _why_not_tested(records)
    for site, hint in failures(records):
        if not site.is_kept or hint is None:
            continue
        if (row := records.proofs.get(site.id)) is not None:
            num_checked[bool(row["is_kept"])] += 1
            continue
        side = records.sides.get(site.conversation_id, {}).get("side", "train")
        untested[why_none or (HELD_OUT if side != "train" else NOT_REACHED)] += 1
    return HintTests(num_checked[True], num_checked[False], dict(untested.most_common()))


def _why_not_tested(records: RunRecords) -> str:
    """Return the reason why no hint of the run was checked, or an empty string if hints were checked."""
    if records.why_no_proof or records.proofs:
        return records.why_no_proof
    if records.training_record is not None:
        return NO_PROOF
    # The hint check keeps this journal until it has finished.
    if (records.run.root / "hint_proof.partial.jsonl").exists():
        return PROOF_UNFINISHED
    if records.metrics.rows or records.path("checkpoints").exists():
        return PROOF_AHEAD
    return NO_TRAINING


class _Proof(NamedTuple):
    """A summary of the hint checks: counts by reason, the hints' median effects in nats/token, and a plot."""

    num_sites: int
    by_reason: list[tuple[str, int]]
    on_erring: str
    on_good: str
    on_other: str
    svg: str


def _summarize_proofs(records: RunRecords) -> _Proof | None:
    """Return the summary of the hint checks, or None if there were none."""
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
    description = (
        f"{len(groups[True])} sites that the proof kept and {len(groups[False])} that it dropped, by what their "
        "hint does to good calls and to the erring one"
    )
    styled_groups = {"dropped": (groups[False], QUIET), "kept": (groups[True], ONE)}
    return scatter(styled_groups, name="proof", description=description)


def _good_effect(row: Row) -> float | None:
    if row["good_with_hint"] is None or row["good_without_hint"] is None:
        return None
    return row["good_with_hint"] - row["good_without_hint"]


def _median(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return signed(ordered[len(ordered) // 2], _NATS) if ordered else "not known"


class _Suspect(NamedTuple):
    """An error site that was used for training but may be wrong, with the reason to review it."""

    site: ErrorSite
    hint: Hint | None
    why: str


def _sites_to_review(records: RunRecords) -> list[_Suspect]:
    """Return the error sites used for training that the user should review first.

    Sites whose erring call became more likely come first, then sites with harmful hints, then sites found by rules with
    low confidence.
    """
    trained_on = [
        (site, hint)
        for site, hint in failures(records)
        if site.is_kept and hint is not None and records.proofs.get(site.id, {}).get("is_kept", True)
    ]
    ranked: list[tuple[int, float, _Suspect]] = []
    for site, hint in trained_on:
        # Only the most serious doubt about a site is shown.
        for rank, (size, why) in enumerate(_doubts(records, site)):
            if why:
                ranked.append((rank, -size, _Suspect(site, hint, why)))
                break
    # The id breaks ties, so that the report has the same bytes every time.
    ranked.sort(key=lambda entry: (*entry[:2], entry[2].site.id))
    return [suspect for _, _, suspect in ranked[:_MAX_SUSPECTS]]


def _doubts(records: RunRecords, site: ErrorSite) -> Iterator[tuple[float, str]]:
    """Yield the size of each possible doubt about a site, and a sentence on it, starting with the most serious one.

    The sentence is empty if the doubt is too small to mention.
    """
    erring = mean_logprobs(records.evaluated.get(site.id, ()), "erring")
    change = erring.after - erring.before if erring else 0.0
    sentence = f"after training the erring call is more likely: {signed(change, _NATS)} nats/token"
    yield change, sentence if change >= _MIN_CHANGE else ""
    proof = records.proofs.get(site.id)
    # A hint that makes good calls less likely as well is too general.
    good_effect = _good_effect(proof) if proof else None
    harm = -good_effect if good_effect is not None else 0.0
    sentence = f"its hint also makes good calls less likely: {signed(-harm, _NATS)} nats/token"
    yield harm, sentence if harm >= _MIN_CHANGE else ""
    sentence = f"the rule that found it is only {site.confidence:.0%} sure"
    yield 1 - site.confidence, sentence if site.confidence < _SURE_CONFIDENCE else ""
