"""Run replicas on rented machines. The replicas are started by executors, and share a bucket instead of a network.

executor            the base class of executors, their jobs and handles
replica_process     the program of a replica, on any service
local_process       runs replicas as processes on this machine
modal               runs replicas as Modal Sandboxes
hf_jobs             runs replicas as Jobs of the Hugging Face Hub
ray                 runs replicas on a Ray cluster
allreduce           averages a tensor over processes that share an object store
replica_entrypoint  the function that every replica calls: it joins the run and calls a trainer
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.diloco.serverless.allreduce import MockManager, ObjectStoreAllReduce
    from composer_replication.diloco.serverless.executor import ReplicaHandle, ServerlessExecutor
    from composer_replication.diloco.serverless.local_process import LocalProcessExecutor

_MODULES = {
    "LocalProcessExecutor": "local_process",
    "MockManager": "allreduce",
    "ObjectStoreAllReduce": "allreduce",
    "ReplicaHandle": "executor",
    "ServerlessExecutor": "executor",
}

__all__ = ["LocalProcessExecutor", "MockManager", "ObjectStoreAllReduce", "ReplicaHandle", "ServerlessExecutor"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
