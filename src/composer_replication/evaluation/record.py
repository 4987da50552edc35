"""Build the record in evaluation.json: the models, the split, every metric, the verdict, and what was not measured.

`questions_on` prepares what every model is asked; `ask` gets the answers of one model; `results_of` turns them into
rows and values; `record_of` and `verdict_of` write the record about these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.batch.render.renderer import Renderer
from composer_replication.config import CrfConfig
from composer_replication.config.sections import EvaluationConfig, Primary
from composer_replication.evaluation import damage
from composer_replication.evaluation.arms import Arm, control_lacks
from composer_replication.evaluation.damage import (
    GOOD_TURNS,
    UNITS,
    GapSite,
    GoodTurn,
    Question,
    damage_row,
    gap_rows,
    gap_sites,
    gaps_of,
    good_turns_of,
    is_right,
    loss_values,
    questions_of,
)
from composer_replication.evaluation.decisions import (
    HeldOut,
    ScoreJournal,
    Scores,
    SiteDecisions,
    evaluated_rows,
    score_groups,
    site_decisions,
)
from composer_replication.evaluation.figures import (
    SORTS,
    FigureArm,
    Interval,
    Over,
    Value,
    Word,
    figures_of,
    forced_values,
    interval_of,
    verdict_word,
)
from composer_replication.evaluation.sampling import (
    SampledText,
    State,
    sample_actions,
    sampled_rows,
    sampled_summary,
    sampled_values,
    states_of,
)
from composer_replication.evaluation.vllm_sampling import ArmEngine
from composer_replication.runs import RunDir
from composer_replication.runs.artefacts import now
from composer_replication.runs.files import (
    WORSE_BESIDES,
    control_name,
    controls_among,
    hash_weight_files,
    read_conversations,
    read_tools,
    tool_table,
)
from composer_replication.runs.lineage import read_training
from composer_replication.runs.split import SplitRow
from composer_replication.sites.judge.walk import earlier_sessions
from composer_replication.version import __version__

if TYPE_CHECKING:
    from composer_replication.evaluation.decisions import HeldOut


CONTROL = "hints of another kind, sides of pairs by coin"
_OTHER_TOKENS = "the models have different tokenizers, and log-probs of other tokens do not compare"
_OTHER_TOKENS_THAN_PRIMARY = f"{_OTHER_TOKENS}; name evaluation.primary = sampled_failures"
# Completes "the log-probs of the model before are ...", a reason that is stored in evaluation.json.
_BROKEN = "not numbers"


@dataclass(kw_only=True)
class _EvaluationResults:
    """Rows by artifact, values by metric, and the parts of the record that only the answers decide."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    values: dict[str, list[Value]] = field(default_factory=dict[str, list[Value]])
    sampled: dict[str, Any] | None = None
    damage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def over_of(run: RunDir) -> Over:
    return "project" if run.meta("split").settings.get("by") == "project" else "session"


def units_of(run: RunDir, sides: Sequence[SplitRow]) -> dict[str, str]:
    """Return the unit of every session in an interval: the session, or its project where whole
    projects are held out.
    """
    is_by_project = over_of(run) == "project"
    return {row.session: row.project if is_by_project else row.session for row in sides}


def results_of(
    config: CrfConfig,
    run: RunDir,
    held: HeldOut,
    questions: Questions,
    answers: Answers,
    sides: Sequence[SplitRow],
) -> _EvaluationResults:
    """Return rows and values. A part that was not asked for gets an empty artifact, so that no older file remains."""
    results = _EvaluationResults()
    rows = evaluated_rows(questions.sites, answers.scores) if answers.scores else []
    tools = read_tools(run, with_test=True) if run.path("tools").exists() else tool_table(())
    sampled: list[dict[str, Any]] = []
    if answers.draws:
        sampled = sampled_rows(held, tools, questions.states, answers.draws, earlier_sessions(read_conversations(run)))
    gaps = gap_rows(questions.gaps, answers.gaps) if answers.gaps else []
    results.rows = {"evaluated": rows, "sampled": sampled, "token_gaps": gaps}
    results.values = forced_values(rows)
    if sampled:
        results.values |= sampled_values(sampled, questions.states)
        results.sampled = sampled_summary(sampled, questions.states, answers.draws, config.evaluation)
        results.sampled["engine"] = answers.engine
    if GOOD_TURNS in answers.losses:
        results.values[GOOD_TURNS] = loss_values(questions.turns, answers.losses[GOOD_TURNS])
    results.damage = [damage_row(name, UNITS[name], by_arm) for name, by_arm in answers.losses.items()]
    units = units_of(run, sides)
    for name, values in results.values.items():
        results.values[name] = [value._replace(session=units[value.session]) for value in values]
    return results


