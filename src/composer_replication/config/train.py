"""The [train] table: what `crf train` is told, and its tables about rollouts, effort and alarms.

Weights and shapes of the channels stand in [loss].
"""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, section, table
from composer_replication.config.train_sections import (
    AdapterConfig,
    BatchConfig,
    ChannelsConfig,
    OptimiserConfig,
    ProofConfig,
    SaveConfig,
    SwitchesConfig,
    TeacherConfig,
    WarmupConfig,
)


@table("train.grpo")
class GRPOSection:
    """Channel 1 with an environment; the defaults are TRL's, presets change them."""

    dataset: str | None = option(None, "Prompts: a folder or file of records, or a name on the hub.")
    rewards: tuple[str, ...] = option((), "Reward functions, each as module:function.")
    environment: str | None = option(None, "Maker of environments with tools, as module:callable.")
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


@table("train.effort")
class EffortConfig:
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


@table("train.alarm")
class AlarmConfig:
    """When a run is told to have collapsed; a floor or ceiling is a multiple of the metric's own baseline."""

    on: bool = option(True, "Watch the metrics and keep the best checkpoint.")
    stop: bool = option(False, "End the run at the first alarm.")
    window: int = option(10, "Logged values that make a baseline, and the latest mean held against it.", at_least=2)
    patience: int = option(5, "Values in a row that must be beyond the limit.", at_least=1)
    eval_window: int = option(3, "As window, for values of the held-out set.", at_least=2)
    eval_patience: int = option(2, "As patience, for values of the held-out set.", at_least=1)
    entropy_floor: float = option(0.2, "Lowest share of its start that entropy may fall to.", above=0, below=1)
    length_floor: float = option(0.25, "Lowest share of their start that lengths may fall to.", above=0, below=1)
    length_ceiling: float = option(5.0, "Highest multiple of their start that lengths may rise to.", above=1)
    tool_floor: float = option(0.2, "Lowest share of their start that tool calls may fall to.", above=0, below=1)
    kl_ceiling: float = option(1.0, "Highest divergence from the start weights, in nats a word piece.", above=0)
    error_ceiling: float = option(2.0, "Highest multiple of its best that the error rate may rise to.", above=1)
    reward_floor: float = option(
        0.5, "Lowest share of its best that the held-out reward may fall to.", above=0, below=1
    )


@table("train")
class TrainConfig:
    """One training run."""

    model: str | None = option(None, "Folder or hub name of the start weights; training needs it.")
    run: str | None = option(None, "Run directory with the sessions, sites and pairs to learn from.")
    output: str | None = option(
        None, "Folder of checkpoints, metrics and what was trained; unset is the run directory."
    )
    mode: Literal["offline", "grpo"] = option(
        "offline", "Learn from logged sessions alone (offline), or from rollouts in an environment (grpo)."
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
    teacher: TeacherConfig = section(TeacherConfig, "Who teaches channel 2.")
    channels: ChannelsConfig = section(ChannelsConfig, "What changes over a run of the channels that [loss] weighs.")
    switches: SwitchesConfig = section(SwitchesConfig, "How much each row of channel 2 counts.")
    batch: BatchConfig = section(BatchConfig, "How logged sessions become batches.")
    warmup: WarmupConfig = section(WarmupConfig, "Channel 1 alone before hints are proved.")
    proof: ProofConfig = section(ProofConfig, "Whether a hint has to show that it does something.")
    optimiser: OptimiserConfig = section(OptimiserConfig, "Steps and how they are taken.")
    save: SaveConfig = section(SaveConfig, "Checkpoints.")
    alarm: AlarmConfig = section(AlarmConfig, "When a run is told to have collapsed.")
    grpo: GRPOSection = section(GRPOSection, "The policy gradient of mode grpo.")
    effort: EffortConfig = section(EffortConfig, "What a rollout's effort costs.")
