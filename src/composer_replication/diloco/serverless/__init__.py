"""Replicas on rented machines: who starts them, and how they meet without a network between them.

executor            what every executor does, its jobs and handles
replica_process     the program that a replica is, wherever it runs
local_process       replicas as processes of this machine
modal               replicas as Sandboxes of Modal
hf_jobs             replicas as Jobs of the Hub
ray                 replicas on a Ray cluster
allreduce           the mean of a tensor over processes that share an object store
replica_entrypoint  what an executor calls in every replica: it joins the run and calls a trainer
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.diloco.serverless.allreduce import MockManager, ObjectStoreAllReduce
    from composer_replication.diloco.serverless.executor import ReplicaHandle, ServerlessExecutor
    from composer_replication.diloco.serverless.local_process import LocalProcessExecutor

_KNOWN = {
    "LocalProcessExecutor": "local_process",
    "MockManager": "allreduce",
    "ObjectStoreAllReduce": "allreduce",
    "ReplicaHandle": "executor",
    "ServerlessExecutor": "executor",
}

__all__ = ["LocalProcessExecutor", "MockManager", "ObjectStoreAllReduce", "ReplicaHandle", "ServerlessExecutor"]


def __getattr__(name: str) -> Any:
    if name not in _KNOWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_KNOWN[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
