"""Why a step of a run has to be made: what it left is not there, was made of something else, or otherwise.

Sidecars say what records were made of and how. Weights have `training.json` beside them. What an evaluation or a report
was made of, `crf run` writes down itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from composer_replication.atomic import atomic_write_json
from composer_replication.canonical_json import decode_object
from composer_replication.config import CrfConfig
from composer_replication.config.writer import value_text
from composer_replication.errors import ArtefactCorruptError, ArtefactNotFoundError
from composer_replication.runs import ARTEFACTS, RunDir
from composer_replication.runs.artefacts import NOT_THERE
from composer_replication.runs.evaluation import weight_files_digest
from composer_replication.runs.sidecar import sha256_of_file
from composer_replication.runs.sites import struck_sites
from composer_replication.steps.split import TEST
from composer_replication.teacher_replay.teachers import read_specs, writer_in

_NOTES = ".made_of.json"
_UNKNOWN = object()
# What belongs to an artefact's sources as soon as it is there itself.
_READ_IF_THERE = {
    "sites": ("split", "conventions"),
    "teacher_calls": ("split",),
    "pairs": ("split", "sites", "teacher_calls"),
}
_FILES_OF = {"evaluate": ("evaluation",), "report": ("report_html", "report_md")}


def why_records(name: str, config: CrfConfig, run: RunDir) -> str:
    """Why the records `name` have to be written (again); empty where they are as they should be."""
    if not run.path(name).exists():
        return NOT_THERE
    try:
        changed = run.changed_sources(name)
        meta = run.meta(name)
    except (ArtefactCorruptError, ArtefactNotFoundError):
        return "cannot be read"
    source_names = {source.name for source in meta.sources}
    changed += [
        source for source in _READ_IF_THERE.get(name, ()) if run.path(source).exists() and source not in source_names
    ]
    if changed:
        return f"{' and '.join(dict.fromkeys(changed))} changed since"
    now = _SETTINGS[name](config, run)
    changed_settings = [
        f"{key}: {before} -> {value}"
        for key, value in now.items()
        if (before := meta.settings.get(key, _UNKNOWN)) is not _UNKNOWN and before != value
    ]
    return "; ".join(changed_settings)


def _of_split(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    section = config.split
    return {"by": section.by, "validation": section.validation, "test": TEST if section.test is None else section.test}


def _of_sites(config: CrfConfig, run: RunDir) -> dict[str, Any]:
    section = config.sites
    return {
        "min_confidence": section.min_confidence,
        "struck": sorted(struck_sites(run)),
        "writer": writer_in(section.writer),
    }


def _of_calls(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    section = config.replay
    names = ("gate", "threshold", "send_tools", "max_history_tokens", "states", "limit", "max_usd")
    slugs = [str(spec["slug"]) for spec in read_specs(section.teachers, "replay.teachers") or ()]
    return {"teachers": slugs, **{name: getattr(section, name) for name in names}}


def _of_pairs(config: CrfConfig, _run: RunDir) -> dict[str, Any]:
    section = config.pairs
    settings = {"threshold": section.threshold} if section.threshold is not None else {}
    names = ("where_it_worked", "thinking", "corrections", "filters", "recipe")
    return settings | {name: getattr(section, name) for name in names}


_SETTINGS: Mapping[str, Callable[[CrfConfig, RunDir], dict[str, Any]]] = {
    "split": _of_split,
    "sites": _of_sites,
    "teacher_calls": _of_calls,
    "pairs": _of_pairs,
}


# ---- what has no sidecar


def why_files(step: str, run: RunDir, made_of: Mapping[str, str | None]) -> str:
    """Why an evaluation or a report has to be made (again); `made_of` is what it would be made of now."""
    if not all(run.path(name).exists() for name in _FILES_OF[step]):
        return NOT_THERE
    before = _notes(run).get(step)
    if before is None:
        return "was not made by `crf run`"
    now = {**made_of, **_left(step, run)}
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    options = [f"{name}: {before.get(name, 'unset')} -> {now.get(name)}" for name in changed if "." in name]
    files = [name for name in changed if "." not in name]
    return "; ".join([*([f"{' and '.join(files)} changed since"] if files else []), *options])


def note_files(step: str, run: RunDir, made_of: Mapping[str, str | None]) -> None:
    """Write down what an evaluation or a report was made of, once it is there, and what it is itself."""
    atomic_write_json(run.root / _NOTES, {**_notes(run), step: {**made_of, **_left(step, run)}})


def _left(step: str, run: RunDir) -> dict[str, str | None]:
    """The files that the step left: somebody may have put others in their place since."""
    return hashes(run, _FILES_OF[step])


def _notes(run: RunDir) -> dict[str, Any]:
    path = run.root / _NOTES
    return decode_object(path.read_bytes()) if path.exists() else {}


def evaluated_of(config: CrfConfig, run: RunDir, weights: Mapping[str, Path | None]) -> dict[str, str | None]:
    """What an evaluation is made of: the records, the weights, the section, and the files that it names."""
    records = hashes(run, ("conversations", "split", "sites", "pairs"))
    section = config.evaluation
    paths = {"gsm8k": section.gsm8k, "code": section.code}
    files = {name: None if path is None else _hash_of(Path(path)) for name, path in paths.items()}
    options = {f"evaluation.{name}": value_text(value) for name, value in vars(section).items()}
    return {**records, **trained_of(weights), **files, **options}


def trained_of(weights: Mapping[str, Path | None]) -> dict[str, str | None]:
    """Weights by their training's record, and by their own bytes."""
    digests: dict[str, str | None] = {}
    for name, folder in weights.items():
        digests[name] = None if folder is None else _hash_of(folder / "training.json")
        digests[f"weights of {name}"] = None if folder is None else weight_files_digest(folder)
    return digests


def hashes(run: RunDir, names: Iterable[str]) -> dict[str, str | None]:
    """The files of these artefacts as they are now."""
    return {name: _hash_of(run.path(name)) for name in names if ARTEFACTS[name].kind != "folder"}


def _hash_of(path: Path) -> str | None:
    return sha256_of_file(path) if path.is_file() else None
