"""Whether there is anything to learn from, and enough to judge by: asked of sites, pairs and split, before training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.errors import InputError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.pairs import read_pairs
from composer_replication.runs.sites import read_sites
from composer_replication.runs.split import PlacedConversation, read_split

_SEEN_FROM = 1.96 + 0.84
"""Standard errors that an effect must have to be seen, at 5%, four times of five."""


class Side(NamedTuple):
    """One side of the split: its sessions, those with a mistake that may be taught or judged by, and the mistakes."""

    sessions: int = 0
    erring: int = 0
    mistakes: int = 0


class Learnable(NamedTuple):
    """What there is to learn from, and to judge by. `failures` are all of the run's, by whose doing they were.

    A mistake is a failure of the model that is kept with a hint. `units` are what the evaluation's interval is over:
    held-out sessions with a mistake, or their projects where whole projects are held out.
    """

    learnt: Side
    pairs: int
    failures: Counter[str]
    test: Side
    over: str
    units: int
    repeated: int = 0
    """Held-out mistakes that are not judged by, as learnt sessions hold their states, too."""

    def in_words(self) -> str:
        blamed = ", ".join(f"{number} {blame}" for blame, number in self.failures.most_common())
        failed = f"{_many(self.failures.total(), 'failure')} (whose doing: {blamed})" if blamed else "no call failed"
        return (
            f"{_many(self.learnt.mistakes, 'mistake')} to teach in {self.learnt.erring} of {self.learnt.sessions}"
            f" sessions, and {_many(self.pairs, 'pair')}; in the whole run {failed}"
        )

    def to_judge_by(self) -> str:
        """What the evaluation will have, and how large an effect must be for it to show."""
        said = f"{_many(self.test.mistakes, 'mistake')} in {self.test.erring} of {self.test.sessions} held-out sessions"
        if self.repeated:
            said += f" ({self.repeated:,} more stand in learnt sessions as well)"
        if self.units < 2:
            return said
        return (
            f"{said}; an effect shows from about {_SEEN_FROM / math.sqrt(self.units):.1f} times as much as {self.over}s"
            " differ among themselves"
        )


def learnable(run: RunDir) -> Learnable:
    """What the sites and pairs of a run have to teach with, and to judge by."""
    rows = {row.conversation_id: row for row in read_split(run) or ()}
    test = {identity for identity, row in rows.items() if row.side == "test"}
    twice = {(identity, turn) for identity, row in rows.items() for turn in row.near_duplicates}
    failures, mistakes, repeated = Counter[str](), list[str](), 0
    for site, hint in read_sites(run):
        failures.update([site.blame] if site.kind != "no_failure" else [])
        is_mistake, is_repeated = site.is_kept and hint is not None, (site.conversation_id, site.turn_id) in twice
        mistakes += [site.conversation_id] if is_mistake and not is_repeated else []
        repeated += is_mistake and is_repeated
    held_out = [each for each in mistakes if each in test]
    judged = _side([row for row in rows.values() if row.side == "test"], held_out)
    is_by_project = bool(rows) and run.meta("split").settings.get("by") == "project"
    return Learnable(
        learnt=_side(
            [row for row in rows.values() if row.side != "test"], [each for each in mistakes if each not in test]
        ),
        pairs=sum(identity not in test for identity, _ in read_pairs(run)),
        failures=failures,
        test=judged,
        over="project" if is_by_project else "session",
        units=len({rows[each].project for each in held_out}) if is_by_project else judged.erring,
        repeated=repeated,
    )


def _side(rows: list[PlacedConversation], mistakes: list[str]) -> Side:
    """In a run that was never split every conversation is a session of its own."""
    session_of = {row.conversation_id: row.session for row in rows}
    erring = {session_of.get(each, each) for each in mistakes}
    return Side(len({*session_of.values(), *erring}), len(erring), len(mistakes))


def check_learnable(config: CrfConfig, there: Learnable, say: Callable[[str], None]) -> None:
    """Raise where there is too little to learn from, or to judge by, with what would change that; say what there is."""
    _check_learnt(config, there)
    needed, is_forced = config.evaluation.fewest_sessions, config.evaluation.primary != "sampled_failures"
    if is_forced and there.units < needed:
        if not config.run.without_verdict:
            raise InputError(_no_verdict(there, needed))
        say(f"no verdict will be possible: {there.to_judge_by()}, and {needed} {there.over}s are needed")
    else:
        say(f"to judge by: {there.to_judge_by()}")


def _check_learnt(config: CrfConfig, there: Learnable) -> None:
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


def _no_verdict(there: Learnable, needed: int) -> str:
    """Training would take its time, and at its end nobody could say whether it helped."""
    sessions, erring = there.learnt.sessions + there.test.sessions, there.learnt.erring + there.test.erring
    more = "More sessions would change that"
    if there.over == "session" and there.test.sessions and erring:
        share = there.test.sessions / sessions
        more += f", about {math.ceil(needed * sessions / (erring * share)):,} like these in all"
        if (larger := math.ceil(20 * needed / erring) / 20) <= 0.5:
            more += f"; or a larger held-out share, `--set split.test={larger:g}`"
    fix = f"{more}. To train all the same, without an answer to whether it helped: `--set run.without_verdict=true`."
    expected = f"mistakes in at least {needed} held-out {there.over}s (evaluation.fewest_sessions)"
    return explain("too little to judge by", got=there.to_judge_by(), expected=expected, fix=fix)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
