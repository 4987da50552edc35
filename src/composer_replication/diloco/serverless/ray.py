"""Run replicas on a Ray cluster. For each replica, an actor reserves resources on a node, and runs the replica's
process there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from composer_replication.diloco.serverless.executor import (
    ENDED,
    Executor,
    ReplicaHandle,
    ReplicaJob,
    ReplicaStatus,
    start_name,
    within,
)
from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
from composer_replication.errors import RunError, explain
from composer_replication.optional import require

__all__ = ["RayExecutor"]

_NAMESPACE = "crf-diloco"
_ANSWER_S, _POLL_S = 60.0, 2.0
_CONNECT_S = 180.0  # enough to start a cluster


class RayExecutor(Executor):
    """Runs each replica as an actor that reserves `num_cpus` and `num_gpus`, on the cluster at `address`.

    With `detached`, actors outlive this process, so that another process can poll them by their handles. Secrets are
    passed to the actor as an argument, because everybody can see the runtime environments of Ray jobs.
    """

    backend_name = "ray"
    supports_inter_replica_network = True
    by_hand = (
        "`ray list actors` shows its actors (names begin with {launch}), and ray.kill(ray.get_actor(NAME)) ends one."
    )
    poll_interval_s = 0.5

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        secrets: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        detached: bool = False,
    ) -> None:
        self._ray: Any = require("ray", extra="ray")
        super().__init__(secrets=secrets, env=env)
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._lifetime = "detached" if detached else None
        if not self._ray.is_initialized():
            options = {"namespace": _NAMESPACE, "include_dashboard": False, "log_to_driver": False}
            within(_CONNECT_S, "the Ray cluster", lambda: self._ray.init(address=address, **options))
        self._actors: dict[str, Any] = {}
        self._cancelled: set[str] = set()

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        name = job.name
        keeper = self._ray.remote(max_concurrency=4, max_restarts=0, **self._resources)(_NodeKeeper)
        options = {"name": name, "namespace": _NAMESPACE, "lifetime": self._lifetime}
        resources = {} if job.gpu is None else {"accelerator_type": job.gpu}
        self._actors[name] = keeper.options(**options, **resources).remote(asdict(job), self.env, self.secret_values())
        return self._metadata(name)

    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        handle = self._handle(launch, rank, attempt, self._metadata(start_name(launch, rank, attempt)))
        try:
            self._actor(handle)
        except ValueError:  # no actor has this name
            return []
        return [handle]

    def _metadata(self, name: str) -> dict[str, Any]:
        return {"actor": name, "namespace": _NAMESPACE, "cluster": self._cluster()}

    def _cluster(self) -> str:
        return str(self._ray.get_runtime_context().gcs_address)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        return self._ask(handle, "poll") or ("cancelled" if self._name(handle) in self._cancelled else "failed")

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        # Checks n_lines before the request.
        self.shown("", n_lines)
        return self.shown(self._ask(handle, "logs", n_lines) or "", n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        status = self.poll(handle)
        # A pending actor cannot answer while it waits for resources. An actor that does not answer is killed.
        if status not in ENDED and (status == "pending" or not self._ask(handle, "cancel")):
            self._cancelled.add(self._name(handle))
            self._ray.kill(self._actor(handle))

    def reaches(self, handle: ReplicaHandle) -> bool:
        return super().reaches(handle) and handle.metadata.get("cluster") == self._cluster()

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        return self._ask(handle, "exit_code")

    def _ask(self, handle: ReplicaHandle, method: str, *args: Any) -> Any:
        """Call a method of the actor and return its answer, or None if the actor is dead. Polling an actor that has
        not been placed on a node yet returns "pending".
        """
        errors = self._ray.exceptions
        try:
            actor = self._actor(handle)
            seconds = _POLL_S if method == "poll" else _ANSWER_S
            return self._ray.get(getattr(actor, method).remote(*args), timeout=seconds)
        except (errors.RayActorError, ValueError):
            # The actor is dead, or no actor has this name.
            return None
        except errors.GetTimeoutError:
            return "pending" if method == "poll" else None

    def _actor(self, handle: ReplicaHandle) -> Any:
        name = self._name(handle)
        # In another cluster the name would be missing although the replica runs.
        if not self.reaches(handle):
            got, fix = f"an actor on cluster {handle.metadata.get('cluster')}", "Set RAY_ADDRESS to its cluster."
            raise RunError(
                explain(f"rank {handle.rank}", got=got, expected=f"an actor on cluster {self._cluster()}", fix=fix)
            )
        if name not in self._actors:
            self._actors[name] = self._ray.get_actor(name, namespace=handle.metadata["namespace"])
        return self._actors[name]

    def _name(self, handle: ReplicaHandle) -> str:
        self._check_own(handle)
        return str(handle.metadata["actor"])


class _NodeKeeper:
    """A Ray actor that runs a replica's process on its node. The process ends when the actor ends."""

    def __init__(self, job: dict[str, Any], env: dict[str, str], secrets: dict[str, str]) -> None:
        # Nothing else runs in the actor's process.
        os.environ.update(secrets)
        self._executor = LocalProcessExecutor(secrets=tuple(secrets), env=env)
        self._handle = self._executor.start(ReplicaJob(**{**job, "gpu": None}))

    def poll(self) -> ReplicaStatus:
        return self._executor.poll(self._handle)

    def logs(self, n_lines: int) -> str:
        return self._executor.stream_logs(self._handle, n_lines=n_lines)

    def cancel(self) -> bool:
        self._executor.cancel(self._handle)
        return True

    def exit_code(self) -> int | None:
        return self._executor.exit_code(self._handle)

    def process_id(self) -> int:
        """Return the process id of the actor. Killing that process ends the replica."""
        return os.getpid()
