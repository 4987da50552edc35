"""Two answers to one state: the same context ids, then each answer's own tokens up to its end."""

from __future__ import annotations

import random
import re

import pytest
from render_checks import HERE, call, coding_session, decode, fixture_conversations, normal, renderer_of, results, talk

from composer_replication.action_text import action_text, answer_turn
from composer_replication.batch import pair_tokens
from composer_replication.batch.pair_tokens import ResponseIds, _pair_ids, _response_ids
from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import AlignmentError, InputError
from composer_replication.trainer.trace_rows import _LeftCut
from composer_replication.types import Turn
from refusals import refusal
from tokenizer_assets import FAMILIES, load

SPOKEN = {"text": "Let me see."}
CALLING = {"calls": (call(command="cat b.py"),)}


def answer(identity="answer", **fields):
    return Turn(id=identity, role="assistant", origin="model", provenance=HERE, **fields)


def end_tokens(renderer):
    return {renderer.protected.ids[stop] for stop in renderer.dialect.stops}


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_share_their_context_and_hold_their_whole_answer(family):
    renderer, turns = renderer_of(family), coding_session().turns[:4]
    chosen, rejected = _pair_ids(renderer, turns, answer(**CALLING), answer(**SPOKEN), conversation_id="p")
    assert chosen.ids[: chosen.start] == rejected.ids[: rejected.start]
    assert "a.py" in decode(renderer, chosen.ids[: chosen.start])
    for side, word in ((chosen, "cat b.py"), (rejected, "Let me see.")):
        own = side.ids[side.start :]
        assert word in decode(renderer, own)
        assert own[-1] in end_tokens(renderer)
        assert sum(index in end_tokens(renderer) for index in own) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_state_and_the_turn_itself_are_the_session_up_to_that_turn(family):
    """What the student did, as a response, is what the rendering of the session holds."""
    renderer, session = renderer_of(family), coding_session()
    spans = {span.turn_id: (sequence, span) for sequence in renderer.render(session) for span in sequence.spans}
    for index, turn in enumerate(session.turns):
        if turn.role == "assistant":
            ids, start = _response_ids(renderer, session.turns[:index], turn, conversation_id="p")
            sequence, span = spans[turn.id]
            assert ids[start:] == sequence.ids[span.start : span.end]
            assert ids[:start] == sequence.ids[: span.start]


def test_where_a_template_rewrites_history_the_answer_is_in_the_last_sequence():
    renderer = renderer_of("qwen3", stock=True)
    thoughtful = {"thinking": "Hm.", "calls": (call(command="ls"),)}
    steps = [("user", "A"), ("assistant", thoughtful), ("tool", results("x")), ("assistant", "So."), ("user", "B")]
    turns = talk(*steps).turns
    ids, start = _response_ids(renderer, turns, answer(**SPOKEN), conversation_id="p")
    assert len(renderer.render(talk(*steps, ("assistant", "Let me see.")))) > 1
    assert decode(renderer, ids[start:]).endswith("Let me see.<|im_end|>")
    assert "Hm." not in decode(renderer, ids[:start])


def test_a_thought_that_only_one_side_has_is_in_no_answer():
    renderer, turns = renderer_of("thinker"), talk(("user", "A")).turns
    chosen, rejected = _pair_ids(
        renderer, turns, answer(text="x"), answer(text="y", thinking="Hm."), conversation_id="p"
    )
    assert decode(renderer, chosen.ids[: chosen.start]) == decode(renderer, rejected.ids[: rejected.start])
    assert decode(renderer, chosen.ids[chosen.start :]) == "x<|end|>"
    assert decode(renderer, rejected.ids[rejected.start :]) == "y<|end|>"
    swapped = _pair_ids(renderer, turns, answer(text="y", thinking="Hm."), answer(text="x"), conversation_id="p")
    assert swapped == (rejected, chosen)


