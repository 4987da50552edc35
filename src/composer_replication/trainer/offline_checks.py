"""Check an offline run before it starts (settings that cannot work) and after it ends (channels that never ran), and
collect its metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.batch.tree_batch import CHANNELS
from composer_replication.errors import ConfigError, InactiveChannelError, StaleArtefactError, explain
from composer_replication.trainer.checkpoints.manifest import check_manifest
from composer_replication.trainer.checkpoints.resume import check_identity, model_identity
from composer_replication.trainer.checkpoints.weights import load_weights
from composer_replication.trainer.objective.channels import ChannelSettings
from composer_replication.trainer.objective.compose import LossComponents
from composer_replication.trainer.objective.distributed import is_sharded, unwrapped
from composer_replication.trainer.objective.fingerprint import trained_adapter_digest, weights_digest
from composer_replication.trainer.objective.model_head import causal_lm_of
from composer_replication.trainer.presets import NO_PAIR
from composer_replication.trainer.same_start import check_is_in_group
from composer_replication.trainer.sessions.dataset import LoggedSessions
from composer_replication.trainer.start_model import check_router_loss
from composer_replication.trainer.teacher_keeper import live_teacher_warning
from composer_replication.trainer.watch.memory_plan import MemoryPlan, free_memory, plan_memory

WARM_UP = "warm-up"
_KNOBS = dict(zip(CHANNELS, ("lm_weight", "alpha_sdpo", "beta_replay"), strict=True))


def check_arguments(args: Any) -> None:
    """Raise ConfigError unless each process has one device, all are in one group, and all get equally many
    micro-batches.
    """
    check_is_in_group(args.world_size)
    if args.n_gpu > 1:
        fix = "Start one process per GPU: `torchrun --nproc-per-node N` or `accelerate launch`."
        raise ConfigError(explain("GPUs in this process", got=args.n_gpu, expected=1, fix=fix))
    if args.world_size > 1 and not args.accelerator_config.even_batches:
        fix = "Set even_batches to True, since a process with fewer micro-batches would leave the others waiting."
        raise ConfigError(explain("accelerator_config.even_batches", got=False, expected=True, fix=fix))


def ready_sessions(
    sessions: LoggedSessions,
    model: nn.Module,
    reference_path: str | Path | None = None,
    *,
    settings: ChannelSettings,
    lm_weight: float,
    hint_margin: float | None = None,
    with_adapter: bool = False,
    shuffle_seed: int | None = None,
) -> LoggedSessions:
    """Return the sessions after the hint check, with reference log-probs if needed.

    Call it under the same autocast as the training steps.
    """
    if hint_margin is not None:
        sessions = sessions.prove(model, hint_margin, with_adapter=with_adapter)
    # After the hint check, so that a control has the same sites as the real training.
    if shuffle_seed is not None:
        sessions = sessions.shuffled(shuffle_seed)
    sessions.require_items()
    # Other variants of DPO need no reference log-probs.
    needs_references = settings.beta_replay > 0 and settings.dpo_variant == "dpo"
    if needs_references and sessions.has_references:
        sessions.check_references(model)
    elif needs_references:
        sessions = sessions.with_references(model, reference_path, with_adapter=with_adapter)
    return sessions if lm_weight > 0 else sessions.without_responses()


def take_warmed_up(model: nn.Module, checkpoint: Path) -> dict[str, str]:
    """Load a warm-up's final weights into the model, and return the phase of the training that follows.

    Raises StaleArtefactError if the checkpoint was not written by a warm-up, or if that warm-up began with other
    weights.
    """
    manifest = check_manifest(checkpoint)
    if manifest["about"]["data"].get("phase") != WARM_UP:
        fix = "Pass the folder of the `checkpoint` that `trainer.warmup.warm_up` returns."
        got = "a checkpoint from another training phase"
        raise StaleArtefactError(explain(str(checkpoint), got=got, expected="a checkpoint from a warm-up", fix=fix))
    # Compared before anything is loaded, so that a refused checkpoint leaves the model unchanged.
    check_identity(manifest["about"]["model"], model_identity(model), checkpoint)
    start_weights, origin = weights_digest(model), manifest["about"]["data"]
    start = {"start_weights": start_weights, "start_adapter": trained_adapter_digest(model)}
    for name, now in start.items():
        if (before := origin.get(name)) != now:
            fix = "Use the model that the warm-up began with, or run a warm-up of this model in another folder."
            got, expected = f"{name} {str(before)[:12]}", f"{name} {str(now)[:12]}, as in this model"
            raise StaleArtefactError(explain(str(checkpoint), got=got, expected=expected, fix=fix))
    load_weights(model, checkpoint)
    return {
        "phase": "after a warm-up",
        "warmup_steps": str(manifest["step"]),
        "start_weights": start_weights,
        "warmed_up_weights": weights_digest(model, with_adapter=True),
    }


def startup_warnings(trainer: Any, model: nn.Module, sessions: LoggedSessions) -> list[str]:
    """Return the warnings to log before an `OfflineTrainer`'s first step. Raises an error if the run cannot work at
    all.
    """
    cannot_run = _channels_that_cannot_run(sessions.channels, trainer.weights())
    live_teacher = live_teacher_warning(trainer.teacher.kind, trainer.settings.alpha_sdpo, trainer)
    plan: MemoryPlan = trainer.plan()
    too_large = None if plan.fits else f"the largest step may not fit into memory:\n{plan}"
    return [warning for warning in (*cannot_run, live_teacher, check_router_loss(model), too_large) if warning]


def _channels_that_cannot_run(items: Mapping[str, int], weights: Mapping[str, float]) -> list[str]:
    """Return a warning for each channel that has a weight but no items.

    Raises InactiveChannelError if no channel can run.
    """
    if not any(items[name] and weights[name] > 0 for name in CHANNELS):
        got = ", ".join(f"{_KNOBS[name]} {weights[name]:g} with {items[name]} items" for name in CHANNELS)
        fix = "Set the weight of a channel that has items, or add sites and pairs to the sessions."
        raise InactiveChannelError(
            explain("channels", got=got, expected="a weight above 0 for a channel with items", fix=fix)
        )
    return [
        NO_PAIR.format(weights[name])
        if name == CHANNELS[2]
        else f"channel {name} cannot run: {_KNOBS[name]} is {weights[name]:g}, but it has no items"
        for name in CHANNELS
        if weights[name] > 0 and not items[name]
    ]


def channels_that_never_ran(log: ChannelLog, items: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for each channel that never ran, with the number of its items and its largest weight."""
    for name in CHANNELS:
        if not log.ran_steps.get(name, 0):
            coverage = f"{log.seen_items[name]:,} of its {items[name]:,} items in them"
            yield (
                f"channel {name} never ran in {log.num_steps} steps: {coverage}, {_KNOBS[name]} "
                f"{log.top_weights[name]:g}"
            )


