"""Show the evaluation on a page: verdict, metrics with intervals, and sampled actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from composer_replication.evaluation.report.records import Row, RunRecords

_WORDS = {
    "better": "Better",
    "worse": "Worse",
    "no_difference": "No difference seen",
    "too_thin": "Too little data",
    "not_evaluated": "Not evaluated",
    "other_weights": "Of other weights",
}
# Arms in the order of the table, with their labels.
_ARMS = {"after": "after training", "control": "shuffled control", "difference": "after, less control"}
# Decimals by a part of the unit's name; other units get three.
_DECIMALS = {"nats": 3, "tokens": 1, "1,000": 1, "1000": 1, "per thousand": 1}
# Table labels of the keys in the record's `sampled.by_arm`.
_SAMPLED = {
    "failures": "would fail or cannot be read, per 1,000",
    "unparsed": "cannot be read or do not end, per 1,000",
    "cut_off": "do not end within their most tokens, per 1,000",
    "no_call": "make no call, per 1,000",
    "unknown_tool": "call a tool that is not there, per 1,000",
    "agreement": "do what the session did, at good states, per 1,000",
    "corrected": "do what was right, where the session erred, per 1,000",
    "looks": "only look, per 1,000",
    "length": "length in tokens",
    "rows": "actions",
}
# Tools in the table of calls, the most frequent first.
_MOST_TOOLS = 20
UNCHANGED = "no change"
_SHARE_OF_STRIP = 46.0  # of 50%: the widest interval ends short of the edge


class ReportVerdict(NamedTuple):
    """The verdict: a word, two sentences, and remarks that a reader has to know."""

    word: str
    label: str
    sentences: tuple[str, str]
    remarks: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The first sentence up to its number."""
        head, colon, _ = self.sentences[0].partition(": ")
        return f"{head}." if colon else head

    @property
    def figure(self) -> str:
        """The rest of the first sentence, as a sentence of its own; empty if there is none."""
        rest = self.sentences[0].partition(": ")[2]
        return rest[:1].upper() + rest[1:]


class _ArmInterval(NamedTuple):
    """One metric of one arm; `state` says on which side of 0 its interval lies: clear (better), wrong, or open.

    `at`, `start` and `width` place it on a strip, in percent: the middle is 0 and the right half is better. `interval`
    is empty if there is none, and "no change" if nothing changed.
    """

    arm: str
    estimate: str
    interval: str
    n: str
    state: str
    at: float
    start: float
    width: float


class _ReportFigure(NamedTuple):
    """A metric with the values of its arms."""

    label: str
    unit: str
    better: str
    is_primary: bool
    kind: str
    arms: list[_ArmInterval]

    @property
    def is_still(self) -> bool:
        """Whether no arm changed anything."""
        return not self.is_primary and all(arm.interval == UNCHANGED for arm in self.arms)

    @property
    def has_control(self) -> bool:
        return self.of("control") is not None

    def of(self, arm: str) -> _ArmInterval | None:
        """Return the interval of one arm, by the arm's name in the evaluation."""
        return next((interval for interval in self.arms if interval.arm == _ARMS[arm]), None)


def verdict(records: RunRecords, num_sessions: int) -> ReportVerdict:
    """Return the verdict of the evaluation; for a run without one, what exists and what is missing."""
    evaluation = records.evaluation
    if evaluation is not None:
        verdict_record = evaluation["verdict"]
        first, second = [*verdict_record["sentences"], "", ""][:2]
        if records.other_weights:
            arms = " and ".join(_ARMS[arm] for arm in records.other_weights)
            notice = f"The evaluated weights ({arms}) are not those in this run: evaluate these with crf evaluate."
            return ReportVerdict(
                "other_weights", _WORDS["other_weights"], (notice, f"About the others it says: {first}")
            )
        word = str(verdict_record["word"])
        remarks = tuple(map(str, verdict_record.get("remarks") or _control_lacks(evaluation)))
        return ReportVerdict(word, _WORDS.get(word, word.replace("_", " ")), (first, second), remarks)
    sites = [site for site, hint in records.sites if site.is_kept and hint is not None]
    first = (
        f"{_counted(num_sessions, 'session')} in this run, with {_counted(len(sites), 'failing call')} to learn from."
    )
    steps = (records.training_record or {}).get("steps")
    if steps:
        second = f"A model was trained on them for {steps} steps; crf evaluate measures whether that helped."
    else:
        second = "No training on them has finished yet: run crf train."
    return ReportVerdict("not_evaluated", _WORDS["not_evaluated"], (first, second))


