"""What a run holds, read once and without torch; what it lacks, with the command that writes it."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.canonical_json import decode_object
from composer_replication.errors import ComposerError, RunError
from composer_replication.runs import ARTEFACTS, RunDir, pairs, split
from composer_replication.runs.artefacts import command_for, control_folder, control_folders
from composer_replication.runs.conventions import Convention, read_conventions
from composer_replication.runs.evaluation import (
    ROWS_VERSION,
    control_name,
    controls_among,
    read_evaluation,
    shuffle_of,
    weight_files_digest,
)
from composer_replication.runs.journal import read_journal
from composer_replication.runs.sites import read_sites
from composer_replication.types import ErrorSite, Hint

Row = Mapping[str, Any]
_NEEDED = ("conversations", "split", "sites", "pairs", "hint_proof", "metrics", "evaluation", "evaluated", "token_gaps")
_WHOLE_COMMANDS = {
    "crf train": "crf train --set train.run=RUN --set train.model=MODEL",
    "crf evaluate": "crf evaluate RUN --before MODEL --after ADAPTER",
}
_SCHEMAS = {
    "split": (split.SCHEMA, split.VERSION),
    "teacher_calls": ("teacher_call", 2),
    "pairs": (pairs.SCHEMA, pairs.VERSION),
    "hint_proof": ("hint_proof", 3),
    **{name: (name, ROWS_VERSION) for name in ("evaluated", "sampled", "token_gaps")},
}
_ON_REQUEST = {
    "teacher_calls": "no adviser was asked",
    "conventions": "no user named a rule when refusing a call",
    "pairs": "the training had none, so channel 3 did not run",
    "hint_proof": "the training proved no hints",
    "evaluated": "the evaluation kept no single decisions",
    "sampled": "no actions were sampled",
    "token_gaps": "the evaluation measured no gaps of tokens",
}


class Absent(NamedTuple):
    """An artefact that the run does not have, or that cannot be read; `reason` is then why."""

    name: str
    file_name: str
    command: str
    reason: str = ""


class Metrics(NamedTuple):
    """The lines of a training's journal; `is_torn` where a crash cut the last one."""

    rows: list[Row]
    is_torn: bool


def by_command(absent: Iterable[Absent]) -> dict[str, list[str]]:
    """Files that are simply not there, by the command that writes them."""
    names_by_command: dict[str, list[str]] = defaultdict(list)
    for artefact in absent:
        if not artefact.reason:
            names_by_command[artefact.command].append(artefact.file_name)
    return dict(names_by_command)


