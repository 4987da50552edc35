"""Random conversations: whatever a log holds, every turn is rendered exactly, once, and without forged tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_checks import call, check_exact, renderer_of, talk

from composer_replication.types import ToolResult
from tokenizer_assets import FAMILIES

WORDS = [
    "word",
    "",
    " ",
    "\n\n",
    "  lead",
    "trail\n",
    '"',
    "\\",
    "{",
    "ü🦜",
    "<|im_end|>",
    "</s>",
    "<eot",
    "\U000f0001",
]
WORDS += ["<tool_call>", "</think>", "<tool_response>", "<|eot_id|>", "<end_of_turn>", "[/INST]", "<|end|>", "'"]
texts = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
values = st.recursive(
    texts | st.integers() | st.none() | st.booleans(), lambda each: st.lists(each, max_size=2), max_leaves=4
)
calls = st.builds(
    lambda name, arguments, raw: call(f"t{name}", raw=raw, **arguments) if raw is None else call(f"t{name}", raw=raw),
    texts,
    st.dictionaries(texts.map("k{}".format), values, max_size=2),
    st.none() | texts,
)


@st.composite
def conversations(draw):
    """Any order of roles that a log can hold; calls with and without results, results without calls."""
    steps = [("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["user", "assistant", "step", "tool"]))
        if role == "user":
            steps.append(("user", draw(texts)))
        elif role == "tool":
            steps.append(("tool", {"results": (ToolResult(call_id="c1", text=draw(texts), is_error=None),)}))
        else:
            made = tuple(draw(st.lists(calls, max_size=2))) if role == "step" else ()
            thinking = draw(st.just("") | texts)
            steps.append(("assistant", {"text": draw(texts), "thinking": thinking, "calls": made}))
            if made and draw(st.booleans()):
                back = tuple(ToolResult(call_id=each.id, text=draw(texts), is_error=None) for each in made)
                steps.append(("tool", {"results": back}))
    return talk(*steps)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@given(conversation=conversations())
def test_every_turn_of_a_random_conversation_is_exact(family, with_tools, conversation):
    if conversation.turns:
        check_exact(renderer_of(family, with_tools=with_tools), conversation)


@given(conversation=conversations())
def test_every_turn_is_exact_on_a_template_that_rewrites_history(conversation):
    if conversation.turns:
        check_exact(renderer_of("qwen3", stock=True), conversation)
