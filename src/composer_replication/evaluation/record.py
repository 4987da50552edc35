"""What evaluation.json says: the models, the split, every figure, the verdict, and what was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.config import CrfConfig
from composer_replication.evaluation.arms import Arm, control_lacks
from composer_replication.evaluation.damage import GOOD_TURNS, UNITS, damage_row, loss_values
from composer_replication.evaluation.figures import FigureArm, Over, Value, figures_of, forced_values
from composer_replication.evaluation.forced import evaluated_rows
from composer_replication.evaluation.held_out import HeldOut
from composer_replication.evaluation.judged import sampled_rows, sampled_summary, sampled_values
from composer_replication.evaluation.questions import Answers, Questions
from composer_replication.evaluation.token_gaps import gap_rows
from composer_replication.evaluation.verdict import verdict_of
from composer_replication.judge.walk import earlier_sessions
from composer_replication.runs import RunDir
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.evaluation import controls_among, weight_files_digest
from composer_replication.runs.lineage import read_training
from composer_replication.runs.sidecar import now
from composer_replication.runs.split import PlacedConversation
from composer_replication.runs.tools import read_tools, table_of
from composer_replication.version import __version__

CONTROL = "hints of another kind, sides of pairs by coin"
_OTHER_TOKENS = "the models have different tokenizers, and log-probs of other tokens do not compare"
_OTHER_TOKENS_THAN_PRIMARY = f"{_OTHER_TOKENS}; name evaluation.primary = sampled_failures"
_BROKEN = "not numbers"


@dataclass(kw_only=True)
class Results:
    """Rows by the artefact they go to, values by the figure they make, and what else the record says."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict[str, list[dict[str, Any]]])
    values: dict[str, list[Value]] = field(default_factory=dict[str, list[Value]])
    sampled: dict[str, Any] | None = None
    damage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def over_of(run: RunDir) -> Over:
    return "project" if run.meta("split").settings.get("by") == "project" else "session"


def units_of(run: RunDir, sides: Sequence[PlacedConversation]) -> dict[str, str]:
    """Return what each session is counted as in an interval: itself, or its project where projects are held out."""
    is_by_project = over_of(run) == "project"
    return {row.session: row.project if is_by_project else row.session for row in sides}


def results_of(
    config: CrfConfig,
    run: RunDir,
    held: HeldOut,
    asked: Questions,
    answers: Answers,
    sides: Sequence[PlacedConversation],
) -> Results:
    """Rows and values; the artefact of a part that was not asked for is written empty, so that none is an old one."""
    results = Results()
    rows = evaluated_rows(asked.sites, answers.scores) if answers.scores else []
    tools = read_tools(run, with_test=True) if run.path("tools").exists() else table_of(())
    drawn: list[dict[str, Any]] = []
    if answers.draws:
        drawn = sampled_rows(held, tools, asked.states, answers.draws, earlier_sessions(read_conversations(run)))
    gaps = gap_rows(asked.gaps, answers.gaps) if answers.gaps else []
    results.rows = {"evaluated": rows, "sampled": drawn, "token_gaps": gaps}
    results.values = forced_values(rows)
    if drawn:
        results.values |= sampled_values(drawn, asked.states)
        results.sampled = sampled_summary(drawn, asked.states, answers.draws, config.evaluation)
        results.sampled["engine"] = answers.engine
    if GOOD_TURNS in answers.losses:
        results.values[GOOD_TURNS] = loss_values(asked.turns, answers.losses[GOOD_TURNS])
    results.damage = [damage_row(name, UNITS[name], by_arm) for name, by_arm in answers.losses.items()]
    units = units_of(run, sides)
    for name, values in results.values.items():
        results.values[name] = [value._replace(session=units[value.session]) for value in values]
    return results


def record_of(
    config: CrfConfig,
    run: RunDir,
    arms: Sequence[Arm],
    held: HeldOut,
    answers: Answers,
    results: Results,
    *,
    have_same_tokens: bool,
) -> dict[str, Any]:
    """What evaluation.json holds, but for when its primary figure was named and what could not be asked."""
    section = config.evaluation
    controls = controls_among(arm.name for arm in arms if arm.name not in answers.broken)
    figure_arms: list[FigureArm] = ["after", *(["control", "difference"] if controls else [])]
    nothing = _why_nothing(held, answers) if have_same_tokens else _OTHER_TOKENS_THAN_PRIMARY
    return {
        "created": now(),
        "tool_version": __version__,
        "models": _models(arms, answers.digests),
        "split": _split(run, held),
        "primary": section.primary,
        "settings": asdict(section),
        **_verdict(config, run, arms, answers, results, nothing=nothing, has_controls=bool(controls)),
        "figures": figures_of(
            results.values, primary=section.primary, seed=section.seed, arms=figure_arms, over=over_of(run)
        ),
        "sampled": results.sampled,
        "not_run": _not_run(config, results, answers, has_control=len(arms) > 2, have_same_tokens=have_same_tokens),
        "damage": results.damage,
    }


