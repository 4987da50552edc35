"""Tokenizers that only promise ids: masks by turn, hinted contexts and pairs come out right, and a warning says how."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from traces import HINT, hinting, pair, session
from transformers import ByT5Tokenizer

from composer_replication.errors import InputError
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from composer_replication.trainer.objective.compose import compose_loss
from refusals import refusal
from tiny_models import build
from tokenizer_assets import load

CALLS = [
    '[TOOL_USE] name=bash input={"command":"cat a.py"}',
    'I look again.\n[TOOL_USE] name=bash input={"command":"ls"}',
    '[TOOL_USE] name=edit input={"path": "b.py", ',
    "Done, I think.",
]


class Stub:
    """Ids for pieces of a text, one to one; a subclass says how a text is cut and what comes around it."""

    pad_token_id = 0
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.vocabulary = ["<pad>"]

    def pieces(self, text: str) -> list[str]:
        return list(text)

    def ids(self, text: str) -> list[int]:
        pieces = [*self.before, *self.pieces(text), *self.after]
        self.vocabulary += [piece for piece in dict.fromkeys(pieces) if piece not in self.vocabulary]
        return [self.vocabulary.index(piece) for piece in pieces]

    def __call__(self, text: str) -> Any:
        return self.ids(text)

    def apply_chat_template(self, messages, **options):
        raise NotImplementedError("this tokenizer has no template")

    def decode(self, ids) -> str:
        return "".join(self.vocabulary[index] for index in ids)


class Words(Stub):
    """Each word with the space before it; a mapping of lists, as of a slow tokenizer."""

    def pieces(self, text: str) -> list[str]:
        first, *others = text.split(" ")
        return [*([first] if first else []), *(f" {word}" for word in others)]

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return {"input_ids": self.ids(text), "attention_mask": None}


class BeginsEach(Stub):
    """A BOS token before each text, whatever it is asked; a mapping of a tensor with one row."""

    before = ("<s>",)

    def __call__(self, text: str, **options: Any) -> Any:
        return {"input_ids": torch.tensor([self.ids(text)])}


class BeginsAndEndsEach(Stub):
    """As an encoder's tokenizer: [CLS] before and [SEP] after each text; a tensor."""

    before, after = ("[CLS]",), ("[SEP]",)

    def __call__(self, text: str, *args: Any) -> Any:
        return torch.tensor(self.ids(text))


class FewWords(BeginsAndEndsEach):
    """Knows nothing but the texts of these tests."""

    eos_token_id = 2

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary += [*self.before, *self.after]
        pairs = pair()
        said = [*CALLS, HINT, "The test fails.", "No such file: a.py", "b.py", "not JSON", "And?", "You fix bugs."]
        self.known = {"", *said, "Which file?", pairs["chosen"], pairs["rejected"]}

    def pieces(self, text: str) -> list[str]:
        if text not in self.known:
            raise KeyError(text)
        return super().pieces(text)


class BeginsTexts(BeginsEach):
    """A BOS token before each text but an empty one."""

    def ids(self, text: str) -> list[int]:
        return super().ids(text) if text else []


class Merges(Stub):
    """Two characters to a token from the start of a text on: in one text the edges of turns lie inside of tokens."""

    def pieces(self, text: str) -> list[str]:
        return [text[at : at + 2] for at in range(0, len(text), 2)]


STUBS = [Stub, Words, BeginsEach, BeginsAndEndsEach, BeginsTexts, FewWords, Merges, ByT5Tokenizer]


def without_template(family: str) -> Any:
    bare = copy.deepcopy(load(family))
    bare.chat_template = None
    return bare


def collator_of(tokenizer, **options) -> ComposerDataCollator:
    with pytest.warns(UserWarning, match=r"CollatorConfig\(chat_template=") as caught:
        collator = ComposerDataCollator(tokenizer, CollatorConfig(**{"hint_generator": hinting, **options}))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    return collator


