"""States and teachers' answers to preference pairs: what the teachers agree on against what the student did."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.action_text import parse_reply
from composer_replication.atomic import staged, written_through
from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, explain
from composer_replication.runs.files import TEACHERS
from composer_replication.sites.actions.equality import Tools, action_key, action_kind
from composer_replication.teacher_replay.votes import (
    StateContexts,
    Vote,
    count_votes,
    is_unsent,
    reply_text,
    voter_of,
)
from composer_replication.types import (
    Action,
    DPOPair,
    TeacherCallResult,
    TraceState,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """A pair with where it comes from: who said the chosen text, who agreed, and how all of them voted.

    `source` is "teachers", or what a session's own pair is made of: nobody voted then, and `rejected_action` is a call.
    """

    pair: DPOPair
    chosen_by: str
    teachers: tuple[str, ...]
    classes: tuple[tuple[str, ...], ...]
    student_kind: str
    chosen_kind: str
    chosen_action: Action | None  # what the chosen text says, without thinking; None where the text is to keep it
    rejected_action: Action | None = None  # None where the logged turn is rejected as a whole
    source: str = TEACHERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """Pairs in the order of their states, and what became of all states."""

    records: list[PairRecord]
    report: PairReport

    @property
    def pairs(self) -> list[DPOPair]:
        return [record.pair for record in self.records]


def extract_dpo_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherCallResult],
    agreement_threshold: int = 2,
    *,
    teachers: Sequence[str] | None = None,
    cwd: str | None = None,
    tools: Tools | None = None,
) -> list[DPOPair]:
    """At most one pair per state: the action most teachers took, if enough did and the student did another."""
    options = {"teachers": teachers, "cwd": cwd, "tools": tools}
    return extract_pairs(states, teacher_actions, agreement_threshold, **options).pairs


def extract_pairs(
    states: Iterable[TraceState],
    teacher_actions: Iterable[TeacherCallResult],
    agreement_threshold: int = 2,
    *,
    teachers: Sequence[str] | None = None,
    cwd: str | None = None,
    tools: Tools | None = None,
) -> Extraction:
    """Pairs with their provenance and a report.

    `teachers` is the order in which they are asked; without it, the order in which they first appear among the answers.
    A state may carry its own `cwd` and `tools`; a result may carry the structured `message` it was made of.
    """
    results = list(teacher_actions)
    order = list(dict.fromkeys([*(teachers or ()), *(result["teacher_slug"] for result in results)]))
    answers: dict[str, dict[str, TeacherCallResult]] = {}
    for result in results:
        state_answers = answers.setdefault(result["state_id"], {})
        if result["teacher_slug"] not in state_answers or state_answers[result["teacher_slug"]]["error"] is not None:
            state_answers[result["teacher_slug"]] = result  # after a failure, the answer to a second question
    work = _Extraction(order, agreement_threshold, StateContexts(cwd=cwd, tools=tools))
    for state in states:
        work.take(state, answers.pop(_unused(state["state_id"], work.seen), {}))
    work.report.num_states, work.report.num_pairs = len(work.seen), len(work.records)
    work.report.num_unknown_states = len(answers)
    return Extraction(records=work.records, report=work.report)


def save_pairs(pairs: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write pairs, one JSON object a line; the file appears whole or not at all, its folder if it is missing."""
    target = written_through(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as stage:
        for number, pair in enumerate(pairs):
            stage.file.write(encode_as_written(pair, where=f"pair {number}") + b"\n")
        stage.commit()


# What became of the states, and how far teachers agree: with each other and with the student, per kind of action.


@dataclass(slots=True)
class _KindAgreement:
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
    agreement: dict[str, _KindAgreement] = field(default_factory=dict[str, _KindAgreement])

    def drop(self, reason: str) -> None:
        self.drops[reason] += 1

    def fail(self, reason: str) -> None:
        self.failed_replies[reason] += 1

    def count(self, kind: str, vote: Vote, student_key: str) -> None:
        """One state's vote, under the kind of what the student did there."""
        agreement = self.agreement.setdefault(kind, _KindAgreement())
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


@dataclass
class _Extraction:
    """One state after the other."""

    order: list[str]
    threshold: int
    contexts: StateContexts
    records: list[PairRecord] = field(default_factory=list[PairRecord])
    report: PairReport = field(default_factory=PairReport)
    seen: set[str] = field(default_factory=set[str])

    def take(self, state: TraceState, results: Mapping[str, TeacherCallResult]) -> None:
        """Take the pair of a state. A call that was not sent (the cap, a stop) is no answer, not even a failed one."""
        answers = {name: result for name, result in results.items() if not is_unsent(result)}
        self.report.num_asked += bool(answers)
        try:
            student = parse_reply(state["student_action"])
        except InputError:
            self.report.drop("student_unreadable")
            return
        context = self.contexts.at(state)
        actions = {name: self._action(answers[name]) for name in self.order if name in answers}
        keys = {name: None if action is None else action_key(action, context) for name, action in actions.items()}
        student_key, kind = action_key(student, context), action_kind(student)
        result = count_votes(keys, self.threshold)
        if answers:
            self.report.count(kind, result, student_key)
        if result.winner is None:
            self.report.drop(result.reason if answers else "not_asked")
        elif result.winner.key == student_key:
            self.report.drop("agrees_with_student")
        else:
            self.records.append(self._record(state, result, actions, answers, kind))

    def _record(
        self,
        state: TraceState,
        result: Vote,
        actions: Mapping[str, Action | None],
        answers: Mapping[str, TeacherCallResult],
        kind: str,
    ) -> PairRecord:
        assert result.winner is not None
        first = result.winner.teachers[0]
        action = actions[first]
        assert action is not None
        pair = DPOPair(
            state_id=state["state_id"],
            state_messages=state["messages"],
            chosen=reply_text(answers[first], action),
            rejected=state["student_action"],
            n_teachers_agreeing=len(result.winner.teachers),
        )
        return PairRecord(
            pair=pair,
            chosen_by=first,
            teachers=result.winner.teachers,
            classes=tuple(vote_class.teachers for vote_class in result.classes),
            student_kind=kind,
            chosen_kind=action_kind(action),
            chosen_action=action,
        )

    def _action(self, result: TeacherCallResult) -> Action | None:
        """A teacher's action; None, and counted, where it has no vote."""
        action, reason = voter_of(result)
        if action is None:
            self.report.fail(reason)
        return action


def _unused(state_id: str, seen_ids: set[str]) -> str:
    if state_id in seen_ids:
        fix = "Give each state an id of its own, or pairs of one would be made of answers to another"
        raise InputError(explain("state_id", got=f"{state_id!r} twice", expected="every id once", fix=fix))
    seen_ids.add(state_id)
    return state_id
