"""Moments at which a run dies of SIGKILL: at an event of the training loop, or while a file of a checkpoint is written.

kill_at("on_optimizer_step", 3)      at that event of step 3 (any event of a TrainerCallback)
kill_in_file("optimizer.json", 4)    the file's bytes are written, its name is not there yet (checkpoint-4)
kill_when_seen("scheduler.json", 4)  from outside, as soon as the file is seen
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

EVENTS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
FILES = (
    "optimizer.safetensors",
    "optimizer.json",
    "scheduler.json",
    "cursor-0.json",
    "extra-0.safetensors",
    "rng-0.json",
    "manifest.json",
)


@dataclass(frozen=True)
class Kill:
    kind: Literal["event", "in_file", "seen"]
    name: str
    step: int

    def install(self) -> None:
        """Prepare this process to die at the moment; nothing to do for one that is killed from outside."""
        if self.kind == "event":
            _die_at_event(self.name, self.step)
        elif self.kind == "in_file":
            _die_in_file(self.name, self.step)


def kill_at(event: str, step: int) -> Kill:
    """At a TrainerCallback event of a step, counted from 1: its beginning, a micro-step of it, or its end."""
    return Kill("event", event, step)


def kill_in_file(name: str, step: int) -> Kill:
    """When everything is in the temporary file and nothing under the file's name."""
    return Kill("in_file", name, step)


def kill_when_seen(name: str, step: int) -> Kill:
    """By the parent, which watches for the file: where the child then is, nobody chose."""
    return Kill("seen", name, step)


def kill_plan(
    number: int, *, num_steps: int, save_steps: int, seed: int = 0, events: tuple[str, ...] = EVENTS
) -> list[Kill]:
    """Kills spread over a run, in its order, each reachable after those before it; of every third, one in a save."""
    draw = random.Random(seed)
    plan: list[Kill] = []
    for index in range(number):
        step = 1 + index * num_steps // number
        if index % 3 == 1:
            at_save = min(-(-step // save_steps) * save_steps, num_steps // save_steps * save_steps)
            kill = draw.choice([kill_in_file, kill_in_file, kill_when_seen])(draw.choice(FILES[:-1]), at_save)
            # The manifest's own moment is the one that decides; it is hit on purpose once in a while.
            plan.append(kill_in_file(FILES[-1], at_save) if index % 9 == 4 else kill)
        else:
            plan.append(kill_at(draw.choice(events), step))
    return plan


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_event(event: str, step: int) -> None:
    """Through the loop's default callbacks, so that no job has to know of it."""
    import transformers.trainer
    from transformers import TrainerCallback

    done_by_then = event in ("on_step_end", "on_save")  # the step is counted just before these

    def check(_self: Any, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        if state.global_step == (step if done_by_then else step - 1):
            _die()

    transformers.trainer.DEFAULT_CALLBACKS.append(type("Killer", (TrainerCallback,), {event: check}))


def _die_in_file(name: str, step: int) -> None:
    from composer_replication.atomic import StagedFile

    seal = StagedFile.seal

    def seal_or_die(self: StagedFile) -> None:
        target: Path = self._target
        if target.name == name and target.parent.name == f"checkpoint-{step}":
            self.file.flush()
            _die()
        seal(self)

    StagedFile.seal = seal_or_die
