"""verl's FSDP engine with channels 2 and 3 in its training step.

verl looks up engines by device and vendor; this one is registered for the vendor `composer`, which `ComposerWorker`
selects. Without `channels` it behaves like verl's own engine. With them, a step consists of the teacher's forward
passes over the hinted contexts of the mini-batch, the policy's loss with channel 2 in the same pass, the loss of the
pairs, and one optimizer step.
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
    TeacherShare,
    gather_lists,
    make_engine_batch,
    max_over_processes,
    run_teacher,
    sum_over_processes,
)
from composer_replication.recipes.verl.columns import PAIRS, ReplayPair, read_column, read_pairs, read_sites, row_ids
from composer_replication.trainer.rollouts.hint_distillation import SITES, ErringTurn

with importing("verl", extra="verl"):
    from verl.utils import tensordict_utils
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

VENDOR = "composer"
PROMPT = "uid"
"""verl's column with an id for each prompt of a batch."""


@dataclass(frozen=True, eq=False)
class StepChannels:
    """The settings of channels 2 and 3, and the engine of the reference worker.

    If there is no reference worker, the policy without its LoRA adapter is the reference.
    """

    settings: EngineChannels
    reference: Any = None

    def shares(self, engine: Any) -> list[TeacherShare]:
        """Return the engines that make up the teacher, with their coefficients. Raises InputError if the teacher
        needs a frozen model but none exists.
        """
        live = self.settings.live_share
        shares = [TeacherShare(engine, live, is_policy=True)] if live > 0 else []
        # No frozen part, so no reference is needed.
        if live == 1.0:
            return shares
        if self.reference is not None:
            return [TeacherShare(self.reference, 1.0 - live), *shares]
        if not engine._is_lora:
            fix = "Set algorithm.use_kl_in_reward or actor.use_kl_loss (role ActorRolloutRef), or set live_share: 1."
            expected = "a reference worker or an adapter"
            raise InputError(explain("teacher of channel 2", got="no frozen model", expected=expected, fix=fix))
        return [TeacherShare(engine, 1.0 - live, is_policy=True, without_adapter=True), *shares]


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=VENDOR)
class ChannelEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine with channel 2 (hint distillation) and channel 3 (DPO pairs). Set `channels` after
    `initialize`.
    """

    channels: StepChannels | None = None

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """Run one optimizer step over a mini-batch; the columns `sdpo_sites` and `replay_pairs` are optional."""
        if self.channels is None:
            return super().train_batch(data, loss_function)
        # Each process would have only a part of each row, but sites are positions in whole rows.
        if self.ulysses_sequence_parallel_size > 1:
            fix = "Set actor.fsdp_config.ulysses_sequence_parallel_size to 1."
            got = self.ulysses_sequence_parallel_size
            raise InputError(explain("sequence parallelism with channels", got=got, expected=1, fix=fix))
        # The rest follows verl's own `train_batch`, with the channels added.
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
        """Run the teacher's forward passes, and return the policy's loss function extended by channel 2 (hint
        distillation). Channel 2 is 0 if no process has an error site.
        """
        assert self.channels is not None
        turns = [read_sites(text, ids) for text, ids in zip(read_column(data, SITES), row_ids(data), strict=True)]
        num_items = sum_over_processes(_count_target_tokens(turns), self)
        taught = run_teacher(self.channels.shares(self), turns, settings) if num_items else [None] * len(turns)
        # Micro-batches reorder rows; these indices map each row to its targets.
        data[ROW_NUMBER] = torch.arange(len(turns))
        tensordict_utils.assign_non_tensor(data, distillation_use_topk=True, distillation_only=False)
        # The scheduler's step is in verl's checkpoints, so a resumed run continues the annealing.
        alpha = settings.alpha_at(self.lr_scheduler.last_epoch, self.optimizer_config.total_training_steps)
        return ChannelLoss(policy, settings, taught, alpha=alpha, num_items=num_items)

    def _add_pairs(self, data: Any, outputs: dict[str, Any], settings: EngineChannels) -> None:
        """Run forward and backward passes that add the gradients of the pairs' loss. All processes run the same
        number of passes.
        """
        pairs = [pair for text in _assigned_pair_texts(data, self) for pair in read_pairs(text)]
        if settings.preference.needs_reference and any(pair.reference is None for pair in pairs):
            fix = "Compute them once with the initial model (objective.reference), or set dpo_variant: simpo."
            raise InputError(explain("reference log-probs of a pair", got=None, expected="two numbers", fix=fix))
        num_items = sum_over_processes(len(pairs), self)
        # -(-a // b) rounds up.
        num_passes = max_over_processes(-(-len(pairs) // settings.pair_batch), self)
        if not num_passes:
            return
        batch = _pair_rows(pairs, num_passes * settings.pair_batch, settings.pair_batch, self)
        pair_outputs = self.forward_backward_batch(batch, PairLoss(settings, num_items), forward_only=False)
        outputs["loss"] += pair_outputs["loss"]
        outputs["metrics"].update(pair_outputs["metrics"])


def _count_target_tokens(turns: list[list[ErringTurn]]) -> int:
    return sum(turn.end - turn.start for row_turns in turns for turn in row_turns)


def _assigned_pair_texts(data: Any, engine: Any) -> list[str]:
    """Return the values of the column `replay_pairs` that are assigned to this process, so that each value is used only
    once.

    verl copies a prompt's columns to all its rollouts, which have the same `uid`, and distributes these over processes.
    Each value is assigned to the process with the fewest values so far among those that have a copy of it. Rows without
    a `uid` are never treated as copies.
    """
    column, rank = read_column(data, PAIRS), torch.distributed.get_rank(engine.get_data_parallel_group())
    texts: dict[int, str] = {}
    for row, (text, prompt) in enumerate(zip(column, read_column(data, PROMPT), strict=True)):
        if text:
            name = f"row {rank} {row}" if prompt is None else f"prompt {prompt}"
            texts.setdefault(_stable_hash(name, text), text)
    holders: dict[int, list[int]] = {}
    for process, numbers in enumerate(gather_lists(list(texts), engine)):
        for number in numbers:
            holders.setdefault(number, []).append(process)
    # Every process computes the same assignment from the gathered lists, so nothing has to be sent back.
    num_assigned, assigned_texts = Counter[int](), []
    for number, processes in holders.items():
        assignee = min(processes, key=num_assigned.__getitem__)
        num_assigned[assignee] += 1
        if assignee == rank:
            assigned_texts.append(texts[number])
    return assigned_texts


def _stable_hash(name: str, text: str) -> int:
    """Return a 64-bit hash that is the same on all processes, unlike Python's own."""
    digest = hashlib.sha256(f"{name}\n{text}".encode()).digest()
    # 8 bytes: `gather_lists` exchanges signed 64-bit numbers.
    return int.from_bytes(digest[:8], "big", signed=True)


def _pair_rows(pairs: list[ReplayPair], count: int, pairs_in_pass: int, engine: Any) -> Any:
    """Return a batch of alternating chosen and rejected rows. It is padded to `count` pairs with rows that do not
    affect the loss.
    """
    # Every pass must be full, or processes would run different numbers of micro-batches.
    filler = ReplayPair([0], [0], [0], None)
    filled = [*pairs, *[filler] * (count - len(pairs))]
    rows = [torch.tensor([*pair.context, *side]) for pair in filled for side in (pair.chosen, pair.rejected)]
    batch = make_engine_batch(rows, engine, rows_in_pass=2 * pairs_in_pass)
    batch[PAIR_START] = torch.tensor([len(pair.context) for pair in filled for _ in range(2)])
    batch[PAIR_REFERENCE] = torch.tensor([value for pair in filled for value in pair.reference or (0.0, 0.0)])
    batch[PAIR_IS_REAL] = torch.tensor([number < len(pairs) for number in range(count) for _ in range(2)])
    return batch