def marked(tokenizer, ids, mask) -> list[str]:
    """The texts of the stretches of tokens that a mask marks, cut where turns meet by the caller's own knowledge."""
    texts, start = [], None
    for at, value in enumerate([*(mask == 1).tolist(), False]):
        if value and start is None:
            start = at
        elif not value and start is not None:
            texts.append(tokenizer.decode(ids[start:at].tolist()))
            start = None
    return texts


@pytest.fixture(params=STUBS, ids=lambda stub: stub.__name__)
def tokenizer(request) -> Any:
    return request.param()


def test_the_response_mask_marks_the_text_of_each_assistant_turn(tokenizer):
    batch = collator_of(tokenizer)([session()])
    assert marked(tokenizer, batch["input_ids"][0], batch["response_mask"][0]) == CALLS
    text = tokenizer.decode(batch["input_ids"][0].tolist())
    begin = "".join(getattr(tokenizer, "before", ()))
    turns = [
        "The test fails.",
        CALLS[0],
        "No such file: a.py",
        CALLS[1],
        "b.py",
        CALLS[2],
        "not JSON",
        "And?",
        CALLS[3],
    ]
    assert text == begin + "".join(turns)


def test_sites_are_the_same_tokens_after_a_context_with_the_hint(tokenizer):
    batch = collator_of(tokenizer)([session()])
    ids, teacher = batch["input_ids"], batch["ctx_teacher_input_ids"]
    assert marked(tokenizer, ids[0], batch["sdpo_loss_mask"][0]) == [CALLS[0], CALLS[2]]
    assert [tokenizer.decode(row[row != 0].tolist()).count(HINT) for row in teacher] == [1, 1]
    begin = "".join(getattr(tokenizer, "before", ()))
    first = teacher[0][batch["ctx_teacher_attention_mask"][0] == 1]
    assert tokenizer.decode(first.tolist()) == f"{begin}The test fails.{HINT}{CALLS[0]}"
    student_rows, teacher_rows = batch["sdpo_student_index"], batch["sdpo_teacher_index"]
    assert len(student_rows) == int((batch["sdpo_loss_mask"] == 1).sum())
    assert torch.equal(
        ids[student_rows[:, 0], student_rows[:, 1] + 1], teacher[teacher_rows[:, 0], teacher_rows[:, 1] + 1]
    )


def test_pairs_are_two_answers_after_one_context(tokenizer):
    given = pair()
    batch = collator_of(tokenizer)([session(dpo_pairs=[given])])
    begin = "".join(getattr(tokenizer, "before", ()))
    for side in ("chosen", "rejected"):
        ids, mask = batch[f"dpo_{side}_input_ids"][0], batch[f"dpo_{side}_response_mask"][0]
        assert marked(tokenizer, ids, mask) == [given[side]]
        context = ids[: int(mask.argmax())].tolist()
        assert tokenizer.decode(context) == f"{begin}You fix bugs.Which file?"
        assert int(batch[f"dpo_{side}_attention_mask"][0].sum()) == len(context) + int(mask.sum())


def test_what_is_too_long_is_cut_at_a_message_and_never_inside_a_target():
    tokenizer = Stub()
    whole = collator_of(tokenizer)([session()])["input_ids"].shape[1]
    for limit in range(2, whole + 2):
        collator = collator_of(tokenizer, max_seq_len=limit)
        batch = collator([session()])
        texts = marked(tokenizer, batch["input_ids"][0], batch["response_mask"][0])
        assert texts == CALLS[len(CALLS) - len(texts) :] or collator.counts["turn_longer_than_max_seq_len"]
        assert batch["input_ids"].shape[1] <= limit
        assert (
            len(texts) + sum(collator.counts[f"turn_{why}"] for why in ("left_of_cut", "longer_than_max_seq_len")) == 4
        )
        student, teacher = batch.get("sdpo_student_index"), batch.get("sdpo_teacher_index")
        if student is not None:
            assert batch["ctx_teacher_input_ids"].shape[1] <= limit
            assert torch.equal(
                batch["input_ids"][student[:, 0], student[:, 1] + 1],
                batch["ctx_teacher_input_ids"][teacher[:, 0], teacher[:, 1] + 1],
            )
    limit = len("not JSON" + "And?" + CALLS[3]) + 3
    ids = collator_of(tokenizer, max_seq_len=limit)([session()])["input_ids"][0]
    assert tokenizer.decode(ids.tolist()) == f"not JSONAnd?{CALLS[3]}"


