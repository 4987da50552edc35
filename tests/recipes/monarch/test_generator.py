"""The generator's work without Monarch: rollouts by version and seed, answers and episodes, and vLLM's names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_replication.batch.model_folder import load_model, load_tokenizer
from composer_replication.envs.student import student_folder
from composer_replication.errors import ArtefactNotFoundError, InputError, StaleArtefactError
from composer_replication.recipes.monarch import generator as sampling
from composer_replication.recipes.monarch.generator import Generator, GeneratorSettings
from composer_replication.recipes.monarch.run import BatchSettings, _BatchBuilder, _make_reward_rows
from composer_replication.recipes.monarch.tensor_file import SavedRollouts, SharedWeights
from composer_replication.trainer.rollouts.sites import Rollout, RolloutOptions, sampled_runs
from recipes.monarch.tiny_policies import save_tiny
from recipes.monarch.world import tasks
from refusals import refusal

MODEL = str(student_folder())


@pytest.fixture(scope="module")
def student() -> Any:
    return load_model(MODEL, what="model", dtype=torch.float32)


def settings(folder: Path, **changes: Any) -> GeneratorSettings:
    named = {"model": MODEL, "folder": str(folder), "weights": str(folder / "shared"), "max_completion_length": 12}
    return GeneratorSettings(**{**named, **changes})


def published(folder: Path, model: Any, version: int = 0) -> SharedWeights:
    shared = SharedWeights(folder / "shared")
    shared.publish(model, version)
    return shared


def test_a_batch_is_drawn_alike_by_every_process_and_differently_from_the_next(tmp_path, student):
    published(tmp_path, student)
    first, again = Generator(settings(tmp_path)), Generator(settings(tmp_path))
    prompts = ["read", [{"role": "user", "content": "fix the test"}], {"prompt": "run it", "answer": "4"}]
    texts = first.rollout(prompts, batch_id=3, version=0)
    assert len(texts) == 3
    assert all(isinstance(each, str) for each in texts)
    again.rollout(prompts, batch_id=9, version=0)  # what was drawn before does not matter
    assert again.rollout(prompts, batch_id=3, version=0) == texts
    assert again.rollout(prompts, batch_id=4, version=0) != texts
    assert first.rollout(prompts) != first.rollout(prompts)
    kept = SavedRollouts.load(tmp_path / "rollouts", 3)
    decode = load_tokenizer(MODEL).decode
    assert [decode(each.completion_ids, skip_special_tokens=True) for each in kept.rollouts] == texts
    assert [len(each.completion_ids) <= 12 for each in kept.rollouts] == [True] * 3
    assert kept.weights_version == 0


def test_other_weights_draw_other_rollouts(tmp_path, student):
    shared = published(tmp_path, student)
    generator = Generator(settings(tmp_path))
    before = generator.rollout(["go on"] * 4, batch_id=0, version=0)
    moved = load_model(MODEL, what="model", dtype=torch.float32)
    with torch.no_grad():
        for each in moved.parameters():
            each.mul_(0.5)
    shared.publish(moved, 1)
    assert generator.rollout(["go on"] * 4, batch_id=0, version=1) != before
    assert generator.rollout(["go on"] * 4, batch_id=0, version=0) == before
    assert generator.rollout(["go on"] * 4, batch_id=0) != before  # the newest
    with pytest.raises(ArtefactNotFoundError, match=r"version 2"):
        generator.rollout(["go on"], version=2)


def test_weights_of_another_model_are_refused(tmp_path, student):
    save_tiny(tmp_path / "tiny")
    shared = published(tmp_path, student)
    tiny = load_model(str(tmp_path / "tiny"), what="model")
    with refusal(StaleArtefactError, what="weights-000000.safetensors", got="parameters"):
        shared.load_into(tiny, 0)


def test_prompts_must_say_something(tmp_path, student):
    published(tmp_path, student)
    generator = Generator(settings(tmp_path))
    with refusal(InputError, what="prompts"):
        generator.rollout([])
    with refusal(InputError, what="prompt", got="{'answer': '4'}", expected="`prompt`"):
        generator.rollout([{"answer": "4"}])
    with pytest.raises(InputError, match=r"package\.module:name"):
        Generator(settings(tmp_path, episodes="no_colon"))


def test_episodes_become_a_batch_with_the_errors_of_the_world(tmp_path, student):
    published(tmp_path, student)
    named = {"episodes": "recipes.monarch.world:episodes", "max_completion_length": 256}
    rows = [row for row in tasks(20_000, 2) for _ in range(2)]
    texts = Generator(settings(tmp_path, **named)).rollout(rows, batch_id=0, version=0)
    kept = SavedRollouts.load(tmp_path / "rollouts", 0)
    assert all(0 < sum(each.sampled) < len(each.sampled) for each in kept.rollouts)  # the world answered
    decode = load_tokenizer(MODEL).decode
    for text, each in zip(texts, kept.rollouts, strict=True):  # and its answers are no words of the policy
        turns = [each.completion_ids[run.start : run.end] for run in sampled_runs(each)]
        assert len(turns) > 1
        assert text == "\n".join(decode(ids, skip_special_tokens=True) for ids in turns)
    known = _make_reward_rows(kept, rows)
    assert all(set(each["info"]) == {"files_worth"} and each["messages"] for each in known)
    maker = _BatchBuilder(MODEL, BatchSettings(num_generations=2))
    found = maker.find_sites(kept, 0)
    batch = maker.batch(kept, [1.0, 0.0, 0.5, 0.25], found)
    assert batch.advantages.tolist() == [0.5, -0.5, 0.125, -0.125]
    for row, each in enumerate(kept.rollouts):
        ids = batch.input_ids[row][batch.attention_mask[row].bool()].tolist()
        assert ids == [*each.prompt_ids, *each.completion_ids]
        assert batch.loss_mask[row].sum() == sum(each.sampled)
    assert sum(map(len, batch.sites)) == sum(each.counts["sites"] for each in found) > 0
    states = maker.states(kept, found)
    assert len(states) == len({state["state_id"] for state in states}) > 0
    assert all(state["messages"][0]["role"] == "user" and state["student_action"] for state in states)
    failed = RolloutOptions(only_failed_rollouts=True)
    strict = _BatchBuilder(MODEL, BatchSettings(num_generations=2, rollouts=failed)).batch(
        kept, [1.0, 0, 1.0, 0], found
    )
    assert [len(each) for each in strict.sites] == [0, len(batch.sites[1]), 0, len(batch.sites[3])]


def test_an_episode_that_is_cut_off_has_no_turn_that_is_not_in_its_ids(tmp_path, student):
    published(tmp_path, student)
    named = {"episodes": "recipes.monarch.world:episodes", "max_completion_length": 150}
    rows = [{**row, "padding": padding} for row in tasks(20_000, 2) for padding in (0, 80)]
    Generator(settings(tmp_path, **named)).rollout(rows, batch_id=0, version=0)
    kept = SavedRollouts.load(tmp_path / "rollouts", 0)
    assert max(len(each.completion_ids) for each in kept.rollouts[::2]) >= 149  # a short prompt, cut off
    for each in kept.rollouts:
        assert len(each.completion_ids) <= 150
        turns = sum(message["role"] == "assistant" for message in each.messages)
        assert turns == len(sampled_runs(each)) > 0
    maker = _BatchBuilder(MODEL, BatchSettings(num_generations=2))
    assert any(each.turns for each in maker.find_sites(kept, 0)[::2])
    assert not [name for name in maker.counts if "messages" in name]


def test_turns_beyond_the_limit_are_refused_and_messages_that_fit_no_turn_are_counted(tmp_path, student):
    published(tmp_path, student)
    named = {"episodes": "recipes.monarch.world:inflated", "max_completion_length": 20}
    with refusal(InputError, what="episode 0", expected="max_completion_length") as caught:
        Generator(settings(tmp_path, **named)).rollout(tasks(20_000, 1), batch_id=0, version=0)
    assert re.search(r"\b20\b", caught.value.got)
    two = [{"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}]
    cut = Rollout(rollout_id="a", prompt_ids=[5], completion_ids=[6], sampled=[1], prompt=[], messages=two)
    maker = _BatchBuilder(MODEL, BatchSettings(num_generations=1))
    maker.find_sites(SavedRollouts(rollouts=[cut], columns=[{}], weights_version=0), 0)
    assert maker.counts["dropped:messages_are_not_the_turns"] == 1


def test_pairs_become_ids_or_are_counted(tmp_path):
    maker = _BatchBuilder(MODEL, BatchSettings(num_generations=1, max_pair_tokens=200))
    messages = [{"role": "user", "content": "Fix the test."}]
    call = '[TOOL_USE] name=read input={"path":"a.py"}'
    good = {"state_id": "a::1", "state_messages": messages, "chosen": call, "rejected": "No.", "n_teachers_agreeing": 2}
    long = {**good, "state_id": "b::1", "state_messages": [{"role": "user", "content": "word " * 500}]}
    equal = {**good, "state_id": "c::1", "rejected": call}
    tensors = maker._pair_tensors([good, long, equal])
    assert tensors["dpo_chosen_input_ids"].shape[0] == tensors["dpo_rejected_input_ids"].shape[0] == 1
    assert maker.counts == {"pairs": 1, "dropped:pair_too_long": 1, "dropped:pair_of_equal_answers": 1}
    mask = tensors["dpo_rejected_response_mask"][0].bool()
    text = load_tokenizer(MODEL).decode(tensors["dpo_rejected_input_ids"][0][mask], skip_special_tokens=True)
    assert text.strip() == "No."


class FakeLLM:
    """vLLM's names as `VllmSampler` uses them."""

    def __init__(self, *, model, dtype, seed, gpu_memory_utilization, trust_remote_code):
        assert trust_remote_code is False
        self.loaded: dict[str, torch.Tensor] = {}
        self.resets = 0
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda pairs: self.loaded.update(pairs)))
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts, settings, *, use_tqdm):
        """As vLLM does: one settings for all requests or one for each, and a request's luck is its settings' seed."""
        each_has_its_own = isinstance(settings, list)
        assert not each_has_its_own or len(settings) == len(prompts)
        answers = []
        for place, prompt in enumerate(prompts):
            own = settings[place] if each_has_its_own else settings
            assert 0 <= own.seed < 2**31
            luck = torch.randint(10, 200, (4,), generator=torch.Generator().manual_seed(own.seed)).tolist()
            ids = (*prompt["prompt_token_ids"][:2], *luck, own.stop_token_ids[0], 5)
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]))
        return answers


