"""The tables of the steps before training, [ingest], [sites], [replay] and [pairs]; and that of all steps, [run]."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain


@table("ingest")
class IngestConfig:
    """Which logs are read, and how."""

    paths: tuple[str, ...] = option((), "Logs, project folders, or all of ~/.claude/projects.")
    exclude: tuple[str, ...] = option(
        (), "Patterns of files to leave out: by path, name or folder, as a .crfignore in one of the paths has them."
    )
    follow_links: bool = option(False, "Also read what links lead to outside of the paths.")
    tools: str | None = option(None, "File with a JSON list of tool schemas; unset infers them from the calls.")
    workers: int | None = option(None, "Processes; unset is one per MiB, at most one per core and 8.", at_least=1)
    kingfisher: bool = option(False, "Add kingfisher's rules for secrets, of the extra privacy.")
    people: bool = option(False, "Also replace e-mail addresses, phone numbers and names beside them.")


@table("sites")
class SitesConfig:
    """Which failures may be taught."""

    min_confidence: float = option(0.5, "Keep a site from this confidence on.", at_least=0, at_most=1)
    writer: str | None = option(
        None, "File of teachers with prices, the first of which writes the hints; unset takes templates alone."
    )
    max_usd: float = option(5.0, "Hard cap in US dollars for such hints, over all that the run has spent.", at_least=0)


@table("replay")
class ReplayConfig:
    """Who is asked about which states, and at what cost."""

    teachers: str | None = option(None, "File of teachers with prices, as `crf teachers -o FILE` writes it.")
    max_usd: float = option(5.0, "Hard cap in US dollars over all restarts.", at_least=0)
    states: Literal["all", "failed", "sites"] = option(
        "sites", "Ask about turns that erred and may be taught (sites), that failed or were refused (failed), or all."
    )
    limit: int | None = option(None, "Ask about the first so many of these states alone.", at_least=1)
    gate: Literal["exact", "agree", "none"] = option(
        "exact", "Ask the next teacher while its vote can change a pair, stop where the first agrees, or ask everyone."
    )
    threshold: int = option(2, "Votes that make a consensus.", at_least=1)
    order: Literal["longest_first", "in_order"] = option(
        "longest_first", "Of a session the longest state first and then the others, or one after the other: slower."
    )
    concurrency: int = option(64, "Requests at a time.", at_least=1)
    max_tokens: int = option(1024, "Longest answer.", at_least=1)
    max_history_tokens: int | None = option(
        None, "About how many tokens of history are sent; the oldest turns go first.", at_least=1
    )
    timeout_s: float = option(120.0, "Seconds to wait for an answer.", above=0)
    send_tools: bool = option(True, "Send the schemas of the session's tools.")


@table("pairs")
class PairsConfig:
    """Which answers become preference pairs."""

    threshold: int | None = option(None, "Votes that make a consensus; unset is the replay's.", at_least=1)
    where_it_worked: bool = option(False, "Also make pairs that reject an action which worked.")
    thinking: bool = option(False, "Leave thinking in the texts, where a side has any.")
    words: bool = option(True, "Leave the words beside calls in the texts; false compares calls with calls alone.")
    corrections: bool = option(
        True, "Also make pairs of calls that their session put right, and as many of calls that acted at once."
    )
    recipe: str | None = option(None, "File with filters as a data-juicer recipe; unset is ours.")
    filters: Literal["native", "data_juicer", "none"] = option(
        "native", "Run the filters here, by data-juicer's own operators (extra replaysim), or keep every pair."
    )


@table("run")
class RunConfig:
    """All steps, one after the other."""

    control: bool = option(
        False, "Also train the control (train.control), so that the evaluation says what any training would have done."
    )
    shuffles: int = option(
        1,
        "How many such controls, each with a shuffle of its own; with three or more the control's interval holds the "
        "luck of a shuffle, too.",
        at_least=1,
    )
    fewest: int = option(
        10, "Fewest error sites and pairs to learn from with which a training begins; 0 always begins.", at_least=0
    )
    without_verdict: bool = option(
        False, "Train although too few held-out sessions hold a mistake for the evaluation to say whether it helped."
    )


# [render] and [split]: how conversations become the text that a model reads, and which of them it learns from.

# What a template is given for each conversation; the rest are arguments of the function that gives it.
_TAKEN = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"),
    *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)


@table("render")
class RenderConfig:
    """The chat template and its variables, and what becomes of a turn's thinking."""

    chat_template: str | None = option(
        None, "File with a Jinja chat template that is used as it is; unset is the tokenizer's own."
    )
    template_variables: dict[str, object] = option(
        {}, "Variables of the chat template by name, such as enable_thinking = false."
    )
    student_models: tuple[str, ...] = option(
        (), "Names that logs have for the model to be trained, or patterns such as Qwen/Qwen3-*; * is every turn."
    )
    own_thinking: Literal["target", "context", "left_out"] = option(
        "target", "Thinking of the student's own turns: learned (target), shown before what is learned, or left out."
    )
    other_thinking: Literal["target", "context", "left_out"] = option(
        "left_out", "Thinking of other models' turns: learned, shown before what is learned (context), or left out."
    )

    def _check(self) -> None:
        for name in self.template_variables:
            if not name.isidentifier() or name in _TAKEN:
                expected = f"the name of a variable that a template reads, and none of {', '.join(_TAKEN)}"
                raise ConfigError(explain("key of render.template_variables", got=repr(name), expected=expected))


