"""Conversations to ids with exact spans, on the templates of eight families and on some that break every habit."""

from __future__ import annotations

import os

import pytest
from render_checks import (
    TOOLS,
    call,
    check_exact,
    coding_session,
    decode,
    fixture_conversations,
    renderer_of,
    results,
    talk,
)
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import InputError
from refusals import refusal
from tokenizer_assets import FAMILIES, load

# Templates that rewrite earlier turns cost a rendering a turn, so the longest sessions wait for the full profile.
MAX_TURNS = 1_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 100
MAX_TURNS_STOCK = 1_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 40


@pytest.mark.parametrize("family", FAMILIES)
def test_every_assistant_turn_of_every_fixture_session_is_rendered_exactly(family, shared_dir, note):
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    renderer, num_turns, num_sequences = renderer_of(family), 0, 0
    chosen = [each for each in fixture_conversations(sessions) if len(each.turns) <= MAX_TURNS]
    for conversation in chosen:
        sequences = check_exact(renderer, conversation)
        num_sequences += len(sequences)
        num_turns += sum(len(sequence.spans) for sequence in sequences)
    assert num_turns > (500 if MAX_TURNS == 1_000 else 170)
    note(f"render {family}: {num_turns} turns of {len(chosen)} fixture sessions exact, in {num_sequences} sequences")


def test_stock_qwen3_rewrites_history_and_each_sequence_is_still_exact(shared_dir, note):
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    renderer = renderer_of("qwen3", stock=True)
    chosen = [each for each in fixture_conversations(sessions) if len(each.turns) <= MAX_TURNS_STOCK]
    num_sequences = sum(len(check_exact(renderer, conversation)) for conversation in chosen)
    assert num_sequences > len(chosen)
    note(f"render qwen3 as it ships: {num_sequences} sequences of {len(chosen)} sessions (longest {MAX_TURNS_STOCK})")


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_with_everything_in_it(family, with_tools):
    check_exact(renderer_of(family, with_tools=with_tools), coding_session())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_call_span_holds_the_calls_and_nothing_that_was_said(family):
    renderer = renderer_of(family)
    (sequence,) = renderer.render(
        talk(
            ("user", "Look."),
            ("assistant", {"text": "I look.", "calls": (call(command="ls"), call(identity="c2", command="pwd"))}),
        )
    )
    (span,) = sequence.spans
    shown = decode(renderer, sequence.ids[span.call_start : span.call_end])
    assert "ls" in shown
    assert "pwd" in shown
    assert "look" not in shown
    assert span.start <= span.call_start < span.call_end == span.end - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_without_calls_has_no_call_span(family):
    (sequence,) = renderer_of(family).render(talk(("user", "Hi."), ("assistant", "Hello.")))
    assert (sequence.spans[0].call_start, sequence.spans[0].call_end) == (None, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_are_no_json_are_shown_as_they_are(family):
    renderer, raw = renderer_of(family), '{"command": "ls \\x\'\n'
    (sequence,) = renderer.render(talk(("user", "Look."), ("assistant", {"calls": (call(raw=raw),)})))
    assert raw in sequence.spans[0].text


def test_thinking_stripped_from_history_starts_a_new_sequence_at_the_next_question():
    thoughtful = {"thinking": "Hm.", "calls": (call(command="ls"),)}
    steps = [("user", "A"), ("assistant", thoughtful), ("tool", results("x")), ("assistant", thoughtful)]
    steps += [("tool", results("y")), ("assistant", {"text": "So.", "thinking": "Ah."})]
    steps += [("user", "B"), ("assistant", {"text": "Yes.", "thinking": "Oh."})]
    stock = check_exact(renderer_of("qwen3", stock=True), talk(*steps))
    assert [len(sequence.spans) for sequence in stock] == [3, 1]
    assert len(check_exact(renderer_of("qwen3"), talk(*steps))) == 1


def test_counts_add_up_over_conversations():
    renderer = Renderer(load("gemma"))
    renderer.render(coding_session())
    renderer.render(talk(("user", "Nobody answers.")))
    assert renderer.counts["conversations"] == 2
    assert renderer.counts["turns"] == 5
    assert renderer.counts["sequences"] == 1
    assert renderer.counts["without_assistant_turn"] == 1
    assert renderer.counts["calls_as_text"] == 4
    assert renderer.counts["results_as_text"] == 4
    assert renderer.counts["system_as_user"] == 1


def test_sampled_ids_are_used_as_they_are_and_a_missing_end_is_context():
    renderer = renderer_of("llama3")
    stop = renderer.protected.ids["<|eot_id|>"]
    sampled = (7, 8, 9, stop)
    steps = [("user", "A"), ("assistant", {"text": "x", "token_ids": sampled}), ("user", "B")]
    steps += [("assistant", {"text": "y", "token_ids": sampled[:3]}), ("user", "C"), ("assistant", "z")]
    (sequence,) = renderer.render(talk(*steps))
    first, second, third = sequence.spans
    assert tuple(sequence.ids[first.start : first.end]) == sampled
    assert tuple(sequence.ids[second.start : second.end]) == sampled[:3]
    assert sequence.ids[second.end] == stop
    assert decode(renderer, sequence.ids[second.end + 1 : third.header_start]).startswith("<|start_header_id|>user")
    assert decode(renderer, sequence.ids[third.start : third.end]) == "z<|eot_id|>"
    assert (first.is_verbatim, third.is_verbatim) == (True, False)


def test_sampled_ids_follow_the_whole_prompt_and_show_their_call():
    renderer = renderer_of("thinker")
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", {"text": "x", "token_ids": (5, 6)})))
    assert decode(renderer, sequence.ids[: sequence.spans[0].start]).endswith("<|Assistant|><think>\n")
    tools = renderer_of("mistral_tools")
    opening, end = tools.protected.ids["[TOOL_CALLS]"], tools.protected.ids["</s>"]
    made = {"calls": (call(command="ls"),), "token_ids": (5, opening, 6, 7, end)}
    (sequence,) = tools.render(talk(("user", "A"), ("assistant", made)))
    (span,) = sequence.spans
    assert sequence.ids[span.call_start : span.call_end] == [opening, 6, 7]


def test_a_token_id_outside_the_vocabulary_is_named():
    with refusal(InputError, what="t1", got=str(10**6)):
        renderer_of("llama3").render(talk(("user", "A"), ("assistant", {"token_ids": (10**6,)})))


def test_a_conversation_that_starts_with_the_assistant_and_one_that_says_it_twice():
    for family in FAMILIES:
        check_exact(
            renderer_of(family), talk(("assistant", "I begin."), ("assistant", "And go on."), ("user", "Well."))
        )


def test_an_empty_conversation_is_an_error():
    with refusal(InputError, what="conversation c", got="turns"):
        renderer_of("gemma").render(talk())


def test_a_tokenizer_without_a_template_is_an_error_that_says_what_to_do():
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with refusal(InputError, what=type(bare).__name__, got="template", fix="render.chat_template") as caught:
        Renderer(bare)
    assert "--chat-template" in caught.value.fix
    assert "chat_template=" in caught.value.fix


def test_a_template_that_cannot_say_a_plain_exchange_is_an_error():
    with pytest.raises(InputError, match="no such role"):
        Renderer(load("gemma"), chat_template="{{ raise_exception('no such role') }}")
    with refusal(InputError, what="template", got="'hello'"):
        Renderer(load("gemma"), chat_template="hello")


def test_a_template_that_refuses_what_it_takes_elsewhere_names_the_conversation():
    template = (
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('I refuse') }}{% endif %}"
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endfor %}"
    )
    with pytest.raises(InputError, match=r"\bconversation c\b.*I refuse"):
        Renderer(load("gemma"), chat_template=template).render(talk(("user", "no"), ("assistant", "x")))


