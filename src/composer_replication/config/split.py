"""The [split] table: which sessions a model learns from, and which it is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_replication.config.schema import check_options, option


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Shares of the sessions, each with all its parts and sub-agents."""

    by: Literal["time", "project"] = option(
        "time", "Hold out the newest sessions (time), or whole working folders (project)."
    )
    validation: float = option(
        0.1, "Share that evaluations during training see; used where train.eval_every is set.", at_least=0, below=1
    )
    test: float = option(0.0, "Share that no part of a training sees.", at_least=0, below=1)

    def __post_init__(self) -> None:
        check_options(self, section="split")
