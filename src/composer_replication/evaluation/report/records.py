"""Read the artifacts of a run for the report, each only once and without torch, and list the missing ones."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from composer_replication.canonical_json import decode_object
from composer_replication.errors import ComposerError, RunError
from composer_replication.runs import ARTEFACTS, RunDir, split
from composer_replication.runs.artefacts import control_folder, control_folders
from composer_replication.runs.conventions import Convention, ConventionsFile
from composer_replication.runs.files import (
    PAIRS_SCHEMA,
    PAIRS_VERSION,
    ROWS_VERSION,
    control_name,
    controls_among,
    hash_weight_files,
    read_evaluation,
    read_sites,
    shuffle_number,
)
from composer_replication.runs.journal import read_journal
from composer_replication.types import ErrorSite, Hint

Row = Mapping[str, Any]
# Artifacts that a finished run has; the report names the command for each that is missing.
_NEEDED = ("conversations", "split", "sites", "pairs", "hint_proof", "metrics", "evaluation", "evaluated", "token_gaps")
# Commands with their required options.
_FULL_COMMANDS = {
    "crf train": "crf train --set train.run=RUN --set train.model=MODEL",
    "crf evaluate": "crf evaluate RUN --before MODEL --after ADAPTER",
}
# Schemas and versions of the rows that the report can read; other versions are treated as unreadable.
_SCHEMAS = {
    "split": (split.SCHEMA, split.VERSION),
    "teacher_calls": ("teacher_call", 2),
    "pairs": (PAIRS_SCHEMA, PAIRS_VERSION),
    "hint_proof": ("hint_proof", 3),
    **{name: (name, ROWS_VERSION) for name in ("evaluated", "sampled", "token_gaps")},
}
# Files that a finished run may lack, and what their absence means.
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
    """An artifact that the run lacks, or that cannot be read for the reason given."""

    name: str
    file_name: str
    command: str
    reason: str = ""


class _Metrics(NamedTuple):
    """The rows of a training run's `metrics.jsonl`, and whether a crash cut off the last line."""

    rows: list[Row]
    is_torn: bool


def by_command(absent: Iterable[Absent]) -> dict[str, list[str]]:
    """Group the names of missing files by the command that writes them. Unreadable files are not listed."""
    names_by_command: dict[str, list[str]] = defaultdict(list)
    for artefact in absent:
        if not artefact.reason:
            names_by_command[artefact.command].append(artefact.file_name)
    return dict(names_by_command)


