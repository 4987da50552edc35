"""PRIME-RL 0.8.0 (559b447, 21 August 2026) in our words: the records that an algorithm and a loss meet, and the sums.

`test_upstream.py` holds each of them to the engine's own, where a checkout is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class LossInputs:
    """What a loss of one sample is given; every tensor is 1-D over its tokens."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class Node:
    """A message of verifiers' graph with the tokens that it adds; compact lists are over its sampled tokens."""

    message: Any
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] | None = None
    reference_logprobs: list[float] | None = None
    loss_weights: dict[str, list[float]] | None = None


@dataclass
class Branch:
    """A path through the graph; 0 stands where a node has nothing."""

    nodes: list[Node]
    tools: list[Any] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [each for node in self.nodes for each in node.token_ids]

    @property
    def sampled_mask(self) -> list[bool]:
        return [each for node in self.nodes for each in node.mask]

    def spread(self, name: str) -> list[float]:
        """A compact field at its places."""
        found: list[float] = []
        for node in self.nodes:
            values = iter(getattr(node, name) or [0.0] * sum(node.mask))
            found += [next(values) if is_sampled else 0.0 for is_sampled in node.mask]
        return found

    def weights(self, name: str) -> list[float] | None:
        found = [each for node in self.nodes for each in (node.loss_weights or {}).get(name, [0.0] * len(node.mask))]
        return found if any(found) else None


@dataclass
class Trace:
    id: str
    branches: list[Branch]
    reward: float
    info: dict[str, Any] = field(default_factory=dict)


class Sample(NamedTuple):
    """What goes over the wire, as far as a loss reads it; None is a stream that nobody wrote."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    advantages: list[float]
    ref_logprobs: list[float] | None
    rl_weights: list[float] | None
    ref_kl_weights: list[float] | None


def samples_of(traces: Sequence[Trace]) -> Iterator[Sample]:
    """One a branch, less the rl tokens whose advantage is 0 (`filter_zero_advantages`, on by default)."""
    for trace in traces:
        for branch in trace.branches:
            has_reference = any(node.reference_logprobs is not None for node in branch.nodes)
            advantages, mask = branch.spread("advantages"), branch.sampled_mask
            yield Sample(
                branch.token_ids,
                mask,
                branch.spread("logprobs"),
                advantages,
                branch.spread("reference_logprobs") if has_reference else None,
                [float(is_sampled and each != 0.0) for is_sampled, each in zip(mask, advantages, strict=True)],
                branch.weights("ref_kl"),
            )


def give_advantages(traces: Sequence[Trace], group: Sequence[int]) -> None:
    """GRPO's: the reward less its group's mean, the same for every sampled token."""
    for trace, own in zip(traces, group, strict=True):
        rewards = [each.reward for each, other in zip(traces, group, strict=True) if other == own]
        for branch in trace.branches:
            for node in branch.nodes:
                if any(node.mask):
                    node.advantages = [trace.reward - sum(rewards) / len(rewards)] * sum(node.mask)


def default_loss(inputs: LossInputs) -> Tensor:
    """rl: dropped where the probability moved by more than 0.2 the way the advantage pushes; drift costs 1e-3."""
    gap = inputs.trainer_logprobs - inputs.inference_logprobs
    moved = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
    is_dropped = torch.where(inputs.advantages > 0, moved > 0.2, moved < -0.2)
    policy = (inputs.loss_mask & ~is_dropped) * inputs.advantages * gap.exp()
    return _weighed(-policy + 1e-3 * inputs.loss_mask * gap**2, inputs.loss_weights)


def ref_kl_loss(inputs: LossInputs) -> Tensor:
    """ref_kl: the same with (reference - trainer) in the advantage's place; dropped where it fell by more than 0.2."""
    assert inputs.ref_logprobs is not None
    gap = inputs.trainer_logprobs - inputs.inference_logprobs
    is_dropped = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp() < -0.2
    push = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    policy = (inputs.loss_mask & ~is_dropped) * push * gap.exp()
    return _weighed(-policy + 1e-3 * inputs.loss_mask * gap**2, inputs.loss_weights)


def _weighed(terms: Tensor, weights: Tensor | None) -> Tensor:
    return (terms if weights is None else terms * weights).sum()


class Components(NamedTuple):
    rl: Tensor
    ref_kl: Tensor

    @property
    def total(self) -> Tensor:
        return self.rl + self.ref_kl


def engine_loss(
    samples: Sequence[Sample], logprobs: Sequence[Tensor], rl_loss: Callable[[LossInputs], Tensor] = default_loss
) -> Components:
    """All samples of a step: each component over its own tokens, divided by how many of them the step has."""
    rl, ref_kl = logprobs[0].sum() * 0.0, logprobs[0].sum() * 0.0
    rl_tokens = ref_kl_tokens = 0
    for sample, trainer in zip(samples, logprobs, strict=True):
        reference = None if sample.ref_logprobs is None else torch.tensor(sample.ref_logprobs)
        shared = (trainer, torch.tensor(sample.logprobs), reference, torch.tensor(sample.advantages))
        weights = torch.tensor(sample.rl_weights)
        mask = torch.tensor(sample.mask) & (weights != 0)
        rl_tokens += int(mask.sum())
        if bool(mask.any()):
            rl = rl + rl_loss(LossInputs(*shared, mask, weights))
        if sample.ref_kl_weights is not None:
            weights = torch.tensor(sample.ref_kl_weights)
            ref_kl_tokens += int((weights != 0).sum())
            ref_kl = ref_kl + ref_kl_loss(LossInputs(*shared, weights != 0, weights))
    return Components(rl / max(rl_tokens, 1), ref_kl / max(ref_kl_tokens, 1))


def trainer_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Each token's log-prob after those before it; the first has one that no loss reads."""
    logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    chosen = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen])
