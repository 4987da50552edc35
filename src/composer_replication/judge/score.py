"""The judge against what really happened: by rule, by kind of failure, and in all.

A failure that was the user's, the harness's or the work's own is no question to the judge, and counts neither way.
Only `fails` is a prediction. It is right where the call failed, in whatever way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from composer_replication.judge.verdict import Says
from composer_replication.judge.walk import JudgedCall

NOT_ASKED = frozenset({"user", "harness", "task"})
_ORDER: tuple[Says, ...] = ("fails", "risky", "ok", "unknown")


@dataclass(frozen=True, slots=True)
class RuleScore:
    """How often one rule spoke, how often the call then failed, and how often in the way that was said."""

    says: Says
    rule: str
    kind: str
    said: int
    failed: int
    num_of_kind: int

    @property
    def share_failed(self) -> float:
        return self.failed / self.said


@dataclass(frozen=True, slots=True)
class KindScore:
    """How many failures of one kind there were, and how many were predicted."""

    kind: str
    failures: int
    predicted: int


class Score:
    """Grows call by call."""

    def __init__(self, calls: Iterable[JudgedCall] = ()) -> None:
        self.num_calls = self.num_good = self.num_left_out = 0
        self._said: Counter[tuple[Says, str, str]] = Counter()
        self._failed: Counter[tuple[Says, str, str]] = Counter()
        self._of_kind: Counter[tuple[Says, str, str]] = Counter()
        self._kinds: Counter[str] = Counter()
        self._predicted: Counter[str] = Counter()
        for call in calls:
            self.add(call)

    def add(self, judged: JudgedCall) -> None:
        """A call with its verdict; one without a result says nothing."""
        if judged.result is None:
            return
        self.num_calls += 1
        site, judgement = judged.site, judged.judgement
        if site is not None and site.blame in NOT_ASKED:
            self.num_left_out += 1
            return
        key = (judgement.says, judgement.rule, judgement.kind)
        self._said[key] += 1
        if site is None:
            self.num_good += 1
            return
        self._failed[key] += 1
        self._of_kind[key] += site.kind == judgement.kind
        self._kinds[site.kind] += 1
        self._predicted[site.kind] += judgement.says == "fails"

    @property
    def num_failures(self) -> int:
        return self._kinds.total()

    @property
    def num_predicted(self) -> int:
        return self._predicted.total()

    @property
    def num_false(self) -> int:
        """Good calls of which it was said that they fail."""
        return sum(row.said - row.failed for row in self.rules if row.says == "fails")

    @property
    def precision(self) -> float | None:
        """None where nothing was predicted."""
        num_predictions = self.num_predicted + self.num_false
        return self.num_predicted / num_predictions if num_predictions else None

    @property
    def share_predicted(self) -> float | None:
        return self.num_predicted / self.num_failures if self.num_failures else None

    @property
    def false_per_thousand(self) -> float | None:
        """False alarms per 1,000 good calls."""
        return 1000 * self.num_false / self.num_good if self.num_good else None

    @property
    def rules(self) -> list[RuleScore]:
        """Predictions first, then what may well fail, what works, and what nobody can say."""
        rows = [RuleScore(*key, count, self._failed[key], self._of_kind[key]) for key, count in self._said.items()]
        return sorted(rows, key=lambda row: (_ORDER.index(row.says), -row.said, row.rule, row.kind))

    @property
    def kinds(self) -> list[KindScore]:
        return [KindScore(kind, number, self._predicted[kind]) for kind, number in self._kinds.most_common()]
