"""The other way to a teacher: verl's own servers score hinted contexts, and verl's own worker computes the loss."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager, _pad_teacher_outputs
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from composer_replication.envs.student import student_folder
from composer_replication.errors import ConfigError
from composer_replication.recipes.verl import registered
from composer_replication.recipes.verl.agent_loop import (
    HintedAgentLoopManager,
    HintedQueueManager,
    _HintedAgentLoopWorker,
    _HintedQueueWorker,
    _HintedTeacher,
)
from composer_replication.recipes.verl.channel_loss import EngineChannels
from composer_replication.recipes.verl.engine import StepChannels
from composer_replication.trainer.rollouts.hint_distillation import SITES
from recipes.plain_losses import load_start
from recipes.recorded_steps import SETTINGS, Batch, fixed_batch
from recipes.verl.cpu_engine import actor_config, data_proto, new_engine, policy_loss, site_column, step_data
from recipes.verl.scripted_server import load_config
from refusals import refusal

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]
TOP_K = 24


class TeacherClient:
    """Answers as verl's vLLM server does: for each token the k best entries of the next, and a row for nothing."""

    def __init__(self) -> None:
        self.model, self.asked = load_start(), []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_named: Any) -> Any:
        assert request_id
        self.asked.append(prompt_ids)
        k = sampling_params["prompt_logprobs"]
        with torch.no_grad():
            logprobs = self.model(input_ids=torch.tensor([prompt_ids])).logits[0, :-1].log_softmax(-1)
        best = logprobs.topk(k, dim=-1)
        rows = {"prompt_ids": [*best.indices.tolist(), [0] * k], "prompt_logprobs": [*best.values.tolist(), [0.0] * k]}
        return TokenOutput(token_ids=[0], extra_fields=rows)


def distillation_config(mode: str = registered.KL_TEACHER_STUDENT) -> Any:
    name = "distillation.distillation_loss"
    return load_config(
        "composer_1_gpu",
        "distillation.enabled=true",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=1",
        f"distillation.teacher_models.teacher_model.model_path={student_folder()}",
        "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",
        f"{name}.loss_mode={mode}",
        f"{name}.topk={TOP_K}",
        f"{name}.use_policy_gradient=false",
        f"{name}.log_prob_min_clamp=null",
        f"{name}.loss_max_clamp=null",
    )


def worker_of(config: Any, client: Any) -> Any:
    """An agent worker without what it needs for rollouts."""
    worker: Any = object.__new__(_HintedAgentLoopWorker)
    worker.distillation_enabled, worker.teacher_key = True, "data_source"
    worker.teacher_server_manager = AsyncTeacherLLMServerManager(config, {"default": client})
    return worker


def teacher_columns(batch: Batch, worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all rows, padded as verl pads them."""
    ids, logprobs = [], []
    for row, text in enumerate(site_column(batch)):
        length = batch.prompt_length(row)
        tokens = batch.row_ids(row)
        output = AgentLoopOutput(
            prompt_ids=tokens[:length],
            response_ids=tokens[length:],
            response_mask=[1] * len(tokens[length:]),
            metrics=AgentLoopMetrics(),
            extra_fields={SITES: text},
        )
        asyncio.run(worker._compute_teacher_logprobs(output, output.prompt_ids, output.response_ids, validate=False))
        padded = _pad_teacher_outputs(
            output.extra_fields["teacher_ids"],
            output.extra_fields["teacher_logprobs"],
            prompt_width=batch.prompt_ids.shape[1],
            response_width=batch.completion_ids.shape[1],
            prompt_length=length,
            response_length=len(tokens) - length,
            pad_token_id=0,
        )
        ids.append(padded[0])
        logprobs.append(padded[1])
    return torch.cat(ids).long(), torch.cat(logprobs)


def test_both_ways_to_a_frozen_teacher_give_one_value_and_one_gradient() -> None:
    batch, client, config = fixed_batch(), TeacherClient(), distillation_config()
    proto = data_proto(batch)
    proto.batch["teacher_ids"], proto.batch["teacher_logprobs"] = teacher_columns(batch, worker_of(config, client))
    assert sorted(client.asked) == sorted(site.teacher_ids.tolist() for site in batch.sites)
    settings = omega_conf_to_dataclass(config.distillation)
    stock = new_engine("nobody")
    loss = partial(distillation_ppo_loss, config=actor_config(8), distillation_config=settings)
    data = step_data(proto, distillation_use_topk=True, distillation_only=False)
    with stock.train_mode(zero_grad_on_exit=False):
        outputs = stock.forward_backward_batch(data, loss)
    items = sum(site.end - site.start for site in batch.sites)
    whole = (
        8 * SETTINGS["max_completion_length"]
    )  # what verl's loss_agg_mode divides by, where we divide by the targets
    ours = new_engine()
    channels = EngineChannels(
        alpha_sdpo=items / whole, live_share=0.0, sdpo_jsd_beta=0.0, teacher_top_k=TOP_K, beta_replay=0.0
    )
    ours.channels = StepChannels(channels, new_engine())
    ours.optimizer_step = lambda: 0.0
    with ours.train_mode(zero_grad_on_exit=False):
        wanted = ours.train_batch(step_data(data_proto(batch)), policy_loss(8))
    found = outputs["metrics"]["distillation/loss"].aggregate() * whole / items
    assert outputs["metrics"]["composer/taught_tokens"].aggregate() == items
    assert found == pytest.approx(wanted["metrics"]["composer/sdpo_kl"].aggregate(), rel=1e-5)
    theirs = dict(stock.module.named_parameters())
    for name, value in ours.module.named_parameters():
        difference = (value.grad.full_tensor() - theirs[name].grad.full_tensor()).norm()
        assert difference < 1e-4 * value.grad.full_tensor().norm(), name


def test_verls_own_losses_are_refused_with_rows_that_have_no_teacher() -> None:
    worker = worker_of(distillation_config("forward_kl_topk"), TeacherClient())
    with refusal(ConfigError, what="loss_mode", got="'forward_kl_topk'"):
        teacher_columns(fixed_batch(), worker)


def test_validation_asks_no_teacher() -> None:
    worker = worker_of(distillation_config(), None)
    output = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
    asyncio.run(worker._compute_teacher_logprobs(output, [1], [2], validate=True))
    assert output.extra_fields == {}


@pytest.mark.parametrize("worker", [_HintedAgentLoopWorker, _HintedQueueWorker])
def test_workers_ask_in_our_way(worker: type) -> None:
    assert worker._compute_teacher_logprobs is _HintedTeacher._compute_teacher_logprobs
    assert issubclass(worker, AgentLoopWorker)


@pytest.mark.parametrize(
    ("manager", "worker"), [(HintedAgentLoopManager, _HintedAgentLoopWorker), (HintedQueueManager, _HintedQueueWorker)]
)
def test_managers_start_our_workers(manager: type, worker: type) -> None:
    made = manager(distillation_config(), None)
    assert issubclass(made.agent_loop_workers_class.__ray_metadata__.modified_class, worker)
