"""All options, declared in frozen dataclasses, loaded from TOML and overrides, and written as TOML.

schema    declaration of options, and conversion of values to their types
sections  [ingest], [sites], [replay], [pairs], [run], [render], [split], [loss], [evaluation]
train     [train] and its subtables
values    values as text: in error messages with secrets hidden, and as TOML
loader    configs from files and overrides; errors name the option and where it was set
presets   configs based on a preset, and the starter config
"""

from composer_replication.config.loader import load, loads
from composer_replication.config.schema import OptionDoc, describe, option, section, table
from composer_replication.config.sections import (
    EvaluationConfig,
    IngestConfig,
    LossConfig,
    PairsConfig,
    RenderConfig,
    ReplayConfig,
    RunConfig,
    SitesConfig,
    SplitConfig,
)
from composer_replication.config.train import TrainConfig
from composer_replication.config.values import config_hash, to_toml, write_resolved

__all__ = [
    "CrfConfig",
    "EvaluationConfig",
    "IngestConfig",
    "LossConfig",
    "OptionDoc",
    "PairsConfig",
    "RenderConfig",
    "ReplayConfig",
    "RunConfig",
    "SitesConfig",
    "SplitConfig",
    "TrainConfig",
    "config_hash",
    "describe",
    "load",
    "loads",
    "option",
    "section",
    "table",
    "to_toml",
    "write_resolved",
]


@table("")
class CrfConfig:
    """All options of a run."""

    ingest: IngestConfig = section(IngestConfig, "Which logs to read, and how.")
    sites: SitesConfig = section(SitesConfig, "Which errors to train on.")
    replay: ReplayConfig = section(ReplayConfig, "Which teachers to ask about which states, and the spending cap.")
    pairs: PairsConfig = section(PairsConfig, "Which answers become preference pairs.")
    loss: LossConfig = section(LossConfig, "Weights and parameters of the three loss channels.")
    render: RenderConfig = section(RenderConfig, "How to render conversations as text for the model.")
    split: SplitConfig = section(SplitConfig, "Which sessions to train on, and which to hold out.")
    train: TrainConfig = section(TrainConfig, "Options of `crf train`.")
    evaluation: EvaluationConfig = section(EvaluationConfig, "What to measure on held-out sessions.")
    run: RunConfig = section(RunConfig, "Options of `crf run` that belong to no single step.")
