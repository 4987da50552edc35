"""Reference log-probs: equal to a dense computation, computed once, and refused when anything they rest on changed."""

from __future__ import annotations

import copy

import pytest
import torch
import wrapped_worker as worker
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from render_checks import HERE, coding_session, renderer_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from composer_replication.batch.pair_tokens import PairIds, ResponseIds, _pair_ids
from composer_replication.batch.render.dialect import ThinkingRules
from composer_replication.batch.render.renderer import Renderer
from composer_replication.batch.tree import build_tree
from composer_replication.errors import ArtefactCorruptError, InputError, StaleArtefactError, UnsupportedModelError
from composer_replication.trainer.objective.fingerprint import (
    Fingerprint,
    compute_fingerprint,
    compute_precision,
    weights_digest,
)
from composer_replication.trainer.objective.reference import response_logprobs
from composer_replication.trainer.sessions import reference
from composer_replication.trainer.sessions.reference import ReferenceLogprobs, precompute_ref_logprobs
from composer_replication.types import Turn
from refusals import refusal
from tokenizer_assets import load


def dense(model, ids, start):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
    return float(logits.double().log_softmax(-1).gather(-1, torch.tensor(ids[start:])[:, None]).sum())


def random_pairs(number=12, seed=0):
    """Pairs at several states of one trunk, and some of another."""
    generator = torch.Generator().manual_seed(seed)

    def some(count):
        return torch.randint(0, 64, (count,), generator=generator).tolist()

    trunk = some(60)
    found = []
    for at in range(5, 5 + 4 * number, 4):
        context = trunk[:at] if at % 3 else some(7)
        found.append(PairIds(*(ResponseIds(context + some(3 + at % 4), len(context)) for _ in range(2))))
    return found


@pytest.fixture
def model():
    return worker.build(lora=False).eval()


@pytest.mark.parametrize("max_tree_tokens", [1, 40, 32_768])
def test_values_equal_the_dense_computation_whatever_shares_a_tree(model, max_tree_tokens):
    pairs, renderer = random_pairs(), renderer_of("llama3")
    store = precompute_ref_logprobs(model, renderer, pairs, max_tree_tokens=max_tree_tokens)
    assert len(store) == 2 * len(pairs)
    for chosen, rejected in pairs:
        wanted = dense(model, *chosen), dense(model, *rejected)
        assert store.lookup(*chosen, *rejected) == pytest.approx(wanted, rel=1e-6)


def test_trees_hold_no_more_than_they_may_and_share_contexts(model, monkeypatch):
    sizes = []

    def watched(given, responses):
        sizes.append((len(responses), len(build_tree([each.ids for each in responses]))))
        return response_logprobs(given, responses)

    monkeypatch.setattr(reference, "response_logprobs", watched)
    precompute_ref_logprobs(model, renderer_of("llama3"), random_pairs(), max_tree_tokens=90)
    assert all(tokens <= 90 for _, tokens in sizes)
    assert sum(count for count, _ in sizes) == 24
    assert len(sizes) < 8


def test_a_store_is_taken_over_and_only_what_is_missing_is_computed(model, tmp_path, monkeypatch):
    pairs, renderer, path = random_pairs(), renderer_of("llama3"), tmp_path / "ref_logprobs.safetensors"
    first = precompute_ref_logprobs(model, renderer, pairs[:8], path=path)
    before = path.read_bytes()
    asked = []
    monkeypatch.setattr(
        reference, "response_logprobs", lambda given, group: asked.extend(group) or response_logprobs(given, group)
    )
    again = precompute_ref_logprobs(model, renderer, pairs[:8], path=path)
    assert not asked
    assert path.read_bytes() == before
    more = precompute_ref_logprobs(model, renderer, pairs, path=path)
    assert sorted(asked) == sorted(side for pair in pairs[8:] for side in pair)
    for chosen, rejected in pairs[:8]:
        assert first.lookup(*chosen, *rejected) == again.lookup(*chosen, *rejected) == more.lookup(*chosen, *rejected)


