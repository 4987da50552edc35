"""Decide whether the trained model is better or worse, and build the record in evaluation.json around that verdict.

The record names the models, the split, every metric, the verdict, and what was not measured.
`results_of` turns the models' answers (`questions`) into rows and values, from which `record_of` builds the record.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from composer_replication.config import CrfConfig
from composer_replication.evaluation.arms import Arm
from composer_replication.evaluation.figures import (
    METRICS,
    NATS,
    FigureArm,
    Interval,
    Over,
    Value,
    figures_of,
    forced_values,
    interval_of,
)
from composer_replication.evaluation.questions import CODE, GOOD_TURNS, MATH, Answers, Questions
from composer_replication.evaluation.sampling import sampled_rows, sampled_summary, sampled_values
from composer_replication.evaluation.scored_calls import HeldOut, Scores, SiteDecisions
from composer_replication.runs import RunDir
from composer_replication.runs.artefacts import now
from composer_replication.runs.files import (
    WORSE_BESIDES,
    controls_among,
    hash_weight_files,
    read_conversations,
    read_tools,
    tool_table,
)
from composer_replication.runs.lineage import read_training
from composer_replication.runs.split import SplitRow
from composer_replication.sites.judge.judged_calls import earlier_sessions
from composer_replication.trainer.sessions.dataset import NO_OTHER_KIND, SWAPPED_PAIRS
from composer_replication.version import __version__

CONTROL = "hints of another kind, sides of pairs by coin"
# Units of the metrics in the record's `damage`.
_DAMAGE_UNITS = {GOOD_TURNS: NATS, CODE: NATS, MATH: "per cent right"}
# Names of channels 2 and 3 in a training record.
_HINTS, _PAIRS = "sdpo_kl", "trace_replay_dpo"
_OTHER_TOKENS = "the models have different tokenizers, and log-probs of other tokens do not compare"
_OTHER_TOKENS_THAN_PRIMARY = f"{_OTHER_TOKENS}; name evaluation.primary = sampled_failures"
# Completes "the log-probs of the model before are ...", a reason that is stored in evaluation.json.
_BROKEN = "not numbers"


@dataclass(kw_only=True)
class _EvaluationResults:
    """The rows of each artifact, the values of each metric, and the parts `sampled` and `damage` of the record."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    values: dict[str, list[Value]] = field(default_factory=dict[str, list[Value]])
    sampled: dict[str, Any] | None = None
    damage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def interval_unit(run: RunDir) -> Over:
    """Return the unit over which intervals are computed: projects if the split holds out whole projects, else
    sessions.
    """
    return "project" if run.meta("split").settings.get("by") == "project" else "session"


def unit_by_session(run: RunDir, rows: Sequence[SplitRow]) -> dict[str, str]:
    """Map each session of the split to the unit over which intervals are computed: the session itself, or its
    project.
    """
    is_by_project = interval_unit(run) == "project"
    return {row.session: row.project if is_by_project else row.session for row in rows}


def results_of(
    config: CrfConfig,
    run: RunDir,
    held_out: HeldOut,
    questions: Questions,
    answers: Answers,
    units: Mapping[str, str],
) -> _EvaluationResults:
    """Compute the rows and values from the models' answers.

    Artifacts without rows are returned as well: writing them empty replaces those of an earlier evaluation. `units`
    maps each session to the unit over which intervals are computed.
    """
    results = _EvaluationResults()
    rows = _evaluated_rows(questions.sites, answers.scores) if answers.scores else []
    tools = read_tools(run, with_test=True) if run.path("tools").exists() else tool_table(())
    sampled: list[dict[str, Any]] = []
    if answers.samples:
        earlier = earlier_sessions(read_conversations(run))
        sampled = sampled_rows(held_out, tools, questions.states, answers.samples, earlier)
    gap_rows = _gap_rows(questions, answers) if answers.gaps else []
    results.rows = {"evaluated": rows, "sampled": sampled, "token_gaps": gap_rows}
    results.values = forced_values(rows)
    if sampled:
        results.values |= sampled_values(sampled, questions.states)
        results.sampled = sampled_summary(sampled, questions.states, answers.samples, config.evaluation)
        results.sampled["engine"] = answers.engine
    if GOOD_TURNS in answers.losses:
        results.values[GOOD_TURNS] = _loss_values(questions, answers.losses[GOOD_TURNS])
    results.damage = [_damage_row(name, losses) for name, losses in answers.losses.items()]
    for name, values in results.values.items():
        results.values[name] = [value._replace(session=units[value.session]) for value in values]
    return results


