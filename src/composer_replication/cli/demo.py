"""`crf demo`: run everything on generated sessions and the embedded student, on this machine, in minutes.

A scripted agent that makes mistakes on purpose generates the sessions from fixed seeds, so every demo is the same.
Nothing else uses these seeds: the settings were chosen on others (`experiments/`). The control is always trained as
well.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from composer_replication.atomic import staged_path
from composer_replication.canonical_json import decode_object
from composer_replication.cli.console import log
from composer_replication.cli.world import make_agent, write_logs
from composer_replication.config import CrfConfig
from composer_replication.config.values import value_text
from composer_replication.envs.policies import RememberingRunner
from composer_replication.envs.student import student_folder
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.errors import SandboxError
from composer_replication.runs.artefacts import control_folders
from composer_replication.runs.lineage import describe_channel

WHEN_INTERRUPTED = "finished steps are saved; run the same command to resume"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("demo"), metavar="DIR", help="folder for logs and run; default demo"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import time

    from composer_replication.cli.progress import format_duration
    from composer_replication.cli.run import run_pipeline

    _use_one_thread()
    started_s, logs = time.monotonic(), args.output / "logs"
    if not logs.is_dir():
        log(f"playing sessions of an agent that makes mistakes on purpose; logs are written to {logs}")
    args.output.mkdir(parents=True, exist_ok=True)
    status = run_pipeline(demo_config(demo_logs(logs)), args.output / "run", as_json=args.json)
    if status:
        return status
    inactive = _channels_that_did_not_run(args.output / "run")
    for name in inactive:
        log(f"crf demo: channel {name}")
    duration = format_duration(time.monotonic() - started_s)
    log(f"took {duration}; run the same command again to rebuild missing parts")
    return 1 if inactive else 0


SEED, SESSIONS = 50_000, 96
RATES = ("guessed_path=0.5",)
"""Rates that differ from those of the predefined careless agent: this agent guesses file paths more often."""
SHUFFLES = 4
"""Number of controls: as many as fit into four minutes."""
SETTINGS = (
    "ingest.workers=1",
    "run.control=true",
    f"run.shuffles={SHUFFLES}",
    "split.test=0.3",
    "split.validation=0",
    "loss.alpha_sdpo=0.1",
    "loss.beta_replay=1.0",
    "train.channels.good_turns=false",
    "train.warmup.mode=off",
    "train.proof.on=false",
    "train.batch.budget=1536",
    "train.batch.overlap=64",
    "train.optimiser.lr=1e-3",
    "train.optimiser.steps=20",
    "train.optimiser.per_device=2",
    "train.save.every=10",
    "evaluation.samples=1",
    "evaluation.states=16",
    "evaluation.new_tokens=96",
    "evaluation.good_turns=40",
    "evaluation.token_gaps=40",
)


def demo_logs(folder: Path, *, sessions: int = SESSIONS, seed: int = SEED) -> Path:
    """Return the folder with the logs of the sessions.

    If it does not exist, it is created, completely or not at all.
    """
    if folder.is_dir():
        return folder
    try:
        runner = RememberingRunner()
        _ = runner.kind  # raises if there is no sandbox
    except SandboxError:
        # The tests may run without a sandbox: this package generates both them and the code that they test.
        runner = RememberingRunner(TestRunner(kind="rlimits"))
    agent = make_agent("careless", RATES)
    with staged_path(folder) as unfinished:
        write_logs(unfinished, number=sessions, seed=seed, difficulty="easy", agent=agent, runner=runner)
    return folder


def demo_config(logs: Path, *, settings: tuple[str, ...] = SETTINGS) -> CrfConfig:
    """Return the config of the demo. Each of its options could also be set in a config file."""
    from composer_replication.config.presets import load_with_preset

    path_settings = (f"ingest.paths={value_text([str(logs)])}", f"train.model={value_text(str(student_folder()))}")
    return load_with_preset(overrides=[*settings, *path_settings])


def _use_one_thread() -> None:
    """Limit torch to one thread, unless the user has set the number. Must be called before torch is imported.

    With one thread, sums are added in the same order on every machine. More threads would not speed up a tiny model: on
    a busy machine, they wait for each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _channels_that_did_not_run(run: Path) -> list[str]:
    """Return a line for each channel that has a weight but did not run in the training or in a control."""
    outcomes: list[str] = []
    for folder in (run, *control_folders(run)):
        record: dict[str, Any] = decode_object((folder / "adapter" / "training.json").read_bytes())
        outcomes += [
            f"{channel['name']} of {folder}: {describe_channel(channel, record['steps'])}"
            for channel in record["channels"]
            if channel["weight"] and not channel["steps"]
        ]
    return outcomes
