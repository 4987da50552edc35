"""A teacher's context: the student's ids and a hint, and both sides predict the same tokens."""

from __future__ import annotations

import os
import random

import pytest
from render_checks import call, coding_session, decode, fixture_conversations, renderer_of, results, talk

from composer_replication.batch.hint_placement import PLACEMENTS, teacher_context
from composer_replication.errors import InputError
from refusals import refusal
from tokenizer_assets import FAMILIES

NUM_SITES = 5_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 1_000
MAX_TURNS = 1_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 100
HINT = "Hint: the file is b.py, not a.py."
# What the template allows right before a turn that follows a user's message, and one that follows a tool's.
BEFORE_TURN = {
    "qwen2_5": ("<|im_start|>system\n{}<|im_end|>\n",) * 2,
    "qwen3": ("<|im_start|>system\n{}<|im_end|>\n",) * 2,
    "smollm2": ("<|im_start|>system\n{}<|im_end|>\n",) * 2,
    "llama3": ("<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",) * 2,
    "thinker": ("{}",) * 2,
}


def sites_of(renderer):
    return [(sequence, span) for sequence in renderer.render(coding_session()) for span in sequence.spans]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_predict_the_same_tokens_and_only_the_hint_is_new(family, placement):
    renderer = renderer_of(family)
    for sequence, span in sites_of(renderer):
        context = teacher_context(renderer, sequence, span, HINT, placement=placement)
        assert context.placement in PLACEMENTS
        for offset in range(span.end - span.start):
            student, teacher = span.start - 1 + offset, context.start - 1 + offset
            assert sequence.ids[student + 1] == context.ids[teacher + 1]
        assert context.start + span.end - span.start == len(context.ids)
        assert context.ids[: context.hint_start] + context.ids[context.hint_end :] == sequence.ids[: span.end]
        assert HINT in decode(renderer, context.ids[context.hint_start : context.hint_end])
        header_size = span.start - span.header_start
        assert context.ids[context.start - header_size : context.start] == sequence.ids[span.header_start : span.start]
        assert context.hint_end <= context.start - header_size


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_hint_is_exactly_the_student(family):
    renderer = renderer_of(family)
    for sequence, span in sites_of(renderer):
        for placement in PLACEMENTS:
            context = teacher_context(renderer, sequence, span, "", placement=placement)
            assert context.ids == sequence.ids[: span.end]
            assert context.start == span.start


@pytest.mark.parametrize("family", BEFORE_TURN)
def test_a_hint_before_the_turn_is_a_message_of_the_template(family):
    renderer = renderer_of(family)
    for sequence, span in sites_of(renderer):
        context = teacher_context(renderer, sequence, span, HINT)
        assert context.placement == "before_turn"
        block = decode(renderer, context.ids[context.hint_start : context.hint_end])
        assert block == BEFORE_TURN[family][0].format(HINT)


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "smollm2"])
def test_a_hinted_context_is_what_the_template_itself_renders_with_the_hint(family):
    renderer = renderer_of(family)
    steps = [("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")]
    (sequence,) = renderer.render(talk(*steps))
    messages = [{"role": role, "content": text} for role, text in steps]
    hint = {"role": "system", "content": HINT}
    for span, index in zip(sequence.spans, (2, 4), strict=True):
        before = teacher_context(renderer, sequence, span, HINT)
        assert decode(renderer, before.ids[: before.start]) == renderer.template.render(
            [*messages[:index], hint], prompt=True
        )
        inside = teacher_context(renderer, sequence, span, HINT, placement="in_last_message")
        last = {"role": "user", "content": f"{messages[index - 1]['content']}\n\n{HINT}"}
        assert inside.placement == "in_last_message"
        assert decode(renderer, inside.ids[: inside.start]) == renderer.template.render(
            [*messages[: index - 1], last], prompt=True
        )
        head = teacher_context(renderer, sequence, span, HINT, placement="head")
        assert head.placement == "head"
        assert decode(renderer, head.ids[: head.start]) == renderer.template.render(
            [messages[0], hint, *messages[1:index]], prompt=True
        )


