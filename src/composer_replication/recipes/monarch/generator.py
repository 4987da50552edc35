"""What the generator's actor does: rollouts of numbered batches, drawn with the weights of a version."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from composer_replication.batch.model_folder import (
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
)
from composer_replication.errors import InputError, explain
from composer_replication.optional import available
from composer_replication.recipes.monarch.tensor_file import KeptRollouts, SharedWeights
from composer_replication.trainer.rollouts.gathering import schemas_of
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.generation.talks import Talk, Talking
from composer_replication.trainer.rollouts.sites import Rollout, sampled_runs

Row = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]] | Row
"""A text, a list of messages, or a row with the key `prompt` that holds one of the two."""


class _RolloutEpisode(Talk, Protocol):
    """A conversation with a world, as `GeneratorSettings.episodes` makes it.

    Optional beside these: `tools` (schemas), `columns` (what its world says of it, for reward functions), `signals`.
    """

    prompt_ids: list[int]
    ids: list[int]
    sampled: list[int]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GeneratorSettings:
    """`episodes` names a function ("package.module:function") that makes conversations of rows:
    `function(tokenizer, rows, lucks) -> episodes`; without it a rollout is one answer to its prompt.
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
    """A sampler with the tokenizer of its model."""

    def __init__(self, settings: GeneratorSettings) -> None:
        self.settings = settings
        self._tokenizer: Any = load_tokenizer(settings.model)
        engine: EngineName = "transformers" if settings.episodes else settings.engine
        self.sampler = _sampler_of(
            engine,
            settings.model,
            self._tokenizer,
            device=settings.device,
            dtype=settings.dtype,
            seed=settings.seed,
        )
        self._episodes: Callable[..., Sequence[_RolloutEpisode]] | None = None
        if settings.episodes:
            self._episodes = function_named(settings.episodes, what="episodes")
        self._shared = SharedWeights(settings.weights)
        self._version: int | None = None
        self._calls = 0

    def rollout(
        self, prompts: Sequence[Prompt], *, batch_id: int | None = None, version: int | None = None
    ) -> list[str]:
        """What the policy wrote of each, turns a line apart. With a batch's number it is kept as that batch's rollouts.

        `version` says which weights draw; None the newest there are. What is drawn depends on the seed, the batch and
        the place in it alone.
        """
        self._load(version)
        self._calls += 1
        seed = f"{self.settings.seed}:{f'call {self._calls}' if batch_id is None else batch_id}"
        rows = [_row(prompt) for prompt in prompts]
        if not rows:
            raise InputError(explain("prompts", got="none", expected="at least one"))
        rollouts, columns = self._played(rows, seed) if self._episodes else self._answered(rows, seed)
        if batch_id is not None:
            assert self._version is not None
            kept_rollouts = KeptRollouts(rollouts=rollouts, columns=columns, weights_version=self._version)
            kept_rollouts.save(Path(self.settings.folder) / "rollouts", batch_id)
        return [self._written(rollout) for rollout in rollouts]

    def _written(self, rollout: Rollout) -> str:
        """Without what the world answered: a reward would take the world's words for the policy's."""
        turns = [list(rollout.completion_ids[run.start : run.end]) for run in sampled_runs(rollout)]
        return "\n".join(str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in turns)

    def _load(self, version: int | None) -> None:
        if version is None:
            version = max(self._shared.versions(), default=None)
        if version is not None and version != self._version:
            self.sampler.load(self._shared, version)
            self._version = version

    def _answered(self, rows: Sequence[Row], seed_text: str) -> tuple[list[Rollout], list[Row]]:
        settings = self.settings
        prompts = [self._prompt_ids(row["prompt"]) for row in rows]
        seed = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:6], "big")
        drawn = self.sampler.sample(
            prompts, most=settings.max_completion_length, temperature=settings.temperature, seed=seed
        )
        rollouts = [
            Rollout(
                rollout_id=f"{seed_text}-{number}",
                prompt_ids=prompt,
                completion_ids=ids,
                sampled=None,
                prompt=[] if isinstance(row["prompt"], str) else row["prompt"],
                messages=[{"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}],
            )
            for number, (row, prompt, ids) in enumerate(zip(rows, prompts, drawn, strict=True))
        ]
        return rollouts, [{} for _ in rows]

    def _played(self, rows: Sequence[Row], seed_text: str) -> tuple[list[Rollout], list[Row]]:
        assert self._episodes is not None
        assert isinstance(self.sampler, _TransformersSampler)
        most = self.settings.max_completion_length
        lucks = [f"{seed_text}:{index}" for index in range(len(rows))]
        episodes = list(self._episodes(self._tokenizer, rows, lucks))
        room = most + max(len(episode.prompt_ids) for episode in episodes)
        self.sampler.converse(episodes, room=room, most=most, temperature=self.settings.temperature)
        for number, episode in enumerate(episodes):
            _check_sampled(episode.sampled, most, number)
        rollouts = [
            Rollout(
                rollout_id=f"{seed_text}-{number}",
                prompt_ids=episode.prompt_ids,
                completion_ids=episode.ids[:most],  # the world's last answer may be longer than the room that was left
                sampled=episode.sampled[:most],
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
        text = self._tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _row(prompt: Prompt) -> Row:
    row = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
    if not row.get("prompt"):
        raise InputError(explain("prompt", got=repr(prompt)[:80], expected="a text, messages, or a row with `prompt`"))
    return row


def _check_sampled(sampled: Sequence[int], most: int, number: int) -> None:
    """Turns beyond the limit would be judged, by their messages and by the world, and not trained on."""
    if beyond := sum(sampled[most:]):
        fix = "An episode's `ids` and `sampled` are what it was told and what it answered, in that order."
        got = f"{beyond} sampled tokens after the first {most}"
        expected = "no more tokens than max_completion_length"
        raise InputError(explain(f"episode {number}", got=got, expected=expected, fix=fix))


# Tokens drawn by vLLM where it is installed and there is a GPU, else by `rollouts.generation` on a transformers model.
#
# Both take a version of the shared weights and prompts as ids, and draw as a seed says: the same question to a process
# that was started anew has the same answer (vLLM: on the same hardware, with the same batch).

EngineName = Literal["auto", "vllm", "transformers"]


class _Sampler(Protocol):
    """What a generator asks of an engine."""

    name: str

    def load(self, shared: SharedWeights, version: int) -> None:
        """Draw with this version from now on."""
        ...

    def sample(self, prompts: Sequence[list[int]], *, most: int, temperature: float, seed: int) -> list[list[int]]:
        """A completion of each prompt, with its end token where it came to an end."""
        ...


class _TransformersSampler:
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


def _sampler_of(
    engine: EngineName, model: str, tokenizer: Any, *, device: str, dtype: str, seed: int
) -> _TransformersSampler | VllmSampler:
    """`auto` takes vLLM where it can run."""
    why = "" if available("vllm") else "vllm, which is not installed"
    why = why or ("" if torch.cuda.is_available() else "no GPU")
    if engine == "vllm" and why:
        raise InputError(explain('engine "vllm"', got=why, expected="vLLM and a GPU", fix='Leave it at "auto".'))
    if engine == "transformers" or why:
        return _TransformersSampler(model, tokenizer, device=device, dtype=dtype)
    return VllmSampler(model, tokenizer, dtype=dtype, seed=seed)


def _up_to_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _like(model: str) -> Any:
    """A model of the same parameters in plain memory, into which a version is read; its own weights are nothing."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(load_config(model, what="model"), trust_remote_code=False)


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


# Functions that a run names instead of sending: an actor imports them where it runs, and code is never an argument.


def function_named(name: str, *, what: str) -> Callable[..., Any]:
    """`package.module:function`, imported."""
    module, colon, function = name.partition(":")
    expected = '"package.module:function"'
    if not colon or not module or not function:
        raise InputError(explain(what, got=repr(name), expected=expected))
    try:
        target: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        fix = "The actor's process must be able to import it: install it, or put its folder into PYTHONPATH."
        raise InputError(explain(what, got=f"{name}: {error}", expected=f"{expected} that exists", fix=fix)) from error
    if not callable(target):
        raise InputError(explain(what, got=f"{name}, a {type(target).__name__}", expected="a function"))
    return target
