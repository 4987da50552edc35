"""Traces and pairs that are too long: the end is kept, targets stay whole, and what is left out is counted."""

from __future__ import annotations

import pytest
import torch
from render_checks import decode, fixture_conversations
from traces import HINT, collator_of, pair, session

from composer_replication.batch.trace_messages import to_conversation
from tokenizer_assets import FAMILIES

WORDS = "one two three four five six seven eight nine ten "


def exchanges(count, words=WORDS):
    turns = []
    for number in range(count):
        turns += [{"role": "user", "content": f"Q{number} {words}"}, {"role": "assistant", "content": f"A{number}."}]
    return turns


def marked(collator, batch, row=0):
    ids, mask = batch["input_ids"][row], batch["response_mask"][row]
    return decode(collator.renderer, ids[mask == 1].tolist())


# No header, no token at the end of a turn, nothing that opens a message: a cut may fall anywhere.
BARE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"

# The same with words for a header, which a cut must not fall into.
WORDY = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [None, BARE, WORDY], ids=["own", "bare", "wordy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_at_every_length_whole_turns_stay_and_the_others_are_counted(family, template):
    number = 1 if family == "thinker" and template is None else 4  # each of its turns is a sequence of its own
    whole, turns = collator_of(family, chat_template=template), exchanges(number)
    complete = whole([{"turns": turns}])
    (sequence,) = whole.renderer.render(to_conversation(turns, conversation_id="c"))
    ids, size, spans = complete["input_ids"][0].tolist(), len(sequence.ids), sequence.spans
    assert ids == sequence.ids
    assert set(whole.counts) == {"no_reward"}
    needs = [span.end - min(span.header_start, span.start - 1) for span in spans]
    for length in range(2, size + 2, 2 if size < 200 else 5):
        collator = collator_of(family, max_seq_len=length, chat_template=template)
        batch = collator([{"turns": turns}])
        if length < min(needs):
            assert collator.counts["turn_longer_than_max_seq_len"] == number
            assert collator.counts["batch_without_rows"] == 1
            continue
        kept = batch["input_ids"][0].tolist()
        end = next(span.end for span, need in zip(spans[::-1], needs[::-1], strict=True) if need <= length)
        first = end - len(kept)
        assert len(kept) <= length
        assert kept == ids[first:end]
        inside = [span for span in spans if first <= span.header_start and first < span.start and span.end <= end]
        expected = [at in {t for s in inside for t in range(s.start, s.end)} for at in range(first, end)]
        assert batch["response_mask"][0].bool().tolist() == expected
        assert inside
        lost = collator.counts["turn_left_of_cut"] + collator.counts["turn_longer_than_max_seq_len"]
        assert len(inside) + lost == number
        assert collator.counts["sequence_cut"] == (length < size)


@pytest.mark.parametrize(("family", "opening"), [("qwen2_5", "<|im_start|>"), ("llama3", "<|start_header_id|>")])
def test_a_cut_is_at_the_start_of_a_message(family, opening):
    for length in (40, 60, 80, 100):
        collator = collator_of(family, max_seq_len=length)
        batch = collator([{"turns": exchanges(6)}])
        assert decode(collator.renderer, batch["input_ids"][0].tolist()).startswith(opening)
        assert length - batch["input_ids"].shape[1] < 40  # no more is lost than one message


def test_a_message_longer_than_the_limit_is_cut_inside_and_its_answer_stays():
    collator = collator_of("mistral", max_seq_len=20)
    batch = collator([{"turns": exchanges(1, WORDS * 9)}])
    assert batch["input_ids"].shape[1] == 20
    assert marked(collator, batch) == "A0.</s>"


def test_a_last_turn_that_is_too_long_is_left_off_and_the_one_before_is_kept():
    turns = [*exchanges(2), {"role": "user", "content": "Q"}, {"role": "assistant", "content": WORDS * 20}]
    turns[-1] |= {"tool_error": True, "error_meta": {"error_kind": "k"}}
    collator = collator_of("llama3", max_seq_len=120)
    batch = collator([{"turns": turns}])
    assert marked(collator, batch) == "A0.<|eot_id|>A1.<|eot_id|>"
    assert "ctx_teacher_input_ids" not in batch
    assert collator.counts["turn_longer_than_max_seq_len"] == 1
    assert collator.counts["site_longer_than_max_seq_len"] == 1


def test_a_turn_before_which_nothing_stands_is_no_target():
    """Nothing predicts its first token, and a target is whole or none."""
    turns = [{"role": "assistant", "content": "First.", "tool_error": True}, *exchanges(1)]
    collator = collator_of("gemma", chat_template=BARE)
    batch = collator([{"turns": turns, "final_reward": 0.0}])
    assert decode(collator.renderer, batch["input_ids"][0].tolist()).startswith("First.\nQ0")
    assert marked(collator, batch) == "A0.\n"
    assert dict(collator.counts) == {"turn_nothing_before_it": 1, "site_nothing_before_it": 1}


def test_a_turn_in_the_middle_that_is_too_long_is_context_and_counted_as_what_it_is():
    turns = [*exchanges(1), {"role": "user", "content": "Q"}, {"role": "assistant", "content": WORDS * 20}]
    collator = collator_of("llama3", max_seq_len=120)
    batch = collator([{"turns": [*turns, *exchanges(2)], "final_reward": 0.0}])
    assert marked(collator, batch) == "A0.<|eot_id|>A1.<|eot_id|>"
    counts = {"turn_longer_than_max_seq_len": 1, "turn_left_of_cut": 1, "sequence_cut": 1}
    assert dict(collator.counts) == counts


def test_a_site_left_of_the_cut_is_counted_and_the_others_are_kept():
    collator = collator_of("llama3", max_seq_len=100)
    batch = collator([session()])
    assert collator.counts["site_left_of_cut"] == 1
    assert batch["ctx_teacher_input_ids"].shape[0] == 1
    whole = collator_of("llama3")([session()])
    assert whole["ctx_teacher_input_ids"].shape[0] == 2


@pytest.mark.parametrize("placement", ["before_turn", "in_last_message", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_site_at_the_end_of_the_window_keeps_its_turn_and_its_hint_whole(family, placement):
    turns = exchanges(3)
    turns[-1] |= {"tool_error": True, "error_meta": {"error_kind": "k"}}
    size = collator_of(family)([{"turns": turns}])["input_ids"].shape[1]
    collator = collator_of(family, max_seq_len=size, placement=placement)
    batch = collator([{"turns": turns}])
    assert batch["input_ids"].shape[1] == size  # the student is not cut for the hint's sake
    assert batch["ctx_teacher_input_ids"].shape[1] <= size
    shown = decode(collator.renderer, batch["ctx_teacher_input_ids"][0].tolist())
    assert HINT in shown
    assert shown.endswith(f"A2.{collator.renderer.dialect.stops[0]}")
    assert collator.counts["teacher_context_cut"] == 1
    (row, at), (site, there) = batch["sdpo_student_index"].T, batch["sdpo_teacher_index"].T
    assert torch.equal(batch["input_ids"][row, at + 1], batch["ctx_teacher_input_ids"][site, there + 1])


def test_a_hint_that_leaves_its_turn_no_room_is_a_counted_site():
    turns = exchanges(3)
    turns[-1] |= {"tool_error": True, "error_meta": {"error_kind": "k"}}
    collator = collator_of("llama3", max_seq_len=60, hint_generator=lambda *_: WORDS * 20)
    batch = collator([{"turns": turns}])
    assert "ctx_teacher_input_ids" not in batch
    assert collator.counts["site_longer_than_max_seq_len"] == 1
    assert marked(collator, batch).endswith("A2.<|eot_id|>")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_is_cut_alike_on_both_sides_and_its_answers_stay_whole(family):
    long = pair(question=WORDS * 4)
    complete = collator_of(family)([{"turns": [], "dpo_pairs": [long]}])
    sizes = [complete[f"dpo_{side}_input_ids"].shape[1] for side in ("chosen", "rejected")]
    answers = [int(complete[f"dpo_{side}_response_mask"].sum()) for side in ("chosen", "rejected")]
    num_kept = 0
    for length in range(4, max(sizes) + 1, 4):
        collator = collator_of(family, max_dpo_seq_len=length)
        batch = collator([{"turns": exchanges(1), "dpo_pairs": [long]}])
        if "dpo_chosen_input_ids" not in batch:
            assert collator.counts["pair_longer_than_max_dpo_seq_len"] == 1
            assert length < max(answers) + 8
            continue
        num_kept += 1
        contexts = []
        for side, answer in zip(("chosen", "rejected"), answers, strict=True):
            ids, mask = batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"]
            assert ids.shape[1] <= length
            assert int(mask.sum()) == answer
            assert ids[mask == 1].tolist() == complete[f"dpo_{side}_input_ids"][0, -answer:].tolist()
            contexts.append(ids[mask == 0].tolist())
        assert contexts[0] == contexts[1]
        assert contexts[0]
        assert collator.counts["pair_context_cut"] == (length < max(sizes))
    assert num_kept > 3


@pytest.mark.parametrize("family", ["qwen2_5", "llama3"])
def test_logged_sessions_give_what_fits_of_their_own_rendering_and_every_failed_call_is_a_site_or_counted(
    family, shared_dir, note
):
    sessions = shared_dir / "fixtures" / "sessions"
    if not sessions.is_dir():
        pytest.skip("no fixture sessions in shared/")
    collator = collator_of(family, max_seq_len=2048)
    num_errors = num_sites = 0
    for conversation in [each for each in fixture_conversations(sessions) if 4 < len(each.turns) < 150]:
        messages = [message for turn in conversation.turns for message in messages_of(turn)]
        (sequence,) = collator.renderer.render(conversation)
        batch = collator([{"turns": messages}])
        (kept,) = batch["input_ids"].tolist()
        num_errors += sum(bool(result.is_error) for turn in conversation.turns for result in turn.results)
        if collator.counts.pop("batch_without_rows", 0):
            assert all(span.end - span.header_start > 2048 for span in sequence.spans)
            continue
        ends = [span.end for span in sequence.spans if kept == sequence.ids[span.end - len(kept) : span.end]]
        too_long = [span for span in sequence.spans if span.end > ends[-1]]
        assert all(span.end - span.header_start > 2048 for span in too_long)
        num_sites += len(batch.get("ctx_teacher_input_ids", ()))
    dropped = sum(
        count
        for reason, count in collator.counts.items()
        if reason.startswith(("site_", "error_", "same_hint", "hint_"))
    )
    assert num_sites > 5
    assert num_sites + dropped == num_errors
    note(f"collator {family}: {num_sites} of {num_errors} failed calls of logged sessions are sites, {dropped} counted")


def messages_of(turn):
    """A turn of a logged session in the OpenAI shape, with the error flags of its results."""
    for result in turn.results:
        yield {
            "role": "tool",
            "tool_call_id": result.call_id,
            "content": result.text,
            "tool_error": result.is_error,
            "error_meta": {"error_kind": result.call_id},
        }
    if turn.role != "tool":
        calls = [{"id": each.id, "name": each.name, "arguments": dict(each.arguments)} for each in turn.calls]
        yield {"role": turn.role, "content": turn.text, "thinking": turn.thinking, "tool_calls": calls}
