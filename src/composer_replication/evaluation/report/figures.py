"""Prepare the evaluation for the report: the verdict, the metrics with their intervals, and the sampled actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.evaluation.report.plots import BAD, ONE, QUIET, TWO, histograms
from composer_replication.evaluation.report.records import Row, RunRecords
from composer_replication.runs.files import WORSE_BESIDES

_WORDS = {
    "better": "Better",
    "worse": "Worse",
    "no_difference": "No difference seen",
    "too_thin": "Too little data",
    "not_evaluated": "Not evaluated",
    "other_weights": "Of other weights",
}
# Labels of the arms, in the order of the table.
_ARMS = {"after": "after training", "control": "shuffled control", "difference": "after, less control"}
# Number of decimals by a part of the unit's name; other units get three.
_DECIMALS = {"nats": 3, "tokens": 1, "1,000": 1, "1000": 1, "per thousand": 1}
# Labels of the keys in the record's `sampled.by_arm`.
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
# The table of calls lists so many tools, the most frequent first.
_MAX_TOOLS = 20
UNCHANGED = "no change"
# The widest interval takes 46 of the 50 percent on its side of a strip, so it ends short of the edge.
_MAX_STRIP_PERCENT = 46.0


class ReportVerdict(NamedTuple):
    """The verdict as the report shows it: a word with its label, two sentences, and remarks."""

    word: str
    label: str
    sentences: tuple[str, str]
    remarks: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The part of the first sentence before its colon, which introduces a number."""
        head, colon, _ = self.sentences[0].partition(": ")
        return f"{head}." if colon else head

    @property
    def figure(self) -> str:
        """The part of the first sentence after its colon, as a sentence of its own; empty if there is no colon."""
        rest = self.sentences[0].partition(": ")[2]
        return rest[:1].upper() + rest[1:]


class _ArmInterval(NamedTuple):
    """The value of one metric for one arm.

    `state` is "clear" if the whole interval lies on the better side of 0, "wrong" if it lies on the worse side, and
    "open" otherwise. `at` (the estimate), `start` and `width` (the interval) are positions in percent on a strip with 0
    in the middle and better values to the right. `interval` is empty if there is none, and "no change" if all values
    are 0.
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
    """A metric with its value for each arm."""

    label: str
    unit: str
    better: str
    is_primary: bool
    kind: str
    arms: list[_ArmInterval]

    @property
    def is_still(self) -> bool:
        """Whether the metric changed in no arm.

        The primary metric must not be folded away, so for it the value is false.
        """
        return not self.is_primary and all(arm.interval == UNCHANGED for arm in self.arms)

    @property
    def has_control(self) -> bool:
        return self.of("control") is not None

    def of(self, arm: str) -> _ArmInterval | None:
        """Return the value of the arm with this name in the evaluation.verdict, or None if there is none."""
        return next((interval for interval in self.arms if interval.arm == _ARMS[arm]), None)


def evaluation_values(records: RunRecords, num_sessions: int) -> dict[str, Any]:
    """Return the values that the page templates need to show the evaluation."""
    evaluation = records.evaluation
    arms, counts = _sampled_table(evaluation)
    mix_arms, mix = _call_mix(evaluation)
    all_figures = _make_figures(evaluation)
    verdict, worse = _make_verdict(records, num_sessions), _worse_metrics(all_figures)
    return {
        "verdict": verdict,
        "remarks": [remark for remark in verdict.remarks if not (worse and remark.startswith(WORSE_BESIDES))],
        "evaluation": evaluation,
        "other_weights": records.other_weights,
        "of_shuffles": _shuffles_sentence(evaluation),
        "figures": all_figures,
        "still": [figure for figure in all_figures if figure.is_still],
        "got_worse": worse,
        "near_duplicates": _near_duplicates_sentence(evaluation),
        "primary": _primary_figure(evaluation),
        "figures_of_kinds": _figures_by_kind(evaluation),
        "sampled_arms": arms,
        "sampled_counts": counts,
        "mix_arms": mix_arms,
        "mix": mix,
        "changes_svg": _changes_plot(records),
    }


def _make_verdict(records: RunRecords, num_sessions: int) -> ReportVerdict:
    """Return the verdict of the evaluation.

    For a run without an evaluation, the verdict says what the run has and lacks.
    """
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
    num_sites = sum(site.is_kept and hint is not None for site, hint in records.sites)
    sessions, calls = _count_text(num_sessions, "session"), _count_text(num_sites, "failing call")
    first = f"{sessions} in this run, with {calls} to learn from."
    steps = (records.training_record or {}).get("steps")
    if steps:
        second = f"A model was trained on them for {steps} steps; crf evaluate measures whether that helped."
    else:
        second = "No training on them has finished yet: run crf train."
    return ReportVerdict("not_evaluated", _WORDS["not_evaluated"], (first, second))


def _control_lacks(evaluation: Row) -> list[str]:
    """Return the channels that did not run in the control.

    Evaluations by older versions list these channels but have no remark about them.
    """
    control = (evaluation.get("models") or {}).get("control") or {}
    return list(control.get("lacks") or ())


def _near_duplicates_sentence(evaluation: Row | None) -> str:
    """Return a sentence on the held-out states that were excluded as near-duplicates of training states.

    The result is empty if no state was excluded.
    """
    split = (evaluation or {}).get("split") or {}
    number, states = split.get("near_duplicates") or 0, split.get("states")
    of_all = f" of {states:,}" if states else ""
    verb = "occurs" if number == 1 else "occur"
    sentence = f"{number:,}{of_all} held-out states {verb} nearly word for word in a training session"
    return f"{sentence} and are not evaluated" if number else ""


def _shuffles_sentence(evaluation: Row | None) -> str:
    """Return a sentence on how many shuffles the control's intervals cover. Without a control, it is empty."""
    rows = (evaluation or {}).get("figures") or ()
    number = max((row.get("shuffles") or 0 for row in rows), default=0)
    if number == 1:
        return " The control is one shuffle: the intervals do not cover the variation between shuffles."
    return f" The intervals of the control and of the difference also cover its {number} shuffles." if number else ""


