"""Serve the workspace with OpenEnv, and connect to it with a client. Needs the extra `openenv`.

    python -m composer_replication.envs.openenv_server --port 8000

Use OpenEnv's WebSocket. Its plain HTTP routes create a new environment for every request, so a `step` request has no
task. The server accepts connections from this machine only, and limits the number of sessions and the size of messages.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from composer_replication.envs.workspace import TOOLS, Difficulty, Reward, Workspace, generate_task
from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED
from composer_replication.errors import InputError, explain
from composer_replication.optional import require

# `require` raises an error with the install command if the extra is missing.
openenv = require("openenv.core", extra="openenv")
client_types = require("openenv.core.client_types", extra="openenv")
server = require("openenv.core.env_server", extra="openenv")
uvicorn = require("uvicorn", extra="openenv")
HOST, PORT = "127.0.0.1", 8000
MAX_SESSIONS, IDLE_SECONDS, MAX_MESSAGE_BYTES = 64, 600.0, 2**20


class WorkspaceAction(server.Action):
    """A tool call as a model wrote it.

    `arguments` may be any value; the workspace answers malformed arguments with an error.
    """

    name: str
    arguments: Any


class WorkspaceObservation(server.Observation):
    """The text shown to the agent: first the prompt, with the tools in `metadata`, then the result of each call."""

    text: str
    failed: bool = False
    kind: str | None = None


class _WorkspaceState(server.State):
    """The current task and, after the end of the episode, its reward."""

    seed: int | None = None
    difficulty: Difficulty | None = None
    finished: bool = False
    reward: dict[str, Any] | None = None


class WorkspaceEnvironment(server.Environment[WorkspaceAction, WorkspaceObservation, _WorkspaceState]):
    """The workspace of one session. Only the observation that ends the episode has a reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, *, max_calls: int = 40) -> None:
        super().__init__()
        self._max_calls, self._workspace, self._episode = max_calls, None, None
        self._reward: Reward | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, *, difficulty: Difficulty = "easy"
    ) -> WorkspaceObservation:
        """Start the task with this seed (by default the first training task) and return its prompt."""
        task = generate_task(FIRST_TRAINING_SEED if seed is None else seed, difficulty=difficulty)
        self._workspace, self._episode = Workspace(task, max_calls=self._max_calls), episode_id
        self._reward = None
        # A client needs these to build its prompt and to end the episode.
        metadata = {"tools": list(TOOLS), "root": Workspace.root, "end": {"name": "Finish", "arguments": {}}}
        return WorkspaceObservation(text=task.prompt, metadata=metadata)

    def step(self, action: WorkspaceAction, timeout_s: float | None = None) -> WorkspaceObservation:  # noqa: ARG002
        """Run one call and return the observation. Calls after the end of the episode have no reward.

        Raises InputError if `reset` has not been called.
        """
        workspace = self._require_workspace()
        observation = {**asdict(workspace.call(action.name, action.arguments)), "done": workspace.finished}
        # The reward is given once, by the call that ends the episode.
        if self._reward is not None or not workspace.finished:
            return WorkspaceObservation(**observation)
        self._reward = workspace.reward()
        return WorkspaceObservation(**observation, reward=self._reward.value, metadata=_reward_metadata(self._reward))

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
            reward=None if self._reward is None else _reward_metadata(self._reward),
        )

    def _require_workspace(self) -> Workspace:
        if self._workspace is None:
            fix = "Call reset(seed=..., difficulty=...) first, in the same WebSocket session"
            raise InputError(explain("step", got="no task", expected="a task started by reset()", fix=fix))
        return self._workspace


class WorkspaceClient(openenv.EnvClient[WorkspaceAction, WorkspaceObservation, _WorkspaceState]):
    """A client connection to the server, with `reset`, `step` and `state`.

    Use it as `async with WorkspaceClient(base_url=...)`, or as `with WorkspaceClient(base_url=...).sync()`.
    """

    def _step_payload(self, action: WorkspaceAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = WorkspaceObservation(**payload["observation"], reward=reward, done=done)
        return client_types.StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> _WorkspaceState:
        return _WorkspaceState.model_validate(payload)


def create_app(*, max_sessions: int = MAX_SESSIONS, max_calls: int = 40) -> Any:
    """Return the FastAPI application.

    It refuses sessions beyond the limit, and ends sessions that have been idle for ten minutes.
    """
    limits = server.ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=IDLE_SECONDS)

    def workspace() -> WorkspaceEnvironment:
        return WorkspaceEnvironment(max_calls=max_calls)

    return server.create_fastapi_app(
        workspace, WorkspaceAction, WorkspaceObservation, concurrency_config=limits, state_cls=_WorkspaceState
    )


def server_settings(app: Any, *, port: int = PORT) -> Any:
    """Return the configuration for `uvicorn.Server`: the loopback address, and messages of at most 1 MiB."""
    return uvicorn.Config(app, host=HOST, port=port, ws_max_size=MAX_MESSAGE_BYTES, access_log=False)


def _main() -> None:
    """Serve until the process is stopped."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--port", type=int, default=PORT, help="port to listen on; 0 picks a free one")
    options.add_argument("--max-sessions", type=int, default=MAX_SESSIONS, help="maximum number of concurrent sessions")
    options.add_argument("--max-calls", type=int, default=40, help="maximum number of calls per episode")
    args = options.parse_args()
    app = create_app(max_sessions=args.max_sessions, max_calls=args.max_calls)
    uvicorn.Server(server_settings(app, port=args.port)).run()


def _reward_metadata(reward: Reward) -> dict[str, Any]:
    # The fields of `effort` are merged into those of the reward.
    metadata = asdict(reward)
    effort = metadata.pop("effort")
    return metadata | effort


if __name__ == "__main__":
    _main()
