"""A process that has torch and no threads, and forks replicas: `python replica_host.py`, commands and answers by line.

Tests cannot fork replicas themselves: where the pool of torch's threads exists, two threads of a child that use it at
once find it half made ("Invalid thread pool"). No replica is forked like that outside of tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from toy_replicas import run_replica

from composer_replication.diloco.rounds.patience import Replaced


class ReplicaHost:
    """The tests' side: starts replicas of a run in a folder, and says with which code each ended."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        self._host = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def start(self, **replica: Any) -> int:
        return self._ask(replica)

    def exit_code(self, pid: int) -> int | None:
        """None while it runs; below 0 for a signal."""
        return self._ask({"pid": pid})

    def close(self) -> None:
        self._host.communicate()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        print(json.dumps(question), file=self._host.stdin, flush=True)
        return json.loads(self._host.stdout.readline())


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        answer = _ended(question["pid"]) if "pid" in question else _fork(**question)
        print(json.dumps(answer), flush=True)


def _ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _fork(folder: str, rank: int, world: int, steps: int, *, clock_off_s: float, **limits: Any) -> int:
    """A replica leaves its weights in a file, or its error."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        now = time.time
        time.time = lambda: now() + clock_off_s
        torch.set_num_threads(1)  # makes the pool before there are threads
        loop = run_replica(f"file://{folder}/store", rank, world, steps, **limits)
        np.save(Path(folder, f"{rank}.npy"), torch.stack(loop.globals).numpy())
        code = 0
    except Replaced:
        code = 3
    except Exception:
        Path(folder, f"error-{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