def test_contexts_that_differ_are_an_error():
    """This template refuses one tool, and then all calls of that side are written as text."""
    refusing = (
        "{% for m in messages %}"
        "{% if m.tool_calls and m.tool_calls[0].function.name == 'no' %}{{ raise_exception('I refuse') }}{% endif %}"
        "{% if m.tool_calls %}<start_of_turn>assistant\nC{{ m.tool_calls[0].function|tojson }}<end_of_turn>"
        "{% elif m.role == 'tool' %}<start_of_turn>tool\n{{ m.content }}<end_of_turn>"
        "{% else %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
    )
    renderer = Renderer(load("gemma"), chat_template=refusing)
    turns = talk(("user", "A"), ("assistant", CALLING), ("tool", results("x"))).turns
    refused = answer(calls=(call("no"),))
    with refusal(AlignmentError, what="pair p") as caught:
        _pair_ids(renderer, turns, answer(**SPOKEN), refused, conversation_id="p")
    chosen, rejected, shared = map(int, re.findall(r"\d+", caught.value.got))
    assert shared < chosen < rejected


def test_a_context_that_is_longer_by_more_than_a_header_is_another_state(monkeypatch):
    renderer, turns = renderer_of("gemma"), talk(("user", "A")).turns
    ids, start = _response_ids(renderer, turns, answer(text="x"), conversation_id="p")
    shown = iter([ResponseIds(ids, start), ResponseIds([*ids, *ids[1:]], start + len(ids) - 1)])
    monkeypatch.setattr(pair_tokens, "_response_ids", lambda *_, **__: next(shown))
    with refusal(AlignmentError, what="pair p") as caught:
        _pair_ids(renderer, turns, answer(text="x"), answer(text="y"), conversation_id="p")
    assert re.findall(r"\d+", caught.value.got) == [str(start), str(start + len(ids) - 1), str(start)]


def test_an_answer_must_be_the_assistants():
    question = talk(("user", "A")).turns[0]
    with refusal(InputError, what="p", got="user", expected="assistant"):
        _response_ids(renderer_of("gemma"), (), question, conversation_id="p")


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "gemma", "mistral_tools"])
def test_logged_actions_as_text_give_the_ids_of_the_logged_turns(family, shared_dir):
    """`DPOPair.rejected` is text; its ids must be those of the turn it was written from."""
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    draw, renderer = random.Random(0), renderer_of(family)
    states = [
        (each.turns[:index], turn)
        for each in fixture_conversations(sessions)
        for index, turn in enumerate(each.turns[:40])
        if turn.role == "assistant" and not turn.thinking
    ]
    for before, turn in draw.sample(states, 20):
        as_logged = _response_ids(renderer, before, turn, conversation_id="p")
        read = _response_ids(renderer, before, answer_turn(action_text(turn), turn_id="r"), conversation_id="p")
        assert read.ids[: read.start] == as_logged.ids[: as_logged.start]
        shown, expected = (normal(decode(renderer, each.ids[each.start :])) for each in (read, as_logged))
        if family == "mistral_tools":  # it shows the calls' ids, which the text does not hold
            shown, expected = (text.split(', "id": ')[0] for text in (shown, expected))
        assert shown == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_cut_is_at_the_start_of_a_message_where_one_starts_in_time(family):
    renderer = renderer_of(family)
    sequence = renderer.render(coding_session())[-1]
    cut, span = _LeftCut(renderer), sequence.spans[-1]
    latest = min(span.header_start, span.start - 1)
    least = span.end - latest
    assert cut.first(sequence.ids, end=span.end, limit=len(sequence.ids), latest=latest) == 0
    assert cut.first(sequence.ids, end=span.end, limit=least - 1, latest=latest) is None
    opened = {"gemma": "<start_of_turn>", "llama3": "<|start_header_id|>", "mistral": "[INST]", "thinker": "<|"}
    for limit in range(least, span.end):
        first = cut.first(sequence.ids, end=span.end, limit=limit, latest=latest)
        assert span.end - limit <= first <= latest
        starts = [at for at in range(span.end - limit, latest + 1) if _opens(renderer, sequence.ids[at])]
        assert first == (starts[0] if starts else span.end - limit)
        if starts and family in opened:
            assert decode(renderer, sequence.ids[first:]).startswith(opened[family])


def _opens(renderer, index):
    openings = {
        "<|im_start|>",
        "<|start_header_id|>",
        "<start_of_turn>",
        "[INST]",
        "<|User|>",
        "<|Assistant|>",
        "<|turn>",
    }
    return index in {renderer.protected.ids[text] for text in openings & set(renderer.protected.ids)}
