"""verl's teacher servers asked about hinted contexts: another way to a teacher, without a reference worker.

verl's own agent workers send each finished row to the teacher and keep the entries it gives for every token. These
send the hinted contexts of the row's sites instead, and put the entries of each erring turn where its tokens are in the
row; all other rows hold `NO_TEACHER`. Set `rollout.agent.agent_loop_manager_class` to one of the two managers, turn
`distillation` on, and choose a loss of `registered` there. The teacher is then the server's model, frozen.
"""

from __future__ import annotations

from typing import Any

import torch

from composer_replication.errors import ConfigError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl import agent_loop, registered
from composer_replication.recipes.verl.columns import read_sites
from composer_replication.rollouts.sites import SITES

with importing("verl", extra="verl"):
    import ray
    from verl.experimental.agent_loop import AgentLoopManager, AgentLoopOutput, AgentLoopWorker
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

OUR_LOSSES = (registered.KL_TEACHER_STUDENT, registered.KL_STUDENT_TEACHER)
AGENT = agent_loop.NAME
"""The agent loop whose rows have sites; importing it has registered it in this process."""


class HintedTeacher:
    """For an agent worker: what it asks its teacher."""

    async def _compute_teacher_logprobs(
        self: Any,
        output: AgentLoopOutput,
        prompt_ids: list[int],
        response_ids: list[int],
        validate: bool,
        sample_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if not self.distillation_enabled or validate:
            return
        manager = self.teacher_server_manager
        loss = manager.distillation_loss_config
        if loss.loss_mode not in OUR_LOSSES:
            fix = "verl's own losses would read rows without a teacher as a teacher's."
            got = repr(loss.loss_mode)
            raise ConfigError(explain("distillation_loss.loss_mode", got=got, expected=OUR_LOSSES, fix=fix))
        routing: Any = (sample_kwargs or {}).get(self.teacher_key)
        routing = routing.item() if hasattr(routing, "item") else routing
        row_ids = [*prompt_ids, *response_ids]
        width = loss.topk if loss.loss_settings.use_topk else 1
        ids = torch.zeros(len(row_ids), width, dtype=torch.int32)
        logprobs = torch.full((len(row_ids), width), registered.NO_TEACHER)
        for turn in read_sites(output.extra_fields.get(SITES), row_ids):
            said_ids, said_logprobs = await manager.compute_teacher_logprobs_single(
                sequence_ids=turn.teacher_ids.tolist(), routing_key=routing
            )
            size = turn.end - turn.start
            here, there = (
                slice(turn.start - 1, turn.end - 1),
                slice(turn.teacher_start - 1, turn.teacher_start - 1 + size),
            )
            ids[here], logprobs[here] = said_ids[there], said_logprobs[there]
        output.extra_fields["teacher_ids"], output.extra_fields["teacher_logprobs"] = ids, logprobs


class HintedAgentLoopWorker(HintedTeacher, AgentLoopWorker):
    """The worker of verl's older trainer (`trainer.use_v1: false`)."""


# verl decorates the class where it defines it, and Ray's decorator hides what it decorates.
class HintedQueueWorker(HintedTeacher, AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """The worker that puts its rows into verl's queue."""


class HintedQueueManager(AgentLoopManagerTQ):
    """For verl's trainers as they are (`trainer.use_v1: true`)."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.agent_loop_workers_class = ray.remote(HintedQueueWorker)


class HintedAgentLoopManager(AgentLoopManager):
    """For verl's older trainer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.agent_loop_workers_class = ray.remote(HintedAgentLoopWorker)
        super().__init__(*args, **named)
