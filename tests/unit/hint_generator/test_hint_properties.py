"""Any context at all: no crash, no empty hint, nothing unfilled, two sentences."""

from __future__ import annotations

import re
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from composer_replication.hint_generator import HINT_TEMPLATES, HintContext, count_sentences, dispatch
from composer_replication.hint_generator.context import EditProblem

words = st.text(max_size=30)
names = st.lists(words, max_size=30)
schemas = st.dictionaries(words, words | names | st.dictionaries(words, words)) | st.just(
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
)
FIELDS = {
    name: names if name.endswith("s") and name not in ("num_repeats", "num_matches") else words
    for name in HintContext.__annotations__
} | {
    "was_read": st.booleans(),
    "num_repeats": st.integers(-2, 10**6),
    "tool_schema": schemas,
    "advice": st.sampled_from(["Fetch first.", ""]),
    "is_from_error": st.booleans(),
    "edit_problem": st.sampled_from([*get_args(EditProblem), "", "another"]),
    "num_matches": st.integers(-2, 10**6),
}
contexts = st.fixed_dictionaries({}, optional=FIELDS)
UNFILLED = re.compile(r"\{\w*\}|\bNone\b|\bTrue\b|<[a-z_]+>|``")


@given(st.sampled_from(sorted(HINT_TEMPLATES)), contexts)
def test_any_context_gives_a_short_finished_hint(kind, context):
    hint = dispatch(kind, context)
    own_words = re.sub(r"`[^`]*`", "X", hint)
    assert hint.strip()
    assert not UNFILLED.search(own_words), own_words
    assert 1 <= count_sentences(hint) <= 2, hint
    assert "\n" not in hint
    assert len(hint) < 5000


@given(st.sampled_from(sorted(HINT_TEMPLATES)))
def test_without_any_fact_a_hint_is_still_a_rule(kind):
    for context in (None, {}):
        hint = dispatch(kind, context)
        assert len(hint) > 20
        assert hint.endswith(".")
        assert count_sentences(hint) <= 2
