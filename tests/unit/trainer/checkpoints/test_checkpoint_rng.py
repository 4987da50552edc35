"""Every generator of a process goes back to where it was."""

from __future__ import annotations

import random

import numpy
import torch

from composer_replication.trainer.checkpoints import load_tree, rng_tree, save_tree, set_rng_tree


def draws():
    # gauss and normal keep the second number of a pair: half of the state that is easily forgotten.
    return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal(), torch.rand(2).tolist()


def test_generators_go_on_from_a_file_as_they_would_have(tmp_path):
    draws()
    save_tree(tmp_path, "rng", rng_tree())
    expected = [draws() for _ in range(3)]
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    set_rng_tree(load_tree(tmp_path, "rng"))
    assert [draws() for _ in range(3)] == expected


def test_states_of_devices_that_are_not_here_are_left_alone(monkeypatch):
    tree = rng_tree()
    tree["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_rng_tree(tree)
    assert torch.equal(torch.get_rng_state(), tree["torch"])


def test_every_cuda_device_is_kept(monkeypatch):
    states = [torch.full((16,), number, dtype=torch.uint8) for number in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    set_to = {}
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: set_to.update({device: state}))
    set_rng_tree(rng_tree())
    assert set_to == {0: states[0], 1: states[1]}
