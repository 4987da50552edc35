"""Single tokens as text: together they are the whole text, and half a character keeps its bytes."""

from __future__ import annotations

import pytest
from render_checks import decode, renderer_of
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from composer_replication.batch.render.renderer import join_token_texts, token_texts
from tokenizer_assets import FAMILIES

TEXT = "  def f(): \U0001f99c\U0001f468\u200d\U0001f469 ü ≠ \ufffd\n\n\tx<b> 日本"


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_one_after_the_other_are_what_the_tokenizer_decodes(family):
    renderer = renderer_of(family)
    (ids,) = renderer.encoder.encode([TEXT])
    texts = token_texts(renderer.tokenizer, ids)
    assert join_token_texts(texts) == decode(renderer, ids) == TEXT
    for end in range(len(ids)):
        assert join_token_texts(texts[:end]).rstrip("\ufffd") == decode(renderer, ids[:end]).rstrip("\ufffd")


def test_half_an_emoji_keeps_its_bytes():
    renderer = renderer_of("llama3")  # trained on a few lines: an emoji is four tokens
    (ids,) = renderer.encoder.encode(["\U0001f99c"])
    texts = token_texts(renderer.tokenizer, ids)
    assert texts == ["\udcf0", "\udc9f", "\udca6", "\udc9c"]
    assert join_token_texts(texts[:2]) == "\ufffd"
    assert join_token_texts(texts) == "\U0001f99c"


def test_special_tokens_are_shown_as_themselves():
    renderer = renderer_of("llama3")
    assert token_texts(renderer.tokenizer, [renderer.protected.ids["<|eot_id|>"]]) == ["<|eot_id|>"]


def test_a_tokenizer_with_spaces_in_its_tokens_and_bytes_as_tokens():
    words = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, "<0xE2>": 4, "<0x89>": 5, "<0xA0>": 6}
    backend = Tokenizer(models.BPE(words, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert token_texts(tokenizer, [3, 2, 4, 5, 6]) == [" a", "a", "\udce2", "\udc89", "\udca0"]
    assert join_token_texts(token_texts(tokenizer, [3, 4, 5, 6])) == " a≠"


def test_a_tokenizer_that_cannot_say_its_bytes_shows_what_it_decodes():
    backend = Tokenizer(models.WordLevel({"日": 0, "\ufffd?": 1}, unk_token="日"))
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1]) == ["日", "\ufffd?"]
