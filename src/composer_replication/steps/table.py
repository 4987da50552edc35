"""The pipeline as a table: every step of a run in order, with the artefacts that it reads and writes.

What is optional to read is read where it is there: without sites a replay finds failures by itself, and without pairs a
training has no channel 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step; its name is its command, its section of the config (`train` reads more), and its file."""

    name: str
    function_name: str
    reads: tuple[str, ...] = ()
    reads_if_there: tuple[str, ...] = ()
    writes: tuple[str, ...]

    @property
    def function(self) -> Callable[..., Any]:
        """`function(section, run, **what is said for once)`; loaded when it is asked for."""
        return getattr(import_module(f"composer_replication.steps.{self.name}"), self.function_name)


STEPS = (
    Step(name="ingest", function_name="ingest", writes=("conversations", "session_sources", "tools")),
    Step(name="sites", function_name="write_sites", reads=("conversations", "tools"), writes=("sites",)),
    Step(
        name="replay",
        function_name="replay",
        reads=("conversations", "tools"),
        reads_if_there=("sites",),
        writes=("teacher_calls", "teacher_cache", "asked_tools"),
    ),
    Step(
        name="pairs",
        function_name="write_pairs",
        reads=("conversations", "tools", "teacher_calls"),
        reads_if_there=("sites", "asked_tools"),
        writes=("pairs",),
    ),
    Step(
        name="train",
        function_name="train",
        reads=("conversations", "tools"),
        reads_if_there=("sites", "pairs"),
        writes=("config", "hint_proof", "ref_logprobs", "metrics", "checkpoints", "adapter", "model"),
    ),
)
