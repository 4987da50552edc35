"""What is trained at a site: the renderer's own spans, pairs that predict one token, and an error for anything else."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from render_checks import call, coding_session, decode, normal, renderer_of, results, talk
from site_pieces import HINT, site_at

from composer_replication.batch.hint_placement import PLACEMENTS, teacher_context
from composer_replication.batch.render.renderer import Renderer, join_token_texts, token_texts
from composer_replication.batch.site_view import _check_span, _index_pairs, view_site
from composer_replication.errors import AlignmentError, InputError
from refusals import refusal
from tokenizer_assets import FAMILIES, load

HOSTILE = "\x1b[31mred\x1b[0m [bold]x[/bold] <|im_end|><|eot_id|></s> \u202eabc ⟦│⟧ \U0001f99c e\u0301 \x00\r\n\t"


def hostile_session():
    calls = (call(command=f"echo {HOSTILE}"), call(identity="c2", command="<tool_call>"))
    return talk(
        ("user", f"Go. {HOSTILE}"),
        ("assistant", {"text": f"\U0001f99c\U0001f99c {HOSTILE}", "calls": calls}),
        ("tool", results(HOSTILE, "ok")),
        ("assistant", "Done."),
    )


def assistant_turns(conversation):
    return [turn for turn in conversation.turns if turn.role == "assistant"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pairs_are_those_of_the_formula_and_predict_the_turn_on_both_sides(family, placement):
    renderer, conversation = renderer_of(family), coding_session()
    spans = {span.turn_id: (each, span) for each in renderer.render(conversation) for span in each.spans}
    for turn in assistant_turns(conversation):
        view = view_site(renderer, conversation, site_at(turn.id), HINT, placement=placement)
        rendered, span = spans[turn.id]
        assert (view.student_ids, view.span) == (rendered.ids, span)
        assert view.teacher == teacher_context(renderer, rendered, span, HINT.text, placement=placement)
        num_hint = view.teacher.hint_end - view.teacher.hint_start
        assert [pair.student for pair in view.pairs] == list(range(span.start - 1, span.end - 1))
        assert {pair.teacher - pair.student for pair in view.pairs} == {num_hint}
        for student, teacher, token in view.pairs:
            assert rendered.ids[student + 1] == view.teacher.ids[teacher + 1] == token
        assert normal(decode(renderer, [pair.token for pair in view.pairs])) == normal(span.text)
        assert view.end_token == rendered.ids[span.end - 1]
        assert view.num_call_tokens == (span.call_end or 0) - (span.call_start or 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_text_is_shown_whole_and_never_as_special_tokens(family):
    renderer, conversation = renderer_of(family), hostile_session()
    view = view_site(renderer, conversation, site_at("t1"), HINT)
    ids = view.student_ids[view.span.start : view.span.end]
    text = join_token_texts(token_texts(renderer.tokenizer, ids))
    assert normal(text) == normal(view.span.text)
    assert "[31mred" in text  # in JSON the escape itself is written out
    stops = {renderer.protected.ids[stop] for stop in renderer.dialect.stops}
    ends = 2 if family == "folding" else 1  # there the token that ends a call ends the turn, and this one has two
    assert [index for index in ids if index in stops] == [ids[-1]] * ends


def test_a_left_cut_moves_the_teachers_rows_only():
    renderer, conversation = renderer_of("llama3"), coding_session()
    whole = view_site(renderer, conversation, site_at("t6"), HINT)
    cut = view_site(renderer, conversation, site_at("t6"), HINT, first=7)
    assert [(a.student, a.teacher - 7, a.token) for a in whole.pairs] == [tuple(pair) for pair in cut.pairs]
    assert cut.teacher.ids == whole.teacher.ids[7:]


class _Shifted(Renderer):
    """A renderer whose spans are off, as a mask that was made some other way would be."""

    shift = (0, 0)

    def render(self, conversation):
        start, end = self.shift
        return [
            replace(each, spans=[replace(span, start=span.start + start, end=span.end + end) for span in each.spans])
            for each in super().render(conversation)
        ]


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral_tools", "thinker", "qwen2_5"])
@pytest.mark.parametrize("shift", [(1, 1), (-1, -1), (1, 0), (-1, 0), (0, -1), (0, 1)])
def test_a_span_that_is_off_by_one_is_an_alignment_error(family, shift):
    renderer, conversation = _Shifted(load(family)), hostile_session()
    view_site(renderer, conversation, site_at("t1"), HINT)
    renderer.shift = shift
    for hint in (HINT, None):
        with pytest.raises(AlignmentError, match="turn t1"):
            view_site(renderer, conversation, site_at("t1"), hint)


def test_a_teacher_that_is_off_by_one_is_an_alignment_error():
    renderer, conversation = renderer_of("llama3"), coding_session()
    (rendered,) = renderer.render(conversation)
    span = rendered.spans[1]
    context = teacher_context(renderer, rendered, span, HINT.text)
    assert len(_index_pairs(rendered.ids, span, context)) == span.end - span.start
    wrong = [
        context._replace(start=context.start + 1),
        context._replace(hint_end=context.hint_end - 1),
        context._replace(hint_end=context.hint_end + 1),
        context._replace(ids=context.ids[:-1]),
        context._replace(ids=[*context.ids, context.ids[-1]]),
        context._replace(ids=[context.ids[0], *context.ids[:-1]]),
    ]
    for each in wrong:
        with pytest.raises(AlignmentError):
            _index_pairs(rendered.ids, span, each)
    with refusal(AlignmentError, what=span.turn_id, expected=str(context.start - 1)):
        _index_pairs(rendered.ids, span, context, first=1)
    with pytest.raises(
        AlignmentError, match=rf"\b0 of {span.end - span.start}\b"
    ):  # every token another: what a wrong mask looks like
        _index_pairs([index + 1 for index in rendered.ids], span, context)


def test_a_call_span_outside_its_turn_is_an_alignment_error():
    renderer, conversation = renderer_of("llama3"), coding_session()
    (rendered,) = renderer.render(conversation)
    span, turn = rendered.spans[0], assistant_turns(conversation)[0]
    for wrong in ({"call_end": span.end + 1}, {"call_start": span.start - 1}, {"call_end": span.call_start}):
        wrong_span = replace(span, **wrong)
        with refusal(AlignmentError, what=turn.id, got=str((wrong_span.call_start, wrong_span.call_end))):
            _check_span(renderer, rendered, wrong_span, turn)


def test_without_a_hint_there_is_a_turn_to_look_at_and_nothing_to_train():
    renderer = renderer_of("llama3")
    view = view_site(renderer, coding_session(), site_at("t2", is_kept=False, reason="blame task"), None)
    assert (view.teacher, view.pairs) == (None, ())
    assert view.num_target_tokens > view.num_call_tokens > 0
    assert view.as_json()["teacher"] is None
    assert view.as_json()["pairs"] == []


def test_sampled_ids_are_the_target_even_where_they_were_cut_off():
    renderer = renderer_of("llama3")
    sampled = tuple(renderer.encoder.encode(["Looking aroun"])[0])
    conversation = talk(("user", "Go."), ("assistant", {"text": "Looking around", "token_ids": sampled}))
    view = view_site(renderer, conversation, site_at("t1"), HINT)
    assert tuple(pair.token for pair in view.pairs) == sampled
    assert (view.end_token, view.span.is_verbatim) == (None, True)
    (rendered,) = renderer.render(conversation)
    others = replace(conversation.turns[1], token_ids=(*sampled[:-1], sampled[-1] + 1))
    with refusal(AlignmentError, what="t1", expected=str(list(sampled[:5]))[:-1]):
        _check_span(renderer, rendered, rendered.spans[0], others)


@pytest.mark.parametrize(("is_kept", "advice"), [(True, "crf sites RUN"), (False, "no call")])
def test_a_turn_that_is_in_no_sequence_is_an_error_that_says_what_to_do(is_kept, advice):
    with refusal(InputError, what="0123456789ab", got="'t99'", fix=advice) as caught:
        view_site(renderer_of("llama3"), coding_session(), site_at("t99", is_kept=is_kept, reason="no call"), HINT)
    assert re.findall(r"\b\d+\b", caught.value.got) == ["1"]  # how many sequences were looked through


def test_a_turn_is_found_in_whichever_sequence_holds_it():
    renderer, conversation = renderer_of("mistral_tools", with_tools=True), coding_session()
    views = [view_site(renderer, conversation, site_at(turn.id), HINT) for turn in assistant_turns(conversation)]
    assert views[0].num_sequences > 1
    assert {view.sequence for view in views} == set(range(views[0].num_sequences))


def test_the_json_is_the_record():
    view = view_site(renderer_of("llama3"), hostile_session(), site_at("t1"), HINT)
    data = json.loads(json.dumps(view.as_json()))
    student, teacher = data["student"], data["teacher"]
    assert (student["ids"], teacher["ids"]) == (view.student_ids, view.teacher.ids)
    assert [tuple(pair) for pair in data["pairs"]] == [tuple(pair) for pair in view.pairs]
    assert student["header"] == [view.span.header_start, view.span.start]
    assert student["target"] == [view.span.start, view.span.end]
    assert student["call"] == [view.span.call_start, view.span.call_end]
    assert teacher["target"] == [view.teacher.start, len(view.teacher.ids)]
    assert teacher["hint"] == [view.teacher.hint_start, view.teacher.hint_end]
    assert (teacher["placement"], data["hint"]["text"], data["site"]["turn_id"]) == ("before_turn", HINT.text, "t1")
    num_hint = view.teacher.hint_end - view.teacher.hint_start
    counts = {"target": len(view.pairs), "call": view.num_call_tokens, "hint": num_hint, "pairs": len(view.pairs)}
    assert data["counts"] == counts
