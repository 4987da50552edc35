"""Evaluate models on the held-out sessions of a run: `crf evaluate`, from the run to evaluation.json.

`evaluate` picks the models and the settings, `evaluate_run` compares them. The parts are in `decisions`, `sampling`,
`damage` and `record`. Torch is imported when an evaluation starts, not with this module.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.batch.render.renderer import Renderer
from composer_replication.config import CrfConfig, load
from composer_replication.errors import MissingExtraError, NonFiniteError
from composer_replication.evaluation.arms import Arm, arms_of, digest_of_arm, load_each_model, tokenizers_of
from composer_replication.evaluation.decisions import (
    NEAR_DUPLICATE,
    NO_CORRECTION,
    HeldOut,
    ScoreJournal,
    read_held_out,
)
from composer_replication.evaluation.figures import Over
from composer_replication.evaluation.models import models_of, trained_with
from composer_replication.evaluation.record import (
    Answers,
    Questions,
    add_answers,
    add_when_primary_was_named,
    ask,
    over_of,
    questions_on,
    record_of,
    results_of,
    units_of,
)
from composer_replication.evaluation.vllm_sampling import engine_of
from composer_replication.runs import RunDir
from composer_replication.runs.files import ROWS_VERSION, write_evaluation
from composer_replication.runs.split import SplitRow, require_split_rows
from composer_replication.trainer.sessions.rendering import WindowSettings, assistant_token_ids
from composer_replication.trainer.start_model import untrained_rows

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.training import TrainingCallbacks


PARTIAL = "evaluation.partial.jsonl"
_SOURCES = ("conversations", "split", "sites")


class _HeldOutView(NamedTuple):
    """The held-out sessions in the tokens of one tokenizer, the questions about them, and the reasons why sites have
    none.
    """

    renderer: Renderer
    held: HeldOut
    questions: Questions
    drops: Counter[str]


class Measurable(NamedTuple):
    """What the primary metric of an evaluation averages over, known before any model is trained.

    `values` counts its errors (or the states to sample actions at), `units` the held-out sessions or projects with at
    least one, `held_out` all held-out sessions or projects. `left_out` says why other errors have no value.
    """

    values: int
    units: int
    held_out: int
    sessions: int
    over: Over = "session"
    left_out: Mapping[str, int] = {}


def measurable(config: CrfConfig, run: RunDir, sides: Sequence[SplitRow], model: str) -> Measurable:
    """Return what an evaluation of `run` with these settings would use, selected as the evaluation selects it.

    `model` names the initial model; only its tokenizer is loaded.
    """
    section = replace(config.evaluation, token_gaps=0)  # not part of the primary metric
    view = _view(replace(config, evaluation=section), run, sides, load_tokenizer(model), section.states)
    names, sessions = units_of(run, sides), view.questions.sessions_with_values(section.primary)
    left_out = view.held.drops + view.drops
    if missing := len(view.questions.sites) - len(sessions) if section.primary == "forced_correction" else 0:
        left_out[NO_CORRECTION] = missing
    return Measurable(
        values=len(sessions),
        units=len({names[session] for session in sessions}),
        held_out=len({names[row.session] for row in sides if row.side == "test"}),
        sessions=view.held.num_sessions["test"],
        over=over_of(run),
        left_out=dict(sorted(left_out.items())),
    )


def evaluate_run(
    config: CrfConfig,
    run: RunDir,
    sides: Sequence[SplitRow],
    *,
    before: str,
    after: str,
    controls: Sequence[str] = (),
    primary_then: str | None = None,
    scores: Path | None = None,
) -> dict[str, Any]:
    """Compare the models on the held-out sessions of a run, write the artifacts, and return evaluation.json's record.

    `primary_then` is the primary metric in the training's own settings. `scores` is a journal that outlives this
    evaluation, so that others of the same weights need not score them again.
    """
    began, arms = time.monotonic(), arms_of(before, after, controls)
    tokenizers, have_same_tokens = tokenizers_of(arms)
    views = _views(config, run, sides, tokenizers, have_same_tokens=have_same_tokens)
    _, held, questions, drops = views[arms[0].base]
    journal = ScoreJournal(scores or run.root / PARTIAL)
    try:
        answers = _answers(config, arms, views, journal) if questions.has_any else Answers()
    # Close the journal on Ctrl-C as well; the next evaluation resumes from it.
    finally:
        journal.close()
    results = results_of(config, run, held, questions, answers, sides)
    record = record_of(config, run, arms, held, answers, results, have_same_tokens=have_same_tokens)
    add_when_primary_was_named(record, primary_then)
    record["seconds"] = round(time.monotonic() - began, 1)
    record["drops"] = dict(sorted((held.drops + drops).items()))
    for name, rows in results.rows.items():
        _write_rows(run, name, rows, held, drops)
    write_evaluation(run, record)
    # A journal that the caller named is shared with other evaluations and stays.
    if scores is None:
        journal.remove()
    return record


def _views(
    config: CrfConfig,
    run: RunDir,
    sides: Sequence[SplitRow],
    tokenizers: Mapping[str, Any],
    *,
    have_same_tokens: bool,
) -> dict[str, _HeldOutView]:
    """Return the view of each base model; models with the same tokenizer share that of the first."""
    # The states common to all tokenizers are limited later.
    most = config.evaluation.states if have_same_tokens else sys.maxsize
    bases = list(tokenizers)[: 1 if have_same_tokens else None]
    views = {base: _view(config, run, sides, tokenizers[base], most) for base in bases}
    if not have_same_tokens:
        _keep_common_states(list(views.values()), config.evaluation.states)
    return views


def _view(config: CrfConfig, run: RunDir, sides: Sequence[SplitRow], tokenizer: Any, most_states: int) -> _HeldOutView:
    """Return the held-out sessions in a tokenizer's tokens, with everything that models will be asked about them."""
    from composer_replication.trainer.from_config.inputs import make_renderer, tools_of

    renderer, drops = make_renderer(config.render, tokenizer, tools_of(run)), Counter[str]()
    most_gaps = config.evaluation.token_gaps
    held = read_held_out(run, sides, renderer, _window_settings(config), num_training_sites=most_gaps)
    return _HeldOutView(renderer, held, questions_on(config, renderer, held, drops, most_states), drops)


