"""What `crf run` is told: checked before anything that takes seconds to load, and remembered beside what it makes.

`options.toml` of a run holds every option that is not a default. A later call for the same run begins with it, so that
`crf run RUN` goes on as the run began; what is typed then, or stands in a `--config`, comes before it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_text
from composer_replication.batch.model_folder import check_model_name
from composer_replication.canonical_json import nested_items
from composer_replication.config import CrfConfig, to_toml
from composer_replication.config.presets import load_with_preset
from composer_replication.config.writer import RESOLVED_NAME, value_text
from composer_replication.errors import InputError, explain
from composer_replication.ingestion.cache.session_sources import read_accounts
from composer_replication.runs import RunDir
from composer_replication.runs.directory import MARKER
from composer_replication.runs.lineage import read_object
from composer_replication.runs.source_paths import find_source
from composer_replication.use.trained import absolute_base

OPTIONS = "options.toml"
_SHOWN = 3
_HEAD = "# What `crf run` was told for this run. `crf run RUN` goes on with it; what is typed then comes first.\n"
_FILES = {
    "ingest": ("tools",),
    "sites": ("writer",),
    "replay": ("teachers",),
    "pairs": ("recipe",),
    "render": ("chat_template",),
    "train": ("output",),
    "evaluation": ("gsm8k", "code"),
}
_A_MODEL = "a folder with weights, a name on the hub, or `student`, the tiny model that comes with the package"


def settled(config: CrfConfig) -> CrfConfig:
    """The config with every path that is there made absolute: it means the same from the next folder on."""
    paths = tuple(_absolute(log) for log in config.ingest.paths)
    sections: dict[str, Any] = {"ingest": replace(config.ingest, paths=paths)}
    for name, keys in _FILES.items():
        section = sections.get(name, getattr(config, name))
        files = {key: path for key in keys if (path := getattr(section, key)) is not None}
        sections[name] = replace(section, **{key: _absolute(path) for key, path in files.items()})
    if config.train.model is not None:
        sections["train"] = replace(sections["train"], model=absolute_base(config.train.model))
    return replace(config, **sections)


def _absolute(name: str) -> str:
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def told_before(output: Path) -> Path | None:
    """The file with what a run was told; None where there is no run, or one that `crf run` did not make."""
    path = output / OPTIONS
    return path if (output / MARKER).is_file() and path.is_file() else None


def remembered_options(root: Path) -> Path | None:
    """Return the file with a run's options: those of `crf run`, else those of the last training in it; None without."""
    return next((path for name in (OPTIONS, RESOLVED_NAME) if (path := root / name).is_file()), None)


def remember(config: CrfConfig, run: RunDir) -> None:
    """Write down what a config says beside its preset, for the next call."""
    plain = _items(load_with_preset(overrides=[f"train.preset={config.train.preset}"]))
    options = {key: value for key, value in _items(config).items() if value != plain.get(key)}
    preset = {"train.preset": config.train.preset} if config.train.preset != CrfConfig().train.preset else {}
    lines = [f"{key} = {value_text(value)}\n" for key, value in {**preset, **options}.items()]
    atomic_write_text(run.root / OPTIONS, _HEAD + "".join(lines))


def _items(config: CrfConfig) -> dict[str, Any]:
    return dict(nested_items(tomllib.loads(to_toml(config))))


def reused(path: Path, given: Sequence[str]) -> list[str]:
    """What a call takes over from the file, as it stands there: all that `given`, keys of this call, do not say."""
    return [
        f"{key} = {value_text(value)}"
        for key, value in nested_items(tomllib.loads(path.read_text(encoding="utf-8")))
        if key not in given
    ]


def check_given(config: CrfConfig, output: Path) -> None:
    """Raise for what can be seen to be wrong without a model: no logs, other logs, no model, a folder in the way."""
    run = RunDir.open(output) if output.is_dir() and any(output.iterdir()) else None
    has_sessions = run is not None and run.path("conversations").exists()
    if not config.ingest.paths and not has_sessions:
        expected = "a log or a folder with logs: `crf run PATH... --model MODEL`"
        raise InputError(explain("PATH", got="none, and no run to go on with", expected=expected))
    for path in map(Path, config.ingest.paths):
        if not path.expanduser().exists():
            fix = "Claude Code keeps its logs in ~/.claude/projects, Codex in ~/.codex/sessions."
            raise InputError(explain(str(path), got="no such file or folder", expected="session logs", fix=fix))
    if run is not None and has_sessions and config.ingest.paths:
        _refuse_other_logs(run, [Path(log).expanduser().resolve() for log in config.ingest.paths])
    if config.train.model is None:
        fix = "Type `--model Qwen/Qwen2.5-Coder-0.5B-Instruct`, say, or set train.model in the file of --config."
        raise InputError(explain("--model", got="none", expected=_A_MODEL, fix=fix))
    what = f"--model {config.train.model}"
    check_model_name(config.train.model, what=what, expected=_A_MODEL)
    if config.render.chat_template is None and not _may_have_template(Path(config.train.model)):
        fix = "Take a model that was made to chat, or set render.chat_template to a file with one that shows tools."
        raise InputError(explain(what, got="no chat template", expected="one, to show sessions with", fix=fix))


def _may_have_template(folder: Path) -> bool:
    """Whether a folder has a template where transformers looks for one; of what is no folder nobody knows yet."""
    if not folder.is_dir() or any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and "chat_template" in read_object(settings)


def without_lost_logs(config: CrfConfig) -> tuple[CrfConfig, list[str]]:
    """Without the logs that are not there any more, and which those are."""
    lost = [path for path in config.ingest.paths if not Path(path).expanduser().exists()]
    remaining_paths = tuple(path for path in config.ingest.paths if path not in lost)
    return replace(config, ingest=replace(config.ingest, paths=remaining_paths)), lost


def _refuse_other_logs(run: RunDir, paths: Sequence[Path]) -> None:
    """Sessions of other logs would join those of the run, and nobody would see it."""
    before = told_before(run.root)
    known_logs = _logs_of(run) if before is None else map(Path, load_with_preset(before).ingest.paths)
    missing_logs = list(dict.fromkeys(str(log) for log in known_logs if not any(map(log.is_relative_to, paths))))
    if missing_logs:
        names = ", ".join(missing_logs[:_SHOWN]) + (
            f" and {len(missing_logs) - _SHOWN} more" if len(missing_logs) > _SHOWN else ""
        )
        fix = "For these alone name another run: `-o RUN2`. To add them to this one, name all logs, those of it, too."
        got = f"logs without {names}, of which {run.root} was made"
        raise InputError(explain("PATH", got=got, expected="the logs of the run", fix=fix))


def _logs_of(run: RunDir) -> Iterator[Path]:
    """Main logs of the run's sessions that are still there; names that were scrubbed lead nowhere."""
    for account in read_accounts(run):
        path = find_source(account.path, run.root)
        if account.conversations and path.exists():
            yield path.resolve()