@dataclass
class RunRecords:
    """The artifacts of a run, each read on first use. `training` is the folder to which the training wrote."""

    run: RunDir
    training: Path
    unreadable: dict[str, str] = field(default_factory=dict[str, str])

    def absent(self) -> list[Absent]:
        """Return the artifacts that a finished run should have but this one lacks, and those that cannot be read."""
        return [
            Absent(name, ARTEFACTS[name].file_name, self.command(name), self.unreadable.get(name, ""))
            for name in ARTEFACTS
            if name in self.unreadable or (name in _NEEDED and not self.has(name) and not self._is_not_needed(name))
        ]

    def _is_not_needed(self, name: str) -> bool:
        """Return whether an artifact is no longer needed: the step that would have used it has finished without it."""
        if name in ("pairs", "hint_proof"):
            return self.training_record is not None
        return name in ("evaluated", "token_gaps") and self.evaluation is not None

    def on_request(self) -> dict[str, str]:
        """Return the optional files that the run lacks, each with an explanation of what its absence means."""
        missing = {artefact.name for artefact in self.absent()}
        return {
            ARTEFACTS[name].file_name: why
            for name, why in _ON_REQUEST.items()
            if not self.has(name) and name not in missing
        }

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def path(self, name: str) -> Path:
        """Return the path of an artifact. Artifacts of the training may be in a folder outside the run."""
        # The hint checks and the reference log-probs belong to the run, because all trainings on it share them.
        is_in_training = ARTEFACTS[name].command == "crf train" and name not in ("hint_proof", "ref_logprobs")
        return (self.training if is_in_training else self.run.root) / ARTEFACTS[name].file_name

    def command(self, name: str) -> str:
        artefact = ARTEFACTS[name]
        return _FULL_COMMANDS.get(artefact.command) or artefact.command_for(Path("RUN"))

    @cached_property
    def sites(self) -> list[tuple[ErrorSite, Hint | None]]:
        return list(self._read_or_note("sites", lambda: read_sites(self.run)))

    @cached_property
    def pairs(self) -> list[Row]:
        return list(self.rows("pairs"))

    @cached_property
    def pairs_at(self) -> Mapping[tuple[str, int], list[Row]]:
        """The preference pairs by conversation id and by the number of the assistant turn, counted from 0."""
        pairs_by_turn: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in self.pairs:
            pairs_by_turn[row["conversation_id"], row["turn_number"]].append(row)
        return pairs_by_turn

    @cached_property
    def settings(self) -> Row | None:
        """The settings of the training, or None if they do not exist or cannot be parsed."""
        try:
            return tomllib.loads((self.training / ARTEFACTS["config"].file_name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @cached_property
    def why_no_proof(self) -> str:
        """The reason why this training run did not check hints; empty if its settings enable the check.

        Even if there is a reason, the folder may contain hint checks from an earlier training run.
        """
        settings: Row = self.settings or {}
        train: Row = settings.get("train", {})
        if train.get("proof", {}).get("on") is False:
            return "the proof was switched off (train.proof.on = false)"
        if settings.get("loss", {}).get("alpha_sdpo") == 0:
            return "channel 2 was switched off (loss.alpha_sdpo = 0)"
        return ""

    @cached_property
    def proofs(self) -> Mapping[str, Row]:
        """The hint checks by site id.

        The result is empty if this training run checked no hints, or if an older version, which measured something
        else, wrote the checks.
        """
        if self.why_no_proof:
            return {}
        is_read = self.has("hint_proof") and self._version("hint_proof") == _SCHEMAS["hint_proof"][1]
        return {row["site_id"]: row for row in self.rows("hint_proof")} if is_read else {}

    @cached_property
    def gaps(self) -> Mapping[str, Row]:
        return {row["site_id"]: row for row in self.rows("token_gaps")}

    @cached_property
    def sides(self) -> Mapping[str, Row]:
        """The rows of the split, keyed by conversation id."""
        return {row["conversation_id"]: row for row in self.rows("split")}

    @cached_property
    def evaluated(self) -> Mapping[str, list[Row]]:
        """The scored decisions by site id. Decisions that belong to no site are listed under an empty id."""
        rows_by_site: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows("evaluated"):
            rows_by_site[row["site_id"] or ""].append(row)
        return rows_by_site

    @cached_property
    def sampled(self) -> Mapping[tuple[str, str], list[Row]]:
        """The sampled actions, keyed by conversation id and turn id."""
        rows_by_turn: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows("sampled"):
            rows_by_turn[row["conversation_id"], row.get("turn_id", "")].append(row)
        return rows_by_turn

    @cached_property
    def evaluation(self) -> Row | None:
        return next(self._read_or_note("evaluation", lambda: iter([read_evaluation(self.run)])), None)

    @cached_property
    def other_weights(self) -> list[str]:
        """The arms whose evaluated weights differ from the weights in this folder, so that the metrics do not apply
        to them.
        """
        models = (self.evaluation or {}).get("models") or {}
        other_arms: list[str] = []
        controls = ((name, control_folder(self.training, shuffle_number(name))) for name in controls_among(models))
        for arm, root in (("after", self.training), *controls):
            folders = (root / ARTEFACTS[name].file_name for name in ("adapter", "model"))
            # An arm without a digest was a hub model, which cannot be in this folder.
            digests = {digest for folder in folders if (digest := hash_weight_files(folder))}
            if models.get(arm) and digests and models[arm].get("files") not in digests:
                other_arms.append(control_name(1) if controls_among([arm]) else arm)
        return list(dict.fromkeys(other_arms))

    @cached_property
    def training_record(self) -> Row | None:
        """The record in `training.json`, or None."""
        paths = [self.path(name) / "training.json" for name in ("adapter", "model")]
        return next((self._read_json("adapter", path) for path in paths if path.exists()), None)

    def control_times(self) -> Iterator[tuple[Mapping[str, float], list[Row]]]:
        """Yield, for each shuffle of the control, the seconds of each part of its setup, and its metrics."""
        for folder in control_folders(self.training):
            record = folder / ARTEFACTS["adapter"].file_name / "training.json"
            control_record = (self._read_json("control", record) if record.exists() else None) or {}
            yield control_record.get("seconds") or {}, self._read_metrics(folder / ARTEFACTS["metrics"].file_name).rows

    @cached_property
    def metrics(self) -> _Metrics:
        return self._read_metrics(self.path("metrics"))

    @cached_property
    def control_metrics(self) -> _Metrics:
        """The metrics of the control's first shuffle."""
        return self._read_metrics(control_folder(self.training) / ARTEFACTS["metrics"].file_name)

    @cached_property
    def conventions(self) -> list[Convention]:
        try:
            return ConventionsFile(self.run).rules
        except ComposerError as error:
            self.unreadable["conventions"] = str(error)
            return []

    def rows(self, name: str) -> Iterator[Row]:
        """Yield the rows of an artifact, or nothing if the artifact does not exist or cannot be read."""
        schema, version = _SCHEMAS[name]
        return self._read_or_note(name, lambda: self.run.read_jsonl(name, schema=schema, version=version))

    def _read_or_note(self, name: str, read: Any) -> Iterator[Any]:
        """Yield the items that `read` yields. If the artifact is damaged, note it in `unreadable` and stop."""
        if not self.has(name):
            return
        try:
            yield from read()
        except RunError as error:
            self.unreadable[name] = str(error)

    def _version(self, name: str) -> int:
        return next(self._read_or_note(name, lambda: iter([self.run.meta(name).version])), 0)

    def _read_json(self, name: str, path: Path) -> Row | None:
        try:
            return decode_object(path.read_bytes())
        except ValueError as error:
            self.unreadable[name] = f"{path.name}: {error}"
            return None

    def _read_metrics(self, path: Path) -> _Metrics:
        if not path.exists():
            return _Metrics([], False)
        # A torn last line is normal for a training that was killed.
        contents = read_journal(path)
        return _Metrics(list(contents.rows), contents.torn is not None)


class MeanLogprobs(NamedTuple):
    """The mean log-probs per token of each arm."""

    before: float
    after: float
    control: float | None


def mean_logprobs(rows: Sequence[Row], role: str) -> MeanLogprobs | None:
    """Return the mean log-probs of a site's decisions in one role, or None if the site has no such decision."""
    decisions = [row for row in rows if row["role"] == role]
    if not decisions:
        return None
    control = [row["control"] for row in decisions if row["control"] is not None]
    before, after = (fmean(row[arm] for row in decisions) for arm in ("before", "after"))
    return MeanLogprobs(before, after, fmean(control) if control else None)


# ---- what the counts of a training mean

MEANINGS = {
    "cut_in_message": "windows that begin inside a message, because no message begins where they could",
    "short_context": "targets with fewer than train.batch.overlap tokens before them, because their window has no room",
    "no_wrong_hint": "sites without a wrong hint for train.switches.contrast: there is no other kind of error",
    "wrong_hint": "sites without their wrong hint, for the reason after the colon",
    "placement": "hints in another place than configured, because the template allows none there",
    "reference_saw_more_context": "pairs whose references were computed with more context than their window has",
    "whole_turn_without_call": "sites of turns without a call: train.batch.part = call trains on the whole turn",
    "longer_than_window": "with the hint or the answers beside it, it is longer than train.batch.budget",
    "hint_has_no_place": "the template allows no hint before that turn",
    "hint_makes_no_tokens": "the hint is empty for this tokenizer",
    "nothing_before_it": "no token precedes the turn, so none can predict its first",
    "without_hint": "`crf sites` wrote no hint for the site",
    "hint_does_nothing": "its hint lowers the erring decision no more than an unrelated hint does",
    "hint_lowers_good_calls_too": "its hint lowers good calls of the session as much as the erring one",
    "no_hint_of_another_kind": "there is no other kind of error to compare its hint with",
    "not_rendered": "the template refused the messages, or there were none",
    "turn_not_in_rendering": "the template does not show the turn",
    "pair_without_answer": "the chosen or the rejected answer has neither text nor a call",
    "pair_of_equal_answers": "chosen and rejected are the same tokens",
    "pair_contexts_differ": "the template shows different messages before the chosen and the rejected answer",
    "pair_of_no_such_turn": "the conversation has no such turn: `crf pairs` was run on another one",
    "failed_call": "a call of the turn failed",
    "refused_call": "the user or the permissions refused a call of the turn",
    "blocked_call": "a hook blocked a call of the turn",
    "interrupted": "the user stopped the agent",
    "call_failed_as_part_of_the_work": "tests, compilers or linters failed; train.channels.work_failures keeps it",
    "rejected_side_of_a_pair": "a pair trains the opposite",
    "image_before_it": "the turn answers an image, which the student does not see",
    "unseen_context_before_it": "the turn answers something that is not in the log",
    "text_follows_call": "the turn has text after its call, an order that templates cannot write",
    "thinking_comes_late": "the turn has thinking after its text or call, an order that templates cannot write",
    "without_answer": "the turn has neither text nor a call",
}


def _reason_in(name: str) -> str:
    """Extract the reason from the name of a count: "channel: reason" -> "reason", "note:details" -> "note"."""
    _, colon, reason = name.partition(": ")
    return reason if colon else name.partition(":")[0]


def explained(counts: Iterable[str], drops: Iterable[str]) -> list[str]:
    """Return one line of explanation for each count or drop reason in `MEANINGS`, with the labels used in the
    tables.
    """
    count_labels = {reason: reason.replace("_", " ") for reason in map(_reason_in, sorted(counts))}
    drop_labels = {reason: reason for reason in map(_reason_in, sorted(drops))}
    return [
        f"{label}: {MEANINGS[reason]}" for reason, label in (count_labels | drop_labels).items() if reason in MEANINGS
    ]


def of_good_turns(counts: Mapping[str, int], drops: Mapping[str, int]) -> list[str]:
    """Return a line on the good turns that were left out because they fit into no window, or an empty list."""
    if "good_turns" not in counts:
        return []
    num_left_out = sum(number for name, number in drops.items() if name.startswith("lm_ce: "))
    # The other dropped turns are not good turns.
    num_without_window = num_left_out - (counts["model_turns"] - counts["good_turns"])
    return (
        [f"{num_without_window:,} of the good turns are left out as well: no window holds them"]
        if num_without_window > 0
        else []
    )
