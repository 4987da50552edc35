"""Presets: one file each, read as a config and as arguments of TRL."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from composer_replication.config import CrfConfig, load, to_toml
from composer_replication.config.presets import PRESET_FILES, load_with_preset, preset_path
from composer_replication.errors import ConfigError, InputError, MissingExtraError
from composer_replication.trainer.from_config.inputs import _training_arguments
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.presets import (
    _preset_config,
    channel_settings,
    composer_grpo_config,
    grpo_arguments,
    preset_rewards,
)
from refusals import refusal


def preset_settings(name: str) -> dict[str, Any]:
    """The knobs of a preset that are not TRL's, by the names of ChannelSettings, TeacherKeeper and [train.grpo]."""
    config = _preset_config(name)
    grpo, teacher = config.train.grpo, config.train.teacher
    own = {"teacher": teacher.kind, "ema_rate": teacher.ema_rate, "live_share": teacher.live_share}
    names = ("k1_coefficient", "dynamic_sampling", "max_resamples", "soft_overlong")
    return vars(channel_settings(config)) | own | {each: getattr(grpo, each) for each in names}


CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
Preset = Literal["composer", "dapo"]

TRL_VALUES: dict[Preset, dict[str, object]] = {
    "composer": {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "mask_truncated_completions": False,
        "temperature": 1.0,
    },
    "dapo": {
        "loss_type": "dapo",
        "scale_rewards": "group",
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "temperature": 1.0,
    },
}
OWN_VALUES = {
    "alpha_sdpo": 0.1,
    "beta_replay": 0.05,
    "sdpo_jsd_beta": 1.0,
    "sdpo_temperature": 1.0,
    "sdpo_token_clip": None,
    "sdpo_wrapper": "none",
    "anneal": "linear",
    "anneal_end": 0.0,
    "teacher": "trust_region",
    "live_share": 0.01,
    "k1_coefficient": 0.0,
}


@pytest.mark.parametrize("preset", ["composer", "dapo"])
def test_the_file_and_the_function_give_trl_the_published_settings(preset: Preset, tmp_path: Path) -> None:
    from trl import GRPOConfig

    by_function = composer_grpo_config(tmp_path, preset=preset, **CPU)
    by_file = GRPOConfig(output_dir=str(tmp_path), **grpo_arguments(load(CrfConfig, preset_path(preset)).train), **CPU)
    same = {field.name for field in dataclasses.fields(GRPOConfig)} - {"logging_dir"}
    assert {name: getattr(by_function, name) for name in same} == {name: getattr(by_file, name) for name in same}
    assert {name: getattr(by_function, name) for name in TRL_VALUES[preset]} == TRL_VALUES[preset]


@pytest.mark.parametrize("preset", ["composer", "dapo"])
def test_our_own_knobs_are_the_recommended_ones(preset: Preset) -> None:
    settings = preset_settings(preset)
    assert {name: settings[name] for name in OWN_VALUES} == OWN_VALUES
    is_dapo = preset == "dapo"
    assert (settings["dynamic_sampling"], settings["soft_overlong"]) == (is_dapo, 0.2 if is_dapo else 0.0)
    knobs = {field.name for field in dataclasses.fields(ChannelSettings)}
    assert ChannelSettings(**{name: settings[name] for name in knobs}) == channel_settings(_preset_config(preset))


def test_no_preset_means_the_defaults_of_the_functions() -> None:
    assert _preset_config("none") == load(CrfConfig, overrides=["train.preset=none"])
    assert channel_settings(_preset_config("none")) == ChannelSettings()


def test_arguments_of_the_function_win_over_the_preset(tmp_path: Path) -> None:
    config = composer_grpo_config(tmp_path, preset="dapo", epsilon_high=0.3, num_generations=4, **CPU)
    assert (config.epsilon_high, config.num_generations, config.loss_type) == (0.3, 4, "dapo")


def test_an_unknown_preset_and_a_mistyped_argument_are_refused(tmp_path: Path) -> None:
    with refusal(InputError, what="preset", got="'ppo'", expected="composer, dapo"):
        composer_grpo_config(tmp_path, preset="ppo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="epsilon_hihg"):
        composer_grpo_config(tmp_path, epsilon_hihg=0.3, **CPU)


def test_without_trl_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtraError, match=r"composer-replication\[train\]"):
        composer_grpo_config(tmp_path)


