"""Every option, declared once: frozen records, read from TOML and overrides, and written back as a file.

values        what an option may hold
hide_secrets  what an error may show of it: no secret
writer        a config as the TOML that reproduces a run
schema        how a table declares its options
loader        files and overrides to a config; every mistake with its path and its origin
steps         [ingest], [sites], [replay], [pairs], [run]
loss          [loss]
render        [render], [split]
rollouts      [train.grpo], [train.effort]
train         [train] and the other tables below it
evaluation    [evaluation]
presets       configs that begin with a preset, and the one to start from
"""

from composer_replication.config.loader import load, loads
from composer_replication.config.schema import (
    OptionDoc,
    describe,
    option,
    section,
    table,
)
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
    """Everything a run can be told."""

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
