"""Traces to batches: what is marked is what was said, and both sides of a site predict the same tokens."""

from __future__ import annotations

import copy
import os
import random

import pytest
import torch
from render_checks import decode
from traces import HINT, collator_of, marked_runs, pair, random_trace, session

from composer_replication.batch.hint_placement import PLACEMENTS
from composer_replication.hint_generator import dispatch
from composer_replication.trainer.data_collator import CollatorConfig, ComposerDataCollator
from tokenizer_assets import FAMILIES, load

NUM_SITES = 1_000 if os.environ.get("CRF_TEST_PROFILE") == "full" else 200
HINT_KEYS = {
    "ctx_teacher_input_ids",
    "ctx_teacher_attention_mask",
    "sdpo_loss_mask",
    "sdpo_student_index",
    "sdpo_teacher_index",
}
SIDES = ("chosen", "rejected")


def pair_keys(*names):
    return {f"dpo_{side}_{name}" for side in SIDES for name in names}


def real(batch, key, row):
    """A row without its padding."""
    return batch[key][row][batch[key.replace("input_ids", "attention_mask")][row] == 1].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_response_mask_marks_every_assistant_turn_with_its_end_and_nothing_else(family):
    collator = collator_of(family)
    batch = collator([session()])
    stops = {collator.renderer.protected.ids[stop] for stop in collator.renderer.dialect.stops}
    runs = [
        run
        for ids, mask in zip(batch["input_ids"], batch["response_mask"], strict=True)
        for run in marked_runs(collator, ids, mask)
    ]
    words = [("cat a.py",), ("I look again." if _shows_text(collator) else "ls", "ls"), ("b.py",), ("Done, I think.",)]
    assert len(runs) == 4
    for run, expected in zip(runs, words, strict=True):
        assert all(word in run for word in expected)
        assert "No such file" not in run
        assert run.endswith(collator.renderer.dialect.stops)
    marked = batch["input_ids"][batch["response_mask"] == 1].tolist()
    assert sum(index in stops for index in marked) == 4


def _shows_text(collator):
    dialect = collator.renderer.dialect
    return dialect.text_beside_calls or not dialect.calls


def test_the_marked_text_is_exactly_the_turn_as_the_template_writes_it():
    collator = collator_of("qwen2_5")
    batch = collator([session()])
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call><|im_end|>'
    assert marked_runs(collator, batch["input_ids"][0], batch["response_mask"][0]) == [
        call % "cat a.py",
        "I look again.\n" + call % "ls",
        '<tool_call>\n{"name": "edit", "arguments": {"path": "b.py", }\n</tool_call><|im_end|>',
        "Done, I think.<|im_end|>",
    ]


@pytest.mark.parametrize("placement", ["before_turn", "in_last_message", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_site_is_one_hinted_context_that_is_the_students_with_the_hint_put_in(family, placement):
    collator = collator_of(family, placement=placement)
    batch = collator([session(), session(trace_id="t")])
    assert batch["ctx_teacher_input_ids"].shape[0] == 4
    for site in range(4):
        ids = real(batch, "ctx_teacher_input_ids", site)
        assert decode(collator.renderer, ids).count(HINT) == 1
        pairs = batch["sdpo_teacher_index"][:, 0] == site
        (row,) = batch["sdpo_student_index"][pairs][:, 0].unique().tolist()
        targets = batch["sdpo_student_index"][pairs][:, 1] + 1
        assert targets.tolist() == list(range(targets[0], targets[-1] + 1))
        student = batch["input_ids"][row][: targets[-1] + 1].tolist()
        assert ids[-len(targets) :] == student[-len(targets) :]
        assert len(ids) - batch["sdpo_teacher_index"][pairs][-1, 1] == 2  # it stops where the turn does
        hint_size = len(ids) - len(student)
        assert any(ids[:at] + ids[at + hint_size :] == student for at in range(len(student)))
    assert HINT not in decode(collator.renderer, batch["input_ids"].flatten().tolist())


def test_the_erring_turns_are_the_targets_and_the_mask_holds_the_ignore_index_elsewhere():
    for ignore_index in (-100, 0):
        collator = collator_of("qwen2_5", ignore_index=ignore_index)
        batch = collator([session(), {"trace_id": "short", "turns": session()["turns"][-2:]}])
        mask = batch["sdpo_loss_mask"]
        first, second = marked_runs(collator, batch["input_ids"][0], mask[0])
        assert "cat a.py" in first
        assert "edit" in second
        assert set(mask.unique().tolist()) == {1, ignore_index}
        assert not (mask[1] == 1).any()


def test_a_mark_on_the_assistant_turn_itself_is_the_same_site():
    marked, other = session(), session()
    for index, result in ((1, 2), (5, 6)):
        for key in ("tool_error", "error_meta"):
            other["turns"][index][key] = other["turns"][result].pop(key)
    collator = collator_of("llama3")
    assert same(collator([marked]), collator([other]))
    both = copy.deepcopy(marked)
    both["turns"][1]["tool_error"] = True
    assert same(collator([marked]), collator([both]))
    assert collator.counts["same_hint_again"] == 1


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[key].nan_to_num(), other[key].nan_to_num()) for key in one
    )


