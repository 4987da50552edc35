"""Trace what an artefact was made from and whether it is stale, and read the record of trained weights.

The record, `training.json`, also has the result of each channel, computed here from the lines of metrics. A channel was
*taught* in the steps in which it had items and a weight. If it has a loss but no such step, it was *measured, not
taught*: its weight was 0, or a gate switched it off. A channel without any loss never ran.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any, Literal

from composer_replication.canonical_json import decode_object
from composer_replication.errors import ArtefactNotFoundError, InputError, explain
from composer_replication.runs.artefacts import (
    ARTEFACTS,
    ArtefactMeta,
    Source,
    find_artefact,
    sha256_of_file,
    verified_meta,
)

RECORD = "training.json"
_ARTEFACT, _FILE = "artefact", "file"
# "checkpoint-120" -> 120
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
History = Sequence[Mapping[str, Any]]
ChannelState = Literal["taught", "measured", "off", "never_ran"]
_WEIGHTS = {"sdpo_kl": "alpha_sdpo", "sdpo_kl_logged": "alpha_sdpo", "trace_replay_dpo": "beta_replay"}
_GATED, _GATE = "sdpo_kl", "hints/gate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The ancestors of an artefact.

    `artefacts` lists the ancestors and the artefact itself, each after its sources; `inputs` are the files outside the
    run from which the first artefacts were made. `stale` lists artefacts whose sources are stale or have changed since
    the artefact was written. `missing` lists sources that no longer exist, so that changes to them cannot be detected.
    """

    artefacts: tuple[str, ...]
    inputs: tuple[Source, ...]
    stale: tuple[str, ...]
    missing: tuple[str, ...]


def trace_lineage(directory: Path, name: str) -> Lineage:
    """Return the ancestors of artefact `name`, back to the files outside the run."""
    walk = _LineageWalk(directory)
    walk.visit(name)
    return Lineage(
        artefacts=tuple(walk.visited),
        inputs=tuple(walk.inputs),
        stale=tuple(artefact for artefact in walk.visited if artefact in walk.stale),
        missing=tuple(walk.missing),
    )


def changed_sources(directory: Path, name: str) -> list[str]:
    """Return the names of those sources of artefact `name` that have changed or are stale."""
    meta, _ = _load(directory, name)
    return [source.name for source in (meta.sources if meta else ()) if _LineageWalk(directory).has_changed(source)]


def hash_source(directory: Path, source: str | Path) -> Source:
    """Return a source with its current hash. A string is taken as the name of an artefact if that artefact exists,
    otherwise as a path.
    """
    if isinstance(source, str) and source in ARTEFACTS:
        return Source(kind=_ARTEFACT, name=source, sha256=_load(directory, source)[1])
    path = Path(source)
    if not path.is_file():
        raise InputError(f"source {str(source)!r} is neither a file nor an artefact ({', '.join(ARTEFACTS)})")
    return Source(kind=_FILE, name=portable_name(path, directory), sha256=sha256_of_file(path))


class _LineageWalk:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sha256: dict[str, str] = {}
        self.visited: list[str] = []
        self.inputs: dict[Source, None] = {}
        self.missing: dict[str, None] = {}
        self.stale: set[str] = set()

    def visit(self, name: str) -> str:
        """Return the current hash of artefact `name` after visiting all its ancestors."""
        if name not in self._sha256:
            meta, self._sha256[name] = _load(
                self._directory, name
            )  # stored before its sources are visited, which ends a cycle
            changed = [self.has_changed(source) for source in (meta.sources if meta else ())]
            if any(changed):
                self.stale.add(name)
            self.visited.append(name)
        return self._sha256[name]

    def has_changed(self, source: Source) -> bool:
        if source.kind == _ARTEFACT:
            try:
                return self.visit(source.name) != source.sha256 or source.name in self.stale
            except ArtefactNotFoundError:
                self.missing[source.name] = None
                return False
        self.inputs[source] = None
        path = source_path(source.name, self._directory)
        if not path.is_file():
            self.missing[source.name] = None
            return False
        return sha256_of_file(path) != source.sha256


def _load(directory: Path, name: str) -> tuple[ArtefactMeta | None, str]:
    """Return the sidecar of an artefact (None unless the artefact has records) and the hash of its file."""
    artefact = find_artefact(name)
    if artefact.kind == "records":
        meta = verified_meta(directory, artefact)
        return meta, meta.sha256
    if artefact.kind == "folder":
        raise InputError(f"artefact {name!r} is a folder and has no hash: name its files as sources")
    path = directory / artefact.file_name
    if not path.exists():
        raise artefact.not_found(directory)
    return None, sha256_of_file(path)


# Trained weights.


