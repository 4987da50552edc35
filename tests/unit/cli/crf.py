"""Runs `crf` as a user does: a process of its own, with its own environment (`warm_crf`: how it begins)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from warm_crf import crf_command

SRC = Path(__file__).resolve().parents[3] / "src"


def crf(*arguments, cwd, given="", **environment):
    """The finished process: stdout, stderr and returncode."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "TMPDIR") if name in os.environ}
    env = {"HOME": str(cwd), "PYTHONPATH": str(SRC), **kept, **environment}
    return subprocess.run(
        [*crf_command(), *map(str, arguments)],
        cwd=cwd,
        env=env,
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def must(*arguments, cwd, **options):
    """stdout of a command that has to work."""
    done = crf(*arguments, cwd=cwd, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
