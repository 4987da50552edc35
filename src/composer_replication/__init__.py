"""composer_replication: an open, verified replication of Composer 2.5's post-training for agentic coding models.

Importing the package loads neither torch nor any extra: public names are imported when they are first used. The
modules, in the order of the pipeline:

types           the records that several stages use
errors          every exception, and how its message is built
optional        imports of optional dependencies, and of objects that settings name
atomic          files that are written whole or not at all
canonical_json  strict JSON
tensor_file     safetensors files, and trees of tensors and plain values
messages        read chat messages in every format
action_text     convert between an assistant turn and its text
version         the package's version
runs            the run directory: its files, their checksums and sources
config          every option, declared once
privacy         redact secrets and people
ingestion       read agents' session logs as conversations
sites           find the failed calls, their kind, and who is to blame
hint_generator  write hints about the model's errors
teacher_replay  ask other models what they would have done
pairs           make preference pairs
batch           turn conversations into token ids and batches
loss            losses as pure functions, one algorithm per file
trainer         train a model on the objective, on logged sessions and rollouts
envs            environments in which an agent acts
evaluation      compare the models before and after on held-out sessions; the report
recipes         the same losses in other training engines
diloco          train one model by replicas in different places
cli             the command `crf`
__main__        `python -m composer_replication`

Three more are the import paths that users know: `opsd` (self-distillation losses), `distillation` (distillation losses)
and `replaysim` (teacher replay and pair filters).
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
    from composer_replication.types import DPOPair, TeacherCallResult, TeacherSpec, TraceState

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

# Available as attributes after `import composer_replication` alone, as when the package imported everything eagerly.
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
    """Import and return a public name or a subpackage on first use."""
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Without torchft the name is None and not an error, as `import *` and old callers expect.
    if name == "make_diloco_outer_loop" and not _DILOCO_AVAILABLE:
        return None
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
