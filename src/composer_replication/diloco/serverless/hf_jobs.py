"""Run replicas as Jobs of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_replication.diloco.serverless.executor import (
    ENDED,
    MODULE,
    Executor,
    ReplicaHandle,
    ReplicaJob,
    ReplicaStatus,
    tried,
    within,
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
_ANSWER_S, _START_S = 60.0, 180.0
_TOO_SLOW = 408  # the only 4xx status after which the Hub may still have acted on the request
# The packages are arguments of the script, so that the shell does not interpret them.
_INSTALL = f'python -m pip install --quiet "$@" && exec python -m {MODULE}'


class HFJobsExecutor(Executor):
    """Runs each replica as a Job on `hardware` (`hf jobs hardware` lists the choices).

    `image` is a container image. `packages` are installed into it before the replica starts; none are needed if the
    image contains this package. Secrets are environment variables of this machine, passed as secrets of the Job. The
    Hub and the token are those of this process (HF_ENDPOINT, HF_TOKEN) unless `endpoint` and `token` are given.
    """

    backend_name = "hf_jobs"
    supports_inter_replica_network = False
    by_hand = "`hf jobs ps --label crf-launch={launch}` lists its Jobs, and `hf jobs cancel ID` ends one."
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

    def log_place(self, handle: ReplicaHandle) -> str:
        return f"hf jobs logs {handle.metadata.get('job', '')}"

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        command = ["sh", "-c", _INSTALL, "sh", *self.packages] if self.packages else ["python", "-m", MODULE]
        owner, secrets = self._owner(), self.secret_values() or None

        def run() -> Any:
            return self._api.run_job(
                image=self.image,
                command=command,
                env={**self.env, **job.environment(), SAYS_END_VARIABLE: "1"},
                secrets=secrets,
                flavor=job.gpu or self.hardware,
                timeout=job.timeout_s,
                labels=_labels(job.launch, job.rank, job.attempt),
                namespace=owner,
            )

        return {"job": within(_START_S, f"start of rank {job.rank} at the Hub", run).id, "namespace": owner}

    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        owner, labels = self._owner(), _labels(launch, rank, attempt)
        jobs = self._ask_hub(f"jobs of rank {rank}", lambda: list(self._api.list_jobs(labels=labels, namespace=owner)))
        return [self._handle(launch, rank, attempt, {"job": job.id, "namespace": owner}) for job in jobs]

    def was_refused(self, error: BaseException) -> bool:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        return super().was_refused(error) or (400 <= status < 500 and status != _TOO_SLOW)

    def _owner(self) -> str:
        if self._namespace is None:
            self._namespace = str(self._ask_hub("whoami", self._api.whoami)["name"])
        return self._namespace

    def _ask_hub(self, what: str, ask: Callable[[], Any]) -> Any:
        return within(_ANSWER_S, f"{what} at the Hub", ask)

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        self._check_own(handle)
        where = self._where(handle)
        info = self._ask_hub(f"job {where['job_id']}", lambda: self._api.inspect_job(**where))
        stage = str(getattr(info.status.stage, "value", info.status.stage))
        if stage not in _STATUS:
            raise RunError(explain(f"job {handle.metadata['job']}", got=f"stage {stage}", expected=", ".join(_STATUS)))
        return _STATUS[stage]

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        # Checks n_lines before the request.
        self.shown("", n_lines)
        lines = [line for line in self._lines(handle, n_lines + 1) if not line.startswith(END_MARK)]
        return self.shown("\n".join(lines), n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        where = self._where(handle)
        status, _ = tried(lambda: self.poll(handle))
        # A replica whose status is unknown may still be running.
        if status not in ENDED:
            self._ask_hub(f"the end of job {where['job_id']}", lambda: self._api.cancel_job(**where))

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        """Return the exit status, which is read from the end of the replica's log because Jobs do not report one."""
        for line in reversed(self._lines(handle, 5)):
            if line.startswith(END_MARK) and (status := line.removeprefix(END_MARK)).removeprefix("-").isdecimal():
                return int(status)
        return 0 if self.poll(handle) == "succeeded" else None

    def _lines(self, handle: ReplicaHandle, number: int) -> list[str]:
        where = self._where(handle)
        what, tail = f"the log of job {where['job_id']}", max(number, 1)
        entries = self._ask_hub(what, lambda: list(self._api.fetch_job_logs(**where, tail=tail)))
        return [line for entry in entries for line in entry.splitlines() or [""]]

    def _where(self, handle: ReplicaHandle) -> dict[str, str]:
        self._check_own(handle)
        return {"job_id": handle.metadata["job"], "namespace": handle.metadata["namespace"]}


def _labels(launch: str, rank: int, attempt: int) -> dict[str, str]:
    return {"crf-launch": launch, "crf-rank": str(rank), "crf-attempt": str(attempt)}
