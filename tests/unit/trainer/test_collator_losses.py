"""The losses of the collator's batches: by hand, without a hint, in another order, with other padding, and shifted."""

from __future__ import annotations

import re

import dense_reference as dense
import pytest
import torch
from tiny import tiny_model
from traces import HINT, collator_of, pair, session

from composer_replication import compose_loss
from composer_replication.errors import AlignmentError, BatchKeyError
from composer_replication.trainer.objective.reference import reference_logprobs
from refusals import refusal
from tokenizer_assets import load


def test_a_shift_by_one_is_caught():
    batch = collator_of("llama3")([session()])
    model = tiny_model(load("llama3"))
    for key in ("sdpo_student_index", "sdpo_teacher_index"):
        moved = {name: value for name, value in batch.items() if name != "sdpo_loss_mask"}
        moved[key] = batch[key] - torch.tensor([0, 1])
        with pytest.raises(AlignmentError) as refused:
            compose_loss(model, moved)
        assert re.search(rf"\b{len(batch[key])} pairs\b", refused.value.what)
        assert len(set(re.findall(r"\d+", refused.value.got))) == 2  # the ids of the two tokens
    moved = batch | {"sdpo_loss_mask": batch["sdpo_loss_mask"].roll(1, dims=1)}
    with refusal(BatchKeyError, what="sdpo_loss_mask"):
        compose_loss(model, moved)


class KnownReference:
    """Looks the pair up by its ids; a pair it does not know is an error."""

    def __init__(self):
        self.asked = []

    def lookup(self, chosen_ids, chosen_start, rejected_ids, rejected_start):
        self.asked.append((list(chosen_ids), chosen_start, list(rejected_ids), rejected_start))
        return -float(len(chosen_ids)), -float(len(rejected_ids))


def real(batch, side, row):
    """A row without its padding."""
    return batch[f"dpo_{side}_input_ids"][row][batch[f"dpo_{side}_attention_mask"][row] == 1].tolist()


def test_reference_logprobs_are_looked_up_by_the_very_ids_of_the_batch():
    reference = KnownReference()
    collator = collator_of("llama3", reference=reference)
    batch = collator([session(dpo_pairs=[pair(), pair(question="Another?")])])
    for row, (chosen, chosen_start, rejected, rejected_start) in enumerate(reference.asked):
        assert chosen == real(batch, "chosen", row)
        assert rejected == real(batch, "rejected", row)
        assert chosen_start == int(batch["dpo_chosen_response_mask"][row].argmax())
        assert rejected_start == int(batch["dpo_rejected_response_mask"][row].argmax())
        assert batch["dpo_chosen_ref_logprobs"][row].item() == -len(chosen)
        assert batch["dpo_rejected_ref_logprobs"][row].item() == -len(rejected)
    assert len(reference.asked) == 2


def test_without_a_reference_dpo_says_what_is_missing():
    batch = collator_of("llama3")([session(dpo_pairs=[pair()])])
    assert not [key for key in batch if key.endswith("ref_logprobs")]
    with pytest.raises(BatchKeyError, match="ref_logprobs"):
        compose_loss(tiny_model(load("llama3")), batch)


@pytest.fixture(scope="module")
def model():
    return tiny_model(load("llama3")).double().eval()


def unpadded(batch):
    """The same batch one row at a time, so that a dense computation without masks is right."""
    for row in range(batch["input_ids"].shape[0]):
        length = int(batch["attention_mask"][row].sum())
        yield {key: batch[key][row : row + 1, :length] for key in ("input_ids", "response_mask")}


def test_the_channels_run_and_have_the_values_of_a_dense_computation_by_hand(model):
    batch = collator_of("llama3")([session(dpo_pairs=[pair(), pair(question="And a longer one?")])])
    batch |= reference_logprobs(model, batch)
    batch["dpo_chosen_ref_logprobs"] = batch["dpo_chosen_ref_logprobs"] - 3.0
    components = compose_loss(model, batch)
    assert components.active == ("lm_ce", "sdpo_jsd", "trace_replay_dpo")
    assert components.counts == {
        "lm_ce": int(batch["response_mask"].sum()),
        "sdpo_jsd": len(batch["sdpo_student_index"]),
        "trace_replay_dpo": 2,
    }
    (row,) = unpadded(batch)
    expected = {
        "lm_ce": dense.cross_entropy(model, row),
        "sdpo_jsd": dense.jsd(model, batch),
        "trace_replay_dpo": dense.dpo(model, batch),
    }
    for name, value in expected.items():
        assert getattr(components, name).item() == pytest.approx(value.item(), rel=1e-5, abs=1e-8)


def test_an_empty_hint_gives_no_loss_and_no_gradient_and_a_hint_gives_both(model):
    norms, values = [], []
    for hint in ("", HINT):
        batch = collator_of("llama3", hint_generator=lambda *_, hint=hint: hint)([session()])
        components = compose_loss(model, batch)
        assert "sdpo_jsd" in components.active
        gradients = dense.gradients(model, components.sdpo_jsd)
        norms.append(torch.cat([each.flatten() for each in gradients]).norm().item())
        values.append(components.sdpo_jsd.item())
    assert abs(values[0]) < 1e-6
    assert values[1] > 1e-3
    assert norms[0] < 1e-5 * norms[1]


def losses(model, batch):
    return compose_loss(model, batch | reference_logprobs(model, batch)).detached()


def test_batch_order_and_more_padding_do_not_change_the_losses(model):
    collator = collator_of("llama3")
    short = {"turns": session()["turns"][:3], "dpo_pairs": [pair(question="Short?")]}
    traces = [session(dpo_pairs=[pair()]), short, {"turns": session()["turns"][-2:]}]
    expected = losses(model, collator(traces))
    assert losses(model, collator(traces[::-1])) == pytest.approx(expected, rel=1e-5)
    longer = {"turns": [{"role": "user", "content": "word " * 200}]}  # no target of its own
    wide = collator(traces)
    for key in [key for key in wide if wide[key].dim() == 2 and "index" not in key]:
        filler = -100 if key == "sdpo_loss_mask" else 0
        wide[key] = torch.nn.functional.pad(wide[key], (0, 7), value=filler)
    assert losses(model, wide) == pytest.approx(expected, rel=1e-5)
    assert losses(model, collator([*traces, longer])) == pytest.approx(expected, rel=1e-5)


def test_the_padding_id_is_of_no_account(model):
    eos = load("llama3").eos_token_id
    stop = load("llama3").convert_tokens_to_ids("<|eot_id|>")
    traces = [session(dpo_pairs=[pair(), pair(question="A much longer question than the other?")])]
    traces.append({"turns": [{"role": "user", "content": "Go!"}, {"role": "assistant", "content": "Well! No!!"}]})
    plain = collator_of("llama3")(traces)
    assert load("llama3").convert_tokens_to_ids("!") == 0  # the default pads with a word of the traces
    for pad in (7, eos, stop):
        batch = collator_of("llama3", pad_token_id=pad)(traces)
        assert torch.equal(batch["attention_mask"], plain["attention_mask"])
        assert torch.equal(batch["response_mask"], plain["response_mask"])
        assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {pad}
    assert losses(model, batch) == pytest.approx(losses(model, plain), rel=1e-6)
