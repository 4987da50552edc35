"""The tables below [train] that say what is trained, by whom it is taught, and on what."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain


@table("train.adapter")
class AdapterConfig:
    """Which weights move."""

    kind: Literal["none", "lora", "qlora"] = option(
        "lora", "Train all weights (none), an adapter (lora), or an adapter on weights held in 4 bits (qlora)."
    )
    rank: int = option(16, "Rank of the adapter's matrices.", at_least=1)
    alpha: float = option(32.0, "Scale of the adapter, which is multiplied by alpha / rank.", above=0)
    dropout: float = option(0.0, "Dropout on the adapter's input while training.", at_least=0, below=1)
    targets: tuple[str, ...] = option(
        ("all-linear",), "Names of the modules that get an adapter; all-linear is every linear layer but the head."
    )

    def _check(self) -> None:
        if self.kind != "none" and not self.targets:
            raise ConfigError(explain("train.adapter.targets", got="an empty list", expected="at least one name"))


@table("train.teacher")
class TeacherConfig:
    """Who teaches channel 2."""

    kind: Literal["live", "frozen", "ema", "trust_region"] = option(
        "live",
        "The student itself, the start weights, an average of the student's, or start weights with a live share.",
    )
    ema_rate: float = option(0.05, "Share of the student that enters the average after each step.", above=0, below=1)
    live_share: float = option(0.01, "Share of the student's own logits in a trust region.", above=0, below=1)


@table("train.channels")
class ChannelsConfig:
    """What changes over a run of the channels that [loss] weighs."""

    anneal: Literal["none", "linear"] = option("none", "How the weight loss.alpha_sdpo changes over the run.")
    anneal_end: float = option(
        0.0, "Share of loss.alpha_sdpo that is left at the last step of an annealed run.", at_least=0, at_most=1
    )
    is_clip: float | None = option(
        None, "Largest weight of a rollout's token, p now / p when it was sampled; unset weighs all alike.", above=0
    )
    good_turns: bool = option(True, "Without an environment, also train on the turns that made no error.")
    work_failures: bool = option(
        False, "Count turns whose call failed as part of the work, such as failing tests, among the good ones."
    )
    taid_end: float = option(1.0, "Where TAID's target ends; it starts at loss.taid_t.", at_least=0, at_most=1)
    taid_rate: float = option(5e-4, "How fast TAID's target moves while the loss falls.", at_least=0, at_most=1)
    taid_momentum: float = option(0.99, "How long TAID remembers falls of the loss.", at_least=0, at_most=1)


@table("train.switches")
class SwitchesConfig:
    """How much each row of channel 2 counts, and the contrast with a wrong hint; all of it off unless set."""

    sigmoid_gate_tau: float | None = option(
        None,
        "Width of a gate that favours words the teacher finds less likely than the student; unset is off.",
        above=0,
    )
    teacher_entropy: bool = option(False, "Let a row count less the less certain its teacher is.")
    position_decay: float | None = option(
        None, "Factor by which a row counts less than the one before it in its turn; unset is off.", above=0, at_most=1
    )
    contrast: float | None = option(
        None,
        "Strength with which the effect of a wrong hint is taken off that of the right one; unset is off.",
        above=0,
    )
    normalise: bool = option(True, "Scale the rows' weights to a mean of 1.")


@table("train.batch")
class BatchConfig:
    """How logged sessions become batches."""

    budget: int = option(32768, "Most positions one tree may have; longer sessions are cut into windows.", at_least=16)
    overlap: int = option(2048, "Positions that a window repeats of the one before it, for context.", at_least=0)
    placement: Literal["before_turn", "in_last_message", "head"] = option(
        "before_turn", "Where a hint stands: before the erring turn, in the last message before it, or at the head."
    )
    part: Literal["turn", "call"] = option("turn", "What of an erring turn is taught: all of it, or its calls alone.")

    def _check(self) -> None:
        if self.overlap >= self.budget:
            is_default = self.overlap == BatchConfig.__dataclass_fields__["overlap"].default
            got = f"{self.overlap}{', its default' if is_default else ''}"
            expected = f"less than train.batch.budget, {self.budget}"
            fix = f"Set train.batch.overlap = {self.budget // 8}, say, or a larger train.batch.budget."
            raise ConfigError(explain("train.batch.overlap", got=got, expected=expected, fix=fix))


@table("train.proof")
class ProofConfig:
    """Whether a hint has to show that it does something before it teaches."""

    on: bool = option(
        True, "Score every erring decision with no hint, its own and another's, and drop hints that do nothing."
    )
    margin: float = option(
        0.0,
        "Nats a token by which a hint must lower its erring decision more than a wrong hint does, and than good calls.",
        at_least=0,
    )


@table("train.warmup")
class WarmupConfig:
    """Channel 1 alone before hints are proved, for a model that does not speak the logs' harness."""

    mode: Literal["auto", "off", "steps", "until"] = option(
        "auto",
        "Some if the model hardly knows the logs' tools (auto), off, steps, or until held-out loss stops falling.",
    )
    steps: int = option(
        150, "Warm-up steps, for the modes auto and steps; train.optimiser.steps come after them.", at_least=1
    )
    every: int = option(25, "Steps between two evaluations of held-out good turns, for the mode until.", at_least=1)
    patience: int = option(2, "Evaluations without a lower held-out loss after which the mode until ends.", at_least=1)
    most: int = option(1000, "Most steps of the mode until.", at_least=1)
    below: float = option(
        -20.0, "Mean log-prob of a logged call up to its tool's name, in nats, below which auto warms up.", at_most=0
    )


@table("train.optimiser")
class OptimiserConfig:
    """Steps and how they are taken."""

    steps: int = option(200, "Optimiser steps of the run.", at_least=1)
    lr: float = option(2e-5, "Learning rate after the warm-up.", above=0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "How the learning rate falls after that.")
    warmup: int = option(0, "Steps over which the learning rate rises from 0.", at_least=0)
    accumulation: int = option(1, "Micro-batches whose gradients make one step.", at_least=1)
    per_device: int = option(1, "Sessions, or rollouts, of one micro-batch on one device.", at_least=1)
    weight_decay: float = option(0.0, "Decay of the weights per step, as a share of the learning rate.", at_least=0)
    max_grad_norm: float = option(1.0, "Norm to which larger gradients are cut.", above=0)
    seed: int = option(0, "Start of every random number of the run.", at_least=0)
    bf16: bool = option(False, "Compute in bfloat16 where that is safe.")
    checkpointing: bool = option(False, "Compute activations again in the backward pass rather than keep them.")

    def _check(self) -> None:
        if self.warmup >= self.steps:
            expected = f"less than train.optimiser.steps, {self.steps}"
            raise ConfigError(explain("train.optimiser.warmup", got=self.warmup, expected=expected))


@table("train.save")
class SaveConfig:
    """Checkpoints."""

    every: int = option(50, "Steps between two checkpoints.", at_least=1)
    keep: int = option(2, "Checkpoints that stay on the disk, the best one aside.", at_least=1)
