"""What stands for a container on the loopback servers: the command that a service was asked to run, in a local process.

It has the variables that the service was given and no others of ours, as a rented machine has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Container:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float | None) -> None:
        self._log = Path(tempfile.mkstemp(prefix="crf-container-")[1])
        self.stopped, self._started, self._timeout_s = False, time.monotonic(), timeout_s
        program = [sys.executable if each == "python" else each for each in command]
        own = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=own | dict(environment),
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit status as containers have it."""
        code = self.process.poll()
        if code is None and self._timeout_s is not None and time.monotonic() - self._started > self._timeout_s:
            self.stop()
        return None if code is None else 128 - code if code < 0 else code

    def lines(self) -> list[str]:
        return self._log.read_text(encoding="utf-8", errors="replace").splitlines()

    def stop(self) -> None:
        """SIGTERM to the first process; the program itself ends the others in time."""
        if self.process.poll() is None and not self.stopped:
            self.stopped = True
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The machine goes away."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self._log.unlink(missing_ok=True)