def record_of(
    config: CrfConfig,
    run: RunDir,
    arms: Sequence[Arm],
    held: HeldOut,
    answers: Answers,
    results: _EvaluationResults,
    *,
    have_same_tokens: bool,
) -> dict[str, Any]:
    """Return the record of evaluation.json, except `named`, `seconds` and `drops`, which the caller adds."""
    section = config.evaluation
    controls = controls_among(arm.name for arm in arms if arm.name not in answers.broken)
    figure_arms: list[FigureArm] = ["after", *(["control", "difference"] if controls else [])]
    nothing = _why_no_values(held, answers) if have_same_tokens else _OTHER_TOKENS_THAN_PRIMARY
    return {
        "created": now(),
        "tool_version": __version__,
        "models": _models(arms, answers.digests),
        "split": _split(run, held),
        "primary": section.primary,
        "settings": asdict(section),
        **_verdict(config, run, arms, answers, results, nothing=nothing, has_controls=bool(controls)),
        "figures": figures_of(
            results.values, primary=section.primary, seed=section.seed, arms=figure_arms, over=over_of(run)
        ),
        "sampled": results.sampled,
        "not_run": _missing_parts(
            config, results, answers, has_control=len(arms) > 2, have_same_tokens=have_same_tokens
        ),
        "damage": results.damage,
    }


