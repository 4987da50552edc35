"""The checks of `crf run` before it starts, and the options that it saves in the run.

    check_inputs                logs and model exist; runs before anything that takes seconds to load
    check_enough_training_data  the run has enough errors and pairs to train on
    check_verdict_possible      the held-out sessions have enough errors for a verdict
    save_options                write options.toml: every option that is not a default

`crf run RUN` starts from options.toml, so that a run is resumed with its own options. Flags override individual
options; `--config` replaces all of them.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_replication.atomic import atomic_write_text
from composer_replication.batch.model_folder import check_model_name
from composer_replication.canonical_json import nested_items
from composer_replication.cli.console import format_count
from composer_replication.config import CrfConfig, to_toml
from composer_replication.config.presets import load_with_preset
from composer_replication.config.values import RESOLVED_NAME, value_text
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.session_sources import read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs.directory import MARKER
from composer_replication.runs.files import read_pairs, read_sites
from composer_replication.runs.lineage import read_json_object, source_path
from composer_replication.runs.split import SplitRow, read_split_rows, require_split_rows
from composer_replication.trainer.trained import resolve_base

if TYPE_CHECKING:
    from composer_replication.evaluation.evaluate import Measurable


OPTIONS = "options.toml"
_MAX_SHOWN = 3
_HEADER = "# What `crf run` was told for this run. `crf run RUN` goes on with it; what is typed then comes first.\n"
# Options that name files. They are stored as absolute paths, because the next call may be made in another folder.
_PATH_OPTIONS = {
    "ingest": ("tools",),
    "sites": ("writer",),
    "replay": ("teachers",),
    "pairs": ("recipe",),
    "render": ("chat_template",),
    "train": ("output",),
    "evaluation": ("gsm8k", "code"),
}
_MODEL_EXPECTED = "a folder with weights, a hub name, or `student`, the tiny model that comes with the package"


def resolve_paths(config: CrfConfig) -> CrfConfig:
    """Return the config with every path that exists made absolute.

    Other values may be hub names and stay unchanged.
    """
    paths = tuple(_absolute(log) for log in config.ingest.paths)
    sections: dict[str, Any] = {"ingest": replace(config.ingest, paths=paths)}
    for name, keys in _PATH_OPTIONS.items():
        section = sections.get(name, getattr(config, name))
        files = {key: path for key in keys if (path := getattr(section, key)) is not None}
        sections[name] = replace(section, **{key: _absolute(path) for key, path in files.items()})
    if config.train.model is not None:
        sections["train"] = replace(sections["train"], model=resolve_base(config.train.model))
    return replace(config, **sections)


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def saved_options_path(output: Path) -> Path | None:
    """Return the path of the options that `crf run` saved in a run, or None if there is no run or no such file."""
    path = output / OPTIONS
    return path if (output / MARKER).is_file() and path.is_file() else None


def find_saved_options(root: Path) -> Path | None:
    """Return the path of the options saved in a run: by `crf run`, or else by its last training run.

    None if there are none.
    """
    return next((path for name in (OPTIONS, RESOLVED_NAME) if (path := root / name).is_file()), None)


def save_options(config: CrfConfig, run: RunDir) -> None:
    """Store the options that differ from the preset in the run, where the next call finds them."""
    defaults = _flat_options(load_with_preset(overrides=[f"train.preset={config.train.preset}"]))
    options = {key: value for key, value in _flat_options(config).items() if value != defaults.get(key)}
    preset = {"train.preset": config.train.preset} if config.train.preset != CrfConfig().train.preset else {}
    lines = [f"{key} = {value_text(value)}\n" for key, value in {**preset, **options}.items()]
    atomic_write_text(run.root / OPTIONS, _HEADER + "".join(lines))


def _flat_options(config: CrfConfig) -> dict[str, Any]:
    return dict(nested_items(tomllib.loads(to_toml(config))))


def list_reused_options(path: Path, keys_of_call: Sequence[str]) -> list[str]:
    """Return the options in the file that the current call does not set itself, each as "key = value"."""
    return [
        f"{key} = {value_text(value)}"
        for key, value in nested_items(tomllib.loads(path.read_text(encoding="utf-8")))
        if key not in keys_of_call
    ]


def check_inputs(config: CrfConfig, output: Path) -> None:
    """Raise InputError if logs are missing or belong to another run, or if the model is missing or unsuitable.

    This loads neither torch nor a tokenizer.
    """
    run = RunDir.open(output) if output.is_dir() and any(output.iterdir()) else None
    has_sessions = run is not None and run.path("conversations").exists()
    if not config.ingest.paths and not has_sessions:
        expected = "a log or a folder with logs: `crf run PATH... --model MODEL`"
        raise InputError(explain("PATH", got="none, and no run to resume", expected=expected))
    for path in map(Path, config.ingest.paths):
        if not path.expanduser().exists():
            fix = "Claude Code keeps its logs in ~/.claude/projects, Codex in ~/.codex/sessions."
            raise InputError(explain(str(path), got="no such file or folder", expected="session logs", fix=fix))
    if run is not None and has_sessions and config.ingest.paths:
        _refuse_other_logs(run, [Path(log).expanduser().resolve() for log in config.ingest.paths])
    if config.train.model is None:
        fix = "Use for example `--model Qwen/Qwen2.5-Coder-0.5B-Instruct`, or set train.model in the --config file."
        raise InputError(explain("--model", got="none", expected=_MODEL_EXPECTED, fix=fix))
    what = f"--model {config.train.model}"
    check_model_name(config.train.model, what=what, expected=_MODEL_EXPECTED)
    if config.render.chat_template is None and not _may_have_template(Path(config.train.model)):
        fix = "Use a chat model, or set render.chat_template to a file with a template that supports tools."
        raise InputError(
            explain(what, got="no chat template", expected="a chat template, to render sessions with", fix=fix)
        )


def _may_have_template(folder: Path) -> bool:
    """Return whether a model may have a chat template. Only for a folder without template files is the answer False."""
    if not folder.is_dir() or any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in read_json_object(settings)


def drop_missing_logs(config: CrfConfig) -> tuple[CrfConfig, list[str]]:
    """Return the config without the logs that no longer exist, and the paths of these logs."""
    missing = [path for path in config.ingest.paths if not Path(path).expanduser().exists()]
    remaining = tuple(path for path in config.ingest.paths if path not in missing)
    return replace(config, ingest=replace(config.ingest, paths=remaining)), missing


def _refuse_other_logs(run: RunDir, paths: Sequence[Path]) -> None:
    """Raise InputError unless `paths` include all logs of the run.

    Otherwise sessions from unrelated logs would silently be added to the run.
    """
    remembered = saved_options_path(run.root)
    run_logs = _ingested_logs(run) if remembered is None else map(Path, load_with_preset(remembered).ingest.paths)
    missing = list(dict.fromkeys(str(path) for path in run_logs if not any(map(path.is_relative_to, paths))))
    if missing:
        names = ", ".join(missing[:_MAX_SHOWN])
        names += f" and {len(missing) - _MAX_SHOWN} more" if len(missing) > _MAX_SHOWN else ""
        fix = "Use another run for these logs: `-o RUN2`. To add them to this run, list its own logs as well."
        got = f"logs that do not include {names}, from which {run.root} was made"
        raise InputError(explain("PATH", got=got, expected="all logs of the run", fix=fix))


def _ingested_logs(run: RunDir) -> Iterator[Path]:
    """Yield the logs from which the run's sessions were read, if they still exist. Redacted paths are skipped."""
    for account in read_accounts(run):
        path = source_path(account.path, run.root)
        if account.conversations and path.exists():
            yield path.resolve()


