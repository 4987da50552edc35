"""A tokenizer's chat template as a function from messages to text, and variants that never rewrite history."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_replication.batch.render import template_server
from composer_replication.batch.render.template_process import ENDED, PROCESS
from composer_replication.errors import InputError, SandboxError, explain
from composer_replication.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Qwen3 shows the thinking of the turns after the last question only, and an empty block on the very last turn: each
# turn's text changes once another follows. Shown always, what was said stays said, and a session is one sequence.
_HISTORY_RULES = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)

# The longest templates of published models have 0.1 MB.
MAX_TEMPLATE_CHARS = 2**20
# Seconds of processor time that a template may use, and gets back with each rendering and byte of it. A rendering takes
# about a millisecond, or half a second for 10 MB: who uses up all of this would do so for every session.
_CREDIT, _CREDIT_PER_RENDERING, _CREDIT_PER_BYTE = 5.0, 0.01, 2e-6
_EXCESS = {
    template_server.TOO_LARGE: "a text that is too long, or needs too much memory",
    ENDED: "a rendering that took too long, or ended the process that it ran in",
}
_FIX = "Do not use this model's template: set render.chat_template to another, or take another model."


class ChatTemplate:
    """Renders messages; whatever a template raises becomes an InputError that says what it was given.

    One that needs more time or memory than any template does, or writes more text, raises SandboxError.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self.source, self.options = source, dict(options or {})
        self._tokenizer, self._credit = tokenizer, _CREDIT
        if len(source) > MAX_TEMPLATE_CHARS:
            got, expected = f"{len(source):,} characters", f"at most {MAX_TEMPLATE_CHARS:,}"
            raise InputError(explain(self.name, got=got, expected=expected, fix=_FIX))

    @property
    def name(self) -> str:
        """For messages: whose template it is."""
        return f"the chat template of {self._tokenizer.name_or_path or type(self._tokenizer).__name__}"

    @property
    def names(self) -> set[str]:
        """Every name in the template's code: variables that it reads or sets, attributes, words of the language."""
        lexed = _jinja().Environment().lex(self.source)
        return {text for _, kind, text in lexed if kind == "name"}

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The same with further variables, or other values of those it has."""
        return ChatTemplate(self._tokenizer, self.source, {**self.options, **options})

    def render(
        self, messages: Sequence[Message], *, prompt: bool = False, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Text of the messages; `prompt` adds the header after which the model speaks."""
        common = {
            **self._tokenizer.special_tokens_map,
            **self.options,
            "chat_template": self.source,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": prompt,
        }
        request = _as_json(common), _as_json(list(messages))
        size = sum(map(len, request))
        self._credit = min(_CREDIT, self._credit + _CREDIT_PER_RENDERING + size * _CREDIT_PER_BYTE)
        kind, text, used = PROCESS.render(*request, max(self._credit, _CREDIT_PER_RENDERING))
        self._credit -= used
        if kind in _EXCESS:
            expected = "a text that takes no more time, memory and room than those of other templates"
            raise SandboxError(explain(self.name, got=_EXCESS[kind], expected=expected, fix=_FIX))
        if kind == template_server.REFUSED:
            what, roles = "chat template", [message["role"] for message in messages]
            roles_text = f"{roles[:8]}..." if len(roles) > 8 else str(roles)
            raise InputError(
                explain(what, got=f"{text} on roles {roles_text}", expected="a rendering of these messages")
            )
        return text


def _as_json(value: Any) -> bytes:
    """Return JSON in ASCII, which holds lone surrogates too; what JSON cannot hold becomes the name of its type."""
    return json.dumps(value, default=lambda unknown: f"<{type(unknown).__name__}>").encode()


def _jinja() -> Any:
    """The library as transformers has it: that needs it for templates, and we only to ask about them."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "jinja2", None)


def template_source(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
) -> str:
    """The template's text: the one given, or the tokenizer's own (its tool variant where it has several)."""
    if chat_template is not None:
        return chat_template
    if not tokenizer.chat_template:
        what = f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r}"
        fix = (
            "Use the tokenizer of an instruct model, or name a file with a template: render.chat_template in a config,"
            " --chat-template of `crf inspect`; in Python, pass chat_template= the text of one."
        )
        raise InputError(explain(what, got="no chat template", expected="one that renders conversations", fix=fix))
    return tokenizer.get_chat_template(tools=list(tools) if tools else None)  # pyright: ignore[reportArgumentType]


def prefix_preserving(source: str) -> str | None:
    """A variant of a known template whose renderings only ever grow; None where we know of none."""
    if not all(rule in source for rule, _ in _HISTORY_RULES):
        return None
    for rule, always in _HISTORY_RULES:
        source = source.replace(rule, always)
    return source
