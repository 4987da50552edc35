"""The [train] table and its subtables: the options of `crf train`. The weights of the channels are in [loss]."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from composer_replication.config.schema import option, section, table
from composer_replication.errors import ConfigError, explain

LONGEST_WINDOW = 32768
"""Maximum window if neither the config nor the model sets a limit."""
_LONGEST_OVERLAP = 2048


@table("train.adapter")
class AdapterConfig:
    """Which weights to train."""

    kind: Literal["none", "lora", "qlora"] = option(
        "lora", "Train all weights (none), an adapter (lora), or an adapter on weights in 4 bits (qlora)."
    )
    rank: int = option(16, "Rank of the adapter's matrices.", at_least=1)
    alpha: float = option(32.0, "The adapter's output is scaled by alpha / rank.", above=0)
    dropout: float = option(0.0, "Dropout on the adapter's input during training.", at_least=0, below=1)
    targets: tuple[str, ...] = option(
        ("all-linear",), "Names of the modules with an adapter; all-linear is every linear layer except the head."
    )
    token_rows: tuple[str, ...] = option(
        ("auto",),
        "Tokens whose embedding and head rows are also trained; auto takes the template's tokens that are untrained.",
    )

    def _check(self) -> None:
        if self.kind != "none" and not self.targets:
            raise ConfigError(explain("train.adapter.targets", got=list(self.targets), expected="at least one name"))
        if "auto" in self.token_rows and len(self.token_rows) > 1:
            expected = "only auto, or names of tokens"
            raise ConfigError(explain("train.adapter.token_rows", got=list(self.token_rows), expected=expected))
        if self.kind == "none" and self.token_rows not in ((), ("auto",)):
            fix = "Omit it: without an adapter all rows are trained."
            got = list(self.token_rows)
            raise ConfigError(explain("train.adapter.token_rows", got=got, expected="an adapter", fix=fix))


@table("train.teacher")
class _TeacherConfig:
    """The hinted teacher of channel 2."""

    kind: Literal["live", "frozen", "ema", "trust_region"] = option(
        "live",
        "Weights of the hinted teacher: the student (live), the initial model (frozen), an average, or a trust region.",
    )
    ema_rate: float = option(0.05, "Share of the student that enters the average after each step.", above=0, below=1)
    live_share: float = option(0.01, "Share of the student's own logits in the trust region.", above=0, below=1)


@table("train.channels")
class _TrainedTurnsConfig:
    """Which turns to train on, and how weights from [loss] change over the run."""

    anneal: Literal["none", "linear"] = option("none", "How loss.alpha_sdpo changes over the run.")
    anneal_end: float = option(
        0.0, "Share of loss.alpha_sdpo that remains at the last step of an annealed run.", at_least=0, at_most=1
    )
    is_clip: float | None = option(
        None, "Maximum importance weight (p now / p when sampled) of a rollout's token; unset is 1 for all.", above=0
    )
    good_turns: bool = option(True, "In mode offline, also train on turns without an error.")
    good_turns_after_warmup: bool = option(
        True, "Keep training on them after a warm-up; false then uses only windows with an error or a pair."
    )
    logged_sites: bool = option(True, "In mode grpo, also train on the error sites of the run directory.")
    work_failures: bool = option(
        False, "Count turns whose call failed as part of the work, such as failing tests, as good turns."
    )
    taid_end: float = option(1.0, "Final value of TAID's t; loss.taid_t is the first.", at_least=0, at_most=1)
    taid_rate: float = option(5e-4, "How fast TAID's target moves while the loss falls.", at_least=0, at_most=1)
    taid_momentum: float = option(0.99, "Momentum of TAID's estimate of the loss's fall.", at_least=0, at_most=1)


@table("train.switches")
class _SwitchesConfig:
    """Weights of the rows of channel 2, and the contrast with an unrelated hint; off by default."""

    sigmoid_gate_tau: float | None = option(
        None,
        "Width of a sigmoid gate that favors tokens the teacher finds less likely than the student; unset is off.",
        above=0,
    )
    teacher_entropy: bool = option(False, "Give rows a lower weight the less certain the teacher is.")
    position_decay: float | None = option(
        None, "Factor between the weights of consecutive rows of a turn; unset is off.", above=0, at_most=1
    )
    contrast: float | None = option(
        None, "Strength of the contrast: how much of an unrelated hint's effect is subtracted; unset is off.", above=0
    )
    normalise: bool = option(True, "Scale the rows' weights to a mean of 1.")


@table("train.batch")
class _BatchConfig:
    """How logged sessions become batches."""

    budget: int | None = option(
        None,
        "Maximum number of positions in a window; unset is the model's context length, at most 32,768.",
        at_least=16,
    )
    overlap: int | None = option(
        None, "Positions shared by consecutive windows; unset is an eighth of a window, at most 2,048.", at_least=0
    )
    placement: Literal["before_turn", "in_last_message", "head"] = option(
        "before_turn", "Where to insert a hint: before the erring turn, in the last message before it, or at the start."
    )
    part: Literal["turn", "call"] = option("turn", "Part of an erring turn to train on: all of it, or only its calls.")

    @property
    def window(self) -> tuple[int, int]:
        """The window's number of positions and the overlap, with defaults for a model of unknown context length."""
        budget = LONGEST_WINDOW if self.budget is None else self.budget
        return budget, min(_LONGEST_OVERLAP, budget // 8) if self.overlap is None else self.overlap

    def fit_to_context(self, context_length: int | None) -> _BatchConfig:
        """Return a copy with both values set, for a model with this context length (None if unknown)."""
        budget = self.budget or min(context_length or LONGEST_WINDOW, LONGEST_WINDOW)
        _, overlap = replace(self, budget=budget).window
        return replace(self, budget=budget, overlap=overlap)

    def _check(self) -> None:
        budget, overlap = self.window
        if overlap >= budget:
            fix = f"Set train.batch.overlap = {budget // 8}, for example, or increase train.batch.budget."
            expected = f"less than train.batch.budget, {budget}"
            raise ConfigError(explain("train.batch.overlap", got=overlap, expected=expected, fix=fix))


@table("train.proof")
class _HintCheckConfig:
    """Whether hints must prove their effect before training."""

    on: bool = option(
        True, "Score every erring turn with no hint, its own and an unrelated one, and drop hints without effect."
    )
    margin: float = option(
        0.0,
        "Nats/token by which a hint must lower its erring turn more than an unrelated hint, and more than good calls.",
        at_least=0,
    )


@table("train.warmup")
class _WarmupConfig:
    """Training on channel 1 only, before the hint check, for a model that does not know the logs' tools."""

    mode: Literal["auto", "off", "steps", "until"] = option(
        "auto",
        "Warm up if the model hardly knows the logs' tools (auto), never, for some steps, or until the loss stalls.",
    )
    steps: int = option(
        150, "Warm-up steps in the modes auto and steps; train.optimiser.steps follow them.", at_least=1
    )
    every: int = option(25, "Steps between evaluations on held-out good turns, in mode until.", at_least=1)
    patience: int = option(2, "Number of evaluations without a lower held-out loss that ends mode until.", at_least=1)
    most: int = option(1000, "Maximum number of steps in mode until.", at_least=1)
    below: float = option(
        -20.0,
        "Mode auto warms up if logged calls, up to the tool's name, have a lower mean log-prob (nats).",
        at_most=0,
    )
    hinted_corrections: bool = option(
        False, "Also train on the successful call that followed an error, in the context with the hint."
    )


@table("train.fsdp")
class _FsdpConfig:
    """Sharding of weights, gradients and optimizer states across processes (FSDP2)."""

    on: bool = option(
        False, "Shard the weights across the processes of torchrun (FSDP2) instead of replicating them (DDP)."
    )


@table("train.optimiser")
class _OptimiserConfig:
    """The optimizer and its schedule."""

    steps: int = option(200, "Number of optimizer steps.", at_least=1)
    lr: float = option(2e-5, "Learning rate after its warm-up.", above=0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "Learning-rate schedule after its warm-up.")
    warmup: int = option(0, "Number of steps over which the learning rate rises from 0.", at_least=0)
    accumulation: int = option(1, "Number of micro-batches per step (gradient accumulation).", at_least=1)
    per_device: int = option(1, "Number of sessions or rollouts per micro-batch and device.", at_least=1)
    weight_decay: float = option(0.0, "Weight decay per step, as a share of the learning rate.", at_least=0)
    max_grad_norm: float = option(1.0, "Maximum norm of the gradient; larger ones are clipped.", above=0)
    seed: int = option(0, "Random seed of the run.", at_least=0)
    bf16: bool = option(False, "Compute in bfloat16 where that is safe.")
    checkpointing: bool = option(False, "Recompute activations in the backward pass (gradient checkpointing).")

    def _check(self) -> None:
        if self.warmup >= self.steps:
            expected = f"less than train.optimiser.steps, {self.steps}"
            raise ConfigError(explain("train.optimiser.warmup", got=self.warmup, expected=expected))


@table("train.save")
class _SaveConfig:
    """Checkpoints."""

    every: int = option(50, "Steps between checkpoints.", at_least=1)
    keep: int = option(2, "Number of checkpoints to keep, not counting the best one.", at_least=1)


@table("train.alarm")
class AlarmConfig:
    """When a run counts as collapsed; most limits are multiples of the metric's own baseline."""

    on: bool = option(True, "Watch the metrics and keep the best checkpoint.")
    stop: bool = option(False, "Stop the run at the first alarm.")
    window: int = option(10, "Number of values in the baseline and in the mean compared with it.", at_least=2)
    patience: int = option(5, "Number of consecutive values beyond the limit that raise an alarm.", at_least=1)
    reward_window: int = option(40, "As window, for the reward of rollouts, which varies by task.", at_least=2)
    eval_window: int = option(3, "As window, for held-out values.", at_least=2)
    eval_patience: int = option(2, "As patience, for held-out values.", at_least=1)
    entropy_floor: float = option(0.2, "Alarm if entropy falls below this share of its baseline.", above=0, below=1)
    length_floor: float = option(0.25, "Alarm if lengths fall below this share of their baseline.", above=0, below=1)
    length_ceiling: float = option(5.0, "Alarm if lengths rise above this multiple of their baseline.", above=1)
    tool_floor: float = option(0.2, "Alarm if tool calls fall below this share of their baseline.", above=0, below=1)
    kl_ceiling: float = option(1.0, "Alarm if the KL to the initial model exceeds this, in nats/token.", above=0)
    error_ceiling: float = option(2.0, "Alarm if the error rate rises above this multiple of its best value.", above=1)
    reward_floor: float = option(
        0.5, "Alarm if the reward, of rollouts or held out, falls below this share of its best value.", above=0, below=1
    )


# [train.grpo] and [train.effort]: the policy gradient, its rollouts, and the effort penalty.


@table("train.grpo")
class GRPOSection:
    """Channel 1 on rollouts (GRPO); the defaults are TRL's, and presets change them."""

    dataset: str | None = option(
        None, "Prompts: a file, a folder, a name on the hub or module:function; unset for an environment of verifiers."
    )
    rewards: tuple[str, ...] = option((), "Reward functions, each as module:function.")
    environment: str | None = option(
        None,
        "Environment: module:callable that creates environments with tools, the address of an OpenEnv server, "
        "or verifiers:ID for an environment of verifiers.",
    )
    rollouts: str | None = option(
        None, "Rollout function to use instead of TRL's loop, as module:callable; it gets the prompts and the trainer."
    )
    error_penalty: float = option(
        0.0, "Penalty on the reward for each failed call that is the model's error.", at_least=0
    )
    hints: Literal["template", "raw_error", "other_kind"] = option(
        "template",
        "Hint about an error in a rollout: from a template, the error's own text, or an unrelated hint (other_kind).",
    )
    unhinted_kinds: tuple[str, ...] = option((), "Kinds of errors in rollouts that get no hint.")
    heed_gate: bool = option(
        False, "Keep channel 2 off on rollouts until hints affect erring turns far more than unrelated hints do."
    )
    num_generations: int = option(8, "Number of rollouts per prompt, which form a group.", at_least=2)
    max_completion_length: int = option(512, "Maximum length of a rollout in tokens.", at_least=1)
    temperature: float = option(1.0, "Sampling temperature.", above=0)
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = option(
        "dapo", "Reduction of the loss over positions, by TRL's name."
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "Standard deviation that divides the advantages: that of the group, of the batch, or none."
    )
    num_iterations: int = option(1, "Number of times to train on each batch of rollouts.", at_least=1)
    reference_kl: float = option(0.0, "Weight of TRL's KL term towards the initial model.", at_least=0)
    k1_coefficient: float = option(
        0.0, "Weight of log(policy / initial model), subtracted from the advantage without a gradient.", at_least=0
    )
    epsilon: float = option(0.2, "Clipping of the probability ratio below 1.", above=0)
    epsilon_high: float = option(0.2, "Clipping of the probability ratio above 1.", above=0)
    mask_truncated: bool = option(False, "Exclude truncated rollouts from the loss.")
    soft_overlong: float = option(
        0.0,
        "Last share of the maximum length over which a growing penalty applies; 0 applies none.",
        at_least=0,
        at_most=1,
    )
    dynamic_sampling: bool = option(False, "Resample groups whose rewards are all equal.")
    max_resamples: int = option(2, "Maximum number of times to resample such a group.", at_least=1)
    use_vllm: bool = option(False, "Generate with vLLM.")
    vllm_mode: Literal["colocate", "server"] = option(
        "colocate", "Where vLLM runs: on the GPUs of the training, or as a separate server."
    )
    vllm_server_url: str | None = option(None, "Address of the vLLM server; unset is TRL's default, port 8000 here.")
    vllm_memory: float = option(0.3, "Share of GPU memory for vLLM in mode colocate.", above=0, at_most=1)
    fast_generation: Literal["auto", "off"] = option(
        "auto", "Without vLLM, encode shared prefixes once and keep the cache between turns, if the model allows it."
    )
    generation_batch: int | None = option(
        None,
        "Maximum number of rollouts to sample at once, which limits the key-value cache; unset is all.",
        at_least=1,
    )

    def _check(self) -> None:
        address = (self.environment or "").partition("://")[2]
        if "@" in address.partition("/")[0]:  # it would end up in every record of the run
            fix = "Set the environment variable CRF_OPENENV_LOGIN to user:password."
            expected = "an address without a login"
            raise ConfigError(
                explain("train.grpo.environment", got="an address with a login", expected=expected, fix=fix)
            )


@table("train.effort")
class _EffortConfig:
    """The effort penalty of a rollout; each price is the reduction of the reward for the first unit."""

    on: bool = option(False, "Add the effort penalty to the rewards.")
    k: float = option(1.0, "How soon further effort costs less than the first unit.", at_least=0)
    q: float = option(1.0, "How fast the cost of further effort falls: 0 not at all, 1 as a logarithm.", at_least=0)
    thinking: float = option(1e-4, "Price of a token of thinking.", at_least=0)
    calls_text: float = option(1e-4, "Price of a token of a call's name and arguments.", at_least=0)
    tool_output: float = option(1e-5, "Price of a token of tool output.", at_least=0)
    final: float = option(1e-4, "Price of a token of text for the user.", at_least=0)
    calls: float = option(1e-3, "Price of a call.", at_least=0)
    turns: float = option(1e-3, "Price of a turn.", at_least=0)


@table("train")
class TrainConfig:
    """Options of a training run."""

    model: str | None = option(
        None, "Initial model: a folder, a name on the hub, or `student` (the package's tiny model)."
    )
    run: str | None = option(None, "Run directory with the sessions, sites and pairs to train on.")
    output: str | None = option(
        None, "Folder for checkpoints, metrics and trained weights; unset is the run directory."
    )
    mode: Literal["offline", "grpo"] = option(
        "offline", "Train on logged sessions only (offline), or on rollouts in an environment (grpo)."
    )
    control: Literal["none", "shuffled"] = option(
        "none", "Train a control in the folder control/, with unrelated hints and half of the pairs swapped (shuffled)."
    )
    shuffle: int = option(
        1,
        "Number of the control's shuffle, the seed for its hints and pairs; from 2 on the folder is control/NUMBER.",
        at_least=1,
    )
    preset: Literal["composer", "dapo", "none"] = option(
        "composer", "Recommended settings for options that neither the file nor an override sets."
    )
    resume: bool = option(True, "Resume from the newest complete checkpoint in the output folder, if there is one.")
    report_to: Literal["none", "trackio", "wandb"] = option(
        "none", "Tracker for metrics, in addition to metrics.jsonl, which is always written."
    )
    log_every: int = option(1, "Steps between lines of metrics.", at_least=1)
    eval_every: int = option(0, "Steps between evaluations on held-out data; 0 runs none.", at_least=0)
    diagnose_every: int = option(50, "Steps between diagnoses of why the run may not learn.", at_least=1)
    adapter: AdapterConfig = section(AdapterConfig, "Which weights to train.")
    teacher: _TeacherConfig = section(_TeacherConfig, "The hinted teacher of channel 2.")
    channels: _TrainedTurnsConfig = section(
        _TrainedTurnsConfig, "Which turns to train on, and how weights from [loss] change over the run."
    )
    switches: _SwitchesConfig = section(_SwitchesConfig, "Weights of the rows of channel 2.")
    batch: _BatchConfig = section(_BatchConfig, "How logged sessions become batches.")
    warmup: _WarmupConfig = section(_WarmupConfig, "Training on channel 1 only, before the hint check.")
    proof: _HintCheckConfig = section(_HintCheckConfig, "Whether hints must prove their effect before training.")
    optimiser: _OptimiserConfig = section(_OptimiserConfig, "The optimizer and its schedule.")
    fsdp: _FsdpConfig = section(_FsdpConfig, "Sharding of the weights across processes.")
    save: _SaveConfig = section(_SaveConfig, "Checkpoints.")
    alarm: AlarmConfig = section(AlarmConfig, "When a run counts as collapsed.")
    grpo: GRPOSection = section(GRPOSection, "Policy gradient and rollouts of mode grpo.")
    effort: _EffortConfig = section(_EffortConfig, "The effort penalty of a rollout.")

    def required_model(self) -> str:
        """The initial model. Raises ConfigError if it is not set, since no training works without it."""
        if self.model is None:
            fix = "Pass `--set train.model=NAME`, or set model below [train] in the config file."
            raise ConfigError(
                explain("train.model", got="none", expected="a folder with weights or a name on the hub", fix=fix)
            )
        return self.model