@pytest.fixture
def _vllm(monkeypatch):
    fake = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **named: SimpleNamespace(**named))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(sampling.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sampling.os, "environ", {})


@pytest.mark.usefixtures("_vllm")
def test_rollouts_of_a_group_differ_under_vllm_and_are_drawn_alike_again(tmp_path, student):
    published(tmp_path, student)
    generator = Generator(settings(tmp_path))

    def drawn(batch_id: int) -> list[list[int]]:
        generator.rollout(["read the file"] * 8, batch_id=batch_id, version=0)
        return [list(each.completion_ids) for each in SavedRollouts.load(tmp_path / "rollouts", batch_id).rollouts]

    first = drawn(0)
    assert len({tuple(each) for each in first}) == 8
    assert drawn(1) != first
    assert drawn(0) == first


@pytest.mark.usefixtures("_vllm")
def test_vllm_is_given_the_version_and_asked_by_ids(tmp_path, student):
    published(tmp_path, student)
    generator = Generator(settings(tmp_path))
    assert generator.sampler.name == "vllm"
    generator.rollout(["read the file"], batch_id=0, version=0)
    kept = SavedRollouts.load(tmp_path / "rollouts", 0)
    end = load_tokenizer(MODEL).eos_token_id
    ids = kept.rollouts[0].completion_ids
    assert ids[:2] == kept.rollouts[0].prompt_ids[:2]
    assert (len(ids), ids[-1]) == (7, end)
    llm = generator.sampler._llm
    assert llm.resets == 1
    assert llm.loaded.keys() == dict(student.named_parameters()).keys()
    assert all(torch.equal(llm.loaded[name], each) for name, each in student.named_parameters())
    assert sampling.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_without_vllm_asking_for_it_says_so(tmp_path):
    with refusal(InputError, what='"vllm"', got="vllm", expected="vLLM"):
        Generator(settings(tmp_path, engine="vllm"))
