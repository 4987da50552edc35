"""TRL's generation step with what it does not do: error sites, equal groups drawn again, a penalty in the advantage.

TRL has no hook between sampling and the buffer of micro-batches, so `trainer.overrides` hands its private methods over:
`original` is always TRL's own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import InputError, explain
from composer_replication.loss.grpo import group_advantages
from composer_replication.optional import require
from composer_replication.trainer.objective.distributed import below_adapter
from composer_replication.trainer.rollouts.channel import add_wrong_hints, exchange_hints
from composer_replication.trainer.rollouts.gathering import ToolRecord, gather_rollouts
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.resample import (
    ImagesBySample,
    ResampledBatch,
    resample,
    rows_of_groups,
)
from composer_replication.trainer.rollouts.sites import (
    ITEMS,
    SITES,
    FoundSites,
    RolloutOptions,
    RolloutSites,
)
from composer_replication.trainer.rollouts.worlds.verifiers import REWARD as WORLD_REWARD

if TYPE_CHECKING:
    from composer_replication.trainer.composer.channels import ComposerFigures
    from composer_replication.trainer.composer.heeding import HeedWatch

Batch = dict[str, Any]


class Generation:
    """What happens around one trainer's sampling; `figures` are where its sums go.

    `start_model` has the start weights where the trainer itself does not. Without `wants_sites` nothing is looked for.
    """

    def __init__(
        self,
        trainer: Any,
        options: RolloutOptions,
        figures: ComposerFigures,
        *,
        wants_sites: bool,
        watch: HeedWatch | None,
        start_model: nn.Module | None = None,
    ) -> None:
        self._trainer, self.options, self._figures, self.start_model = trainer, options, figures, start_model
        self._watch = watch
        self.known_hints: dict[str, str] = {}
        """The last hint about each kind of error: for turns that have none of another kind beside them."""
        self._finder = self._make_finder() if wants_sites else None
        self.site_counts: Counter[str] = Counter()
        self.num_rollouts = 0
        self._generated: tuple[Any, tuple[Any, ...], list[ToolRecord] | None] | None = None
        self._rewards_of_all: Tensor | None = None
        self._is_drawing_again = False
        self.rows: list[dict[str, Any]] = []
        """Of the data set, one a rollout that is played now: TRL hands a rollout function their prompts alone."""
        self.fast = RolloutGenerator(batch=options.generation_batch) if options.fast_generation == "auto" else None

    def generate(self, original: Callable[..., tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        """TRL's `_generate`; what it returns and which tools raised is kept until the sites are looked for."""
        if self.fast is None or self._trainer.use_vllm:
            return self._generate_watched(original, prompts)
        before = Counter(self.fast.counts)
        with self.fast.rollout(budget=self._trainer.max_completion_length, keep=bool(self._trainer.tools)):
            generated = self._generate_watched(original, prompts)
        self._count_generated(self.fast.counts - before, self.fast.counts["cache_bytes"])
        return generated

    def _count_generated(self, counts: Counter[str], cache_bytes: int) -> None:
        """Calls from kept keys, tokens read of those that prompts had, and the most memory that keys took."""
        names = ("fast_calls", "usual_calls", "read_tokens", "prompt_tokens")
        numbers = [float(counts[name]) for name in names] + [cache_bytes / 2**30, 1.0]
        summed = self._trainer.sum_over(torch.tensor(numbers, device=self._trainer.accelerator.device))
        fast, usual, read, prompt, gib, processes = summed.tolist()
        if fast + usual:  # or something else generated
            self._add("generation/fast_calls", fast, fast + usual)
        if fast:
            self._add("generation/read_share", read, prompt)
            self._add("generation/cache_gib", gib, processes)

    def generate_turn(self, original: Callable[..., tuple[Any, Any]], *given: Any, **named: Any) -> tuple[Any, Any]:
        """TRL's `_generate_single_turn`, with another `generate` of the model inside; all else about it is TRL's."""
        if self.fast is None or self._trainer.use_vllm:
            return original(*given, **named)
        with self.fast.standing_in(self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)):
            return original(*given, **named)

    def _generate_watched(self, original: Callable[..., tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        trainer = self._trainer
        if self._finder is None:
            return original(prompts)
        records: list[ToolRecord] | None = None
        if trainer.tools:  # the functions of this batch's rollouts, made just before
            records = [ToolRecord() for _ in prompts]
            for kind in (trainer._sync_tool_dicts, trainer._async_tool_dicts):
                kind[:] = [record.watched(tools) for record, tools in zip(records, kind, strict=True)]
        generated = original(prompts)
        self._generated = prompts, generated, records
        return generated

    def score(self, original: Callable[..., Batch], inputs: list[dict[str, Any]]) -> Batch:
        """TRL's `_generate_and_score_completions`, with sites, groups drawn again and the penalty."""
        batch = self._scored_with_sites(original, inputs)
        if self.options.max_resamples and self._trainer.model.training:
            batch = self._with_groups_drawn_again(original, batch, inputs)
        if self.options.k1_coefficient:
            batch["advantages"] = self._less_k1(batch)
        advantages = batch["advantages"]
        sizes = torch.stack([advantages.abs().sum(), advantages.new_tensor(float(advantages.numel()))])
        self._add("advantages/mean_abs", *self._trainer.sum_over(sizes).tolist())
        if self._finder is not None:
            items = sum(turn["end"] - turn["start"] for turns in batch[SITES] for turn in turns)
            device = self._trainer.accelerator.device
            batch[ITEMS] = self._trainer.sum_over(torch.tensor(float(items), device=device))
        return batch

    def rewards(self, original: Callable[..., Tensor], *given: Any) -> Tensor:
        """TRL's `_calculate_rewards`, with what it passes over in silence named: who did not judge some rollouts.

        A rollout whose world says that it broke is judged by nobody.
        """
        rewards, names = original(*given), self._trainer.reward_func_names
        if broken := [number for number, row in enumerate(given[0]) if math.isnan(row.get(WORLD_REWARD, 0.0))]:
            rewards[broken] = torch.nan  # a penalty alone would be a judgement
        missing = rewards.isnan()
        for number, name in enumerate(names):
            self._add(f"rewards/{name}/unjudged", float(missing[:, number].sum()), missing.shape[0])
        if bool(missing.all()) and not self._is_drawing_again:
            fix = "Return a number for at least one rollout; None leaves one out."
            got = f"NaN or None from {', '.join(names)} for all {rewards.shape[0]} rollouts"
            raise InputError(explain("rewards", got=got, expected="numbers", fix=fix))
        summed = (rewards * self._trainer.reward_weights.to(rewards.device)).nansum(1)
        self._rewards_of_all = summed.masked_fill(missing.all(1), torch.nan)
        return rewards

    def _scored_with_sites(self, original: Callable[..., Batch], inputs: list[dict[str, Any]]) -> Batch:
        self.rows = inputs
        batch = original(inputs)
        if self._finder is None:
            return batch
        found_sites = self._find_sites(self._finder)
        # TRL masks truncated rollouts by their attention mask: their rows do not see their own turn.
        _drop_where(found_sites, batch["completion_mask"].sum(1) == 0, "masked_by_trl")
        if self.options.only_failed_rollouts:
            _drop_where(found_sites, batch["advantages"] > 0, "better_than_its_group")
        seed = f"{self._trainer.args.seed}:{self._trainer.state.global_step}"
        own_hints = {turn.kind: turn.hint for rollout_sites in found_sites for turn in rollout_sites.taught}
        if self.options.hints == "other_kind":
            exchange_hints(self._finder, found_sites, seed)
        step, is_training = self._trainer.state.global_step, self._trainer.model.training
        if self._watch is not None and self._watch.wants_comparisons(step, is_training=is_training):
            add_wrong_hints(self._finder, found_sites, seed, self.known_hints)
        self.known_hints |= own_hints
        batch[SITES] = [[turn._asdict() for turn in rollout_sites.taught] for rollout_sites in found_sites]
        self._count_sites(found_sites)
        return batch

    def _find_sites(self, finder: RolloutSites) -> list[FoundSites]:
        assert self._generated is not None
        prompts, generated, records = self._generated
        self._generated = None
        trainer = self._trainer
        environments, names = trainer.environments, getattr(trainer, "_batch_environments", None)

        def tools_of(number: int) -> Sequence[Any]:
            return trainer.tools if environments is None or names is None else trainer._env_tools[names[number]]

        name = f"step-{trainer.state.global_step}"
        rollouts = gather_rollouts(
            prompts, generated, name=name, environments=environments, tools_of=tools_of, raised=records
        )
        return [finder.find(rollout) for rollout in rollouts]

    def _count_sites(self, found_sites: Sequence[FoundSites]) -> None:
        trainer = self._trainer
        counts = sum((rollout_sites.counts for rollout_sites in found_sites), Counter[str]())
        self.site_counts.update(counts)
        own_counts = [counts[name] for name in ("turns", "sites", "without_contrast")]
        numbers = [*own_counts, sum(len(rollout_sites.taught) for rollout_sites in found_sites), len(found_sites)]
        every = torch.tensor(numbers, dtype=torch.float32, device=trainer.accelerator.device)
        turns, sites, plain, taught, rollouts = trainer.sum_over(every).tolist()
        self._add("sites/per_100_turns", 100.0 * sites, turns)
        self._add("sites/taught_per_rollout", taught, rollouts)
        if taught and self._watch is not None and self._watch.has_contrast:
            self._add("sites/without_contrast", plain, taught)
        self.num_rollouts += int(rollouts)
        trainer._metrics[trainer.mode()]["rollouts/total"] = [float(self.num_rollouts)]

    def _with_groups_drawn_again(
        self, original: Callable[..., Batch], batch: Batch, inputs: list[dict[str, Any]]
    ) -> Batch:
        """Groups whose rewards are all equal teach nothing; the same prompts are tried again."""
        trainer = self._trainer
        assert self._rewards_of_all is not None

        def draw(groups: list[int]) -> ResampledBatch:
            rewards_logged: list[float] = trainer._metrics["train"]["reward"]
            of_first_draws = len(rewards_logged)
            self._is_drawing_again = True
            try:
                new = self._scored_with_sites(original, rows_of_groups(inputs, groups, trainer.num_generations))
            finally:
                self._is_drawing_again = False
            del rewards_logged[of_first_draws:]  # hard groups, drawn again and again, are no fall of the reward
            assert self._rewards_of_all is not None
            return ResampledBatch(new, self._rewards_of_all)

        images = require("trl.trainer.utils", extra="train")
        merged, rewards, report = resample(
            batch,
            self._rewards_of_all,
            draw,
            num_generations=trainer.num_generations,
            max_resamples=self.options.max_resamples,
            pad_id=int(trainer._tokenizer.pad_token_id),
            num_processes=trainer.accelerator.num_processes,
            rank=trainer.accelerator.process_index,
            total=trainer.sum_over,
            images=ImagesBySample(images.split_pixel_values_by_grid, images.unsplit_pixel_values_by_grid),
        )
        for name, value in report.metrics().items():
            trainer._metrics["train"][name].append(value)
        if report.rounds and trainer.scale_rewards == "batch":
            all_advantages = group_advantages(rewards, trainer.num_generations, "batch")
            size = merged["prompt_ids"].shape[0]
            merged["advantages"] = all_advantages[size * trainer.accelerator.process_index :][:size]
        return merged

    @torch.no_grad()
    def _less_k1(self, batch: Batch) -> Tensor:
        """Advantages of each token (B, T), less the coefficient times log p - log p of the start weights."""
        trainer = self._trainer
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        count, size = batch["completion_ids"].shape[1], trainer.args.per_device_train_batch_size

        def logprobs(model: nn.Module) -> Tensor:
            return trainer._get_per_token_logps_and_entropies(model, ids, mask, count, batch_size=size)[0]

        now = batch.get("old_per_token_logps")
        now = logprobs(trainer.model) if now is None else now
        start = self.start_model or trainer.ref_model or trainer.model
        with self._start_weights(start):
            then = logprobs(start)
        sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
        k1 = (now - then) * sampled
        self._add("kl_to_start", *trainer.sum_over(torch.stack([k1.sum(), sampled.sum().to(k1)])).tolist())
        advantages = batch["advantages"]
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        return advantages - self.options.k1_coefficient * k1

    def _start_weights(self, start: nn.Module) -> AbstractContextManager[Any]:
        trainer = self._trainer
        return below_adapter(trainer.accelerator.unwrap_model(start)) if start is trainer.model else nullcontext()

    def _make_finder(self) -> RolloutSites:
        trainer = self._trainer
        template = trainer.chat_template or trainer._tokenizer.chat_template
        renderer = Renderer(trainer._tokenizer, chat_template=template, template_options=trainer.chat_template_kwargs)
        return RolloutSites(renderer, self.options)

    def _add(self, name: str, total: float, items: float) -> None:
        self._figures.add(self._trainer.mode(), name, total, items)


def _drop_where(found_sites: Sequence[FoundSites], is_dropped: Tensor, reason: str) -> None:
    for rollout_sites, drop in zip(found_sites, is_dropped.tolist(), strict=True):
        if drop and rollout_sites.taught:
            rollout_sites.counts[f"dropped:{reason}"] += len(rollout_sites.taught)
            rollout_sites.taught.clear()


def answering(name: str, reward: Any) -> Any:
    """A reward function that says so when it returns nothing at all; models and asynchronous ones as they are."""
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    if isinstance(reward, nn.Module) or is_async:
        return reward

    @functools.wraps(reward, updated=())
    def judged(*args: Any, **named: Any) -> Any:
        rewards = reward(*args, **named)
        if rewards is None:
            fix = "End it with `return`; a rollout it cannot judge gets a None of its own."
            expected = "a list with one number a rollout"
            raise InputError(explain(f"reward function {name}", got="None", expected=expected, fix=fix))
        return rewards

    return judged
