"""Thinking: an empty block is header, another model's is left out, the student's own is learned, pairs are alike."""

from __future__ import annotations

import pytest
from render_checks import HERE, call, check_exact, coding_session, decode, renderer_of, results, talk

from composer_replication.batch.pair_tokens import _pair_ids
from composer_replication.batch.render.dialect import ALL_OWN, ThinkingRules
from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import InputError
from composer_replication.types import Turn
from refusals import refusal
from tokenizer_assets import load

LEFT_OUT, SHOWN = ThinkingRules(), ThinkingRules(others="context")
QWEN3, QUIET = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
# Qwen3's manner with the small thinker's tokens: an empty block on the last turn alone, a switch in the prompt.
HYBRID = (
    "{% for m in messages %}<|{{ 'Assistant' if m.role == 'assistant' else 'User' }}|>"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QUICK = talk(("user", "A"), ("assistant", "x"), ("user", "B"), ("assistant", "y"))
THOUGHTFUL = talk(
    ("user", "A"),
    ("assistant", {"thinking": "Hm.", "calls": (call(command="ls"),), "model": "claude-x"}),
    ("tool", results("a.py")),
    ("assistant", {"thinking": "So.", "text": "One file.", "model": "Qwen/Qwen3-8B"}),
)


def headers_and_targets(renderer, conversation):
    """Of every turn the header and its own tokens, as text."""
    return [
        (
            decode(renderer, sequence.ids[span.header_start : span.start]),
            decode(renderer, sequence.ids[span.start : span.end]),
        )
        for sequence in renderer.render(conversation)
        for span in sequence.spans
    ]


@pytest.mark.parametrize("stock", [False, True])
def test_an_empty_block_that_qwen3_writes_by_itself_is_header_and_never_target(stock):
    renderer = renderer_of("qwen3", stock=stock)
    assert headers_and_targets(renderer, QUICK) == [(QUIET, "x<|im_end|>"), (QUIET, "y<|im_end|>")]


def test_the_quiet_header_is_the_prompt_of_a_template_with_thinking_off():
    on, off = (Renderer(load("qwen3"), template_options=each) for each in (None, {"enable_thinking": False}))
    assert (on.dialect.header, on.dialect.thought.quiet_header) == (QWEN3, QUIET)
    assert (off.dialect.header, off.dialect.thought.is_off) == (QUIET, True)
    assert [each.ids for each in on.render(QUICK)] == [each.ids for each in off.render(QUICK)]


def test_a_small_template_in_the_manner_of_qwen3_opens_each_turn_as_if_thinking_were_off():
    renderer = Renderer(load("thinker"), chat_template=HYBRID, thinking=ALL_OWN)
    quiet = "<|Assistant|><think>\n\n</think>\n\n"
    thought = {"text": "z", "thinking": "Hm."}
    found = headers_and_targets(renderer, talk(*_steps(QUICK), ("user", "C"), ("assistant", thought)))
    assert found == [
        (quiet, "x<|end|>"),
        (quiet, "y<|end|>"),
        ("<|Assistant|>", "<think>\nHm.\n</think>\n\nz<|end|>"),
    ]


def test_a_prompt_that_opens_a_thought_is_closed_where_there_is_none():
    renderer = renderer_of("thinker", thinking=LEFT_OUT)
    spoken = talk(("user", "A"), ("assistant", {"text": "x", "thinking": "Hm."}))
    assert headers_and_targets(renderer, spoken) == [("<|Assistant|><think>\n\n</think>\n\n", "x<|end|>")]
    assert headers_and_targets(renderer_of("thinker"), spoken) == [
        ("<|Assistant|><think>\n", "Hm.\n</think>\n\nx<|end|>")
    ]


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "gemma", "mistral_tools"])
def test_a_template_that_knows_no_thinking_has_no_quiet_header(family):
    renderer = renderer_of(family)
    assert renderer.dialect.thought.quiet_header is None
    assert not any(span.has_empty_thought for each in renderer.render(QUICK) for span in each.spans)


def test_thinking_of_another_model_is_in_no_target_and_in_no_context():
    renderer = renderer_of("qwen3", thinking=LEFT_OUT)
    (sequence,) = renderer.render(THOUGHTFUL)
    assert "Hm." not in decode(renderer, sequence.ids)
    assert "So." not in decode(renderer, sequence.ids)
    assert [span.thinking for span in sequence.spans] == ["left_out", "left_out"]
    assert [header for header, _ in headers_and_targets(renderer, THOUGHTFUL)] == [QUIET, QUIET]


