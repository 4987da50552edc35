"""The evaluation in trackio or Weights & Biases, beside the training that it judges: what `train.report_to` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from composer_replication.errors import MissingExtraError
from composer_replication.optional import available

# Where transformers' own callbacks put a training, unless the environment names another project.
_PROJECT = "huggingface"


def evaluation_metrics(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Figures as metrics: `evaluation/ARM/NAME` and its interval's ends; by kind with the kind behind the name."""
    metrics: dict[str, float] = {}
    for figure in evaluation["figures"]:
        name = "/".join(
            ["evaluation", figure["arm"], figure["name"], *([figure["kind"]] if figure.get("kind") else [])]
        )
        for key, suffix in (("estimate", ""), ("low", "/low"), ("high", "/high")):
            if figure[key] is not None:
                metrics[name + suffix] = float(figure[key])
    for metric in evaluation.get("damage", ()):
        for arm in ("before", "after", "control"):
            if metric.get(arm) is not None:
                metrics[f"evaluation/damage/{metric['name']}/{arm}"] = float(metric[arm])
    return metrics


def report_evaluation(report_to: str, evaluation: Mapping[str, Any], *, run_name: str) -> dict[str, float]:
    """Log the figures as one run of the tracker, and return them; "none" logs nothing."""
    metrics = evaluation_metrics(evaluation)
    if report_to == "none":
        return metrics
    if not available(report_to):
        raise MissingExtraError(f"{report_to} is not installed. Type: pip install {report_to}", name=report_to)
    tracker: Any = import_module(report_to)
    models = {f"{arm}_model": str(model["name"]) for arm, model in evaluation["models"].items() if model}
    settings = {"verdict": evaluation["verdict"]["word"], "primary": evaluation["primary"], **models}
    tracker.init(
        project=os.environ.get(f"{report_to.upper()}_PROJECT", _PROJECT), name=f"{run_name}-evaluation", config=settings
    )
    try:
        tracker.log(metrics)
    finally:
        tracker.finish()
    return metrics