def _split(run: RunDir, held: HeldOut) -> dict[str, Any]:
    meta = run.meta("split")
    return {
        "by": str(meta.settings.get("by", "time")),
        "over": over_of(run),
        "sessions": held.num_sessions,
        "sites": held.num_sites,
        "near_duplicates": len(held.duplicates),
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
    """Return the verdict with its remarks, and the power; `nothing` says why there are no values, or is empty."""
    section, lacks = config.evaluation, control_lacks(arms)
    verdict, power = verdict_of(
        section.primary,
        results.values,
        over=over_of(run),
        broken=answers.broken,
        has_control=has_controls and not lacks,
        fewest_sessions=section.fewest_sessions,
        seed=section.seed,
        nothing=nothing,
    )
    remarks = [*_training_remarks(arms), *verdict["remarks"], *lacks, *_template_remarks(answers)]
    return {"verdict": {**verdict, "remarks": remarks}, "power": power}


def _training_remarks(arms: Sequence[Arm]) -> list[str]:
    """Return a sentence if the training saw only a part of its data, according to its record."""
    record = next((read_training(Path(arm.weights)) for arm in arms if arm.name == "after"), {})
    steps, counts = record.get("steps"), record.get("counts") or {}
    seen_windows, windows = (counts.get(name, 0) for name in ("windows_seen", "windows"))
    # Weights from elsewhere have no record, and a training without windows counts none.
    if not steps or not seen_windows or seen_windows >= windows:
        return []
    # Every step sees about as many windows, so the steps of a full pass follow by proportion.
    whole = math.ceil(windows * steps / seen_windows)
    return [
        f"The {steps:,} steps saw {seen_windows:,} of {windows:,} windows, less than one pass over the data: "
        f"train.optimiser.steps = {whole:,} would be one."
    ]


def _template_remarks(answers: Answers) -> list[str]:
    """Return a sentence for each reason why a model cannot write the tokens that the template needs."""
    by_words: dict[str, list[str]] = {}
    for arm, words in answers.unlearnt.items():
        by_words.setdefault(words, []).append(arm)
    return [f"Of the model {' and '.join(arms)}: {words}." for words, arms in by_words.items()]


def add_when_primary_was_named(record: dict[str, Any], primary_then: str | None) -> None:
    """Add to the record whether its primary metric was chosen before training.

    A metric that was chosen when the results could be known proves nothing, so the verdict gets a remark.
    """
    is_before = primary_then == record["primary"]
    record["named"] = "before training" if is_before else "after training"
    if not is_before:
        why = f"its settings name {primary_then}" if primary_then else "its settings are not beside the weights"
        record["verdict"]["remarks"].append(f"Nothing shows that this figure was named before training: {why}.")


def _why_no_values(held: HeldOut, answers: Answers) -> str:
    if "before" in answers.broken:
        return f"the log-probs of the model before are {_BROKEN}"
    if not held.num_sessions["test"]:
        return "no session is held out"
    if not held.num_sites["test"]:
        return f"no error was found in the {held.num_sessions['test']} held-out sessions"
    return ""


def _missing_parts(
    config: CrfConfig, results: _EvaluationResults, answers: Answers, *, has_control: bool, have_same_tokens: bool
) -> dict[str, str]:
    """Return the parts that have no result, each with the reason."""
    section, rows = config.evaluation, results.rows["evaluated"]
    reasons = {
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
    # Keep only the parts whose result is missing.
    missing_parts = {part: reason for part, (is_there, reason) in reasons.items() if not is_there}
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
        models["control"] |= {"what": CONTROL, "lacks": control_lacks(arms)}
    return {"control": None, **models}


# ---- the questions for every model, and their answers

# Room for the steps of a GSM8K answer, whatever evaluation.new_tokens allows for an action.
_SUM_TOKENS = 256


@dataclass(kw_only=True)
class Questions:
    """What every model is asked: sites to score, states to sample at, good turns, token gaps, and
    questions from files.
    """

    sites: list[SiteDecisions]
    states: list[State]
    turns: list[GoodTurn]
    gaps: list[GapSite]
    code: list[Question]
    sums: list[Question]

    def longest(self, new_tokens: int) -> int:
        """Return the tokens of the longest prompt with its answer; the engine is sized by it."""
        state_lengths = [len(state.prompt) + new_tokens for state in self.states]
        sums = [len(question.prompt) + max(new_tokens, _SUM_TOKENS) for question in self.sums]
        return max([*state_lengths, *sums], default=0)

    def sessions_with_values(self, primary: Primary) -> list[str]:
        """Return the session of every site or state that gives the primary metric a value."""
        if primary == "sampled_failures":
            return [state.session for state in self.states]
        role = "correction" if primary == "forced_correction" else "good"
        return [site.session for site in self.sites if any(decision.role == role for decision in site.decided)]

    @property
    def has_any(self) -> bool:
        """Whether there is anything to evaluate. Token gaps alone are for the report and measure no difference."""
        return bool(self.sites or self.states or self.turns or self.code or self.sums)


@dataclass(kw_only=True)
class Answers:
    """The answers of the models so far, by arm. A model with non-finite log-probs is in `broken` and has none.

    `engine` names what sampled the actions; `unlearnt` says, by arm, which of the template's tokens a model never
    learned.
    """

    broken: list[str] = field(default_factory=list[str])
    engine: str = "transformers"
    digests: dict[str, str] = field(default_factory=dict[str, str])
    scores: Scores = field(default_factory=dict[str, list[list[float]]])
    draws: dict[str, list[list[SampledText]]] = field(default_factory=dict[str, list[list[SampledText]]])
    unlearnt: dict[str, str] = field(default_factory=dict[str, str])
    gaps: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])


def questions_on(
    config: CrfConfig, renderer: Renderer, held: HeldOut, drops: Counter[str], most_states: int
) -> Questions:
    section, batch = config.evaluation, config.train.batch
    sites = list(site_decisions(renderer, held, context=section.context, num_good=section.good_calls, drops=drops))
    states = states_of(held, sites, most=most_states, context=section.context) if section.samples else []
    return Questions(
        sites=sites,
        states=states,
        turns=good_turns_of(held, most=section.good_turns, context=section.context),
        gaps=gap_sites(
            renderer,
            held,
            most=section.token_gaps,
            context=section.context,
            placement=batch.placement,
            part=batch.part,
        ),
        code=_questions_in(section.code, renderer, "evaluation.code", with_sums=False),
        sums=_questions_in(section.gsm8k, renderer, "evaluation.gsm8k", with_sums=True),
    )


def _questions_in(path: str | None, renderer: Renderer, option: str, *, with_sums: bool) -> list[Question]:
    return [] if path is None else questions_of(path, renderer, option=option, with_sums=with_sums)


