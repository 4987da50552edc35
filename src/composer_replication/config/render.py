"""[render] and [split]: how conversations become the text that a model reads, and which of them it learns from."""

from __future__ import annotations

from typing import Literal

from composer_replication.config.schema import option, table
from composer_replication.errors import ConfigError, explain

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
