"""The three sizes load in verl's own loader, pass its own checks, and give its trainer our worker."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.utils import Role, need_reference_policy
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

from composer_replication.envs.student import student_folder
from composer_replication.errors import ConfigError
from composer_replication.recipes.verl import agent_loop, registered, trainer
from composer_replication.recipes.verl.agent_loop import _read_rollout_options
from composer_replication.recipes.verl.channel_loss import read_settings
from composer_replication.recipes.verl.trainer import ComposerWorker
from recipes.verl.scripted_server import CONFIGS, load_config
from refusals import refusal

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]
SIZES = {"composer_1_gpu": 1, "composer_8_gpus": 8, "composer_64_gpus": 64}


def test_every_file_is_one_of_the_three_or_what_they_share() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == {*SIZES, "composer"}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_passes_verls_own_checks(name: str) -> None:
    config = load_config(name, f"actor_rollout_ref.model.path={student_folder()}")
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == SIZES[name]
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=False)
    parts = config.actor_rollout_ref
    actor, rollout = (omega_conf_to_dataclass(parts[each]) for each in ("actor", "rollout"))
    omega_conf_to_dataclass(parts.model)
    assert actor.policy_loss.loss_mode == registered.POLICY_LOSS
    assert actor.strategy == parts.ref.strategy == "fsdp2"
    assert actor.loss_scale_factor == rollout.response_length == config.data.max_response_length
    assert SIZES[name] % rollout.tensor_model_parallel_size == 0
    assert config.data.train_batch_size * rollout.n % SIZES[name] == 0
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert rollout.agent.default_agent_loop == agent_loop.NAME
    assert omega_conf_to_dataclass(config.algorithm).adv_estimator == registered.ADVANTAGE


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_our_settings(name: str) -> None:
    parts = load_config(name).actor_rollout_ref
    settings = read_settings(parts)
    assert (settings.alpha_sdpo, settings.live_share, settings.sdpo_jsd_beta) == (0.1, 0.01, 1.0)
    options = _read_rollout_options(parts)
    assert options.placement == "before_turn"
    longest = parts.rollout.prompt_length + parts.rollout.response_length
    assert options.max_teacher_length is not None
    assert options.max_teacher_length >= longest
    assert parts.actor.ppo_max_token_len_per_gpu >= longest


def made_trainer(config: Any) -> Any:
    """The trainer as far as a machine without GPUs lets it come: the roles and their workers."""
    found: Any = object.__new__(get_trainer_cls(config.trainer.v1.trainer_mode))
    found.config = config
    found._init_resource_pool_mgr()
    return found


@pytest.mark.parametrize("name", SIZES)
def test_the_trainer_gives_the_actor_a_reference_and_our_channels(name: str) -> None:
    found = made_trainer(load_config(name))
    assert isinstance(found, PPOTrainerSync)
    assert list(found.role_worker_mapping) == [Role.ActorRolloutRef]
    worker = found.role_worker_mapping[Role.ActorRolloutRef].__ray_metadata__.modified_class
    assert issubclass(worker, ComposerWorker)
    assert found.mapping[Role.ActorRolloutRef] == "global_pool"
    assert found.resource_pool_manager.mapping is found.mapping


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.lora_rank=16",
        "actor_rollout_ref.composer.live_share=1",
        "actor_rollout_ref.composer.alpha_sdpo=0",
    ],
)
def test_a_teacher_that_needs_no_weights_of_its_own_gets_none(override: str) -> None:
    assert list(made_trainer(load_config("composer_1_gpu", override)).role_worker_mapping) == [Role.ActorRollout]


def test_a_wrong_name_is_an_error_before_any_process_starts() -> None:
    config = load_config("composer_1_gpu", "+actor_rollout_ref.composer.alpha=1")
    with refusal(ConfigError, what="actor_rollout_ref.composer", got="['alpha']"):
        trainer.ComposerTrainer(config)
    config = load_config("composer_1_gpu")
    with open_dict(config):
        config.actor_rollout_ref.composer_sites.where = "anywhere"
    with refusal(ConfigError, what="composer_sites", got="['where']"):
        _read_rollout_options(config.actor_rollout_ref)


def test_verls_own_command_composes_a_size() -> None:
    """With what the README says: verl imports our modules by the names in its variable."""
    modules = ("cpu_platform", "trainer", "agent_loop")
    named = ",".join(f"composer_replication.recipes.verl.{each}" for each in modules)
    command = ["-m", "verl.trainer.main_ppo", "--config-dir", str(CONFIGS), "--config-name", "composer_8_gpus"]
    done = subprocess.run(
        [sys.executable, *command, "--cfg", "job"],
        env={
            "PATH": "/usr/bin:/bin",
            "VERL_USE_EXTERNAL_MODULES": named,
            "VERL_PLATFORM": "composer-cpu",
            "HOME": "/nowhere",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = done.stdout[done.stdout.index("model_engine:") :]
    printed = OmegaConf.create(text)
    assert printed.trainer.v1.trainer_mode == trainer.MODE
    assert read_settings(printed.actor_rollout_ref).teacher_top_k == 256
