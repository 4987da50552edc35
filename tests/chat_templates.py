"""Chat templates in the manner of model families, shortened, for the small tokenizers of `tokenizer_assets`."""

from __future__ import annotations

from typing import NamedTuple

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls|length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments|tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content|trim }}
        {%- if loop.first and tools %}
            {%- for tool in tools %}{{- '\\n' + tool|tojson }}{%- endfor %}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content|trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""

# Tools and rules stand before the last question, so each question rewrites history; ids are nine characters long.
MISTRAL_TOOLS = """{%- if messages[0].role == 'system' %}
    {%- set rules = messages[0].content %}{%- set spoken = messages[1:] %}
{%- else %}{%- set spoken = messages %}{%- endif %}
{%- set questions = spoken | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in spoken %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in spoken %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{- tool|tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}
        {%- if loop.last and rules is defined %}{{- rules + '\\n\\n' }}{%- endif %}
        {{- message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function|tojson)[:-1] }}
            {%- if call.id|length != 9 %}{{- raise_exception('Tool call IDs should have length 9!') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content|trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""

# The prompt opens a thought that history does not keep.
THINKER = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' }}
        {%- if loop.last and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content + eos_token }}
    {%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}"""

# A call's result stands inside the model's turn, which goes on behind it; the prompt opens a new turn all the same.
FOLDING = """{{- bos_token }}
{%- set turn = namespace(is_open=false) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|tool_response>' + message.content + '<tool_response|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if not turn.is_open %}{{- '<|turn>model\\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + call.function.arguments|tojson + '<tool_call|>' }}
        {%- endfor %}
        {%- set turn.is_open = message.tool_calls|default([])|length > 0 %}
        {%- if not turn.is_open %}{{- '<turn|>\\n' }}{%- endif %}
    {%- else %}
        {%- if turn.is_open %}{{- '<turn|>\\n' }}{%- endif %}
        {%- set turn.is_open = false %}
        {{- '<|turn>' + message.role + '\\n' + message.content + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if turn.is_open %}{{- '<turn|>\\n' }}{%- endif %}
    {{- '<|turn>model\\n' }}
{%- endif %}"""


class Family(NamedTuple):
    template: str
    bos: str
    eos: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()


SMALL_FAMILIES = {
    "llama3": Family(
        LLAMA3,
        "<|begin_of_text|>",
        "<|end_of_text|>",
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    # Newlines and HTML tags are added tokens there, and ordinary text.
    "gemma": Family(
        GEMMA, "<bos>", "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("\n\n", "<table>", "<b>")
    ),
    "mistral": Family(MISTRAL, "<s>", "</s>", ("<s>", "</s>", "[INST]", "[/INST]")),
    "mistral_tools": Family(
        MISTRAL_TOOLS,
        "<s>",
        "</s>",
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    "thinker": Family(
        THINKER, "<s>", "<|end|>", ("<s>", "<|end|>", "<|User|>", "<|Assistant|>"), ("<think>", "</think>")
    ),
    "folding": Family(
        FOLDING,
        "<bos>",
        "<eos>",
        (
            *("<bos>", "<eos>", "<|turn>", "<turn|>"),
            *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        ),
    ),
}
