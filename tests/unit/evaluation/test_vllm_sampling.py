"""What vLLM is asked, against a stand-in with the signatures of 0.22 to 0.31 that are used; vLLM itself is not run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace

import pytest

from composer_replication.batch.render.renderer import Renderer
from composer_replication.config.sections import EvaluationConfig
from composer_replication.errors import InputError
from composer_replication.evaluation import vllm_sampling
from composer_replication.evaluation.arms import Arm
from composer_replication.evaluation.sampling import State, sample_actions
from composer_replication.evaluation.scored_calls import ScoreJournal
from composer_replication.evaluation.vllm_sampling import make_vllm_engine
from refusals import refusal
from tokenizer_assets import load

SECTION = EvaluationConfig(samples=2, new_tokens=7, temperature=0.5, precision="float32", seed=3)


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self):
        assert self.lora_int_id > 0


@dataclass
class Asked:
    """All that the stand-in was asked for."""

    engines: list[dict] = field(default_factory=list)
    calls: list[tuple] = field(default_factory=list)


def answer(params, number):
    """The first sample runs out of tokens, the second ends its turn."""
    ids = [5 + number, 6]
    is_over = number > 0
    ids += [params.stop_token_ids[0]] if is_over else []
    return SimpleNamespace(index=number, token_ids=ids, text="", finish_reason="stop" if is_over else "length")


@pytest.fixture
def asked(monkeypatch):
    """`vllm` as far as it is used."""
    told = Asked()

    class LLM:
        def __init__(
            self, model, *, tokenizer=None, trust_remote_code=False, tensor_parallel_size=1, dtype="auto", seed=0,
            gpu_memory_utilization=0.9, max_model_len=None, enable_lora=False, max_lora_rank=16,
        ):  # fmt: skip
            told.engines.append({name: value for name, value in locals().items() if name not in ("self", "told")})

        def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
            told.calls.append((prompts, sampling_params, lora_request))
            outputs = [answer(sampling_params, number) for number in range(sampling_params.n)]
            return [SimpleNamespace(prompt_token_ids=each["prompt_token_ids"], outputs=outputs) for each in prompts]

    module, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    module.LLM, module.SamplingParams, request.LoRARequest = LLM, SamplingParams, LoRARequest
    for name, each in (("vllm", module), ("vllm.lora", lora), ("vllm.lora.request", request)):
        monkeypatch.setitem(sys.modules, name, each)
    monkeypatch.setattr(vllm_sampling.torch.cuda, "is_available", lambda: True)
    return told


def arms(tmp_path, **settings):
    """A base, and two adapters on it."""
    made = [Arm("before", "base", "base", None)]
    for name, rank in (("after", 4), ("control", 12)):
        (tmp_path / name).mkdir(exist_ok=True)
        facts = {"peft_type": "LORA", "r": rank, "bias": "none", **settings}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(facts))
        made.append(Arm(name, str(tmp_path / name), "base", str(tmp_path / name)))
    return made


def test_every_arm_is_drawn_from_by_one_engine_with_the_same_settings(asked, tmp_path):
    states = [State(str(at), "c", "s", 0, f"t{at}", "good", "", None, [1, 2, 3 + at]) for at in range(3)]
    told, renderer = arms(tmp_path), Renderer(load("llama3"))
    engine, kept = make_vllm_engine(told, SECTION, max_tokens=64), ScoreJournal(tmp_path / "kept.jsonl")
    drawn = {
        arm.name: sample_actions(None, arm.name, renderer, states, SECTION, kept, arm.name, engine.for_arm(arm))
        for arm in told
    }
    kept.close()
    assert asked.engines == [
        {"model": "base", "tokenizer": None, "trust_remote_code": False, "tensor_parallel_size": 1, "dtype": "float32",
         "seed": 3, "gpu_memory_utilization": 0.4, "max_model_len": 64, "enable_lora": True, "max_lora_rank": 16}
    ]  # fmt: skip
    prompts, params, lora = zip(*asked.calls, strict=True)
    assert prompts == ([{"prompt_token_ids": state.prompt} for state in states],) * 3
    assert [None if each is None else (each.lora_name, each.lora_int_id, each.lora_path) for each in lora] == [
        None,
        ("after", 2, str(tmp_path / "after")),
        ("control", 3, str(tmp_path / "control")),
    ]
    assert len({json.dumps(vars(each)) for each in params}) == 1  # the same seed for all arms
    (one, *_) = params
    assert (one.n, one.temperature, one.top_p, one.top_k, one.max_tokens, one.logprobs) == (2, 0.5, 1.0, -1, 7, None)
    assert renderer.tokenizer.eos_token_id in one.stop_token_ids
    first, second = drawn["after"][0]
    assert (first.num_tokens, first.has_ended, second.num_tokens, second.has_ended) == (2, False, 2, True)
    assert second.text == renderer.tokenizer.decode([6, 6])
    assert drawn["before"] == drawn["control"]


def test_what_was_drawn_is_kept_under_the_engine_s_name(asked, tmp_path):
    states = [State("0", "c", "s", 0, "t", "good", "", None, [1, 2])]
    (arm, *_) = told = arms(tmp_path)
    kept, renderer = ScoreJournal(tmp_path / "kept.jsonl"), Renderer(load("llama3"))
    engine = make_vllm_engine(told, SECTION, max_tokens=64).for_arm(arm)
    for _ in range(2):
        sample_actions(None, "weights", renderer, states, SECTION, kept, "before", engine)
    kept.close()
    assert len(asked.calls) == 1
    (key,) = kept._values
    assert key.split(":")[-2] == "vllm"


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"peft_type": "IA3"}, {"r": 999}]
)
def test_adapters_that_vllm_cannot_load_are_drawn_from_by_transformers(asked, tmp_path, settings):
    told = arms(tmp_path, **settings)
    assert make_vllm_engine(told, SECTION, 64) is None
    with refusal(InputError, what="evaluation.sampler", got="LoRA"):
        make_vllm_engine(told, replace(SECTION, sampler="vllm"), 64)
    assert make_vllm_engine(told[:1], SECTION, 64) is not None
    assert make_vllm_engine(told[:1], replace(SECTION, sampler="transformers"), 64) is None


def test_without_vllm_transformers_draw(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_sampling, "available", lambda _name: False)
    assert make_vllm_engine(arms(tmp_path), SECTION, 64) is None
    with refusal(InputError, what="evaluation.sampler", got="vllm"):
        make_vllm_engine(arms(tmp_path), replace(SECTION, sampler="vllm"), 64)
