"""composer_replication: an open, verified replication of Composer 2.5's post-training for agentic coding models.

Importing the package loads neither torch nor any extra. Public names are resolved when they are first used; the table
holds only names that exist. In the order of the pipeline:

types           the records that go from step to step
errors          every error, and how its message is built
optional        what is installed, and what to install
atomic          files that appear whole or not at all
canonical_json  one JSON text for one value
version         the package's version
runs            the run directory: artefacts, sidecars, lineage, the split
config          every option, once
privacy         secrets out
ingestion       logs to conversations
actions         what a turn did, and what the session had shown by then
sites           which turn erred, whose doing it was
judge           would a call fail, said before it runs
hint_generator  what to say about it
teacher_replay  what others would have done
pairs           preference pairs
batch           conversations to tensors
loss            rows to scalars
objective       model and batch to losses
sessions        a run's conversations as batches
rollouts        rollouts to sites and channel 2
envs            a world to act in
trainer         losses to a better model
evaluation      before against after, on held-out sessions
report          a run as a page to look at
use             export, chat, doctor: what is done with the result
recipes         the same kernels in other engines
diloco          replicas in different places train one model
steps           the pipeline: one file a verb, and their table
ablation        arms x seeds: what helps, with controls
cli             the command `crf`
__main__        `python -m composer_replication`
opsd            known import path of the self-distillation losses
distillation    known import path of the distillation losses
replaysim       known import path of teacher replay and the pair filters
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from composer_replication.optional import available as _available
from composer_replication.version import __version__

if TYPE_CHECKING:
    from composer_replication.batch import build_batch
    from composer_replication.diloco import make_diloco_outer_loop
    from composer_replication.ingestion import SYSTEM_PROMPT, ClaudeCodeIngester, IngestionStats
    from composer_replication.loss.jsd import generalized_jsd_loss
    from composer_replication.pairs.extract import extract_dpo_pairs
    from composer_replication.teacher_replay.replay import replay_trace
    from composer_replication.teacher_replay.teachers import DEFAULT_TEACHERS
    from composer_replication.trainer.composer_trainer import ComposerReplicationTrainer
    from composer_replication.trainer.objective.compose import LossComponents, compose_loss
    from composer_replication.types import (
        DPOPair,
        TeacherCallResult,
        TeacherSpec,
        TraceState,
    )

_PUBLIC = {
    "ClaudeCodeIngester": "composer_replication.ingestion",
    "ComposerReplicationTrainer": "composer_replication.trainer.composer_trainer",
    "DEFAULT_TEACHERS": "composer_replication.teacher_replay.teachers",
    "DPOPair": "composer_replication.types",
    "IngestionStats": "composer_replication.ingestion",
    "LossComponents": "composer_replication.trainer.objective.compose",
    "SYSTEM_PROMPT": "composer_replication.ingestion",
    "TeacherCallResult": "composer_replication.types",
    "TeacherSpec": "composer_replication.types",
    "TraceState": "composer_replication.types",
    "build_batch": "composer_replication.batch",
    "compose_loss": "composer_replication.trainer.objective.compose",
    "extract_dpo_pairs": "composer_replication.pairs.extract",
    "generalized_jsd_loss": "composer_replication.loss.jsd",
    "make_diloco_outer_loop": "composer_replication.diloco",
    "replay_trace": "composer_replication.teacher_replay.replay",
}

# Reachable as attributes without an import of their own, as they were when everything was imported eagerly.
_SUBPACKAGES = frozenset(
    {
        "batch",
        "config",
        "diloco",
        "distillation",
        "hint_generator",
        "ingestion",
        "loss",
        "opsd",
        "privacy",
        "recipes",
        "replaysim",
        "runs",
        "teacher_replay",
        "trainer",
    }
)

__all__ = [
    "DEFAULT_TEACHERS",
    "SYSTEM_PROMPT",
    "ClaudeCodeIngester",
    "ComposerReplicationTrainer",
    "DPOPair",
    "IngestionStats",
    "LossComponents",
    "TeacherCallResult",
    "TeacherSpec",
    "TraceState",
    "__version__",
    "build_batch",
    "compose_loss",
    "extract_dpo_pairs",
    "generalized_jsd_loss",
    "make_diloco_outer_loop",
    "replay_trace",
]

_DILOCO_AVAILABLE: bool = _available("torchft")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "make_diloco_outer_loop" and not _DILOCO_AVAILABLE:
        return None
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
