"""`crf evaluate`: before against after on the held-out sessions of a run. Torch is loaded on use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.config import CrfConfig, config_hash, load
from composer_replication.config.writer import RESOLVED_NAME
from composer_replication.errors import InputError, MissingExtraError, explain
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import control_folders
from composer_replication.runs.lineage import RECORD, half_trained, read_training
from composer_replication.runs.split import required_split

if TYPE_CHECKING:
    from composer_replication.trainer.from_config.training import Progress


class Models(NamedTuple):
    """Names of the weights to compare: folders, hub names or adapters."""

    before: str
    after: str
    controls: tuple[str, ...] = ()


def evaluate(
    config: CrfConfig,
    run: RunDir,
    *,
    before: str | None = None,
    after: str | None = None,
    control: str | Sequence[str] = (),
    progress: Progress | None = None,
    scores: Path | None = None,
) -> dict[str, Any]:
    """Compare the models, write evaluation.json and the rows beside it, and give the record that was written.

    Without names they are what the run's own training began with and left. Too little data is a verdict, not an error.
    `scores` is a file that keeps what is scored for other evaluations.
    """
    from composer_replication.evaluation.evaluate import evaluate_run
    from composer_replication.sessions.phases import telling_phases
    from composer_replication.trainer.from_config.training import Progress

    observer = progress or Progress()
    models = models_of(config, run, before=before, after=after, control=control)
    with telling_phases(observer.on_phase, observer.say), run.used_for("training"):
        then = trained_with(models.after)
        primary = None if then is None else load(CrfConfig, then).evaluation.primary
        options: dict[str, Any] = {"primary_then": primary, "scores": scores}
        record = evaluate_run(config, run, required_split(run), **models._asdict(), **options)
    if config.train.report_to != "none":
        _report(config, run, record, observer)
    return record


def _report(config: CrfConfig, run: RunDir, record: dict[str, Any], progress: Progress) -> None:
    """The figures to the tracker that the training went to; one that is not there any more stops nothing."""
    from composer_replication.use.trackers import report_evaluation

    try:
        report_evaluation(config.train.report_to, record, run_name=run.root.resolve().name)
    except MissingExtraError as error:
        progress.say(f"train.report_to: {error}; evaluation.json has all of it")


def with_settings_of_training(
    given: CrfConfig, run: RunDir, after: str | None, overrides: Sequence[str] = ()
) -> CrfConfig:
    """The settings that the weights were trained with, below the overrides; what was given, where none are known.

    A model is asked in the template, the windows and the contexts that it learnt in.
    """
    root = Path(given.train.output) if given.train.output is not None else run.root
    weights = after or _trained(root)
    path = None if weights is None else trained_with(weights)
    if path is None:
        return given
    config = load(CrfConfig, path, overrides)
    return replace(config, train=replace(config.train, output=given.train.output))


def trained_with(weights: str) -> Path | None:
    """The file of settings beside trained weights; None where there is none, or it is another by now."""
    folder = Path(weights)
    path = folder.parent / RESOLVED_NAME
    try:
        return path if config_hash(load(CrfConfig, path)) == read_training(folder).get("config_hash") else None
    except (OSError, ValueError):  # somebody else's weights, or settings that were changed by hand
        return None


def models_of(
    config: CrfConfig,
    run: RunDir,
    *,
    before: str | None = None,
    after: str | None = None,
    control: str | Sequence[str] = (),
) -> Models:
    """What was named, and for the rest what a training on this run left: its weights, its start, its controls."""
    controls = [control] if isinstance(control, str) else list(control)
    root = Path(config.train.output) if config.train.output is not None else run.root
    if after is None:
        after = _trained(root)
        controls = controls or [weights for folder in control_folders(root) if (weights := _trained(folder))]
        if after is None:
            partial_training = half_trained(root)
            got = f"no name, and {partial_training or 'no trained weights in the run'}"
            fix = "" if partial_training else "Run `crf train`, or name them."
            raise InputError(explain("--after", got=got, expected="weights", fix=fix))
    if before is None:
        before = _start_of(Path(after)) or config.train.model
        if before is None:
            got = f"no name, and no {RECORD} beside {after} that says what it was trained from"
            raise InputError(explain("--before", got=got, expected="the weights to compare with", fix="Name them."))
    return Models(before, after, tuple(controls))


def _trained(root: Path) -> str | None:
    paths = (root / ARTEFACTS[name].file_name for name in ("adapter", "model"))
    return next((str(path) for path in paths if path.is_dir()), None)


def _start_of(folder: Path) -> str | None:
    start_weights = read_training(folder).get("start_weights")  # somebody else's weights say nothing
    return start_weights if isinstance(start_weights, str) else None
