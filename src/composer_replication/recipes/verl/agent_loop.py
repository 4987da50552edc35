"""Define an agent loop that finds error sites when a turn ends, and workers that query teacher servers with hinted
contexts.

Sites are searched after every turn, because only then do verl's messages and token ids agree. Later, verl may stop a
rollout at its maximum length before a message is written, or write tool results as messages but not as tokens. Sites
are checked against the final ids and stored in `extra_fields`, from which verl builds the column `sdpo_sites`. To use
the agent loop, import this module and set `rollout.agent.default_agent_loop: composer_tool_agent`.

With verl's teacher servers, no reference worker is needed. verl's own agent workers send each finished row to a server
and store the entries that it returns per token. The workers here instead send the hinted contexts of the row's sites,
and store the entries of each erring turn at its tokens in the row; all other positions hold `NO_TEACHER`. To use them,
set `rollout.agent.agent_loop_manager_class` to one of the two managers below, enable `distillation`, and choose a loss
of `registered` there. The teacher is then the server's model, frozen.
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
from composer_replication.trainer.rollouts.hint_distillation import SITES, ErringTurn, ErringTurnFinder
from composer_replication.trainer.rollouts.sites import Rollout, RolloutOptions, assistant_id, schemas_of

with importing("verl", extra="verl"):
    import ray
    from verl.experimental.agent_loop import AgentLoopManager, AgentLoopWorker
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
    from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ
NAME = "composer_tool_agent"
COUNTS = "composer_counts"
OPTIONS_KEY = "composer_sites"
OUR_LOSSES = (registered.KL_TEACHER_STUDENT, registered.KL_STUDENT_TEACHER)
"""The distillation losses that skip rows without a teacher."""
VERL_RULES: tuple[FailureRule, ...] = (
    # "Unknown function 'grep'. Available tools: ['read']"; not the same words later in a result.
    rule("tool_not_found", r"^Unknown function '[^'\n]*'\. Available tools:", "unknown function", where="start"),
    # "Invalid JSON in arguments for 'read': Expecting value"; not "invalid json" in the output of a tool.
    rule("input_validation", r"^Invalid JSON in arguments for '", "invalid json in arguments", where="start"),
)
"""The messages with which verl's agent rejects a call."""
# "Error executing tool 'read': No such file": how verl writes an exception of a tool.
_EXCEPTION_PREFIX = "Error executing tool '{name}': "
_finders: WeakKeyDictionary[Any, ErringTurnFinder] = WeakKeyDictionary()


def _read_rollout_options(actor_rollout_ref: Mapping[str, Any]) -> RolloutOptions:
    """Read the options in `actor_rollout_ref.composer_sites`. Raises ConfigError for an unknown option name."""
    options = dict(actor_rollout_ref.get(OPTIONS_KEY) or {})
    option_names = {option.name for option in fields(RolloutOptions)} - {"hint_generator", "hint_writer", "extra_rules"}
    if unknown := sorted(set(options) - option_names):
        raise ConfigError(explain(f"actor_rollout_ref.{OPTIONS_KEY}", got=unknown, expected=sorted(option_names)))
    return RolloutOptions(extra_rules=VERL_RULES, **options)


