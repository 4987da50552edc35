"""`crf run`: every step of the table, one after the other; what is there and still holds is not made again.

It can be stopped anywhere, by a kill too: each step leaves its file whole or not at all, a training goes on from its
last checkpoint, and paid answers are kept. The same command goes on, and ends with the same report.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.config import CrfConfig
from composer_replication.errors import InputError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.evaluation import control_name
from composer_replication.runs.pairs import read_pairs
from composer_replication.runs.sites import read_sites
from composer_replication.runs.split import read_split
from composer_replication.steps.stale import evaluated_of, hashes, note_files, trained_of, why_files, why_records
from composer_replication.steps.table import step_named

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.training import Progress

RECORDS = {"split": "split", "sites": "sites", "replay": "teacher_calls", "pairs": "pairs"}
"""The steps that write records, and the artefact that tells whether one has to be made."""
_FEWEST_TO_JUDGE = 5


@dataclass(frozen=True)
class Listener:
    """Whom to tell: what comes next and why, what came of it, sentences; and how far a reading or a training is."""

    begin: Callable[[str, str], None] = field(default_factory=lambda: lambda _name, _why: None)
    done: Callable[[str, Any], None] = field(default_factory=lambda: lambda _name, _result: None)
    say: Callable[[str], None] = field(default_factory=lambda: lambda _text: None)
    reading: Callable[[], AbstractContextManager[Callable[[int, int], None]]] = field(
        default_factory=lambda: lambda: nullcontext(lambda _done, _total: None)
    )
    training: Callable[[int], AbstractContextManager[Progress | None]] = field(
        default_factory=lambda: lambda _steps: nullcontext()
    )


class Outcome(NamedTuple):
    """What became of a step: made, or why not; and how long it took."""

    name: str
    was_made: bool
    why: str
    seconds: float


@dataclass(kw_only=True)
class RunResult:
    """All outcomes in order; the evaluation's record and the report, where it came that far."""

    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    evaluation: dict[str, Any] | None = None
    report: Path | None = None
    stopped_by: str = ""
    """The signal that ended a training; the same command goes on."""


class Learnable(NamedTuple):
    """What there is to learn from, and to judge by: sites that may teach, pairs, and in how many sessions."""

    sites: int
    pairs: int
    sessions: int
    failures: Counter[str]
    test_sessions: int
    test_sessions_with_errors: int

    def in_words(self) -> str:
        blamed = ", ".join(f"{number} {blame}" for blame, number in self.failures.most_common())
        failed = f"{sum(self.failures.values())} calls failed (whose doing: {blamed})" if blamed else "no call failed"
        return f"{self.sites} mistakes to teach and {self.pairs} pairs in {self.sessions} sessions; {failed}"


def run_steps(config: CrfConfig, run: RunDir, listener: Listener | None = None) -> RunResult:
    """Go through the table; raises InputError where there is nothing to learn from, before any weights are loaded."""
    told, result = listener or Listener(), RunResult()
    config = replace(config, train=replace(config.train, run=str(run.root)))
    with run.used_alone("crf run"):
        for name, why, make in _steps(config, run, told):
            if not why:
                result.outcomes.append(Outcome(name, False, "as it should be", 0.0))
                continue
            told.begin(name, why)
            began = time.monotonic()
            made = make()
            result.outcomes.append(Outcome(name, True, why, time.monotonic() - began))
            told.done(name, made)
            if getattr(made, "stopped_by", ""):
                result.stopped_by = made.stopped_by
                return result
    _take_results(run, result)
    return result


_Step = tuple[str, str, Callable[[], Any]]


def _steps(config: CrfConfig, run: RunDir, told: Listener) -> Iterator[_Step]:
    """Each step with why it has to be made, asked when those before it are done."""
    if config.ingest.paths:
        yield "ingest", "reads what is new", lambda: _ingest(config, run, told)
    for name, written in RECORDS.items():
        if name != "replay" or config.replay.teachers is not None:
            yield (
                name,
                why_records(written, config, run),
                partial(step_named(name).function, getattr(config, name), run),
            )
    check_learnable(config, learnable(run), told.say)
    yield from _of_training(config, run, told)


