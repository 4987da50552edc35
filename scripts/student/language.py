"""The student's language: a byte-level BPE whose words do not depend on what stands beside them, and a tools template.

A 5M-parameter model edits a file by copying from it, so a name has to be the same tokens in a file's listing, in a
question, in an error and inside the JSON string of a call. Therefore words, digits, spaces and signs are cut apart
before BPE merges anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composer_replication.envs.student import TRAINED_CONTEXT

VOCABULARY = 2048
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# The scaffolding of a call and of a refusal: no file has these, so that they are one token each and break no copy.
_SCAFFOLDING = (
    *('{"name": "', '", "arguments": {}}', '", "arguments": {"', '"}}', "<tool_use_error>", "</tool_use_error>"),
    *('file_path": "/workspace', '", "path": "/workspace', 'path": "/workspace', 'pattern": "', '", "content": "'),
    *('", "old_string": "', '", "new_string": "'),
)
# Plain words of English, with the space before them: nobody copies these.
_PLAIN = (
    "a also an and are as at be been before below by call called change changing copy does every exact exactly"
    " file first following for from has have here I in instead is it known look make must names needs not now of"
    " on one only open or out parameters read reading run search session stands such takes text than that the them"
    " there this to too tool tools up was were what when where which with would"
)
# Then a word with the underscore before it, one digit, one line end, spaces in a row, one sign.
PIECES = "|".join(
    [
        *map(re.escape, _SCAFFOLDING),
        r'\\[nrt"\\]',  # what JSON writes for a line end or a quote
        rf" (?:{'|'.join(_PLAIN.split())})(?![A-Za-z_])",
        r"_*[A-Za-z]+|[0-9]|\n|\t| +|[^A-Za-z0-9\s]|\s",
    ]
)

# ChatML: the rules and the tools in one message, each tool as its signature, by name whoever lists them; a system
# message may stand anywhere.
CHAT_TEMPLATE = """{%- set given = messages and messages[0].role == 'system' %}
{%- if given or tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if given else '') }}
    {%- if tools %}
        {{- ('\\n' if given else '') + 'Tools:' }}
        {%- set key = 'function.name' if tools[0].function is defined else 'name' %}
        {%- for tool in tools|sort(attribute=key) %}
            {%- set function = tool.function if tool.function is defined else tool %}
            {%- set parameters = function.parameters or {} %}
            {{- '\\n' + function.name + '(' }}
            {%- for name in parameters.properties or {} %}
                {{- (', ' if not loop.first else '') + name + ('' if name in (parameters.required or []) else '?') }}
            {%- endfor %}
            {{- ')' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and given) %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '<tool_call>{"name": "' + function.name + '", "arguments": ' }}
            {{- (function.arguments if function.arguments is string else function.arguments|tojson) + '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# How transformers reads a completion back into a message.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": CALL_OPEN,
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of these texts, with the template's tokens; nothing is unknown to it."""
    special = [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    plain = [AddedToken(token, special=False, normalized=False) for token in (CALL_OPEN, CALL_CLOSE)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special) - len(plain),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    trained = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=TRAINED_CONTEXT,
    )
    trained.response_template = RESPONSE_TEMPLATE
    return trained
