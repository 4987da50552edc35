"""What became of the states, and how far teachers agree: with each other and with the student, per kind of action."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from composer_replication.teacher_replay.votes.consensus import Vote


@dataclass(slots=True)
class KindAgreement:
    """States where the student's action was of one kind: the student's tool, or text."""

    num_states: int = 0
    num_votes: int = 0
    num_with_student: int = 0
    num_teacher_pairs: int = 0
    num_agreeing_pairs: int = 0
    num_consensus: int = 0

    @property
    def with_student(self) -> float | None:
        """Share of votes that are the student's own action; None without votes."""
        return self.num_with_student / self.num_votes if self.num_votes else None

    @property
    def with_each_other(self) -> float | None:
        """Share of pairs of teachers that did the same; None where no two teachers answered."""
        return self.num_agreeing_pairs / self.num_teacher_pairs if self.num_teacher_pairs else None


@dataclass(slots=True)
class PairReport:
    """`drops` are states without a pair by reason, `failed_replies` answers without a vote by reason.

    `num_asked` are states that at least one teacher was really asked about. `num_rejected_worked` are states where the
    teachers agree on another action than the student's, which worked.
    """

    num_states: int = 0
    num_asked: int = 0
    num_pairs: int = 0
    num_unknown_states: int = 0  # ids that were answered and are none of the states'
    num_rejected_worked: int = 0
    drops: Counter[str] = field(default_factory=Counter[str])
    failed_replies: Counter[str] = field(default_factory=Counter[str])
    agreement: dict[str, KindAgreement] = field(default_factory=dict[str, KindAgreement])

    def drop(self, reason: str) -> None:
        self.drops[reason] += 1

    def fail(self, reason: str) -> None:
        self.failed_replies[reason] += 1

    def count(self, kind: str, vote: Vote, student_key: str) -> None:
        """One state's vote, under the kind of what the student did there."""
        agreement = self.agreement.setdefault(kind, KindAgreement())
        agreement.num_states += 1
        agreement.num_votes += vote.num_votes
        agreement.num_with_student += sum(
            len(vote_class.teachers) for vote_class in vote.classes if vote_class.key == student_key
        )
        agreement.num_teacher_pairs += vote.num_votes * (vote.num_votes - 1) // 2
        agreement.num_agreeing_pairs += vote.num_agreeing_pairs
        agreement.num_consensus += vote.winner is not None

    def to_dict(self) -> dict[str, object]:
        """As JSON can hold it, kinds by name."""
        kinds = {
            kind: {
                "num_states": agreement.num_states,
                "num_votes": agreement.num_votes,
                "with_student": agreement.with_student,
                "with_each_other": agreement.with_each_other,
                "num_consensus": agreement.num_consensus,
            }
            for kind, agreement in sorted(self.agreement.items())
        }
        return {
            "num_states": self.num_states,
            "num_asked": self.num_asked,
            "num_pairs": self.num_pairs,
            "num_unknown_states": self.num_unknown_states,
            "rejected_action_worked": self.num_rejected_worked,
            "drops": dict(sorted(self.drops.items())),
            "failed_replies": dict(sorted(self.failed_replies.items())),
            "agreement": kinds,
        }
