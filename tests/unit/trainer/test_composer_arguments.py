"""What the constructor of the TRL trainer refuses, each by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_composer_channels import policy as policy_fixture
from test_composer_channels import scripted

from composer_replication.errors import InputError
from composer_replication.trainer.objective.channels import ChannelSettings
from refusals import refusal

policy = policy_fixture


def test_a_reward_function_that_returns_nothing_is_named(policy: Path, tmp_path: Path) -> None:
    def forgetful(completion_ids: list[list[int]], **_columns: Any) -> None:
        del completion_ids

    with refusal(InputError, what="forgetful", got="None"):
        scripted(policy, tmp_path, reward=forgetful).train()


@pytest.mark.parametrize("knob", [{"alpha_sdpo": 0.5}, {"sdpo_wrapper": "taid"}])
def test_knobs_and_settings_together_are_an_error(policy: Path, tmp_path: Path, knob: dict[str, Any]) -> None:
    with refusal(InputError, got=next(iter(knob))) as refused:
        scripted(policy, tmp_path, settings=ChannelSettings(), **knob)
    assert re.search(r"\bsettings\b", refused.value.got)
    trainer = scripted(policy, tmp_path, settings=ChannelSettings(alpha_sdpo=0.3, beta_replay=0.0))
    assert trainer.settings.alpha_sdpo == 0.3