def read_training(folder: Path) -> dict[str, Any]:
    """Return the contents of `training.json` in a folder with weights; an empty dict if another tool wrote the
    weights.
    """
    return read_json_object(folder / RECORD) if (folder / RECORD).is_file() else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file next to weights, such as the config of an adapter."""
    try:
        return decode_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(explain(str(path), got=error, expected="a JSON object")) from error


def describe_unfinished(root: Path) -> str:
    """Describe how many steps an unfinished training run in this folder has completed; return an empty string if
    there is none.
    """
    paths = {name: root / ARTEFACTS[name].file_name for name in ("checkpoints", "adapter", "model", "config")}
    if not paths["checkpoints"].is_dir() or paths["adapter"].is_dir() or paths["model"].is_dir():
        return ""
    matches = (_CHECKPOINT.fullmatch(folder.name) for folder in paths["checkpoints"].iterdir())
    steps = max((int(match[1]) for match in matches if match), default=0)
    try:
        config: Any = tomllib.loads(paths["config"].read_text(encoding="utf-8"))
        total = f" of {config['train']['optimiser']['steps']}"
    # The training ended before it wrote the config, or the file was edited.
    except (OSError, ValueError, LookupError, TypeError):
        total = ""
    return f"an unfinished training run at step {steps}{total}, which `crf run {root}` resumes"


@dataclass(frozen=True, kw_only=True)
class ChannelResult:
    """The result of one loss channel in a training run: the number of steps that trained it, and its first and last
    loss.

    `reason` says why a channel's loss was measured without being trained on.
    """

    name: str
    weight: float
    steps: int
    first_loss: float | None
    last_loss: float | None
    reason: str = ""

    @property
    def state(self) -> ChannelState:
        return _channel_state(vars(self))

    @property
    def never_ran(self) -> bool:
        return self.state == "never_ran"

    def in_words(self, total_steps: int | None) -> str:
        return describe_channel(vars(self), total_steps)


def channel_results(names: Sequence[str], history: History, weights: Mapping[str, float]) -> tuple[ChannelResult, ...]:
    """Return the result of each loss channel from the lines of metrics, each of which covers the steps since the
    previous line.

    `ran/NAME` in a line is the fraction of these steps that trained channel NAME; if it is missing, all of them did.
    """
    results: list[ChannelResult] = []
    for name in names:
        lines = [(at, line) for at, line in enumerate(history) if line.get(f"loss/{name}") is not None]
        losses = [line[f"loss/{name}"] for _, line in lines]
        weight = weights.get(_WEIGHTS.get(name, name), 1.0)
        steps = sum(_taught_steps(line.get(f"ran/{name}"), _steps_of(history, at)) for at, line in lines)
        # The last line also counts steps after the last line with losses.
        steps = max([steps, *(int(line[key]) for line in history if line.get(key := f"ran_steps/{name}") is not None)])
        reason = "" if steps or not has_losses(history, name) else _why_not_taught(history, name, weight, bool(losses))
        first, last = (losses[0], losses[-1]) if losses else (None, None)
        results.append(
            ChannelResult(name=name, weight=weight, steps=steps, first_loss=first, last_loss=last, reason=reason)
        )
    return tuple(results)


def has_losses(history: History, name: str) -> bool:
    """Return whether any line of metrics has a loss of the channel, from training or from held-out data."""
    return any(line.get(key) is not None for line in history for key in (f"loss/{name}", f"eval_{name}"))


def _channel_state(channel: Mapping[str, Any]) -> ChannelState:
    """Return the state of a channel from its entry in `training.json`. Entries by earlier versions have no reason."""
    if channel.get("steps"):
        return "taught"
    if channel.get("first_loss") is not None or channel.get("reason"):
        return "measured"
    return "never_ran" if channel.get("weight") else "off"


def describe_channel(channel: Mapping[str, Any], total_steps: int | None) -> str:
    """Describe the result of a loss channel in the words that all reports use, such as `11 of 12` or `measured, not
    taught: gate closed`.
    """
    state = _channel_state(channel)
    if state == "taught":
        return f"{channel['steps']:,}" + ("" if total_steps is None else f" of {total_steps:,}")
    if state == "measured":
        return ": ".join(["measured, not taught", *filter(None, [channel.get("reason")])])
    return "off: weight 0" if state == "off" else "never ran: no data in any step"


def _taught_steps(share: float | None, steps: int) -> int:
    # Any fraction above 0 is at least one step.
    if share is None:
        return steps
    return max(round(share * steps), 1) if share > 0 else 0


def _why_not_taught(history: History, name: str, weight: float, has_loss: bool) -> str:
    if not weight:
        return "weight 0"
    if not has_loss:
        return "only on held-out data"
    gates = [line[_GATE] for line in history if line.get(_GATE) is not None]
    return "gate closed" if name == _GATED and gates else "weight 0 at these steps"


def _steps_of(history: History, at: int) -> int:
    before = [line["step"] for line in history[:at] if "loss" in line and "step" in line]
    return int(history[at].get("step", 0)) - int(before[-1] if before else 0)


# Names of source files.

# A sidecar names a file such that it can be found from the run, but without the name of the user in the path.
_HOME = "~/"


def portable_name(path: Path, run: Path) -> str:
    """Return a name for `path` that stays valid if the run or the home directory moves.

    The name is relative to the run if both are below the home directory or the path is inside the run. Names of other
    paths below the home directory begin with `~`; any other name is an absolute path.
    """
    path, run = path.absolute(), run.resolve()
    if ".." in path.parts:  # the parent of a link's target may be another folder than in the text
        path = path.resolve()
    shared, homes = {run, *run.parents} & set(path.parents), _homes()
    if run in shared or any(home in folder.parents for home in homes for folder in shared):
        name = Path(relpath(path, run)).as_posix()
        return f"./{name}" if name.startswith("~") else name
    return next((_HOME + path.relative_to(home).as_posix() for home in homes if home in path.parents), str(path))


def source_path(name: str, run: Path) -> Path:
    """Return the path that a portable name stands for."""
    homes = _homes()
    if homes and name.startswith(_HOME):
        return homes[0] / name.removeprefix(_HOME)
    return run.resolve() / name  # an absolute name stays as it is


def _homes() -> list[Path]:
    """Return the home directory, as given and with links resolved; an empty sequence if it is unknown or `/`."""
    try:
        home = Path.home()
    except RuntimeError:
        return []
    return [path for path in (home, home.resolve()) if path.is_absolute() and path.parent != path]
