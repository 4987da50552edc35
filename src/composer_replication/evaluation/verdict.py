"""The primary figure as a word and two sentences, and what could have been seen with so many sessions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from composer_replication.evaluation.figures import SORTS, Over, Value, interval_of
from composer_replication.evaluation.statistics import Interval, Word, verdict_word

_WORDS: Mapping[Word, str] = {
    "better": "The trained model is better on held-out sessions",
    "worse": "The trained model is worse on held-out sessions",
    "no_difference": "No difference between the two models can be seen on held-out sessions",
    "too_thin": "Your data is too thin to say whether the trained model is better",
}
_BROKEN = "Nothing else of it was measured; look in its training for a loss that is not a number."
_COSTS = ("forced_good", "loss_good_turns", "sampled_failures", "sampled_unparsed", "sampled_no_call")


def verdict_of(
    primary: str,
    every: Mapping[str, Sequence[Value]],
    *,
    has_control: bool,
    fewest_sessions: int,
    seed: int,
    nothing: str = "",
    over: Over = "session",
    broken: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record's `verdict` and `power`, from the values of all figures; `nothing` says why there is none at all.

    `broken` are models whose log-probs are not numbers: of a trained one that is the verdict.
    """
    sort, values = SORTS[primary], every.get(primary, ())
    if not values:
        power = {"sites": 0, "sessions": 0, "smallest_effect": None, "unit": sort.unit}
        if "after" in broken and "before" not in broken:
            said = {"word": "worse", "sentences": [f"{_WORDS['worse']}: its log-probs there are not numbers.", _BROKEN]}
            return said, power | {"sentence": "Nothing could be seen."}
        why = nothing or "no held-out session holds an error that could be compared with a good call"
        ask = f"Errors in at least {fewest_sessions} held-out {over}s are needed; hold more out or ingest more."
        said = {"word": "too_thin", "sentences": [f"{_WORDS['too_thin']}: {why}.", ask]}
        return said, power | {"sentence": "Nothing could be seen."}
    found = interval_of(values, "after", seed)
    word = verdict_word(found, higher_is_better=sort.better == "higher", fewest_sessions=fewest_sessions)
    power = _power(found, sort.unit, over)
    first = f"{_WORDS[word]}: {_in_words(primary, found, over)}."
    second = power["sentence"]
    if found.num_sessions < fewest_sessions:
        second = (
            f"Errors in at least {fewest_sessions} held-out {over}s are needed, and there are {found.num_sessions}; "
            f"hold more {over}s out, or ingest more."
        )
    elif has_control and word in ("better", "worse"):
        second = _beside_control(values, found, seed)
    return {"word": word, "sentences": [first, second + _worse_besides(primary, every, seed, over)]}, power


def _in_words(name: str, found: Interval, over: Over) -> str:
    sort = SORTS[name]
    what = f"{sort.label[0].lower()}{sort.label[1:]} {found.estimate:+.3g} {sort.unit}"
    if found.low is None:
        return f"{what}, from one {over}" if found.num_sessions < 2 else f"{what}, the same in all {_of(found, over)}"
    return f"{what}, 95% interval {_range(found)} ({_of(found, over)})"


def _range(found: Interval) -> str:
    return "no interval" if found.low is None else f"{found.low:+.3g} to {found.high:+.3g}"


def _of(found: Interval, over: Over) -> str:
    """As `12 sites of 5 sessions`."""
    sites = f"{found.num_values:,} site" + ("s" if found.num_values != 1 else "")
    return f"{sites} of {found.num_sessions:,} {over}" + ("s" if found.num_sessions != 1 else "")


def _power(found: Interval, unit: str, over: Over) -> dict[str, Any]:
    sentence = f"With one {over} nothing can be seen."
    if found.num_sessions > 1:
        sentence = "Values that are all the same have no spread, and without one there is no interval."
    if found.smallest is not None:
        effect = f"{found.smallest:.3g} {unit}"
        sentence = f"With {_of(found, over)} the smallest effect that would be seen four times of five is {effect}."
    return {
        "sites": found.num_values,
        "sessions": found.num_sessions,
        "smallest_effect": found.smallest,
        "unit": unit,
        "sentence": sentence,
    }


def _beside_control(values: Sequence[Value], after: Interval, seed: int) -> str:
    """Whether the control, which learnt the same way from nonsense, moved as far."""
    control, difference = interval_of(values, "control", seed), interval_of(values, "difference", seed)
    shuffles = control.num_repeats
    moved = f"The shuffled control moved by {control.estimate:+.3g} ({_range(control)}, {_shuffles(shuffles)})"
    apart = f"the difference to it is {difference.estimate:+.3g} ({_range(difference)})"
    if not difference.excludes_zero:
        return f"{moved}; {apart} and may be zero: any training of this kind may have done it, whatever the hints say."
    if (difference.estimate > 0) == (after.estimate > 0):
        return f"{moved}; {apart} and not zero: what the hints and pairs say made the change."
    return f"{moved}; {apart}: the control moved further, so the change does not come from what hints and pairs say."


def _shuffles(number: int) -> str:
    """What the interval of a control is over, besides sessions."""
    return "over 1 shuffle, whose luck it leaves out" if number == 1 else f"over {number} shuffles"


def _worse_besides(primary: str, every: Mapping[str, Sequence[Value]], seed: int, over: Over) -> str:
    """Figures of what training may cost whose whole interval lies on the wrong side."""
    costs: list[str] = []
    for name in (each for each in _COSTS if each != primary and every.get(each)):
        found = interval_of(every[name], "after", seed)
        if found.excludes_zero and (found.estimate > 0) != (SORTS[name].better == "higher"):
            costs.append(_in_words(name, found, over))
    return f" Worse besides: {'; '.join(costs)}." if costs else ""
