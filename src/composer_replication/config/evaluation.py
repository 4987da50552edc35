"""[evaluation]: what `crf evaluate` measures on held-out sessions, and which of its figures was named beforehand."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain

Primary = Literal["forced_gap", "forced_correction", "forced_erring", "sampled_failures"]


@table("evaluation")
class EvaluationConfig:
    """Before against after, on sessions that nothing was learnt from."""

    primary: Primary = option(
        "forced_gap", "The figure that the verdict is about, named before training; all others are exploratory."
    )
    context: int = option(8192, "Most tokens before a decision that the models read.", at_least=16)
    good_calls: int = option(4, "Good calls of the same session that each error is compared with.", at_least=1)
    samples: int = option(4, "Actions that each model draws at a held-out state; 0 draws none.", at_least=0)
    states: int = option(
        40, "Most held-out states of each sort (before an error, before a good call) to draw actions at.", at_least=1
    )
    new_tokens: int = option(192, "Most tokens of a drawn action.", at_least=1)
    temperature: float = option(0.7, "Temperature at which actions are drawn; 0 takes the likeliest token.", at_least=0)
    sampler: Literal["auto", "transformers", "vllm"] = option(
        "auto", "What draws actions; auto is vLLM where it is installed beside a GPU and can load the adapters."
    )
    good_turns: int = option(100, "Most good turns of held-out sessions whose loss is measured; 0 is none.", at_least=0)
    token_gaps: int = option(
        200, "Most error sites, held out or not, whose teacher-student gap is kept for each token.", at_least=0
    )
    gsm8k: str | None = option(
        None, "JSONL file of questions and answers as GSM8K has them, answered by each model; unset is none."
    )
    code: str | None = option(
        None,
        "JSONL file of prompts and solutions in code, whose loss is measured; nothing of it is run; unset is none.",
    )
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "What weights are loaded in; auto is bfloat16 on a GPU that computes in it, else float32."
    )
    fewest_sessions: int = option(
        5, "With errors in fewer held-out sessions than this the verdict is that the data is too thin.", at_least=2
    )
    seed: int = option(0, "Number that draws of actions and of the bootstrap begin from.", at_least=0)

    def _check(self) -> None:
        if self.primary == "sampled_failures" and not self.samples:
            expected = "some, as evaluation.primary is sampled_failures"
            raise ConfigError(explain("evaluation.samples", got=0, expected=expected))
