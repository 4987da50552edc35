"""The pipeline as a table: every step of a run in order, with the artefacts that it reads and writes.

What it reads "if there" it can do without: a replay then finds failures itself, pairs are the sessions' own, a training
has no channel 3, and without a split nothing is kept from it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step; its name is its command, its section of the config, and its file; a report has no options."""

    name: str
    function_name: str
    reads: tuple[str, ...]
    reads_if_there: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def function(self) -> Callable[..., Any]:
        """`function(section, run, **what is said for once)`; loaded when it is asked for."""
        return getattr(import_module(f"composer_replication.steps.{self.name}"), self.function_name)


def step_named(name: str) -> Step:
    """The step of this name."""
    return next(step for step in STEPS if step.name == name)


_INGESTED = ("conversations", "tools")
_TRAINED = ("config", "hint_proof", "ref_logprobs", "metrics", "checkpoints", "adapter", "model", "control")
_EVALUATED = ("evaluation", "evaluated", "sampled", "token_gaps")
_SHOWN = ("split", "sites", "conventions", "teacher_calls", "pairs", "hint_proof", "metrics", "adapter", "model")
_PAGES = ("report_html", "report_md", "report_sessions")
STEPS = (
    Step("ingest", "ingest", (), (), (*_INGESTED, "session_sources")),
    Step("split", "write_split", ("conversations",), (), ("split",)),
    Step("sites", "write_sites", _INGESTED, ("split", "conventions"), ("sites", "conventions")),
    Step("replay", "replay", _INGESTED, ("split", "sites"), ("teacher_calls", "teacher_cache", "asked_tools")),
    Step("pairs", "write_pairs", _INGESTED, ("split", "sites", "teacher_calls", "asked_tools"), ("pairs",)),
    Step("train", "train", _INGESTED, ("split", "sites", "pairs"), _TRAINED),
    Step("evaluate", "evaluate", (*_INGESTED, "split"), ("sites", "pairs", "adapter", "model", "control"), _EVALUATED),
    Step("report", "write_report", ("conversations",), (*_SHOWN, *_EVALUATED), _PAGES),
)
