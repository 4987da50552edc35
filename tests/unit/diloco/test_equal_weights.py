"""Weights that are equal to the bit: an outer step that no machine makes otherwise, and what happens where one does."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from toy_replicas import QUICK, ToyLoop, in_threads

from composer_replication.diloco.rounds.manager import ObjectStoreManager
from composer_replication.diloco.store import MemoryStore
from composer_replication.diloco.training import OuterLoop, _OuterSGD, train_replica
from small_replicas import in_threads as replicas_in_threads
from small_replicas import inner_steps, small_model, vector

STEPS = """
import hashlib, sys
import numpy as np, torch
from composer_replication.diloco.training import _OuterSGD
numbers = np.random.default_rng(0)
draw = lambda: torch.from_numpy(numbers.standard_normal(10_007).astype(np.float32))
for optimizer in (_OuterSGD, torch.optim.SGD):
    weights = torch.nn.Parameter(draw())
    outer = optimizer([weights], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        weights.grad = draw()
        outer.step()
    print(hashlib.sha256(weights.detach().numpy().tobytes()).hexdigest())
"""


def test_the_outer_step_has_the_same_bits_on_a_cpu_without_fused_operations(note):
    """torch's kernels for the oldest CPUs against those of this one."""
    seen = {}
    for kernels in ("default", ""):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": kernels} if kernels else dict(os.environ)
        ran = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
        seen[kernels] = ran.stdout.split()
    assert seen["default"][0] == seen[""][0]
    note(f"torch's own step: {'other' if seen['default'][1] != seen[''][1] else 'the same'} bits on the oldest kernels")


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_outer_step_is_torchs_sgd(momentum, nesterov):
    if nesterov and not momentum:
        nesterov = False
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    ends = []
    for optimizer in (_OuterSGD, torch.optim.SGD):
        generator.manual_seed(1)
        weights = torch.nn.Parameter(start.clone())
        outer = optimizer([weights], lr=0.7, momentum=momentum, nesterov=nesterov)
        for _ in range(4):
            weights.grad = torch.randn(50, generator=generator)
            outer.step()
        ends.append((weights.detach(), outer.state_dict()))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=0, atol=1e-6)
    assert ends[0][1]["state"].keys() == ends[1][1]["state"].keys()
    theirs = torch.optim.SGD([torch.nn.Parameter(start.clone())], lr=0.7, momentum=momentum, nesterov=nesterov)
    theirs.load_state_dict(ends[0][1])


def test_a_parameter_without_a_gradient_stays():
    weights = torch.nn.Parameter(torch.ones(3))
    _OuterSGD([weights], lr=0.7, momentum=0.9, nesterov=True).step()
    assert torch.equal(weights.detach(), torch.ones(3))


class AnotherMachine(ToyLoop):
    """Its outer step ends one bit beside that of the others."""

    def apply(self, step, means):
        super().apply(step, means)
        at = step % len(self.globals)
        self.globals[at].copy_(torch.nextafter(self.globals[at], torch.tensor(torch.inf)))
        self.training[at].copy_(self.globals[at])


def run(store, rank, steps, *, other, agrees=True, **options):
    manager = ObjectStoreManager(store, rank=rank, world_size=2, **{**QUICK, "state_every": 3, **options})
    loop = AnotherMachine(manager) if rank in other else ToyLoop(manager)
    apart = []
    while manager.current_step() < steps:
        loop.round()
        apart.append(loop.globals[0].clone())
    if agrees:
        manager.agree_on_weights()
    manager.close()
    return loop, apart


SAID_TO_DIFFER = r"\brank 1\b.*\brank 0\b"


@pytest.mark.parametrize("other", [{1}, {0}])
@pytest.mark.parametrize("steps", [4, 6, 8])
def test_a_replica_whose_arithmetic_is_another_is_noticed_and_ends_with_the_others_weights(other, steps, caplog):
    store = MemoryStore()
    (first, ours), (second, theirs) = in_threads(
        [functools.partial(run, store, rank, steps, other=other) for rank in range(2)]
    )
    assert torch.equal(first.globals[0], second.globals[0])
    assert torch.equal(first.momentum[0], second.momentum[0])
    assert re.search(SAID_TO_DIFFER, caplog.text)
    differs = [not torch.equal(mine, other_s) for mine, other_s in zip(ours, theirs, strict=True)]
    assert differs[:3] == [True] * 3  # the machine is another indeed
    most = max((mine - other_s).abs().max() for mine, other_s in zip(ours, theirs, strict=True))
    assert most < 1e-4


def test_replicas_of_one_arithmetic_compare_and_change_nothing(caplog):
    store = MemoryStore()
    ends = in_threads([functools.partial(run, store, rank, 7, other=()) for rank in range(2)])
    assert torch.equal(ends[0][0].globals[0], ends[1][0].globals[0])
    assert not re.search(SAID_TO_DIFFER, caplog.text)
    assert len(store.keys("g000000/sums")) == 3  # steps 3, 6 and the end


def test_a_first_member_that_died_before_it_said_its_sum_costs_two_graces():
    store = MemoryStore()
    options = {"min_replicas": 1, "grace_s": 0.5}

    def begin(rank):
        manager = ObjectStoreManager(store, rank=rank, world_size=2, **{**QUICK, "state_every": 3, **options})
        loop = ToyLoop(manager)
        while manager.current_step() < 3:
            loop.round()
        return loop

    dead, alive = in_threads([functools.partial(begin, rank) for rank in range(2)])
    dead.manager._membership._heartbeat.stop()
    began = time.monotonic()
    while alive.manager.current_step() < 5:
        alive.round()
    alive.manager.agree_on_weights()
    assert 0.9 < time.monotonic() - began < 4.0


class Nudged(_OuterSGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for weights in group["params"]:
                weights.data.copy_(torch.nextafter(weights.data, torch.tensor(torch.inf)))


def test_trained_replicas_of_other_machines_end_with_one_model(monkeypatch):
    pytest.importorskip("torchft")
    store = MemoryStore()

    def replica(rank):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        limits = {"poll_s": 0.005, "grace_s": 2.0, "first_grace_s": 20.0, "timeout_s": 60.0, "state_every": 2}
        with ObjectStoreManager(store, rank=rank, world_size=2, **limits) as manager:
            with train_replica(manager, model, optimizer, OuterLoop(sync_every=4)) as loop:
                if rank:
                    for fragment in loop._fragments:
                        fragment._outer_optimizer.__class__ = Nudged
                list(inner_steps(model, optimizer, rank, 12))
            return vector(model)

    first, second = replicas_in_threads(2, replica)
    assert torch.equal(first, second)
