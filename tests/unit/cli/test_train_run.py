"""`crf train RUN`: which run it trains on, and with which options."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.cli import train as verb
from composer_replication.cli.main import build_parser
from composer_replication.cli.run_checks import save_options
from composer_replication.config import CrfConfig
from composer_replication.config.presets import load_with_preset
from composer_replication.config.values import write_resolved
from composer_replication.errors import InputError, RunError
from composer_replication.runs import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def config_of(*words: object) -> CrfConfig:
    return verb._config(build_parser().parse_args(["train", *map(str, words)]))


def options(*overrides: str) -> CrfConfig:
    return load_with_preset(overrides=["train.model=somewhere/model", *overrides])


def test_a_run_is_trained_on_with_the_options_that_crf_run_remembers(run: RunDir) -> None:
    save_options(options("train.optimiser.steps=7", "loss.beta_replay=0.25", "ingest.paths=['logs']"), run)
    config = config_of(run.root)
    assert config.train.run == str(run.root)
    assert (config.train.model, config.train.optimiser.steps, config.loss.beta_replay) == ("somewhere/model", 7, 0.25)
    assert config_of(run.root, "--set", "train.optimiser.steps=9").train.optimiser.steps == 9


def test_without_a_crf_run_the_options_are_those_of_the_last_training(run: RunDir) -> None:
    write_resolved(options("train.optimiser.steps=5", "train.run=elsewhere"), run.root)
    config = config_of(run.root)
    assert (config.train.optimiser.steps, config.train.run) == (5, str(run.root))


def test_a_config_takes_the_place_of_what_a_run_remembers(run: RunDir, tmp_path: Path) -> None:
    save_options(options("train.optimiser.steps=7"), run)
    (tmp_path / "mine.toml").write_text('[train]\nmodel = "another"\nrun = "elsewhere"\n')
    config = config_of(run.root, "--config", tmp_path / "mine.toml")
    assert (config.train.model, config.train.run) == ("another", str(run.root))
    assert config.train.optimiser.steps == CrfConfig().train.optimiser.steps


def test_a_run_without_options_gets_the_defaults(run: RunDir) -> None:
    assert config_of(run.root, "--set", "train.model=m").train.run == str(run.root)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(InputError, match="--config"):
        config_of(tmp_path / "run.toml")
    with pytest.raises(RunError):
        config_of(tmp_path)


def test_a_stopped_training_says_how_to_go_on_with_its_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(run.root), "--set", "train.model=a b"]
    result: Any = SimpleNamespace(stopped_by="SIGTERM", steps=1, total_steps=2)
    verb._log_how_to_resume(result, build_parser().parse_args(words))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "crf train" in line]
    assert shlex.split(line[line.index("crf train") :]) == ["crf", *words, "--resume"]