def test_thinking_of_the_student_is_a_target_and_the_student_is_known_by_its_models_name():
    renderer = renderer_of("qwen3", thinking=ThinkingRules(student_models=("Qwen/Qwen3-*",)))
    first, second = headers_and_targets(renderer, THOUGHTFUL)
    assert first == (QUIET, '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>')
    assert second == (QWEN3, "<think>\nSo.\n</think>\n\nOne file.<|im_end|>")


def test_thinking_as_context_stands_in_the_header_and_in_history():
    renderer = renderer_of("qwen3", thinking=SHOWN)
    found = headers_and_targets(renderer, THOUGHTFUL)
    assert [header for header, _ in found] == [f"{QWEN3}<think>\n{word}\n</think>\n\n" for word in ("Hm.", "So.")]
    assert [target for _, target in found][1] == "One file.<|im_end|>"
    (sequence,) = renderer.render(THOUGHTFUL)
    assert [span.thinking for span in sequence.spans] == ["context", "context"]


def test_sampled_ids_follow_the_prompt_as_it_is_and_are_the_students_own():
    renderer = renderer_of("qwen3", thinking=LEFT_OUT)
    own = {"text": "x", "thinking": "Hm.", "token_ids": (5, 6, renderer.protected.ids["<|im_end|>"])}
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", own)))
    (span,) = sequence.spans
    assert decode(renderer, sequence.ids[span.header_start : span.start]) == QWEN3
    assert (span.thinking, span.has_empty_thought) == ("target", False)
    off = Renderer(load("qwen3"), template_options={"enable_thinking": False}, thinking=LEFT_OUT)
    assert [each.thinking for each in off.render(talk(("user", "A"), ("assistant", own)))[0].spans] == ["target"]


def test_a_template_told_not_to_think_has_no_thinking_to_learn():
    renderer = Renderer(load("qwen3"), template_options={"enable_thinking": False}, thinking=ALL_OWN)
    assert [header for header, _ in headers_and_targets(renderer, THOUGHTFUL)] == [QUIET, QUIET]
    assert renderer.counts["thinking_left_out"] == 2


def test_turns_are_counted_by_what_was_done():
    counts = {}
    for name, rules in (("left_out", LEFT_OUT), ("own", ALL_OWN), ("context", SHOWN)):
        renderer = Renderer(load("qwen3"), thinking=rules)
        renderer.render(coding_session())
        counts[name] = {key: n for key, n in renderer.counts.items() if "think" in key or "thought" in key}
    assert counts == {
        "left_out": {"thinking_left_out": 2, "empty_thought_as_header": 5},
        "own": {"thinking_target": 2, "empty_thought_as_header": 3},
        "context": {"thinking_context": 2, "empty_thought_as_header": 3},
    }


@pytest.mark.parametrize("rules", [LEFT_OUT, ThinkingRules(own="left_out", student_models=("*",))])
@pytest.mark.parametrize("family", ["qwen3", "thinker", "llama3"])
def test_a_session_is_exact_with_its_thinking_left_out(family, rules):
    check_exact(renderer_of(family, thinking=rules), coding_session())


@pytest.mark.parametrize("rules", [LEFT_OUT, ALL_OWN, SHOWN, ThinkingRules(student_models=("student",))])
@pytest.mark.parametrize("family", ["qwen3", "thinker"])
def test_both_sides_of_a_pair_have_a_thought_or_neither_has(family, rules):
    renderer, turns = renderer_of(family, thinking=rules), talk(("user", "A")).turns
    bare, thoughtful = _answer(text="x"), _answer(text="y", thinking="Hm.", model="student")
    for sides in ((bare, thoughtful), (thoughtful, bare)):
        chosen, rejected = _pair_ids(renderer, turns, *sides, conversation_id="p")
        assert chosen.ids[: chosen.start] == rejected.ids[: rejected.start]
        for side, turn in zip((chosen, rejected), sides, strict=True):
            assert decode(renderer, side.ids[side.start :]).startswith(turn.text)
            assert "Hm." not in decode(renderer, side.ids)


def test_two_thoughts_of_the_student_are_both_compared():
    renderer, turns = renderer_of("qwen3"), talk(("user", "A")).turns
    sides = [_answer(text=text, thinking=f"{text}!") for text in "xy"]
    for side, text in zip(_pair_ids(renderer, turns, *sides, conversation_id="p"), "xy", strict=True):
        assert decode(renderer, side.ids[side.start :]) == f"<think>\n{text}!\n</think>\n\n{text}<|im_end|>"


def test_a_treatment_that_is_none_is_named():
    with refusal(InputError, what="own", got="gone"):
        ThinkingRules(own="gone")


def _answer(**fields):
    return Turn(id="answer", role="assistant", origin="model", provenance=HERE, **fields)


def _steps(conversation):
    return [(turn.role, turn.text) for turn in conversation.turns]
