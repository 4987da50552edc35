"""A small `crf run` in a process of its own that kills itself in the middle of a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sdpo_end_to_end"
SETTINGS = (
    "ingest.workers=1",
    "run.control=true",
    "run.shuffles=2",
    "run.fewest=1",
    "split.test=0.25",
    "loss.beta_replay=1.0",
    "train.warmup.mode=steps",
    "train.warmup.steps=2",
    "train.adapter.rank=4",
    "train.optimiser.steps=4",
    "train.optimiser.lr=1e-2",
    "train.save.every=1",
    "evaluation.samples=0",
    "evaluation.good_turns=4",
    "evaluation.fewest_sessions=2",
)


def prepare(folder: Path) -> None:
    """Logs of an agent with bad habits, and a random model that can read them."""
    sys.path.insert(0, str(EXAMPLE))
    import world

    tokenizer = world.build_tokenizer()
    for part in (tokenizer, world.new_model(tokenizer)):
        part.save_pretrained(folder / "model")
    (folder / "logs").mkdir()
    world.write_logs(folder / "logs", num_sessions=16)


def kill_at_the_end_of(phase_name: str) -> None:
    """Kills this process when all of a phase is made and kept, and nothing has been written about it."""
    from composer_replication.trainer.sessions.phases import PhaseTimes

    original = PhaseTimes.__call__

    def killed_when_over(times, phase):
        if phase.is_over and phase.name == phase_name:
            os.kill(os.getpid(), signal.SIGKILL)
        original(times, phase)

    PhaseTimes.__call__ = killed_when_over


def run(folder: str, step: str = "", seconds: float = 0.0, phase_name: str = "") -> None:
    """`crf run` there; it is killed so many seconds after a step began, or at the end of a phase of the training."""
    import torch

    from composer_replication.cli.ingest import run_directory
    from composer_replication.cli.pipeline import RunCallbacks, run_steps
    from composer_replication.config.presets import load_with_preset

    torch.set_num_threads(1)
    os.chdir(folder)
    if phase_name:
        kill_at_the_end_of(phase_name)

    def begin(name: str, _why: str) -> None:
        if name == step:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    config = load_with_preset(overrides=[*SETTINGS, "ingest.paths=['logs']", "train.model='model'"])
    with run_directory(Path("run")) as run_dir:
        run_steps(config, run_dir, RunCallbacks(on_step_begin=begin))


if __name__ == "__main__":
    run(sys.argv[1])