@dataclass
class RunRecords:
    """The artefacts of a run, each read when it is first asked for. `training` is where the training wrote."""

    run: RunDir
    training: Path
    unreadable: dict[str, str] = field(default_factory=dict[str, str])

    def absent(self) -> list[Absent]:
        """What a finished run has and this one has not, and what could not be read, in the order of the pipeline."""
        return [
            Absent(name, ARTEFACTS[name].file_name, self.command(name), self.unreadable.get(name, ""))
            for name in ARTEFACTS
            if name in self.unreadable or (name in _NEEDED and not self.has(name) and not self._was_done_without(name))
        ]

    def _was_done_without(self, name: str) -> bool:
        """Whether the step that writes or reads it has ended, and did not need it."""
        if name in ("pairs", "hint_proof"):
            return self.training_record is not None
        return name in ("evaluated", "token_gaps") and self.evaluation is not None

    def on_request(self) -> dict[str, str]:
        """What a run need not have, with what its absence means."""
        missing = {artefact.name for artefact in self.absent()}
        return {
            ARTEFACTS[name].file_name: why
            for name, why in _ON_REQUEST.items()
            if not self.has(name) and name not in missing
        }

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def path(self, name: str) -> Path:
        """Where an artefact is; a training may have written its own elsewhere."""
        is_in_training = ARTEFACTS[name].command == "crf train" and name not in ("hint_proof", "ref_logprobs")
        return (self.training if is_in_training else self.run.root) / ARTEFACTS[name].file_name

    def command(self, name: str) -> str:
        artefact = ARTEFACTS[name]
        return _WHOLE_COMMANDS.get(artefact.command) or command_for(artefact, Path("RUN"))

    @cached_property
    def sites(self) -> list[tuple[ErrorSite, Hint | None]]:
        return list(self._tried("sites", lambda: read_sites(self.run)))

    @cached_property
    def pairs(self) -> list[Row]:
        return list(self.rows("pairs"))

    @cached_property
    def pairs_at(self) -> Mapping[tuple[str, int], list[Row]]:
        """Pairs by conversation and assistant turn, counted from 0."""
        pairs_by_turn: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in self.pairs:
            pairs_by_turn[row["conversation_id"], row["turn_number"]].append(row)
        return pairs_by_turn

    @cached_property
    def settings(self) -> Row | None:
        """The settings that the training wrote before it began; None without any, or where somebody broke them."""
        try:
            return tomllib.loads((self.training / ARTEFACTS["config"].file_name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @cached_property
    def why_no_proof(self) -> str:
        """Why this training tests no hints; empty where its settings ask for the proof. An earlier training's proof may
        lie here all the same."""
        settings: Row = self.settings or {}
        train: Row = settings.get("train", {})
        if train.get("proof", {}).get("on") is False:
            return "the proof was switched off (train.proof.on = false)"
        if settings.get("loss", {}).get("alpha_sdpo") == 0:
            return "channel 2 was switched off (loss.alpha_sdpo = 0)"
        return ""

    @cached_property
    def proofs(self) -> Mapping[str, Row]:
        """Proofs by site; none of a version that measured something else, or that this training did without."""
        if self.why_no_proof:
            return {}
        is_read = self.has("hint_proof") and self._version("hint_proof") == _SCHEMAS["hint_proof"][1]
        return {row["site_id"]: row for row in self.rows("hint_proof")} if is_read else {}

    @cached_property
    def gaps(self) -> Mapping[str, Row]:
        return {row["site_id"]: row for row in self.rows("token_gaps")}

    @cached_property
    def sides(self) -> Mapping[str, Row]:
        """Rows of the split by conversation."""
        return {row["conversation_id"]: row for row in self.rows("split")}

    @cached_property
    def evaluated(self) -> Mapping[str, list[Row]]:
        """Scored decisions by site; those of no site are under an empty id."""
        rows_by_site: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows("evaluated"):
            rows_by_site[row["site_id"] or ""].append(row)
        return rows_by_site

    @cached_property
    def sampled(self) -> Mapping[tuple[str, str], list[Row]]:
        """Sampled actions by conversation and turn."""
        rows_by_turn: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows("sampled"):
            rows_by_turn[row["conversation_id"], row.get("turn_id", "")].append(row)
        return rows_by_turn

    @cached_property
    def evaluation(self) -> Row | None:
        return next(self._tried("evaluation", lambda: iter([read_evaluation(self.run)])), None)

    @cached_property
    def other_weights(self) -> list[str]:
        """Arms of the evaluation that are not the weights that lie here: their figures say nothing about those."""
        models = (self.evaluation or {}).get("models") or {}
        other_arms: list[str] = []
        controls = ((name, control_folder(self.training, shuffle_of(name))) for name in controls_among(models))
        for arm, root in (("after", self.training), *controls):
            folders = (root / ARTEFACTS[name].file_name for name in ("adapter", "model"))
            here = {digest for folder in folders if (digest := weight_files_digest(folder))}
            if models.get(arm) and here and models[arm].get("files") not in here:
                other_arms.append(control_name(1) if controls_among([arm]) else arm)
        return list(dict.fromkeys(other_arms))

    @cached_property
    def training_record(self) -> Row | None:
        """`training.json` beside the weights."""
        paths = [self.path(name) / "training.json" for name in ("adapter", "model")]
        return next((self._json("adapter", path) for path in paths if path.exists()), None)

    def control_times(self) -> Iterator[tuple[Mapping[str, float], list[Row]]]:
        """Of each shuffle the seconds before its first step, and its metrics."""
        for folder in control_folders(self.training):
            record = folder / ARTEFACTS["adapter"].file_name / "training.json"
            control_record = (self._json("control", record) if record.exists() else None) or {}
            yield control_record.get("seconds") or {}, self._journal(folder / ARTEFACTS["metrics"].file_name).rows

    @cached_property
    def metrics(self) -> Metrics:
        return self._journal(self.path("metrics"))

    @cached_property
    def control_metrics(self) -> Metrics:
        """Of the first shuffle."""
        return self._journal(control_folder(self.training) / ARTEFACTS["metrics"].file_name)

    @cached_property
    def conventions(self) -> list[Convention]:
        try:
            return read_conventions(self.run)
        except ComposerError as error:
            self.unreadable["conventions"] = str(error)
            return []

    def rows(self, name: str) -> Iterator[Row]:
        """Rows of an artefact as dictionaries; none where it is not there or damaged."""
        schema, version = _SCHEMAS[name]
        return self._tried(name, lambda: self.run.read_jsonl(name, schema=schema, version=version))

    def _tried(self, name: str, read: Any) -> Iterator[Any]:
        """What a reader gives; a damaged artefact is noted, and the page goes on without it."""
        if not self.has(name):
            return
        try:
            yield from read()
        except RunError as error:
            self.unreadable[name] = str(error)

    def _version(self, name: str) -> int:
        return next(self._tried(name, lambda: iter([self.run.meta(name).version])), 0)

    def _json(self, name: str, path: Path) -> Row | None:
        try:
            return decode_object(path.read_bytes())
        except ValueError as error:
            self.unreadable[name] = f"{path.name}: {error}"
            return None

    def _journal(self, path: Path) -> Metrics:
        if not path.exists():
            return Metrics([], False)
        contents = read_journal(path)
        return Metrics(list(contents.rows), contents.torn is not None)