def _control_lacks(evaluation: Row) -> list[str]:
    """Return the channels that the control lacked; needed for old evaluations, which have no remarks."""
    control = (evaluation.get("models") or {}).get("control") or {}
    return list(control.get("lacks") or ())


def near_duplicates(evaluation: Row | None) -> str:
    """Return a sentence on held-out states that were left out as near-duplicates of training
    states; empty without any.
    """
    split = (evaluation or {}).get("split") or {}
    number, states = split.get("near_duplicates") or 0, split.get("states")
    of_all = f" of {states:,}" if states else ""
    verb = "occurs" if number == 1 else "occur"
    sentence = f"{number:,}{of_all} held-out states {verb} nearly word for word in a training session"
    return f"{sentence} and are not evaluated" if number else ""


def of_shuffles(evaluation: Row | None) -> str:
    """Return a sentence on the shuffles that the control's intervals cover; empty without a control."""
    rows = (evaluation or {}).get("figures") or ()
    number = max((row.get("shuffles") or 0 for row in rows), default=0)
    if number == 1:
        return " The control is one shuffle: the intervals do not cover the variation between shuffles."
    return f" The intervals of the control and of the difference also cover its {number} shuffles." if number else ""


def figures(evaluation: Row | None) -> list[_ReportFigure]:
    """Return the metrics over all kinds of errors, the primary one first."""
    return _figures(evaluation, of_kinds=False)


def primary_figure(evaluation: Row | None) -> _ReportFigure | None:
    """Return the primary metric alone; its strip is scaled to its own interval."""
    rows = (evaluation or {}).get("figures", ())
    primary_names = {row["name"] for row in rows if row["is_primary"]}
    return next(
        iter(_figures({"figures": [row for row in rows if row["name"] in primary_names]}, of_kinds=False)), None
    )


def got_worse(all_figures: Iterable[_ReportFigure]) -> list[str]:
    """Return the metrics, except the primary one, whose interval after training lies on the wrong side of 0."""
    return [
        f"{figure.label} ({figure.arms[0].estimate} {figure.unit})"
        for figure in all_figures
        if not figure.is_primary and figure.arms[0].arm == _ARMS["after"] and figure.arms[0].state == "wrong"
    ]


def figures_of_kinds(evaluation: Row | None) -> list[_ReportFigure]:
    """Return the primary metric by kind of error, after training."""
    primary = evaluation["primary"] if evaluation else ""
    rows = [row for row in (evaluation or {}).get("figures", ()) if row["name"] == primary and row["arm"] == "after"]
    return _figures({"figures": rows}, of_kinds=True)


def _figures(evaluation: Row | None, *, of_kinds: bool) -> list[_ReportFigure]:
    rows = [row for row in (evaluation or {}).get("figures", ()) if bool(row["kind"]) == of_kinds]
    # All strips of one unit share a scale, so that their lengths can be compared.
    widest: dict[str, float] = defaultdict(float)
    for row in rows:
        ends = [abs(end) for end in (row["low"], row["high"], row["estimate"]) if end is not None]
        widest[row["unit"]] = max(widest[row["unit"]], *ends, 0.0)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["name"], row["kind"] or ""].append(row)
    order = list(_ARMS)
    all_figures = [
        _ReportFigure(
            label=str(first["label"]),
            unit=str(first["unit"]),
            better=str(first["better"]),
            is_primary=bool(first["is_primary"]),
            kind=kind,
            arms=[
                _interval(row, widest[row["unit"]])
                for row in sorted(group, key=lambda row: order.index(row["arm"]) if row["arm"] in order else len(order))
            ],
        )
        for (_, kind), group in groups.items()
        for first in [group[0]]
    ]
    return sorted(all_figures, key=lambda figure: not figure.is_primary)


