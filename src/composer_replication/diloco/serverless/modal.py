"""Run replicas as Modal Sandboxes, which are containers with a command, logs and an exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.diloco.serverless.executor import (
    MODULE,
    Executor,
    ReplicaHandle,
    ReplicaJob,
    ReplicaStatus,
    tried,
    within,
)
from composer_replication.errors import InputError, explain
from composer_replication.optional import require

__all__ = ["ModalExecutor"]

_MAX_SANDBOX_S = 86_400  # Modal's limit for a Sandbox
_MAX_ENTRIES = 20_000  # the maximum that the service returns at once
# 128 + SIGKILL
_KILLED = 137
_ANSWER_S = 60.0
_START_S = 1800.0  # the first start also builds the image, with gigabytes of packages


class ModalExecutor(Executor):
    """Runs each replica as a Sandbox in an app of the user's Modal account.

    `image` is a container image that contains this package, or `modal:python3.11`, a slim Python image into which
    `packages` are installed. Secrets are environment variables of this machine, passed as a Modal secret.
    `modal_secrets` are names of secrets that Modal stores; their values are unknown here, so they cannot be masked in
    logs.
    """

    backend_name = "modal"
    supports_inter_replica_network = False
    by_hand = (
        "`modal app list` and `modal container list` show what runs, as does the app's page (tag crf-launch {launch})."
    )
    poll_interval_s = 2.0
    start_s = _ANSWER_S + _START_S

    def __init__(
        self,
        image: str = "modal:python3.11",
        gpu: str | None = "A100",
        *,
        secrets: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        modal_secrets: Sequence[str] = (),
        packages: Sequence[str] = ("composer-replication[diloco,serverless,train]",),
        app_name: str = "crf-diloco",
    ) -> None:
        self._modal: Any = require("modal", extra="modal")
        super().__init__(secrets=secrets, env=env)
        self.image, self.gpu, self.app_name = image, gpu, app_name
        self.modal_secrets, self.packages = tuple(modal_secrets), tuple(packages)
        self._app: Any = None

    def check(self, job: ReplicaJob) -> None:
        super().check(job)
        if job.timeout_s is not None and job.timeout_s > _MAX_SANDBOX_S:
            fix = "A relaunched replica continues from the global weights."
            raise InputError(explain("timeout", got=job.timeout_s, expected=f"at most {_MAX_SANDBOX_S} s", fix=fix))

    def _start(self, job: ReplicaJob) -> dict[str, Any]:
        timeout = _MAX_SANDBOX_S if job.timeout_s is None else job.timeout_s
        modal = self._modal
        modal_secrets = [modal.Secret.from_name(name) for name in self.modal_secrets]
        if values := self.secret_values():
            modal_secrets.append(modal.Secret.from_dict(values))
        app, image = self._opened_app(), self._image()

        def create() -> str:
            return modal.Sandbox.create(
                "python",
                "-m",
                MODULE,
                app=app,
                image=image,
                env={**self.env, **job.environment()},
                secrets=modal_secrets,
                timeout=int(-(-timeout // 1)),
                gpu=job.gpu or self.gpu,
                tags=_tags(job.launch, job.rank, job.attempt),
            ).object_id

        sandbox = within(_START_S, f"start of rank {job.rank} at Modal", create)
        return {"sandbox": sandbox, "app": self.app_name}

    def find(self, launch: str, rank: int, attempt: int) -> list[ReplicaHandle]:
        app, tags = self._opened_app(), _tags(launch, rank, attempt)

        def ask() -> list[str]:
            return [sandbox.object_id for sandbox in self._modal.Sandbox.list(app_id=app.app_id, tags=tags)]

        sandboxes = within(_ANSWER_S, f"Sandboxes of rank {rank} at Modal", ask)
        return [
            self._handle(launch, rank, attempt, {"sandbox": sandbox, "app": self.app_name}) for sandbox in sandboxes
        ]

    def _opened_app(self) -> Any:
        if self._app is None:
            ask = self._modal.App.lookup
            self._app = within(_ANSWER_S, "Modal", lambda: ask(self.app_name, create_if_missing=True))
        return self._app

    def _image(self) -> Any:
        kind, _, version = self.image.partition(":python")
        if kind != "modal" or not version:
            return self._modal.Image.from_registry(self.image)
        image = self._modal.Image.debian_slim(python_version=version)
        return image.pip_install(*self.packages) if self.packages else image

    def poll(self, handle: ReplicaHandle) -> ReplicaStatus:
        code = self.exit_code(handle)
        if code is None:
            return "running"
        if code == _KILLED and self._was_terminated(handle):
            return "cancelled"
        return "succeeded" if code == 0 else "failed"

    def _was_terminated(self, handle: ReplicaHandle) -> bool:
        """Return whether the Sandbox was terminated. Exit status 137 alone may also mean that the replica was killed
        inside its container.
        """
        try:
            within(_ANSWER_S, "the end of a Sandbox", self._sandbox(handle).wait)
        except self._modal.exception.SandboxTerminatedError:
            return True
        return False

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        # Checks n_lines before the request.
        self.shown("", n_lines)
        num_entries = min(max(n_lines, 1), _MAX_ENTRIES)  # an entry is one line or several
        logs = self._sandbox(handle).logs
        entries = within(_ANSWER_S, "the log of a Sandbox", lambda: list(logs.tail(num_entries)))
        return self.shown("".join(entry.message for entry in entries), n_lines)

    def cancel(self, handle: ReplicaHandle) -> None:
        code, _ = tried(lambda: self.exit_code(handle))
        # A replica whose status is unknown may still be running.
        if code is None:
            within(_ANSWER_S, "the end of a Sandbox", self._sandbox(handle).terminate)

    def exit_code(self, handle: ReplicaHandle) -> int | None:
        return within(_ANSWER_S, "a Sandbox", self._sandbox(handle).poll)

    def _sandbox(self, handle: ReplicaHandle) -> Any:
        self._check_own(handle)
        return within(_ANSWER_S, "a Sandbox", lambda: self._modal.Sandbox.from_id(handle.metadata["sandbox"]))


def _tags(launch: str, rank: int, attempt: int) -> dict[str, str]:
    return {"crf-launch": launch, "crf-rank": str(rank), "crf-attempt": str(attempt)}
