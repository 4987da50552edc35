"""An evaluation from the run to evaluation.json: what is asked, each model's answers, rows, figures, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from composer_replication.config import CrfConfig
from composer_replication.evaluation.arms import Arm, ArmName, arms_of, each_model, tokenizer_of
from composer_replication.evaluation.decisions import NEAR_DUPLICATE, SiteDecisions, site_decisions
from composer_replication.evaluation.figures import FigureArm, Value, figures_of, forced_values
from composer_replication.evaluation.forced import Kept, Scores, evaluated_rows, score_groups
from composer_replication.evaluation.held_out import HeldOut, read_held_out
from composer_replication.evaluation.verdict import verdict_of
from composer_replication.objective.fingerprint import weights_digest
from composer_replication.runs import RunDir
from composer_replication.runs.evaluation import ROWS_VERSION, write_evaluation
from composer_replication.runs.sidecar import now
from composer_replication.runs.split import PlacedConversation
from composer_replication.sessions.rendering import WindowSettings
from composer_replication.version import __version__

PARTIAL = "evaluation.partial.jsonl"
CONTROL = "hints of another kind, sides of pairs by coin"


@dataclass(kw_only=True)
class _Found:
    """What the models said so far."""

    digests: dict[ArmName, str] = field(default_factory=dict[ArmName, str])
    scores: Scores = field(default_factory=dict[ArmName, list[list[float]]])
    values: dict[str, list[Value]] = field(default_factory=dict[str, list[Value]])
    not_run: dict[str, str] = field(default_factory=dict[str, str])
    damage: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    drops: Counter[str] = field(default_factory=Counter[str])


def evaluate_run(
    config: CrfConfig,
    run: RunDir,
    sides: Sequence[PlacedConversation],
    *,
    before: str,
    after: str,
    control: str | None = None,
) -> dict[str, Any]:
    """Compare the models on the held-out sessions of a run, write the artefacts, and give evaluation.json's record."""
    from composer_replication.trainer.from_config.renderer import make_renderer, tools_of

    section = config.evaluation
    arms = arms_of(before, after, control)
    renderer = make_renderer(config.render, tokenizer_of(arms), tools_of(run))
    held = read_held_out(run, sides, renderer, window_settings(config), num_learnt_sites=section.token_gaps)
    found = _Found()
    if section.samples or section.gsm8k:
        found.not_run["sampled"] = "this version draws no actions"
    options = {"context": section.context, "num_good": section.good_calls, "drops": found.drops}
    sites = list(site_decisions(renderer, held, **options))
    kept = Kept(run.root / PARTIAL)
    try:
        if sites:
            _ask_models(config, arms, sites, kept, found)
    finally:
        kept.close()
    rows = evaluated_rows(sites, found.scores) if sites else []
    found.values |= forced_values(rows)
    record = _record(config, run, arms, held, found)
    _write_rows(run, "evaluated", rows, held, found.drops)
    write_evaluation(run, record)
    kept.remove()
    return record


def window_settings(config: CrfConfig) -> WindowSettings:
    """As a training cuts sessions; only which turns are good, and where hints would stand, is read of it."""
    batch = config.train.batch
    return WindowSettings(
        budget=batch.budget,
        responses="none",
        work_failures=config.train.channels.work_failures,
        use_pairs=False,
        placement=batch.placement,
        part=batch.part,
    )


def _ask_models(
    config: CrfConfig, arms: Sequence[Arm], sites: Sequence[SiteDecisions], kept: Kept, found: _Found
) -> None:
    """All that is asked of one model, then the next."""
    for arm, model in each_model(arms, config.evaluation.precision):
        digest = weights_digest(model, with_adapter=arm.adapter is not None)
        found.digests[arm.name] = digest
        weights = f"{digest}:{next(model.parameters()).dtype}"
        with torch.no_grad():
            groups = [site.responses for site in sites]
            found.scores[arm.name] = score_groups(
                model, weights, groups, kept, what=f"log-probs, {arm.name}", items="sites"
            )


def _record(config: CrfConfig, run: RunDir, arms: Sequence[Arm], held: HeldOut, found: _Found) -> dict[str, Any]:
    section, names = config.evaluation, [arm.name for arm in arms]
    shown: list[FigureArm] = ["after", *(["control", "difference"] if "control" in names else [])]
    figures = figures_of(found.values, primary=section.primary, seed=section.seed, arms=shown)
    verdict, power = verdict_of(
        section.primary,
        found.values.get(section.primary, ()),
        has_control="control" in names,
        fewest_sessions=section.fewest_sessions,
        seed=section.seed,
        nothing=_why_nothing(held),
    )
    return {
        "created": now(),
        "tool_version": __version__,
        "models": _models(arms, found.digests),
        "split": _split(str(run.meta("split").settings.get("by", "time")), held),
        "primary": section.primary,
        "settings": asdict(section),
        "verdict": verdict,
        "power": power,
        "figures": figures,
        "sampled": None,
        "not_run": found.not_run,
        "damage": found.damage,
        "drops": dict(sorted((held.drops + found.drops).items())),
    }


def _why_nothing(held: HeldOut) -> str:
    if not held.num_sessions["test"]:
        return "no session is held out"
    if not held.num_sites["test"]:
        return f"no error was found in the {held.num_sessions['test']} held-out sessions"
    return ""


def _models(arms: Sequence[Arm], digests: Mapping[ArmName, str]) -> dict[str, Any]:
    said: dict[str, Any] = {arm.name: {"name": arm.given, "digest": digests.get(arm.name)} for arm in arms}
    if "control" in said:
        said["control"]["what"] = CONTROL
    return {"control": None, **said}


def _split(by: str, held: HeldOut) -> dict[str, Any]:
    return {
        "by": by,
        "sessions": held.num_sessions,
        "sites": held.num_sites,
        "near_duplicates": len(held.duplicates),
    }


def _write_rows(
    run: RunDir, name: str, rows: Sequence[Mapping[str, Any]], held: HeldOut, drops: Mapping[str, int]
) -> None:
    run.write_jsonl(
        name,
        rows,
        schema=name,
        version=ROWS_VERSION,
        sources=["conversations", "split", "sites"],
        counts={"rows": len(rows), NEAR_DUPLICATE: len(held.duplicates)},
        drops=drops,
    )