@dataclass
class _RolloutProgress:
    """The progress of one rollout: its prompt, and the error sites found so far."""

    prompt: list[dict[str, Any]]
    taught: list[ErringTurn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_turns: int = 0


@register(NAME)
class _ComposerAgentLoop(ToolAgentLoop):
    """verl's tool agent, extended to find error sites when turns end. verl creates one instance per rollout."""

    _progress: _RolloutProgress

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        row_ids = [*output.prompt_ids, *output.response_ids]
        kept_turns: list[ErringTurn] = []
        for turn in self._progress.taught:
            try:
                write_sites([turn], row_ids)
            except AlignmentError:  # the turn was cut off, or verl changed tokens before it
                self._progress.counts["dropped:moved"] += 1
            else:
                kept_turns.append(turn)
        output.extra_fields[SITES] = write_sites(kept_turns, row_ids)
        output.extra_fields[COUNTS] = json.dumps(self._progress.counts)
        return output

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        self._progress = _RolloutProgress(list(agent_data.messages))
        return await super()._handle_pending_state(agent_data, sampling_params)

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        num_messages = len(agent_data.messages)
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        if state == AgentState.TERMINATED and len(agent_data.messages) > num_messages:
            await self._find_new_sites(agent_data)  # the last turn, without a tool call that could be parsed
        return state

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        await self._find_new_sites(agent_data)
        return state

    async def _find_new_sites(self, agent_data: AgentData) -> None:
        """Find the error sites of the turns that have ended since the last call."""
        rollout = self._rollout(agent_data)
        # In a thread, so as not to block the event loop, which serves all rollouts of the process.
        found_sites = await self.loop.run_in_executor(None, self._finder().find, rollout)
        num_turns = found_sites.counts["turns"]
        new_turn_ids = {assistant_id(number) for number in range(self._progress.num_turns, num_turns)}
        self._progress.taught += [turn for turn in found_sites.turns if turn.turn_id in new_turn_ids]
        self._progress.num_turns, self._progress.counts = num_turns, found_sites.counts

    def _rollout(self, agent_data: AgentData) -> Rollout:
        mask, ids = agent_data.response_mask, agent_data.prompt_ids
        start = len(ids) - len(mask)
        schemas = getattr(agent_data, "_active_tool_schemas", self.tool_schemas)
        messages, raised = _plain_messages(agent_data.messages[len(self._progress.prompt) :])
        return Rollout(
            rollout_id=agent_data.request_id,
            prompt_ids=ids[:start],
            completion_ids=ids[start:],
            sampled=list(mask),
            prompt=self._progress.prompt,
            messages=messages,
            raised=raised,
            tools=schemas_of(schemas),
        )

    def _finder(self) -> ErringTurnFinder:
        """Return the finder for this tokenizer. All rollouts share it, because analyzing the chat template takes
        time.
        """
        if self.tokenizer not in _finders:
            options = _read_rollout_options(self.config.actor_rollout_ref)
            renderer = Renderer(self.tokenizer, template_options=dict(self.apply_chat_template_kwargs))
            _finders[self.tokenizer] = ErringTurnFinder(renderer, options)
        return _finders[self.tokenizer]


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages with tool names added and exceptions converted to the form that the rules expect, and a list
    of which tool results are exceptions.

    verl writes an exception as text that only its first words distinguish from the output of a tool.
    """
    plain: list[dict[str, Any]] = []
    raised: list[bool] = []
    names: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            names = [str(call["function"]["name"]) for call in message.get("tool_calls") or []]
        elif message.get("role") == "tool":
            name = names.pop(0) if names else ""
            content, prefix = message.get("content"), _EXCEPTION_PREFIX.format(name=name)
            raised.append(isinstance(content, str) and content.startswith(prefix))
            if raised[-1]:
                content = str({"error": str(content)[len(prefix) :]})
            message = {**message, "name": name, "content": content}
        plain.append(dict(message))
    return plain, raised


class _HintedTeacher:
    """A mixin for agent workers that makes them query the teacher with hinted contexts."""

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
            fix = "Choose one of these: verl's own losses would also train on positions without a teacher."
            got = repr(loss.loss_mode)
            raise ConfigError(explain("distillation_loss.loss_mode", got=got, expected=OUR_LOSSES, fix=fix))
        routing: Any = (sample_kwargs or {}).get(self.teacher_key)
        routing = routing.item() if hasattr(routing, "item") else routing
        row_ids = [*prompt_ids, *response_ids]
        width = loss.topk if loss.loss_settings.use_topk else 1
        ids = torch.zeros(len(row_ids), width, dtype=torch.int32)
        logprobs = torch.full((len(row_ids), width), registered.NO_TEACHER)
        for turn in read_sites(output.extra_fields.get(SITES), row_ids):
            teacher_ids, teacher_logprobs = await manager.compute_teacher_logprobs_single(
                sequence_ids=turn.teacher_ids.tolist(), routing_key=routing
            )
            size = turn.end - turn.start
            # Shifted by one: verl stores the entries at the row that predicts a token.
            in_row, in_context = (
                slice(turn.start - 1, turn.end - 1),
                slice(turn.teacher_start - 1, turn.teacher_start - 1 + size),
            )
            ids[in_row], logprobs[in_row] = teacher_ids[in_context], teacher_logprobs[in_context]
        output.extra_fields["teacher_ids"], output.extra_fields["teacher_logprobs"] = ids, logprobs


class _HintedAgentLoopWorker(_HintedTeacher, AgentLoopWorker):
    """The agent worker for verl's older trainer (`trainer.use_v1: false`), which queries the teacher with hinted
    contexts.
    """


# verl decorates the base class where it is defined, so it has to be taken out of Ray's wrapper.
class _HintedQueueWorker(_HintedTeacher, AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """The agent worker for verl's current trainers, which puts its rows into verl's queue and queries the teacher
    with hinted contexts.
    """


class HintedQueueManager(AgentLoopManagerTQ):
    """The manager of agent workers for verl's current trainers (`trainer.use_v1: true`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(_HintedQueueWorker)


class HintedAgentLoopManager(AgentLoopManager):
    """The manager of agent workers for verl's older trainer (`trainer.use_v1: false`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(_HintedAgentLoopWorker)
        super().__init__(*args, **kwargs)
