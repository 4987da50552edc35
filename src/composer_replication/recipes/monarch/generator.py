"""Sample the rollouts of numbered batches with a specific version of the weights.

Without `GeneratorSettings.episodes`, a rollout is one answer to its prompt; otherwise it is a conversation with an
environment, played by this package's own rollout loop. Tokens are sampled by vLLM if it is installed and there is a
GPU, otherwise by a transformers model. Both samplers load weights from shared memory and are seeded per call, so a
restarted process gives the same answer to the same request (with vLLM: on the same hardware and in the same batch).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from composer_replication.batch.model_folder import load_config, load_model, load_tokenizer, resolve_model
from composer_replication.errors import InputError, explain
from composer_replication.optional import available, load_object
from composer_replication.recipes.monarch.tensor_file import SavedRollouts, SharedWeights
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.generation.talks import Talk, Talking
from composer_replication.trainer.rollouts.sites import Rollout, sampled_runs, schemas_of

Row = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]] | Row
"""A text, a list of messages, or a row whose `prompt` is one of the two."""


class _RolloutEpisode(Talk, Protocol):
    """A conversation with an environment, created by the function that `GeneratorSettings.episodes` names.

    Optional attributes: `tools` (schemas), `columns` (reports of the environment, for reward functions), `signals`.
    """

    prompt_ids: list[int]
    ids: list[int]
    sampled: list[int]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """Settings of the generator.

    `episodes` names a function ("package.module:function") that creates one conversation per row:
    `function(tokenizer, rows, seeds) -> episodes`. Without it a rollout is one answer to its prompt.
    """

    model: str
    folder: str
    weights: str
    engine: EngineName = "auto"
    episodes: str | None = None
    max_completion_length: int = 256
    temperature: float = 1.0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"


class Generator:
    """A sampler combined with the tokenizer of its model."""

    def __init__(self, settings: GeneratorSettings) -> None:
        self.settings = settings
        self._tokenizer: Any = load_tokenizer(settings.model)
        # Episodes need the rollout loop of this package, which runs only on transformers models.
        engine: EngineName = "transformers" if settings.episodes else settings.engine
        self.sampler = _make_sampler(
            engine,
            settings.model,
            self._tokenizer,
            device=settings.device,
            dtype=settings.dtype,
            seed=settings.seed,
        )
        self._episodes: Callable[..., Sequence[_RolloutEpisode]] | None = None
        if settings.episodes:
            self._episodes = load_function(settings.episodes, what="episodes")
        self._shared = SharedWeights(settings.weights)
        self._version: int | None = None
        self._calls = 0

    def rollout(
        self, prompts: Sequence[Prompt], *, batch_id: int | None = None, version: int | None = None
    ) -> list[str]:
        """Return the text that the policy wrote for each prompt, with its turns joined by newlines.

        With `batch_id`, the rollouts are saved as those of that batch. `version` selects the weights; None means the
        newest version. The samples depend only on the weights, the seed, the batch and the position in the batch.
        """
        self._load(version)
        self._calls += 1
        # Without a batch number, repeated calls should differ, so the seed depends on their count.
        seed_text = f"{self.settings.seed}:{f'call {self._calls}' if batch_id is None else batch_id}"
        rows = [_to_row(prompt) for prompt in prompts]
        if not rows:
            raise InputError(explain("prompts", got="none", expected="at least one"))
        rollouts, columns = (
            self._play_episodes(rows, seed_text) if self._episodes else self._answer_prompts(rows, seed_text)
        )
        if batch_id is not None:
            assert self._version is not None
            saved_rollouts = SavedRollouts(rollouts=rollouts, columns=columns, weights_version=self._version)
            saved_rollouts.save(Path(self.settings.folder) / "rollouts", batch_id)
        return [self._policy_text(rollout) for rollout in rollouts]

    def _policy_text(self, rollout: Rollout) -> str:
        """Return only the text of the policy's own turns, without the environment's answers."""
        turns = [list(rollout.completion_ids[run.start : run.end]) for run in sampled_runs(rollout)]
        return "\n".join(str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in turns)

    def _load(self, version: int | None) -> None:
        if version is None:
            # Before the first version is published, the model keeps its initial weights.
            version = max(self._shared.versions(), default=None)
        if version is not None and version != self._version:
            self.sampler.load(self._shared, version)
            self._version = version

    def _answer_prompts(self, rows: Sequence[Row], seed_text: str) -> tuple[list[Rollout], list[Row]]:
        settings = self.settings
        prompts = [self._prompt_ids(row["prompt"]) for row in rows]
        # 6 bytes, so that every sampler accepts the seed as a non-negative int64.
        seed = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:6], "big")
        completions = self.sampler.sample(
            prompts, max_tokens=settings.max_completion_length, temperature=settings.temperature, seed=seed
        )
        rollouts = [
            Rollout(
                rollout_id=f"{seed_text}-{number}",
                prompt_ids=prompt,
                completion_ids=ids,
                sampled=None,  # all of them
                prompt=[] if isinstance(row["prompt"], str) else row["prompt"],
                messages=[{"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}],
            )
            for number, (row, prompt, ids) in enumerate(zip(rows, prompts, completions, strict=True))
        ]
        return rollouts, [{} for _ in rows]

    def _play_episodes(self, rows: Sequence[Row], seed_text: str) -> tuple[list[Rollout], list[Row]]:
        assert self._episodes is not None
        assert isinstance(self.sampler, _TransformersSampler)
        max_tokens = self.settings.max_completion_length
        seeds = [f"{seed_text}:{index}" for index in range(len(rows))]
        episodes = list(self._episodes(self._tokenizer, rows, seeds))
        room = max_tokens + max(len(episode.prompt_ids) for episode in episodes)
        self.sampler.converse(episodes, room=room, max_tokens=max_tokens, temperature=self.settings.temperature)
        for number, episode in enumerate(episodes):
            _check_sampled(episode.sampled, max_tokens, number)
        rollouts = [
            Rollout(
                rollout_id=f"{seed_text}-{number}",
                prompt_ids=episode.prompt_ids,
                completion_ids=episode.ids[:max_tokens],  # the last message of the environment may not fit
                sampled=episode.sampled[:max_tokens],
                prompt=row["prompt"] if not isinstance(row["prompt"], str) else [],
                messages=episode.messages,
                signals=getattr(episode, "signals", ()),
                tools=schemas_of(getattr(episode, "tools", ())),
            )
            for number, (row, episode) in enumerate(zip(rows, episodes, strict=True))
        ]
        return rollouts, [dict(getattr(episode, "columns", {})) for episode in episodes]

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        # Rendered to text first, because the template already adds the special tokens.
        text = self._tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _to_row(prompt: Prompt) -> Row:
    row = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    if not row.get("prompt"):
        raise InputError(explain("prompt", got=repr(prompt)[:80], expected="a text, messages, or a row with `prompt`"))
    return row


def _check_sampled(sampled: Sequence[int], max_tokens: int, number: int) -> None:
    """Raise InputError if the policy sampled any tokens after the first `max_tokens`.

    Such tokens would influence the reward, through the messages and the environment, without being trained on.
    """
    if num_beyond := sum(sampled[max_tokens:]):
        fix = "Stop the episode when its `ids` have max_completion_length tokens after the prompt."
        got = f"{num_beyond} sampled tokens after the first {max_tokens}"
        expected = "no more tokens than max_completion_length"
        raise InputError(explain(f"episode {number}", got=got, expected=expected, fix=fix))


EngineName = Literal["auto", "vllm", "transformers"]


class _Sampler(Protocol):
    """The interface between the generator and an inference engine."""

    name: str

    def load(self, shared: SharedWeights, version: int) -> None:
        """Load a version of the weights, to be used for all later samples."""
        ...

    def sample(
        self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """Return one completion per prompt. It includes the end token if that was sampled."""
        ...


class _TransformersSampler:
    """A sampler that runs a transformers model in this process."""

    name = "transformers"

    def __init__(self, model: str, tokenizer: Any, *, device: str, dtype: str) -> None:
        # eval() turns off dropout, which would change the sampling distribution.
        self.model = load_model(model, what="model", dtype=getattr(torch, dtype)).to(device).eval()
        self._tokenizer, self._device, self._generator = tokenizer, device, RolloutGenerator()

    def load(self, shared: SharedWeights, version: int) -> None:
        shared.load_into(self.model, version)

    def sample(
        self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        end, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        # Padding is masked, so the end token can replace a missing pad token.
        pad = end if pad is None else pad
        width = max(map(len, prompts))
        # Prompts are padded on the left, so that all completions begin in the same column.
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=self._device)
        torch.manual_seed(seed)
        # Without top-k, top-p or a repetition penalty, because the loss assumes the model's own probabilities.
        output_ids = self._generator.generate(
            self.model,
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_new_tokens=max_tokens,
            eos_token_id=end,
            pad_token_id=pad,
        )
        return [_cut_after_end(row, end) for row in output_ids[:, width:].tolist()]

    def converse(self, talks: Sequence[Talk], *, room: int, max_tokens: int, temperature: float) -> None:
        """Play complete conversations, in place, with at most `max_tokens` tokens after each prompt."""
        ends, num_talks = [self._tokenizer.eos_token_id], len(talks)
        loop = Talking(self.model, ends=ends, places=num_talks, room=room, most_new=max_tokens, temperature=temperature)
        loop.run(talks)


class _VllmSampler:
    """A sampler that runs vLLM in this process and replaces its weights in place.

    It uses the same vLLM calls as TRL 1.16 and is tested against a fake with their signatures, but has not been run
    with vLLM itself.
    """

    name = "vllm"

    def __init__(self, model: str, tokenizer: Any, *, dtype: str, seed: int, memory_share: float = 0.4) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # otherwise the weights are in another process
        import vllm

        self._vllm, self._end = vllm, tokenizer.eos_token_id
        self._llm = vllm.LLM(
            model=resolve_model(model),
            dtype=dtype,
            seed=seed,
            gpu_memory_utilization=memory_share,
            trust_remote_code=False,
        )
        self._weights = _empty_model(model)

    def load(self, shared: SharedWeights, version: int) -> None:
        # vLLM fuses some parameters; `load_weights` maps the names of the plain model onto its own.
        shared.load_into(self._weights, version)
        worker: Any = self._llm.llm_engine.model_executor.driver_worker
        for name, parameter in self._weights.named_parameters():
            worker.model_runner.model.load_weights([(name, parameter.detach())])
        # Prefixes cached so far were computed with the previous weights.
        self._llm.reset_prefix_cache()

    def sample(
        self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        # One seed per request: vLLM seeds every request separately, so with a shared seed the identical prompts of a
        # GRPO group would all get the same answer.
        settings = [
            self._vllm.SamplingParams(
                n=1,
                temperature=temperature,
                top_p=1.0,
                top_k=-1,
                repetition_penalty=1.0,
                max_tokens=max_tokens,
                seed=(seed + index) % 2**31,
                stop_token_ids=[self._end],
            )
            for index in range(len(prompts))
        ]
        token_prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(token_prompts, settings, use_tqdm=False)
        return [_cut_after_end(list(answer.outputs[0].token_ids), self._end) for answer in answers]


def _make_sampler(
    engine: EngineName, model: str, tokenizer: Any, *, device: str, dtype: str, seed: int
) -> _TransformersSampler | _VllmSampler:
    """Create the requested sampler; `auto` selects vLLM if it can run here."""
    obstacle = "" if available("vllm") else "vllm is not installed"
    obstacle = obstacle or ("" if torch.cuda.is_available() else "no GPU")
    if engine == "vllm" and obstacle:
        fix = 'Use engine "auto", which falls back to transformers.'
        raise InputError(explain('engine "vllm"', got=obstacle, expected="vLLM and a GPU", fix=fix))
    if engine == "transformers" or obstacle:
        return _TransformersSampler(model, tokenizer, device=device, dtype=dtype)
    return _VllmSampler(model, tokenizer, dtype=dtype, seed=seed)


def _cut_after_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _empty_model(model: str) -> Any:
    """Return an uninitialized model of the same architecture on the CPU, into which a version of the weights can be
    loaded.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(load_config(model, what="model"), trust_remote_code=False)


def load_function(name: str, *, what: str) -> Callable[..., Any]:
    """Import and return the function named by `package.module:function`.

    Settings contain names instead of functions, so that no code is pickled: each actor imports the function itself.
    """
    fix = "The actor's process must be able to import it: install it, or add its folder to PYTHONPATH."
    target = load_object(name, what=what, fix=fix, error_class=InputError)
    if not callable(target):
        raise InputError(explain(what, got=f"{name}, a {type(target).__name__}", expected="a function"))
    return target
