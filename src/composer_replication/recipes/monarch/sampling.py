"""Tokens drawn by vLLM where it is installed and there is a GPU, else by `rollouts.generation` on a transformers model.

Both take a version of the shared weights and prompts as ids, and draw as a seed says: the same question to a process
that was started anew has the same answer (vLLM: on the same hardware, with the same batch).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from composer_replication.batch.model_folder import load_config, load_model, resolve_model
from composer_replication.errors import InputError, explain
from composer_replication.optional import available
from composer_replication.recipes.monarch.shared_weights import SharedWeights
from composer_replication.rollouts.generation.generator import RolloutGenerator
from composer_replication.rollouts.generation.talks import Talk, Talking

EngineName = Literal["auto", "vllm", "transformers"]


class Sampler(Protocol):
    """What a generator asks of an engine."""

    name: str

    def load(self, shared: SharedWeights, version: int) -> None:
        """Draw with this version from now on."""
        ...

    def sample(self, prompts: Sequence[list[int]], *, most: int, temperature: float, seed: int) -> list[list[int]]:
        """A completion of each prompt, with its end token where it came to an end."""
        ...


class TransformersSampler:
    """A model in this process."""

    name = "transformers"

    def __init__(self, model: str, tokenizer: Any, *, device: str, dtype: str) -> None:
        self.model = load_model(model, what="model", dtype=getattr(torch, dtype)).to(device).eval()
        self._tokenizer, self._device, self._generator = tokenizer, device, RolloutGenerator()

    def load(self, shared: SharedWeights, version: int) -> None:
        shared.load_into(self.model, version)

    def sample(self, prompts: Sequence[list[int]], *, most: int, temperature: float, seed: int) -> list[list[int]]:
        end, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        pad = end if pad is None else pad
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=self._device)
        torch.manual_seed(seed)
        drawn = self._generator.generate(
            self.model,
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=most,
            eos_token_id=end,
            pad_token_id=pad,
        )
        return [_up_to_end(row, end) for row in drawn[:, width:].tolist()]

    def converse(self, talks: Sequence[Talk], *, room: int, most: int, temperature: float) -> None:
        """Whole conversations, each of which is answered by its own world, of at most `most` tokens beyond a prompt."""
        ends, num_talks = [self._tokenizer.eos_token_id], len(talks)
        Talking(self.model, ends=ends, places=num_talks, room=room, most_new=most, temperature=temperature).run(talks)


class VllmSampler:
    """vLLM inside this process, its weights exchanged in place.

    Written against the names that TRL 1.16 uses for the same; tested against a stand-in with these signatures. With
    vLLM itself it has not been run.
    """

    name = "vllm"

    def __init__(self, model: str, tokenizer: Any, *, dtype: str, seed: int, memory_share: float = 0.4) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # or the weights are in another process
        import vllm

        self._vllm, self._end = vllm, tokenizer.eos_token_id
        self._llm = vllm.LLM(
            model=resolve_model(model),
            dtype=dtype,
            seed=seed,
            gpu_memory_utilization=memory_share,
            trust_remote_code=False,
        )
        self._shapes = _like(model)

    def load(self, shared: SharedWeights, version: int) -> None:
        shared.load_into(self._shapes, version)
        worker: Any = self._llm.llm_engine.model_executor.driver_worker
        for weight in _named_weights(self._shapes):
            worker.model_runner.model.load_weights([weight])
        self._llm.reset_prefix_cache()

    def sample(self, prompts: Sequence[list[int]], *, most: int, temperature: float, seed: int) -> list[list[int]]:
        # A seed of its own for each: vLLM seeds every request with its settings' seed, and equal prompts (a group of
        # GRPO) with one seed would have equal answers.
        settings = [
            self._vllm.SamplingParams(
                n=1,
                temperature=temperature,
                top_p=1.0,
                top_k=-1,
                repetition_penalty=1.0,
                max_tokens=most,
                seed=(seed + index) % 2**31,
                stop_token_ids=[self._end],
            )
            for index in range(len(prompts))
        ]
        token_prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(token_prompts, settings, use_tqdm=False)
        return [_up_to_end(list(answer.outputs[0].token_ids), self._end) for answer in answers]


def sampler_of(
    engine: EngineName, model: str, tokenizer: Any, *, device: str, dtype: str, seed: int
) -> TransformersSampler | VllmSampler:
    """`auto` takes vLLM where it can run."""
    why = "" if available("vllm") else "vllm, which is not installed"
    why = why or ("" if torch.cuda.is_available() else "no GPU")
    if engine == "vllm" and why:
        raise InputError(explain('engine "vllm"', got=why, expected="vLLM and a GPU", fix='Leave it at "auto".'))
    if engine == "transformers" or why:
        return TransformersSampler(model, tokenizer, device=device, dtype=dtype)
    return VllmSampler(model, tokenizer, dtype=dtype, seed=seed)


def _up_to_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _like(model: str) -> Any:
    """A model of the same parameters in plain memory, into which a version is read; its own weights are nothing."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(load_config(model, what="model"), trust_remote_code=False)


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
