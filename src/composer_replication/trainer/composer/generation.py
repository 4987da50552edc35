"""Extend TRL's generation step: locate error sites, resample groups with equal rewards, penalize KL.

TRL has no hook between sampling and its buffer of micro-batches, so `trainer.overrides` passes TRL's private methods to
this module. `original` is always TRL's own method.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import InputError, explain
from composer_replication.loss.grpo import group_advantages
from composer_replication.optional import require
from composer_replication.trainer.objective.distributed import below_adapter
from composer_replication.trainer.rollouts.generation.generator import RolloutGenerator
from composer_replication.trainer.rollouts.hint_distillation import ITEMS, SITES, ErringTurnFinder, ErringTurns
from composer_replication.trainer.rollouts.resample import ImagesBySample, ResampledBatch, resample, rows_of_groups
from composer_replication.trainer.rollouts.sites import RolloutOptions, ToolRecord, gather_rollouts
from composer_replication.trainer.rollouts.unrelated_hints import add_unrelated_hints, replace_by_unrelated_hints
from composer_replication.trainer.rollouts.worlds.verifiers import REWARD as WORLD_REWARD

if TYPE_CHECKING:
    from composer_replication.trainer.composer.channels import ChannelMetrics
    from composer_replication.trainer.rollouts.hint_gate import HintGate

Batch = dict[str, Any]


@dataclass(eq=False)
class _GenerationCall:
    """What TRL's methods produce during one call of `_generate_and_score_completions`, for its caller."""

    rows: list[dict[str, Any]]
    """The data set row for each rollout; TRL passes only the prompts to a rollout function."""
    is_resampling: bool
    prompts: list[Any] = field(default_factory=list[Any])
    generated: tuple[Any, ...] = ()
    """The return value of TRL's `_generate`."""
    tool_records: list[ToolRecord] | None = None
    rewards: Tensor | None = None
    """The weighted sum of the rewards of each rollout on all processes; NaN if no function judged it."""


