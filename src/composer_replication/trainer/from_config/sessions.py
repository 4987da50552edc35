"""Logged sessions for `crf train`, and the memory they take; neither needs weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from composer_replication.batch.render import Renderer
from composer_replication.config import CrfConfig
from composer_replication.errors import ConfigError, InputError, explain
from composer_replication.runs.conversations import read_conversations
from composer_replication.runs.split import split_conversations
from composer_replication.sessions.dataset import LoggedSession, LoggedSessions
from composer_replication.sessions.windows import WindowMaker, WindowSettings
from composer_replication.trainer.from_config.parts import Inputs, model_config
from composer_replication.trainer.start_model import weight_dtype
from composer_replication.trainer.watch.planner import MemoryPlan, plan_memory

SOURCES = ("conversations", "tools", "sites", "pairs")


class OfflineData(NamedTuple):
    """Sessions to train on, and those that are held out where there are evaluations."""

    train: LoggedSessions
    held_out: LoggedSessions | None


def offline_data(inputs: Inputs) -> OfflineData:
    """The windows of the run's sessions, as [train.batch] says, for the channels that have a weight."""
    config = inputs.config
    if inputs.run is None:
        raise ConfigError(explain("train.run", got="none", expected="a run directory (`crf ingest`, `crf sites`)"))
    options: dict[str, Any] = {
        **_cutting(config),
        "responses": "good" if config.train.channels.good_turns else "none",
        "work_failures": config.train.channels.work_failures,
        "use_sites": config.loss.alpha_sdpo > 0,
        "contrast": config.train.switches.contrast is not None,
    }
    if config.loss.beta_replay == 0:
        options["use_pairs"] = False
    validation = config.split.validation if config.train.eval_every else 0.0
    if not validation and not config.split.test:
        return OfflineData(LoggedSessions.from_run(inputs.run, inputs.renderer, **options), None)
    sides = split_conversations(
        read_conversations(inputs.run), validation=validation, test=config.split.test, by=config.split.by
    )
    train, held_out = (
        LoggedSessions.from_run(inputs.run, inputs.renderer, only=lambda each, side=side: each.id in side, **options)
        for side in (sides.train, sides.validation)
    )
    if validation and not len(held_out):
        fix = "Set train.eval_every = 0, a larger split.validation, or ingest more sessions."
        got = f"no target in {config.split.validation:.0%} of the sessions"
        raise InputError(explain("train.eval_every", got=got, expected="some to evaluate on", fix=fix))
    return OfflineData(train, held_out if validation else None)


def why_not_taught(config: CrfConfig, renderer: Renderer, session: LoggedSession) -> str:
    """The reason that a training counts for a session's only site, where no window holds it; empty where one does.

    Whether a window holds a target depends on nothing else in the session. A hint may still fail its proof.
    """
    settings = WindowSettings(**_cutting(config), responses="none", use_pairs=False)
    maker = WindowMaker(renderer, settings)
    if any(window.site_ids for window in maker.windows(session)):
        return ""
    return ", ".join(name.partition(": ")[2] for name in maker.drops)


def _cutting(config: CrfConfig) -> dict[str, Any]:
    batch = config.train.batch
    return {"budget": batch.budget, "overlap": batch.overlap, "placement": batch.placement, "part": batch.part}


def offline_memory(inputs: Inputs, sessions: LoggedSessions) -> MemoryPlan:
    """Whether a step on the longest trees fits the device at hand; needs the model's config, not its weights."""
    train = inputs.config.train
    sizes = sorted((item.num_tokens for item in sessions.items), reverse=True)
    size = 2 if train.optimiser.bf16 else 4
    assert train.model is not None
    return plan_memory(
        model_config(train.model),
        longest_tree=sum(sizes[: train.optimiser.per_device]),
        device="cuda" if torch.cuda.is_available() else "cpu",
        weight_bytes=weight_dtype(bf16=train.optimiser.bf16, has_adapter=train.adapter.kind != "none").itemsize,
        compute_bytes=size,
        checkpointing=train.optimiser.checkpointing,
        lora_rank=None if train.adapter.kind == "none" else train.adapter.rank,
        four_bit=train.adapter.kind == "qlora",
        teacher=train.teacher.kind,
        accumulation=train.optimiser.accumulation,
    )