def test_a_template_that_looks_far_back_is_rendered_in_full_and_stays_exact():
    """It numbers the messages, which no window can know."""
    template = (
        "{% for m in messages %}<start_of_turn>{{ m.role }} {{ loop.index }}\n{{ m.content }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant {{ messages|length + 1 }}\n{% endif %}"
    )
    renderer = Renderer(load("gemma"), chat_template=template)
    steps = [(role, f"text {number}") for number in range(6) for role in ("user", "assistant")]
    (sequence,) = renderer.render(talk(*steps))
    assert renderer.counts["rendered_every_prefix"] == 1
    expected = renderer.template.render([{"role": role, "content": text} for role, text in steps])
    assert decode(renderer, sequence.ids) == expected.rstrip("\n")
    assert [span.text for span in sequence.spans] == [f"text {number}<end_of_turn>" for number in range(6)]


def test_a_template_of_plain_words_gives_spans_at_token_edges():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = Renderer(load("gemma"), chat_template=template)
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")))
    assert decode(renderer, sequence.ids) == "user: A\nassistant: B\nuser: C\nassistant: D\n"
    assert [decode(renderer, sequence.ids[span.start : span.end]) for span in sequence.spans] == ["B\n", "D\n"]
    assert [decode(renderer, sequence.ids[span.header_start : span.start])[-11:] for span in sequence.spans] == [
        "assistant: "
    ] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_schemas_of_tools_are_shown_even_by_a_template_that_has_no_word_for_them(family):
    renderer = Renderer(load(family), tools=TOOLS)
    (sequence,) = renderer.render(talk(("system", "S"), ("user", "A"), ("assistant", "B")))
    assert "Runs a command." in decode(renderer, sequence.ids)


def test_an_earlier_call_of_the_tokenizer_leaves_no_trace():
    tokenizer = load("llama3")
    before = Renderer(tokenizer).render(coding_session())
    tokenizer(["a b c d e f", "g"], truncation=True, max_length=2, split_special_tokens=True)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert Renderer(tokenizer).render(coding_session()) == before