class Generation:
    """Wraps a trainer's sampling: locates error sites, resamples groups, applies the k1 penalty, and logs metrics.

    Args:
        trainer: The TRL trainer.
        options: How to generate rollouts and treat their error sites.
        channel_metrics: The sums to which this class adds its metrics.
        wants_sites: Whether to locate error sites.
        hint_gate: Channel 2's gate, which requests comparisons with an unrelated hint; None if there is no gate.
        start_model: The initial model, if the trainer itself does not hold the initial weights.
    """

    def __init__(
        self,
        trainer: Any,
        options: RolloutOptions,
        channel_metrics: ChannelMetrics,
        *,
        wants_sites: bool,
        hint_gate: HintGate | None,
        start_model: nn.Module | None = None,
    ) -> None:
        self._trainer, self.options = trainer, options
        self._channel_metrics, self.start_model = channel_metrics, start_model
        self._hint_gate = hint_gate
        self.known_hints: dict[str, str] = {}
        """The latest hint for each kind of error, used as unrelated hints if rollouts contain only one kind."""
        self._finder = self._make_finder() if wants_sites else None
        self.site_counts: Counter[str] = Counter()
        self.num_rollouts = 0
        self._call: _GenerationCall | None = None
        self.fast = RolloutGenerator(batch=options.generation_batch) if options.fast_generation == "auto" else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The data set row for each rollout that is being generated."""
        return [] if self._call is None else self._call.rows

    def generate(self, original: Callable[..., tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        """Replace TRL's `_generate`, and keep its result and the failed tool calls, to locate error sites in them."""
        if self.fast is None or self._trainer.use_vllm:
            return self._generate_watched(original, prompts)
        before = Counter(self.fast.counts)
        with self.fast.rollout(budget=self._trainer.max_completion_length, keep=bool(self._trainer.tools)):
            generated = self._generate_watched(original, prompts)
        self._count_generated(self.fast.counts - before, self.fast.counts["cache_bytes"])
        return generated

    def _count_generated(self, counts: Counter[str], cache_bytes: int) -> None:
        """Log how many calls reused the key cache, the share of prompt tokens processed, and the
        cache's peak memory.
        """
        names = ("fast_calls", "usual_calls", "read_tokens", "prompt_tokens")
        # The last 1.0 counts the processes, so that memory can be logged as a mean over processes.
        numbers = [float(counts[name]) for name in names] + [cache_bytes / 2**30, 1.0]
        summed = self._trainer.sum_over(torch.tensor(numbers, device=self._trainer.accelerator.device))
        fast, usual, read, prompt, gib, processes = summed.tolist()
        # Both are 0 if a rollout function or vLLM generated instead of the model.
        if fast + usual:
            self._add("generation/fast_calls", fast, fast + usual)
        if fast:
            self._add("generation/read_share", read, prompt)
            self._add("generation/cache_gib", gib, processes)

    def generate_turn(self, original: Callable[..., tuple[Any, Any]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Replace TRL's `_generate_single_turn`: call it with `model.generate` replaced by the fast generator."""
        if self.fast is None or self._trainer.use_vllm:
            return original(*args, **kwargs)
        with self.fast.standing_in(self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)):
            return original(*args, **kwargs)

    def _generate_watched(self, original: Callable[..., tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        trainer, call = self._trainer, self._call
        if self._finder is None or call is None:
            return original(prompts)
        # TRL has just created one dict of tool functions per rollout; wrap the functions to record their errors.
        if trainer.tools:
            call.tool_records = [ToolRecord() for _ in prompts]
            for kind in (trainer._sync_tool_dicts, trainer._async_tool_dicts):
                kind[:] = [record.watched(tools) for record, tools in zip(call.tool_records, kind, strict=True)]
        call.prompts, call.generated = prompts, original(prompts)
        return call.generated

    def score(self, original: Callable[..., Batch], inputs: list[dict[str, Any]]) -> Batch:
        """Replace TRL's `_generate_and_score_completions`: add error sites, resample groups, penalize KL."""
        batch, rewards = self._score_and_add_turns(original, inputs)
        if self.options.max_resamples and self._trainer.model.training:
            batch = self._with_resampled_groups(original, batch, rewards, inputs)
        if self.options.k1_coefficient:
            batch["advantages"] = self._advantages_less_k1(batch)
        advantages = batch["advantages"]
        # TRL does not log advantages, but the diagnosis needs them, since nothing is learned if all advantages are 0.
        sizes = torch.stack([advantages.abs().sum(), advantages.new_tensor(float(advantages.numel()))])
        self._add("advantages/mean_abs", *self._trainer.sum_over(sizes).tolist())
        if self._finder is not None:
            # Channel 2's loss is divided by the number of tokens in all erring turns on all processes.
            items = sum(turn.end - turn.start for turns in batch[SITES] for turn in turns)
            device = self._trainer.accelerator.device
            batch[ITEMS] = self._trainer.sum_over(torch.tensor(float(items), device=device))
        return batch

    def rewards(self, original: Callable[..., Tensor], inputs: list[dict[str, Any]], *args: Any) -> Tensor:
        """Replace TRL's `_calculate_rewards`, and log the share of rollouts that each function left without a reward.

        TRL silently ignores a missing reward. A rollout whose environment broke gets no reward from any function.

        Raises:
            InputError: No reward function returned a number for any rollout.
        """
        rewards, names = original(inputs, *args), self._trainer.reward_func_names
        if broken := [number for number, row in enumerate(inputs) if math.isnan(row.get(WORLD_REWARD, 0.0))]:
            # Otherwise a penalty, such as the overlong penalty, could be the only reward for a broken rollout.
            rewards[broken] = torch.nan
        missing = rewards.isnan()
        for column, name in enumerate(names):
            self._add(f"rewards/{name}/unjudged", float(missing[:, column].sum()), missing.shape[0])
        call = self._call
        if bool(missing.all()) and not (call and call.is_resampling):
            fix = "Return a number for at least one rollout; None means that the function does not judge the rollout."
            got = f"NaN or None from {', '.join(names)} for all {rewards.shape[0]} rollouts"
            raise InputError(explain("rewards", got=got, expected="numbers", fix=fix))
        summed = (rewards * self._trainer.reward_weights.to(rewards.device)).nansum(1)
        if call is not None:
            call.rewards = summed.masked_fill(missing.all(1), torch.nan)
        return rewards

    def _score_and_add_turns(
        self, original: Callable[..., Batch], inputs: list[dict[str, Any]], *, is_resampling: bool = False
    ) -> tuple[Batch, Tensor | None]:
        """Return TRL's batch with the erring turns of its rollouts, and the rewards on all processes."""
        call = self._call = _GenerationCall(inputs, is_resampling)
        try:
            batch = original(inputs)
        finally:
            self._call = None
        if self._finder is None:
            return batch, call.rewards
        rollouts = self._find_turns(self._finder, call)
        # TRL masks truncated rollouts out with the attention mask, so channel 2 cannot use their turns.
        _drop_turns_where(rollouts, batch["completion_mask"].sum(1) == 0, "masked_by_trl")
        if self.options.only_failed_rollouts:
            _drop_turns_where(rollouts, batch["advantages"] > 0, "better_than_its_group")
        seed = f"{self._trainer.args.seed}:{self._trainer.state.global_step}"
        # Taken before own hints are replaced, which gives turns hints for other kinds of errors in a control run.
        own_hints = {turn.kind: turn.hint for rollout in rollouts for turn in rollout.turns}
        if self.options.hints == "other_kind":
            replace_by_unrelated_hints(self._finder, rollouts, seed)
        step, is_training = self._trainer.state.global_step, self._trainer.model.training
        if self._hint_gate is not None and self._hint_gate.wants_comparisons(step, is_training=is_training):
            add_unrelated_hints(self._finder, rollouts, seed, self.known_hints)
        self.known_hints |= own_hints
        batch[SITES] = [rollout.turns for rollout in rollouts]
        self._count_sites(rollouts)
        return batch, call.rewards

    def _find_turns(self, finder: ErringTurnFinder, call: _GenerationCall) -> list[ErringTurns]:
        trainer = self._trainer
        environments, names = trainer.environments, getattr(trainer, "_batch_environments", None)

        def tools_of(number: int) -> Sequence[Any]:
            return trainer.tools if environments is None or names is None else trainer._env_tools[names[number]]

        rollouts = gather_rollouts(
            call.prompts,
            call.generated,
            name=f"step-{trainer.state.global_step}",
            environments=environments,
            tools_of=tools_of,
            raised=call.tool_records,
        )
        return [finder.find(rollout) for rollout in rollouts]

    def _count_sites(self, rollouts: Sequence[ErringTurns]) -> None:
        trainer = self._trainer
        counts = sum((rollout.counts for rollout in rollouts), Counter[str]())
        self.site_counts.update(counts)
        numbers = [counts[name] for name in ("turns", "sites", "without_contrast")]
        numbers += [sum(len(rollout.turns) for rollout in rollouts), len(rollouts)]
        local_sums = torch.tensor(numbers, dtype=torch.float32, device=trainer.accelerator.device)
        num_turns, num_sites, num_plain, num_trained, num_rollouts = trainer.sum_over(local_sums).tolist()
        self._add("sites/per_100_turns", 100.0 * num_sites, num_turns)
        self._add("sites/taught_per_rollout", num_trained, num_rollouts)
        if num_trained and self._hint_gate is not None and self._hint_gate.has_contrast:
            self._add("sites/without_contrast", num_plain, num_trained)
        self.num_rollouts += int(num_rollouts)
        trainer._metrics[trainer.mode()]["rollouts/total"] = [float(self.num_rollouts)]

    def _with_resampled_groups(
        self, original: Callable[..., Batch], batch: Batch, rewards: Tensor | None, inputs: list[dict[str, Any]]
    ) -> Batch:
        """Return the batch with equal-reward groups replaced by new samples for the same prompts.

        In an equal-reward group all advantages are 0, so the group contributes nothing to the gradient.
        """
        trainer = self._trainer
        assert rewards is not None

        def draw(groups: list[int]) -> ResampledBatch:
            rewards_logged: list[float] = trainer._metrics["train"]["reward"]
            num_first_rewards = len(rewards_logged)
            rows = rows_of_groups(inputs, groups, trainer.num_generations)
            new_batch, new_rewards = self._score_and_add_turns(original, rows, is_resampling=True)
            # Only prompts with equal rewards are resampled, so logging these rewards would bias the mean reward.
            del rewards_logged[num_first_rewards:]
            assert new_rewards is not None
            return ResampledBatch(new_batch, new_rewards)

        images = require("trl.trainer.utils", extra="train")
        merged, rewards, report = resample(
            batch,
            rewards,
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
            # "batch" divides by the standard deviation over all rewards, which resampling has changed.
            all_advantages = group_advantages(rewards, trainer.num_generations, "batch")
            size = merged["prompt_ids"].shape[0]
            merged["advantages"] = all_advantages[size * trainer.accelerator.process_index :][:size]
        return merged

    @torch.no_grad()
    def _advantages_less_k1(self, batch: Batch) -> Tensor:
        """Return the per-token advantages (B, T), minus `k1_coefficient` * (log p - log p under the initial model)."""
        trainer = self._trainer
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        count, size = batch["completion_ids"].shape[1], trainer.args.per_device_train_batch_size

        def logprobs(model: nn.Module) -> Tensor:
            return trainer._get_per_token_logps_and_entropies(model, ids, mask, count, batch_size=size)[0]

        # TRL stores these log-probs only if the weights have changed since the rollouts were sampled.
        now = batch.get("old_per_token_logps")
        now = logprobs(trainer.model) if now is None else now
        start = self.start_model or trainer.ref_model or trainer.model
        with self._initial_weights(start):
            initial = logprobs(start)
        sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
        k1 = (now - initial) * sampled
        self._add("kl_to_start", *trainer.sum_over(torch.stack([k1.sum(), sampled.sum().to(k1)])).tolist())
        advantages = batch["advantages"]
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        return advantages - self.options.k1_coefficient * k1

    def _initial_weights(self, start: nn.Module) -> AbstractContextManager[Any]:
        trainer = self._trainer
        return below_adapter(trainer.accelerator.unwrap_model(start)) if start is trainer.model else nullcontext()

    def _make_finder(self) -> ErringTurnFinder:
        trainer = self._trainer
        template = trainer.chat_template or trainer._tokenizer.chat_template
        renderer = Renderer(trainer._tokenizer, chat_template=template, template_options=trainer.chat_template_kwargs)
        return ErringTurnFinder(renderer, self.options)

    def _add(self, name: str, total: float, items: float) -> None:
        self._channel_metrics.add(self._trainer.mode(), name, total, items)


def _drop_turns_where(rollouts: Sequence[ErringTurns], is_dropped: Tensor, reason: str) -> None:
    for rollout, drop in zip(rollouts, is_dropped.tolist(), strict=True):
        if drop and rollout.turns:
            rollout.counts[f"dropped:{reason}"] += len(rollout.turns)
            rollout.turns.clear()


def with_none_check(name: str, reward: Any) -> Any:
    """Wrap a reward function to check that it does not return None; models and async functions are unchanged."""
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    if isinstance(reward, nn.Module) or is_async:
        return reward

    @functools.wraps(reward, updated=())
    def checked_reward(*args: Any, **kwargs: Any) -> Any:
        rewards = reward(*args, **kwargs)
        if rewards is None:
            fix = "Add a `return` statement. In the list, use None for a rollout that the function cannot judge."
            expected = "a list with one number per rollout"
            raise InputError(explain(f"reward function {name}", got="None", expected=expected, fix=fix))
        return rewards

    return checked_reward