@table("split")
class SplitConfig:
    """Shares of the sessions, each with all its parts and sub-agents."""

    by: Literal["time", "project"] = option(
        "time", "Hold out the newest sessions (time), or whole working folders (project)."
    )
    validation: float = option(
        0.1,
        "Share that evaluations during training see; learnt from where train.eval_every and a warm-up ask for none.",
        at_least=0,
        below=1,
    )
    test: float | None = option(
        None,
        "Share that no part of a training sees; unset is 0.2 for `crf split`, and 0 for a training without one.",
        at_least=0,
        below=1,
    )


# The knobs of compose_loss.


@table("loss")
class LossConfig:
    """The three channels of total = lm_ce + alpha_sdpo * sdpo_jsd + beta_replay * trace_replay_dpo."""

    alpha_sdpo: float = option(0.1, "Weight of the self-distillation channel; 0 turns it off.", at_least=0)
    beta_replay: float = option(0.05, "Weight of the replayed preference channel; 0 turns it off.", at_least=0)
    sdpo_jsd_beta: float = option(
        0.5,
        "Mixture of the Jensen-Shannon divergence: 0 is KL(teacher‖student), 1 is KL(student‖teacher).",
        at_least=0,
        at_most=1,
    )
    sdpo_temperature: float = option(1.0, "Both distributions' logits are divided by this.", above=0)
    sdpo_token_clip: float | None = option(None, "Largest divergence one token may contribute.", above=0)
    replay_dpo_beta: float = option(0.1, "Strength of DPO's pull towards its reference model.", above=0)
    lm_ce_label_smoothing: float = option(
        0.0, "Share of the target's probability that is spread over the vocabulary.", at_least=0, below=1
    )
    dpo_variant: Literal["dpo", "simpo"] = option("dpo", "Preference loss; simpo needs no reference log-probabilities.")
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = option(
        "none", "Divergence used in place of the plain one; taid ignores sdpo_jsd_beta and sdpo_temperature."
    )
    taid_t: float | None = option(
        None, "How far TAID's target has moved from the student to the teacher; taid needs it.", at_least=0, at_most=1
    )
    simpo_beta: float = option(2.0, "Scale of SimPO's reward, the mean log-probability per token.", above=0)
    simpo_gamma: float = option(1.0, "Margin by which SimPO wants the chosen answer ahead.", at_least=0)
    entropy_opd_h_max: float | None = option(
        None, "Teacher entropy, in nats, that counts as fully uncertain; unset is the log of the vocabulary.", above=0
    )

    def _check(self) -> None:
        if self.sdpo_wrapper == "taid" and self.taid_t is None:
            raise ConfigError(
                explain('loss.taid_t with loss.sdpo_wrapper = "taid"', got="none", expected="a float in [0, 1]")
            )


# [evaluation]: what `crf evaluate` measures on held-out sessions, and which of its figures was named beforehand.

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
