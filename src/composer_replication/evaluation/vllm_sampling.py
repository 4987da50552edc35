"""Sample actions with vLLM where it is installed: one engine per base model, its adapters as LoRA requests.

Written against the names that vLLM 0.22 to 0.31 and TRL 1.16 share (`LLM`, `SamplingParams`, `LoRARequest`) and tested
against a stub with these signatures. It has not been run with vLLM itself.
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
from composer_replication.evaluation.arms import Arm, adapter_facts, device_and_dtype
from composer_replication.optional import available

NAME = "vllm"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as `max_lora_rank`."""
_SHARE_OF_MEMORY = 0.4
"""The model that scores log-probs is on the same GPU, so the engine may not take all of its memory."""
# Adapter settings that change more than low-rank matrices; a LoRA request would ignore them.
_MORE_THAN_LORA = ("modules_to_save", "trainable_token_indices", "use_dora", "rank_pattern", "layer_replication")


Draw = Callable[[Sequence[list[int]], int], list[list[tuple[list[int], bool]]]]
"""Maps prompts and a seed to the samples of each prompt: token ids, and whether the turn ended by itself."""


class _VllmEngine:
    """Samples for one arm at a time; arms on the same base model share an engine.

    `longest` is the maximum number of tokens of a prompt with its answer.
    """

    name = NAME

    def __init__(self, arms: Sequence[Arm], section: EvaluationConfig, longest: int) -> None:
        self._section, self._longest = section, longest
        self._adapters = {arm.adapter: at for at, arm in enumerate(arms, start=1) if arm.adapter is not None}
        ranks = [int(adapter_facts(Path(adapter)).get("r") or 0) for adapter in self._adapters]
        # vLLM needs the largest rank when it starts.
        self._rank = next(rank for rank in _RANKS if rank >= max(ranks, default=0))
        self._base, self._llm = "", None

    def of(self, arm: Arm) -> ArmEngine:
        return ArmEngine(self, arm)

    def drawer(self, arm: Arm, stops: Sequence[int], number: int, new_tokens: int, temperature: float) -> Draw:
        # Imported by name: vLLM is optional, and type checkers need not find it.
        vllm = importlib.import_module(NAME)
        lora = importlib.import_module(f"{NAME}.lora.request").LoRARequest
        llm = self._engine(vllm, arm)
        lora_request = None if arm.adapter is None else lora(arm.name, self._adapters[arm.adapter], arm.adapter)

        def draw(prompts: Sequence[list[int]], seed: int) -> list[list[tuple[list[int], bool]]]:
            settings = vllm.SamplingParams(
                n=number,
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
                [(list(output.token_ids), output.finish_reason == "stop") for output in one.outputs] for one in answers
            ]

        return draw

    def _engine(self, vllm: Any, arm: Arm) -> Any:
        if self._llm is None or self._base != arm.base:
            self._llm = None  # free the memory of the previous engine first
            gc.collect()
            dtype = str(device_and_dtype(self._section.precision)[1]).removeprefix("torch.")
            # Without adapters the LoRA buffers would only cost memory.
            with_adapters = {"enable_lora": True, "max_lora_rank": self._rank} if self._adapters else {}
            self._llm = vllm.LLM(
                model=arm.base,
                dtype=dtype,
                max_model_len=self._longest,
                gpu_memory_utilization=_SHARE_OF_MEMORY,
                seed=self._section.seed,
                trust_remote_code=False,
                **with_adapters,
            )
            self._base = arm.base
        return self._llm


class ArmEngine(NamedTuple):
    """The engine as one arm uses it."""

    engine: _VllmEngine
    arm: Arm
    most_at_once: int = 64

    def drawer(self, stops: Sequence[int], number: int, new_tokens: int, temperature: float) -> Draw:
        return self.engine.drawer(self.arm, stops, number, new_tokens, temperature)


def engine_of(arms: Sequence[Arm], section: EvaluationConfig, longest: int) -> _VllmEngine | None:
    """Return the engine for all arms, or None for transformers.

    It is one for all, because two engines would not sample alike from the same weights. Raises InputError if the config
    demands vLLM where it cannot be used.
    """
    why = "" if section.sampler == "transformers" else _why_not(arms)
    if why and section.sampler == NAME:
        fix = "Set it to auto."
        raise InputError(
            explain("evaluation.sampler = vllm", got=why, expected="vLLM, a GPU and plain LoRA adapters", fix=fix)
        )
    return None if why or section.sampler == "transformers" else _VllmEngine(arms, section, longest)


def _why_not(arms: Sequence[Arm]) -> str:
    if not available(NAME):
        return "no vllm package"
    if not torch.cuda.is_available():
        return "no GPU"
    for adapter in (arm.adapter for arm in arms if arm.adapter is not None):
        facts = adapter_facts(Path(adapter))
        is_more = any(facts.get(key) for key in _MORE_THAN_LORA) or facts.get("bias", "none") != "none"
        if is_more or facts.get("peft_type") != "LORA" or int(facts.get("r") or 0) > _RANKS[-1]:
            return f"{adapter}, which is more than a LoRA adapter of rank {_RANKS[-1]}"
    return ""
