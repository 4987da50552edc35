"""A step of verl's fsdp2 engine, with our channels in it, is the step that our trainer makes in TRL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_replication.batch.pair_tokens import PairIds
from composer_replication.errors import InputError
from composer_replication.recipes.verl.engine import ChannelEngine, StepChannels
from composer_replication.trainer.objective.compose import compose_loss
from composer_replication.trainer.rollouts.hint_distillation import SITES
from recipes.plain_losses import frozen, gradients, load_start, optimiser_of, plain_losses, relative_gap
from recipes.recorded_steps import (
    GROUP,
    ITERATIONS,
    SETTINGS,
    fixed_batch,
    recorded_batches,
    recorded_steps,
    start_weights,
    weight_sums,
)
from recipes.verl.cpu_engine import channels, data_proto, new_engine, policy_loss, queue_data, step_data
from recipes.verl.recorded_pairs import on_all_rollouts, pairs_of, with_pairs
from refusals import refusal

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]
DRIFT = 0.3


@pytest.fixture(scope="module")
def reference() -> Any:
    """verl's reference worker offloads to pinned memory, which a CPU has not: an engine that never steps instead."""
    return new_engine()


def taught_engine(reference: Any, **changes: Any) -> Any:
    engine = new_engine()
    assert type(engine) is ChannelEngine
    engine.channels = StepChannels(channels(**changes), reference)
    return engine