def test_an_error_of_parallel_calls_marks_the_turn_that_made_them_and_each_hint_is_a_site():
    calls = [{"name": name, "arguments": {}, "id": name} for name in ("a", "b")]
    turns = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "tool_call": calls},
        {"role": "assistant", "content": "Hm."},
        {"role": "tool", "content": "1", "tool_call_id": "b", "tool_error": True},
        {"role": "tool", "content": "2", "tool_call_id": "a", "tool_error": True},
    ]
    collator = collator_of("qwen2_5", hint_generator=lambda kind, meta: f"About {meta['tool_name']}.")
    batch = collator([{"turns": turns}])
    shown = [decode(collator.renderer, row.tolist()) for row in batch["ctx_teacher_input_ids"]]
    assert [text.count("About b.") for text in shown] == [1, 0]
    assert [text.count("About a.") for text in shown] == [0, 1]
    (run,) = marked_runs(collator, batch["input_ids"][0], batch["sdpo_loss_mask"][0])
    assert '"name": "a"' in run
    assert '"name": "b"' in run


@pytest.mark.parametrize(
    ("error", "meta", "content", "call", "expected"),
    [
        (True, {"error_kind": "mine", "x": 1}, "", {}, ("mine", {"error_kind": "mine", "x": 1})),
        (True, {"x": 1}, "File does not exist.", {"name": "Read"}, ("file_not_found", {"x": 1})),
        (
            "tool_not_found",
            None,
            "?",
            {"name": "Reed"},
            ("tool_not_found", {"tool_name": "Reed", "error_message": "?"}),
        ),
        ("it broke", None, "", {"name": "Read"}, ("runtime_error", {"tool_name": "Read"})),
        (
            True,
            None,
            "x",
            {"name": "Read", "arguments": "{"},
            ("json_decode", {"tool_name": "Read", "error_message": "x"}),
        ),
        (
            True,
            None,
            "<tool_use_error>InputValidationError: The required parameter `path` is missing</tool_use_error>",
            {"name": "Read"},
            ("type_error", None),
        ),
    ],
)
def test_the_hint_generator_is_asked_with_the_kind_and_what_the_trace_says(error, meta, content, call, expected):
    asked = []
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_call": call, "content": "x"}]
    turns.append({"role": "tool", "content": content, "tool_error": error, "error_meta": meta})
    collator_of("llama3", hint_generator=lambda *given: asked.append(given))([{"turns": turns}])
    ((kind, given),) = asked
    assert kind == expected[0]
    assert expected[1] is None or given == expected[1]


def test_the_packages_own_templates_are_a_hint_generator():
    turns = session()["turns"]
    turns[2]["error_meta"] = {"error_kind": "tool_not_found", "tool_name": "bash", "available_tools": ["Read", "Edit"]}
    turns[6]["error_meta"] = None
    collator = collator_of("qwen2_5", hint_generator=dispatch)
    batch = collator([{"turns": turns}])
    first, second = (decode(collator.renderer, row.tolist()) for row in batch["ctx_teacher_input_ids"])
    assert "`Read`, `Edit`" in first
    assert "JSON" in second


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_share_their_context_and_hold_their_whole_answers(family):
    collator = collator_of(family)
    batch = collator([session(dpo_pairs=[pair(), pair(question="A longer question, with more words in it?")])])
    for row in range(2):
        starts = []
        for side, word in zip(SIDES, ("ls", "I give up."), strict=True):
            (run,) = marked_runs(collator, batch[f"dpo_{side}_input_ids"][row], batch[f"dpo_{side}_response_mask"][row])
            assert word in run
            assert run.endswith(collator.renderer.dialect.stops)
            starts.append(int(batch[f"dpo_{side}_response_mask"][row].argmax()))
        assert starts[0] == starts[1]
        contexts = [batch[f"dpo_{side}_input_ids"][row][: starts[0]].tolist() for side in SIDES]
        assert contexts[0] == contexts[1]


