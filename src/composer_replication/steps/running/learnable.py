"""Whether there is enough to learn from, and enough errors to judge by: both are checked before any training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.errors import InputError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.pairs import read_pairs
from composer_replication.runs.sites import read_sites
from composer_replication.runs.split import PlacedConversation, read_split, required_split

if TYPE_CHECKING:
    from composer_replication.evaluation.evaluate import Measurable

_SEEN_FROM = 1.96 + 0.84
"""Standard errors that an effect must have to be seen, at 5%, four times of five."""
_WHY_LEFT_OUT = {
    "near_duplicate": "also in a training session",
    "no_good_call_in_the_session": "in a session without a good call",
    "no_correction": "without a right call in its session",
    "without_hint": "without a hint",
}
"""Reasons of the evaluation in words; those of a template or of a window are shown by their names."""


class Side(NamedTuple):
    """The sessions that are learnt from, those of them with a mistake that may be taught, and these mistakes."""

    sessions: int = 0
    erring: int = 0
    mistakes: int = 0


class Learnable(NamedTuple):
    """What there is to learn from. `failures` are all of the run's, by who caused them.

    A mistake is a failure of the model that is kept with a hint.
    """

    learnt: Side
    pairs: int
    failures: Counter[str]

    def in_words(self) -> str:
        blamed = ", ".join(f"{number} {blame}" for blame, number in self.failures.most_common())
        failed = f"{_many(self.failures.total(), 'failure')} (whose doing: {blamed})" if blamed else "no call failed"
        return (
            f"{_many(self.learnt.mistakes, 'mistake')} to teach in {self.learnt.erring} of {self.learnt.sessions}"
            f" sessions, and {_many(self.pairs, 'pair')}; in the whole run {failed}"
        )


def learnable(run: RunDir) -> Learnable:
    """Count what the sites and pairs of a run have to teach with, outside of its test sessions."""
    rows = {row.conversation_id: row for row in read_split(run) or ()}
    test = {identity for identity, row in rows.items() if row.side == "test"}
    failures, mistakes = Counter[str](), list[str]()
    for site, hint in read_sites(run):
        failures.update([site.blame] if site.kind != "no_failure" else [])
        is_taught = site.is_kept and hint is not None and site.conversation_id not in test
        mistakes += [site.conversation_id] if is_taught else []
    return Learnable(
        learnt=_side([row for row in rows.values() if row.side != "test"], mistakes),
        pairs=sum(identity not in test for identity, _ in read_pairs(run)),
        failures=failures,
    )


def _side(rows: list[PlacedConversation], mistakes: list[str]) -> Side:
    """In a run that was never split every conversation is a session of its own."""
    session_of = {row.conversation_id: row.session for row in rows}
    erring = {session_of.get(conversation_id, conversation_id) for conversation_id in mistakes}
    return Side(len({*session_of.values(), *erring}), len(erring), len(mistakes))


def check_learnable(config: CrfConfig, there: Learnable) -> None:
    """Raise InputError, with what would change it, where there is too little to learn from."""
    to_learn, fewest = there.learnt.mistakes + there.pairs, max(config.run.fewest, 1)
    if to_learn < fewest:
        fix = (
            "More sessions would change that, of an agent whose calls fail now and then: add their folders. So would "
            "advisers who say what they would have done (--advisers), and pairs.where_it_worked = true with them; "
            "sites.min_confidence = 0.3 keeps failures that are less sure. run.fewest = 0 trains all the same."
        )
        few = "your data is too thin" if to_learn else "nothing to learn"
        raise InputError(
            explain(few, got=there.in_words(), expected=f"at least {fewest} together (run.fewest)", fix=fix)
        )


def to_judge_by(config: CrfConfig, run: RunDir) -> Measurable:
    """Return what the evaluation of this run will measure, by its own selection; loads the model's tokenizer.

    `config` is the one that the training and the evaluation get: its windows fit the model.
    """
    from composer_replication.evaluation.evaluate import measurable

    return measurable(config, run, required_split(run), config.train.required_model())


def check_judgeable(config: CrfConfig, there: Learnable, judged: Measurable, say: Callable[[str], None]) -> None:
    """Say what the evaluation will measure; raise InputError where it is too little for a verdict."""
    needed = config.evaluation.fewest_sessions
    if judged.units >= needed:
        say(f"to judge by: {_judged_in_words(config, judged)}")
    elif config.run.without_verdict:
        words = _judged_in_words(config, judged)
        say(f"no verdict will be possible: {words}, and {needed} {judged.over}s are needed")
    else:
        raise InputError(_no_verdict(config, there, judged))


def _judged_in_words(config: CrfConfig, judged: Measurable) -> str:
    """What is measured, why other errors are left out, and how large an effect must be to show."""
    noun = "state" if config.evaluation.primary == "sampled_failures" else "mistake"
    words = f"{_many(judged.values, noun)} in {judged.units} of {judged.held_out} held-out {judged.over}s"
    if judged.left_out:
        reasons = ", ".join(f"{number:,} {_why_left_out(name)}" for name, number in judged.left_out.items())
        words += f" (left out: {reasons})"
    if judged.units < 2:
        return words
    smallest = _SEEN_FROM / math.sqrt(judged.units)
    return f"{words}; smallest detectable effect: about {smallest:.1f} standard deviations between {judged.over}s"


def _why_left_out(name: str) -> str:
    reason = name.partition(": ")[2] or name  # as `sdpo_jsd: without_hint`
    return _WHY_LEFT_OUT.get(reason, reason.replace("_", " "))


def _no_verdict(config: CrfConfig, there: Learnable, judged: Measurable) -> str:
    """Training would take its time, and at its end nobody could say whether it helped."""
    needed, more = config.evaluation.fewest_sessions, "More sessions would change that"
    if judged.over == "session" and judged.units:
        sessions, measured = there.learnt.sessions + judged.held_out, judged.units / judged.held_out
        more += f", about {math.ceil(needed * sessions / judged.units):,} like these in all"
        if judged.held_out / sessions < (larger := math.ceil(20 * needed / (measured * sessions)) / 20) <= 0.5:
            more += f"; or a larger held-out share, `--set split.test={larger:g}`"
    fix = f"{more}. To train all the same, without an answer to whether it helped: `--set run.without_verdict=true`."
    expected = f"mistakes in at least {needed} held-out {judged.over}s (evaluation.fewest_sessions)"
    return explain("too little to judge by", got=_judged_in_words(config, judged), expected=expected, fix=fix)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
