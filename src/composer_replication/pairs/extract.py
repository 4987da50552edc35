"""Extract preference pairs from states and the teachers' answers.

If enough teachers took the same action in a state and the student took a different one, the teachers' action is chosen
and the student's is rejected. `PairReport` counts the states without a pair, by reason, and the agreement among
teachers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.action_text import parse_reply
from composer_replication.atomic import resolve_link, staged
from composer_replication.canonical_json import encode_as_written
from composer_replication.errors import InputError, explain
from composer_replication.runs.files import TEACHERS
from composer_replication.sites.actions.equality import Tools, action_key, action_kind
from composer_replication.teacher_replay.votes import (
    StateContexts,
    Vote,
    answer_text,
    count_votes,
    is_unsent,
    read_vote,
)
from composer_replication.types import Action, DPOPair, TeacherCallResult, TraceState


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """A pair with its provenance: the teacher that wrote the chosen text, the teachers that agreed, and all votes.

    `source` is "teachers", or the source of a pair from the session itself (see `corrections.Correction`). Such a pair
    has no votes, and its `rejected_action` is a single call.
    """

    pair: DPOPair
    chosen_by: str
    teachers: tuple[str, ...]
    classes: tuple[tuple[str, ...], ...]
    student_kind: str
    chosen_kind: str
    chosen_action: Action | None  # the chosen text without its thinking; None if the thinking is trained on as well
    rejected_action: Action | None = None  # None if the whole logged turn is rejected
    source: str = TEACHERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """The extracted pairs in the order of their states, with a report on all states."""

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
    """Return at most one pair per state, which prefers the teachers' action to the student's.

    A pair requires at least `agreement_threshold` teachers that took the same action.
    """
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
    """Return the same pairs as `extract_dpo_pairs`, with their provenance and a report.

    Args:
        states: The states. A state may have its own `cwd` and `tools`.
        teacher_actions: The teachers' answers. An answer may have the structured `message` of its reply.
        agreement_threshold: The number of teachers that must take the same action.
        teachers: The order of precedence: among teachers that agree, the text of the first is chosen. By default, the
            order in which the teachers appear in the answers.
        cwd: The working folder, for states without one.
        tools: The tool schemas, for states without any.

    Raises:
        InputError: Two states have the same id.
    """
    results = list(teacher_actions)
    order = list(dict.fromkeys([*(teachers or ()), *(result["teacher_slug"] for result in results)]))
    answers: dict[str, dict[str, TeacherCallResult]] = {}
    for result in results:
        state_answers = answers.setdefault(result["state_id"], {})
        # The first answer counts. If it failed, the next one is the answer to a retry.
        if result["teacher_slug"] not in state_answers or state_answers[result["teacher_slug"]]["error"] is not None:
            state_answers[result["teacher_slug"]] = result
    work = _PairExtractor(order, agreement_threshold, StateContexts(cwd=cwd, tools=tools))
    for state in states:
        work.add(state, answers.pop(work.register(state["state_id"]), {}))
    work.report.num_states, work.report.num_pairs = len(work.state_ids), len(work.records)
    # The answers of every state have been removed, so the remaining ones belong to no state.
    work.report.num_unknown_states = len(answers)
    return Extraction(records=work.records, report=work.report)


def save_pairs(pairs: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write pairs to a JSONL file atomically, creating its folder if it is missing."""
    target = resolve_link(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as stage:
        for number, pair in enumerate(pairs):
            stage.file.write(encode_as_written(pair, where=f"pair {number}") + b"\n")
        stage.commit()


@dataclass(slots=True)
class _KindAgreement:
    """Counts over the states in which the student's action had the same kind: a tool name, or `text`."""

    num_states: int = 0
    num_votes: int = 0
    num_with_student: int = 0
    num_teacher_pairs: int = 0
    num_agreeing_pairs: int = 0
    num_consensus: int = 0

    @property
    def with_student(self) -> float | None:
        """The fraction of votes for the student's action, or None if there are no votes."""
        return self.num_with_student / self.num_votes if self.num_votes else None

    @property
    def with_each_other(self) -> float | None:
        """The fraction of teacher pairs that took the same action, or None if no state has two answers."""
        return self.num_agreeing_pairs / self.num_teacher_pairs if self.num_teacher_pairs else None


@dataclass(slots=True)
class PairReport:
    """Counts over all states in an extraction.

    `drops` has the number of states without a pair, and `failed_replies` the number of answers without a vote, each by
    reason. `num_asked` is the number of states for which at least one request was sent. `num_rejected_worked` is the
    number of states in which the student's action worked although the teachers agreed on a different one.
    """

    num_states: int = 0
    num_asked: int = 0
    num_pairs: int = 0
    num_unknown_states: int = 0  # ids in the answers that no state has
    num_rejected_worked: int = 0
    drops: Counter[str] = field(default_factory=Counter[str])
    failed_replies: Counter[str] = field(default_factory=Counter[str])
    agreement: dict[str, _KindAgreement] = field(default_factory=dict[str, _KindAgreement])

    def drop(self, reason: str) -> None:
        self.drops[reason] += 1

    def fail(self, reason: str) -> None:
        self.failed_replies[reason] += 1

    def count_vote(self, kind: str, vote: Vote, student_key: str) -> None:
        """Add the vote on one state to the counts for the kind of the student's action."""
        agreement = self.agreement.setdefault(kind, _KindAgreement())
        agreement.num_states += 1
        agreement.num_votes += vote.num_votes
        agreement.num_with_student += sum(
            len(vote_class.teachers) for vote_class in vote.classes if vote_class.key == student_key
        )
        # n votes make n(n-1)/2 pairs of teachers.
        agreement.num_teacher_pairs += vote.num_votes * (vote.num_votes - 1) // 2
        agreement.num_agreeing_pairs += vote.num_agreeing_pairs
        agreement.num_consensus += vote.winner is not None

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON values, with kinds in alphabetical order."""
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
class _PairExtractor:
    """An extraction in progress, which processes one state at a time."""

    order: list[str]
    threshold: int
    contexts: StateContexts
    records: list[PairRecord] = field(default_factory=list[PairRecord])
    report: PairReport = field(default_factory=PairReport)
    state_ids: set[str] = field(default_factory=set[str])

    def register(self, state_id: str) -> str:
        """Record and return the id of the next state. Raises InputError if an earlier state has the same id."""
        if state_id in self.state_ids:
            fix = "Give every state its own id: answers are matched to states by id"
            raise InputError(explain("state_id", got=f"{state_id!r} twice", expected="every id once", fix=fix))
        self.state_ids.add(state_id)
        return state_id

    def add(self, state: TraceState, results: Mapping[str, TeacherCallResult]) -> None:
        """Add the pair for a state, or count the reason why there is none."""
        # A request that was not sent (because of the spending cap or an interruption) is not an answer, not even a
        # failed one.
        answers = {name: result for name, result in results.items() if not is_unsent(result)}
        self.report.num_asked += bool(answers)
        try:
            student = parse_reply(state["student_action"])
        except InputError:
            # Without the student's action, it is unknown whether the teachers disagree with it.
            self.report.drop("student_unreadable")
            return
        context = self.contexts.at(state)
        actions = {name: self._teacher_action(answers[name]) for name in self.order if name in answers}
        keys = {name: None if action is None else action_key(action, context) for name, action in actions.items()}
        student_key, kind = action_key(student, context), action_kind(student)
        vote = count_votes(keys, self.threshold)
        if answers:
            self.report.count_vote(kind, vote, student_key)
        if vote.winner is None:
            self.report.drop(vote.reason if answers else "not_asked")
        elif vote.winner.key == student_key:
            self.report.drop("agrees_with_student")
        else:
            self.records.append(self._make_record(state, vote, actions, answers, kind))

    def _make_record(
        self,
        state: TraceState,
        vote: Vote,
        actions: Mapping[str, Action | None],
        answers: Mapping[str, TeacherCallResult],
        kind: str,
    ) -> PairRecord:
        """Return the pair for a vote with a winning action.

        The text is that of the first teacher that took this action.
        """
        assert vote.winner is not None
        first = vote.winner.teachers[0]
        action = actions[first]
        assert action is not None
        pair = DPOPair(
            state_id=state["state_id"],
            state_messages=state["messages"],
            chosen=answer_text(answers[first], action),
            rejected=state["student_action"],
            n_teachers_agreeing=len(vote.winner.teachers),
        )
        return PairRecord(
            pair=pair,
            chosen_by=first,
            teachers=vote.winner.teachers,
            classes=tuple(vote_class.teachers for vote_class in vote.classes),
            student_kind=kind,
            chosen_kind=action_kind(action),
            chosen_action=action,
        )

    def _teacher_action(self, result: TeacherCallResult) -> Action | None:
        """Return a teacher's action, or None if the answer has no vote, which counts as a failed reply."""
        action, reason = read_vote(result)
        if action is None:
            self.report.fail(reason)
        return action