def ask(
    model: Any,
    digest: str,
    arm: str,
    questions: Questions,
    renderer: Renderer,
    section: EvaluationConfig,
    journal: ScoreJournal,
    engine: ArmEngine | None = None,
) -> Answers:
    """Ask one model everything, and return its answers. What an earlier evaluation scored with these weights is reused.

    A control is not asked for token gaps, and its further shuffles only for the log-probs at the sites.
    """
    weights = f"{digest}:{next(model.parameters()).dtype}"
    # The dtype is part of the key: bfloat16 and float32 scores of the same weights differ.
    groups = [site.responses for site in questions.sites]
    answers = Answers(digests={arm: digest})
    # Without a site to score, one state shows whether the log-probs are finite: from NaN no action can be sampled.
    groups = groups or [[(state.prompt, len(state.prompt) - 1)] for state in questions.states[:1]]
    scores = score_groups(model, weights, groups, journal, what=f"log-probs, {arm}", items="sites")
    answers.scores[arm] = scores[: len(questions.sites)]
    if controls_among([arm]) and arm != control_name():
        return answers
    if questions.turns:
        answers.losses[damage.GOOD_TURNS] = {
            arm: _losses(model, weights, questions.turns, journal, f"good turns, {arm}")
        }
    if questions.code:
        answers.losses[damage.CODE] = {arm: _losses(model, weights, questions.code, journal, f"code, {arm}")}
    if questions.gaps and arm != "control":
        answers.gaps[arm] = gaps_of(model, weights, questions.gaps, journal, arm=arm)
    if questions.states:
        answers.draws[arm] = sample_actions(model, weights, renderer, questions.states, section, journal, arm, engine)
    if questions.sums:
        answers.losses[damage.SUMS] = {
            arm: _sums(model, weights, questions.sums, renderer, section, journal, arm, engine)
        }
    return answers


def _losses(
    model: Any, weights: str, texts: list[GoodTurn] | list[Question], journal: ScoreJournal, what: str
) -> list[float]:
    responses = [text.response if isinstance(text, GoodTurn) else text.whole for text in texts]
    sums = score_groups(model, weights, [[response] for response in responses], journal, what=what, items="texts")
    return damage.losses(responses, [scores[0] for scores in sums])


def _sums(
    model: Any,
    weights: str,
    questions: list[Question],
    renderer: Renderer,
    section: EvaluationConfig,
    journal: ScoreJournal,
    arm: str,
    engine: ArmEngine | None,
) -> list[float]:
    """Return 100 for every question whose greedy answer ends in the right number, and 0 for the others."""
    # Temperature 0 needs one sample; more would be the same text.
    likeliest = replace(section, temperature=0.0, samples=1, new_tokens=max(section.new_tokens, _SUM_TOKENS))
    states = [State(str(at), "", "", 0, "", "good", "", None, question.prompt) for at, question in enumerate(questions)]
    samples = sample_actions(model, weights, renderer, states, likeliest, journal, f"sums, {arm}", engine)
    return [
        100.0 * is_right(texts[0].text, question.answer) for texts, question in zip(samples, questions, strict=True)
    ]


def add_answers(into: Answers, more: Answers) -> None:
    into.digests |= more.digests
    into.scores |= more.scores
    into.draws |= more.draws
    into.gaps |= more.gaps
    for name, by_arm in more.losses.items():
        into.losses.setdefault(name, {}).update(by_arm)


# ---- the verdict

_WORDS: Mapping[Word, str] = {
    "better": "The trained model is better on held-out sessions",
    "worse": "The trained model is worse on held-out sessions",
    "no_difference": "No difference between the two models can be seen on held-out sessions",
    "too_thin": "Your data is too thin to say whether the trained model is better",
}
_VERDICT_BROKEN = "Nothing else of it was measured; look in its training for a loss that is not a number."
# Metrics on logged decisions, from which `_little_change_remark` sees whether the weights moved.
_MOVES = ("forced_erring", "forced_good")
_HARDLY = 0.01
"""Nats per token. A median change below it means that training hardly moved the weights."""
# Metrics that may get worse while the primary one improves; the verdict reports those that do.
_COSTS = ("forced_good", "loss_good_turns", "sampled_failures", "sampled_unparsed", "sampled_no_call")