def test_other_weights_another_tokenizer_or_template_are_stale(model, tmp_path):
    path, renderer = tmp_path / "r.safetensors", renderer_of("llama3")
    precompute_ref_logprobs(model, renderer, random_pairs(3), path=path)
    trained = copy.deepcopy(model)
    with torch.no_grad():
        trained.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-9
    source = renderer.template.source
    other_template = Renderer(load("llama3"), chat_template=source + "{# changed #}")
    for wrong, who, different in (
        (trained, renderer, ["weights"]),
        (copy.deepcopy(model).float(), renderer, ["weights", "precision"]),
        (model, renderer_of("gemma"), ["tokenizer", "template"]),
        (model, other_template, ["template"]),
        (model, Renderer(load("llama3"), thinking=ThinkingRules(others="context")), ["template"]),
        (model, renderer_of("llama3", with_tools=True), ["template"]),
    ):
        with refusal(StaleArtefactError, what=str(path)) as refused:
            precompute_ref_logprobs(wrong, who, random_pairs(3), path=path)
        assert [name for name in Fingerprint._fields if name in refused.value.got] == different
    precompute_ref_logprobs(copy.deepcopy(model), renderer_of("llama3"), random_pairs(3), path=path)


def test_the_precision_is_autocasts_where_it_is_on_and_the_weights_own_elsewhere(model, tmp_path):
    assert compute_precision(model) == "float64"
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_precision(model) == "float64"  # autocast does not touch it
    whole, path, renderer = copy.deepcopy(model).float(), tmp_path / "r.safetensors", renderer_of("llama3")
    assert compute_precision(copy.deepcopy(whole).bfloat16()) == "bfloat16"
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_precision(whole) == "bfloat16"
        half = precompute_ref_logprobs(whole, renderer, random_pairs(3), path=path)
        assert precompute_ref_logprobs(whole, renderer, random_pairs(3), path=path).fingerprint == half.fingerprint
    with refusal(StaleArtefactError, what=str(path), got="precision"):
        precompute_ref_logprobs(whole, renderer, random_pairs(3), path=path)
    other = precompute_ref_logprobs(whole, renderer, random_pairs(3))
    for chosen, rejected in random_pairs(3):
        assert other.lookup(*chosen, *rejected) != half.lookup(*chosen, *rejected)
        assert other.lookup(*chosen, *rejected) == pytest.approx(half.lookup(*chosen, *rejected), rel=0.02)


def test_an_adapter_has_no_say_in_the_precision(model):
    adapted = get_peft_model(copy.deepcopy(model).bfloat16(), LoraConfig(target_modules=["q_proj"]))
    assert {each.dtype for each in adapted.parameters() if each.requires_grad} == {torch.float32}
    assert compute_precision(adapted) == "bfloat16"


def test_the_precision_of_shards_is_what_their_policy_casts_to(model, tmp_path):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole = copy.deepcopy(model).float()
    digest = weights_digest(whole)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        plain = fully_shard(copy.deepcopy(whole))
        half = fully_shard(copy.deepcopy(whole), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert [compute_precision(each) for each in (whole, plain, half)] == ["float32", "float32", "bfloat16"]
        assert weights_digest(half) == digest
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}]
)
def test_another_config_is_another_model(model, change):
    other = copy.deepcopy(model)
    for name, value in change.items():
        setattr(other.config, name, value)
    assert weights_digest(other) != weights_digest(model)
    other = copy.deepcopy(model)
    other.config._attn_implementation = "eager"
    other.config.use_cache = not model.config.use_cache
    assert weights_digest(other) == weights_digest(model)


def test_buffers_and_single_numbers_count(model):
    before = weights_digest(model)
    model.register_buffer("scale", torch.tensor(2.0))
    first = weights_digest(model)
    model.scale.fill_(3.0)
    assert len({before, first, weights_digest(model)}) == 3


def test_adapters_that_cannot_be_switched_off_are_refused(model):
    injected = inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), copy.deepcopy(model))
    with refusal(UnsupportedModelError, what="adapter", fix="model.add_adapter"):
        precompute_ref_logprobs(injected, renderer_of("llama3"), random_pairs(2))
    added = copy.deepcopy(model)
    added.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    added.double()
    store = precompute_ref_logprobs(added, renderer_of("llama3"), random_pairs(2))
    for chosen, rejected in random_pairs(2):
        assert store.lookup(*chosen, *rejected)[0] == pytest.approx(dense(model, *chosen), rel=1e-6)


def test_two_that_write_one_file_lose_nothing(model, tmp_path):
    path, renderer, pairs = tmp_path / "r.safetensors", renderer_of("llama3"), random_pairs(6)
    mine = precompute_ref_logprobs(model, renderer, pairs[:4])
    precompute_ref_logprobs(model, renderer, pairs[2:], path=path)
    reference._save_merged(mine, path)
    assert len(ReferenceLogprobs.load(path, mine.fingerprint)) == 12


