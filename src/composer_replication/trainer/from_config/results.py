"""What a training did: each channel, the diagnosis, the alarms, and a record of where the weights are from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.atomic import atomic_write_json
from composer_replication.config import CrfConfig
from composer_replication.config.writer import config_hash
from composer_replication.rollouts.worlds.openenv import is_address, shown_address
from composer_replication.rollouts.worlds.verifiers import is_verifiers
from composer_replication.runs import RunDir
from composer_replication.runs.lineage import RECORD, ChannelResult, hash_source
from composer_replication.runs.sidecar import Source, now, sha256_of_file
from composer_replication.trainer.from_config.inputs import is_dotted
from composer_replication.trainer.offline.figures import NAMES
from composer_replication.version import __version__

_SCHEMA, _VERSION = "composer_replication.training", 2
# By the names of the metrics; which of them a run has depends on its mode.
OFFLINE_CHANNELS = ("lm_ce", "sdpo_kl", "trace_replay_dpo")
GRPO_CHANNELS = ("grpo", "sdpo_kl", "sdpo_kl_logged", "trace_replay_dpo")


class NamedSource(NamedTuple):
    """What a run with rollouts was made of, as its config names it."""

    kind: str
    name: str
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What `run_training` did and where it is. `saved` is the folder of the weights, once all steps are made."""

    steps: int
    total_steps: int
    stopped_by: str
    saved: Path | None
    checkpoints: Path
    metrics: Path
    channels: tuple[ChannelResult, ...]
    diagnosis: tuple[str, ...]
    alarms: tuple[str, ...]
    counts: Mapping[str, int]
    drops: Mapping[str, int]
    warmup_steps: int = 0
    """Steps of the warm-up whose weights the first step began with."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """What came before the first step (warm-up, hint proof, reference log-probs), and how long it took."""

    def as_json(self) -> dict[str, Any]:
        plain = asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}


def sources_of(run: RunDir | None, names: Iterable[str]) -> list[Source]:
    """The artefacts that a training reads, as they are now."""
    return [] if run is None else [hash_source(run.root, name) for name in names if run.path(name).exists()]


def named_sources(config: CrfConfig) -> list[NamedSource]:
    """Prompts, rewards and environment of a run with rollouts, as the config names them; sha256 is that of the file.

    Nothing is hashed of what is not one file: a folder, or a name on the hub.
    """
    grpo = config.train.grpo
    if config.train.mode != "grpo":
        return []
    kinds_and_names = [
        ("dataset", grpo.dataset),
        *(("reward", reward) for reward in grpo.rewards),
        ("environment", grpo.environment),
    ]
    return [NamedSource(kind, _shown(name), _hash_of_named(name)) for kind, name in kinds_and_names if name is not None]


def metric_names(numbers: Mapping[str, int]) -> dict[str, int]:
    """Counts, or drops (`channel: reason`), with the channels called as metrics call them."""
    parted = ((name.partition(":"), number) for name, number in numbers.items())
    return {NAMES.get(first, first) + colon + rest: number for (first, colon, rest), number in parted}


def write_record(
    folder: Path,
    config: CrfConfig,
    result: TrainingResult,
    sources: Sequence[Source | NamedSource],
    start_digest: str,
) -> None:
    """`training.json`: what the weights in this folder were made of, with which settings, and what each channel did.

    `start_digest` is `weights_digest` of the model before its first step: all bytes of the weights below an adapter.
    """
    record = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "tool_version": __version__,
        "created": now(),
        "config_hash": config_hash(config),
        "start_weights": config.train.model,
        "start_digest": start_digest,
        "mode": config.train.mode,
        "sources": [{"kind": source.kind, "name": source.name, "sha256": source.sha256} for source in sources],
        "warmup_steps": result.warmup_steps,
        "steps": result.steps,
        "channels": [asdict(channel) for channel in result.channels],
        "diagnosis": list(result.diagnosis),
        "alarms": list(result.alarms),
        "counts": dict(result.counts),
        "drops": dict(result.drops),
        "seconds": dict(result.seconds),
    }
    atomic_write_json(folder / RECORD, record)


def _shown(name: str) -> str:
    return shown_address(name) if is_address(name) else name


def _hash_of_named(name: str) -> str | None:
    """Of the file that a path or `module:name` stands for; the module has been imported."""
    path = Path(name)
    if is_verifiers(name):  # a name on somebody's list, no module's
        return None
    if is_dotted(name) and not path.exists():
        module = sys.modules.get(name.partition(":")[0])
        path = Path(getattr(module, "__file__", None) or "")
    return sha256_of_file(path) if path.is_file() else None
