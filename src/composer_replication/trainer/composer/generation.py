"""TRL's generation step with what it does not do: error sites, equal groups drawn again, a penalty in the advantage.

TRL has no hook between sampling and the buffer of micro-batches, so its private methods are overridden;
`tests/contract/test_trl.py` holds what they rely on.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.batch.hint_placement import Placement
from composer_replication.batch.render import Renderer
from composer_replication.batch.session_batch import Part
from composer_replication.errors import InputError, explain
from composer_replication.hint_generator.write import HintWriter
from composer_replication.objective.adapters import below_adapter
from composer_replication.rollouts.gathering import ToolRecord, gather_rollouts
from composer_replication.rollouts.resample import Drawn, group_advantages, resample, rows_of_groups
from composer_replication.rollouts.sites import FoundSites, HintGenerator, RolloutSites
from composer_replication.sites.find import MIN_CONFIDENCE
from composer_replication.sites.rule import FailureRule
from composer_replication.trainer.composer.channels import ITEMS, SITES, ComposerFigures

# The class that uses this names TRL's trainer after it in its bases, so every `super()` below means that one.
_Trainer: Any = object


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts are taught from, beside their reward.

    Error sites: where a hint goes, which part of the erring turn is taught, who writes hints, which rules are added.
    `only_failed_rollouts` leaves out the sites of rollouts that did better than their group. `max_resamples` draws
    groups with equal rewards again, that many times at most. `k1_coefficient` takes log p - log p_start of each token
    off its advantage (k1, without gradient).
    """

    placement: Placement = "before_turn"
    part: Part = "turn"
    hint_generator: HintGenerator | None = None
    hint_writer: HintWriter | None = None
    extra_rules: tuple[FailureRule, ...] = ()
    min_confidence: float = MIN_CONFIDENCE
    max_teacher_length: int | None = None
    only_failed_rollouts: bool = False
    max_resamples: int = 0
    k1_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if self.max_resamples < 0:
            raise InputError(explain("max_resamples", got=self.max_resamples, expected="0 or more"))
        if not self.k1_coefficient >= 0:
            raise InputError(explain("k1_coefficient", got=self.k1_coefficient, expected="0 or more"))


