"""What verl finds by name, called as verl calls it: through its registries, its advantage step and its two losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.distillation.losses import distillation_ppo_loss, get_distillation_loss_settings
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils
from verl.workers.config import DistillationConfig, DistillationLossConfig

from composer_replication.errors import ConfigError, InputError
from composer_replication.loss.grpo import group_advantages, grpo_loss
from composer_replication.recipes.verl import registered
from recipes.recorded_steps import SETTINGS, fixed_batch, recorded_batches
from recipes.verl.cpu_engine import actor_config, data_proto, step_data
from refusals import refusal

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def advantages_of(proto: DataProto, *, over_std: bool) -> Tensor:
    config = AlgoConfig(adv_estimator=registered.ADVANTAGE, norm_adv_by_std_in_grpo=over_std)
    return compute_advantage(proto, registered.ADVANTAGE, config=config).batch["advantages"]


def rewarded(rewards: Tensor, groups: list[str]) -> DataProto:
    mask = torch.ones(len(groups), 5, dtype=torch.int64)
    mask[:, 4] = 0
    spread = torch.zeros(len(groups), 5)
    spread[:, 3] = rewards
    tensors = {"token_level_rewards": spread, "response_mask": mask}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(groups, dtype=object)})


def test_advantages_are_the_recorded_ones() -> None:
    for batch in recorded_batches():
        proto = data_proto(batch)
        proto.batch["token_level_rewards"] = torch.zeros_like(batch.old_logprobs)
        proto.batch["token_level_rewards"][:, 0] = batch.rewards
        found = advantages_of(proto, over_std=False)
        wanted = batch.advantages[:, None] * batch.loss_mask
        assert torch.allclose(found, wanted, atol=1e-6)


def test_groups_may_be_of_any_size_and_in_any_order() -> None:
    rewards = torch.tensor([1.0, 5.0, 3.0, 7.0, 2.0, 9.0])
    proto = rewarded(rewards, ["a", "b", "a", "c", "b", "a"])
    found = advantages_of(proto, over_std=True)[:, 0]
    assert torch.allclose(found[[0, 2, 5]], group_advantages(rewards[[0, 2, 5]], 3, "group"))
    assert torch.allclose(found[[1, 4]], group_advantages(rewards[[1, 4]], 2, "group"))
    assert found[3] == 0  # alone: nothing to compare it with; verl's own gives it its whole reward
    assert advantages_of(proto, over_std=True)[0, 4] == 0


def test_a_batch_of_equal_rewards_is_said_to_teach_nothing() -> None:
    proto = rewarded(torch.ones(4), ["a", "a", "b", "b"])
    with pytest.warns(UserWarning, match=r"\b2 groups\b"):
        assert not advantages_of(proto, over_std=False).any()


def test_advantages_need_groups() -> None:
    proto = rewarded(torch.ones(2), ["a", "a"])
    del proto.non_tensor_batch["uid"]
    with refusal(InputError, what="groups", got="None"):
        advantages_of(proto, over_std=False)


def loss_and_gradient(loss: Any, logprobs: Tensor) -> tuple[float, Tensor]:
    value = loss(logprobs)
    return float(value), torch.autograd.grad(value, logprobs)[0]


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [("seq-mean-token-sum-norm", "dr_grpo"), ("token-mean", "dapo"), ("seq-mean-token-mean", "grpo")],
)
def test_the_policy_loss_is_grpos(mode: str, loss_type: Any) -> None:
    batch = fixed_batch(drift=0.3)
    old = batch.old_logprobs
    logprobs = torch.where(batch.loss_mask, old - 0.25 * torch.cos(old * 9), torch.nan).requires_grad_()
    config = actor_config(8)
    config.global_batch_info.update(dp_size=1, loss_scale_factor=SETTINGS["max_completion_length"])
    policy = get_policy_loss_fn(registered.POLICY_LOSS)
    advantages = batch.advantages[:, None].expand_as(old)

    def verls(values: Tensor) -> Tensor:
        loss, metrics = policy(old, values, advantages, batch.loss_mask, loss_agg_mode=mode, config=config)
        assert 0 < metrics["actor/pg_clipfrac"] < 1
        return loss

    def ours(values: Tensor) -> Tensor:
        length = SETTINGS["max_completion_length"]
        return grpo_loss(
            values, old, batch.advantages, batch.loss_mask, loss_type=loss_type, max_completion_length=length
        ).loss

    found, wanted = loss_and_gradient(verls, logprobs), loss_and_gradient(ours, logprobs)
    assert abs(found[0] - wanted[0]) < 1e-6
    assert torch.allclose(found[1], wanted[1], atol=1e-7)


def test_there_is_no_third_clip() -> None:
    """verl's "vanilla" holds -A * 3 where A < 0 and the ratio is beyond 3: it is no longer pushed back."""
    now = torch.tensor([[2.0]], requires_grad=True)
    given = {"old_log_prob": torch.zeros(1, 1), "advantages": torch.tensor([[-1.0]]), "response_mask": torch.ones(1, 1)}
    config = actor_config(8)
    config.global_batch_info.update(dp_size=1)
    gradient = {}
    for name in (registered.POLICY_LOSS, "vanilla"):
        loss, _ = get_policy_loss_fn(name)(log_prob=now, loss_agg_mode="token-mean", config=config, **given)
        gradient[name] = float(torch.autograd.grad(loss, now)[0])
    assert gradient == {registered.POLICY_LOSS: pytest.approx(float(np.exp(2.0))), "vanilla": 0.0}


