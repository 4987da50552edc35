"""A tokenizer's chat template as a function from messages to text, and variants that never rewrite history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer_replication.errors import InputError, explain
from composer_replication.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Qwen3 shows the thinking of the turns after the last question only, and an empty block on the very last turn: each
# turn's text changes once another follows. Shown always, what was said stays said, and a session is one sequence.
_HISTORY_RULES = (
    ("loop.index0 > ns.last_query_index", "true"),
    ("loop.last or (not loop.last and reasoning_content)", "true"),
)


class ChatTemplate:
    """Renders messages; whatever a template raises becomes an InputError that says what it was given."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, options: Mapping[str, Any] | None = None
    ) -> None:
        self.source, self.options = source, dict(options or {})
        self._tokenizer = tokenizer
        self._errors = _template_errors()

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
        try:
            rendered: Any = self._tokenizer.apply_chat_template(
                # A batch of one: a list of no messages is refused outside a batch.
                [list(messages)],  # pyright: ignore[reportArgumentType]
                tools=list(tools) if tools else None,  # pyright: ignore[reportArgumentType]
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.options,
            )
        except self._errors as error:
            what, roles = "chat template", [message["role"] for message in messages]
            shown = f"{roles[:8]}..." if len(roles) > 8 else str(roles)
            got = f"{type(error).__name__} ({error}) on roles {shown}"
            raise InputError(explain(what, got=got, expected="a rendering of these messages")) from error
        return rendered[0]


def _jinja() -> Any:
    """The library as transformers has it: that needs it for templates, and we only to ask about them."""
    from transformers.utils import chat_template_utils

    return getattr(chat_template_utils, "jinja2", None)


def _template_errors() -> tuple[type[Exception], ...]:
    """What a template raises: a refusal of its own, or a slip over a message it was not written for."""
    jinja = _jinja()
    refusals = (jinja.TemplateError,) if jinja else ()
    return (*refusals, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


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
