"""What our adapter takes for granted about verl. A failure after an upgrade names what moved."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
import torch
import verl
from verl.plugin.platform import get_platform
from verl.trainer.distillation import losses
from verl.utils import tensordict_utils
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker

from composer_replication.recipes.verl.cpu_platform import ENVIRONMENT, _CpuPlatform
from composer_replication.recipes.verl.engine import VENDOR, ChannelEngine
from recipes.recorded_steps import fixed_batch
from recipes.verl.cpu_engine import data_proto, new_engine, policy_loss, step_data

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]
SAYS = f"verl {verl.__version__}"
ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
WORKERS = "verl.workers.engine_workers"
LOOP = "verl.experimental.agent_loop.agent_loop"
TOOLS = "verl.experimental.agent_loop.tool_agent_loop"

PARAMETERS = {
    "verl.trainer.ppo.core_algos:register_policy_loss": ["name"],
    "verl.trainer.ppo.core_algos:register_adv_est": ["name_or_enum"],
    "verl.trainer.ppo.core_algos:agg_loss": [
        "loss_mat",
        "loss_mask",
        "loss_agg_mode",
        "dp_size",
        "batch_num_tokens",
        "global_batch_size",
        "loss_scale_factor",
    ],
    "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla": [
        "old_log_prob",
        "log_prob",
        "advantages",
        "response_mask",
        "loss_agg_mode",
        "config",
        "rollout_is_weights",
    ],
    "verl.trainer.distillation.losses:register_distillation_loss": ["loss_settings"],
    "verl.trainer.distillation.losses:distillation_ppo_loss": [
        "config",
        "distillation_config",
        "model_output",
        "data",
        "dp_group",
        "student_logits",
        "data_format",
    ],
    "verl.workers.utils.losses:ppo_loss": ["config", "model_output", "data", "dp_group"],
    "verl.workers.utils.padding:no_padding_2_padding": ["tensor", "data"],
    "verl.workers.utils.padding:left_right_2_no_padding": ["data"],
    f"{ENGINE}.train_batch": ["self", "data", "loss_function"],
    f"{ENGINE}.infer_batch": ["self", "data", "loss_function"],
    f"{ENGINE}.forward_backward_batch": ["self", "data", "loss_function", "forward_only"],
    f"{ENGINE}.prepare_model_outputs": ["self", "output", "output_args", "micro_batch", "logits_processor_func"],
    f"{ENGINE}.optimizer_zero_grad": ["self"],
    f"{ENGINE}.optimizer_step": ["self"],
    f"{ENGINE}.eval_mode": ["self", "kwargs"],
    f"{ENGINE}.get_data_parallel_group": ["self"],
    "verl.workers.engine:EngineRegistry.register": ["model_type", "backend", "device", "vendor"],
    f"{WORKERS}:ActorRolloutRefWorker.__init__": ["self", "config", "role", "distillation_config", "kwargs"],
    f"{WORKERS}:ActorRolloutRefWorker.init_model": ["self"],
    f"{WORKERS}:TrainingWorker.set_loss_fn": ["self", "loss_fn"],
    "verl.trainer.ppo.v1:register_trainer": ["name"],
    "verl.trainer.ppo.v1:PPOTrainerSync.__init__": ["self", "config"],
    "verl.trainer.ppo.v1:PPOTrainerSync._init_resource_pool_mgr": ["self"],
    f"{LOOP}:register": ["agent_name"],
    f"{LOOP}:AgentLoopWorker._compute_teacher_logprobs": [
        "self",
        "output",
        "prompt_ids",
        "response_ids",
        "validate",
        "sample_kwargs",
    ],
    f"{TOOLS}:ToolAgentLoop._handle_pending_state": ["self", "agent_data", "sampling_params"],
    f"{TOOLS}:ToolAgentLoop._handle_generating_state": ["self", "agent_data", "sampling_params", "ignore_termination"],
    f"{TOOLS}:ToolAgentLoop._handle_processing_tools_state": ["self", "agent_data"],
    "verl.experimental.teacher_loop.teacher_manager:AsyncTeacherLLMServerManager.compute_teacher_logprobs_single": [
        "self",
        "sequence_ids",
        "multi_modal_data",
        "mm_processor_kwargs",
        "mm_processor_output",
        "routing_key",
    ],
    "verl.plugin.platform:PlatformRegistry.register": ["platform"],
    "verl.utils.tensordict_utils:assign_non_tensor": ["tensor_dict", "kwargs"],
    "verl.utils.tensordict_utils:get": ["tensordict", "key", "default"],
    "verl.utils.tensordict_utils:get_tensordict": ["tensor_dict", "non_tensor_dict"],
    "verl.utils.metric:Metric.__init__": ["self", "aggregation", "value"],
}
FIELDS = {
    "verl.workers.config:DistillationLossConfig": {
        "loss_mode",
        "topk",
        "log_prob_min_clamp",
        "loss_max_clamp",
        "use_policy_gradient",
        "loss_settings",
    },
    "verl.trainer.distillation.losses:DistillationLossSettings": {"names", "use_topk", "use_estimator"},
    "verl.workers.config:FSDPOptimizerConfig": {"total_training_steps", "lr", "clip_grad"},
    "verl.workers.config:ActorConfig": {
        "clip_ratio",
        "clip_ratio_low",
        "clip_ratio_high",
        "loss_agg_mode",
        "loss_scale_factor",
        "global_batch_info",
    },
}
ATTRIBUTES = [
    f"{WORKERS}:ActorRolloutRefWorker.actor_worker_cls",
    f"{WORKERS}:ActorRolloutRefWorker.ref_worker_cls",
    "verl.trainer.ppo.utils:Role.ActorRolloutRef",
    "verl.trainer.ppo.utils:Role.ActorRollout",
    "verl.trainer.ppo.v1:AgentLoopWorkerTQ.__ray_metadata__.modified_class",
    "verl.trainer.ppo.v1:AgentLoopManagerTQ",
    f"{TOOLS}:AgentState.TERMINATED",
]


def named(where: str) -> Any:
    module, _, path = where.partition(":")
    value: Any = import_module(module)
    for part in path.split("."):
        assert hasattr(value, part), f"{SAYS}: {where} is gone"
        value = getattr(value, part)
    return value


def test_the_version_is_the_one_this_was_written_for() -> None:
    assert verl.__version__ == "0.9.1"


@pytest.mark.parametrize("where", PARAMETERS)
def test_what_is_called_or_overridden_takes_the_same(where: str) -> None:
    # Ray adds a parameter of its own to the methods of what it makes an actor of.
    present = [
        each for each in inspect.signature(inspect.unwrap(named(where))).parameters if not each.startswith("_ray")
    ]
    assert present == PARAMETERS[where], f"{SAYS}: {where} takes {present}, the adapter expects {PARAMETERS[where]}"


@pytest.mark.parametrize("where", FIELDS)
def test_configs_have_the_fields(where: str) -> None:
    missing = FIELDS[where] - {each.name for each in fields(named(where))}
    assert not missing, f"{SAYS}: {where} has no {sorted(missing)}"


@pytest.mark.parametrize("where", ATTRIBUTES)
def test_what_is_named_is_there(where: str) -> None:
    named(where)


def test_a_platform_has_no_more_to_answer() -> None:
    left = _CpuPlatform.__abstractmethods__
    assert not left, f"{SAYS}: a platform must also have {sorted(left)}"
    assert type(get_platform()) is _CpuPlatform
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT


def test_engines_are_looked_up_by_device_and_vendor() -> None:
    registry = EngineRegistry._engines["language_model"]["fsdp2"]
    assert registry[("cuda", VENDOR)] is ChannelEngine
    assert registry["cuda"] is not ChannelEngine


def test_our_step_does_what_verls_does_in_the_same_order() -> None:
    """`train_batch` is written out in our engine: what verl's own calls must be what ours calls."""
    calls = ("maybe_fix_3d_position_ids", "optimizer_zero_grad", "forward_backward_batch", "optimizer_step")
    text = inspect.getsource(BaseEngine.train_batch)
    places = [text.index(each) for each in calls]
    assert places == sorted(places)
    assert text.count("self.") == 4, f"{SAYS}: BaseEngine.train_batch does more than it did:\n{text}"


