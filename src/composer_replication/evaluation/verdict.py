"""The primary figure as a word and two sentences, what could have been seen, and what else a reader has to know."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from composer_replication.evaluation.figures import SORTS, Over, Value, interval_of
from composer_replication.evaluation.statistics import Interval, Word, verdict_word
from composer_replication.runs.evaluation import WORSE_BESIDES, controls_among

_WORDS: Mapping[Word, str] = {
    "better": "The trained model is better on held-out sessions",
    "worse": "The trained model is worse on held-out sessions",
    "no_difference": "No difference between the two models can be seen on held-out sessions",
    "too_thin": "Your data is too thin to say whether the trained model is better",
}
_BROKEN = "Nothing else of it was measured; look in its training for a loss that is not a number."
_MOVES = ("forced_erring", "forced_good")
_HARDLY = 0.01
"""Nats a token: a median change below this is that of weights which have hardly moved."""
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
            sentences = [f"{_WORDS['worse']}: its log-probs there are not numbers.", _BROKEN]
            verdict = {"word": "worse", "sentences": sentences, "remarks": []}
            return verdict, power | {"sentence": "Nothing could be seen."}
        why = nothing or "no held-out session holds an error that could be compared with a good call"
        ask = f"Errors in at least {fewest_sessions} held-out {over}s are needed; hold more out or ingest more."
        verdict = {"word": "too_thin", "sentences": [f"{_WORDS['too_thin']}: {why}.", ask], "remarks": []}
        return verdict, power | {"sentence": "Nothing could be seen."}
    has_control = has_control and bool(controls_among(values[0].change))
    interval = interval_of(values, "after", seed)
    word = verdict_word(interval, higher_is_better=sort.better == "higher", fewest_sessions=fewest_sessions)
    power = _power(interval, sort.unit, over, fewest_sessions)
    first = f"{_WORDS[word]}: {_in_words(primary, interval, over)}."
    second = power["sentence"]
    if interval.num_sessions < fewest_sessions:
        second = (
            f"Errors in at least {fewest_sessions} held-out {over}s are needed, and there are {interval.num_sessions}; "
            f"hold more {over}s out, or ingest more."
        )
    elif has_control and word in ("better", "worse"):
        second = _beside_control(values, interval, seed)
    remarks = [
        _movement(every),
        _of_control(values, interval, over, fewest_sessions, seed) if has_control else "",
        _worse_besides(primary, every, seed, over),
    ]
    return {"word": word, "sentences": [first, second], "remarks": [remark for remark in remarks if remark]}, power


def _in_words(name: str, interval: Interval, over: Over) -> str:
    sort = SORTS[name]
    what = f"{sort.label[0].lower()}{sort.label[1:]} {interval.estimate:+.3g} {sort.unit} ({sort.better} is better)"
    if interval.num_sessions < 2:
        return f"{what}, from one {over}"
    if interval.low is None or interval.low == interval.high:
        return f"{what}, the same in all {_of(interval, over)}"
    return f"{what}, 95% interval {_range(interval)} ({_of(interval, over)})"


def _range(interval: Interval) -> str:
    return "no interval" if interval.low is None else f"{interval.low:+.3g} to {interval.high:+.3g}"


def _of(interval: Interval, over: Over) -> str:
    """As `12 sites of 5 sessions`."""
    sites = f"{interval.num_values:,} site" + ("s" if interval.num_values != 1 else "")
    return f"{sites} of {interval.num_sessions:,} {over}" + ("s" if interval.num_sessions != 1 else "")


def _power(interval: Interval, unit: str, over: Over, fewest: int) -> dict[str, Any]:
    """Of too few sessions no effect is named: their spread, from which it would come, is hardly known."""
    smallest = interval.smallest or None
    if interval.num_sessions < 2:
        sentence = f"With one {over} nothing can be seen."
    elif smallest is None:
        sentence = "Values that are all the same have no spread, and without one nothing says what could be seen."
    elif interval.num_sessions < fewest:
        smallest = None
        sentence = f"No smallest effect is named: errors in {fewest} held-out {over}s are needed for that."
    else:
        effect = f"{smallest:.3g} {unit}"
        sentence = f"With {_of(interval, over)} the smallest effect that would be seen four times of five is {effect}."
    return {
        "sites": interval.num_values,
        "sessions": interval.num_sessions,
        "smallest_effect": smallest,
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


def _movement(every: Mapping[str, Sequence[Value]]) -> str:
    """That the weights have hardly moved, where that is so: without it a figure near 0 looks like a finding."""
    sizes = sorted(abs(value.change["after"]) for name in _MOVES for value in every.get(name, ()))
    drawn = (value.change["after"] for name, values in every.items() if name.startswith("sampled") for value in values)
    if not sizes or any(drawn) or (middle := sizes[len(sizes) // 2]) >= _HARDLY:
        return ""
    if not sizes[-1]:
        return "Nothing moved: every held-out decision is exactly as likely as before the training."
    return (
        f"Training hardly moved the model: half of the held-out decisions changed by less than {middle:.2g} nats a "
        "token. More steps (train.optimiser.steps) or a higher rate (train.optimiser.lr) would."
    )


def _of_control(values: Sequence[Value], after: Interval, over: Over, fewest: int, seed: int) -> str:
    """That a control which learnt from nonsense moved as well, where its interval leaves 0 out."""
    control = interval_of(values, "control", seed)
    if not control.excludes_zero:
        return ""
    few = f" {control.num_sessions} {over}s are too few to be sure of it." if control.num_sessions < fewest else ""
    moved = f"by {control.estimate:+.3g} ({_range(control)}, without 0)"
    if (control.estimate > 0) != (after.estimate > 0):
        return (
            f"The shuffled control moved this figure too, the other way, {moved}: what it learnt is not nothing.{few}"
        )
    why = "a part of what moves is training itself, whatever the hints and pairs say"
    return f"The shuffled control moved this figure too, {moved}: {why}.{few}"


def _worse_besides(primary: str, every: Mapping[str, Sequence[Value]], seed: int, over: Over) -> str:
    """Figures of what training may cost whose whole interval lies on the wrong side."""
    costs: list[str] = []
    for name in (name for name in _COSTS if name != primary and every.get(name)):
        interval = interval_of(every[name], "after", seed)
        if interval.excludes_zero and (interval.estimate > 0) != (SORTS[name].better == "higher"):
            costs.append(_in_words(name, interval, over))
    return f"{WORSE_BESIDES}: {'; '.join(costs)}." if costs else ""
