"""verl's FSDP engine with two more channels in its training step.

verl looks engines up by device and vendor; this one is registered for the vendor `composer`, which `ComposerWorker`
asks for. Without `channels` it is verl's own engine. With them a step is: the teacher's passes over the hinted contexts
of the mini-batch's rows, the policy's loss with channel 2 on the same pass, the pairs' loss, one optimiser step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from composer_replication.errors import InputError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl.channel_loss import (
    PAIR_IS_REAL,
    PAIR_REFERENCE,
    PAIR_START,
    ROW_NUMBER,
    ChannelLoss,
    EngineChannels,
    PairLoss,
    Share,
    lists_of_all_processes,
    most_on_any_process,
    rows_as_batch,
    sum_over_processes,
    taught_rows,
)
from composer_replication.recipes.verl.columns import (
    PAIRS,
    ReplayPair,
    column_of,
    read_pairs,
    read_sites,
    row_ids,
)
from composer_replication.trainer.rollouts.sites import SITES, TaughtTurn

with importing("verl", extra="verl"):
    from verl.utils import tensordict_utils
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

VENDOR = "composer"
PROMPT = "uid"
"""verl's column with a name for each prompt of a batch."""


@dataclass(frozen=True, eq=False)
class StepChannels:
    """The settings, and who teaches beside the policy: the reference worker's engine, or it below its adapter."""

    settings: EngineChannels
    reference: Any = None

    def shares(self, engine: Any) -> list[Share]:
        live = self.settings.live_share
        shares = [Share(engine, live, is_policy=True)] if live > 0 else []
        if live == 1.0:
            return shares
        if self.reference is not None:
            return [Share(self.reference, 1.0 - live), *shares]
        if not engine._is_lora:
            fix = "Start the role ActorRolloutRef (algorithm.use_kl_in_reward or actor.use_kl_loss), or live_share: 1."
            expected = "a reference worker or an adapter"
            raise InputError(explain("teacher of channel 2", got="neither", expected=expected, fix=fix))
        return [Share(engine, 1.0 - live, is_policy=True, without_adapter=True), *shares]


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=VENDOR)
class ChannelEngine(FSDPEngineWithLMHead):
    """Give it `channels` after `initialize`."""

    channels: StepChannels | None = None

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """One optimiser step over a mini-batch's rows; the columns `sdpo_sites` and `replay_pairs` are optional."""
        if self.channels is None:
            return super().train_batch(data, loss_function)
        if self.ulysses_sequence_parallel_size > 1:
            fix = "Set actor.fsdp_config.ulysses_sequence_parallel_size to 1."
            got = self.ulysses_sequence_parallel_size
            raise InputError(explain("sequence parallelism with channels", got=got, expected=1, fix=fix))
        tensordict_utils.maybe_fix_3d_position_ids(data)
        settings = self.channels.settings
        loss = self._with_sites(data, loss_function, settings) if settings.alpha_sdpo > 0 else loss_function
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss, forward_only=False)
        if settings.beta_replay > 0:
            self._add_pairs(data, outputs, settings)
        grad_norm = self.optimizer_step()
        outputs["metrics"]["grad_norm"] = grad_norm
        return outputs

    def _with_sites(self, data: Any, policy: Callable[..., Any], settings: EngineChannels) -> Callable[..., Any]:
        """The teacher's passes, and the loss that uses them; verl's own where no process has a site."""
        assert self.channels is not None
        turns = [read_sites(text, ids) for text, ids in zip(column_of(data, SITES), row_ids(data), strict=True)]
        items = sum_over_processes(_targets(turns), self)
        taught = taught_rows(self.channels.shares(self), turns, settings) if items else [None] * len(turns)
        data[ROW_NUMBER] = torch.arange(len(turns))
        tensordict_utils.assign_non_tensor(data, distillation_use_topk=True, distillation_only=False)
        alpha = settings.alpha_at(self.lr_scheduler.last_epoch, self.optimizer_config.total_training_steps)
        return ChannelLoss(policy, settings, taught, alpha=alpha, items=items)

    def _add_pairs(self, data: Any, outputs: dict[str, Any], settings: EngineChannels) -> None:
        """Gradients of the pairs' loss on top of the policy's; all processes run as many passes."""
        pairs = [pair for text in _texts_of_pairs(data, self) for pair in read_pairs(text)]
        if settings.preference.needs_reference and any(pair.reference is None for pair in pairs):
            fix = "Compute them once with the start weights (objective.reference), or use dpo_variant: simpo."
            raise InputError(explain("reference log-probs of a pair", got=None, expected="two numbers", fix=fix))
        items = sum_over_processes(len(pairs), self)
        passes = most_on_any_process(-(-len(pairs) // settings.pair_batch), self)
        if not passes:
            return
        batch = _pair_rows(pairs, passes * settings.pair_batch, settings.pair_batch, self)
        pair_outputs = self.forward_backward_batch(batch, PairLoss(settings, items), forward_only=False)
        outputs["loss"] += pair_outputs["loss"]
        outputs["metrics"].update(pair_outputs["metrics"])


def _targets(turns: list[list[TaughtTurn]]) -> int:
    return sum(turn.end - turn.start for row_turns in turns for turn in row_turns)


def _texts_of_pairs(data: Any, engine: Any) -> list[str]:
    """What this process has to do of the column `replay_pairs`: a prompt's pairs once, however many rollouts it has.

    verl copies a prompt's columns onto all its rollouts, which have one `uid`, and gives these to any process. Of those
    that hold a copy the one with the least to do takes it. Rows without a `uid` are nobody's copies.
    """
    column, rank = column_of(data, PAIRS), torch.distributed.get_rank(engine.get_data_parallel_group())
    own_texts: dict[int, str] = {}
    for row, (text, prompt) in enumerate(zip(column, column_of(data, PROMPT), strict=True)):
        if text:
            own_texts.setdefault(_number_of(f"row {rank} {row}" if prompt is None else f"prompt {prompt}", text), text)
    holders: dict[int, list[int]] = {}
    for process, numbers in enumerate(lists_of_all_processes(list(own_texts), engine)):
        for number in numbers:
            holders.setdefault(number, []).append(process)
    load, mine = Counter[int](), []
    for number, processes in holders.items():
        taker = min(processes, key=load.__getitem__)
        load[taker] += 1
        if taker == rank:
            mine.append(own_texts[number])
    return mine


def _number_of(name: str, text: str) -> int:
    """The same on all processes, which Python's own hash is not."""
    digest = hashlib.sha256(f"{name}\n{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _pair_rows(pairs: list[ReplayPair], count: int, pairs_in_pass: int, engine: Any) -> Any:
    """Chosen and rejected in turn, filled up to `count` pairs with rows that have no share in the loss."""
    nothing = ReplayPair([0], [0], [0], None)
    whole = [*pairs, *[nothing] * (count - len(pairs))]
    rows = [torch.tensor([*pair.context, *side]) for pair in whole for side in (pair.chosen, pair.rejected)]
    batch = rows_as_batch(rows, engine, rows_in_pass=2 * pairs_in_pass)
    batch[PAIR_START] = torch.tensor([len(pair.context) for pair in whole for _ in range(2)])
    batch[PAIR_REFERENCE] = torch.tensor([value for pair in whole for value in pair.reference or (0.0, 0.0)])
    batch[PAIR_IS_REAL] = torch.tensor([number < len(pairs) for number in range(count) for _ in range(2)])
    return batch