def _make_figures(evaluation: Row | None) -> list[_ReportFigure]:
    """Return the metrics over all kinds of errors, with the primary metric first."""
    return _group_rows(evaluation, by_kind=False)


def _primary_figure(evaluation: Row | None) -> _ReportFigure | None:
    """Return the primary metric, with its strip scaled to its own interval, or None if there is no primary metric."""
    rows = (evaluation or {}).get("figures", ())
    primary_names = {row["name"] for row in rows if row["is_primary"]}
    return next(
        iter(_group_rows({"figures": [row for row in rows if row["name"] in primary_names]}, by_kind=False)), None
    )


def _worse_metrics(all_figures: Iterable[_ReportFigure]) -> list[str]:
    """Return the label and value of each metric, except the primary one, that became worse in training.

    A metric became worse if its interval lies entirely on the worse side of 0.
    """
    return [
        f"{figure.label} ({figure.arms[0].estimate} {figure.unit})"
        for figure in all_figures
        if not figure.is_primary and figure.arms[0].arm == _ARMS["after"] and figure.arms[0].state == "wrong"
    ]


def _figures_by_kind(evaluation: Row | None) -> list[_ReportFigure]:
    """Return the primary metric after training, separately for each kind of error."""
    primary = evaluation["primary"] if evaluation else ""
    rows = [row for row in (evaluation or {}).get("figures", ()) if row["name"] == primary and row["arm"] == "after"]
    return _group_rows({"figures": rows}, by_kind=True)


def _group_rows(evaluation: Row | None, *, by_kind: bool) -> list[_ReportFigure]:
    rows = [row for row in (evaluation or {}).get("figures", ()) if bool(row["kind"]) == by_kind]
    # All strips with the same unit share a scale, so that their lengths can be compared.
    max_abs: dict[str, float] = defaultdict(float)
    for row in rows:
        ends = [abs(end) for end in (row["low"], row["high"], row["estimate"]) if end is not None]
        max_abs[row["unit"]] = max(max_abs[row["unit"]], *ends, 0.0)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["name"], row["kind"] or ""].append(row)
    arm_order = list(_ARMS)
    figures = [
        _ReportFigure(
            label=str(first["label"]),
            unit=str(first["unit"]),
            better=str(first["better"]),
            is_primary=bool(first["is_primary"]),
            kind=kind,
            arms=[
                _arm_interval(row, max_abs[row["unit"]])
                for row in sorted(
                    group, key=lambda row: arm_order.index(row["arm"]) if row["arm"] in arm_order else len(arm_order)
                )
            ],
        )
        for (_, kind), group in groups.items()
        for first in [group[0]]
    ]
    return sorted(figures, key=lambda figure: not figure.is_primary)