def test_the_worker_sets_its_loss_and_its_engines_where_we_read_them() -> None:
    text = inspect.getsource(ActorRolloutRefWorker.init_model)
    for part in (
        "self.actor.set_loss_fn(self.loss_fn)",
        "self.ref = self.ref_worker_cls(",
        "self.actor = self.actor_worker_cls(",
    ):
        assert part in text, f"{SAYS}: init_model has no {part!r}"


class Watch:
    """A loss function that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **named: Any) -> Any:
        self.calls.append(named)
        if "student_logits" in named:
            return {"mine": named["student_logits"][..., 0]}
        return policy_loss(8)(model_output=named["model_output"], data=named["data"], dp_group=named["dp_group"])


@pytest.fixture(scope="module")
def watched() -> tuple[Watch, dict[str, Any], Any]:
    engine, watch = new_engine("nobody"), Watch()
    data = step_data(data_proto(fixed_batch()), micro_batch=4, distillation_use_topk=True, distillation_only=False)
    with engine.train_mode():
        outputs = engine.train_batch(data, watch)
    return watch, outputs, engine


def test_a_loss_function_is_called_with_logits_and_then_with_what_came_of_them(watched: Any) -> None:
    watch, _, _ = watched
    assert [set(each) for each in watch.calls] == 2 * [{"student_logits", "data"}, {"model_output", "data", "dp_group"}]
    first, second = watch.calls[:2]
    tokens = first["data"]["input_ids"].values().numel()
    assert first["student_logits"].shape[:2] == (1, tokens)
    assert first["student_logits"].requires_grad
    assert set(second["model_output"]) == {"mine", "log_probs"}
    assert second["model_output"]["mine"].values().requires_grad
    assert second["model_output"]["log_probs"].is_nested


def test_a_micro_batch_has_the_keys_that_are_read(watched: Any) -> None:
    data = watched[0].calls[1]["data"]
    for key in (
        "input_ids",
        "responses",
        "attention_mask",
        "old_log_probs",
        "dp_size",
        "temperature",
        "loss_mask",
        "sdpo_sites",
    ):
        assert key in data.keys(), f"{SAYS}: a micro-batch has no {key}, only {sorted(data.keys())}"  # noqa: SIM118
    assert data["dp_size"] == 1
    assert len(tensordict_utils.get(data, "sdpo_sites")) == 4


def test_a_step_returns_what_the_worker_reads(watched: Any) -> None:
    _, outputs, engine = watched
    assert set(outputs) == {"model_output", "loss", "metrics"}
    assert isinstance(outputs["loss"], list)
    assert len(outputs["loss"]) == 2
    assert outputs["metrics"]["grad_norm"] > 0
    assert (engine.use_remove_padding, engine._is_lora, engine.ulysses_sequence_parallel_size) == (False, False, 1)
    assert engine.lr_scheduler.last_epoch == 0
    assert isinstance(engine.module, torch.nn.Module)


def test_verls_top_k_kernel_gives_masses_with_their_gradient() -> None:
    """The tail bucket of `composer_kl_ts` is made of them."""
    text = inspect.getsource(losses.compute_topk_loss)
    assert "compute_forward_kl_topk" in text
    kernel = named("verl.trainer.distillation.fsdp.losses:compute_forward_kl_topk")
    body = inspect.getsource(kernel)
    assert body.index("student_mass = ") < body.index("log_prob_min_clamp is not None"), (
        f"{SAYS}: masses are clamped now"
    )