VOCAB, TOP_K = 40, 6


def distillation(mode: str, **options: Any) -> DistillationConfig:
    given = {
        "loss_max_clamp": None,
        "log_prob_min_clamp": None,
        "use_policy_gradient": False,
        "topk": TOP_K,
        "use_task_rewards": False,
    }
    return DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode=mode, **given | options))


def teacher_columns(data: Any, taught: Tensor) -> tuple[Any, Tensor]:
    """Rows of a random teacher where `taught` (packed tokens) says so; the teacher's whole log-probs with them."""
    ids = data["input_ids"]
    generator = torch.Generator().manual_seed(3)
    whole = (2.5 * torch.randn(ids.values().numel(), VOCAB, generator=generator)).log_softmax(-1)
    best = whole.topk(TOP_K, dim=-1)
    logprobs = torch.where(taught[:, None], best.values, registered.NO_TEACHER)
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(logprobs, ids.offsets())
    data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(best.indices, ids.offsets())
    return data, whole


def stock_loss(config: DistillationConfig, data: Any, logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """As verl's engine calls its own distillation loss: with the logits, then with what came of them."""
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(data["loss_mask"].sum()))
    actor, offsets = actor_config(8), data["input_ids"].offsets()
    labels = torch.roll(data["input_ids"].values() % VOCAB, -1)
    logprobs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(logprobs, offsets)}
    if get_distillation_loss_settings(config.distillation_loss.loss_mode).use_topk:
        made = distillation_ppo_loss(actor, config, data=data, student_logits=logits[None])
        output |= {name: torch.nested.nested_tensor_from_jagged(each[0], offsets) for name, each in made.items()}
    return distillation_ppo_loss(actor, config, model_output=output, data=data)


def targets_of(batch: Any, data: Any) -> Tensor:
    """Packed tokens whose next token is of an erring turn."""
    firsts = data["input_ids"].offsets().tolist()
    taught = torch.zeros(firsts[-1], dtype=torch.bool)
    for site in batch.sites:
        taught[firsts[site.row] + site.start - 1 : firsts[site.row] + site.end - 1] = True
    return taught


@pytest.fixture
def columns() -> tuple[Any, Tensor, Tensor, Tensor]:
    batch = fixed_batch()
    data = step_data(data_proto(batch))
    taught = targets_of(batch, data)
    data, teacher = teacher_columns(data, taught)
    generator = torch.Generator().manual_seed(4)
    logits = (2.0 * torch.randn(taught.numel(), VOCAB, generator=generator)).requires_grad_()
    return data, taught, teacher, logits


def test_kl_ts_through_verls_own_top_k_has_a_tail(columns: Any) -> None:
    data, taught, teacher, logits = columns
    loss, metrics = stock_loss(distillation(registered.KL_TEACHER_STUDENT), data, logits)
    whole = logits.detach().double().requires_grad_()
    values = kl_of_whole_rows(teacher[taught], whole[taught])
    assert bool((values > 0).all())
    scale = 8 * SETTINGS["max_completion_length"]  # verl's loss_agg_mode divides by rows and longest response
    wanted = values.sum() / scale
    assert abs(float(loss - wanted)) < 1e-6
    assert torch.allclose(gradient_of(loss, logits).double(), gradient_of(wanted, whole), atol=1e-7)
    assert metrics["composer/taught_tokens"].aggregate() == int(taught.sum())


def gradient_of(loss: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logits)[0]


