"""The [train] table and the tables below it: what `crf train` is told. Weights of the channels stand in [loss]."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from composer_replication.config.schema import option, section, table
from composer_replication.errors import ConfigError, explain

LONGEST_WINDOW = 32768
"""Positions of a window where neither the config nor the model says less."""
_LONGEST_OVERLAP = 2048


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
    token_rows: tuple[str, ...] = option(
        ("auto",),
        "Tokens whose rows of embedding and head are trained too; auto takes the template's own that never were.",
    )

    def _check(self) -> None:
        if self.kind != "none" and not self.targets:
            raise ConfigError(explain("train.adapter.targets", got=list(self.targets), expected="at least one name"))
        if "auto" in self.token_rows and len(self.token_rows) > 1:
            expected = "auto alone, or tokens by their names"
            raise ConfigError(explain("train.adapter.token_rows", got=list(self.token_rows), expected=expected))
        if self.kind == "none" and self.token_rows not in ((), ("auto",)):
            fix = "Leave it out: without an adapter every row is trained."
            got = list(self.token_rows)
            raise ConfigError(explain("train.adapter.token_rows", got=got, expected="an adapter", fix=fix))


@table("train.teacher")
class _TeacherConfig:
    """Who teaches channel 2."""

    kind: Literal["live", "frozen", "ema", "trust_region"] = option(
        "live",
        "The student itself, the start weights, an average of the student's, or start weights with a live share.",
    )
    ema_rate: float = option(0.05, "Share of the student that enters the average after each step.", above=0, below=1)
    live_share: float = option(0.01, "Share of the student's own logits in a trust region.", above=0, below=1)


@table("train.channels")
class _TrainedTurnsConfig:
    """What changes over a run of the channels that [loss] weighs."""

    anneal: Literal["none", "linear"] = option("none", "How the weight loss.alpha_sdpo changes over the run.")
    anneal_end: float = option(
        0.0, "Share of loss.alpha_sdpo that is left at the last step of an annealed run.", at_least=0, at_most=1
    )
    is_clip: float | None = option(
        None, "Largest weight of a rollout's token, p now / p when it was sampled; unset weighs all alike.", above=0
    )
    good_turns: bool = option(True, "Without an environment, also train on the turns that made no error.")
    good_turns_after_warmup: bool = option(
        True, "Train on them after a warm-up too; without, its steps see only windows with an error or a pair."
    )
    logged_sites: bool = option(True, "With rollouts, also teach the error sites of the run directory.")
    work_failures: bool = option(
        False, "Count turns whose call failed as part of the work, such as failing tests, among the good ones."
    )
    taid_end: float = option(1.0, "Where TAID's target ends; it starts at loss.taid_t.", at_least=0, at_most=1)
    taid_rate: float = option(5e-4, "How fast TAID's target moves while the loss falls.", at_least=0, at_most=1)
    taid_momentum: float = option(0.99, "How long TAID remembers falls of the loss.", at_least=0, at_most=1)


@table("train.switches")
class _SwitchesConfig:
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
class _BatchConfig:
    """How logged sessions become batches."""

    budget: int | None = option(
        None,
        "Most positions of a window; unset is as many as the model has learnt, at most 32,768.",
        at_least=16,
    )
    overlap: int | None = option(
        None, "Positions that a window repeats of the one before it; unset is an eighth, at most 2,048.", at_least=0
    )
    placement: Literal["before_turn", "in_last_message", "head"] = option(
        "before_turn", "Where a hint stands: before the erring turn, in the last message before it, or at the head."
    )
    part: Literal["turn", "call"] = option("turn", "What of an erring turn is taught: all of it, or its calls alone.")

    @property
    def window(self) -> tuple[int, int]:
        """Budget and overlap; for a model of which nobody knows how long its contexts may be, where none is set."""
        budget = LONGEST_WINDOW if self.budget is None else self.budget
        return budget, min(_LONGEST_OVERLAP, budget // 8) if self.overlap is None else self.overlap

    def fitted(self, learnt: int | None) -> _BatchConfig:
        """With both set, for a model that has learnt contexts of so many positions."""
        budget = self.budget or min(learnt or LONGEST_WINDOW, LONGEST_WINDOW)
        _, overlap = replace(self, budget=budget).window
        return replace(self, budget=budget, overlap=overlap)

    def _check(self) -> None:
        budget, overlap = self.window
        if overlap >= budget:
            fix = f"Set train.batch.overlap = {budget // 8}, say, or a larger train.batch.budget."
            expected = f"less than train.batch.budget, {budget}"
            raise ConfigError(explain("train.batch.overlap", got=overlap, expected=expected, fix=fix))


@table("train.proof")
class _HintCheckConfig:
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
class _WarmupConfig:
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
    hinted_corrections: bool = option(
        False, "Also learn what worked after an erring turn, in the context with its hint."
    )


@table("train.fsdp")
class _FsdpConfig:
    """Shard weights, gradients and optimiser states across processes (FSDP2)."""

    on: bool = option(
        False, "Spread the weights over the processes of torchrun (FSDP2) instead of keeping all on each (DDP)."
    )


@table("train.optimiser")
class _OptimiserConfig:
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
class _SaveConfig:
    """Checkpoints."""

    every: int = option(50, "Steps between two checkpoints.", at_least=1)
    keep: int = option(2, "Checkpoints that stay on the disk, the best one aside.", at_least=1)


@table("train.alarm")
class AlarmConfig:
    """When a run is told to have collapsed; a floor or ceiling is a multiple of the metric's own baseline."""

    on: bool = option(True, "Watch the metrics and keep the best checkpoint.")
    stop: bool = option(False, "End the run at the first alarm.")
    window: int = option(10, "Logged values that make a baseline, and the latest mean held against it.", at_least=2)
    patience: int = option(5, "Values in a row that must be beyond the limit.", at_least=1)
    reward_window: int = option(40, "As window, for the reward of rollouts: each step has other tasks.", at_least=2)
    eval_window: int = option(3, "As window, for values of the held-out set.", at_least=2)
    eval_patience: int = option(2, "As patience, for values of the held-out set.", at_least=1)
    entropy_floor: float = option(0.2, "Lowest share of its start that entropy may fall to.", above=0, below=1)
    length_floor: float = option(0.25, "Lowest share of their start that lengths may fall to.", above=0, below=1)
    length_ceiling: float = option(5.0, "Highest multiple of their start that lengths may rise to.", above=1)
    tool_floor: float = option(0.2, "Lowest share of their start that tool calls may fall to.", above=0, below=1)
    kl_ceiling: float = option(1.0, "Highest divergence from the start weights, in nats a word piece.", above=0)
    error_ceiling: float = option(2.0, "Highest multiple of its best that the error rate may rise to.", above=1)
    reward_floor: float = option(
        0.5, "Lowest share of its best that the reward, held-out or of rollouts, may fall to.", above=0, below=1
    )


