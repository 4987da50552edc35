"""Check whether every target run of a batch is what the student's template would have generated at its place.

`SessionJudge` has the expectations of one conversation (`session_oracle`) and judges the batches made from it. A
`Tally` counts the violations by channel and kind, and keeps the first case of each kind as an example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.types import Conversation, Turn
from session_oracle import SessionOracle, late_texts
from target_runs import BatchRuns, Run
from template_oracle import MARK, Student

_MIN_TEXT = 12
"""Shorter texts may occur in a turn by chance."""


@dataclass
class Tally:
    """Counts of target runs by channel, violations by (channel, kind) and notes, with an example of each kind."""

    runs: Counter[str] = field(default_factory=Counter[str])
    tokens: Counter[str] = field(default_factory=Counter[str])
    violations: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    notes: Counter[str] = field(default_factory=Counter[str])
    examples: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    def blame(self, channel: str, kind: str, example: str) -> None:
        self.violations[channel, kind] += 1
        self.examples.setdefault((channel, kind), example)

    def add(self, other: Tally) -> None:
        for mine, theirs in zip(self._counters(), other._counters(), strict=True):
            mine.update(theirs)  # pyright: ignore[reportArgumentType]
        self.examples = other.examples | self.examples

    def _counters(self) -> tuple[Counter[Any], ...]:
        return self.runs, self.tokens, self.violations, self.notes


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A conversation to judge, with what may be trained on in it.

    `hints` are those of kept sites by turn. `answers` are the chosen turns by state, with the number of the assistant
    turn they replace; `trained_states` are the states that are in a batch. `is_own` says which turns the student wrote.
    With `whole` no window is cut, so contexts begin with the conversation. `sample` is the number of turns per
    conversation that are compared with complete renderings; None means all.
    """

    conversation: Conversation
    hints: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    answers: Mapping[str, tuple[int, Turn]] = field(default_factory=dict[str, tuple[int, Turn]])
    trained_states: frozenset[str] = frozenset()
    is_own: Callable[[Turn], bool] = lambda _: False
    whole: bool = False
    sample: int | None = None


