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


def _figure(each: Mapping[str, Any]) -> str:
    what = f"{each['label'][0].lower()}{each['label'][1:]}"
    number = f"{each['estimate']:+.3g}" if each["estimate"] is not None else "none"
    interval = "" if each["low"] == each["high"] else f" [{each['low']:+.3g}, {each['high']:+.3g}]"
    counted = f"{each['n']} in {each['sessions']} {each.get('over', 'session')}s"
    return f"{what}: {number}{interval} {each['unit']} ({each['better']} is better), {counted}"


def _ingest(made: Any) -> str:
    total = made.total
    return (
        f"{total.sessions:,} sessions, {total.turns:,} turns, {total.calls:,} calls, {total.errors:,} results that"
        f" the logs mark as errors; redacted: {_count(total.secrets, 'secret')} and {_count(total.names, 'user name')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _split(made: Any) -> str:
    sides = ", ".join(f"{count.side} {count.sessions:,}" for count in made.counts())
    return f"sessions: {sides}; near-duplicate states of the test: {made.num_near_duplicates:,}"


def _sites(made: Any) -> str:
    failures = [site for site in made.sites if site.kind != "no_failure"]
    count = sum(site.is_kept for site in failures)
    return f"{len(failures):,} failures, by marks of the logs and by what results say; {count:,} are mistakes to teach"


def _replay(made: Any) -> str:
    return f"{made.num_answers:,} answers, ${made.report.spent_usd:.4f} spent"


def _pairs(made: Any) -> str:
    by_source = ", ".join(f"{source} {number:,}" for source, number in sorted(made.by_source.items()))
    return f"{sum(made.by_source.values()):,} pairs" + (f": {by_source}" if by_source else "")


def _train(made: Any) -> str:
    channels = ", ".join(
        f"{channel.name} {'in ' if channel.steps else ''}{channel.in_words(None)}"
        for channel in made.channels
        if channel.weight
    )
    return f"{made.steps:,} of {made.total_steps:,} steps; {channels}"


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