def one_step(engine: Any, data: Any, rows: int, *, moves: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the step reports, and the gradient it was made with (before it was clipped)."""
    found: dict[str, Tensor] = {}
    step = engine.optimizer_step

    def watched() -> float:
        for name, value in engine.module.named_parameters():
            found[name] = torch.zeros(()) if value.grad is None else value.grad.full_tensor().clone()
        return step() if moves else 0.0

    engine.optimizer_step = watched
    try:
        with engine.train_mode():
            outputs = engine.train_batch(data, policy_loss(rows))
    finally:
        del engine.optimizer_step
    metrics = {
        name: value.aggregate() if hasattr(value, "aggregate") else value for name, value in outputs["metrics"].items()
    }
    return metrics | {"loss": sum(outputs["loss"])}, found


def assert_close(found: float, wanted: float, what: str) -> None:
    assert abs(found - wanted) <= 1e-5 + 1e-5 * abs(wanted), (what, found, wanted)


@pytest.mark.parametrize(
    ("layout", "micro_batch"), [("padded", 8), ("padded", 2), ("packed", 8), ("packed", 2), ("queue", 4)]
)
def test_values_and_gradients_are_those_of_the_formulas(reference: Any, layout: str, micro_batch: int) -> None:
    batch, is_packed = fixed_batch(drift=DRIFT), layout == "packed"
    engine = new_engine(use_remove_padding=is_packed)
    teacher = new_engine(use_remove_padding=is_packed) if is_packed else reference
    engine.channels = StepChannels(channels(), teacher)
    data = step_data(data_proto(batch), micro_batch=micro_batch, use_remove_padding=is_packed)
    if layout == "queue":
        data = queue_data(batch, micro_batch_size_per_gpu=micro_batch)
    metrics, found = one_step(engine, data, 8, moves=False)
    model = load_start()
    plain = plain_losses(model, frozen(model), batch, SETTINGS["alpha_sdpo"])
    assert_close(metrics["actor/pg_loss"], plain.grpo.item(), "grpo")
    assert_close(metrics["composer/sdpo_kl"], plain.sdpo.item(), "sdpo")
    assert_close(metrics["loss"], plain.total.item(), "total")
    wanted = gradients(plain.total, model)
    assert relative_gap(found, wanted) < 2e-5
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


def test_twenty_steps_are_those_of_our_trainer_in_trl(reference: Any) -> None:
    engine = taught_engine(reference, anneal="linear")
    start = {name: value.full_tensor() for name, value in start_weights(engine.module).items()}
    batches = recorded_batches()
    for number, wanted in enumerate(recorded_steps()):
        metrics, _ = one_step(engine, step_data(data_proto(batches[number // ITERATIONS])), 8)
        engine.lr_scheduler_step()
        where = f"step {number}"
        assert abs(metrics["composer/sdpo_kl_weight"] - wanted.alpha) < 1e-9, where
        for name, value in (
            ("actor/pg_loss", wanted.grpo),
            ("composer/sdpo_kl", wanted.sdpo),
            ("loss", wanted.total),
            ("grad_norm", wanted.grad_norm),
        ):
            assert abs(metrics[name] - value) < 1e-4, (where, name, metrics[name], value)
        sums = weight_sums(_Whole(engine.module), start)
        assert torch.allclose(sums[:, 2], wanted.weights[:, 2], rtol=1e-2, atol=1e-5), where


class _Whole:
    """A sharded model's parameters as whole tensors."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return [(name, value.full_tensor()) for name, value in self._model.named_parameters()]


def test_two_steps_change_the_weights_as_ours_do(reference: Any) -> None:
    engine, model = taught_engine(reference), load_start()
    start, optimiser = frozen(model), optimiser_of(model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    batch = fixed_batch(drift=DRIFT)
    for _ in range(2):
        one_step(engine, step_data(data_proto(batch)), 8)
        optimiser.zero_grad()
        plain_losses(model, start, batch, SETTINGS["alpha_sdpo"]).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        optimiser.step()
    for name, value in engine.module.named_parameters():
        ours, theirs = model.get_parameter(name).detach(), value.full_tensor().detach()
        moved = (ours - before[name]).norm()
        assert moved > 0, name
        # Adam divides by the size of a gradient: where that is rounding, so is the direction of the step.
        assert (ours - theirs).norm() < 1e-2 * moved, name


def test_without_sites_a_step_is_verls_own(reference: Any) -> None:
    batch = fixed_batch(drift=DRIFT)
    ours = taught_engine(reference)
    theirs = new_engine("nobody")
    assert not isinstance(theirs, ChannelEngine)
    metrics, found = one_step(ours, step_data(data_proto(batch, with_sites=False)), 8)
    others, wanted = one_step(theirs, step_data(data_proto(batch, with_sites=False)), 8)
    assert metrics["composer/sdpo_kl_items"] == 0
    assert metrics["grad_norm"] == others["grad_norm"] > 0
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_rows_that_fill_a_batch_up_teach_nothing(reference: Any) -> None:
    """verl copies another row's columns into them, sites and all."""
    batch = fixed_batch(drift=DRIFT)
    whole, _ = one_step(taught_engine(reference), step_data(data_proto(batch)), 8, moves=False)
    proto = data_proto(batch)
    proto.batch["response_mask"][3] = 0
    proto.batch["attention_mask"][3, -200:] = 0
    metrics, _ = one_step(taught_engine(reference), step_data(proto), 8, moves=False)
    lost = sum(site.end - site.start for site in batch.sites if site.row == 3)
    assert lost > 0
    assert metrics["composer/sdpo_kl_items"] == whole["composer/sdpo_kl_items"] - lost


def test_a_live_teacher_without_a_hint_teaches_nothing(reference: Any) -> None:
    batch = fixed_batch()
    bare = [
        site._replace(teacher_ids=torch.tensor(batch.row_ids(site.row)[: site.end]), teacher_start=site.start)
        for site in batch.sites
    ]
    metrics, _ = one_step(
        taught_engine(reference, live_share=1.0),
        step_data(data_proto(replace(batch, sites=tuple(bare)))),
        8,
        moves=False,
    )
    hinted, _ = one_step(taught_engine(reference, live_share=1.0), step_data(data_proto(batch)), 8, moves=False)
    assert abs(metrics["composer/sdpo_kl"]) < 1e-6
    assert hinted["composer/sdpo_kl"] > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_teachers_best_entries_and_a_tail_come_close_to_the_whole(reference: Any, beta: float) -> None:
    batch = fixed_batch()
    found = {
        k: one_step(
            taught_engine(reference, teacher_top_k=k, sdpo_jsd_beta=beta), step_data(data_proto(batch)), 8, moves=False
        )[0]["composer/sdpo_kl"]
        for k in (8, 256, None)
    }
    # Entries put together can only hide a difference, so a tail bucket is a lower bound.
    assert 0 < found[8] <= found[256] + 1e-7 <= found[None] + 2e-7
    assert found[256] > 0.98 * found[None]


def flat_pairs(pairs: list[tuple[PairIds, Any]]) -> dict[str, Tensor]:
    inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "response_mask": torch.zeros(1, 2, dtype=torch.int64)}
    for place, side in enumerate(("chosen", "rejected")):
        answers = [pair[place] for pair, _ in pairs]
        longest = max(len(each.ids) for each in answers)
        ids = torch.tensor([each.ids + [0] * (longest - len(each.ids)) for each in answers])
        mask = torch.tensor([[int(each.start <= at < len(each.ids)) for at in range(longest)] for each in answers])
        inputs |= {f"dpo_{side}_input_ids": ids, f"dpo_{side}_response_mask": mask}
        inputs[f"dpo_{side}_ref_logprobs"] = torch.tensor([reference[place] for _, reference in pairs])
    return inputs


@pytest.mark.parametrize(("variant", "columns"), [("dpo", with_pairs), ("simpo", with_pairs), ("dpo", on_all_rollouts)])
def test_pairs_are_in_the_same_step(reference: Any, variant: Any, columns: Any) -> None:
    batch = fixed_batch(drift=DRIFT)
    pairs = pairs_of(batch)
    engine = taught_engine(reference, beta_replay=0.05, dpo_variant=variant, pair_batch=4)
    metrics, found = one_step(engine, step_data(columns(batch, pairs)), 8, moves=False)
    model = load_start()
    plain = plain_losses(model, frozen(model), batch, SETTINGS["alpha_sdpo"])
    replay = compose_loss(model, flat_pairs(pairs), alpha_sdpo=0.0, beta_replay=0.05, dpo_variant=variant)
    assert replay.counts["trace_replay_dpo"] == metrics["composer/trace_replay_dpo_items"] == len(pairs)
    assert_close(metrics["composer/trace_replay_dpo"], replay.trace_replay_dpo.item(), "pairs")
    total = plain.total + replay.total
    assert_close(metrics["loss"], total.item(), "total")
    wanted = gradients(total, model)
    assert relative_gap(found, wanted) < 5e-5
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


def test_without_names_of_prompts_no_row_is_anothers_copy(reference: Any) -> None:
    batch = fixed_batch()
    pairs = pairs_of(batch)
    proto = on_all_rollouts(batch, pairs)
    del proto.non_tensor_batch["uid"]
    metrics, _ = one_step(taught_engine(reference, alpha_sdpo=0.0, beta_replay=0.05), step_data(proto), 8, moves=False)
    assert metrics["composer/trace_replay_dpo_items"] == GROUP * len(pairs)


def test_pairs_without_a_reference_are_refused(reference: Any) -> None:
    batch = fixed_batch()
    bare = [(pair, None) for pair, _ in pairs_of(batch)]
    with refusal(InputError, what="reference", got="None", fix="simpo"):
        one_step(taught_engine(reference, beta_replay=0.05), step_data(with_pairs(batch, bare)), 8)


def test_without_a_reference_worker_or_an_adapter_there_is_no_teacher() -> None:
    engine = taught_engine(None)
    with refusal(InputError, what="teacher", expected="adapter", fix="live_share"):
        one_step(engine, step_data(data_proto(fixed_batch())), 8)


def test_below_an_adapter_are_the_start_weights(reference: Any) -> None:
    """Under LoRA the reference needs no worker: the adapter is switched off, and trains as before afterwards."""
    batch = fixed_batch()
    engine = new_engine(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    engine.channels = StepChannels(channels(), None)
    trained = {name for name, value in engine.module.named_parameters() if value.requires_grad}
    metrics, found = one_step(engine, step_data(data_proto(batch)), 8)
    whole, _ = one_step(taught_engine(reference), step_data(data_proto(batch)), 8)
    assert_close(metrics["composer/sdpo_kl"], whole["composer/sdpo_kl"], "the first step of a fresh adapter")
    assert trained == {name for name, value in engine.module.named_parameters() if value.requires_grad}
    assert any(found[name].abs().sum() > 0 for name in trained)


def test_sites_of_other_rows_are_an_error(reference: Any) -> None:
    proto = data_proto(fixed_batch())
    proto.non_tensor_batch[SITES] = np.roll(proto.non_tensor_batch[SITES], 1)
    with pytest.raises(InputError):
        one_step(taught_engine(reference), step_data(proto), 8)