def kl_of_whole_rows(teacher: Tensor, student_logits: Tensor) -> Tensor:
    """KL(teacher || student) in fp64 on the teacher's best entries, and on the sum of all others."""
    p_t, p_s = teacher.double().exp(), student_logits.double().softmax(-1)
    best = teacher.topk(TOP_K, dim=-1).indices
    listed = torch.zeros_like(p_t, dtype=torch.bool).scatter(-1, best, True)
    t, s = (
        torch.cat([each.gather(-1, best), each.masked_fill(listed, 0.0).sum(-1, keepdim=True)], -1)
        for each in (p_t, p_s)
    )
    return (t * (t / s).log()).sum(-1)


@pytest.mark.parametrize(("gap", "share"), [(10.0, (0.99, 1.01)), (15.0, (0.7, 1.3)), (20.0, (0.0, 0.2))])
def test_kl_ts_from_masses_loses_the_tail_of_a_sure_student(
    columns: Any, gap: float, share: tuple[float, float]
) -> None:
    """The limit that its docstring states: verl's kernel gives fp32 masses, from which no small tail can be had."""
    data, taught, teacher, _ = columns
    best = teacher.topk(TOP_K, dim=-1).indices
    logits = torch.zeros_like(teacher).scatter(-1, best, gap).requires_grad_()
    loss, _ = stock_loss(distillation(registered.KL_TEACHER_STUDENT), data, logits)
    whole = logits.detach().double().requires_grad_()
    wanted = gradient_of(kl_of_whole_rows(teacher[taught], whole[taught]).sum(), whole)
    found = gradient_of(loss, logits).double() * 8 * SETTINGS["max_completion_length"]
    is_listed = torch.zeros_like(teacher, dtype=torch.bool).scatter(-1, best, True)
    tails = [each.masked_fill(is_listed, 0.0)[taught].sum() for each in (found, wanted)]
    assert tails[1] < -1.0
    assert share[0] <= float(tails[0] / tails[1]) <= share[1]


def test_verls_own_truncated_kl_goes_below_zero_and_loses_its_gradient(columns: Any) -> None:
    """The reason for the bucket: a student that puts all mass on the teacher's entries looks better than it."""
    data, taught, teacher, _ = columns
    best = teacher.topk(TOP_K, dim=-1)
    logits = torch.full_like(teacher, -20.0).scatter(-1, best.indices, best.values).requires_grad_()
    gradient = {}
    for mode in ("forward_kl_topk", registered.KL_TEACHER_STUDENT):
        loss, _ = stock_loss(distillation(mode), data, logits)
        gradient[mode] = torch.autograd.grad(loss, logits)[0][taught].abs().sum()
        if mode == "forward_kl_topk":
            assert float(loss) == 0.0
    assert gradient["forward_kl_topk"] == 0.0
    assert gradient[registered.KL_TEACHER_STUDENT] > 0.0


def test_kl_st_from_sampled_tokens_pushes_by_the_log_ratio(columns: Any) -> None:
    data, taught, teacher, logits = columns
    labels = torch.roll(data["input_ids"].values() % VOCAB, -1)
    said = torch.where(taught, teacher.gather(-1, labels[:, None])[:, 0], registered.NO_TEACHER)
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(said[:, None], data["input_ids"].offsets())
    loss, metrics = stock_loss(distillation(registered.KL_STUDENT_TEACHER), data, logits)
    student = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    ratio = (student - said).detach()[taught]
    wanted = (ratio * student[taught]).sum() / (8 * SETTINGS["max_completion_length"])
    found, expected = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (loss, wanted))
    assert torch.allclose(found, expected, atol=1e-7)
    assert metrics["composer/log_ratio"] == pytest.approx(float(ratio.mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "option", "value"),
    [
        (registered.KL_TEACHER_STUDENT, "log_prob_min_clamp", -10.0),
        (registered.KL_STUDENT_TEACHER, "use_policy_gradient", True),
    ],
)
def test_settings_that_would_spoil_a_loss_are_refused(columns: Any, mode: str, option: str, value: Any) -> None:
    data, *_, logits = columns
    with refusal(ConfigError, what=option, got=str(value)):
        stock_loss(distillation(mode, **{option: value}), data, logits)


def test_verls_config_knows_the_names() -> None:
    loss = OmegaConf.structured({"loss_mode": registered.KL_TEACHER_STUDENT})
    assert DistillationLossConfig(**loss).loss_settings.use_topk
    assert get_distillation_loss_settings(registered.KL_STUDENT_TEACHER).use_estimator
