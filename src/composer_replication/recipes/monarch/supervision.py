"""Actors whose processes may die: each has a process of its own, and a call that finds it dead starts another.

Monarch looks at its processes every ten seconds (HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY=1s makes it one). A call
to a dead process raises SupervisionError, whether it died before the call or during it; an exception inside an endpoint
raises ActorError and leaves the process alive. The first is answered by a new process and the same call again, which is
why every endpoint can be asked twice; the second is a bug, and is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from composer_replication.errors import RunError, explain
from composer_replication.optional import require

logger = logging.getLogger(__name__)
PREFIX = "composer_"
"""Of the names of our meshes, so that their faults can be told from those of others in the same program."""
_LOGGERS = "logger-"
OnEvent = Callable[[str, str], None]
"""Called with "spawn", "call" or "death", and the role."""


@dataclass
class SupervisedActor:
    """One actor, in a process of its own.

    `max_deaths` in a row, without an answer between them, end the run: what dies of its settings would die for ever.
    """

    actor_class: Any
    settings: Any
    max_deaths: int = 3
    on_event: OnEvent | None = None
    num_deaths: int = 0
    _in_a_row: int = 0
    _mesh: Any = None
    _actor: Any = None
    _errors: list[str] = field(default_factory=list[str])

    @property
    def role(self) -> str:
        return self.actor_class.role

    async def call(self, endpoint: str, *args: Any, **named: Any) -> Any:
        """What the endpoint returns, from this process or from the next."""
        died = _supervision_error()
        while True:
            actor = self._spawned()
            self._tell("call")
            try:
                answer = await getattr(actor, endpoint).call_one(*args, **named)
            except died as error:
                self._bury(endpoint, error)
                continue
            self._in_a_row = 0
            return answer

    async def pid(self) -> int:
        return (await self.call("process"))["pid"]

    async def stop(self) -> None:
        """End the process, if there is one that lives."""
        mesh, self._mesh, self._actor = self._mesh, None, None
        if mesh is None:
            return
        try:
            await mesh.stop()
        except RuntimeError as error:  # SupervisionError is one: it was dead, and nobody had asked it anything since
            logger.info("%s had ended before it was stopped: %s", self.role, _first_line(error))

    def _spawned(self) -> Any:
        if self._actor is None:
            monarch = require("monarch.actor", extra="monarch")
            survive_faults()
            name = f"{PREFIX}{self.role}"
            self._mesh = monarch.this_host().spawn_procs(per_host={"gpus": 1}, name=name)
            self._actor = self._mesh.spawn(name, self.actor_class, self.settings)
            self._tell("spawn")
        return self._actor

    def _bury(self, endpoint: str, error: Exception) -> None:
        self._mesh = self._actor = None
        self.num_deaths += 1
        self._in_a_row += 1
        self._tell("death")
        logger.warning("%s died in %s, and is started anew: %s", self.role, endpoint, _first_line(error))
        if self._in_a_row > self.max_deaths:
            fix = "What it printed, and Monarch's own log, say why; the run goes on where it stands when started again."
            got = f"{self._in_a_row} deaths without an answer, the last: {error}"
            raise RunError(explain(f"actor {self.role}", got=got, expected="a process that lives", fix=fix)) from error

    def _tell(self, event: str) -> None:
        if self.on_event is not None:
            self.on_event(event, self.role)


def survive_faults() -> None:
    """Deaths of our processes do not end the program, as Monarch's own hook would; other faults go to the hook before.

    A process's logger is a mesh of its own, and says not whose it was: its fault alone ends nothing, since that of the
    actor beside it follows.
    """
    monarch: Any = require("monarch.actor", extra="monarch")
    before = monarch.unhandled_fault_hook
    if getattr(before, "_is_composers", False):
        return

    def hook(failure: Any) -> None:
        if failure.mesh_name.startswith((PREFIX, _LOGGERS)):
            logger.info("a process ended: %s", failure.mesh_name)
            return
        before(failure)

    hook._is_composers = True  # pyright: ignore[reportFunctionMemberAccess]
    monarch.unhandled_fault_hook = hook


def _supervision_error() -> type[Exception]:
    return require("monarch._rust_bindings.monarch_hyperactor.supervision", extra="monarch").SupervisionError


def _first_line(error: Exception) -> str:
    return str(error).strip().replace("\n", " ")[:300]
