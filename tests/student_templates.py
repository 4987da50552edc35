"""Small byte-level tokenizers with templates in the manner of five families, for the property of training targets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from chat_templates import SMALL_FAMILIES, Family
from composer_replication.envs.student import student_folder

_QWEN_CALLS = """
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments|tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
_QWEN_RESULTS = """
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
_QWEN_TOOLS = """
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool|tojson }}{%- endfor %}
    {{- '\\n</tools>' }}"""

# A system prompt of its own; every message is written alike, wherever it stands.
QWEN2_5 = (
    """{%- set given = messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if given else 'You are a helpful assistant.') }}
{%- if tools %}"""
    + _QWEN_TOOLS
    + """{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {{- '<|im_start|>assistant\\n' + content }}"""
    + _QWEN_CALLS
    + """
    {%- elif message.role == 'tool' %}"""
    + _QWEN_RESULTS
    + """
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

# Thoughts only after the last question, and a block, empty or not, before the last turn; thoughts are cut out of texts.
QWEN3 = (
    """{%- if messages and messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if messages and messages[0].role == 'system' else '') }}
    {%- if tools %}"""
    + _QWEN_TOOLS
    + """{%- endif %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}"""
    + _QWEN_CALLS
    + """
    {%- elif message.role == 'tool' %}"""
    + _QWEN_RESULTS
    + """
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)

SMOLLM2 = """{%- if not messages or messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a small assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# What tools answer stands inside the model's own turn, which goes on after it without a header.
GEMMA4 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|turn>model\\n' }}{%- endif %}
        {{- message.content|trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + call.function.arguments|tojson + '<tool_call|>' }}
        {%- endfor %}
        {%- if message.tool_calls %}
            {%- set ns = namespace(open=true) %}
            {%- for other in messages[loop.index:] %}
                {%- if other.role != 'tool' %}{%- set ns.open = false %}{%- endif %}
                {%- if ns.open %}
                    {{- '<|tool_response>response:' + other.name + '{value:' + other.content + '}<tool_response|>' }}
                {%- endif %}
            {%- endfor %}
        {%- else %}{{- '<turn|>\\n' }}{%- endif %}
    {%- elif message.role != 'tool' %}
        {{- '<|turn>' + message.role + '\\n' + message.content|trim + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages and messages[-1].role != 'tool' %}{{- '<|turn>model\\n' }}{%- endif %}"""

# The same, but an answer is written together with the turn that follows it: a prompt after a result does not show it.
GEMMA4_LATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set follows = not loop.first and messages[loop.index0 - 1].role == 'tool' %}
        {%- if not follows %}{{- '<|turn>model\\n' }}{%- endif %}
        {%- set ns = namespace(first=loop.index0) %}
        {%- for other in messages[:loop.index0][::-1] %}
            {%- if other.role == 'tool' and ns.first == loop.revindex %}{%- set ns.first = ns.first - 1 %}{%- endif %}
        {%- endfor %}
        {%- for other in messages[ns.first:loop.index0] %}
            {{- '<|tool_response>response:' + other.name + '{value:' + other.content + '}<tool_response|>' }}
        {%- endfor %}
        {{- message.content|trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + call.function.arguments|tojson + '<tool_call|>' }}
        {%- endfor %}
        {%- if not message.tool_calls %}{{- '<turn|>\\n' }}{%- endif %}
    {%- elif message.role != 'tool' %}
        {{- '<|turn>' + message.role + '\\n' + message.content|trim + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages and messages[-1].role != 'tool' %}{{- '<|turn>model\\n' }}{%- endif %}"""

# One call a message, without its text; tools stand in the first message that is not the assistant's.
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls|length != 1 %}{{- raise_exception('One call at a time.') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments|tojson + '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content|trim }}
        {%- if tools and loop.first and role in ('system', 'user') %}
            {%- for tool in tools %}{{- '\\n' + tool|tojson }}{%- endfor %}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
STUDENTS = {
    "qwen2_5_like": Family(QWEN2_5, "<|endoftext|>", "<|im_end|>", _IM, _CALLS),
    "qwen3_like": Family(QWEN3, "<|endoftext|>", "<|im_end|>", _IM, (*_CALLS, "<think>", "</think>")),
    "llama_like": SMALL_FAMILIES["llama3"]._replace(template=LLAMA),
    "smollm2_like": Family(SMOLLM2, "<|im_start|>", "<|im_end|>", _IM),
    "gemma4_like": Family(
        GEMMA4,
        "<bos>",
        "<eos>",
        (
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>"),
        ),
        ("\n\n", "<b>"),
    ),
}
STUDENTS["gemma4_late_like"] = STUDENTS["gemma4_like"]._replace(template=GEMMA4_LATE)
EMBEDDED = "embedded"
_LINES = [
    "def main(path): return [line.strip() for line in open(path)]",
    '{"name": "bash", "arguments": {"command": "ls -la src && pytest -q"}}',
    "The file was not found. I will look for it in another folder, and then run the tests again.\n\n",
    "system user assistant model tool ipython <think> </think> <tool_call> </tool_call> # Tools",
]


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    """Byte-level BPE of a few lines, with the family's control tokens and template; the embedded one has its own."""
    if family == EMBEDDED:
        return AutoTokenizer.from_pretrained(student_folder())
    parts = STUDENTS[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _LINES * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in parts.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in parts.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=parts.bos, eos_token=parts.eos, chat_template=parts.template
    )


def save_student(family: str, folder: Path) -> Path:
    """The tokenizer as a folder that `train.model` may name."""
    tokenizer_of(family).save_pretrained(folder)
    return folder