# [train.grpo] and [train.effort]: the policy gradient, how its rollouts are made, and what effort in them costs.


@table("train.grpo")
class GRPOSection:
    """Channel 1 with an environment; the defaults are TRL's, presets change them."""

    dataset: str | None = option(
        None, "Prompts: a folder or file of records, or a name on the hub; unset where the environment is verifiers'."
    )
    rewards: tuple[str, ...] = option((), "Reward functions, each as module:function.")
    environment: str | None = option(
        None,
        "Where rollouts act: a maker of environments with tools as module:callable, the address of an OpenEnv server, "
        "or verifiers:ID for an environment of verifiers.",
    )
    rollouts: str | None = option(
        None, "What makes rollouts in place of TRL's own loop, as module:callable, given the prompts and the trainer."
    )
    error_penalty: float = option(
        0.0, "What each call that failed by the model's doing takes off the reward.", at_least=0
    )
    hints: Literal["template", "raw_error", "other_kind"] = option(
        "template",
        "What a hint about a rollout's error is: a template's words, the error's own, or the hint of another kind.",
    )
    unhinted_kinds: tuple[str, ...] = option((), "Kinds of errors that rollouts give no hint about.")
    heed_gate: bool = option(
        False, "Let channel 2 rest on rollouts until own hints are seen to do far more to erring turns than others."
    )
    num_generations: int = option(8, "Rollouts of one prompt, which form a group.", at_least=2)
    max_completion_length: int = option(512, "Where a rollout is cut off.", at_least=1)
    temperature: float = option(1.0, "Temperature of sampling.", above=0)
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = option(
        "dapo", "How the terms of all positions become one loss, by TRL's name."
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "What a reward's distance from its group's mean is divided by: a standard deviation, or nothing."
    )
    num_iterations: int = option(1, "Times that a batch of rollouts is trained on.", at_least=1)
    reference_kl: float = option(0.0, "Weight of TRL's own divergence from the start weights in the loss.", at_least=0)
    k1_coefficient: float = option(
        0.0, "Weight of log(policy / start weights), taken off the advantage without a gradient.", at_least=0
    )
    epsilon: float = option(0.2, "How far below 1 the ratio of new to old probability may go.", above=0)
    epsilon_high: float = option(0.2, "How far above 1 the ratio of new to old probability may go.", above=0)
    mask_truncated: bool = option(False, "Leave rollouts that were cut off out of the loss.")
    soft_overlong: float = option(
        0.0,
        "Last share of the allowed length over which a growing punishment is given; 0 gives none.",
        at_least=0,
        at_most=1,
    )
    dynamic_sampling: bool = option(False, "Draw groups whose rewards are all equal again.")
    max_resamples: int = option(2, "Times that such a group is drawn again at most.", at_least=1)
    use_vllm: bool = option(False, "Generate with vLLM.")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "Where vLLM runs: on the training's own GPUs, or as a server of its own."
    )
    vllm_server_url: str | None = option(None, "That server's address; unset is TRL's own default, port 8000 here.")
    vllm_memory: float = option(
        0.3, "Share of a GPU's memory that vLLM takes on the training's own GPUs.", above=0, at_most=1
    )
    fast_generation: Literal["auto", "off"] = option(
        "auto", "Without vLLM, read what rollouts share once and keep it between turns, where the model allows it."
    )
    generation_batch: int | None = option(
        None,
        "Most rollouts that are sampled so at once, which bounds the memory of their keys; unset is all.",
        at_least=1,
    )

    def _check(self) -> None:
        address = (self.environment or "").partition("://")[2]
        if "@" in address.partition("/")[0]:  # it would be in every record of a run
            fix = "Put user:password into the environment variable CRF_OPENENV_LOGIN."
            expected = "an address without one"
            raise ConfigError(
                explain("train.grpo.environment", got="an address with a login", expected=expected, fix=fix)
            )