def _of_training(config: CrfConfig, run: RunDir, told: Listener) -> Iterator[_Step]:
    from composer_replication.steps.train import set_aside, trained_in, why_train

    arms = arms_of(config)
    for name, arm in arms.items():
        why, is_other = why_train(arm, run)
        if is_other:
            told.say(f"the training that is there is another ({why}): it is kept in {set_aside(arm, run)}")
        yield name, why, lambda arm=arm: _train(arm, run, told)
    folders = {name: trained_in(arm, run) for name, arm in arms.items()}
    weights: dict[str, Any] = {"control": None, "after": folders.pop("train"), **folders}
    made_of = evaluated_of(config, run, weights)

    def compare() -> Any:
        names = {"before": config.train.model, "after": str(weights["after"]), "control": [*map(str, folders.values())]}
        with told.training(0) as progress:
            record = step_named("evaluate").function(config, run, **names, progress=progress)
        note_files("evaluate", run, made_of)
        return record

    yield "evaluate", why_files("evaluate", run, made_of), compare
    records = ("evaluation", "conversations", "split", "sites", "pairs", "teacher_calls", "hint_proof")
    shown = {**hashes(run, records), **trained_of(weights)}

    def page() -> Any:
        report = step_named("report").function(run, trained_in=weights["after"].parent)
        note_files("report", run, shown)
        return report

    yield "report", why_files("report", run, shown), page


def _ingest(config: CrfConfig, run: RunDir, told: Listener) -> Any:
    with told.reading() as progress:
        return step_named("ingest").function(config.ingest, run, progress=progress)


def _train(config: CrfConfig, run: RunDir, told: Listener) -> Any:
    with told.training(config.train.optimiser.steps) as progress:
        return step_named("train").function(config, run, progress=progress)


def arms_of(config: CrfConfig) -> dict[str, CrfConfig]:
    """The trainings of a run, by the name of their step: its own, and its controls where those are asked for."""
    arms, shuffles = {"train": config}, range(1, config.run.shuffles + 1) if config.run.control else ()
    for shuffle in shuffles:
        arms[control_name(shuffle)] = replace(config, train=replace(config.train, control="shuffled", shuffle=shuffle))
    return arms


def _take_results(run: RunDir, result: RunResult) -> None:
    from composer_replication.runs.evaluation import read_evaluation

    result.evaluation, result.report = read_evaluation(run), run.path("report_html")


# ---- whether there is anything to learn


def check_model(config: CrfConfig, run: RunDir) -> None:
    """Raise before anything is read where the model has no tokenizer or template, or no logs are named."""
    from composer_replication.trainer.from_config.inputs import read_inputs

    if not config.ingest.paths and not run.path("conversations").exists():
        expected = "a log or a folder with logs: `crf run PATH... --model MODEL`"
        raise InputError(explain("PATH", got="none, and no run to go on with", expected=expected))
    read_inputs(replace(config, train=replace(config.train, run=None)))


def learnable(run: RunDir) -> Learnable:
    """What the sites and pairs of a run have to teach with, and to judge by."""
    rows = read_split(run) or []
    session_of = {row.conversation_id: row.session for row in rows}
    test = {row.conversation_id for row in rows if row.side == "test"}
    sites, erring, failures = 0, set[str](), Counter[str]()
    learnt = set[str]()
    for site, hint in read_sites(run):
        may_teach = site.is_kept and hint is not None
        if site.conversation_id in test:
            erring |= {session_of[site.conversation_id]} if may_teach else set()
            continue
        failures.update([site.blame] if site.kind != "no_failure" else [])
        if may_teach:
            sites += 1
            learnt.add(session_of.get(site.conversation_id, site.conversation_id))
    pairs = [identity for identity, _ in read_pairs(run) if identity not in test]
    learnt |= {session_of.get(identity, identity) for identity in pairs}
    num_test = len({row.session for row in rows if row.side == "test"})
    return Learnable(sites, len(pairs), len(learnt), failures, num_test, len(erring))


def check_learnable(config: CrfConfig, there: Learnable, say: Callable[[str], None]) -> None:
    """Raise where there is less than `run.fewest` to learn from, with what would change that; say what is thin."""
    if there.sites + there.pairs < max(config.run.fewest, 1):
        few = "nothing to learn" if not there.sites + there.pairs else "your data is too thin"
        fix = (
            "More sessions would change that, of an agent whose calls fail now and then: add their folders. So would "
            "advisers who say what they would have done (--advisers), and pairs.where_it_worked = true with them; "
            "sites.min_confidence = 0.3 keeps failures that are less sure. run.fewest = 0 trains all the same."
        )
        expected = f"at least {max(config.run.fewest, 1)} together (run.fewest)"
        raise InputError(explain(few, got=there.in_words(), expected=expected, fix=fix))
    if there.test_sessions_with_errors < _FEWEST_TO_JUDGE:
        say(
            f"thin: {there.test_sessions_with_errors} of {there.test_sessions} held-out sessions hold a mistake to"
            f" judge by, and fewer than {_FEWEST_TO_JUDGE} make no verdict: more sessions, or a larger split.test"
        )