class SessionJudge:
    """Judges the batches of one conversation."""

    def __init__(self, student: Student, judged: Judged, tally: Tally) -> None:
        self.student, self.judged, self.tally = student, judged, tally
        conversation = judged.conversation
        self.oracles = [SessionOracle(student, conversation)]
        if student.manners.thinking and any(turn.thinking and judged.is_own(turn) for turn in conversation.turns):
            self.oracles.append(SessionOracle(student, conversation, judged.is_own))
        if student.shows_results_late:  # turns after a result are left out, or everything is rendered as text
            self.oracles.append(SessionOracle(student, conversation, manners=student.manners.as_text()))
        self.turns = self.oracles[0].turns
        self._sample = set(_spread(len(self.turns), judged.sample))
        self._by_target = [self._targets(oracle) for oracle in self.oracles]
        self._trained: set[int] = set()
        self._not_good = _reasons_not_good(judged)
        self._texts = _Texts(judged, self.turns, student.manners.thinking)
        tally.notes["turns"] += len(self.turns)
        tally.notes["turns compared with whole renderings"] += len(self._sample)
        tally.notes["conversations whose template is not append-only"] += not self.oracles[0].is_assembled

    def judge(self, batch: Any, site_turns: Sequence[str], state_ids: Sequence[str]) -> None:
        """Judge a batch. `site_turns` are the turns of its sites, and `state_ids` the states of its pairs."""
        runs = BatchRuns(batch, self.student.bytes_of)
        for run in runs.good_turns():
            self._good_turn(self._counted(run))
        for student, teacher in runs.sites():
            self._site(self._counted(student), self._counted(teacher), set(site_turns))
        pairs = runs.pairs()
        if len(pairs) != len(state_ids):
            self.tally.blame("chosen", "pairs_without_a_state", f"{len(pairs)} pairs, {len(state_ids)} states")
        for (chosen, rejected), state_id in zip(pairs, state_ids, strict=False):
            self._pair(self._counted(chosen), self._counted(rejected), state_id)

    def _counted(self, run: Run) -> Run:
        self.tally.runs[run.channel] += 1
        self.tally.tokens[run.channel] += len(run.tokens)
        return run

    def _targets(self, oracle: SessionOracle) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for number in range(len(self.turns)):
            target = oracle.target(number)
            if number in self._sample:
                exact = oracle.exact(number)
                target = None if exact is None else exact.target
            if target is not None:
                found.setdefault(target, []).append(number)
        return found

    def _good_turn(self, run: Run) -> None:
        number = self._place(run, range(len(self.turns)), passed_over=self._trained)
        if number is None:
            return
        self._trained.add(number)
        for reason in self._not_good.get(number, ()):
            self._blame(run, reason, number)
        if not self.turns[number].text.strip() and not self.turns[number].calls:
            self.tally.notes["good turns with neither text nor call"] += 1

    def _site(self, student: Run, teacher: Run, site_turns: set[str]) -> None:
        allowed = [number for number, turn in enumerate(self.turns) if turn.id in site_turns]
        number = self._place(student, allowed)
        if student.tokens != teacher.tokens:
            self._blame(teacher, "targets_of_the_two_sides_differ")
        if number is None:
            self._blame(teacher, "student_side_is_wrong")
            return
        hints = [hint.strip().encode() for hint in self.judged.hints.get(self.turns[number].id, ())]
        added = _inserted(student.context, teacher.context)
        if added is None:
            self._blame(teacher, "context_is_not_the_student's_with_a_hint", number)
        elif not any(hint in added.replace(MARK, b"") for hint in hints):
            self._blame(teacher, "hint_not_in_context", number)

    def _pair(self, chosen: Run, rejected: Run, state_id: str) -> None:
        number, answer = self.judged.answers[state_id]
        self._place(rejected, [number])
        matching = [oracle for oracle in self.oracles if self._answer_target(oracle, number, answer) == chosen.target]
        if not matching:
            self._blame(chosen, self._why_target(chosen), number)
        elif not any(self._fits(oracle, number, chosen, answer) for oracle in matching):
            self._blame(chosen, self._why_context(chosen, [number]), number)
        if chosen.context != rejected.context:
            self._blame(chosen, "contexts_of_the_two_sides_differ", number)

    def _place(self, run: Run, allowed: Sequence[int], passed_over: set[int] | None = None) -> int | None:
        """Return the turn whose expectation this run meets, or count a violation and return None."""
        seen_target: list[int] = []
        for oracle, by_target in zip(self.oracles, self._by_target, strict=True):
            numbers = [number for number in by_target.get(run.target, ()) if number in allowed]
            seen_target += numbers
            fitting = [number for number in numbers if self._fits(oracle, number, run)]
            fresh = [number for number in fitting if number not in (passed_over or ())]
            if fresh and "broken" not in run.channel:
                if fresh[0] in oracle.late:
                    self._blame(run, "text_moved_before_its_call", fresh[0])
                return fresh[0]
            if fitting and "broken" not in run.channel:
                self._blame(run, "turn_is_trained_twice", fitting[0])
                return None
        for number in self.oracles[0].late.intersection(allowed):
            if self._keeps_order(run, self.turns[number]) and self._fits(self.oracles[0], number, run):
                return number
        self._blame(run, self._why_context(run, seen_target) if seen_target else self._why_target(run))
        return None

    def _keeps_order(self, run: Run, turn: Turn) -> bool:
        """Return whether the first call of a turn with text after its calls precedes its last text in the run."""
        plain = run.target.replace(MARK, b"")
        name, last = turn.calls[0].name.encode(), late_texts(turn)[-1].strip().encode()
        return run.target.endswith(MARK) and name in plain and plain.find(name) < plain.rfind(last)

    def _answer_target(self, oracle: SessionOracle, number: int, answer: Turn) -> bytes | None:
        if number not in self._sample:
            return oracle.target(number, answer)
        exact = oracle.exact(number, answer)
        return None if exact is None else exact.target

    def _fits(self, oracle: SessionOracle, number: int, run: Run, answer: Turn | None = None) -> bool:
        if number not in self._sample:
            self.tally.notes["contexts compared by their end alone"] += not oracle.is_assembled
            return oracle.fits(number, run.context, whole=self.judged.whole)
        expected = oracle.exact(number, answer)
        return expected is not None and oracle.agrees(number, expected, run.context, whole=self.judged.whole)

    def _why_context(self, run: Run, numbers: Sequence[int]) -> str:
        if "broken" in run.channel:
            return "rows_do_not_follow_each_other"
        if self._texts.foreign_thought_in(run.context):
            return "foreign_thinking_in_context"
        exact = [self.oracles[0].exact(number) for number in numbers]
        plain = self.student.without_own_blocks(run.context).replace(MARK, b"")
        texts = [each.context.replace(MARK, b"") for each in exact if each is not None]
        if any(text == plain or (not self.judged.whole and text.endswith(plain)) for text in texts):
            is_block = any(each and not self.student.ends_alike(run.context, each.has_own_block) for each in exact)
            return "empty_block_missing_or_too_much_in_context" if is_block else "control_tokens_differ_in_context"
        return "context_differs"

    def _why_target(self, run: Run) -> str:
        target, own, header = run.target, self.student.own_block, self.student.header
        known = {each for by_target in self._by_target for each in by_target}
        plain = target.replace(MARK, b"")
        ends = [each for each in known if target.endswith(each)]
        if own and target.startswith(own):
            return "empty_block_in_target"
        if self._texts.foreign_thought_in(target) or self._without_thought(target) in known:
            return "foreign_thinking_in_target"
        if not target.endswith(MARK):
            return "no_end_of_turn"
        if any((header + own).endswith(target[: -len(end)]) for end in ends) or (header and header in target):
            return "header_in_target"
        found = self._texts.foreign_text_in(plain)
        if found:
            return f"{found}_in_target"
        same = any(plain == each.replace(MARK, b"") for each in known)
        return "control_tokens_differ_in_target" if same else "not_what_the_template_writes"

    def _without_thought(self, target: bytes) -> bytes:
        """Return the part of a target after a thinking block."""
        tags = [MARK + each + MARK for each in self.student.own_block.split(MARK)[1::2]]
        is_thought = len(tags) == 2 and target.startswith(tags[0])
        return target.partition(tags[1])[2].lstrip(b"\n") if is_thought else b""

    def _blame(self, run: Run, kind: str, number: int | None = None) -> None:
        where = "" if number is None else f", turn {self.turns[number].id}"
        shown = f"…{run.context[-60:]!r} then {run.target[:120]!r}… {run.target[-40:]!r}"
        self.tally.blame(run.channel, kind, f"{self.judged.conversation.id}{where}: {shown}")


