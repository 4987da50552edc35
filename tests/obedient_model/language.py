"""The tokenizer of the tiny world: whole words where the world has them, single ASCII characters elsewhere.

Any ASCII text comes back from its ids as it was, so error texts and hints that the world has never seen can be said,
only at length. A name is one token in quotes, in a rule as in a call, and another one after a space, as in the list of
tools: a rule is then the only place to copy it from, which is what a model this small can learn in seconds.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from composer_replication.envs.student import student_folder

START, END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|unknown|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_JSON_PIECES = (
    '{"name": "',
    '", "arguments": {"',
    '": "',
    '", "',
    '"}}',
    " '",
    "', ",
    "'.",
    ", ",
    "Tools:",
    "{'error': '",
    ".'}",
)

# ChatML that names the tools and shows every role wherever it stands, so that a hint can be a message of its own.
CHAT_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- ' ' + (tool.function.name if tool.function is defined else tool.name) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments|tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# How transformers reads a completion back into a message: calls look as the embedded student's do.
RESPONSE_TEMPLATE = json.loads((student_folder() / "tokenizer_config.json").read_bytes())["response_template"]


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each word, and another for it with a space before it."""
    pieces = [*_JSON_PIECES, *words, *(f" {word}" for word in words)]
    alone = [*string.printable[:95], "\n"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([UNKNOWN, PAD, *pieces, *alone]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern(words)), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(token, special=True, normalized=False) for token in (UNKNOWN, PAD, START, END)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (CALL_OPEN, CALL_CLOSE)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    made.response_template = RESPONSE_TEMPLATE
    return made


def _pattern(words: Sequence[str]) -> str:
    """The longest piece of the structure first, then whole words, then any character alone."""
    structure = "|".join(re.escape(piece) for piece in sorted(_JSON_PIECES, key=len, reverse=True))
    return rf"{structure}| ?\b(?:{'|'.join(words)})\b|[\s\S]"
