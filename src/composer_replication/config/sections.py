"""The tables [ingest], [sites], [replay], [pairs], [run], [render], [split], [loss] and [evaluation]."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain


@table("ingest")
class IngestConfig:
    """Which logs to read, and how."""

    paths: tuple[str, ...] = option((), "Log files or folders; ~/.claude/projects has the logs of all projects.")
    exclude: tuple[str, ...] = option(
        (), "Patterns of files to skip, by path, name or folder, with the syntax of a .crfignore file."
    )
    follow_links: bool = option(False, "Follow symbolic links that lead out of the paths.")
    tools: str | None = option(None, "File with a JSON list of tool schemas; unset infers them from the calls.")
    workers: int | None = option(
        None, "Processes; unset is one per MiB of logs, at most one per core and 8.", at_least=1
    )
    kingfisher: bool = option(False, "Also redact secrets with kingfisher's rules (needs the extra `privacy`).")
    people: bool = option(False, "Also redact e-mail addresses, phone numbers, and names next to them.")


@table("sites")
class SitesConfig:
    """Which errors to train on."""

    min_confidence: float = option(0.5, "Lowest confidence of a site that is kept for training.", at_least=0, at_most=1)
    writer: str | None = option(
        None, "File of teachers with prices, the first of which writes the hints; unset uses only templates."
    )
    max_usd: float = option(5.0, "Spending cap for written hints in US dollars, for all restarts together.", at_least=0)


@table("replay")
class ReplayConfig:
    """Which teachers to ask about which states, and the spending cap."""

    teachers: str | None = option(None, "File of teachers with prices; `crf teachers -o FILE` writes one.")
    max_usd: float = option(5.0, "Spending cap in US dollars, for all restarts together.", at_least=0)
    states: Literal["all", "failed", "sites"] = option(
        "sites", "Ask about states before error sites (sites), before failed or refused calls (failed), or about all."
    )
    limit: int | None = option(None, "Number of these states to ask about, the first ones; unset is all.", at_least=1)
    gate: Literal["exact", "agree", "none"] = option(
        "exact", "Skip teachers once no vote can change the pair (exact), if the first agrees (agree), or never."
    )
    threshold: int = option(2, "Equal answers that make a consensus.", at_least=1)
    order: Literal["longest_first", "in_order"] = option(
        "longest_first", "Ask about a session's longest state first, then about the rest; or in order, which is slower."
    )
    concurrency: int = option(64, "Number of concurrent requests.", at_least=1)
    max_tokens: int = option(1024, "Maximum length of an answer in tokens.", at_least=1)
    max_history_tokens: int | None = option(
        None, "Approximate maximum of history tokens to send; the oldest turns are dropped first.", at_least=1
    )
    timeout_s: float = option(120.0, "Timeout for an answer in seconds.", above=0)
    send_tools: bool = option(True, "Send the schemas of the session's tools.")


@table("pairs")
class PairsConfig:
    """Which answers become preference pairs."""

    threshold: int | None = option(None, "Equal answers that make a consensus; unset is replay.threshold.", at_least=1)
    where_it_worked: bool = option(False, "Also make pairs whose rejected action succeeded.")
    thinking: bool = option(False, "Keep thinking in the chosen and rejected texts.")
    words: bool = option(True, "Keep the text next to calls; false makes pairs of calls only.")
    corrections: bool = option(
        True, "Also make pairs from calls that the session corrected, and as many from calls that succeeded at once."
    )
    recipe: str | None = option(None, "File with filters as a data-juicer recipe; unset is the built-in recipe.")
    filters: Literal["native", "data_juicer", "none"] = option(
        "native", "Filter pairs here (native), with data-juicer (needs the extra `replaysim`), or not at all."
    )


@table("run")
class RunConfig:
    """Options of `crf run`, which runs all steps."""

    control: bool = option(
        False, "Also train the control (train.control), which shows what any training would have changed."
    )
    shuffles: int = option(
        1,
        "Number of controls, each with its own shuffle; from three on, the control's interval includes the "
        "variation between shuffles.",
        at_least=1,
    )
    fewest: int = option(10, "Train only with at least this many error sites and pairs; 0 always trains.", at_least=0)
    without_verdict: bool = option(
        False, "Train even if too few held-out sessions have errors to tell afterwards whether training helped."
    )


# How conversations become text for the model, and which of them are held out.

# Arguments that `apply_chat_template` sets for each conversation or defines itself.
_RESERVED_VARIABLES = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"),
    *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)


@table("render")
class RenderConfig:
    """The chat template and its variables, and the use of thinking."""

    chat_template: str | None = option(None, "File with a Jinja chat template; unset is the tokenizer's own template.")
    template_variables: dict[str, object] = option(
        {}, "Variables of the chat template by name, such as enable_thinking = false."
    )
    student_models: tuple[str, ...] = option(
        (), "Names in logs of the model to be trained, or patterns such as Qwen/Qwen3-*; * matches every turn."
    )
    own_thinking: Literal["target", "context", "left_out"] = option(
        "target", "Thinking in the student's own turns: trained on (target), only shown (context), or left out."
    )
    other_thinking: Literal["target", "context", "left_out"] = option(
        "left_out", "Thinking in other models' turns: trained on (target), only shown (context), or left out."
    )

    def _check(self) -> None:
        for name in self.template_variables:
            if not name.isidentifier() or name in _RESERVED_VARIABLES:
                expected = f"a variable of the chat template, other than {', '.join(_RESERVED_VARIABLES)}"
                raise ConfigError(explain("key of render.template_variables", got=repr(name), expected=expected))


@table("split")
class SplitConfig:
    """Fractions of the sessions; all conversations of a session stay in one split."""

    by: Literal["time", "project"] = option(
        "time", "Hold out the newest sessions (time), or whole projects by their working folder (project)."
    )
    validation: float = option(
        0.1,
        "Fraction of sessions for evaluations during training; without such evaluations they are trained on.",
        at_least=0,
        below=1,
    )
    test: float | None = option(
        None,
        "Fraction of sessions that training never sees; unset is 0.2 in `crf split`, and 0 without a split.",
        at_least=0,
        below=1,
    )


@table("loss")
class LossConfig:
    """The three channels of total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo."""

    alpha_sdpo: float = option(0.1, "Weight of channel 2, self-distillation; 0 turns it off.", at_least=0)
    beta_replay: float = option(0.05, "Weight of channel 3, preferences from replay; 0 turns it off.", at_least=0)
    sdpo_jsd_beta: float = option(
        0.5,
        "Mixture of the Jensen-Shannon divergence: 0 is KL(teacher‖student), 1 is KL(student‖teacher).",
        at_least=0,
        at_most=1,
    )
    sdpo_temperature: float = option(1.0, "Temperature that divides the logits of student and teacher.", above=0)
    sdpo_token_clip: float | None = option(None, "Maximum divergence per token; unset is no limit.", above=0)
    replay_dpo_beta: float = option(0.1, "DPO's beta: higher values stay closer to the reference model.", above=0)
    lm_ce_label_smoothing: float = option(
        0.0, "Share of the target's probability to spread over the vocabulary.", at_least=0, below=1
    )
    dpo_variant: Literal["dpo", "simpo"] = option("dpo", "Preference loss; simpo needs no reference log-probabilities.")
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = option(
        "none", "Divergence to use instead of the plain one; taid ignores sdpo_jsd_beta and sdpo_temperature."
    )
    taid_t: float | None = option(
        None, "Position of TAID's target between student (0) and teacher (1); required for taid.", at_least=0, at_most=1
    )
    simpo_beta: float = option(2.0, "Scale of SimPO's reward, the mean log-probability per token.", above=0)
    simpo_gamma: float = option(1.0, "Target margin of SimPO's reward between chosen and rejected.", at_least=0)
    entropy_opd_h_max: float | None = option(
        None, "Teacher entropy in nats that counts as fully uncertain; unset is log(vocabulary size).", above=0
    )

    def _check(self) -> None:
        if self.sdpo_wrapper == "taid" and self.taid_t is None:
            raise ConfigError(
                explain('loss.taid_t with loss.sdpo_wrapper = "taid"', got="none", expected="a float in [0, 1]")
            )


# [evaluation] has the options of `crf evaluate`.

Primary = Literal["forced_gap", "forced_correction", "forced_erring", "sampled_failures"]


@table("evaluation")
class EvaluationConfig:
    """The comparison of the models before and after training on held-out sessions."""

    primary: Primary = option(
        "forced_gap", "Primary result: chosen before training, it decides the verdict; all others are exploratory."
    )
    context: int = option(8192, "Maximum number of context tokens before a decision.", at_least=16)
    good_calls: int = option(4, "Number of good calls of a session to compare each of its errors with.", at_least=1)
    samples: int = option(4, "Actions to sample from each model per held-out state; 0 samples none.", at_least=0)
    states: int = option(
        40, "Held-out states of each kind (before an error, before a good call) to sample at, at most.", at_least=1
    )
    new_tokens: int = option(192, "Maximum length of a sampled action in tokens.", at_least=1)
    temperature: float = option(0.7, "Sampling temperature; 0 is greedy decoding.", at_least=0)
    sampler: Literal["auto", "transformers", "vllm"] = option(
        "auto", "Library that samples actions; auto is vLLM if it is installed, has a GPU and can load the adapters."
    )
    good_turns: int = option(100, "Good held-out turns to measure the loss on, at most; 0 is none.", at_least=0)
    token_gaps: int = option(
        200, "Error sites, held out or not, to store the teacher-student gap per token for, at most.", at_least=0
    )
    gsm8k: str | None = option(
        None, "JSONL file of questions and answers in GSM8K's format for each model to answer; unset is none."
    )
    code: str | None = option(
        None, "JSONL file of prompts and code solutions to measure the loss on, without running them; unset is none."
    )
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "Precision of the weights; auto is bfloat16 on a GPU that supports it, otherwise float32."
    )
    fewest_sessions: int = option(
        5, "Held-out sessions with errors below which the verdict is that there is too little data.", at_least=2
    )
    seed: int = option(0, "Seed for sampling and for the bootstrap.", at_least=0)

    def _check(self) -> None:
        if self.primary == "sampled_failures" and not self.samples:
            expected = "1 or more, since evaluation.primary is sampled_failures"
            raise ConfigError(explain("evaluation.samples", got=0, expected=expected))
