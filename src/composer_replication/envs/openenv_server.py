"""The workspace as an OpenEnv server and its client. Needs the extra `openenv`.

    python -m composer_replication.envs.openenv_server --port 8000

Episodes live on the library's WebSocket: its plain HTTP routes make a new world for every request, so that a step there
has no task. The server listens on this machine alone, holds a set number of sessions, and takes messages of a set size.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from composer_replication.envs.workspace import (
    TOOLS,
    Difficulty,
    Reward,
    Workspace,
    generate_task,
)
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.errors import InputError, explain
from composer_replication.optional import require

openenv = require("openenv.core", extra="openenv")
client_types = require("openenv.core.client_types", extra="openenv")
server = require("openenv.core.env_server", extra="openenv")
uvicorn = require("uvicorn", extra="openenv")
HOST, PORT = "127.0.0.1", 8000
MAX_SESSIONS, IDLE_SECONDS, MAX_MESSAGE_BYTES = 64, 600.0, 2**20


class WorkspaceAction(server.Action):
    """A tool call as a model sent it. Arguments that are no object are the world's to answer."""

    name: str
    arguments: Any


class WorkspaceObservation(server.Observation):
    """What the agent sees: the request at first, then each call's answer. The tools stand in the first metadata."""

    text: str
    failed: bool = False
    kind: str | None = None


class _WorkspaceState(server.State):
    """Which task this is and, once the episode has ended, what it was worth."""

    seed: int | None = None
    difficulty: Difficulty | None = None
    finished: bool = False
    reward: dict[str, Any] | None = None


class WorkspaceEnvironment(server.Environment[WorkspaceAction, WorkspaceObservation, _WorkspaceState]):
    """One session's world. The reward comes once, with the observation that ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, *, max_calls: int = 40) -> None:
        super().__init__()
        self._max_calls, self._workspace, self._episode = max_calls, None, None
        self._reward: Reward | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, *, difficulty: Difficulty = "easy"
    ) -> WorkspaceObservation:
        """Begins the task of this seed (the first to learn from where none is given)."""
        task = generate_task(FIRST_TRAINING_SEED if seed is None else seed, difficulty=difficulty)
        self._workspace, self._episode = Workspace(task, max_calls=self._max_calls), episode_id
        self._reward = None
        about = {"tools": list(TOOLS), "root": Workspace.root, "end": {"name": "Finish", "arguments": {}}}
        return WorkspaceObservation(text=task.prompt, metadata=about)

    def step(self, action: WorkspaceAction, timeout_s: float | None = None) -> WorkspaceObservation:  # noqa: ARG002
        """One call. A call after the end is answered, and pays nothing more."""
        workspace = self._begun()
        observation = {**asdict(workspace.call(action.name, action.arguments)), "done": workspace.finished}
        if self._reward is not None or not workspace.finished:
            return WorkspaceObservation(**observation)
        self._reward = workspace.reward()
        return WorkspaceObservation(**observation, reward=self._reward.value, metadata=_figures(self._reward))

    @property
    def state(self) -> _WorkspaceState:
        if self._workspace is None:
            return _WorkspaceState()
        task = self._workspace.task
        return _WorkspaceState(
            episode_id=self._episode,
            step_count=self._workspace.calls,
            seed=task.seed,
            difficulty=task.difficulty,
            finished=self._workspace.finished,
            reward=None if self._reward is None else _figures(self._reward),
        )

    def _begun(self) -> Workspace:
        if self._workspace is None:
            fix = "Call reset(seed=..., difficulty=...) first, in the same WebSocket session"
            raise InputError(explain("step", got="no task", expected="one that reset() began", fix=fix))
        return self._workspace


class WorkspaceClient(openenv.EnvClient[WorkspaceAction, WorkspaceObservation, _WorkspaceState]):
    """A session: `async with WorkspaceClient(base_url=...)`, or `with ....sync()`; then `reset`, `step`, `state`."""

    def _step_payload(self, action: WorkspaceAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = WorkspaceObservation(**payload["observation"], reward=reward, done=done)
        return client_types.StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> _WorkspaceState:
        return _WorkspaceState.model_validate(payload)


def create_app(*, max_sessions: int = MAX_SESSIONS, max_calls: int = 40) -> Any:
    """The FastAPI application. Sessions beyond the limit are refused; those idle for ten minutes are ended."""
    limits = server.ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=IDLE_SECONDS)

    def workspace() -> WorkspaceEnvironment:
        return WorkspaceEnvironment(max_calls=max_calls)

    return server.create_fastapi_app(
        workspace, WorkspaceAction, WorkspaceObservation, concurrency_config=limits, state_cls=_WorkspaceState
    )


def server_settings(app: Any, *, port: int = PORT) -> Any:
    """For `uvicorn.Server`: this machine's own address, messages of one megabyte at most."""
    return uvicorn.Config(app, host=HOST, port=port, ws_max_size=MAX_MESSAGE_BYTES, access_log=False)


def main() -> None:
    """Serves until it is stopped."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--port", type=int, default=PORT, help="0 lets the machine choose")
    options.add_argument("--max-sessions", type=int, default=MAX_SESSIONS)
    options.add_argument("--max-calls", type=int, default=40, help="calls of one episode")
    args = options.parse_args()
    app = create_app(max_sessions=args.max_sessions, max_calls=args.max_calls)
    uvicorn.Server(server_settings(app, port=args.port)).run()


def _figures(reward: Reward) -> dict[str, Any]:
    figures = asdict(reward)
    effort = figures.pop("effort")
    return figures | effort


if __name__ == "__main__":
    main()