def plan_run(
    model: nn.Module, args: Any, sessions: LoggedSessions, teacher: str, *, warmed_up: bool = False
) -> MemoryPlan:
    """Return a memory estimate for the largest step that these sessions can produce, on this process's device.

    The model is already loaded, so the memory that it occupies counts as available.
    """
    bare = unwrapped(model)
    adapters: Mapping[str, Any] = getattr(bare, "peft_config", None) or {}
    sizes = sorted((item.num_tokens for item in sessions.items), reverse=True)
    # From the first floating-point weight, since 4-bit weights are packed into integers.
    weight_bytes = next(
        (parameter.element_size() for parameter in bare.parameters() if parameter.is_floating_point()), 4
    )
    local_tensors = (
        parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in bare.parameters()
    )
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in local_tensors)
    optim = str(getattr(args.optim, "value", args.optim))
    return plan_memory(
        causal_lm_of(model).config,
        longest_tree=sum(sizes[: args.per_device_train_batch_size]),
        available=free_memory(args.device) + model_bytes,
        device=args.device,
        weight_bytes=weight_bytes,
        compute_bytes=2 if args.bf16 or args.fp16 else weight_bytes,
        checkpointing=args.gradient_checkpointing,
        lora_rank=max((adapter.r for adapter in adapters.values() if hasattr(adapter, "r")), default=None),
        # bitsandbytes packs two 4-bit weights into a uint8.
        four_bit=any(parameter.dtype == torch.uint8 for parameter in bare.parameters()),
        teacher=teacher,
        warmed_up=warmed_up,
        optimizer="adamw_8bit" if "8bit" in optim else "sgd" if optim == "sgd" else "adamw",
        accumulation=args.gradient_accumulation_steps,
        num_shards=args.world_size if args.fsdp or is_sharded(model) else 1,
    )


NAMES: dict[str, str] = dict(zip(CHANNELS, ("lm_ce", "sdpo_kl", "trace_replay_dpo"), strict=True))
"""The channels' names in metrics."""