class TeachableRollouts(_Trainer):
    """Overrides of `trl.GRPOTrainer` around generation; `_rollout_options` is set before its constructor runs."""

    _rollout_options: RolloutOptions
    _site_finder: RolloutSites | None
    _start_model: nn.Module | None
    _wants_contrast: bool
    figures: ComposerFigures
    site_counts: Counter[str]
    num_rollouts: int
    _generated: tuple[Any, tuple[Any, ...], list[ToolRecord] | None] | None
    _rewards_of_all: Tensor | None
    _is_drawing_again = False

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._site_finder is None:
            return super()._generate(prompts)
        records: list[ToolRecord] | None = None
        if self.tools:  # the functions of this batch's rollouts, made just before
            records = [ToolRecord() for _ in prompts]
            for kind in (self._sync_tool_dicts, self._async_tool_dicts):
                kind[:] = [record.watched(tools) for record, tools in zip(records, kind, strict=True)]
        generated = super()._generate(prompts)
        self._generated = prompts, generated, records
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._generated_with_sites(inputs)
        options = self._rollout_options
        if options.max_resamples and self.model.training:
            batch = self._with_groups_drawn_again(batch, inputs)
        if options.k1_coefficient:
            batch["advantages"] = self._less_k1(batch)
        advantages = batch["advantages"]
        sizes = torch.stack([advantages.abs().sum(), advantages.new_tensor(float(advantages.numel()))])
        self.figures.add(self._mode(), "advantages/mean_abs", *self._sum_over(sizes).tolist())
        if self._site_finder is not None:
            items = sum(turn["end"] - turn["start"] for turns in batch[SITES] for turn in turns)
            batch[ITEMS] = self._sum_over(torch.tensor(float(items), device=self.accelerator.device))
        return batch

    def _calculate_rewards(
        self, inputs: Any, prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        """TRL's, with what it passes over in silence named: a function that did not judge some rollouts."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        missing = rewards.isnan()
        for number, name in enumerate(self.reward_func_names):
            self.figures.add(
                self._mode(), f"rewards/{name}/unjudged", float(missing[:, number].sum()), missing.shape[0]
            )
        if bool(missing.all()) and not self._is_drawing_again:
            names = ", ".join(self.reward_func_names)
            fix = "Return a number for at least one rollout; None leaves one out."
            got = f"NaN or None from {names} for all {rewards.shape[0]} rollouts"
            raise InputError(explain("rewards", got=got, expected="numbers", fix=fix))
        weights = self.reward_weights.to(rewards.device)
        summed = (rewards * weights).nansum(1)
        self._rewards_of_all = summed.masked_fill(missing.all(1), torch.nan)
        return rewards

    def _generated_with_sites(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self._site_finder is None:
            return batch
        found = self._find_sites(self._site_finder)
        # TRL masks truncated rollouts by their attention mask: their rows do not see their own turn.
        _drop_where(found, batch["completion_mask"].sum(1) == 0, "masked_by_trl")
        if self._rollout_options.only_failed_rollouts:
            _drop_where(found, batch["advantages"] > 0, "better_than_its_group")
        if self._wants_contrast:
            self._site_finder.with_wrong_hints(found, f"{self.args.seed}:{self.state.global_step}")
        batch[SITES] = [[turn._asdict() for turn in each.taught] for each in found]
        self._count_sites(found)
        return batch

    def _find_sites(self, finder: RolloutSites) -> list[FoundSites]:
        assert self._generated is not None
        prompts, generated, records = self._generated
        self._generated = None
        environments, names = self.environments, getattr(self, "_batch_environments", None)

        def tools_of(number: int) -> Sequence[Any]:
            return self.tools if environments is None or names is None else self._env_tools[names[number]]

        name = f"step-{self.state.global_step}"
        rollouts = gather_rollouts(
            prompts, generated, name=name, environments=environments, tools_of=tools_of, raised=records
        )
        return [finder.find(each) for each in rollouts]

    def _count_sites(self, found: Sequence[FoundSites]) -> None:
        counts = sum((each.counts for each in found), Counter[str]())
        self.site_counts.update(counts)
        taught = sum(len(each.taught) for each in found)
        numbers = [float(counts["turns"]), float(counts["sites"]), float(taught), float(len(found))]
        summed = self._sum_over(torch.tensor(numbers, device=self.accelerator.device))
        turns, sites, taught_all, rollouts = summed.tolist()
        self.figures.add(self._mode(), "sites/per_100_turns", 100.0 * sites, turns)
        self.figures.add(self._mode(), "sites/taught_per_rollout", taught_all, rollouts)
        self.num_rollouts += int(rollouts)
        self._metrics[self._mode()]["rollouts/total"] = [float(self.num_rollouts)]

    def _with_groups_drawn_again(self, batch: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Groups whose rewards are all equal teach nothing; the same prompts are tried again."""
        assert self._rewards_of_all is not None

        def draw(groups: list[int]) -> Drawn:
            self._is_drawing_again = True
            try:
                new = self._generated_with_sites(rows_of_groups(inputs, groups, self.num_generations))
            finally:
                self._is_drawing_again = False
            assert self._rewards_of_all is not None
            return Drawn(new, self._rewards_of_all)

        merged, rewards, report = resample(
            batch,
            self._rewards_of_all,
            draw,
            num_generations=self.num_generations,
            max_resamples=self._rollout_options.max_resamples,
            pad_id=int(self._tokenizer.pad_token_id),
            num_processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            total=self._sum_over,
        )
        for name, value in report.metrics().items():
            self._metrics["train"][name].append(value)
        if report.rounds and self.scale_rewards == "batch":
            all_advantages = group_advantages(rewards, self.num_generations, "batch")
            size = merged["prompt_ids"].shape[0]
            merged["advantages"] = all_advantages[size * self.accelerator.process_index :][:size]
        return merged

    @torch.no_grad()
    def _less_k1(self, batch: dict[str, Any]) -> Tensor:
        """Advantages of each token (B, T), less the coefficient times log p - log p of the start weights."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        count = batch["completion_ids"].shape[1]
        size = self.args.per_device_train_batch_size
        now = batch.get("old_per_token_logps")
        if now is None:
            now = self._get_per_token_logps_and_entropies(self.model, ids, mask, count, batch_size=size)[0]
        start = self._start_model or self.ref_model or self.model
        with self._start_weights(start):
            then = self._get_per_token_logps_and_entropies(start, ids, mask, count, batch_size=size)[0]
        sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
        k1 = (now - then) * sampled
        sums = self._sum_over(torch.stack([k1.sum(), sampled.sum().to(k1)]))
        self.figures.add(self._mode(), "kl_to_start", *sums.tolist())
        advantages = batch["advantages"]
        advantages = advantages[:, None] if advantages.dim() == 1 else advantages
        return advantages - self._rollout_options.k1_coefficient * k1

    def _start_weights(self, start: nn.Module) -> AbstractContextManager[Any]:
        return below_adapter(self.accelerator.unwrap_model(start)) if start is self.model else nullcontext()

    def _make_site_finder(self) -> RolloutSites:
        options = self._rollout_options
        template = self.chat_template or self._tokenizer.chat_template
        renderer = Renderer(self._tokenizer, chat_template=template, template_options=self.chat_template_kwargs)
        return RolloutSites(
            renderer,
            placement=options.placement,
            part=options.part,
            hint_generator=options.hint_generator,
            hint_writer=options.hint_writer,
            extra_rules=options.extra_rules,
            min_confidence=options.min_confidence,
            max_teacher_length=options.max_teacher_length,
        )

    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _sum_over(self, values: Tensor) -> Tensor:
        """Added up over all processes."""
        return values if self.accelerator.num_processes == 1 else self.accelerator.reduce(values, reduction="sum")


def _drop_where(found: Sequence[FoundSites], is_dropped: Tensor, reason: str) -> None:
    for each, drop in zip(found, is_dropped.tolist(), strict=True):
        if drop and each.taught:
            each.counts[f"dropped:{reason}"] += len(each.taught)
            each.taught.clear()


def answering(name: str, reward: Any) -> Any:
    """A reward function that says so when it returns nothing at all; models and asynchronous ones as they are."""
    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    if isinstance(reward, nn.Module) or is_async:
        return reward

    @functools.wraps(reward, updated=())
    def judged(*args: Any, **named: Any) -> Any:
        found = reward(*args, **named)
        if found is None:
            fix = "End it with `return`; a rollout it cannot judge gets a None of its own."
            expected = "a list with one number a rollout"
            raise InputError(explain(f"reward function {name}", got="None", expected=expected, fix=fix))
        return found

    return judged
