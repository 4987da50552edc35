"""torchft's own DiLoCo, unmodified, over rounds in a folder."""

from __future__ import annotations

import pytest
import torch
from toy_replicas import QUICK, in_threads

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.training import _TorchftFollower

local_sgd = pytest.importorskip("torchft.local_sgd")


def train(uri: str, rank: int, world: int, *, num_fragments: int, delay: int, follows: bool) -> list[torch.Tensor]:
    """The global weights after six commits."""
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2))
    for parameter in model.parameters():  # other weights at each replica
        torch.nn.init.normal_(parameter, generator=generator)
    fragments = list(model) if num_fragments == 2 else [model]
    manager = ObjectStoreManager(uri, rank=rank, world_size=world, **QUICK)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in fragments]
    loop = local_sgd.DiLoCo(manager, fragments, inner, outer, sync_every=4, fragment_sync_delay=delay)
    if follows:
        manager.follow(_TorchftFollower(loop))
    with loop:
        while manager.current_step() < 6:
            inner.zero_grad()
            model(torch.randn(3, 6, generator=generator)).square().mean().backward()
            inner.step()
    manager.close()
    return [weights.clone() for each in loop._fragments for weights in each.original_parameters.values()]


@pytest.mark.parametrize(
    ("world", "num_fragments", "delay", "follows"), [(2, 1, 0, False), (2, 2, 1, True), (4, 1, 2, True)]
)
def test_replicas_end_with_the_same_weights_to_the_bit(tmp_path, world, num_fragments, delay, follows):
    uri = f"file://{tmp_path}"

    def replica(rank):
        return lambda: train(uri, rank, world, num_fragments=num_fragments, delay=delay, follows=follows)

    first, *others = in_threads([replica(rank) for rank in range(world)])
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), other
