"""[train.grpo] and [train.effort]: the policy gradient, how its rollouts are made, and what effort in them costs."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain


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
