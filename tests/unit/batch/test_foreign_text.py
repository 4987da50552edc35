"""No target holds another message's text, whatever a template does with it: rendered right, or an error by name."""

from __future__ import annotations

import pytest
from render_checks import call, decode, renderer_of, results, talk

from composer_replication.batch.render.pieces import _mark_message
from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import AlignmentError
from tokenizer_assets import load

WORKING = talk(
    ("user", "Look."),
    ("assistant", {"text": "I look.", "calls": (call(command="ls"),)}),
    ("tool", results("SECRET.py")),
    ("assistant", {"calls": (call(command="cat SECRET.py"),)}),
    ("tool", results("print(1)")),
    ("assistant", "It prints."),
    ("user", "Thanks."),
    ("assistant", "You are welcome."),
)
# The model's turn begins with what it was asked, once it is finished.
QUOTING = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}On {{ messages[loop.index0 - 1].content }}: {% endif %}"
    "{{ m.content }}<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


def test_results_that_a_template_folds_into_the_models_turn_are_context():
    renderer = renderer_of("folding")
    sequences = renderer.render(WORKING)
    shown = {
        span.turn_id: decode(renderer, sequence.ids[span.start : span.end])
        for sequence in sequences
        for span in sequence.spans
    }
    assert shown == {
        "t1": 'I look.<|tool_call>call:bash{"command": "ls"}<tool_call|>',
        "t3": '<|tool_call>call:bash{"command": "cat SECRET.py"}<tool_call|>',
        "t5": "It prints.<turn|>",
        "t7": "You are welcome.<turn|>",
    }


def test_an_empty_result_that_a_template_folds_in_is_context_too():
    renderer = renderer_of("folding")
    quiet = talk(
        ("user", ""),
        ("assistant", {"calls": (call(command="ls"),)}),
        ("tool", results("")),
        ("assistant", {"calls": (call(command="pwd"),)}),
    )
    shown = {
        span.turn_id: decode(renderer, sequence.ids[span.start : span.end])
        for sequence in renderer.render(quiet)
        for span in sequence.spans
    }
    assert shown["t3"] == '<|tool_call>call:bash{"command": "pwd"}<tool_call|>'


def test_the_context_of_a_folded_turn_is_what_the_model_is_asked_with():
    renderer = renderer_of("folding")
    found = {span.turn_id: (each, span) for each in renderer.render(WORKING) for span in each.spans}
    sequence, span = found["t3"]
    asked = decode(renderer, sequence.ids[: span.start])
    assert asked.endswith("<|tool_response>SECRET.py<tool_response|><turn|>\n<|turn>model\n")


def test_a_target_that_would_hold_another_messages_text_is_an_error_that_names_template_and_turn():
    renderer = Renderer(load("gemma"), chat_template=QUOTING)
    template_of = type(renderer.tokenizer).__name__
    with pytest.raises(AlignmentError, match=rf"\bconversation c\b.*\bt1\b.*{template_of}") as raised:
        renderer.render(talk(("user", "the question"), ("assistant", "The answer.")))
    assert "the question" in str(raised.value)
    assert "render.chat_template" in str(raised.value)


def test_marks_go_into_every_text_and_leave_roles_names_and_ids():
    function = {"name": "bash", "arguments": {"command": "ls", "n": 3, "paths": ["ab", ""]}}
    message = {
        "role": "assistant",
        "content": "say",
        "reasoning_content": "th",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert _mark_message(message) == {
        "role": "assistant",
        "content": "sZqmarkay",
        "reasoning_content": "tZqmarkh",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {
                    "name": "bash",
                    "arguments": {"command": "lZqmarks", "n": 3, "paths": ["aZqmarkb", ""]},
                },
            }
        ],
    }
