"""The outer loop: plain training where it should be, torchft's own numbers, heals, and what it refuses."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from composer_replication.diloco import make_diloco_outer_loop
from composer_replication.diloco.training import AFTER_HEAL, BEFORE_HEAL, OuterLoop, split_into_fragments, train_replica
from composer_replication.errors import ConfigError, InputError
from refusals import refusal
from small_replicas import (
    AVERAGING,
    TORCHFTS_OWN_WARNINGS,
    OneReplica,
    in_threads,
    inner_steps,
    lighthouse,
    run_replica,
    small_model,
    torchft_manager,
    torchft_replicas,
    vector,
)

pytest.importorskip("torchft")
pytestmark = TORCHFTS_OWN_WARNINGS


def plain_run(steps: int = 12) -> list[torch.Tensor]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [vector(model) for _ in inner_steps(model, optimizer, 0, steps)]


def test_one_replica_that_averages_is_plain_training():
    history, plain = run_replica(OneReplica()), plain_run()
    assert len(history) == len(plain) + 1
    for ours, theirs in zip(history, [*plain, plain[-1]], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [AVERAGING, OuterLoop(sync_every=4, num_fragments=2, fragment_sync_delay=1)])
def test_one_replica_is_torchfts_manager_with_one_bit_for_bit(settings):
    [theirs] = torchft_replicas(1, settings=settings)
    ours = run_replica(OneReplica(), settings=settings)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_the_outer_step_is_nesterov_from_the_global_weights():
    settings = OuterLoop(sync_every=4, outer_lr=0.5, outer_momentum=0.9)
    history = run_replica(OneReplica(), steps=8, settings=settings)
    start = vector(small_model())
    first = start - plain_run(4)[-1]
    torch.testing.assert_close(history[3], start - 0.5 * (first + 0.9 * first), rtol=0, atol=1e-6)


def test_a_round_that_does_not_commit_leaves_the_global_weights():
    history = run_replica(OneReplica(aborted=[1]), steps=12)
    assert torch.equal(history[7], history[3])
    assert not torch.equal(history[11], history[7])


def test_a_step_of_one_fragment_leaves_the_others_as_the_inner_optimizer_left_them():
    settings = OuterLoop(sync_every=4, num_fragments=2, outer_lr=0.5, outer_momentum=0.0, nesterov=False)
    model = small_model()
    first, second = split_into_fragments(model, 2)
    history = run_replica(OneReplica(), steps=2, settings=settings)
    size = sum(each.numel() for each in first.parameters())
    start, plain = vector(model), plain_run(2)[-1]
    assert size + sum(each.numel() for each in second.parameters()) == len(plain)
    torch.testing.assert_close(history[1][:size], (start + plain)[:size] / 2, rtol=0, atol=1e-6)
    assert torch.equal(history[1][size:], plain[size:])
    assert torch.equal(history[-1][size:], start[size:])  # after the block: what is global


def test_a_run_that_has_all_its_commits_exchanges_no_more():
    for commits, expected in ((3, 3), (4, 4), (None, 6)):
        manager, model = OneReplica(), small_model()
        manager.step = 3
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with train_replica(manager, model, optimizer, AVERAGING, commits=commits) as loop:
            list(inner_steps(model, optimizer, 0, 12))
        assert manager.step == expected
        assert all(
            torch.equal(value, dict(model.named_parameters())[name])
            for name, value in loop._fragments[0].original_parameters.items()
        )


def heal_with(manager: OneReplica, state: dict) -> None:
    for key, (load, _) in manager.state.items():
        load(state[key])


def test_a_heal_from_another_history_takes_the_model_along_and_from_the_same_one_does_not():
    manager, model = OneReplica(), small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loop = make_diloco_outer_loop(manager, [model], optimizer, sync_every=4)
    assert [*manager.state] == [BEFORE_HEAL, "StreamingDiLoCoFragment_0", AFTER_HEAL]
    state = {key: save() for key, (_, save) in manager.state.items()}
    with loop:
        list(inner_steps(model, optimizer, 0, 2))
        moved = vector(model)
        heal_with(manager, state)
        assert torch.equal(vector(model), moved)
        for each in state["StreamingDiLoCoFragment_0"]["original_parameters"].values():
            each.add_(1.0)
        heal_with(manager, state)
    torch.testing.assert_close(vector(model), vector(small_model()) + 1, rtol=0, atol=0)


def test_torchft_replicas_with_other_start_weights_follow_the_first_not_a_mix_of_both():
    with lighthouse(2) as address:

        def replica(rank):
            with torchft_manager(address, rank, 2) as manager:
                return run_replica(manager, rank=rank, steps=4, seed=rank)

        histories = in_threads(2, replica)
    assert torch.equal(histories[0][-1], histories[1][-1])
    starts = [vector(small_model(rank)) for rank in range(2)]
    assert (starts[0] - starts[1]).abs().max() > 1
    assert min((histories[0][-1] - start).abs().max() for start in starts) < 0.05


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def refused(error, parts, manager=None, fragments=None, parameters=None, **options):
    model = small_model()
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    with refusal(error, **parts):
        make_diloco_outer_loop(manager or OneReplica(), fragments or [model], optimizer, **options)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ({"what": "sync_every", "got": "5", "expected": "2", "fix": "4"}, {"sync_every": 5}),
        ({"what": "fragment_sync_delay", "got": "2", "expected": "1"}, {"sync_every": 4, "fragment_sync_delay": 2}),
        ({"what": "fragment_update_alpha", "got": "1.5"}, {"sync_every": 4, "fragment_update_alpha": 1.5}),
        ({"what": "outer_lr", "got": "0"}, {"outer_lr": 0.0}),
        ({"what": "outer_momentum", "got": "1"}, {"outer_momentum": 1.0}),
        ({"what": "nesterov", "got": "0"}, {"outer_momentum": 0.0}),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(parts, options):
    model = small_model()
    refused(InputError, parts, fragments=[model[:2], model[2:]], parameters=model.parameters(), **options)


def test_fragments_that_miss_or_share_weights_are_refused():
    model = small_model()
    refused(InputError, {"what": "model_fragments", "got": "2 "}, fragments=[model[:3]], parameters=model.parameters())
    refused(InputError, {"what": "0.weight of fragment 1", "got": "0.weight of fragment 0"},
            fragments=[model, model[:1]], parameters=model.parameters())  # fmt: skip
    refused(InputError, {"what": "model_fragments[1]"}, fragments=[model, frozen(small_model())],
            parameters=model.parameters())  # fmt: skip
    tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight.data = tied[0].weight.data
    refused(InputError, {"what": "weight of fragment 1", "got": "weight of fragment 0"}, fragments=[*tied],
            parameters=tied.parameters())  # fmt: skip
    half = small_model().bfloat16()
    refused(InputError, {"got": "torch.bfloat16", "expected": "torch.float32"}, fragments=[half],
            parameters=half.parameters())  # fmt: skip


def test_an_asynchronous_quorum_is_refused():
    manager = OneReplica()
    manager._use_async_quorum = True
    refused(InputError, {"fix": "use_async_quorum=False"}, manager=manager)


def test_more_than_one_bucket_is_refused_and_torchft_is_still_wrong_there(monkeypatch):
    from torchft.local_sgd import DiLoCo, _StreamingDiLoCoFragment

    monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", "True")
    monkeypatch.setattr(_StreamingDiLoCoFragment, "bucket_cap_mb", 64)
    where = "TORCHFT_USE_BUCKETIZATION"
    refused(ConfigError, {"what": where, "got": "476 bytes", "expected": "64 bytes", "fix": where})
    model = small_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with DiLoCo(WithItsOpposite(), [model], inner, torch.optim.SGD(model.parameters(), lr=1.0), 4):
        list(inner_steps(model, inner, 0, 4))
    # The day the model has not moved, the refusal can go.
    assert (vector(model) - vector(small_model())).abs().max() > 1e-3
    monkeypatch.setattr(_StreamingDiLoCoFragment, "bucket_cap_mb", 476)
    model = small_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with make_diloco_outer_loop(WithItsOpposite(), [model], inner, sync_every=4):
        list(inner_steps(model, inner, 0, 4))
    assert torch.equal(vector(model), vector(small_model()))


class WithItsOpposite(OneReplica):
    """The mean with a replica that moved the other way: nothing."""

    def allreduce(self, tensor, should_quantize=False):
        return super().allreduce(tensor.zero_())


def test_over_torchfts_manager_a_name_without_address_is_refused_and_pickle_is_named(monkeypatch, caplog):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lighthouse(1) as address, torchft_manager(address, 0, 1) as manager:
        with monkeypatch.context() as patch:
            patch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
            with refusal(ConfigError, got="no-such-host.invalid", fix="/etc/hosts"):
                make_diloco_outer_loop(manager, [model], optimizer)
        with caplog.at_level(logging.WARNING, logger="composer_replication"):
            make_diloco_outer_loop(manager, [model], optimizer)
    assert "HTTPTransport" in caplog.text


def test_only_the_trainable_weights_travel():
    class Counting(OneReplica):
        sent = 0

        def allreduce(self, tensor, should_quantize=False):
            self.sent += tensor.numel()
            return super().allreduce(tensor)

    model, manager = small_model(), Counting()
    frozen(model[0])
    before = model[0].weight.clone()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    with train_replica(manager, model, optimizer, AVERAGING):
        list(inner_steps(model, optimizer, 0, 4))
    assert manager.sent == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert torch.equal(model[0].weight, before)


def test_fragments_are_runs_of_whole_layers_of_like_size():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(5))})
    names = [[name for name, _ in each.named_parameters()] for each in split_into_fragments(model, 3)]
    layers = [[f"layers.{layer}.{part}" for part in ("weight", "bias")] for layer in range(5)]
    assert names == [["embed.weight", *layers[0]], [*layers[1], *layers[2]], [*layers[3], *layers[4]]]


def test_more_fragments_than_layers_are_refused():
    assert len(split_into_fragments(small_model(), 3)) == 3
    with refusal(InputError, what="fragments", got="4", expected="3"):
        split_into_fragments(small_model(), 4)