def _window_settings(config: CrfConfig) -> WindowSettings:
    """Return window settings. Only which turns are good, and where hints would be placed, matters here."""
    batch = config.train.batch
    return WindowSettings(
        budget=batch.window[0],
        work_failures=config.train.channels.work_failures,
        use_pairs=False,
        placement=batch.placement,
        part=batch.part,
    )


def _keep_common_states(views: Sequence[_HeldOutView], most: int) -> None:
    """Reduce the views to the states that exist in all of them.

    Log-probs of different tokens cannot be compared; sampled actions can, at states that every model can be shown.
    """
    by_place = [{state.place: state for state in view.questions.states} for view in views]
    common = [key for key in by_place[0] if all(key in states for states in by_place)]
    chosen = [key for sort in ("erring", "good") for key in [shared for shared in common if shared[2] == sort][:most]]
    for view, states in zip(views, by_place, strict=True):
        questions = view.questions
        questions.states = [states[key] for key in chosen]
        # Only `sums` remains besides the states: answers are numbers in a text, whatever its tokens.
        questions.sites, questions.turns, questions.gaps, questions.code = [], [], [], []


def _answers(
    config: CrfConfig, arms: Sequence[Arm], views: Mapping[str, _HeldOutView], journal: ScoreJournal
) -> Answers:
    shared = next(iter(views.values()))
    longest = max(view.questions.longest(config.evaluation.new_tokens) for view in views.values())
    engine = engine_of(arms, config.evaluation, longest) if longest else None
    answers = Answers() if engine is None else Answers(engine=engine.name)
    for arm, model in load_each_model(arms, config.evaluation.precision):
        view = views.get(arm.base, shared)
        digest, drawing = digest_of_arm(arm, model), None if engine is None else engine.of(arm)
        arguments = view.questions, view.renderer, config.evaluation, journal, drawing
        try:
            add_answers(answers, ask(model, digest, arm.name, *arguments))
        except NonFiniteError:
            answers.broken.append(arm.name)
        if view.questions.states:
            # Tokens of the template that no logged turn uses may have untrained embeddings, which explains bad samples.
            said_ids = assistant_token_ids(session.rendered for session in view.held.sessions)
            untrained = untrained_rows(model, view.renderer.tokenizer, said_ids)
            answers.unlearnt |= {} if untrained is None else {arm.name: untrained.describe()}
    # Without one of the two main models there is nothing to compare: drop all other answers.
    return Answers(broken=answers.broken) if {"before", "after"} & set(answers.broken) else answers


def _write_rows(
    run: RunDir, name: str, rows: Sequence[Mapping[str, Any]], held: HeldOut, drops: Mapping[str, int]
) -> None:
    run.write_jsonl(
        name,
        rows,
        schema=name,
        version=ROWS_VERSION,
        sources=_SOURCES,
        counts={"rows": len(rows), NEAR_DUPLICATE: len(held.duplicates)},
        drops=drops,
    )


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
    """Compare the models, write evaluation.json and the rows beside it, and return the record.

    Models that are not named default to the initial model, the result and the controls of the run's own training. Too
    little data gives a verdict, not an error. `scores` is a journal of scores to share with other evaluations.
    """
    from composer_replication.trainer.from_config.training import TrainingCallbacks
    from composer_replication.trainer.sessions.phases import reporting_phases

    observer = progress or TrainingCallbacks()
    models = models_of(config, run, before=before, after=after, control=control)
    with reporting_phases(observer.on_phase, observer.say), run.used_for("training"):
        then = trained_with(models.after)
        primary = None if then is None else load(CrfConfig, then).evaluation.primary
        options: dict[str, Any] = {"primary_then": primary, "scores": scores}
        record = evaluate_run(config, run, require_split_rows(run), **models._asdict(), **options)
    if config.train.report_to != "none":
        _report(config, run, record, observer)
    return record


def _report(config: CrfConfig, run: RunDir, record: dict[str, Any], progress: TrainingCallbacks) -> None:
    """Send the metrics to the training's tracker; a tracker that is no longer installed is only reported."""
    from composer_replication.trainer.metrics_file import report_evaluation

    try:
        report_evaluation(config.train.report_to, record, run_name=run.root.resolve().name)
    except MissingExtraError as error:
        progress.say(f"train.report_to: {error}; the metrics are in evaluation.json only")