# ---- Enough to learn from, and enough errors to evaluate with: both are checked before any training

_DETECTABLE_Z = 1.96 + 0.84
"""Size of an effect, in standard errors, that a test at the 5% level detects 80% of the time."""
_LEFT_OUT_REASONS = {
    "near_duplicate": "also in a training session",
    "no_good_call_in_the_session": "in a session without a good call",
    "no_correction": "without a right call in its session",
    "without_hint": "without a hint",
}
"""How the evaluation's reasons for leaving out an error are printed. Other reasons are printed by their names."""


class _SessionCounts(NamedTuple):
    """The number of training sessions, of those with a hinted error, and of hinted errors."""

    total: int = 0
    with_errors: int = 0
    errors: int = 0


class TrainingDataCounts(NamedTuple):
    """The amount of training data in a run, and the number of its failed calls."""

    sessions: _SessionCounts
    pairs: int
    failures: Counter[str]  # all failed calls of the run, by blame

    def describe(self) -> str:
        blames = ", ".join(f"{number} {blame}" for blame, number in self.failures.most_common())
        failed = (
            f"{format_count(self.failures.total(), 'failed call')} (blame: {blames})" if blames else "no failed calls"
        )
        return (
            f"{format_count(self.sessions.errors, 'error')} with a hint in {self.sessions.with_errors} of"
            f" {self.sessions.total} sessions, and {format_count(self.pairs, 'pair')}; in the whole run {failed}"
        )


def count_training_data(run: RunDir) -> TrainingDataCounts:
    """Count the errors with hints and the pairs in a run, excluding test sessions."""
    rows = {row.conversation_id: row for row in read_split_rows(run) or ()}
    test = {conversation_id for conversation_id, row in rows.items() if row.side == "test"}
    failures, error_conversations = Counter[str](), list[str]()
    for site, hint in read_sites(run):
        failures.update([site.blame] if site.kind != "no_failure" else [])
        is_trained_on = site.is_kept and hint is not None and site.conversation_id not in test
        error_conversations += [site.conversation_id] if is_trained_on else []
    return TrainingDataCounts(
        sessions=_count_sessions([row for row in rows.values() if row.side != "test"], error_conversations),
        pairs=sum(conversation_id not in test for conversation_id, _ in read_pairs(run)),
        failures=failures,
    )


