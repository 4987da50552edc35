"""What the generator's actor does: rollouts of numbered batches, drawn with the weights of a version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from composer_replication.batch.model_folder import load_tokenizer
from composer_replication.errors import InputError, explain
from composer_replication.recipes.monarch.named_function import function_named
from composer_replication.recipes.monarch.rollout_file import KeptRollouts
from composer_replication.recipes.monarch.sampling import EngineName, TransformersSampler, sampler_of
from composer_replication.recipes.monarch.shared_weights import SharedWeights
from composer_replication.rollouts.conversation import Rollout, sampled_runs
from composer_replication.rollouts.gathering import schemas_of
from composer_replication.rollouts.generation.talks import Talk

Row = Mapping[str, Any]
Prompt = str | Sequence[Mapping[str, Any]] | Row
"""A text, a list of messages, or a row with the key `prompt` that holds one of the two."""


class Episode(Talk, Protocol):
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
        self.sampler = sampler_of(
            engine,
            settings.model,
            self._tokenizer,
            device=settings.device,
            dtype=settings.dtype,
            seed=settings.seed,
        )
        self._episodes: Callable[..., Sequence[Episode]] | None = None
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
        assert isinstance(self.sampler, TransformersSampler)
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
