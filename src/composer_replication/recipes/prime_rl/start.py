"""PRIME-RL with our algorithm: what its commands do, and `hinted_turns` in the place of its "grpo".

    python -m composer_replication.recipes.prime_rl.start --composer composer.toml rl @ rl.toml
    python -m composer_replication.recipes.prime_rl.start --composer composer.toml orchestrator @ orchestrator.toml

`rl` starts the other processes by their names, so it is run with an `orchestrator` of ours before the engine's on its
PATH. `orchestrator` is that process: it registers the algorithm, and is the engine's from there on. Under SLURM `rl`
only writes a job and submits it, so the second line has to be written into that job by hand; the recipe's README says
where.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from composer_replication.config import load
from composer_replication.config.loader import read_table
from composer_replication.errors import (
    ComposerError,
    ConfigError,
    MissingExtraError,
    explain,
)
from composer_replication.recipes.prime_rl.hinted_turns import HintSettings, engine_module, register


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m composer_replication.recipes.prime_rl.start")
    parser.add_argument("--composer", metavar="TOML", help="settings of the algorithm (HintSettings); unset: defaults")
    parser.add_argument("command", choices=("rl", "orchestrator"), help="what of PRIME-RL to run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="its own arguments, such as @ rl.toml")
    arguments = parser.parse_args(argv)
    settings = load(HintSettings, arguments.composer)  # a mistake in it is told before anything starts
    if arguments.command == "rl":
        _refuse_slurm(arguments.rest)
        return _run_all(arguments.composer, arguments.rest)
    register(settings)
    sys.argv = ["orchestrator", *arguments.rest]  # the engine reads its arguments there
    engine_module("prime_rl.entrypoints.orchestrator").main()
    return 0


def _refuse_slurm(rest: Sequence[str]) -> None:
    """A job that is submitted starts an orchestrator of its own, long after this process and its PATH are gone."""
    for mark, name in itertools.pairwise(rest):
        if mark == "@" and Path(name).suffix == ".toml" and "slurm" in read_table(name)[0]:
            fix = (
                "Let `rl ... --dry-run` write the job, and in its rl.sbatch replace `uv run orchestrator` by "
                "`uv run python -m composer_replication.recipes.prime_rl.start --composer composer.toml orchestrator`, "
                "and add --inexact to its `uv sync`, which would remove composer-replication."
            )
            raise ConfigError(explain(name, got="[slurm]", expected="a run on this machine", fix=fix))


def _run_all(composer: str | None, rest: Sequence[str]) -> int:
    """The engine's `rl`, which finds an `orchestrator` of ours first."""
    ours = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
    if composer is not None:
        ours += ["--composer", str(Path(composer).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "orchestrator")
        script.write_text(f'#!/bin/sh\nexec {shlex.join([*ours, "orchestrator"])} "$@"\n', encoding="utf-8")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        try:
            return subprocess.run(["rl", *rest], env={**os.environ, "PATH": path}, check=False).returncode  # noqa: S603, S607
        except FileNotFoundError as error:
            fix = "Install PRIME-RL from its repository (it is not on PyPI), and run this in its environment."
            message = explain("PRIME-RL", got="no command `rl` on the PATH", expected="it", fix=fix)
            raise MissingExtraError(message, name="prime_rl") from error


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ComposerError as told:  # what to do stands in it; where it was raised helps nobody
        sys.exit(f"{type(told).__name__}: {told}")