def _count_sessions(rows: list[SplitRow], error_conversations: list[str]) -> _SessionCounts:
    # In a run without a split, every conversation counts as a session.
    session_of = {row.conversation_id: row.session for row in rows}
    erring = {session_of.get(conversation_id, conversation_id) for conversation_id in error_conversations}
    return _SessionCounts(len({*session_of.values(), *erring}), len(erring), len(error_conversations))


def check_enough_training_data(config: CrfConfig, training_data: TrainingDataCounts) -> None:
    """Raise InputError if a run has fewer errors and pairs in total than `run.fewest`.

    The message says how to get more training data.
    """
    num_examples, fewest = training_data.sessions.errors + training_data.pairs, max(config.run.fewest, 1)
    if num_examples < fewest:
        fix = (
            "Add logs of more sessions, of an agent whose calls fail now and then. Or ask teachers (--advisers) with "
            "pairs.where_it_worked = true. Or keep failures that are less certain: sites.min_confidence = 0.3. "
            "run.fewest = 0 trains anyway."
        )
        what = "too little training data" if num_examples else "no training data"
        expected = f"at least {fewest} in total (run.fewest)"
        raise InputError(explain(what, got=training_data.describe(), expected=expected, fix=fix))


def count_measurable(config: CrfConfig, run: RunDir) -> Measurable:
    """Return how many errors in how many sessions the evaluation will measure. This loads the model's tokenizer.

    `config` must come from `resolve_for_training`, so that its windows fit the model.
    """
    from composer_replication.evaluation.evaluate import measurable

    return measurable(config, run, require_split_rows(run), config.train.required_model())


def check_verdict_possible(
    config: CrfConfig, training_data: TrainingDataCounts, measurable: Measurable, on_message: Callable[[str], None]
) -> None:
    """Report how much the evaluation will measure. Raises InputError if it is too little for a verdict."""
    needed = config.evaluation.fewest_sessions
    description = _describe_measurable(config, measurable)
    if measurable.units >= needed:
        on_message(f"held out: {description}")
    elif config.run.without_verdict:
        on_message(f"No verdict will be possible. Held out: {description}; needed: {needed} {measurable.over}s")
    else:
        raise InputError(_no_verdict_message(config, training_data, measurable))


def _describe_measurable(config: CrfConfig, measurable: Measurable) -> str:
    """Describe what the evaluation will measure, why it excludes other errors, and which effect it could detect."""
    noun = "state" if config.evaluation.primary == "sampled_failures" else "error"
    text = f"{format_count(measurable.values, noun)} in {measurable.units} of {measurable.held_out} held-out"
    text += f" {measurable.over}s"
    if measurable.left_out:
        reasons = ", ".join(f"{number:,} {_describe_left_out(name)}" for name, number in measurable.left_out.items())
        text += f" (excluded: {reasons})"
    if measurable.units < 2:
        return text
    # The standard error of a mean over n sessions is their standard deviation / sqrt(n).
    smallest = _DETECTABLE_Z / math.sqrt(measurable.units)
    return f"{text}; smallest detectable effect: about {smallest:.1f} standard deviations between {measurable.over}s"


def _describe_left_out(name: str) -> str:
    reason = name.partition(": ")[2] or name  # "sdpo_jsd: without_hint" -> "without_hint"
    return _LEFT_OUT_REASONS.get(reason, reason.replace("_", " "))


def _no_verdict_message(config: CrfConfig, training_data: TrainingDataCounts, measurable: Measurable) -> str:
    """Return the error message for too little held-out data.

    The message says how many sessions, or how large a test split, would be enough for a verdict.
    """
    needed, fix = config.evaluation.fewest_sessions, "Add more sessions"
    if measurable.over == "session" and measurable.units:
        sessions = training_data.sessions.total + measurable.held_out
        share_with_errors = measurable.units / measurable.held_out
        fix += f", about {math.ceil(needed * sessions / measurable.units):,} like these in total"
        # The share of sessions to hold out so that enough of them have errors, rounded up to 0.05.
        test_share = math.ceil(20 * needed / (share_with_errors * sessions)) / 20
        if measurable.held_out / sessions < test_share <= 0.5:
            fix += f", or hold out more of them: `--set split.test={test_share:g}`"
    fix += ". To train without a verdict on whether it helped: `--set run.without_verdict=true`."
    expected = f"errors in at least {needed} held-out {measurable.over}s (evaluation.fewest_sessions)"
    got = _describe_measurable(config, measurable)
    return explain("too little held-out data", got=got, expected=expected, fix=fix)
