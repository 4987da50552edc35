"""Provide the workspace as an environment of verifiers: `vf-eval composer-workspace`. Needs the extra `verifiers`.

The module has a taskset (tasks by seed), a harness (the loop that plays one task) and an environment that runs both in
this process. The harness is our own because the workspace has to answer every call itself: unknown tools and arguments
that are not JSON are errors to learn from, and a tool server would answer them with different messages.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from composer_replication.envs.workspace import TOOLS, Difficulty, Workspace, generate_task
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.optional import require

vf = require("verifiers.v1", extra="verifiers")
httpx = require("httpx", extra="verifiers")
try:
    from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
except ImportError:  # verifiers before 0.4 stops a rollout with a full context itself
    CONTEXT_OVERFLOW_MARKERS = ()
# The environment's id. verifiers imports only top-level modules, so `composer_workspace` re-exports the classes.
ID = "composer-workspace"


class _WorkspaceData(vf.TaskData):
    """The seed and difficulty that determine a task."""

    seed: int
    difficulty: Difficulty


class _WorkspaceTask(vf.Task[_WorkspaceData, vf.State, vf.TaskConfig]):
    """A task of the workspace. The harness computes its reward, and this class reads it from the trace.

    `trace.info["calls"]` has the fields `name`, `arguments` (as the model wrote them), `text`, `failed` and `kind` of
    every call. `trace.info["sites"]` has the error sites as `rollouts` reads them: `turn` (the number of the assistant
    message, from 0), `kind`, `message` and `tool`. Neither list is in the trace's `state`, which is not written to disk
    and does not reach an orchestrator.
    """

    @property
    def key(self) -> str:
        return f"{self.data.difficulty}-{self.data.seed}"

    @vf.reward
    async def workspace(self, trace: Any) -> float:
        return trace.info["reward"]

    @vf.metric
    async def effort(self, trace: Any) -> dict[str, float]:
        return trace.info["effort"]


class _WorkspaceTasksetConfig(vf.TasksetConfig):
    """The settings of the tasks, an endless sequence of seeds that starts at `first_seed`.

    `vf-eval -n` limits the number of tasks. Evaluations start at seed 0.
    """

    id: str = ID
    difficulty: Difficulty = "easy"
    first_seed: int = FIRST_TRAINING_SEED


class WorkspaceTaskset(vf.Taskset[_WorkspaceTask, _WorkspaceTasksetConfig]):
    """An endless sequence of tasks, each generated from its seed when it is requested."""

    INFINITE = True

    def load(self) -> Iterator[_WorkspaceTask]:
        difficulty = self.config.difficulty
        for seed in itertools.count(self.config.first_seed):
            prompt = generate_task(seed, difficulty=difficulty).prompt
            data = _WorkspaceData(name=f"{difficulty}-{seed}", prompt=prompt, seed=seed, difficulty=difficulty)
            yield _WorkspaceTask(data, self.config.task)


class _WorkspaceHarnessConfig(vf.HarnessConfig):
    """The settings of the harness. `max_calls` is the maximum number of calls in an episode."""

    id: str = ID
    max_calls: int = 40


class WorkspaceHarness(vf.Harness[_WorkspaceHarnessConfig]):
    """Plays a task: requests turns from the model and runs their calls until the task ends or a turn has no call."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False  # the workspace runs the model's code in its own sandbox
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: Any,
    ) -> Any:
        # A trace contains only the seed, which gives the same task on every worker.
        task = generate_task(data.seed, difficulty=data.difficulty)
        workspace = Workspace(task, max_calls=self.config.max_calls)
        system, prompt = self.resolve_text_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        headers, turns = {"Authorization": f"Bearer {secret}"}, itertools.count()
        trace.info |= {"calls": [], "sites": []}
        try:
            # No timeout of our own: verifiers limits the time of a rollout.
            async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as model:
                while not workspace.finished:
                    body = {"model": ctx.model, "messages": messages, "tools": list(TOOLS)}
                    reply = await model.post("/chat/completions", json=body)
                    if _is_context_overflow(reply):
                        # verifiers treats this stop as a truncated rollout and scores it.
                        trace.stop("max_total_tokens")
                    if reply.is_error:  # verifiers knows whether a limit was reached or the model's server failed
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                    messages.append(reply.json()["choices"][0]["message"])
                    # In a thread, because a test run would block the event loop of all rollouts.
                    answers = await asyncio.to_thread(_execute_calls, workspace, trace.info, messages[-1], next(turns))
                    if not answers:
                        break
                    messages += answers
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        finally:  # the files get a reward however the episode ended
            trace.info |= await asyncio.to_thread(_reward_info, workspace)


class _WorkspaceEnvConfig(vf.SingleAgentEnvConfig):
    """The config of a single agent that runs in this process. By default, verifiers would use a remote machine."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())  # pyright: ignore[reportInvalidTypeForm]


class WorkspaceEnv(vf.Env[_WorkspaceEnvConfig]):
    """An environment in which one agent plays a task and writes one trace."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)


def load_environment(
    *, difficulty: Difficulty = "easy", first_seed: int = FIRST_TRAINING_SEED, max_calls: int = 40
) -> WorkspaceEnv:
    """Return the environment, for use from Python. `vf-eval` and prime-rl create it by its id from a config."""
    taskset = {"id": ID, "difficulty": difficulty, "first_seed": first_seed}
    agent = {"harness": {"id": ID, "max_calls": max_calls}}
    return vf.load_environment(vf.resolve_env_config({"taskset": taskset, "agent": agent}))


def _is_context_overflow(reply: Any) -> bool:
    """Return whether a model server refused a request because the conversation exceeds the model's context."""
    text = reply.text.casefold() if reply.status_code in (400, 413) else ""
    return any(marker in text for marker in CONTEXT_OVERFLOW_MARKERS)


def _execute_calls(
    workspace: Workspace, info: dict[str, Any], message: dict[str, Any], turn: int
) -> list[dict[str, Any]]:
    """Execute the calls of a turn and return their results as tool messages.

    Calls and error sites are added to `info`.
    """
    answers: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or []:
        name, raw_arguments = call["function"]["name"], call["function"]["arguments"]
        outcome = workspace.call(name, _parse_arguments(raw_arguments))
        info["calls"].append({"name": name, "arguments": raw_arguments, **asdict(outcome)})
        if outcome.failed and outcome.kind:  # only failures that are the model's error have a kind
            info["sites"].append({"turn": turn, "kind": outcome.kind, "message": outcome.text, "tool": name})
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": outcome.text})
    return answers


def _parse_arguments(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the workspace answers invalid JSON with an error


def _reward_info(workspace: Workspace) -> dict[str, Any]:
    reward = workspace.reward()
    checks = {"solved": float(reward.solved), "checks_passed": reward.passed / max(reward.total, 1)}
    return {"reward": reward.value, "effort": {**checks, **asdict(reward.effort)}}
