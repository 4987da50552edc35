"""The render section: templates, their variables, and thinking."""

from __future__ import annotations

import pytest

from composer_replication.config import CrfConfig, RenderConfig, describe, load, loads, to_toml
from composer_replication.config.presets import load_with_preset
from composer_replication.errors import ConfigError
from refusals import refusal

FILE = """
[render]
student_models = ["Qwen/Qwen3-*"]
own_thinking = "context"
[render.template_variables]
enable_thinking = false
reasoning_effort = "low"
budget = 3
words = ["a", 1]
"""
VARIABLES = {"enable_thinking": False, "reasoning_effort": "low", "budget": 3, "words": ["a", 1]}


def test_what_is_not_said_leaves_other_models_thinking_out_and_learns_the_students() -> None:
    config = RenderConfig()
    assert (config.own_thinking, config.other_thinking, config.student_models) == ("target", "left_out", ())
    assert (config.chat_template, config.template_variables) == (None, {})


def test_variables_of_a_template_keep_their_types_through_file_override_preset_and_resolved_file(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    override = ["render.template_variables.enable_thinking=true"]
    for config in (load(CrfConfig, path, override), load_with_preset(path, override)):
        assert config.render.template_variables == {**VARIABLES, "enable_thinking": True}
        assert config.render.student_models == ("Qwen/Qwen3-*",)
        assert loads(CrfConfig, to_toml(config)) == config


@pytest.mark.parametrize("name", ["tokenize", "messages", '"two words"'])
def test_a_variable_that_no_template_can_read_is_refused(name) -> None:
    with refusal(ConfigError, what="render.template_variables", got=name.strip('"')):
        loads(CrfConfig, f"[render.template_variables]\n{name} = 1")


def test_a_value_that_toml_has_and_a_template_has_not_is_refused() -> None:
    with refusal(ConfigError, what="render.template_variables", got="datetime.date", expected="table"):
        loads(CrfConfig, "[render.template_variables]\nday = 2026-01-01")


def test_a_treatment_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with refusal(ConfigError, what="render.other_thinking", expected='"target" | "context" | "left_out"'):
        loads(CrfConfig, '[render]\nother_thinking = "hidden"')


def test_every_option_has_its_sentence() -> None:
    rows = {row.path: row for row in describe(CrfConfig) if row.path.startswith("render.")}
    assert len(rows) == 5
    assert rows["render.template_variables"].type_text == "table of any value"
    assert all(row.sentence.endswith(".") for row in rows.values())
