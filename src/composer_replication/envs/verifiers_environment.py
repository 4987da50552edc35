"""The workspace as an environment of verifiers: `vf-eval composer-workspace`. Needs the extra `verifiers`.

A taskset (tasks by seed), the loop that plays one of them, and an environment that puts both on this machine. The loop
is ours because the world answers every call itself: a tool that does not exist or arguments that are not JSON are part
of what is learned from, and a tool server would answer them in its own words.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from composer_replication.envs.workspace import (
    TOOLS,
    Difficulty,
    Workspace,
    generate_task,
)
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.optional import require

vf = require("verifiers.v1", extra="verifiers")
httpx = require("httpx", extra="verifiers")
try:
    from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
except ImportError:  # before 0.4, verifiers itself stops a rollout whose context is full
    CONTEXT_OVERFLOW_MARKERS = ()
ID = "composer-workspace"
"""What verifiers knows this environment by. It imports top-level modules only: `composer_workspace` holds the names."""


class _WorkspaceData(vf.TaskData):
    """What makes a task again."""

    seed: int
    difficulty: Difficulty


class _WorkspaceTask(vf.Task[_WorkspaceData, vf.State, vf.TaskConfig]):
    """One task of the world. Its reward was measured where the files are, and stands in the trace with every call.

    `trace.info["calls"]` holds name, arguments (as the model wrote them), text, failed and kind of each, and
    `trace.info["sites"]` which turns erred, as `rollouts` reads signals: turn (number of the assistant message, from
    0), kind, message and tool. A trace's `state` would neither be written to disk nor reach an orchestrator.
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
    """Which tasks: seeds from `first_seed` on, without end (`vf-eval -n` says how many); an evaluation starts at 0."""

    id: str = ID
    difficulty: Difficulty = "easy"
    first_seed: int = FIRST_TRAINING_SEED


class WorkspaceTaskset(vf.Taskset[_WorkspaceTask, _WorkspaceTasksetConfig]):
    """Tasks by seed, each made when it is asked for."""

    INFINITE = True

    def load(self) -> Iterator[_WorkspaceTask]:
        difficulty = self.config.difficulty
        for seed in itertools.count(self.config.first_seed):
            prompt = generate_task(seed, difficulty=difficulty).prompt
            data = _WorkspaceData(name=f"{difficulty}-{seed}", prompt=prompt, seed=seed, difficulty=difficulty)
            yield _WorkspaceTask(data, self.config.task)


class _WorkspaceHarnessConfig(vf.HarnessConfig):
    """How long an agent may work."""

    id: str = ID
    max_calls: int = 40


class WorkspaceHarness(vf.Harness[_WorkspaceHarnessConfig]):
    """Asks the model, gives its calls to the world, until it finishes or calls nothing."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False  # the world runs code of the model in its own sandbox, nowhere else
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
        task = generate_task(data.seed, difficulty=data.difficulty)
        workspace = Workspace(task, max_calls=self.config.max_calls)
        system, prompt = self.resolve_text_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        headers, turns = {"Authorization": f"Bearer {secret}"}, itertools.count()
        trace.info |= {"calls": [], "sites": []}
        try:
            async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as model:
                while not workspace.finished:
                    body = {"model": ctx.model, "messages": messages, "tools": list(TOOLS)}
                    reply = await model.post("/chat/completions", json=body)
                    if _is_context_overflow(reply):
                        trace.stop("max_total_tokens")  # what verifiers counts as truncated, and scores
                    if reply.is_error:  # a limit was reached, or the model's server failed: the rollout knows which
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                    messages.append(reply.json()["choices"][0]["message"])
                    answers = await asyncio.to_thread(_act, workspace, trace.info, messages[-1], next(turns))
                    if not answers:
                        break
                    messages += answers
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        finally:  # however it ended: the files are worth what they are worth
            trace.info |= await asyncio.to_thread(_judged, workspace)


class WorkspaceEnvConfig(vf.SingleAgentEnvConfig):
    """One agent. It runs in this process: a remote box, verifiers' default, would have nothing to do."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())  # pyright: ignore[reportInvalidTypeForm]


class WorkspaceEnv(vf.Env[WorkspaceEnvConfig]):
    """One task, one agent, one trace."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)


def load_environment(
    *, difficulty: Difficulty = "easy", first_seed: int = FIRST_TRAINING_SEED, max_calls: int = 40
) -> WorkspaceEnv:
    """The environment for Python code; `vf-eval` and prime-rl make it from a config by its id."""
    taskset = {"id": ID, "difficulty": difficulty, "first_seed": first_seed}
    agent = {"harness": {"id": ID, "max_calls": max_calls}}
    return vf.load_environment(vf.resolve_env_config({"taskset": taskset, "agent": agent}))


def _is_context_overflow(reply: Any) -> bool:
    """Return whether a model's server refused a request because the conversation fills the model's context."""
    text = reply.text.casefold() if reply.status_code in (400, 413) else ""
    return any(marker in text for marker in CONTEXT_OVERFLOW_MARKERS)


def _act(workspace: Workspace, info: dict[str, Any], message: dict[str, Any], turn: int) -> list[dict[str, Any]]:
    """Every call of a turn in order, and the messages that answer them; calls and erring turns are noted in `info`."""
    answers: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or []:
        name, written = call["function"]["name"], call["function"]["arguments"]
        outcome = workspace.call(name, _arguments(written))
        info["calls"].append({"name": name, "arguments": written, **asdict(outcome)})
        if outcome.failed and outcome.kind:  # a kind says that it was the model's doing
            info["sites"].append({"turn": turn, "kind": outcome.kind, "message": outcome.text, "tool": name})
        answers.append({"role": "tool", "tool_call_id": call["id"], "content": outcome.text})
    return answers


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # the world says what is wrong with it


def _judged(workspace: Workspace) -> dict[str, Any]:
    reward = workspace.reward()
    checks = {"solved": float(reward.solved), "checks_passed": reward.passed / max(reward.total, 1)}
    return {"reward": reward.value, "effort": {**checks, **asdict(reward.effort)}}
