"""The loss section: the knobs that users of compose_loss know, with their defaults and limits."""

from __future__ import annotations

import dataclasses

import pytest

from composer_replication.config import CrfConfig, LossConfig, describe, load, loads, to_toml
from composer_replication.errors import ConfigError
from refusals import refusal


def test_the_knobs_and_their_defaults_are_those_of_compose_loss() -> None:
    assert dataclasses.asdict(LossConfig()) == {
        "alpha_sdpo": 0.1,
        "beta_replay": 0.05,
        "sdpo_jsd_beta": 0.5,
        "sdpo_temperature": 1.0,
        "sdpo_token_clip": None,
        "replay_dpo_beta": 0.1,
        "lm_ce_label_smoothing": 0.0,
        "dpo_variant": "dpo",
        "sdpo_wrapper": "none",
        "taid_t": None,
        "simpo_beta": 2.0,
        "simpo_gamma": 1.0,
        "entropy_opd_h_max": None,
    }


@pytest.mark.parametrize(
    ("knob", "allowed", "refused"),
    [
        ("alpha_sdpo", ["0", "3"], ["-0.1", "inf", "true", "x"]),
        ("beta_replay", ["0", "3"], ["-0.1"]),
        ("sdpo_jsd_beta", ["0", "1"], ["-0.1", "1.1"]),
        ("sdpo_temperature", ["0.01"], ["0", "none"]),
        ("sdpo_token_clip", ["0.01", "none"], ["0"]),
        ("replay_dpo_beta", ["0.01"], ["0"]),
        ("lm_ce_label_smoothing", ["0", "0.9"], ["1", "-0.1"]),
        ("dpo_variant", ["dpo", "simpo"], ["ppo", "DPO", "1"]),
        ("sdpo_wrapper", ["none", "entropy_opd"], ["jsd"]),
        ("taid_t", ["0", "1", "none"], ["-0.1", "1.1"]),
        ("simpo_beta", ["0.01"], ["0"]),
        ("simpo_gamma", ["0"], ["-0.1"]),
        ("entropy_opd_h_max", ["0.01", "none"], ["0"]),
    ],
)
def test_each_knob_takes_its_range_and_refuses_the_rest_by_path(
    knob: str, allowed: list[str], refused: list[str]
) -> None:
    for value in allowed:
        held = getattr(load(CrfConfig, overrides=[f"loss.{knob}={value}"]).loss, knob)
        assert str(held).lower() == value or float(held) == float(value)
    for value in refused:
        with refusal(ConfigError, what=f"'loss.{knob}={value}'") as caught:
            load(CrfConfig, overrides=[f"loss.{knob}={value}"])
        assert caught.value.what.split()[-1] == f"loss.{knob}"


def test_a_loss_config_built_by_hand_is_refused_by_path_too() -> None:
    with refusal(ConfigError, what="loss.alpha_sdpo", got="-1 (int)", expected="float >= 0"):
        LossConfig(alpha_sdpo=-1)
    with refusal(ConfigError, what="loss.dpo_variant", got="'ppo'", expected='"dpo" | "simpo"') as caught:
        LossConfig(dpo_variant="ppo")  # pyright: ignore[reportArgumentType]
    assert isinstance(caught.value, ValueError)


def test_taid_needs_its_position() -> None:
    with refusal(ConfigError, what="'loss.sdpo_wrapper=taid'") as caught:
        load(CrfConfig, overrides=["loss.sdpo_wrapper=taid"])
    assert "loss.taid_t" in caught.value.what
    assert load(CrfConfig, overrides=["loss.sdpo_wrapper=taid", "loss.taid_t=0.4"]).loss.taid_t == 0.4


def test_a_config_is_frozen_and_takes_only_keywords() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().alpha_sdpo = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        LossConfig(0.1)  # pyright: ignore[reportCallIssue]


def test_the_default_config_round_trips() -> None:
    assert loads(CrfConfig, to_toml(CrfConfig())) == CrfConfig()


def test_every_option_is_described_by_one_sentence() -> None:
    for row in describe(CrfConfig):
        assert row.sentence[0].isupper(), row
        assert row.sentence.endswith("."), row
        assert ". " not in row.sentence, row