@table("train.effort")
class _EffortConfig:
    """What a rollout's effort costs; each price is what the first unit takes off the reward."""

    on: bool = option(False, "Add the effort penalty to the rewards.")
    k: float = option(1.0, "How soon further effort costs less than the first did.", at_least=0)
    q: float = option(1.0, "How fast the cost of further effort falls: 0 not at all, 1 as a logarithm.", at_least=0)
    thinking: float = option(1e-4, "Price of one piece of thinking.", at_least=0)
    calls_text: float = option(1e-4, "Price of one piece of a call's name and arguments.", at_least=0)
    tool_output: float = option(1e-5, "Price of one piece of what a tool answered.", at_least=0)
    final: float = option(1e-4, "Price of one piece of the text the user reads.", at_least=0)
    calls: float = option(1e-3, "Price of one call.", at_least=0)
    turns: float = option(1e-3, "Price of one turn.", at_least=0)


@table("train")
class TrainConfig:
    """One training run."""

    model: str | None = option(
        None, "Start weights: a folder, a hub name, or `student` (the tiny model of the package)."
    )
    run: str | None = option(None, "Run directory with the sessions, sites and pairs to learn from.")
    output: str | None = option(
        None, "Folder of checkpoints, metrics and what was trained; unset is the run directory."
    )
    mode: Literal["offline", "grpo"] = option(
        "offline", "Learn from logged sessions alone (offline), or from rollouts in an environment (grpo)."
    )
    control: Literal["none", "shuffled"] = option(
        "none",
        "Train a control into the folder control/: hints of other kinds, half of the pairs turned round (shuffled).",
    )
    shuffle: int = option(
        1,
        "Which shuffle a control is: each number draws hints and pairs anew; from 2 on in control/NUMBER.",
        at_least=1,
    )
    preset: Literal["composer", "dapo", "none"] = option(
        "composer", "Settings that hold where neither the file nor an override says otherwise."
    )
    resume: bool = option(True, "Go on from the newest complete checkpoint of the output folder, if there is one.")
    report_to: Literal["none", "trackio", "wandb"] = option(
        "none", "Where metrics go besides the local metrics.jsonl, which is always written."
    )
    log_every: int = option(1, "Steps between two lines of metrics.", at_least=1)
    eval_every: int = option(0, "Steps between two evaluations on the held-out set; 0 makes none.", at_least=0)
    diagnose_every: int = option(50, "Steps between two looks for a reason why the run cannot learn.", at_least=1)
    adapter: AdapterConfig = section(AdapterConfig, "Which weights move.")
    teacher: _TeacherConfig = section(_TeacherConfig, "Who teaches channel 2.")
    channels: _TrainedTurnsConfig = section(
        _TrainedTurnsConfig, "What changes over a run of the channels that [loss] weighs."
    )
    switches: _SwitchesConfig = section(_SwitchesConfig, "How much each row of channel 2 counts.")
    batch: _BatchConfig = section(_BatchConfig, "How logged sessions become batches.")
    warmup: _WarmupConfig = section(_WarmupConfig, "Channel 1 alone before hints are proved.")
    proof: _HintCheckConfig = section(_HintCheckConfig, "Whether a hint has to show that it does something.")
    optimiser: _OptimiserConfig = section(_OptimiserConfig, "Steps and how they are taken.")
    fsdp: _FsdpConfig = section(_FsdpConfig, "Weights sharded across processes.")
    save: _SaveConfig = section(_SaveConfig, "Checkpoints.")
    alarm: AlarmConfig = section(AlarmConfig, "When a run is told to have collapsed.")
    grpo: GRPOSection = section(GRPOSection, "The policy gradient of mode grpo.")
    effort: _EffortConfig = section(_EffortConfig, "What a rollout's effort costs.")

    def required_model(self) -> str:
        """The start weights, which a training cannot do without."""
        if self.model is None:
            fix = "Name one: `--set train.model=NAME`, or model = NAME below [train] of the file."
            raise ConfigError(
                explain("train.model", got="none", expected="a folder with weights, or a name on the hub", fix=fix)
            )
        return self.model
