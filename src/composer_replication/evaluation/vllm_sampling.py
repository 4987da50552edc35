"""Sample actions with vLLM if it is installed: one engine per base model, with its adapters as LoRA requests.

The code uses only names that vLLM 0.22 to 0.31 and TRL 1.16 share (`LLM`, `SamplingParams`, `LoRARequest`). It is
tested against a stub with these signatures and has not been run with vLLM itself.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from composer_replication.config.sections import EvaluationConfig
from composer_replication.errors import InputError, explain
from composer_replication.evaluation.arms import Arm, device_and_dtype
from composer_replication.optional import available
from composer_replication.runs.files import ADAPTER_SETTINGS
from composer_replication.runs.lineage import read_json_object

_VLLM = "vllm"
# The values that vLLM accepts as `max_lora_rank`.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The model that scores log-probs is on the same GPU, so the engine must not take all of its memory.
_GPU_MEMORY_SHARE = 0.4
# Adapter settings that a LoRA request ignores, because they change more than low-rank matrices.
_UNSUPPORTED_SETTINGS = ("modules_to_save", "trainable_token_indices", "use_dora", "rank_pattern", "layer_replication")


_Sampler = Callable[[Sequence[list[int]], int], list[list[tuple[list[int], bool]]]]
"""Takes prompts and a seed, and returns for each prompt its samples: token ids, and whether the turn has ended."""


class _VllmEngine:
    """Loads vLLM for one base model at a time, and samples from it with each of its adapters.

    `max_tokens` is the length of the longest prompt with its answer.
    """

    name = _VLLM

    def __init__(self, arms: Sequence[Arm], section: EvaluationConfig, max_tokens: int) -> None:
        self._section, self._max_tokens = section, max_tokens
        self._adapters = {arm.adapter: at for at, arm in enumerate(arms, start=1) if arm.adapter is not None}
        ranks = [int(read_json_object(Path(adapter) / ADAPTER_SETTINGS).get("r") or 0) for adapter in self._adapters]
        # vLLM needs the largest rank when it starts.
        self._rank = next(rank for rank in _RANKS if rank >= max(ranks, default=0))
        self._base, self._llm = "", None

    def for_arm(self, arm: Arm) -> ArmEngine:
        return ArmEngine(self, arm)

    def make_sampler(
        self, arm: Arm, stops: Sequence[int], num_samples: int, new_tokens: int, temperature: float
    ) -> _Sampler:
        # Imported by name: vLLM is optional, and type checkers need not find it.
        vllm = importlib.import_module(_VLLM)
        lora = importlib.import_module(f"{_VLLM}.lora.request").LoRARequest
        llm = self._load(vllm, arm)
        lora_request = None if arm.adapter is None else lora(arm.name, self._adapters[arm.adapter], arm.adapter)

        def sample(prompts: Sequence[list[int]], seed: int) -> list[list[tuple[list[int], bool]]]:
            settings = vllm.SamplingParams(
                n=num_samples,
                temperature=temperature,
                # Plain sampling: a model's generation config must not change what is compared.
                top_p=1.0,
                top_k=-1,
                repetition_penalty=1.0,
                max_tokens=new_tokens,
                seed=seed % 2**31,
                stop_token_ids=list(stops),
            )
            token_prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            answers = llm.generate(token_prompts, settings, use_tqdm=False, lora_request=lora_request)
            return [
                [(list(output.token_ids), output.finish_reason == "stop") for output in answer.outputs]
                for answer in answers
            ]

        return sample

    def _load(self, vllm: Any, arm: Arm) -> Any:
        if self._llm is None or self._base != arm.base:
            self._llm = None  # free the memory of the previous engine first
            gc.collect()
            dtype = str(device_and_dtype(self._section.precision)[1]).removeprefix("torch.")
            # Without adapters the LoRA buffers would only cost memory.
            with_adapters = {"enable_lora": True, "max_lora_rank": self._rank} if self._adapters else {}
            self._llm = vllm.LLM(
                model=arm.base,
                dtype=dtype,
                max_model_len=self._max_tokens,
                gpu_memory_utilization=_GPU_MEMORY_SHARE,
                seed=self._section.seed,
                trust_remote_code=False,
                **with_adapters,
            )
            self._base = arm.base
        return self._llm


class ArmEngine(NamedTuple):
    """An engine that samples from the model of one arm."""

    engine: _VllmEngine
    arm: Arm
    max_batch_states: int = 64

    def make_sampler(self, stops: Sequence[int], num_samples: int, new_tokens: int, temperature: float) -> _Sampler:
        return self.engine.make_sampler(self.arm, stops, num_samples, new_tokens, temperature)


def make_vllm_engine(arms: Sequence[Arm], section: EvaluationConfig, max_tokens: int) -> _VllmEngine | None:
    """Return a vLLM engine for all arms, or None if transformers is to be used.

    All arms use the same library, because vLLM and transformers sample differently from the same weights. Raises
    InputError if the config requires vLLM but it cannot be used.
    """
    why_not = "" if section.sampler == "transformers" else _why_not_vllm(arms)
    if why_not and section.sampler == _VLLM:
        fix = "Set it to auto."
        raise InputError(
            explain("evaluation.sampler = vllm", got=why_not, expected="vLLM, a GPU and plain LoRA adapters", fix=fix)
        )
    return None if why_not or section.sampler == "transformers" else _VllmEngine(arms, section, max_tokens)


def _why_not_vllm(arms: Sequence[Arm]) -> str:
    """Return the reason why vLLM cannot be used, or an empty string if it can."""
    if not available(_VLLM):
        return "no vllm package"
    if not torch.cuda.is_available():
        return "no GPU"
    for adapter in (arm.adapter for arm in arms if arm.adapter is not None):
        settings = read_json_object(Path(adapter) / ADAPTER_SETTINGS)
        is_unsupported = (
            any(settings.get(key) for key in _UNSUPPORTED_SETTINGS) or settings.get("bias", "none") != "none"
        )
        if is_unsupported or settings.get("peft_type") != "LORA" or int(settings.get("r") or 0) > _RANKS[-1]:
            return f"{adapter}, which is not a plain LoRA adapter of rank {_RANKS[-1]} or less"
    return ""