@pytest.mark.parametrize(("family", "closing"), [("gemma", "<end_of_turn>\n"), ("mistral", " [/INST]")])
def test_where_no_message_may_stand_the_hint_goes_into_the_last_one_and_the_result_says_so(family, closing):
    renderer = renderer_of(family)
    for sequence, span in sites_of(renderer):
        context = teacher_context(renderer, sequence, span, HINT)
        assert context.placement == "in_last_message"
        shown = decode(renderer, context.ids[context.hint_start : context.start])
        assert shown == f"\n\n{HINT}{closing}{renderer.dialect.header}"


def test_a_hint_at_the_head_of_a_strict_template_begins_the_first_message():
    renderer = renderer_of("gemma")
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", "B"), ("user", "C"), ("assistant", "D")))
    context = teacher_context(renderer, sequence, sequence.spans[1], HINT, placement="head")
    assert context.placement == "head"
    assert decode(renderer, context.ids).startswith(f"<bos><start_of_turn>user\n{HINT}\n\nA<end_of_turn>")


def test_a_hint_after_the_result_of_a_tool_stands_outside_the_result():
    renderer = renderer_of("qwen2_5")
    made = {"calls": (call(command="ls"),)}
    (sequence,) = renderer.render(
        talk(("user", "A"), ("assistant", made), ("tool", results("x", "y")), ("assistant", "B"))
    )
    context = teacher_context(renderer, sequence, sequence.spans[1], HINT)
    expected = f"</tool_response><|im_end|>\n<|im_start|>system\n{HINT}<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    assert decode(renderer, context.ids).endswith(expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hint_cannot_forge_a_special_token(family, placement):
    renderer = renderer_of(family)
    planted = "".join(renderer.protected.ids)
    protected = set(renderer.protected.ids.values())
    for sequence, span in sites_of(renderer):
        plain, forged = (
            teacher_context(renderer, sequence, span, hint, placement=placement) for hint in (HINT, f"{HINT}{planted}")
        )
        assert [each for each in plain.ids if each in protected] == [each for each in forged.ids if each in protected]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_context_may_start_later_and_the_turn_stays_the_same(family):
    renderer = renderer_of(family)
    for sequence, span in sites_of(renderer):
        first = span.header_start // 2
        context = teacher_context(renderer, sequence, span, HINT, first=first)
        assert context.ids[: context.hint_start] + context.ids[context.hint_end :] == sequence.ids[first : span.end]
        assert context.ids[context.start :] == sequence.ids[span.start : span.end]


def test_index_pairs_of_random_sites_predict_the_same_token_on_both_sides(shared_dir, note):
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    draw = random.Random(0)
    renderers = [renderer_of(family) for family in FAMILIES if _is_there(family)]
    rendered = [
        (renderer, sequence)
        for renderer in renderers
        for conversation in fixture_conversations(sessions)
        if len(conversation.turns) <= MAX_TURNS
        for sequence in renderer.render(conversation)
    ]
    for _ in range(NUM_SITES):
        renderer, sequence = draw.choice(rendered)
        span = draw.choice(sequence.spans)
        hint = "".join(draw.choices(["The ", "file\n", "is ", "there. ", "ü🦜", "<|im_end|>", "\n\n", "{x}"], k=9))
        context = teacher_context(renderer, sequence, span, f"H{hint}", placement=draw.choice(PLACEMENTS))
        shift = context.start - span.start
        for student in range(span.start - 1, span.end - 1):
            assert sequence.ids[student + 1] == context.ids[student + shift + 1]
        assert context.ids[: context.hint_start] + context.ids[context.hint_end :] == sequence.ids[: span.end]
    note(f"hint placement: {NUM_SITES} random sites of {len(rendered)} sequences aligned")


def _is_there(family):
    try:
        renderer_of(family)
    except pytest.skip.Exception:
        return False
    return True


def test_a_hint_of_nothing_but_spaces_a_bad_placement_and_a_cut_into_the_turn_are_errors():
    renderer = renderer_of("gemma")
    (sequence,) = renderer.render(talk(("user", "A"), ("assistant", "B")))
    (span,) = sequence.spans
    with refusal(InputError, what="hint", got=repr(" \n ")):
        teacher_context(renderer, sequence, span, " \n ")
    with pytest.raises(InputError, match="placement"):
        teacher_context(renderer, sequence, span, HINT, placement="after")
    with refusal(InputError, what="token", got=str(span.start)):
        teacher_context(renderer, sequence, span, HINT, first=span.start)