def _interval(row: Row, widest: float) -> _ArmInterval:
    estimate, low, high = row["estimate"], row["low"], row["high"]
    unit, arm = str(row["unit"]), str(row["arm"])
    n = f"{row['n']:,} in {_counted(row['sessions'], row.get('over', 'session'))}"
    if estimate is None or low is None or high is None:
        return _ArmInterval(_ARMS.get(arm, arm), "not known", "", n, "open", 50, 50, 0)
    if low == high:
        return _ArmInterval(_ARMS.get(arm, arm), "0", UNCHANGED, n, "open", 50, 50, 0)
    # `or 1.0`: all values of the unit are 0.
    scale = _SHARE_OF_STRIP / (widest or 1.0)
    sign = 1 if row["better"] == "higher" else -1
    state = "clear" if min(sign * low, sign * high) > 0 else "wrong" if max(sign * low, sign * high) < 0 else "open"
    return _ArmInterval(
        arm=_ARMS.get(arm, arm),
        estimate=signed(estimate, unit),
        interval=f"{signed(low, unit)} to {signed(high, unit)}",
        n=n,
        state=state,
        at=round(50 + scale * sign * estimate, 2),
        start=round(50 + scale * min(sign * low, sign * high), 2),
        width=round(scale * (high - low), 2),
    )


def signed(value: float, unit: str = "") -> str:
    """Return a number with its sign, rounded as its unit deserves and finer if it is small; with a
    typographic minus.
    """
    decimals = next((digits for part, digits in _DECIMALS.items() if part in unit), 3)
    # 0.0042 nats would be 0.004 with three decimals, so it gets four.
    text = f"{value:+,.{decimals + (decimals == 3 and abs(value) < 0.01)}f}"
    return "0" if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}")


def sampled_table(evaluation: Row | None) -> tuple[list[str], list[tuple[str, list[Any]]]]:
    """Return the arms, and for each metric of the sampled actions its name with one value per arm."""
    arms = _arms(evaluation)
    flat = {
        arm: {
            **{name: value for name, value in counts.items() if not isinstance(value, Mapping)},
            **{f"judged: {verdict}": number for verdict, number in counts.get("verdicts", {}).items()},
        }
        for arm, counts in arms.items()
    }
    names = dict.fromkeys(name for counts in flat.values() for name in counts)
    return list(flat), [(_SAMPLED.get(name, name), [counts.get(name) for counts in flat.values()]) for name in names]


def call_mix(evaluation: Row | None) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """Return the share of each tool among the calls of each arm: a policy that only looks around shows here."""
    mixes: dict[str, dict[str, float]] = {}
    for arm, counts in _arms(evaluation).items():
        total = sum(counts.get("calls", {}).values())
        if total:
            mixes[arm] = {str(tool): number / total for tool, number in counts["calls"].items()}
    most = {tool: max(mix.get(tool, 0.0) for mix in mixes.values()) for mix in mixes.values() for tool in mix}
    tools = sorted(most, key=lambda tool: (-most[tool], tool))[:_MOST_TOOLS]
    return list(mixes), [(tool, [mix.get(tool, 0.0) for mix in mixes.values()]) for tool in tools]


def _arms(evaluation: Row | None) -> dict[str, Row]:
    """Return the counts of each arm that was sampled from."""
    by_arm: Mapping[str, Row] = ((evaluation or {}).get("sampled") or {}).get("by_arm") or {}
    return {arm: counts for arm, counts in by_arm.items() if counts}


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
