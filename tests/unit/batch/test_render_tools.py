"""Tools by format: each conversation is shown those of its own; one list is everybody's, as ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from render_checks import TOOLS, check_exact, coding_session, decode

from composer_replication.batch.pair_tokens import _pair_ids, _response_ids
from composer_replication.batch.render.renderer import Renderer
from composer_replication.trainer.objective.fingerprint import _hash_json
from tokenizer_assets import load

OTHER = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
FAMILIES = ("llama3", "gemma")  # one shows tools, one has no word for them


def ids_of(renderer, format_name):
    return [each.ids for each in renderer.render(replace(coding_session(), format=format_name))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_shown_the_tools_of_its_format_as_if_it_had_a_renderer_of_its_own(family):
    tokenizer = load(family)
    both = Renderer(tokenizer, tools={"a": TOOLS, "b": OTHER, None: []})
    for format_name, tools in (("a", TOOLS), ("b", OTHER), ("c", None)):
        assert both.tools_for(format_name) == (tools or [])
        assert ids_of(both, format_name) == ids_of(Renderer(tokenizer, tools=tools), format_name)
        check_exact(both, replace(coding_session(), format=format_name))
    shown = decode(both, ids_of(both, "a")[0])
    assert "Runs a command." in shown
    assert "look" not in decode(both, ids_of(both, "a")[0][:120])


def test_without_a_word_for_the_others_a_mapping_gives_them_no_tools_and_with_one_its_own():
    tokenizer, plain = load("llama3"), Renderer(load("llama3"))
    assert ids_of(Renderer(tokenizer, tools={"a": TOOLS}), "c") == ids_of(plain, "c")
    assert ids_of(Renderer(tokenizer, tools={"a": TOOLS, None: OTHER}), "c") == ids_of(
        Renderer(tokenizer, tools=OTHER), "c"
    )


def test_one_list_is_shown_to_every_format():
    renderer = Renderer(load("llama3"), tools=TOOLS)
    assert ids_of(renderer, "a") == ids_of(renderer, "b") == ids_of(renderer, "pair")
    assert renderer.settings["tools"] == TOOLS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_of_a_session_sees_its_tools(family):
    session = replace(coding_session(), format="b")
    renderer = Renderer(load(family), tools={"a": TOOLS, "b": OTHER})
    own = Renderer(load(family), tools=OTHER)
    index = 6
    before, answer = session.turns[:index], session.turns[index]
    shown = _response_ids(renderer, before, answer, conversation_id="p", format_name="b")
    assert shown == _response_ids(own, before, answer, conversation_id="p")
    other = replace(answer, text="Not yet.")
    made = _pair_ids(renderer, before, answer, other, conversation_id="p", format_name="b")
    assert made == _pair_ids(own, before, answer, other, conversation_id="p")


def test_the_fingerprint_says_whose_tools_they_are():
    tokenizer = load("llama3")
    given = ({"a": TOOLS, "b": OTHER}, {"a": OTHER, "b": TOOLS}, {"a": TOOLS, None: OTHER}, TOOLS, TOOLS + OTHER, None)
    digests = [_hash_json(Renderer(tokenizer, tools=each).settings) for each in given]
    assert len(set(digests)) == len(given)
    assert digests[0] == _hash_json(Renderer(tokenizer, tools={"b": OTHER, "a": TOOLS}).settings)
