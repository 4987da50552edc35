"""The one reader of [render]: `crf train` and `crf inspect` make the same renderer of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_replication.batch.render import Renderer
from composer_replication.batch.thinking import ThinkingRules
from composer_replication.config.render import RenderConfig
from composer_replication.errors import ConfigError, explain

OUTCOMES = {
    "thinking_target": "learned",
    "thinking_context": "shown as context",
    "thinking_left_out": "left out",
    "thinking_not_shown": "with no place in the template",
    "empty_thought_as_header": "behind an empty block that is header",
}
"""What was done with turns' thinking, by the names of the counts, in words."""


def make_renderer(
    render: RenderConfig, tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None, *, template: str | None = None
) -> Renderer:
    """A renderer as the section says, or with another template; either is also the tokenizer's from then on."""
    template = chat_template(render) if template is None else template
    if template is not None:
        tokenizer.chat_template = template
    return Renderer(
        tokenizer,
        tools=tools,
        chat_template=template,
        template_options=render.template_variables,
        thinking=thinking_rules(render),
    )


def thinking_rules(render: RenderConfig) -> ThinkingRules:
    return ThinkingRules(
        own=render.own_thinking, others=render.other_thinking, student_models=tuple(render.student_models)
    )


def chat_template(render: RenderConfig) -> str | None:
    """The text of the file that the section names."""
    if render.chat_template is None:
        return None
    try:
        return Path(render.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = "a text file with a Jinja template"
        raise ConfigError(
            explain(f"render.chat_template {render.chat_template}", got=error, expected=expected)
        ) from error


def thinking_in_words(counts: Mapping[str, int]) -> str:
    """Turns by what was done with their thinking; empty where there was none, and no block."""
    said = [f"{counts[name]} {words}" for name, words in OUTCOMES.items() if counts.get(name)]
    return f"thinking of turns: {', '.join(said)}" if said else ""
