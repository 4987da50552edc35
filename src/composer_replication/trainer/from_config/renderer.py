"""The one reader of [render]: `crf train` and `crf inspect` make the same renderer of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from composer_replication.batch.render.renderer import Renderer, Tools
from composer_replication.batch.render.thinking import ThinkingRules
from composer_replication.config.render import RenderConfig
from composer_replication.errors import ConfigError, explain
from composer_replication.runs import RunDir
from composer_replication.runs.tools import read_tools

OUTCOMES = {
    "thinking_target": "learned",
    "thinking_context": "shown as context",
    "thinking_left_out": "left out",
    "thinking_not_shown": "with no place in the template",
    "empty_thought_as_header": "behind an empty block that is header",
}
"""What was done with turns' thinking, by the names of the counts, in words."""


def make_renderer(
    render: RenderConfig, tokenizer: Any, tools: Tools | None, *, template: str | None = None
) -> Renderer:
    """A renderer as the section says, or with another template; either is also the tokenizer's from then on."""
    template = chat_template(render) if template is None else template
    if template is not None:
        tokenizer.chat_template = template
    renderer = Renderer(
        tokenizer,
        tools=tools,
        chat_template=template,
        template_options=render.template_variables,
        thinking=thinking_rules(render),
    )
    _refuse_unread_variables(render, renderer)
    return renderer


def _refuse_unread_variables(render: RenderConfig, renderer: Renderer) -> None:
    """A variable that the template has no use for must not look as if it had been followed."""
    known_names = renderer.template.names if render.template_variables else set[str]()
    for name in render.template_variables:
        if name not in known_names:
            near = get_close_matches(name, known_names, n=1)
            got = f"{name!r}, which {renderer.template.name} does not read"
            fix = f"Did you mean {near[0]!r}?" if near else "Take it out, or name the template: render.chat_template."
            expected = "names of variables that the template reads"
            raise ConfigError(explain("render.template_variables", got=got, expected=expected, fix=fix))


def unmatched_models(render: RenderConfig, models: Collection[str]) -> list[str]:
    """A sentence for each of `student_models` that is none of the models in the run.

    It is no error: the config may be meant for other runs too.
    """
    model_names = ", ".join(sorted(filter(None, models))) or "none: no turn says which model wrote it"
    return [
        explain(
            "render.student_models",
            got=f"{pattern!r}, which matches no turn's model",
            expected=f"a name or a pattern of those in the run ({model_names})",
        )
        for pattern in render.student_models
        if not any(fnmatchcase(model, pattern) for model in models)
    ]


def tools_of(run: RunDir | None) -> dict[str | None, list[dict[str, Any]]] | None:
    """The tools of each agent in the run, by the format of its logs, in the form that chat templates take."""
    if run is None or not run.path("tools").exists():
        return None
    return {
        format_name: [_described(tool) for tool in agent_tools]
        for format_name, agent_tools in read_tools(run).by_format.items()
    }


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With an empty description: templates may ask for one, and logs have none."""
    name, parameters = tool["function"]["name"], tool["function"]["parameters"]
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


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
    phrases = [f"{counts[name]} {words}" for name, words in OUTCOMES.items() if counts.get(name)]
    return f"thinking of turns: {', '.join(phrases)}" if phrases else ""
