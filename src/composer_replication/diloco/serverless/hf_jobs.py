"""Replicas as Jobs of the Hugging Face Hub, by the client that this package has anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.diloco.serverless.executor import (
    ENDED,
    MODULE,
    Executor,
    ReplicaHandle,
    ReplicaJob,
    ReplicaStatus,
)
from composer_replication.diloco.serverless.replica_process import END_MARK, SAYS_END_VARIABLE
from composer_replication.errors import RunError, explain
from composer_replication.optional import require

__all__ = ["HFJobsExecutor"]

_STATUS: dict[str, ReplicaStatus] = {
    "SCHEDULING": "pending",
    "RUNNING": "running",
    "COMPLETED": "succeeded",
    "CANCELED": "cancelled",
    "DELETED": "cancelled",
    "ERROR": "failed",
}
# The package names stand behind the script, as its arguments: nothing of them is read by the shell.
_INSTALL = f'python -m pip install --quiet "$@" && exec python -m {MODULE}'


class HFJobsExecutor(Executor):
    """A Job a replica, on `hardware` (`hf jobs hardware` lists them).

    `image` is one of a registry; `packages` are installed into it before the replica starts, and may be empty where the
    image has this package. Secrets are variables of this machine, handed over as secrets of the Job.
    """

    backend_name = "hf_jobs"
    supports_inter_replica_network = False
    poll_interval_s = 2.0

    def __init__(
        self,
        hardware: str = "a10g-large",
        *,
        secrets: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        image: str = "python:3.11",
        packages: Sequence[str] = ("composer-replication[diloco,serverless,train]",),
        namespace: str | None = None,
        endpoint: str | None = None,
        token: str | None = None,
    ) -> None:
        hub = require("huggingface_hub", extra="serverless")
        super().__init__(secrets=secrets, env=env)
        self.hardware, self.image, self.packages = hardware, image, tuple(packages)
        self._api: Any = hub.HfApi(endpoint=endpoint, token=token)
        self._namespace = namespace

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        command = ["sh", "-c", _INSTALL, "sh", *self.packages] if self.packages else ["python", "-m", MODULE]
        made = self._api.run_job(
            image=self.image,
            command=command,
            env={**self.env, **job.environment(), SAYS_END_VARIABLE: "1"},
            secrets=self.secret_values() or None,
            flavor=job.gpu or self.hardware,
            timeout=job.timeout_s,
            labels={"crf-launch": job.launch, "crf-rank": str(job.rank)},
            namespace=self._owner(),
        )
        return {"job": made.id, "namespace": self._owner()}

    def _owner(self) -> str:
        if self._namespace is None:
            self._namespace = str(self._api.whoami()["name"])
        return self._namespace

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        self._check_own(handle)
        info = self._api.inspect_job(job_id=handle.metadata["job"], namespace=handle.metadata["namespace"])
        stage = str(getattr(info.status.stage, "value", info.status.stage))
        if stage not in _STATUS:
            raise RunError(explain(f"job {handle.metadata['job']}", got=f"stage {stage}", expected=", ".join(_STATUS)))
        return _STATUS[stage]

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        self.shown("", n_lines)
        lines = [line for line in self._lines(handle, n_lines + 1) if not line.startswith(END_MARK)]
        return self.shown("\n".join(lines), n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        if self.poll(handle) not in ENDED:
            self._api.cancel_job(job_id=handle.metadata["job"], namespace=handle.metadata["namespace"])

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        """What the replica's own last line says: a Job has a stage, and no exit status."""
        for line in reversed(self._lines(handle, 5)):
            if line.startswith(END_MARK):
                return int(line.removeprefix(END_MARK))
        return 0 if self.poll(handle) == "succeeded" else None

    def _lines(self, handle: ReplicaHandle, number: int) -> list[str]:
        self._check_own(handle)
        where = {"job_id": handle.metadata["job"], "namespace": handle.metadata["namespace"]}
        entries = self._api.fetch_job_logs(**where, tail=max(number, 1))
        return [line for entry in entries for line in entry.splitlines() or [""]]