def test_a_preset_holds_below_the_file_and_the_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[loss]\nalpha_sdpo = 0.3\n[train]\npreset = "dapo"\n[train.grpo]\nepsilon = 0.1\n')
    config = load_with_preset(file, ["train.grpo.dynamic_sampling=false"])
    assert (config.loss.alpha_sdpo, config.train.grpo.epsilon, config.train.grpo.dynamic_sampling) == (0.3, 0.1, False)
    assert (config.loss.sdpo_jsd_beta, config.train.grpo.epsilon_high) == (1.0, 0.28)


def test_an_override_chooses_another_preset_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\npreset = "dapo"\n')
    config = load_with_preset(file, ["train.preset=composer"])
    assert (config.train.preset, config.train.grpo.loss_type) == ("composer", "dr_grpo")
    assert load_with_preset().train.grpo.loss_type == "dr_grpo"


def test_what_is_wrong_with_a_file_is_told_by_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[loss]\nalpha_sdpoo = 1\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(str(file))}\b.*\balpha_sdpoo\b.*\bloss\.alpha_sdpo\b"):
        load_with_preset(file)


@pytest.mark.parametrize("preset", PRESET_FILES)
def test_the_resolved_config_of_a_run_loads_to_itself(preset: str, tmp_path: Path) -> None:
    config = load_with_preset(overrides=[f"train.preset={preset}", "train.optimiser.steps=3", "loss.alpha_sdpo=0.4"])
    file = tmp_path / "config.resolved.toml"
    file.write_text(to_toml(config))
    assert load_with_preset(file) == config
    assert load(CrfConfig, file) == config


def test_the_soft_overlong_punishment_grows_over_the_last_fifth() -> None:
    config = load_with_preset(overrides=["train.preset=dapo", "train.grpo.max_completion_length=100"])
    [punish] = preset_rewards(config.train, tokenizer=None)  # pyright: ignore[reportArgumentType]
    assert punish(completion_ids=[[0] * 80, [0] * 90, [0] * 100, [0] * 101]) == [0.0, -0.5, -1.0, -1.0]
    assert preset_rewards(_preset_config("composer").train, tokenizer=None) == []  # pyright: ignore[reportArgumentType]


def test_the_effort_penalty_has_the_prices_of_the_config() -> None:
    class Words:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * len(text.split())

    overrides = ["train.effort.on=true", "train.effort.final=0.5", "train.effort.turns=1", "train.effort.q=0"]
    [penalty] = preset_rewards(load_with_preset(overrides=overrides).train, Words())
    completion = [{"role": "assistant", "content": "one two"}]
    assert penalty(prompts=[""], completions=[completion], completion_ids=[[1, 2]]) == [pytest.approx(-2.0)]


def test_the_rest_of_the_config_becomes_arguments_that_transformers_takes(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    overrides = ["train.optimiser.warmup=5", "train.optimiser.steps=30", "train.save.keep=3", "train.eval_every=10"]
    arguments = _training_arguments(load_with_preset(overrides=overrides).train)
    made = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)
    assert (made.max_steps, made.warmup_steps, made.save_total_limit, made.eval_steps) == (30, 5, 3, 10)
    assert (made.lr_scheduler_type, made.learning_rate) == ("constant_with_warmup", 2e-5)
    assert made.report_to == []


@pytest.mark.parametrize("name", ["composer", "dapo"])
def test_a_preset_in_python_is_the_preset_of_the_config(name):
    """The trainer's own arguments, beside those of TRL's config, are those that `crf train` would pass."""
    from composer_replication.trainer import RolloutOptions, TeacherKeeper, trainer_arguments

    made, wanted = trainer_arguments(name), preset_settings(name)
    assert isinstance(made["teacher"], TeacherKeeper)
    assert (made["teacher"].kind, made["teacher"].live_share) == (wanted["teacher"], wanted["live_share"])
    assert vars(made["settings"]) == {key: wanted[key] for key in vars(made["settings"])}
    resamples = wanted["max_resamples"] if wanted["dynamic_sampling"] else 0
    assert made["rollouts"] == RolloutOptions(max_resamples=resamples, k1_coefficient=wanted["k1_coefficient"])
