"""The verification harness's batch: masks and index pairs that hit exactly the answer's tokens."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from composer_replication import build_batch, compose_loss
from composer_replication.errors import InputError
from refusals import refusal

ANSWER_TEXT = "def factorial(n):\n    result = 1\n    for i in range(1, n):\n        result *= i\n    return result"
ANSWERS = {"factorial": "range(1, n)", "binary_search": "low = middle\n"}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def marked_text(tokenizer, batch, ids_key, mask_key):
    return tokenizer.decode(batch[ids_key][0][batch[mask_key][0] == 1])


@pytest.mark.parametrize("variant", ["factorial", "binary_search"])
@pytest.mark.parametrize("align", [False, True])
def test_every_mask_marks_the_whole_answer_with_its_end_of_turn_token(tokenizer, variant, align):
    batch = build_batch(tokenizer, variant=variant, align_sdpo_shapes=align)
    wrong = marked_text(tokenizer, batch, "input_ids", "response_mask")
    assert wrong.startswith("def ")
    assert ANSWERS[variant] in wrong
    assert wrong.endswith("<|im_end|>")
    assert marked_text(tokenizer, batch, "input_ids", "sdpo_loss_mask") == wrong
    assert marked_text(tokenizer, batch, "dpo_rejected_input_ids", "dpo_rejected_response_mask") == wrong
    right = marked_text(tokenizer, batch, "dpo_chosen_input_ids", "dpo_chosen_response_mask")
    assert right.endswith("<|im_end|>")
    assert ANSWERS[variant] not in right


@pytest.mark.parametrize("align", [False, True])
def test_index_pairs_predict_the_answer_on_both_sides_and_only_the_teacher_sees_the_hint(tokenizer, align):
    batch = build_batch(tokenizer, align_sdpo_shapes=align)
    answer = batch["input_ids"][0][batch["response_mask"][0] == 1]
    for side, ids_key in (("student", "input_ids"), ("teacher", "ctx_teacher_input_ids")):
        sequence, position = batch[f"sdpo_{side}_index"].unbind(1)
        assert torch.equal(batch[ids_key][sequence, position + 1], answer)
    assert "Reminder" not in tokenizer.decode(batch["input_ids"][0])
    assert "Reminder" in tokenizer.decode(batch["ctx_teacher_input_ids"][0])
    widths = batch["input_ids"].shape[1], batch["ctx_teacher_input_ids"].shape[1]
    assert (widths[0] == widths[1]) is align


def test_padding_to_one_shape_does_not_change_the_loss(tokenizer):
    model = tiny_model(tokenizer).double()
    plain, aligned = (
        compose_loss(model, build_batch(tokenizer, align_sdpo_shapes=align, model=model)).detached()
        for align in (False, True)
    )
    assert aligned == pytest.approx(plain, abs=1e-8)
    assert plain["sdpo_jsd"] > 1e-4


def test_reference_logprobs_come_from_the_model_or_are_placeholder_zeros(tokenizer):
    model = tiny_model(tokenizer).train()
    batch = build_batch(tokenizer, model=model)
    assert model.training
    ids, mask = batch["dpo_chosen_input_ids"], batch["dpo_chosen_response_mask"]
    logp = model(input_ids=ids).logits[0].double().log_softmax(-1)
    want = sum(logp[t - 1, ids[0, t]].item() for t in range(1, ids.shape[1]) if mask[0, t])
    assert batch["dpo_chosen_ref_logprobs"].item() == pytest.approx(want, rel=1e-5)
    # A policy that is its own reference has a margin of zero: log 2, whatever the pair.
    assert compose_loss(model, batch).trace_replay_dpo.item() == pytest.approx(0.693147, abs=1e-4)
    assert build_batch(tokenizer)["dpo_chosen_ref_logprobs"].tolist() == [0.0]


def test_the_seed_changes_only_the_wording_of_the_hint(tokenizer):
    first, second = build_batch(tokenizer, seed=0), build_batch(tokenizer, seed=1)
    assert torch.equal(first["input_ids"], second["input_ids"])
    texts = {tokenizer.decode(batch["ctx_teacher_input_ids"][0]) for batch in (first, second)}
    assert len(texts) == 2


def test_unknown_variants_and_tokenizers_without_a_template_are_refused(tokenizer):
    with pytest.raises(ValueError, match="variant"):
        build_batch(tokenizer, variant="quicksort")
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(InputError, match="chat_template"):
        build_batch(bare)


def test_a_template_without_an_end_of_turn_token_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with refusal(InputError, what="template", got="token", expected="token"):
        build_batch(tokenizer)


def metaspace_tokenizer():
    """A word tokenizer that puts a space in front of every text, as SentencePiece models do."""
    words = ["<unk>", "[INST]", "[/INST]", "</s>", "▁def", "def", "▁"]
    backend = Tokenizer(models.Unigram([(w, -float(i)) for i, w in enumerate(words)], unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["[INST]", "[/INST]", "</s>"])
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
        "{% else %}{{ m['content'] }}</s>trailing text</s>{% endif %}{% endfor %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def test_ids_are_those_of_one_rendering_even_where_a_text_of_its_own_gets_a_space_in_front():
    tokenizer = metaspace_tokenizer()
    batch = build_batch(tokenizer)
    ids, mask = batch["input_ids"][0], batch["response_mask"][0]
    messages = [
        {"role": "user", "content": "Write a Python function factorial(n). Reply with code only."},
        {"role": "assistant", "content": ANSWER_TEXT},
    ]
    whole = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert ids.tolist() == whole[: len(ids)]
    assert ids[-1] == tokenizer.eos_token_id
    assert (ids[mask == 1] == tokenizer.eos_token_id).sum() == 1  # the template's text behind the turn is not trained


def test_dropout_does_not_reach_the_reference(tokenizer):
    model = tiny_model(tokenizer)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    first, second = (build_batch(tokenizer, model=model)["dpo_chosen_ref_logprobs"].item() for _ in range(2))
    assert first == second