def _evaluated_rows(sites: Iterable[SiteDecisions], scores: Scores) -> list[dict[str, Any]]:
    """Return one row per decision, with its mean log-prob per token in each arm."""
    return [
        {
            "id": decision.id,
            "conversation_id": decision.conversation_id,
            "session": site.session,
            "turn": decision.turn,
            "turn_id": decision.turn_id,
            "site_id": site.site_id,
            "kind": site.kind,
            "role": decision.role,
            "basis": decision.basis,
            "num_tokens": decision.num_tokens,
            **_means_by_arm({arm: means[at] for arm, means in means_by_arm.items()}),
        }
        for number, site in enumerate(sites)
        for means_by_arm in [{arm: _decision_means(site, sums[number]) for arm, sums in scores.items()}]
        for at, decision in enumerate(site.decisions)
    ]


def _decision_means(site: SiteDecisions, sums: Sequence[float]) -> list[float]:
    # A decision may have several responses; their sums follow each other in the order of `SiteDecisions.responses`.
    remaining_sums = iter(sums)
    return [sum(next(remaining_sums) for _ in decision.responses) / decision.num_tokens for decision in site.decisions]


def _means_by_arm(means: Mapping[str, float]) -> dict[str, float | list[float] | None]:
    """Return the value of each arm. A control with several shuffles has one value per shuffle, and their mean."""
    controls = [means[name] for name in controls_among(means)]
    return {
        "before": means["before"],
        "after": means["after"],
        "control": fmean(controls) if controls else None,
        "controls": controls or None,
    }


def _gap_rows(questions: Questions, answers: Answers) -> list[dict[str, Any]]:
    return [
        {
            "site_id": site.site_id,
            "conversation_id": site.conversation_id,
            "turn": site.turn,
            "side": site.side,
            "tokens": site.tokens,
            "before": answers.gaps["before"][number],
            "after": answers.gaps["after"][number],
        }
        for number, site in enumerate(questions.gap_sites)
    ]


def _loss_values(questions: Questions, losses: Mapping[str, Sequence[float]]) -> list[Value]:
    """Return the change of each good turn's loss."""
    before = losses["before"]
    return [
        Value(turn.session, None, {arm: values[at] - before[at] for arm, values in losses.items() if arm != "before"})
        for at, turn in enumerate(questions.good_turns)
    ]


