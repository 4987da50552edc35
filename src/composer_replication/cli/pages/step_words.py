"""What came of each step of a run in a line, and of all of it in a few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def words_of(name: str, made: Any) -> str:
    """The result of a step in a line; empty where there is none to tell."""
    word = _WORDS.get(name.partition("-")[0])  # a control of another shuffle is called control-2
    return word(made) if word is not None else ""


def result_lines(evaluation: Mapping[str, Any], report: Path) -> Iterator[str]:
    """What a run has come to: the verdict, its figure with the control's, what was drawn, and where to look."""
    yield from evaluation["verdict"]["sentences"]
    yield from evaluation["verdict"].get("remarks", ())
    name = evaluation["primary"]
    primary = [figure for figure in evaluation["figures"] if figure["name"] == name and figure.get("kind") is None]
    for arm, words in (("after", "trained"), ("control", "control")):
        for figure in primary:
            if figure["arm"] == arm:
                shuffles = f", {figure['shuffles']} shuffles" if (figure.get("shuffles") or 1) > 1 else ""
                yield f"{words}: {_figure(figure)}{shuffles}"
    drawn = [
        figure
        for figure in evaluation["figures"]
        if (figure["name"], figure["arm"], figure.get("kind")) == ("sampled_failures", "after", None)
    ]
    yield from (f"drawn calls: {_figure(figure)}" for figure in drawn if figure["name"] != name)
    yield f"report: {report}"


def _figure(figure: Mapping[str, Any]) -> str:
    what = f"{figure['label'][0].lower()}{figure['label'][1:]}"
    number = f"{figure['estimate']:+.3g}" if figure["estimate"] is not None else "none"
    interval = "" if figure["low"] == figure["high"] else f" [{figure['low']:+.3g}, {figure['high']:+.3g}]"
    counted = f"{figure['n']} in {figure['sessions']} {figure.get('over', 'session')}s"
    return f"{what}: {number}{interval} {figure['unit']} ({figure['better']} is better), {counted}"


def _ingest(outcome: Any) -> str:
    total = outcome.total
    return (
        f"{total.sessions:,} sessions, {total.turns:,} turns, {total.calls:,} calls, {total.errors:,} results that"
        f" the logs mark as errors; redacted: {_count(total.secrets, 'secret')} and {_count(total.names, 'user name')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _split(outcome: Any) -> str:
    sides = ", ".join(f"{count.side} {count.sessions:,}" for count in outcome.counts())
    return f"sessions: {sides}; near-duplicate states of the test: {outcome.num_near_duplicates:,}"


def _sites(outcome: Any) -> str:
    failures = [site for site in outcome.sites if site.kind != "no_failure"]
    count = sum(site.is_kept for site in failures)
    return f"{len(failures):,} failures, by marks of the logs and by what results say; {count:,} are mistakes to teach"


def _replay(outcome: Any) -> str:
    return f"{outcome.num_answers:,} answers, ${outcome.report.spent_usd:.4f} spent"


def _pairs(outcome: Any) -> str:
    by_source = ", ".join(f"{source} {number:,}" for source, number in sorted(outcome.by_source.items()))
    return f"{sum(outcome.by_source.values()):,} pairs" + (f": {by_source}" if by_source else "")


def _train(outcome: Any) -> str:
    channels = ", ".join(
        f"{channel.name} {'in ' if channel.steps else ''}{channel.in_words(None)}"
        for channel in outcome.channels
        if channel.weight
    )
    return f"{outcome.steps:,} of {outcome.total_steps:,} steps; {channels}"


_WORDS = {
    "ingest": _ingest,
    "split": _split,
    "sites": _sites,
    "replay": _replay,
    "pairs": _pairs,
    "train": _train,
    "control": _train,
    "evaluate": lambda evaluation: str(evaluation["verdict"]["word"]).replace("_", " "),
    "report": lambda report: str(report.html),
}
