"""Evaluate models on the held-out sessions of a run: `crf evaluate`, from the run to evaluation.json.

The held-out sessions become questions (`scored_calls`, `questions`), each model answers them, and the answers become
rows and the record (`verdict`).
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.config import CrfConfig, load
from composer_replication.errors import MissingExtraError, NonFiniteError
from composer_replication.evaluation.arms import Arm, digest_of_arm, load_each_model, load_tokenizers, resolve_arms
from composer_replication.evaluation.figures import Over
from composer_replication.evaluation.models import models_of, training_settings
from composer_replication.evaluation.questions import Answers, Questions, ask, prepare_questions
from composer_replication.evaluation.scored_calls import (
    NEAR_DUPLICATE,
    NO_CORRECTION,
    HeldOut,
    ScoreJournal,
    read_held_out,
)
from composer_replication.evaluation.verdict import (
    interval_unit,
    record_of,
    results_of,
    unit_by_session,
)
from composer_replication.evaluation.vllm_sampling import make_vllm_engine
from composer_replication.optional import available
from composer_replication.runs import RunDir
from composer_replication.runs.files import ROWS_VERSION, write_evaluation
from composer_replication.runs.split import SplitRow, require_split_rows
from composer_replication.trainer.sessions.rendering import WindowSettings, assistant_token_ids
from composer_replication.trainer.start_model import untrained_rows

if TYPE_CHECKING:
    from composer_replication.trainer.sessions.phases import TrainingCallbacks


PARTIAL = "evaluation.partial.jsonl"
# The project that transformers' own callbacks use, unless the environment names another one.
_PROJECT = "huggingface"
_SOURCES = ("conversations", "split", "sites")


class _HeldOutView(NamedTuple):
    """The held-out sessions tokenized by one tokenizer, and the questions about them.

    `drops` counts, by reason, the sites without questions.
    """

    renderer: Renderer
    held_out: HeldOut
    questions: Questions
    drops: Counter[str]


class Measurable(NamedTuple):
    """The amount of data behind the primary metric, which is known before any model is trained.

    `values` is the number of errors that the metric averages over, or of states at which actions are sampled. `units`
    is the number of held-out sessions or projects with at least one such value, and `held_out` the number of all
    held-out sessions or projects. `left_out` counts, by reason, the errors that have no value.
    """

    values: int
    units: int
    held_out: int
    sessions: int
    over: Over = "session"
    left_out: Mapping[str, int] = {}


def measurable(config: CrfConfig, run: RunDir, rows: Sequence[SplitRow], model: str) -> Measurable:
    """Return how much data an evaluation of `run` with these settings would use.

    `rows` is the split of the run. `model` names the initial model; only its tokenizer is loaded.
    """
    section = replace(config.evaluation, token_gaps=0)  # not part of the primary metric
    view = _make_view(replace(config, evaluation=section), run, rows, load_tokenizer(model), section.states)
    units, sessions = unit_by_session(run, rows), view.questions.sessions_with_values(section.primary)
    left_out = view.held_out.drops + view.drops
    if num_missing := len(view.questions.sites) - len(sessions) if section.primary == "forced_correction" else 0:
        left_out[NO_CORRECTION] = num_missing
    return Measurable(
        values=len(sessions),
        units=len({units[session] for session in sessions}),
        held_out=len({units[row.session] for row in rows if row.side == "test"}),
        sessions=view.held_out.num_sessions["test"],
        over=interval_unit(run),
        left_out=dict(sorted(left_out.items())),
    )


def _evaluate_run(
    config: CrfConfig,
    run: RunDir,
    rows: Sequence[SplitRow],
    *,
    before: str,
    after: str,
    controls: Sequence[str] = (),
    primary_then: str | None = None,
    scores: Path | None = None,
) -> dict[str, Any]:
    """Compare the models on the held-out sessions of a run, write the artifacts, and return the record.

    The record is the content of evaluation.json. `primary_then` is the primary metric that the training run's settings
    name. `scores` is the path of a journal that is kept, so that later evaluations of the same weights can reuse the
    scores.
    """
    began, arms = time.monotonic(), resolve_arms(before, after, controls)
    tokenizers, have_same_tokens = load_tokenizers(arms)
    views = _make_views(config, run, rows, tokenizers, have_same_tokens=have_same_tokens)
    _, held_out, questions, drops = views[arms[0].base]
    journal = ScoreJournal(scores or run.root / PARTIAL)
    try:
        answers = _ask_models(config, arms, views, journal) if questions.has_any else Answers()
    finally:
        journal.close()  # the next evaluation resumes from it
    results = results_of(config, run, held_out, questions, answers, unit_by_session(run, rows))
    record = record_of(
        config, run, arms, held_out, answers, results, have_same_tokens=have_same_tokens, primary_then=primary_then
    )
    record["seconds"] = round(time.monotonic() - began, 1)
    record["drops"] = dict(sorted((held_out.drops + drops).items()))
    for name, artefact_rows in results.rows.items():
        run.write_jsonl(
            name,
            artefact_rows,
            schema=name,
            version=ROWS_VERSION,
            sources=_SOURCES,
            counts={"rows": len(artefact_rows), NEAR_DUPLICATE: len(held_out.duplicates)},
            drops=drops,
        )
    write_evaluation(run, record)
    # A journal that the caller named is kept for other evaluations.
    if scores is None:
        journal.remove()
    return record


def _make_views(
    config: CrfConfig,
    run: RunDir,
    rows: Sequence[SplitRow],
    tokenizers: Mapping[str, Any],
    *,
    have_same_tokens: bool,
) -> dict[str, _HeldOutView]:
    """Return one view per base model, or only the view of the first base model if all models tokenize alike."""
    # With several tokenizers the number of states is limited after the common ones are selected.
    max_states = config.evaluation.states if have_same_tokens else sys.maxsize
    bases = list(tokenizers)[: 1 if have_same_tokens else None]
    views = {base: _make_view(config, run, rows, tokenizers[base], max_states) for base in bases}
    if not have_same_tokens:
        _keep_common_states(list(views.values()), config.evaluation.states)
    return views


def _make_view(
    config: CrfConfig, run: RunDir, rows: Sequence[SplitRow], tokenizer: Any, max_states: int
) -> _HeldOutView:
    from composer_replication.trainer.from_config.inputs import make_renderer, tools_of

    renderer, drops = make_renderer(config.render, tokenizer, tools_of(run)), Counter[str]()
    settings, max_gap_sites = _window_settings(config), config.evaluation.token_gaps
    held_out = read_held_out(run, rows, renderer, settings, num_training_sites=max_gap_sites)
    return _HeldOutView(renderer, held_out, prepare_questions(config, renderer, held_out, drops, max_states), drops)


def _window_settings(config: CrfConfig) -> WindowSettings:
    # An evaluation depends only on which turns are good and where hints are placed, not on the other settings.
    batch = config.train.batch
    return WindowSettings(
        budget=batch.window[0],
        work_failures=config.train.channels.work_failures,
        use_pairs=False,
        placement=batch.placement,
        part=batch.part,
    )


def _keep_common_states(views: Sequence[_HeldOutView], max_states: int) -> None:
    """Remove all questions except the math questions and the states that all views have in common.

    Log-probs of different tokens cannot be compared. Sampled actions can be compared at states that fit into the
    context of every model, and answers to math questions can be compared always.
    """
    states_by_view = [{state.key: state for state in view.questions.states} for view in views]
    common_keys = [key for key in states_by_view[0] if all(key in states for states in states_by_view)]
    chosen_keys = [
        key for sort in ("erring", "good") for key in [key for key in common_keys if key[2] == sort][:max_states]
    ]
    for view, states in zip(views, states_by_view, strict=True):
        questions = view.questions
        questions.states = [states[key] for key in chosen_keys]
        questions.sites, questions.good_turns, questions.gap_sites, questions.code = [], [], [], []


def _ask_models(
    config: CrfConfig, arms: Sequence[Arm], views: Mapping[str, _HeldOutView], journal: ScoreJournal
) -> Answers:
    first_view = next(iter(views.values()))
    max_tokens = max(view.questions.max_tokens(config.evaluation.new_tokens) for view in views.values())
    engine = make_vllm_engine(arms, config.evaluation, max_tokens) if max_tokens else None
    answers = Answers() if engine is None else Answers(engine=engine.name)
    for arm, model in load_each_model(arms, config.evaluation.precision):
        view = views.get(arm.base, first_view)
        digest, arm_engine = digest_of_arm(arm, model), None if engine is None else engine.for_arm(arm)
        arguments = view.questions, view.renderer, config.evaluation, journal, arm_engine
        try:
            answers.add(ask(model, digest, arm.name, *arguments))
        except NonFiniteError:
            answers.broken.append(arm.name)
        if view.questions.states:
            # Tokens of the template that no logged turn has may have untrained embeddings; this explains bad samples.
            logged_ids = assistant_token_ids(session.rendered for session in view.held_out.sessions)
            untrained = untrained_rows(model, view.renderer.tokenizer, logged_ids)
            answers.untrained_tokens |= {} if untrained is None else {arm.name: untrained.describe()}
    # Without one of the two main models there is nothing to compare, so the other answers are dropped.
    return Answers(broken=answers.broken) if {"before", "after"} & set(answers.broken) else answers


# ---- `crf evaluate`


def evaluate(
    config: CrfConfig,
    run: RunDir,
    *,
    before: str | None = None,
    after: str | None = None,
    control: str | Sequence[str] = (),
    progress: TrainingCallbacks | None = None,
    scores: Path | None = None,
) -> dict[str, Any]:
    """Compare models on the held-out sessions of a run, write evaluation.json and the row files, and return the record.

    `before`, `after` and `control` default to the initial model, the result and the controls of the run's own training.
    Too little data is not an error: the verdict then says so. `scores` is the path of a journal of scores that other
    evaluations can reuse.
    """
    from composer_replication.trainer.sessions.phases import TrainingCallbacks, reporting_phases

    callbacks = progress or TrainingCallbacks()
    models = models_of(config, run, before=before, after=after, control=control)
    with reporting_phases(callbacks.on_phase, callbacks.say), run.used_for("training"):
        settings = training_settings(models.after)
        primary = None if settings is None else load(CrfConfig, settings).evaluation.primary
        options: dict[str, Any] = {"primary_then": primary, "scores": scores}
        record = _evaluate_run(config, run, require_split_rows(run), **models._asdict(), **options)
    if config.train.report_to != "none":
        _send_to_tracker(config, run, record, callbacks)
    return record


def _send_to_tracker(config: CrfConfig, run: RunDir, record: dict[str, Any], callbacks: TrainingCallbacks) -> None:
    """Send the metrics to the tracker that the training used. If the tracker is not installed, only print a message."""
    try:
        _report_evaluation(config.train.report_to, record, run_name=run.root.resolve().name)
    except MissingExtraError as error:
        callbacks.say(f"train.report_to: {error}; the metrics are in evaluation.json only")


def _report_evaluation(report_to: str, evaluation: Mapping[str, Any], *, run_name: str) -> dict[str, float]:
    """Log evaluation results as a new run in the tracker `report_to`, and return them as metrics.

    With "none", nothing is logged.
    """
    metrics = _evaluation_metrics(evaluation)
    if report_to == "none":
        return metrics
    if not available(report_to):
        raise MissingExtraError(f"{report_to} is not installed. Type: pip install {report_to}", name=report_to)
    tracker: Any = import_module(report_to)
    models = {f"{arm}_model": str(model["name"]) for arm, model in evaluation["models"].items() if model}
    settings = {"verdict": evaluation["verdict"]["word"], "primary": evaluation["primary"], **models}
    tracker.init(
        project=os.environ.get(f"{report_to.upper()}_PROJECT", _PROJECT), name=f"{run_name}-evaluation", config=settings
    )
    try:
        tracker.log(metrics)
    finally:
        tracker.finish()
    return metrics


def _evaluation_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Return evaluation results as metrics: `evaluation/ARM/NAME`, with the suffixes `/low` and `/high` for the
    interval.

    A result for one kind of error has `/KIND` after its name.
    """
    metrics: dict[str, float] = {}
    for figure in evaluation["figures"]:
        name = "/".join(
            ["evaluation", figure["arm"], figure["name"], *([figure["kind"]] if figure.get("kind") else [])]
        )
        for key, suffix in (("estimate", ""), ("low", "/low"), ("high", "/high")):
            if figure[key] is not None:
                metrics[name + suffix] = float(figure[key])
    for metric in evaluation.get("damage", ()):
        for arm in ("before", "after", "control"):
            if metric.get(arm) is not None:
                metrics[f"evaluation/damage/{metric['name']}/{arm}"] = float(metric[arm])
    return metrics
