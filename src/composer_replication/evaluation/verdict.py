"""The primary figure as a word and two sentences, and what could have been seen with so many sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.evaluation.figures import SORTS, FigureArm, Value, interval_of
from composer_replication.evaluation.statistics import Interval, Word, verdict_word

_WORDS: Mapping[Word, str] = {
    "better": "The trained model is better on held-out sessions",
    "worse": "The trained model is worse on held-out sessions",
    "no_difference": "No difference between the two models can be seen on held-out sessions",
    "too_thin": "Your data is too thin to say whether the trained model is better",
}


def verdict_of(
    primary: str, values: Sequence[Value], *, has_control: bool, fewest_sessions: int, seed: int, nothing: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record's `verdict` and `power`; `nothing` says why there is no value at all."""
    sort = SORTS[primary]
    if not values:
        power = {"sites": 0, "sessions": 0, "smallest_effect": None, "unit": sort.unit}
        why = nothing or "no held-out session holds an error that could be compared with a good call"
        ask = f"Errors in at least {fewest_sessions} held-out sessions are needed; hold more out or ingest more."
        said = {"word": "too_thin", "sentences": [f"{_WORDS['too_thin']}: {why}.", ask]}
        return said, power | {"sentence": "Nothing could be seen."}
    found = interval_of(values, "after", seed)
    word = verdict_word(found, higher_is_better=sort.better == "higher", fewest_sessions=fewest_sessions)
    power = _power(found, sort.unit)
    first = f"{_WORDS[word]}: {_in_words(primary, found)}."
    second = power["sentence"]
    if word == "too_thin":
        second = (
            f"Errors in at least {fewest_sessions} held-out sessions are needed, and there are {found.num_sessions}; "
            "hold more sessions out, or ingest more."
        )
    elif has_control and word in ("better", "worse"):
        second = _beside_control(values, seed)
    return {"word": word, "sentences": [first, second]}, power


def _in_words(primary: str, found: Interval) -> str:
    sort = SORTS[primary]
    what = f"{sort.label[0].lower()}{sort.label[1:]} {found.estimate:+.3g} {sort.unit}"
    if found.low is None or found.high is None:
        return f"{what}, from one session"
    return f"{what}, 95% interval {found.low:+.3g} to {found.high:+.3g} ({_of(found)})"


def _of(found: Interval) -> str:
    """As `12 sites of 5 sessions`."""
    sites = f"{found.num_values:,} site" + ("s" if found.num_values != 1 else "")
    return f"{sites} of {found.num_sessions:,} session" + ("s" if found.num_sessions != 1 else "")


def _power(found: Interval, unit: str) -> dict[str, Any]:
    sentence = "With one session nothing can be seen."
    if found.smallest is not None:
        effect = f"{found.smallest:.3g} {unit}"
        sentence = f"With {_of(found)} the smallest effect that would be seen four times of five is {effect}."
    return {
        "sites": found.num_values,
        "sessions": found.num_sessions,
        "smallest_effect": found.smallest,
        "unit": unit,
        "sentence": sentence,
    }


def _beside_control(values: Sequence[Value], seed: int) -> str:
    arms: tuple[FigureArm, FigureArm] = ("control", "difference")
    control, difference = (interval_of(values, arm, seed) for arm in arms)
    moved = f"The shuffled control moved by {control.estimate:+.3g} ({control.low:+.3g} to {control.high:+.3g})"
    if difference.excludes_zero:
        return f"{moved}, and the difference to it is not zero: what the hints and pairs say made the change."
    return f"{moved}, and the difference to it may be zero: the change need not come from what hints and pairs say."
