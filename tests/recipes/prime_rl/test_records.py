"""Our records of PRIME-RL against the contract, and our configs against both."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from composer_replication.config import load
from composer_replication.recipes.prime_rl import composer_loss, hinted_turns
from composer_replication.recipes.prime_rl.hinted_turns import HintSettings
from recipes.prime_rl import engine_records
from recipes.prime_rl.contract import CONFIG_KEYS, FIELDS, PARAMETERS, SOURCE

CONFIGS = Path(composer_loss.__file__).parent / "configs"
RUNS = sorted(CONFIGS.glob("rl*.toml"))


def test_our_loss_reads_and_returns_what_the_engine_s_records_hold() -> None:
    loss = f"{SOURCE}/trainer/rl/loss.py"
    assert [each.name for each in fields(engine_records.LossInputs)] == FIELDS[loss, "LossInputs"]
    assert list(composer_loss.LossInputs.__annotations__) == FIELDS[loss, "LossInputs"]
    assert [each.name for each in fields(composer_loss.LossOutputs)] == FIELDS[loss, "LossOutputs"]


def test_our_algorithm_overrides_the_hooks_that_the_engine_calls() -> None:
    hooks = {name.removeprefix("Algorithm."): each for (_, name), each in PARAMETERS.items()}

    class Grpo:
        """Nothing: what the class below has is its own."""

    made = hinted_turns.composer_algorithm(Grpo, HintSettings(), None, None, None)
    own = {name: list(inspect.signature(each).parameters) for name, each in vars(made).items() if callable(each)}
    assert own == {name: hooks[name] for name in ("setup", "score_episode")}


def tables(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, set[str], dict[str, Any]]]:
    """Each table of a config by its path, lists of tables by that of one."""
    yield path, set(values), values
    for key, value in values.items():
        inner = value if isinstance(value, list) else [value]
        for each in inner:
            if isinstance(each, dict) and key != "kwargs":
                yield from tables(each, f"{path}.{key}" if path else key)


def known(path: str) -> set[str]:
    return CONFIG_KEYS[path.replace("orchestrator.eval.source.env", "orchestrator.train.source.env")]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_every_key_of_a_config_is_one_that_the_engine_has(path: Path) -> None:
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    for table, keys, _ in tables(values):
        assert keys <= known(table), f"{path.name} [{table}]: {sorted(keys - known(table))}"


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_a_config_names_our_loss_with_arguments_that_it_takes(path: Path) -> None:
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    loss = values["trainer"]["loss"]
    module, _, name = loss["import_path"].rpartition(".")
    named = getattr(importlib.import_module(module), name)
    assert named is composer_loss.loss_fn
    inspect.signature(named).bind(None, **loss["kwargs"])
    assert loss["kwargs"]["alpha_sdpo"] == 0.0, "channel 2 would be taught twice: the algorithm's own stream is it"
    assert values["orchestrator"]["algo"] == {"type": "grpo"}
    assert values["orchestrator"]["train"]["sampling"]["temperature"] == 1.0


def test_the_configs_are_for_two_eight_and_sixty_four_gpus() -> None:
    sizes = {}
    for path in RUNS:
        deployment = tomllib.loads(path.read_text(encoding="utf-8"))["deployment"]
        gpus = [value for key, value in deployment.items() if key.endswith("_gpus")]
        nodes = [value for key, value in deployment.items() if key.endswith("_nodes")]
        sizes[path.name] = sum(gpus) or 8 * sum(nodes)
    assert sizes == {"rl.toml": 2, "rl_8.toml": 8, "rl_64.toml": 64}


def test_the_algorithm_s_own_settings_load_and_are_the_defaults() -> None:
    assert load(HintSettings, CONFIGS / "composer.toml") == HintSettings()
