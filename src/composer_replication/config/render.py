"""The [render] table: how conversations become the text that a model reads and is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_replication.config.schema import check_options, option
from composer_replication.errors import ConfigError, explain

# What a template is given for each conversation; the rest are arguments of the function that gives it.
_TAKEN = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"),
    *("chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
)


@dataclass(frozen=True, kw_only=True)
class RenderConfig:
    """The chat template and its variables, and what becomes of a turn's thinking."""

    chat_template: str | None = option(
        None, "File with a Jinja chat template that is used as it is; unset is the tokenizer's own."
    )
    template_variables: dict[str, object] = option(  # noqa: RUF009  (made anew for each config)
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

    def __post_init__(self) -> None:
        check_options(self, section="render")
        for name in self.template_variables:
            if not name.isidentifier() or name in _TAKEN:
                expected = f"the name of a variable that a template reads, and none of {', '.join(_TAKEN)}"
                raise ConfigError(explain("key of render.template_variables", got=repr(name), expected=expected))
