"""verl's tool agent that looks at each turn as it ends: what failed, what hint belongs to it, and the hinted context.

Only then do verl's messages and ids agree. Later it may stop a rollout for its length before a message is written, or
write the results of tools as messages and not as tokens. What was found is checked against the final ids and goes into
`extra_fields`, from where verl makes the column `sdpo_sites`. Register it by importing this module (or
`teacher_server`, which does), and set `rollout.agent.default_agent_loop: composer_tool_agent`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch

from composer_replication.batch.render.renderer import Renderer
from composer_replication.errors import AlignmentError, ConfigError, explain
from composer_replication.optional import importing
from composer_replication.recipes.verl import registered
from composer_replication.recipes.verl.columns import read_sites, write_sites
from composer_replication.sites.rule import FailureRule, rule
from composer_replication.trainer.rollouts.gathering import schemas_of
from composer_replication.trainer.rollouts.sites import (
    SITES,
    Rollout,
    RolloutOptions,
    RolloutSites,
    TaughtTurn,
    assistant_id,
)

with importing("verl", extra="verl"):
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
    from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
NAME = "composer_tool_agent"
COUNTS = "composer_counts"
OPTIONS_KEY = "composer_sites"
VERL_RULES: tuple[FailureRule, ...] = (
    rule("tool_not_found", r"^Unknown function '[^'\n]*'\. Available tools:", "unknown function", where="start"),
    rule("input_validation", r"^Invalid JSON in arguments for '", "invalid json in arguments", where="start"),
)
"""How verl's agent itself refuses a call."""
_RAISED = "Error executing tool '{name}': "
_finders: WeakKeyDictionary[Any, RolloutSites] = WeakKeyDictionary()


def options_of(actor_rollout_ref: Mapping[str, Any]) -> RolloutOptions:
    """`actor_rollout_ref.composer_sites`: where hints go, which part of a turn is taught, how long contexts may be."""
    options = dict(actor_rollout_ref.get(OPTIONS_KEY) or {})
    known_names = {option.name for option in fields(RolloutOptions)} - {"hint_generator", "hint_writer", "extra_rules"}
    if unknown := sorted(set(options) - known_names):
        raise ConfigError(explain(f"actor_rollout_ref.{OPTIONS_KEY}", got=unknown, expected=sorted(known_names)))
    return RolloutOptions(extra_rules=VERL_RULES, **options)


@dataclass
class _Watch:
    """One rollout: how many messages its prompt had, and what was found so far."""

    prompt: list[dict[str, Any]]
    taught: list[TaughtTurn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    turns_seen: int = 0


@register(NAME)
class _ComposerAgentLoop(ToolAgentLoop):
    """One instance is one rollout, as verl makes them."""

    _watch: _Watch

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        row_ids = [*output.prompt_ids, *output.response_ids]
        kept_turns: list[TaughtTurn] = []
        for turn in self._watch.taught:
            try:
                write_sites([turn], row_ids)
            except AlignmentError:  # cut off, or tokens that verl put in another place when it went on
                self._watch.counts["dropped:moved"] += 1
            else:
                kept_turns.append(turn)
        output.extra_fields[SITES] = write_sites(kept_turns, row_ids)
        output.extra_fields[COUNTS] = json.dumps(self._watch.counts)
        return output

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        self._watch = _Watch(list(agent_data.messages))
        return await super()._handle_pending_state(agent_data, sampling_params)

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        num_messages = len(agent_data.messages)
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        if state == AgentState.TERMINATED and len(agent_data.messages) > num_messages:
            await self._look(agent_data)  # its last turn, which called nothing, or nothing that could be read
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        await self._look(agent_data)
        return state

    async def _look(self, agent_data: AgentData) -> None:
        """The failures of the turns that have ended since the last look."""
        rollout = self._rollout(agent_data)
        found_sites = await self.loop.run_in_executor(None, self._finder().find, rollout)
        num_turns = found_sites.counts["turns"]
        new = {assistant_id(number) for number in range(self._watch.turns_seen, num_turns)}
        self._watch.taught += [turn for turn in found_sites.taught if turn.turn_id in new]
        self._watch.turns_seen, self._watch.counts = num_turns, found_sites.counts

    def _rollout(self, agent_data: AgentData) -> Rollout:
        mask, ids = agent_data.response_mask, agent_data.prompt_ids
        start = len(ids) - len(mask)
        schemas = getattr(agent_data, "_active_tool_schemas", self.tool_schemas)
        messages, raised = _plain_messages(agent_data.messages[len(self._watch.prompt) :])
        return Rollout(
            rollout_id=agent_data.request_id,
            prompt_ids=ids[:start],
            completion_ids=ids[start:],
            sampled=list(mask),
            prompt=self._watch.prompt,
            messages=messages,
            raised=raised,
            tools=schemas_of(schemas),
        )

    def _finder(self) -> RolloutSites:
        """One for all rollouts of a tokenizer: what it reads off the template is the same."""
        if self.tokenizer not in _finders:
            options = options_of(self.config.actor_rollout_ref)
            renderer = Renderer(self.tokenizer, template_options=dict(self.apply_chat_template_kwargs))
            _finders[self.tokenizer] = RolloutSites(renderer, options)
        return _finders[self.tokenizer]


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bool]]:
    """With the tool of each result by name, and exceptions as the rules know them; and which results are exceptions.

    verl writes an exception as text that only its beginning tells from a tool's own words.
    """
    plain: list[dict[str, Any]] = []
    raised: list[bool] = []
    names: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            names = [str(call["function"]["name"]) for call in message.get("tool_calls") or []]
        elif message.get("role") == "tool":
            name = names.pop(0) if names else ""
            content, beginning = message.get("content"), _RAISED.format(name=name)
            raised.append(isinstance(content, str) and content.startswith(beginning))
            if raised[-1]:
                content = str({"error": str(content)[len(beginning) :]})
            message = {**message, "name": name, "content": content}
        plain.append(dict(message))
    return plain, raised


# verl's teacher servers asked about hinted contexts: another way to a teacher, without a reference worker.
#
# verl's own agent workers send each finished row to the teacher and keep the entries it gives for every token. These
# send the hinted contexts of the row's sites instead, and put the entries of each erring turn where its tokens are in
# the row; all other rows hold `NO_TEACHER`. Set `rollout.agent.agent_loop_manager_class` to one of the two managers,
# turn `distillation` on, and choose a loss of `registered` there. The teacher is then the server's model, frozen.

with importing("verl", extra="verl"):
    import ray
    from verl.experimental.agent_loop import AgentLoopManager, AgentLoopOutput, AgentLoopWorker
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ
OUR_LOSSES = (registered.KL_TEACHER_STUDENT, registered.KL_STUDENT_TEACHER)
AGENT = NAME
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
