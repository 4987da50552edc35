"""What TRL 1.16 calls of vLLM, and nothing more: a stand-in that samples with a copy of the model on a CPU.

Any other name, argument or method is an error, so a TRL that calls something else fails here. `CALLS` says what was
called.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

CALLS: list[tuple[str, Any]] = []


class SamplingParams:
    def __init__(self, *, n, repetition_penalty, temperature, top_p, top_k, min_p, max_tokens, logprobs):
        CALLS.append(("SamplingParams", dict(locals(), self=None)))
        assert (n, repetition_penalty, top_p, top_k, min_p, logprobs) == (1, 1.0, 1.0, 0, 0.0, 0)
        self.temperature, self.max_tokens = temperature, max_tokens


class RequestOutput:
    """A prompt's ids, and `outputs` with the ids and log-probs of each completion."""

    def __init__(self, prompt_token_ids: list[int], outputs: list[Any]) -> None:
        self.prompt_token_ids, self.outputs = prompt_token_ids, outputs


class LLM:
    def __init__(
        self,
        *,
        model,
        tensor_parallel_size,
        gpu_memory_utilization,
        max_model_len,
        max_num_seqs,
        enable_sleep_mode,
        model_impl,
        distributed_executor_backend,
        seed,
        max_num_batched_tokens,
        logprobs_mode,
        quantization,
        trust_remote_code,
    ):
        CALLS.append(("LLM", {name: value for name, value in locals().items() if name != "self"}))
        from transformers import AutoModelForCausalLM

        self.copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.no_grad():  # as if it had started from other weights: what it samples with is what it was sent
            for parameter in self.copy.parameters():
                parameter.zero_()
        self._luck = torch.Generator().manual_seed(seed)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load_weights))
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=self.copy.config.max_position_embeddings),  # of a tool loop
        )

    @torch.no_grad()
    def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        ((name, value),) = weights
        dict(self.copy.named_parameters())[name].copy_(value)
        CALLS.append(("load_weights", name))

    def reset_prefix_cache(self) -> None:
        CALLS.append(("reset_prefix_cache", None))

    @torch.no_grad()
    def generate(self, prompts, *, sampling_params, use_tqdm):
        assert use_tqdm is False
        CALLS.append(("generate", [sorted(each) for each in prompts]))
        return [self._completed(each["prompt_token_ids"], sampling_params) for each in prompts]

    def _completed(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        ids, logprobs, end = list(prompt), [], self.copy.config.eos_token_id
        while len(ids) - len(prompt) < params.max_tokens and (len(ids) == len(prompt) or ids[-1] != end):
            row = (self.copy(input_ids=torch.tensor([ids])).logits[0, -1] / params.temperature).log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1, generator=self._luck))
            ids.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(row[token]), rank=1)})
        said = SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=logprobs)
        return RequestOutput(list(prompt), [said])
