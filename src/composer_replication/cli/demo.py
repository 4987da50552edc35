"""`crf demo`: the whole run on generated sessions and the embedded student, on this machine, in minutes."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from composer_replication.canonical_json import decode_object
from composer_replication.cli.console import log
from composer_replication.cli.world import agent_named, write_logs
from composer_replication.config import CrfConfig
from composer_replication.config.values import value_text
from composer_replication.envs.policies import RememberingRunner
from composer_replication.envs.student import student_folder
from composer_replication.envs.workspace.sandbox import TestRunner
from composer_replication.errors import SandboxError
from composer_replication.runs.artefacts import control_folders
from composer_replication.runs.lineage import channel_in_words

WHEN_INTERRUPTED = "what was made is kept, and the same command goes on from there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("demo"), metavar="DIR", help="folder for logs and run; default demo"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    import time

    from composer_replication.cli.progress import duration
    from composer_replication.cli.run import run_pipeline

    _use_one_thread()
    began, logs = time.monotonic(), args.output / "logs"
    if not logs.is_dir():
        log(f"sessions of an agent that errs on purpose: played into {logs}")
    args.output.mkdir(parents=True, exist_ok=True)
    status = run_pipeline(demo_config(demo_logs(logs)), args.output / "run", as_json=args.json)
    if status:
        return status
    dead = channels_that_did_not_run(args.output / "run")
    for name in dead:
        log(f"crf demo: channel {name}")
    log(f"took {duration(time.monotonic() - began)}; the same command again makes only what is missing")
    return 1 if dead else 0


# `crf demo`: the whole run on sessions of a scripted agent that errs on purpose, with the embedded student.
#
# Everything is on this machine, and the same at every start: sessions are played from seeds that nothing else here
# uses, and the settings below were chosen on other ones (`experiments/` says how, and what came of it). The control
# is always trained, too.

SEED, SESSIONS = 50_000, 96
RATES = ("guessed_path=0.5",)
"""What the scripted agent does oftener than the careless one: it reads files that it has only guessed."""
SHUFFLES = 4
"""Trainings of the control: as many as four minutes leave time for."""
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
    """The folder with the sessions' logs: made whole or not at all, and only once.

    Their tests run behind a wall where one stands. Where none does they run all the same: this package wrote both the
    code and the tests.
    """
    if folder.is_dir():
        return folder
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    try:
        runner = RememberingRunner()
        _ = runner.kind  # asks whether it stands
    except SandboxError:
        runner = RememberingRunner(TestRunner(kind="rlimits"))
    agent = agent_named("careless", RATES)
    write_logs(making, number=sessions, seed=seed, difficulty="easy", agent=agent, runner=runner)
    making.rename(folder)
    return folder


def demo_config(logs: Path, *, settings: tuple[str, ...] = SETTINGS) -> CrfConfig:
    """What the demo is told, as anybody could write it into a file."""
    from composer_replication.config.presets import load_with_preset

    path_settings = (f"ingest.paths={value_text([str(logs)])}", f"train.model={value_text(str(student_folder()))}")
    return load_with_preset(overrides=[*settings, *path_settings])


def _use_one_thread() -> None:
    """Unless a number is set; read when torch is loaded.

    Sums are then added up in the same order on every machine, and a tiny model gains nothing by more threads: on a
    busy machine they wait for each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def channels_that_did_not_run(run: Path) -> list[str]:
    """Return what became of each channel with a weight that no step of a training, or of a control, has taught."""
    outcomes: list[str] = []
    for folder in (run, *control_folders(run)):
        record: dict[str, Any] = decode_object((folder / "adapter" / "training.json").read_bytes())
        outcomes += [
            f"{channel['name']} of {folder}: {channel_in_words(channel, record['steps'])}"
            for channel in record["channels"]
            if channel["weight"] and not channel["steps"]
        ]
    return outcomes
