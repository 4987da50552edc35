"""The root of a run's config: one section per stage."""

from __future__ import annotations

from dataclasses import dataclass

from composer_replication.config.loss import LossConfig
from composer_replication.config.render import RenderConfig
from composer_replication.config.schema import section
from composer_replication.config.split import SplitConfig
from composer_replication.config.steps import IngestConfig, PairsConfig, ReplayConfig, SitesConfig
from composer_replication.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class CrfConfig:
    """Everything a run can be told."""

    ingest: IngestConfig = section(IngestConfig, "Which logs are read, and how.")  # noqa: RUF009  (a dataclass field, made anew for each config)
    sites: SitesConfig = section(SitesConfig, "Which failures may be taught.")  # noqa: RUF009  (the same)
    replay: ReplayConfig = section(ReplayConfig, "Who is asked about which states, and at what cost.")  # noqa: RUF009  (the same)
    pairs: PairsConfig = section(PairsConfig, "Which answers become preference pairs.")  # noqa: RUF009  (the same)
    loss: LossConfig = section(LossConfig, "Weights and shapes of the three loss channels.")  # noqa: RUF009  (the same)
    render: RenderConfig = section(RenderConfig, "How conversations become what a model reads.")  # noqa: RUF009  (the same)
    split: SplitConfig = section(SplitConfig, "Which sessions are learnt from, and which are held out.")  # noqa: RUF009  (the same)
    train: TrainConfig = section(TrainConfig, "What `crf train` is told.")  # noqa: RUF009  (the same)
