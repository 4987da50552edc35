"""Run PRIME-RL's commands with the algorithm of `hinted_turns` in place of its "grpo".

    python -m composer_replication.recipes.prime_rl.start --composer composer.toml rl @ rl.toml
    python -m composer_replication.recipes.prime_rl.start --composer composer.toml orchestrator @ orchestrator.toml

`rl` starts its other processes by name, so it is run with a PATH on which our `orchestrator` command precedes the
engine's. Our command registers the algorithm and then runs the engine's orchestrator. Under SLURM, `rl` only writes and
submits a job, so the `orchestrator` command above has to be added to that job manually; the recipe's README shows
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
from composer_replication.errors import ComposerError, ConfigError, MissingExtraError, explain
from composer_replication.recipes.prime_rl.hinted_turns import HintSettings, engine_module, register


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rl` or `orchestrator` with our algorithm, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m composer_replication.recipes.prime_rl.start")
    parser.add_argument("--composer", metavar="TOML", help="settings of the algorithm (HintSettings). Unset: defaults")
    parser.add_argument("command", choices=("rl", "orchestrator"), help="PRIME-RL command to run")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of that command, such as @ rl.toml")
    arguments = parser.parse_args(argv)
    settings = load(HintSettings, arguments.composer)  # reports a mistake in the file before anything starts
    if arguments.command == "rl":
        _refuse_slurm(arguments.rest)
        return _run_all(arguments.composer, arguments.rest)
    register(settings)
    sys.argv = ["orchestrator", *arguments.rest]  # the engine reads its arguments from sys.argv
    engine_module("prime_rl.entrypoints.orchestrator").main()
    return 0


def _refuse_slurm(rest: Sequence[str]) -> None:
    """Raise ConfigError if a config requests SLURM, because the submitted job would start its own orchestrator after
    this process and its modified PATH no longer exist.
    """
    for marker, path in itertools.pairwise(rest):
        # The engine reads config files from arguments of the form "@ rl.toml".
        if marker == "@" and Path(path).suffix == ".toml" and "slurm" in read_table(path)[0]:
            fix = (
                "Let `rl ... --dry-run` write the job. In its rl.sbatch, replace `uv run orchestrator` by "
                "`uv run python -m composer_replication.recipes.prime_rl.start --composer composer.toml orchestrator`, "
                "and add --inexact to `uv sync`, which would otherwise remove composer-replication."
            )
            raise ConfigError(explain(path, got="[slurm]", expected="a config without SLURM", fix=fix))


def _run_all(composer: str | None, rest: Sequence[str]) -> int:
    """Run the engine's `rl` with our `orchestrator` first on the PATH. Returns the exit code."""
    # The same interpreter, so that the script finds this package.
    our_command = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
    if composer is not None:
        our_command += ["--composer", str(Path(composer).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "orchestrator")
        script.write_text(f'#!/bin/sh\nexec {shlex.join([*our_command, "orchestrator"])} "$@"\n', encoding="utf-8")
        # The engine runs it as a command, so it has to be executable.
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        # Our folder first: `rl` looks up `orchestrator` on the PATH.
        path = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
        try:
            return subprocess.run(["rl", *rest], env={**os.environ, "PATH": path}, check=False).returncode  # noqa: S603, S607
        except FileNotFoundError as error:
            fix = "Install PRIME-RL from its repository (it is not on PyPI) and activate its environment."
            message = explain("PRIME-RL", got="no command `rl` on the PATH", expected="PRIME-RL's environment", fix=fix)
            raise MissingExtraError(message, name="prime_rl") from error


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ComposerError as error:  # the message says what to do; a traceback would not help
        sys.exit(f"{type(error).__name__}: {error}")
