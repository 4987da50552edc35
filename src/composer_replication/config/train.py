"""The [train] table: what `crf train` is told. Weights and shapes of the channels stand in [loss]."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, section, table
from composer_replication.config.train_grpo import AlarmConfig, EffortConfig, GRPOSection
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
