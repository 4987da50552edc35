"""The train section: what `crf train` can be told, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from composer_replication.config import CrfConfig, TrainConfig, describe, load, loads, to_toml
from composer_replication.errors import ConfigError
from refusals import refusal


def test_a_run_is_described_by_a_file_with_tables() -> None:
    config = loads(
        CrfConfig,
        """
        [train]
        model = "models/start"
        run = "runs/1"
        mode = "grpo"
        preset = "dapo"
        [train.adapter]
        kind = "qlora"
        targets = ["q_proj", "v_proj"]
        [train.teacher]
        kind = "ema"
        ema_rate = 0.02
        [train.optimiser]
        steps = 10
        """,
        ["train.optimiser.lr=1e-6", "train.alarm.stop=true"],
    ).train
    assert (config.model, config.run, config.mode, config.preset) == ("models/start", "runs/1", "grpo", "dapo")
    assert (config.adapter.kind, config.adapter.targets) == ("qlora", ("q_proj", "v_proj"))
    assert (config.teacher.kind, config.teacher.ema_rate) == ("ema", 0.02)
    assert (config.optimiser.steps, config.optimiser.lr, config.alarm.stop) == (10, 1e-6, True)


def test_a_mistyped_option_is_refused_with_the_one_that_was_meant() -> None:
    with refusal(ConfigError, got="train.adapter.rnk", fix="train.adapter.rank"):
        loads(CrfConfig, "[train.adapter]\nrnk = 8")


@pytest.mark.parametrize(
    ("option", "allowed", "refused"),
    [
        ("mode", ["offline", "grpo"], ["online"]),
        ("preset", ["composer", "dapo", "none"], ["ppo"]),
        ("report_to", ["none", "trackio", "wandb"], ["all"]),
        ("adapter.kind", ["none", "lora", "qlora"], ["full"]),
        ("adapter.rank", ["1"], ["0", "1.5"]),
        ("adapter.dropout", ["0", "0.5"], ["1"]),
        ("teacher.kind", ["live", "frozen", "ema", "trust_region"], ["mean"]),
        ("teacher.live_share", ["0.01"], ["0", "1"]),
        ("channels.anneal", ["none", "linear"], ["cosine"]),
        ("channels.anneal_end", ["0", "1"], ["1.1"]),
        ("switches.sigmoid_gate_tau", ["1"], ["0"]),
        ("switches.position_decay", ["1", "0.9"], ["0", "1.1"]),
        ("switches.contrast", ["1"], ["0"]),
        ("batch.placement", ["before_turn", "head"], ["after"]),
        ("batch.part", ["turn", "call"], ["token"]),
        ("proof.margin", ["0"], ["-1"]),
        ("optimiser.lr", ["1e-6"], ["0"]),
        ("save.keep", ["1"], ["0"]),
        ("grpo.num_generations", ["2"], ["1"]),
        ("grpo.loss_type", ["dr_grpo", "vespo"], ["ppo"]),
        ("grpo.soft_overlong", ["0", "1"], ["1.1"]),
        ("effort.q", ["0", "3"], ["-1"]),
        ("alarm.entropy_floor", ["0.5"], ["0", "1"]),
        ("alarm.window", ["2"], ["1"]),
    ],
)
def test_each_option_takes_its_range_and_refuses_the_rest_by_path(
    option: str, allowed: list[str], refused: list[str]
) -> None:
    for value in allowed:
        held: object = load(CrfConfig, overrides=[f"train.{option}={value}"]).train
        for name in option.split("."):
            held = getattr(held, name)
        assert held == value or held == float(value)
    for value in refused:
        with refusal(ConfigError, what=f"'train.{option}={value}'") as caught:
            load(CrfConfig, overrides=[f"train.{option}={value}"])
        assert caught.value.what.split()[-1] == f"train.{option}"
        assert value in caught.value.got


@pytest.mark.parametrize(
    ("overrides", "named", "got"),
    [
        (["train.batch.budget=100", "train.batch.overlap=100"], "train.batch.overlap", "100"),
        (["train.optimiser.steps=5", "train.optimiser.warmup=5"], "train.optimiser.warmup", "5"),
        (["train.adapter.targets=[]"], "train.adapter.targets", "[]"),
    ],
)
def test_options_that_cannot_be_together_are_refused_by_path(overrides: list[str], named: str, got: str) -> None:
    with refusal(ConfigError, got=got) as caught:
        load(CrfConfig, overrides=overrides)
    assert caught.value.what.split()[-1] == named


def test_no_name_of_an_option_looks_like_a_secret_that_messages_would_hide() -> None:
    from composer_replication.config.values import _looks_secret

    assert [row.path for row in describe(TrainConfig, "train") if _looks_secret(row.path)] == []


def test_a_config_with_every_kind_of_option_round_trips() -> None:
    overrides = [
        "train.model=m",
        "train.switches.contrast=0.5",
        'train.grpo.rewards=["tasks:judge"]',
        "train.save.keep=7",
    ]
    config = load(CrfConfig, overrides=overrides)
    assert loads(CrfConfig, to_toml(config)) == config
    assert config.train.grpo.rewards == ("tasks:judge",)


def test_the_switches_are_those_of_the_objective() -> None:
    from composer_replication.config import TrainConfig
    from composer_replication.trainer.objective.row_weighting import RowWeighting

    assert dataclasses.asdict(TrainConfig().switches) == dataclasses.asdict(RowWeighting())


def test_the_defaults_of_teacher_and_batches_are_those_of_the_functions() -> None:
    import inspect

    from composer_replication.batch.session_batch import session_batches
    from composer_replication.trainer.objective.hint_proof import prove_hints
    from composer_replication.trainer.teacher_keeper import TeacherKeeper

    config = TrainConfig()
    for function, section in (
        (TeacherKeeper.__init__, config.teacher),
        (session_batches, config.batch),
        (prove_hints, config.proof),
    ):
        defaults = {name: each.default for name, each in inspect.signature(function).parameters.items()}
        shared = dataclasses.asdict(section).keys() & defaults.keys() - {
            "budget",
            "overlap",
        }  # no default there; 0 there
        assert shared, function
        assert {name: getattr(section, name) for name in shared} == {name: defaults[name] for name in shared}