def _split(run: RunDir, held: HeldOut) -> dict[str, Any]:
    drawn = run.meta("split")
    return {
        "by": str(drawn.settings.get("by", "time")),
        "over": over_of(run),
        "sessions": held.num_sessions,
        "sites": held.num_sites,
        "near_duplicates": len(held.duplicates),
        "states": drawn.counts.get("states: test"),
    }


def _verdict(
    config: CrfConfig,
    run: RunDir,
    arms: Sequence[Arm],
    answers: Answers,
    results: Results,
    *,
    nothing: str,
    has_controls: bool,
) -> dict[str, Any]:
    """The verdict with its remarks, and the smallest effect that could be seen; `nothing` is why there is neither."""
    section, lacks = config.evaluation, control_lacks(arms)
    verdict, power = verdict_of(
        section.primary,
        results.values,
        over=over_of(run),
        broken=answers.broken,
        has_control=has_controls and not lacks,
        fewest_sessions=section.fewest_sessions,
        seed=section.seed,
        nothing=nothing,
    )
    remarks = [*_of_training(arms), *verdict["remarks"], *lacks, *_unlearnt(answers)]
    return {"verdict": {**verdict, "remarks": remarks}, "power": power}


def _of_training(arms: Sequence[Arm]) -> list[str]:
    """That the training saw only a part of what it was to learn from, where its record says so."""
    record = next((read_training(Path(arm.given)) for arm in arms if arm.name == "after"), {})
    steps, counts = record.get("steps"), record.get("counts") or {}
    seen_windows, windows = (counts.get(name, 0) for name in ("windows_seen", "windows"))
    if not steps or not seen_windows or seen_windows >= windows:
        return []
    whole = math.ceil(windows * steps / seen_windows)
    return [
        f"The {steps:,} steps saw {seen_windows:,} of {windows:,} windows, less than one pass over the data: "
        f"train.optimiser.steps = {whole:,} would be one."
    ]


def _unlearnt(answers: Answers) -> list[str]:
    """A sentence for each reason why models cannot write what the template asks for, whatever they were taught."""
    by_words: dict[str, list[str]] = {}
    for arm, words in answers.unlearnt.items():
        by_words.setdefault(words, []).append(arm)
    return [f"Of the model {' and '.join(arms)}: {words}." for words, arms in by_words.items()]


def say_when_named(record: dict[str, Any], primary_then: str | None) -> None:
    """A figure that was chosen when the results could be known is no proof, and the record says so."""
    is_before = primary_then == record["primary"]
    record["named"] = "before training" if is_before else "after training"
    if not is_before:
        why = f"its settings name {primary_then}" if primary_then else "its settings are not beside the weights"
        record["verdict"]["remarks"].append(f"Nothing shows that this figure was named before training: {why}.")


def _why_nothing(held: HeldOut, answers: Answers) -> str:
    if "before" in answers.broken:
        return f"the log-probs of the model before are {_BROKEN}"
    if not held.num_sessions["test"]:
        return "no session is held out"
    if not held.num_sites["test"]:
        return f"no error was found in the {held.num_sessions['test']} held-out sessions"
    return ""


def _not_run(
    config: CrfConfig, results: Results, answers: Answers, *, has_control: bool, have_same_tokens: bool
) -> dict[str, str]:
    """Parts without a result, and why."""
    section, rows = config.evaluation, results.rows["evaluated"]
    reasons = {
        "control": (has_control, "no model trained on shuffled hints and pairs is named"),
        "forced": (bool(rows), "no held-out error with a good call beside it"),
        "corrections": (
            any(row["role"] == "correction" for row in rows),
            "no held-out session puts its error right by a call of its own",
        ),
        "sampled": (
            results.sampled is not None,
            "no held-out state" if section.samples else "evaluation.samples is 0",
        ),
        "token_gaps": (bool(results.rows["token_gaps"]), "no site with a hint" if section.token_gaps else "set to 0"),
        "good_turns": (
            GOOD_TURNS in answers.losses,
            "no good turn in held-out sessions" if section.good_turns else "evaluation.good_turns is 0",
        ),
        "gsm8k": (section.gsm8k is not None, "evaluation.gsm8k names no file"),
        "code": (section.code is not None, "evaluation.code names no file"),
    }
    missing_parts = {part: reason for part, (is_there, reason) in reasons.items() if not is_there}
    if not have_same_tokens:
        missing_parts |= dict.fromkeys(("forced", "corrections", "token_gaps", "good_turns", "code"), _OTHER_TOKENS)
    for name in answers.broken:
        parts = (name,) if controls_among([name]) else ("forced", "corrections", "sampled", "token_gaps", "good_turns")
        missing_parts |= dict.fromkeys(parts, f"the log-probs of the model {name!r} are {_BROKEN}")
    return missing_parts


def _models(arms: Sequence[Arm], digests: Mapping[str, str]) -> dict[str, Any]:
    models: dict[str, Any] = {
        arm.name: {
            "name": arm.given,
            "digest": digests.get(arm.name),
            "files": weight_files_digest(Path(arm.given)) if arm.given else None,
        }
        for arm in arms
    }
    if "control" in models:
        models["control"] |= {"what": CONTROL, "lacks": control_lacks(arms)}
    return {"control": None, **models}