def test_a_long_pair_loses_the_same_messages_on_both_sides_or_is_left_out():
    tokenizer, given = Stub(), pair()
    longest = max(len(given["chosen"]), len(given["rejected"]))
    batch = collator_of(tokenizer, max_dpo_seq_len=longest + len("Which file?") + 2)([session(dpo_pairs=[given])])
    for side in ("chosen", "rejected"):
        ids = batch[f"dpo_{side}_input_ids"][0][batch[f"dpo_{side}_attention_mask"][0] == 1]
        assert tokenizer.decode(ids.tolist()) == f"Which file?{given[side]}"
    collator = collator_of(tokenizer, max_dpo_seq_len=longest)
    assert "dpo_chosen_input_ids" not in collator([session(dpo_pairs=[given])])
    assert collator.counts["pair_longer_than_max_dpo_seq_len"] == 1


def test_all_channels_run_on_such_a_batch():
    tokenizer = ByT5Tokenizer()
    collator = collator_of(tokenizer)
    batch = collator([session(dpo_pairs=[pair()])])
    sums = torch.zeros(1)
    batch |= {"dpo_chosen_ref_logprobs": sums, "dpo_rejected_ref_logprobs": sums}
    model = build("llama-tied")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    components = compose_loss(model, batch, alpha_sdpo=0.5, beta_replay=0.5)
    assert components.active == ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    assert all(math.isfinite(value) for value in components.detached().values())


def test_a_fast_tokenizer_without_a_template_is_taken_turn_by_turn():
    bare = without_template("llama3")
    batch = collator_of(bare)([session()])
    assert marked(bare, batch["input_ids"][0], batch["response_mask"][0]) == CALLS


@pytest.mark.parametrize("make", [lambda: without_template("llama3"), ByT5Tokenizer], ids=["fast", "slow"])
def test_text_that_reads_like_a_special_token_stays_text(make):
    tokenizer = make()
    said = f"{tokenizer.eos_token} and {tokenizer.all_special_tokens[0]}"
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": "No."}]
    ids = collator_of(tokenizer)([{"turns": turns}])["input_ids"][0].tolist()
    assert set(ids).isdisjoint(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == f"{said}No."


def test_a_turn_that_has_no_tokens_is_counted_and_no_target():
    turns = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "A"},
    ]
    collator = collator_of(Stub())
    batch = collator([{"turns": turns}])
    assert marked(collator.tokenizer, batch["input_ids"][0], batch["response_mask"][0]) == ["A"]
    assert collator.counts["turn_without_answer"] == 1


def test_a_template_that_nothing_here_can_use_is_refused():
    with pytest.raises(InputError, match="chat_template"):
        ComposerDataCollator(Stub(), CollatorConfig(chat_template="{{ messages }}"))


@pytest.mark.parametrize("answer", [None, "text", {"ids": [1]}, [[1], [2]], [1.5]])
def test_an_answer_without_ids_is_named(answer):
    class Other(Stub):
        def __call__(self, text: str) -> Any:
            return answer

    with refusal(InputError, what="tokenizer", got=type(answer).__name__, expected="input_ids"):
        ComposerDataCollator(Other(), CollatorConfig())


def test_tokens_that_come_before_some_texts_only_are_an_error_and_no_target():
    class Sometimes(Stub):
        def ids(self, text: str) -> list[int]:
            ids = super().ids(f"!{text}")
            return ids[1:] if text.startswith("And") else ids

    with refusal(InputError, what="ids", expected="tokenizer") as refused:
        collator_of(Sometimes())([session()])
    assert "'And" in refused.value.what