def test_the_keys_are_those_of_the_channels_that_have_something():
    always = {"input_ids", "attention_mask", "response_mask", "rewards"}
    pairs = pair_keys("input_ids", "attention_mask", "response_mask")
    everything = session(dpo_pairs=[pair()])
    quiet = {"turns": session()["turns"][-2:], "final_reward": 1}
    assert set(collator_of("llama3")([everything])) == always | HINT_KEYS | pairs
    assert set(collator_of("llama3", enable_sdpo=False)([everything])) == always | pairs
    assert set(collator_of("llama3", hint_generator=None)([everything])) == always | pairs
    assert set(collator_of("llama3", enable_replay_dpo=False)([everything])) == always | HINT_KEYS
    assert set(collator_of("llama3")([quiet])) == always
    batch = collator_of("llama3")([everything, quiet])
    assert batch["rewards"].tolist() == [0.5, 1.0]
    assert batch["rewards"].dtype == torch.float32
    assert {batch[key].dtype for key in batch if key != "rewards"} == {torch.int64}


def test_a_trace_that_its_template_splits_is_several_rows_with_one_reward():
    turns = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "y", "tool_error": True, "error_meta": {"error_kind": "k"}},
    ]
    tools = [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}}]
    collator = collator_of("mistral_tools", tools=tools)
    batch = collator([{"turns": turns, "final_reward": 2.0}, session()])
    assert batch["rewards"].tolist()[:2] == [2.0, 2.0]
    assert batch["input_ids"].shape[0] == len(batch["rewards"]) > 3
    rows = batch["sdpo_student_index"][batch["sdpo_teacher_index"][:, 0] == 0][:, 0].unique()
    assert rows.tolist() == [1]
    assert marked_runs(collator, batch["input_ids"][1], batch["sdpo_loss_mask"][1]) == [" y</s>"]


def test_index_pairs_of_random_sites_predict_the_same_token_on_both_sides(note):
    """Whole and cut traces of random words, on every template; the hint alone is new."""
    draw, num_sites, num_cut = random.Random(0), 0, 0
    families = [family for family in FAMILIES if _is_there(family)]
    while num_sites < NUM_SITES:
        family = families[draw.randrange(len(families))]
        hint = "H" + "".join(draw.choices(["file ", "\n", "ü", "<|im_end|>", "x."], k=4))
        length = draw.choice([64, 160, 4096])
        options = {"max_seq_len": length, "placement": draw.choice(PLACEMENTS)}
        collator = collator_of(family, **options, hint_generator=lambda kind, meta, hint=hint: hint)
        traces = [random_trace(draw, number) for number in range(6)]
        batch = collator([*traces, session()])
        for key in ("input_ids", "ctx_teacher_input_ids"):
            assert key not in batch or batch[key].shape[1] <= length
        if "sdpo_student_index" not in batch:
            continue
        (row, at), (site, there) = batch["sdpo_student_index"].T, batch["sdpo_teacher_index"].T
        assert torch.equal(batch["input_ids"][row, at + 1], batch["ctx_teacher_input_ids"][site, there + 1])
        marked = torch.zeros_like(batch["input_ids"])
        marked[row, at + 1] = 1
        assert torch.equal(marked == 1, batch["sdpo_loss_mask"] == 1)
        assert bool((batch["response_mask"][marked == 1] == 1).all())  # a target is always a turn's own token
        if not collator.counts["teacher_context_cut"]:
            _check_only_the_hint_is_new(batch)
        num_sites += batch["ctx_teacher_input_ids"].shape[0]
        num_cut += collator.counts["sequence_cut"]
    note(f"collator: {num_sites} random sites aligned, {num_cut} sequences cut")


def _check_only_the_hint_is_new(batch):
    for site in range(batch["ctx_teacher_input_ids"].shape[0]):
        pairs = batch["sdpo_teacher_index"][:, 0] == site
        row, last = batch["sdpo_student_index"][pairs][-1].tolist()
        student, ids = batch["input_ids"][row, : last + 2].tolist(), real(batch, "ctx_teacher_input_ids", site)
        hint_size = len(ids) - len(student)
        assert any(ids[:at] + ids[at + hint_size :] == student for at in range(len(student)))


def _is_there(family):
    try:
        load(family)
    except pytest.skip.Exception:
        return False
    return True


def test_the_reward_is_read_from_the_key_that_the_config_names():
    collator = ComposerDataCollator(load("llama3"), CollatorConfig(rlvr_reward_key="score"))
    assert collator([{"turns": session()["turns"], "score": 3}])["rewards"].tolist() == [3.0]