def verdict_of(
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
    """Return the record's `verdict` and `power` from the values of all metrics.

    `nothing` says why there are no values at all. `broken` lists models with non-finite log-probs: if the trained model
    is one of them, the verdict is `worse`.
    """
    sort, values = SORTS[primary], values_by_metric.get(primary, ())
    if not values:
        power = {"sites": 0, "sessions": 0, "smallest_effect": None, "unit": sort.unit}
        if "after" in broken and "before" not in broken:
            sentences = [f"{_WORDS['worse']}: its log-probs there are not numbers.", _VERDICT_BROKEN]
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
    sort = SORTS[name]
    what = f"{sort.label[0].lower()}{sort.label[1:]} {interval.estimate:+.3g} {sort.unit} ({sort.better} is better)"
    if interval.num_sessions < 2:
        return f"{what}, from one {over}"
    if interval.low is None or interval.low == interval.high:
        return f"{what}, the same in all {_counts(interval, over)}"
    return f"{what}, 95% interval {_interval_text(interval)} ({_counts(interval, over)})"


def _interval_text(interval: Interval) -> str:
    return "no interval" if interval.low is None else f"{interval.low:+.3g} to {interval.high:+.3g}"


def _counts(interval: Interval, over: Over) -> str:
    """Return the counts in words: "12 sites of 5 sessions"."""
    sites = f"{interval.num_values:,} site" + ("s" if interval.num_values != 1 else "")
    return f"{sites} of {interval.num_sessions:,} {over}" + ("s" if interval.num_sessions != 1 else "")


def _power(interval: Interval, unit: str, over: Over, fewest: int) -> dict[str, Any]:
    """Return the smallest effect that 80% of repeats would detect.

    With too few sessions none is named: their spread, from which it is computed, is hardly known.
    """
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
    """Return whether the control, trained the same way on shuffled hints, moved as far as the trained model."""
    control, difference = interval_of(values, "control", seed), interval_of(values, "difference", seed)
    shuffles = control.num_repeats
    moved = f"The shuffled control moved by {control.estimate:+.3g} ({_interval_text(control)}, {_shuffles(shuffles)})"
    apart = f"the difference to it is {difference.estimate:+.3g} ({_interval_text(difference)})"
    if not difference.excludes_zero:
        return f"{moved}; {apart} and may be zero: any training of this kind may have done it, whatever the hints say."
    if (difference.estimate > 0) == (after.estimate > 0):
        return f"{moved}; {apart} and not zero: what the hints and pairs say made the change."
    return f"{moved}; {apart}: the control moved further, so the change does not come from what hints and pairs say."


def _shuffles(number: int) -> str:
    """Return over how many shuffles a control's interval is."""
    return "over 1 shuffle, whose luck it leaves out" if number == 1 else f"over {number} shuffles"


def _little_change_remark(values_by_metric: Mapping[str, Sequence[Value]]) -> str:
    """Return a remark if training hardly moved the weights. Without it, a value near 0 looks like a finding."""
    # Sampled actions are checked as well: weights that moved little may still write other text.
    sizes = sorted(abs(value.change["after"]) for name in _MOVES for value in values_by_metric.get(name, ()))
    sampled_changes = (
        value.change["after"]
        for name, values in values_by_metric.items()
        if name.startswith("sampled")
        for value in values
    )
    if not sizes or any(sampled_changes) or (middle := sizes[len(sizes) // 2]) >= _HARDLY:
        return ""
    if not sizes[-1]:
        return "Nothing moved: every held-out decision is exactly as likely as before the training."
    return (
        f"Training hardly moved the model: half of the held-out decisions changed by less than {middle:.2g} nats a "
        "token. More steps (train.optimiser.steps) or a higher rate (train.optimiser.lr) would."
    )


def _control_remark(values: Sequence[Value], after: Interval, over: Over, fewest: int, seed: int) -> str:
    """Return a remark if the control moved too, so that its interval excludes 0."""
    control = interval_of(values, "control", seed)
    if not control.excludes_zero:
        return ""
    few = f" {control.num_sessions} {over}s are too few to be sure of it." if control.num_sessions < fewest else ""
    moved = f"by {control.estimate:+.3g} ({_interval_text(control)}, without 0)"
    if (control.estimate > 0) != (after.estimate > 0):
        return (
            f"The shuffled control moved this figure too, the other way, {moved}: what it learnt is not nothing.{few}"
        )
    why = "a part of what moves is training itself, whatever the hints and pairs say"
    return f"The shuffled control moved this figure too, {moved}: {why}.{few}"


def _worse_remark(primary: str, values_by_metric: Mapping[str, Sequence[Value]], seed: int, over: Over) -> str:
    """Return a remark with the other metrics that got worse, judged by their whole interval."""
    costs: list[str] = []
    for name in (name for name in _COSTS if name != primary and values_by_metric.get(name)):
        interval = interval_of(values_by_metric[name], "after", seed)
        if interval.excludes_zero and (interval.estimate > 0) != (SORTS[name].better == "higher"):
            costs.append(_metric_sentence(name, interval, over))
    return f"{WORSE_BESIDES}: {'; '.join(costs)}." if costs else ""
