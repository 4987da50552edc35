"""Read what a run holds, each artifact once and without torch; list what it lacks, with the command that writes it."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from composer_replication.action_text import parse_action_text
from composer_replication.canonical_json import decode_object, encode_as_written
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
from composer_replication.types import ErrorSite, Hint, ToolCall

Row = Mapping[str, Any]
# Artifacts that a finished run has; the report names the command for each that is missing.
_NEEDED = ("conversations", "split", "sites", "pairs", "hint_proof", "metrics", "evaluation", "evaluated", "token_gaps")
# Commands with the options that they do not work without.
_WHOLE_COMMANDS = {
    "crf train": "crf train --set train.run=RUN --set train.model=MODEL",
    "crf evaluate": "crf evaluate RUN --before MODEL --after ADAPTER",
}
# Schema and version of the rows that the report can read; other versions count as unreadable.
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
    """An artifact that the run does not have, or that cannot be read; `reason` says why it cannot."""

    name: str
    file_name: str
    command: str
    reason: str = ""


class Metrics(NamedTuple):
    """The lines of a training's journal; `is_torn` if a crash cut off the last one."""

    rows: list[Row]
    is_torn: bool


def by_command(absent: Iterable[Absent]) -> dict[str, list[str]]:
    """Return the missing files by the command that writes them; unreadable ones are left out."""
    names_by_command: dict[str, list[str]] = defaultdict(list)
    for artefact in absent:
        if not artefact.reason:
            names_by_command[artefact.command].append(artefact.file_name)
    return dict(names_by_command)


