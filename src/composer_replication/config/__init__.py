"""Every option, declared once in frozen dataclasses, read from TOML and overrides, and written back as a file.

values    types and bounds of options, what error messages may show of them, and a config as TOML
schema    how a table declares its options
sections  [ingest], [sites], [replay], [pairs], [loss], [render], [split], [evaluation], [run]
train     [train] and the tables below it
loader    files and overrides to a config; errors name the option and where it was set
presets   configs that start from a preset, and the starter config
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

    ingest: IngestConfig = section(IngestConfig, "Which logs are read, and how.")
    sites: SitesConfig = section(SitesConfig, "Which failures may be taught.")
    replay: ReplayConfig = section(ReplayConfig, "Who is asked about which states, and at what cost.")
    pairs: PairsConfig = section(PairsConfig, "Which answers become preference pairs.")
    loss: LossConfig = section(LossConfig, "Weights and shapes of the three loss channels.")
    render: RenderConfig = section(RenderConfig, "How conversations become what a model reads.")
    split: SplitConfig = section(SplitConfig, "Which sessions are learnt from, and which are held out.")
    train: TrainConfig = section(TrainConfig, "What `crf train` is told.")
    evaluation: EvaluationConfig = section(EvaluationConfig, "What is measured on held-out sessions.")
    run: RunConfig = section(RunConfig, "What `crf run` decides that no single step does.")