class _Texts:
    """Texts that must not be in a target: thinking of other models, hints, results, and user messages."""

    def __init__(self, judged: Judged, turns: Sequence[Turn], shows_thinking: bool) -> None:
        thoughts = [turn.thinking for turn in turns if not judged.is_own(turn)]
        self._thoughts = _long(thoughts) if shows_thinking else []
        users = [turn.text for turn in judged.conversation.turns if turn.role in ("user", "system")]
        results = [result.text for turn in judged.conversation.turns for result in turn.results]
        hints = [hint for several in judged.hints.values() for hint in several]
        self._foreign = {"hint": _long(hints), "result": _long(results), "user": _long(users)}

    def foreign_thought_in(self, marked: bytes) -> bool:
        plain = marked.replace(MARK, b"")
        return any(thought in plain for thought in self._thoughts)

    def foreign_text_in(self, plain: bytes) -> str:
        return next((kind for kind, texts in self._foreign.items() if any(text in plain for text in texts)), "")


def _long(texts: Sequence[str]) -> list[bytes]:
    stripped = {text.strip() for text in texts}
    return [each.encode("utf-8", "surrogatepass") for each in sorted(stripped) if len(each) >= _MIN_TEXT]


def _reasons_not_good(judged: Judged) -> dict[int, list[str]]:
    """Return the assistant turns that must not be in channel 1, with the reasons."""
    turns = judged.conversation.turns
    results = [result for turn in turns for result in turn.results]
    failed, answered = {result.call_id for result in results if result.is_error}, {result.call_id for result in results}
    stopped = {
        max((n for n, turn in enumerate(turns[:at]) if turn.role == "assistant"), default=-1)
        for at, turn in enumerate(turns)
        if turn.role == "user" and turn.text.lstrip().startswith("[Request interrupted by user")
    }
    rejected = {number for state, (number, _) in judged.answers.items() if state in judged.trained_states}
    found: dict[int, list[str]] = {}
    asked = [(at, turn) for at, turn in enumerate(turns) if turn.role == "assistant"]
    for number, (at, turn) in enumerate(asked):
        reasons = {
            "turn_is_not_the_model's": turn.origin != "model",
            "rejected_turn_as_good": number in rejected,
            "erring_turn_as_good": turn.id in judged.hints,
            "failed_turn_as_good": any(call.id in failed for call in turn.calls),
            "interrupted_turn_as_good": at in stopped and any(call.id not in answered for call in turn.calls),
        }
        found[number] = [name for name, holds in reasons.items() if holds]
    return found


def _inserted(student: bytes, teacher: bytes) -> bytes | None:
    """Return the single piece that the teacher's context has in addition to the student's, or None."""
    extra = len(teacher) - len(student)
    if extra <= 0:
        return None
    low = next((n for n, (a, b) in enumerate(zip(student, teacher, strict=False)) if a != b), len(student))
    back = len(student) - low
    return teacher[low : low + extra] if teacher[len(teacher) - back :] == student[low:] else None


def _spread(count: int, sample: int | None) -> list[int]:
    if sample is None or sample >= count:
        return list(range(count))
    return [] if sample == 0 else sorted({round(n * (count - 1) / max(1, sample - 1)) for n in range(sample)})
