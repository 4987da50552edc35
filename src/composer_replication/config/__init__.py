"""Frozen dataclasses per stage, read from TOML and overrides, written back as the file that reproduces a run."""

from composer_replication.config.loader import load, loads
from composer_replication.config.loss import LossConfig
from composer_replication.config.render import RenderConfig
from composer_replication.config.root import CrfConfig
from composer_replication.config.schema import OptionDoc, check_options, describe, option, required, section
from composer_replication.config.steps import IngestConfig, PairsConfig, ReplayConfig, SitesConfig
from composer_replication.config.train import TrainConfig
from composer_replication.config.writer import config_hash, to_toml, write_resolved

__all__ = [
    "CrfConfig",
    "IngestConfig",
    "LossConfig",
    "OptionDoc",
    "PairsConfig",
    "RenderConfig",
    "ReplayConfig",
    "SitesConfig",
    "TrainConfig",
    "check_options",
    "config_hash",
    "describe",
    "load",
    "loads",
    "option",
    "required",
    "section",
    "to_toml",
    "write_resolved",
]
