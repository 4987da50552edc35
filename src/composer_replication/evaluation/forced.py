"""Log-probs of logged decisions under each set of weights, kept as they come.

A score is known by the weights and the token ids it belongs to: what an interrupted evaluation has scored is taken over
by the next, whatever else has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from composer_replication.errors import ArtefactCorruptError, NonFiniteError, explain
from composer_replication.evaluation.decisions import SiteDecisions, digest_of
from composer_replication.objective.reference import Response, response_logprobs
from composer_replication.runs.evaluation import controls_among
from composer_replication.runs.journal import Journal, read_journal
from composer_replication.sessions.phases import Phase, tell_phase

Scores = dict[str, list[list[float]]]
"""By arm, for each group of responses the sum of log-probs of each response."""


class Kept:
    """What was computed so far, in a journal beside the run's artefacts; `close` keeps it, `remove` ends it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Any] = {}
        try:
            self._known = {str(row["key"]): row["value"] for row in read_journal(path).rows if "key" in row}
        except FileNotFoundError:
            pass
        except ArtefactCorruptError:  # nothing that could be gone on from
            path.unlink()
        self._journal = Journal(path)

    def get(self, key: str) -> Any | None:
        return self._known.get(key)

    def put(self, key: str, value: Any) -> Any:
        self._journal.append({"key": key, "value": value})
        self._known[key] = value
        return value

    def close(self) -> None:
        self._journal.close()

    def remove(self) -> None:
        """Once everything is in the artefacts."""
        self.close()
        self.path.unlink(missing_ok=True)


def score_groups(
    model: nn.Module, weights: str, groups: Sequence[Sequence[Response]], kept: Kept, *, what: str, items: str
) -> list[list[float]]:
    """Summed log-probs of each group's responses, one pass a group; `weights` is what tells this model from others."""
    scores: list[list[float]] = []
    for number, group in enumerate(groups):
        tell_phase(Phase(name=what, done=number, total=len(groups), items=items, kept_in=kept.path))
        key = f"{weights}:{digest_of(group)}"
        sums = kept.get(key)
        scores.append(sums if sums is not None else kept.put(key, numbers(response_logprobs(model, group).tolist())))
    tell_phase(Phase(name=what, done=len(groups), total=len(groups), items=items, kept_in=kept.path))
    return scores


def numbers(values: list[float]) -> list[float]:
    """The same values; a journal of others could be read by nobody, and a mean of them says nothing."""
    if not all(map(math.isfinite, values)):
        got = "some that are not"
        raise NonFiniteError(explain("log-probs", got=got, expected="numbers"))
    return values


def evaluated_rows(sites: Iterable[SiteDecisions], scores: Scores) -> list[dict[str, Any]]:
    """One row a decision: mean log-prob a token under each set of weights."""
    rows: list[dict[str, Any]] = []
    for number, site in enumerate(sites):
        means = {arm: _means(site, every[number]) for arm, every in scores.items()}
        for at, decision in enumerate(site.decided):
            rows.append(
                {
                    "id": decision.id,
                    "conversation_id": decision.conversation_id,
                    "session": site.session,
                    "turn": decision.turn,
                    "turn_id": decision.turn_id,
                    "site_id": site.site_id,
                    "kind": site.kind,
                    "role": decision.role,
                    "basis": decision.basis,
                    "num_tokens": decision.num_tokens,
                    **_of_arms(means, at),
                }
            )
    return rows


def _of_arms(means: Mapping[str, list[float]], at: int) -> dict[str, float | list[float] | None]:
    """A control of several shuffles has a value for each, and their mean."""
    controls = [means[name][at] for name in controls_among(means)]
    return {
        "before": means["before"][at],
        "after": means["after"][at],
        "control": fmean(controls) if controls else None,
        "controls": controls or None,
    }


def _means(site: SiteDecisions, sums: Sequence[float]) -> list[float]:
    remaining_sums = iter(sums)
    return [sum(next(remaining_sums) for _ in decision.responses) / decision.num_tokens for decision in site.decided]