def _arm_interval(row: Row, max_abs: float) -> _ArmInterval:
    estimate, low, high = row["estimate"], row["low"], row["high"]
    unit, arm = str(row["unit"]), str(row["arm"])
    n = f"{row['n']:,} in {_count_text(row['sessions'], row.get('over', 'session'))}"
    if estimate is None or low is None or high is None:
        return _ArmInterval(_ARMS.get(arm, arm), "not known", "", n, "open", 50, 50, 0)
    if low == high:
        return _ArmInterval(_ARMS.get(arm, arm), "0", UNCHANGED, n, "open", 50, 50, 0)
    # `or 1.0`: all values with this unit may be 0.
    scale = _MAX_STRIP_PERCENT / (max_abs or 1.0)
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
    """Return a number as text with its sign (a typographic minus), rounded to the decimals usual for its unit."""
    decimals = next((digits for part, digits in _DECIMALS.items() if part in unit), 3)
    # 0.0042 nats would be 0.004 with three decimals, so it gets four.
    text = f"{value:+,.{decimals + (decimals == 3 and abs(value) < 0.01)}f}"
    return "0" if float(text.replace(",", "")) == 0 else text.replace("-", "\N{MINUS SIGN}")


def _sampled_table(evaluation: Row | None) -> tuple[list[str], list[tuple[str, list[Any]]]]:
    """Return the arms and the rows of the table of sampled actions. A row is a label with one value per arm."""
    arms = _sampled_arms(evaluation)
    columns = {
        arm: {
            **{name: value for name, value in counts.items() if not isinstance(value, Mapping)},
            **{f"judged: {verdict}": number for verdict, number in counts.get("verdicts", {}).items()},
        }
        for arm, counts in arms.items()
    }
    names = dict.fromkeys(name for counts in columns.values() for name in counts)
    return list(columns), [
        (_SAMPLED.get(name, name), [counts.get(name) for counts in columns.values()]) for name in names
    ]


def _call_mix(evaluation: Row | None) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """Return the arms and, for each tool, its share of each arm's calls.

    The shares reveal a policy that only looks around and never acts.
    """
    shares: dict[str, dict[str, float]] = {}
    for arm, counts in _sampled_arms(evaluation).items():
        total = sum(counts.get("calls", {}).values())
        if total:
            shares[arm] = {str(tool): number / total for tool, number in counts["calls"].items()}
    max_share = {
        tool: max(arm_shares.get(tool, 0.0) for arm_shares in shares.values())
        for arm_shares in shares.values()
        for tool in arm_shares
    }
    tools = sorted(max_share, key=lambda tool: (-max_share[tool], tool))[:_MAX_TOOLS]
    return list(shares), [(tool, [arm_shares.get(tool, 0.0) for arm_shares in shares.values()]) for tool in tools]


def _sampled_arms(evaluation: Row | None) -> dict[str, Row]:
    """Return the record's counts for each arm from which actions were sampled."""
    by_arm: Mapping[str, Row] = ((evaluation or {}).get("sampled") or {}).get("by_arm") or {}
    return {arm: counts for arm, counts in by_arm.items() if counts}


def _count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ---- the plot of changes

_ROLES = {
    "erring": ("erring calls", BAD),
    "correction": ("corrections", TWO),
    "good": ("good calls", ONE),
}
# Fewer values than this are not worth a histogram.
_MIN_PLOTTED_VALUES = 3


class _Changes(NamedTuple):
    """Changes in log-prob per token, grouped by the role of the decision, with one value per decision."""

    after: Mapping[str, list[float]]
    control: Mapping[str, list[float]]


def _role_changes(evaluated: Iterable[Sequence[Row]]) -> _Changes:
    """Return how training changed the log-probs of the held-out decisions."""
    after: dict[str, list[float]] = defaultdict(list)
    control: dict[str, list[float]] = defaultdict(list)
    for rows in evaluated:
        for row in rows:
            after[row["role"]].append(row["after"] - row["before"])
            if row["control"] is not None:
                control[row["role"]].append(row["control"] - row["before"])
    return _Changes(after, control)


def _changes_plot(records: RunRecords) -> str:
    """Return a plot of the changes of the held-out decisions by role, for the trained model and the control."""
    changes = _role_changes(records.evaluated.values())
    groups: dict[str, tuple[list[float], str]] = {}
    for role, (label, color) in _ROLES.items():
        if len(changes.after.get(role, ())) >= _MIN_PLOTTED_VALUES:
            groups[label] = (changes.after[role], color)
        if len(changes.control.get(role, ())) >= _MIN_PLOTTED_VALUES and role == "erring":
            groups["erring, control"] = (changes.control[role], QUIET)
    if not groups:
        return ""
    # Screen readers read the description instead of the plot.
    medians = ", ".join(f"{label} {signed(sorted(v)[len(v) // 2], 'nats')}" for label, (v, _) in groups.items())
    return histograms(groups, name="changes", description=f"Medians of the change in nats a token: {medians}")