class ChannelLog:
    """The channels' metrics since the last log line: means over items, and how often each channel ran.

    Micro-batches are summed into steps, and steps are averaged. Values stay on their device until they are logged. For
    the whole run, each channel has its `ran_steps`, its `seen_items` (including items in steps where its weight was 0)
    and its largest weight in `top_weights`.
    """

    def __init__(self) -> None:
        self.ran_steps: Counter[str] = Counter()
        self.seen_items: Counter[str] = Counter()
        self.top_weights: dict[str, float] = dict.fromkeys(CHANNELS, 0.0)
        self.num_steps = 0
        self._open: Tensor | None = None
        self._reset()

    def add(self, components: LossComponents) -> None:
        """Add one micro-batch, in which each channel is already divided by its items in the whole batch."""
        values = torch.stack([getattr(components, name).detach().float() for name in CHANNELS])
        self._open = values if self._open is None else self._open + values

    def take_step(self) -> Tensor:
        """Return this process's losses in the finished step, of shape (3,), and begin the next step."""
        values = torch.zeros(len(CHANNELS)) if self._open is None else self._open
        self._open = None
        return values

    def finish_step(
        self, values: Tensor, items: Mapping[str, int], weights: Mapping[str, float], *, tokens: int = 0
    ) -> None:
        """Add a step's losses, summed over all processes. A channel ran if it had items and a weight above 0.

        `tokens` is the number of tokens in all trees of the step.
        """
        ran = [name for name in CHANNELS if items.get(name, 0) and weights[name] > 0]
        self.ran_steps.update(ran)
        self._ran.update(ran)
        self.seen_items.update({name: items.get(name, 0) for name in CHANNELS})
        self.top_weights = {name: max(self.top_weights[name], weights[name]) for name in CHANNELS}
        self.num_steps += 1
        self._steps += 1
        self._tokens += tokens
        self._items.update({name: items[name] for name in ran})
        means = values.double().cpu()
        # Multiply means by item counts to get sums, so that steps with more items have more weight.
        self._sums = self._sums + means * torch.tensor([items.get(name, 0) for name in CHANNELS], dtype=torch.float64)
        self._total += float((means * torch.tensor([weights[name] for name in CHANNELS], dtype=torch.float64)).sum())
        self._weights = dict(weights)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, and reset them.

        A channel that never ran has 0 under `ran/`, and no loss.
        """
        if not self._steps:
            return {}
        metrics: dict[str, float] = {"loss/total": self._total / self._steps, "tokens": self._tokens / self._steps}
        for index, name in enumerate(CHANNELS):
            label = NAMES[name]
            metrics[f"ran/{label}"] = self._ran[name] / self._steps
            metrics[f"items/{label}"] = self._items[name] / self._steps
            if self._ran[name]:
                metrics[f"loss/{label}"] = float(self._sums[index]) / self._items[name]
        metrics["loss/alpha_sdpo"], metrics["loss/beta_replay"] = (self._weights[name] for name in CHANNELS[1:])
        self._reset()
        return metrics

    def state(self) -> dict[str, Any]:
        return {
            "ran_steps": dict(self.ran_steps),
            "seen_items": dict(self.seen_items),
            "top_weights": dict(self.top_weights),
            "num_steps": self.num_steps,
            "since_log": {
                "steps": self._steps,
                "tokens": self._tokens,
                "ran": dict(self._ran),
                "items": dict(self._items),
                "sums": self._sums.tolist(),
                "total": self._total,
                "weights": dict(self._weights),
            },
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        self.ran_steps, self.num_steps = Counter(tree["ran_steps"]), tree["num_steps"]
        self.seen_items, self.top_weights = Counter(tree["seen_items"]), dict(tree["top_weights"])
        since = tree["since_log"]
        self._steps, self._ran, self._items = since["steps"], Counter(since["ran"]), Counter(since["items"])
        # Checkpoints written by earlier versions have no token count.
        self._tokens = since.get("tokens", 0)
        self._sums = torch.tensor(since["sums"], dtype=torch.float64)
        self._total, self._weights = since["total"], dict(since["weights"])

    def _reset(self) -> None:
        self._steps, self._tokens, self._total = 0, 0, 0.0
        self._ran: Counter[str] = Counter()
        self._items: Counter[str] = Counter()
        self._sums = torch.zeros(len(CHANNELS), dtype=torch.float64)
        self._weights: dict[str, float] = dict.fromkeys(CHANNELS, 0.0)


class EvaluationSums:
    """Sums over an evaluation, so that its losses are means over all items instead of means of means."""

    def __init__(self) -> None:
        self._sums = torch.zeros(len(CHANNELS), dtype=torch.float64)
        self._items = torch.zeros(len(CHANNELS), dtype=torch.float64)

    def add(self, components: LossComponents) -> None:
        items = torch.tensor([components.counts.get(name, 0) for name in CHANNELS], dtype=torch.float64)
        values = torch.stack([getattr(components, name).detach() for name in CHANNELS]).double().cpu()
        self._sums += values * items
        self._items += items

    def both(self) -> Tensor:
        """Return the sums and item counts, of shape (2, 3), to be summed over processes."""
        return torch.stack([self._sums, self._items])

    @staticmethod
    def metrics(both: Tensor, weights: Mapping[str, float]) -> dict[str, float]:
        """Return the mean loss of each channel that had items, and the weighted sum of these means as `total`."""
        sums, items = both.cpu().double().tolist()
        means = {name: total / count for name, total, count in zip(CHANNELS, sums, items, strict=True) if count}
        total = sum(weights[name] * value for name, value in means.items())
        return {"total": total, **{NAMES[name]: value for name, value in means.items()}}


def weighted_total(components: LossComponents, weights: Mapping[str, float]) -> Tensor:
    """Return the training loss. `compose_loss` always gives channel 1 weight 1; this applies the configured weight."""
    return components.total if weights[CHANNELS[0]] == 1.0 else weighted_sum(components, weights)


def weighted_sum(components: LossComponents, weights: Mapping[str, float]) -> Tensor:
    """Return the weighted sum of the channels' losses, regardless of the weights passed to `compose_loss`."""
    return sum((weights[name] * getattr(components, name) for name in CHANNELS), start=components.lm_ce.new_zeros(()))