@dataclass
class RunRecords:
    """The artifacts of a run, each read on first use. `training` is the folder that the training wrote to."""

    run: RunDir
    training: Path
    unreadable: dict[str, str] = field(default_factory=dict[str, str])

    def absent(self) -> list[Absent]:
        """Return what a finished run has and this one lacks, and what could not be read, in the
        order of the pipeline.
        """
        return [
            Absent(name, ARTEFACTS[name].file_name, self.command(name), self.unreadable.get(name, ""))
            for name in ARTEFACTS
            if name in self.unreadable or (name in _NEEDED and not self.has(name) and not self._was_done_without(name))
        ]

    def _was_done_without(self, name: str) -> bool:
        """Return whether the step that writes or reads an artifact has ended without needing it."""
        if name in ("pairs", "hint_proof"):
            return self.training_record is not None
        return name in ("evaluated", "token_gaps") and self.evaluation is not None

    def on_request(self) -> dict[str, str]:
        """Return the optional files that the run does not have, each with what its absence means."""
        missing = {artefact.name for artefact in self.absent()}
        return {
            ARTEFACTS[name].file_name: why
            for name, why in _ON_REQUEST.items()
            if not self.has(name) and name not in missing
        }

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def path(self, name: str) -> Path:
        """Return the path of an artifact; a training may have written to another folder than the run's."""
        # The hint check and the reference log-probs belong to the run: every training on it shares them.
        is_in_training = ARTEFACTS[name].command == "crf train" and name not in ("hint_proof", "ref_logprobs")
        return (self.training if is_in_training else self.run.root) / ARTEFACTS[name].file_name

    def command(self, name: str) -> str:
        artefact = ARTEFACTS[name]
        return _WHOLE_COMMANDS.get(artefact.command) or artefact.command_for(Path("RUN"))

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
        """The settings that the training wrote before it began; None if there are none or they cannot be parsed."""
        try:
            return tomllib.loads((self.training / ARTEFACTS["config"].file_name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @cached_property
    def why_no_proof(self) -> str:
        """Why this training checks no hints; empty if its settings ask for the check.

        An earlier training's `hint_proof` may be in the folder nevertheless.
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
        """Hint checks by site; none from an older version, which measured something else, or if this training made
        none.
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
        """Rows of the split by conversation."""
        return {row["conversation_id"]: row for row in self.rows("split")}

    @cached_property
    def evaluated(self) -> Mapping[str, list[Row]]:
        """Scored decisions by site; those without a site have an empty id."""
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
        """Arms whose evaluated weights are not those in this folder: their metrics say nothing about these."""
        models = (self.evaluation or {}).get("models") or {}
        other_arms: list[str] = []
        controls = ((name, control_folder(self.training, shuffle_number(name))) for name in controls_among(models))
        for arm, root in (("after", self.training), *controls):
            folders = (root / ARTEFACTS[name].file_name for name in ("adapter", "model"))
            # An arm without a digest was a hub model; nothing in this folder could be the same.
            here = {digest for folder in folders if (digest := hash_weight_files(folder))}
            if models.get(arm) and here and models[arm].get("files") not in here:
                other_arms.append(control_name(1) if controls_among([arm]) else arm)
        return list(dict.fromkeys(other_arms))

    @cached_property
    def training_record(self) -> Row | None:
        """`training.json` beside the weights."""
        paths = [self.path(name) / "training.json" for name in ("adapter", "model")]
        return next((self._json("adapter", path) for path in paths if path.exists()), None)

    def control_times(self) -> Iterator[tuple[Mapping[str, float], list[Row]]]:
        """Yield for each shuffle of the control the seconds before its first step, and its metrics."""
        for folder in control_folders(self.training):
            record = folder / ARTEFACTS["adapter"].file_name / "training.json"
            control_record = (self._json("control", record) if record.exists() else None) or {}
            yield control_record.get("seconds") or {}, self._journal(folder / ARTEFACTS["metrics"].file_name).rows

    @cached_property
    def metrics(self) -> Metrics:
        return self._journal(self.path("metrics"))

    @cached_property
    def control_metrics(self) -> Metrics:
        """The metrics of the first shuffle."""
        return self._journal(control_folder(self.training) / ARTEFACTS["metrics"].file_name)

    @cached_property
    def conventions(self) -> list[Convention]:
        try:
            return ConventionsFile(self.run).rules
        except ComposerError as error:
            self.unreadable["conventions"] = str(error)
            return []

    def rows(self, name: str) -> Iterator[Row]:
        """Yield the rows of an artifact; none if it does not exist or is damaged."""
        schema, version = _SCHEMAS[name]
        return self._tried(name, lambda: self.run.read_jsonl(name, schema=schema, version=version))

    def _tried(self, name: str, read: Any) -> Iterator[Any]:
        """Yield what a reader yields; note a damaged artifact and leave it out of the page."""
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
        # A torn last line is normal for a training that was killed.
        contents = read_journal(path)
        return Metrics(list(contents.rows), contents.torn is not None)


# ---- decisions of held-out sessions


class Changes(NamedTuple):
    """Changes of log-prob per token, one value per decision, by the decision's role."""

    after: Mapping[str, list[float]]
    control: Mapping[str, list[float]]


def changes(evaluated: Iterable[Sequence[Row]]) -> Changes:
    """Return what training did to the decisions of the held-out sessions."""
    after: dict[str, list[float]] = defaultdict(list)
    control: dict[str, list[float]] = defaultdict(list)
    for rows in evaluated:
        for row in rows:
            after[row["role"]].append(row["after"] - row["before"])
            if row["control"] is not None:
                control[row["role"]].append(row["control"] - row["before"])
    return Changes(after, control)


class Means(NamedTuple):
    """Mean log-probs per token of a site's decisions in one role."""

    before: float
    after: float
    control: float | None


def decision_of(rows: Sequence[Row], role: str) -> Means | None:
    """Return the means of a site's decisions in this role, or None without any."""
    chosen = [row for row in rows if row["role"] == role]
    if not chosen:
        return None
    control = [row["control"] for row in chosen if row["control"] is not None]
    before, after = (fmean(row[arm] for row in chosen) for arm in ("before", "after"))
    return Means(before, after, fmean(control) if control else None)


# ---- text of turns and pairs

MAX_NEAR_SITE = 4000
"""Maximum characters of a text at an error, or in a pair."""


class Cut(NamedTuple):
    """A text, with the number of characters that were cut off."""

    text: str
    num_left_out: int


class PairView(NamedTuple):
    source: str
    chosen_by: str
    how: str
    chosen: Cut
    rejected: Cut


def cut(text: str, most: int) -> Cut:
    # Newlines only: leading spaces may be indentation.
    text = text.strip("\n")
    return Cut(text[:most], max(len(text) - most, 0))


def pair_view(row: Row) -> PairView:
    metadata = row.get("metadata") or {}
    return PairView(
        source=str(row.get("source") or "teachers"),
        chosen_by=str(row.get("chosen_by") or ""),
        how=str(metadata.get("how") or "").replace("_", " "),
        chosen=cut(_readable(str(row["chosen"])), MAX_NEAR_SITE),
        rejected=cut(_readable(str(row["rejected"])), MAX_NEAR_SITE),
    )


def _readable(text: str) -> str:
    """Return an action as a turn shows it: its text, then each call's name with one argument per line."""
    action = parse_action_text(text).action
    calls = [f"{call.name}\n{arguments_of(call)}" for call in action.calls]
    return "\n\n".join(filter(None, [action.text, *calls])) if calls else text


def arguments_of(call: ToolCall) -> str:
    """Return the arguments of a call, one per line: strings as they are, other values as JSON."""
    # The arguments were no JSON object, so they are shown as the model wrote them.
    if call.raw_arguments is not None:
        return call.raw_arguments
    return "\n".join(f"{name}: {_value(value)}" for name, value in call.arguments.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else encode_as_written(value, where="argument").decode()


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


def _reason_of(name: str) -> str:
    """Return the part of a count's name that says why: "channel: reason" -> "reason", "note:details" -> "note"."""
    _, colon, reason = name.partition(": ")
    return reason if colon else name.partition(":")[0]


def explained(counts: Iterable[str], drops: Iterable[str]) -> list[str]:
    """Return one line for each count and drop whose name needs an explanation, labeled as in the tables."""
    noted = {reason: reason.replace("_", " ") for reason in map(_reason_of, sorted(counts))}
    left_out = {reason: reason for reason in map(_reason_of, sorted(drops))}
    return [f"{label}: {MEANINGS[reason]}" for reason, label in (noted | left_out).items() if reason in MEANINGS]


def of_good_turns(counts: Mapping[str, int], drops: Mapping[str, int]) -> list[str]:
    """Return a line if good turns and dropped turns do not add up: a good turn may fit into no window."""
    if "good_turns" not in counts:
        return []
    num_left_out = sum(number for name, number in drops.items() if name.startswith("lm_ce: "))
    # Dropped turns that are not explained by being no good turns.
    both = num_left_out - (counts["model_turns"] - counts["good_turns"])
    return [f"{both:,} of the good turns are left out as well: no window holds them"] if both > 0 else []
