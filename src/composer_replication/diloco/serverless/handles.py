"""A replica that was launched, how it is doing, and what every executor can be asked.

A handle is JSON, holds no secret, and is enough for another process to ask about the replica where the service allows
it. It says whom to ask about, never where: the address and the token of a service are those of whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

ReplicaStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
ENDED: frozenset[ReplicaStatus] = frozenset({"succeeded", "failed", "cancelled"})


@dataclass
class ReplicaHandle:
    """A replica that was launched: its rank, whose it is, and what the service knows it by."""

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        """How often its rank had been started before."""
        return int(self.metadata.get("attempt", 0))


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Where replicas run. `collect` gives a dict a replica: rank, status, exit_code, error, and locally its result."""

    backend_name: str
    supports_inter_replica_network: bool

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: str | Callable[..., Any],
        entrypoint_args: Mapping[str, Any],
        *,
        gpu: str | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]: ...

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus: ...

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str: ...

    def cancel(self, handle: ReplicaHandle) -> None: ...

    def collect(self, handles: Sequence[ReplicaHandle], *, timeout: float | None = None) -> list[dict[str, Any]]: ...