def test_the_reference_of_an_adapter_is_the_model_below_it(model, tmp_path):
    adapted = worker.build(lora=True).eval()
    assert weights_digest(adapted) == weights_digest(model)
    path, renderer = tmp_path / "r.safetensors", renderer_of("llama3")
    store = precompute_ref_logprobs(adapted, renderer, random_pairs(), path=path)
    for chosen, rejected in random_pairs():
        wanted = dense(model, *chosen), dense(model, *rejected)
        assert store.lookup(*chosen, *rejected) == pytest.approx(wanted, rel=1e-6)
        assert store.lookup(*chosen, *rejected)[0] != pytest.approx(dense(adapted, *chosen), rel=1e-4)
    assert precompute_ref_logprobs(model, renderer, random_pairs(), path=path).fingerprint == store.fingerprint


def test_padding_and_cutting_settings_of_a_tokenizer_are_not_what_it_is(model):
    renderer = renderer_of("llama3")
    before = compute_fingerprint(model, renderer)
    renderer.tokenizer.backend_tokenizer.enable_truncation(7)
    try:
        assert compute_fingerprint(model, renderer) == before
    finally:
        renderer.tokenizer.backend_tokenizer.no_truncation()


def test_dropout_is_off_and_the_mode_stays(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    wanted = precompute_ref_logprobs(model, renderer_of("llama3"), random_pairs(3))
    model.train()
    got = precompute_ref_logprobs(model, renderer_of("llama3"), random_pairs(3))
    for chosen, rejected in random_pairs(3):
        assert got.lookup(*chosen, *rejected) == wanted.lookup(*chosen, *rejected)
    assert model.training


def test_a_pair_that_was_never_computed_is_an_error_not_a_zero(model):
    store = precompute_ref_logprobs(model, renderer_of("llama3"), random_pairs(2))
    chosen, rejected = random_pairs(3)[2]
    with pytest.raises(InputError, match="precompute_ref_logprobs"):
        store.lookup(*chosen, *rejected)
    (one, _), *_ = random_pairs(2)
    with refusal(InputError, got=str(one.start + 1), fix="precompute_ref_logprobs"):
        store.lookup(one.ids, one.start + 1, one.ids, one.start)


def test_pairs_of_a_real_rendering_go_through():
    renderer = renderer_of("llama3")
    size = len(renderer.tokenizer)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=size, num_key_value_heads=2, **small)).eval()
    turns = coding_session().turns[:4]
    answers = [
        Turn(id=f"a{n}", role="assistant", origin="model", provenance=HERE, text=text)
        for n, text in enumerate(("Let me look at b.py.", "I give up."))
    ]
    pair = _pair_ids(renderer, turns, *answers, conversation_id="p")
    store = precompute_ref_logprobs(model, renderer, [pair, pair])
    assert len(store) == 2
    assert store.lookup(*pair.chosen, *pair.rejected)[0] == pytest.approx(dense(model, *pair.chosen), rel=1e-5)


def test_damaged_and_foreign_files_are_named(model, tmp_path):
    path, renderer = tmp_path / "r.safetensors", renderer_of("llama3")
    fingerprint = compute_fingerprint(model, renderer)
    path.write_bytes(b"no safetensors")
    with pytest.raises(ArtefactCorruptError, match=r"r\.safetensors"):
        ReferenceLogprobs.load(path, fingerprint)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ArtefactCorruptError, match="schema None"):
        ReferenceLogprobs.load(path, fingerprint)
    ReferenceLogprobs(fingerprint).save(path)
    assert len(ReferenceLogprobs.load(path, fingerprint)) == 0


@pytest.mark.parametrize("start", [0, 5, -1])
def test_a_response_without_tokens_or_context_is_refused(model, start):
    with refusal(InputError, what="response 0", got=str(start)):
        response_logprobs(model, [([1, 2, 3, 4, 5], start)])
    with refusal(InputError, got="64", expected="63"):
        response_logprobs(model, [([1, 2, 64], 1)])
    with pytest.raises(InputError, match="max_tree_tokens"):
        precompute_ref_logprobs(model, renderer_of("llama3"), [], max_tree_tokens=0)


def test_a_digest_asks_once_whether_weights_are_spread_however_many_modules_there_are(model, monkeypatch):
    """Each question walks over all modules: one for each of a thousand would take seconds, at every start."""
    asked = []
    monkeypatch.setattr(
        "composer_replication.trainer.objective.fingerprint.is_sharded", lambda asked_of: bool(asked.append(asked_of))
    )
    weights_digest(model)
    assert len(asked) == 1