def _damage_row(name: str, losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    means = {arm: fmean(values) for arm, values in losses.items()}
    return {
        "name": name,
        "before": means["before"],
        "after": means["after"],
        "control": means.get("control"),
        "unit": _DAMAGE_UNITS[name],
    }


def record_of(
    config: CrfConfig,
    run: RunDir,
    arms: Sequence[Arm],
    held_out: HeldOut,
    answers: Answers,
    results: _EvaluationResults,
    *,
    have_same_tokens: bool,
    primary_then: str | None,
) -> dict[str, Any]:
    """Return the record of evaluation.json, without `seconds` and `drops`, which the caller adds.

    `primary_then` is the primary metric that the training run's settings name, or None if these settings are unknown.
    """
    section = config.evaluation
    controls = controls_among(arm.name for arm in arms if arm.name not in answers.broken)
    figure_arms: list[FigureArm] = ["after", *(["control", "difference"] if controls else [])]
    nothing = _why_no_values(held_out, answers) if have_same_tokens else _OTHER_TOKENS_THAN_PRIMARY
    record = {
        "created": now(),
        "tool_version": __version__,
        "models": _models(arms, answers.digests),
        "split": _split(run, held_out),
        "primary": section.primary,
        "settings": asdict(section),
        **_verdict(config, run, arms, answers, results, nothing=nothing, has_controls=bool(controls)),
        "figures": figures_of(
            results.values, primary=section.primary, seed=section.seed, arms=figure_arms, over=interval_unit(run)
        ),
        "sampled": results.sampled,
        "not_run": _missing_parts(
            config, results, answers, has_control=len(arms) > 2, have_same_tokens=have_same_tokens
        ),
        "damage": results.damage,
    }
    _note_if_primary_chosen_late(record, primary_then)
    return record


def _split(run: RunDir, held_out: HeldOut) -> dict[str, Any]:
    meta = run.meta("split")
    return {
        "by": str(meta.settings.get("by", "time")),
        "over": interval_unit(run),
        "sessions": held_out.num_sessions,
        "sites": held_out.num_sites,
        "near_duplicates": len(held_out.duplicates),
        "states": meta.counts.get("states: test"),
    }


def _verdict(
    config: CrfConfig,
    run: RunDir,
    arms: Sequence[Arm],
    answers: Answers,
    results: _EvaluationResults,
    *,
    nothing: str,
    has_controls: bool,
) -> dict[str, Any]:
    """Return the record's verdict with all remarks, and the record's `power`.

    `nothing` is the reason why there are no values at all, or an empty string.
    """
    section, lacks = config.evaluation, _control_lacks(arms)
    verdict, power = _verdict_and_power(
        section.primary,
        results.values,
        over=interval_unit(run),
        broken=answers.broken,
        has_control=has_controls and not lacks,
        fewest_sessions=section.fewest_sessions,
        seed=section.seed,
        nothing=nothing,
    )
    remarks = [*_training_remarks(arms), *verdict["remarks"], *lacks, *_template_remarks(answers)]
    return {"verdict": {**verdict, "remarks": remarks}, "power": power}


def _training_remarks(arms: Sequence[Arm]) -> list[str]:
    """Return a remark if the training ended before it had seen all of its data, else an empty list."""
    record = next((read_training(Path(arm.weights)) for arm in arms if arm.name == "after"), {})
    steps, counts = record.get("steps"), record.get("counts") or {}
    seen_windows, windows = (counts.get(name, 0) for name in ("windows_seen", "windows"))
    # Weights from elsewhere have no training record, and trainings without windows count none.
    if not steps or not seen_windows or seen_windows >= windows:
        return []
    # Every step sees about the same number of windows.
    full_pass_steps = math.ceil(windows * steps / seen_windows)
    return [
        f"The {steps:,} steps saw {seen_windows:,} of {windows:,} windows, less than one pass over the data: "
        f"train.optimiser.steps = {full_pass_steps:,} would be one."
    ]


def _template_remarks(answers: Answers) -> list[str]:
    """Return remarks on tokens of the template that models never learned.

    Models with the same tokens share a remark.
    """
    arms_by_description: dict[str, list[str]] = {}
    for arm, description in answers.untrained_tokens.items():
        arms_by_description.setdefault(description, []).append(arm)
    return [f"Of the model {' and '.join(arms)}: {description}." for description, arms in arms_by_description.items()]


def _note_if_primary_chosen_late(record: dict[str, Any], primary_then: str | None) -> None:
    """Record whether the primary metric was chosen before training, and add a remark if it was not.

    A metric proves nothing if it is chosen when the results may already be known.
    """
    is_before = primary_then == record["primary"]
    record["named"] = "before training" if is_before else "after training"
    if not is_before:
        reason = f"its settings name {primary_then}" if primary_then else "its settings are not beside the weights"
        record["verdict"]["remarks"].append(f"Nothing shows that this figure was named before training: {reason}.")


def _why_no_values(held_out: HeldOut, answers: Answers) -> str:
    """Return the reason why the primary metric can have no values, or an empty string."""
    if "before" in answers.broken:
        return f"the log-probs of the model before are {_BROKEN}"
    if not held_out.num_sessions["test"]:
        return "no session is held out"
    if not held_out.num_sites["test"]:
        return f"no error was found in the {held_out.num_sessions['test']} held-out sessions"
    return ""


def _missing_parts(
    config: CrfConfig, results: _EvaluationResults, answers: Answers, *, has_control: bool, have_same_tokens: bool
) -> dict[str, str]:
    """Return, for each part of the evaluation without a result, the reason why it has none."""
    section, rows = config.evaluation, results.rows["evaluated"]
    # By part: whether it has a result, and the reason if it has none.
    parts_with_reasons = {
        "control": (has_control, "no model trained on shuffled hints and pairs is named"),
        "forced": (bool(rows), "no held-out error with a good call beside it"),
        "corrections": (
            any(row["role"] == "correction" for row in rows),
            "no held-out session puts its error right by a call of its own",
        ),
        "sampled": (
            results.sampled is not None,
            "no held-out state" if section.samples else "evaluation.samples is 0",
        ),
        "token_gaps": (bool(results.rows["token_gaps"]), "no site with a hint" if section.token_gaps else "set to 0"),
        "good_turns": (
            GOOD_TURNS in answers.losses,
            "no good turn in held-out sessions" if section.good_turns else "evaluation.good_turns is 0",
        ),
        "gsm8k": (section.gsm8k is not None, "evaluation.gsm8k names no file"),
        "code": (section.code is not None, "evaluation.code names no file"),
    }
    missing_parts = {part: reason for part, (has_result, reason) in parts_with_reasons.items() if not has_result}
    if not have_same_tokens:
        missing_parts |= dict.fromkeys(("forced", "corrections", "token_gaps", "good_turns", "code"), _OTHER_TOKENS)
    for name in answers.broken:
        parts = (name,) if controls_among([name]) else ("forced", "corrections", "sampled", "token_gaps", "good_turns")
        missing_parts |= dict.fromkeys(parts, f"the log-probs of the model {name!r} are {_BROKEN}")
    return missing_parts


def _models(arms: Sequence[Arm], digests: Mapping[str, str]) -> dict[str, Any]:
    models: dict[str, Any] = {
        arm.name: {
            "name": arm.weights,
            "digest": digests.get(arm.name),
            "files": hash_weight_files(Path(arm.weights)) if arm.weights else None,
        }
        for arm in arms
    }
    if "control" in models:
        # "what" says how the control was trained, "lacks" which channel had nothing to shuffle.
        models["control"] |= {"what": CONTROL, "lacks": _control_lacks(arms)}
    return {"control": None, **models}


def _control_lacks(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence for each channel that the training used but its control did not use, or used only in part.

    Weights without a training record are not checked.
    """
    records = {arm.name: read_training(Path(arm.weights)) for arm in arms}
    training, control = records.get("after"), records.get("control")
    if not training or not control:
        return []
    channels, control_channels = (
        {channel["name"] for channel in record["channels"] if channel["steps"]} for record in (training, control)
    )
    sentences: list[str] = []
    if _HINTS in channels - control_channels:
        sentences.append("No control for channel 2: it had no hint of another kind to teach.")
    elif num_uncontrolled := control["drops"].get(f"{_HINTS}: {NO_OTHER_KIND}"):
        sentences.append(f"{num_uncontrolled:,} sites have no control: there is no hint of another kind for them.")
    if _PAIRS in channels and (_PAIRS not in control_channels or control["counts"].get(SWAPPED_PAIRS) == 0):
        sentences.append("No control for channel 3: it had no pair to turn round.")
    return sentences


# ---- the verdict

_Word = Literal["better", "worse", "no_difference", "too_thin"]
_WORDS: Mapping[_Word, str] = {
    "better": "The trained model is better on held-out sessions",
    "worse": "The trained model is worse on held-out sessions",
    "no_difference": "No difference between the two models can be seen on held-out sessions",
    "too_thin": "Your data is too thin to say whether the trained model is better",
}
_VERDICT_BROKEN = "Nothing else of it was measured; look in its training for a loss that is not a number."
# Metrics on logged decisions, which show whether training changed the weights.
_DECISION_METRICS = ("forced_erring", "forced_good")
# Nats/token. A median change below this means that training hardly changed the weights.
_HARDLY_CHANGED = 0.01
# Metrics that may get worse while the primary one improves; the verdict names those that do.
_SIDE_EFFECTS = ("forced_good", "loss_good_turns", "sampled_failures", "sampled_unparsed", "sampled_no_call")


def _verdict_and_power(
    primary: str,
    values_by_metric: Mapping[str, Sequence[Value]],
    *,
    has_control: bool,
    fewest_sessions: int,
    seed: int,
    nothing: str = "",
    over: Over = "session",
    broken: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record's `verdict` and `power`, computed from the values of the metrics.

    `nothing` is the reason why there are no values at all. `broken` lists models with non-finite log-probs; if the
    trained model is one of them, the verdict is `worse`.
    """
    metric, values = METRICS[primary], values_by_metric.get(primary, ())
    if not values:
        power = {"sites": 0, "sessions": 0, "smallest_effect": None, "unit": metric.unit}
        if "after" in broken and "before" not in broken:
            sentences = [f"{_WORDS['worse']}: its log-probs there are not numbers.", _VERDICT_BROKEN]
            verdict = {"word": "worse", "sentences": sentences, "remarks": []}
            return verdict, power | {"sentence": "Nothing could be seen."}
        reason = nothing or "no held-out session holds an error that could be compared with a good call"
        ask = f"Errors in at least {fewest_sessions} held-out {over}s are needed; hold more out or ingest more."
        verdict = {"word": "too_thin", "sentences": [f"{_WORDS['too_thin']}: {reason}.", ask], "remarks": []}
        return verdict, power | {"sentence": "Nothing could be seen."}
    has_control = has_control and bool(controls_among(values[0].change))
    interval = interval_of(values, "after", seed)
    word = _verdict_word(interval, higher_is_better=metric.better == "higher", fewest_sessions=fewest_sessions)
    power = _power(interval, metric.unit, over, fewest_sessions)
    first = f"{_WORDS[word]}: {_metric_sentence(primary, interval, over)}."
    second = power["sentence"]
    if interval.num_sessions < fewest_sessions:
        second = (
            f"Errors in at least {fewest_sessions} held-out {over}s are needed, and there are {interval.num_sessions}; "
            f"hold more {over}s out, or ingest more."
        )
    elif has_control and word in ("better", "worse"):
        second = _control_sentence(values, interval, seed)
    remarks = [
        _little_change_remark(values_by_metric),
        _control_remark(values, interval, over, fewest_sessions, seed) if has_control else "",
        _worse_remark(primary, values_by_metric, seed, over),
    ]
    return {"word": word, "sentences": [first, second], "remarks": [remark for remark in remarks if remark]}, power


def _metric_sentence(name: str, interval: Interval, over: Over) -> str:
    metric = METRICS[name]
    label = f"{metric.label[0].lower()}{metric.label[1:]}"
    text = f"{label} {interval.estimate:+.3g} {metric.unit} ({metric.better} is better)"
    if interval.num_sessions < 2:
        return f"{text}, from one {over}"
    if interval.low is None or interval.low == interval.high:
        return f"{text}, the same in all {_counts(interval, over)}"
    return f"{text}, 95% interval {_interval_text(interval)} ({_counts(interval, over)})"


def _interval_text(interval: Interval) -> str:
    return "no interval" if interval.low is None else f"{interval.low:+.3g} to {interval.high:+.3g}"


def _counts(interval: Interval, over: Over) -> str:
    """Return the numbers of values and sessions as text, such as "12 sites of 5 sessions"."""
    sites = f"{interval.num_values:,} site" + ("s" if interval.num_values != 1 else "")
    return f"{sites} of {interval.num_sessions:,} {over}" + ("s" if interval.num_sessions != 1 else "")


def _power(interval: Interval, unit: str, over: Over, min_sessions: int) -> dict[str, Any]:
    """Return the record's `power`: the smallest effect that would be detected in 80% of repeated evaluations.

    It is None if there are too few sessions, because their spread, on which the effect depends, is then too uncertain.
    """
    smallest = interval.smallest or None
    if interval.num_sessions < 2:
        sentence = f"With one {over} nothing can be seen."
    elif smallest is None:
        sentence = "Values that are all the same have no spread, and without one nothing says what could be seen."
    elif interval.num_sessions < min_sessions:
        smallest = None
        sentence = f"No smallest effect is named: errors in {min_sessions} held-out {over}s are needed for that."
    else:
        effect = f"{smallest:.3g} {unit}"
        sentence = (
            f"With {_counts(interval, over)} the smallest effect that would be seen four times of five is {effect}."
        )
    return {
        "sites": interval.num_values,
        "sessions": interval.num_sessions,
        "smallest_effect": smallest,
        "unit": unit,
        "sentence": sentence,
    }


def _control_sentence(values: Sequence[Value], after: Interval, seed: int) -> str:
    """Return a sentence on whether the control changed as much as the trained model.

    The control was trained in the same way, but on shuffled hints.
    """
    control, difference = interval_of(values, "control", seed), interval_of(values, "difference", seed)
    shuffles = _num_shuffles_text(control.num_repeats)
    control_text = f"The shuffled control moved by {control.estimate:+.3g} ({_interval_text(control)}, {shuffles})"
    changes = f"{control_text}; the difference to it is {difference.estimate:+.3g} ({_interval_text(difference)})"
    if not difference.excludes_zero:
        return f"{changes} and may be zero: any training of this kind may have done it, whatever the hints say."
    if (difference.estimate > 0) == (after.estimate > 0):
        return f"{changes} and not zero: what the hints and pairs say made the change."
    return f"{changes}: the control moved further, so the change does not come from what hints and pairs say."


def _num_shuffles_text(number: int) -> str:
    return "over 1 shuffle, whose luck it leaves out" if number == 1 else f"over {number} shuffles"


def _little_change_remark(values_by_metric: Mapping[str, Sequence[Value]]) -> str:
    """Return a remark if training hardly changed the model, or an empty string.

    Without the remark, a metric near 0 would look like a finding.
    """
    sizes = sorted(abs(value.change["after"]) for name in _DECISION_METRICS for value in values_by_metric.get(name, ()))
    # Weights that changed little may still write different text, so sampled actions are checked as well.
    sampled_changes = (
        value.change["after"]
        for name, values in values_by_metric.items()
        if name.startswith("sampled")
        for value in values
    )
    if not sizes or any(sampled_changes) or (median := sizes[len(sizes) // 2]) >= _HARDLY_CHANGED:
        return ""
    if not sizes[-1]:
        return "Nothing moved: every held-out decision is exactly as likely as before the training."
    return (
        f"Training hardly moved the model: half of the held-out decisions changed by less than {median:.2g} nats a "
        "token. More steps (train.optimiser.steps) or a higher rate (train.optimiser.lr) would."
    )


def _control_remark(values: Sequence[Value], after: Interval, over: Over, min_sessions: int, seed: int) -> str:
    """Return a remark if the control changed as well (its interval excludes 0), else an empty string."""
    control = interval_of(values, "control", seed)
    if not control.excludes_zero:
        return ""
    few = (
        f" {control.num_sessions} {over}s are too few to be sure of it." if control.num_sessions < min_sessions else ""
    )
    change = f"by {control.estimate:+.3g} ({_interval_text(control)}, without 0)"
    if (control.estimate > 0) != (after.estimate > 0):
        return (
            f"The shuffled control moved this figure too, the other way, {change}: what it learnt is not nothing.{few}"
        )
    reason = "a part of what moves is training itself, whatever the hints and pairs say"
    return f"The shuffled control moved this figure too, {change}: {reason}.{few}"


def _worse_remark(primary: str, values_by_metric: Mapping[str, Sequence[Value]], seed: int, over: Over) -> str:
    """Return a remark that names the metrics that became worse: their interval lies entirely on the worse side of 0.

    The primary metric is left out.
    """
    worse_metrics: list[str] = []
    for name in (name for name in _SIDE_EFFECTS if name != primary and values_by_metric.get(name)):
        interval = interval_of(values_by_metric[name], "after", seed)
        if interval.excludes_zero and (interval.estimate > 0) != (METRICS[name].better == "higher"):
            worse_metrics.append(_metric_sentence(name, interval, over))
    return f"{WORSE_BESIDES}: {'; '.join(worse_metrics)}." if worse_metrics else ""


def _verdict_word(interval: Interval, *, higher_is_better: bool, fewest_sessions: int) -> _Word:
    """Return the one-word verdict on an interval: `better`, `worse`, `no_difference` or `too_thin`.

    It is `too_thin` with too few sessions or without an interval, and `no_difference` if the interval contains 0.
    """
    if interval.num_sessions < fewest_sessions or interval.low is None:
        return "too_thin"
    if not interval.excludes_zero:
        return "no_difference"
    return "better" if (interval.estimate > 0) == higher_is_better else "worse"
