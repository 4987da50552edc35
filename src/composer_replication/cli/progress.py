"""Progress on stderr: of bytes read, of calls and their dollars, of training steps. Lines where it is no terminal."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import is_terminal

if TYPE_CHECKING:
    from composer_replication.teacher_replay.tables import Meter
    from composer_replication.trainer.from_config.training import TrainingCallbacks
    from composer_replication.trainer.sessions.phases import Phase
    from composer_replication.types import TeacherCallResult

_SECONDS_BETWEEN_LINES = 10.0
# In this order, those that a line has; the rest is in metrics.jsonl.
_SHOWN = (
    ("loss/total", "total"),
    ("loss/lm_ce", "lm_ce"),
    ("loss/grpo", "grpo"),
    ("loss/sdpo_kl", "sdpo_jsd"),
    ("loss/sdpo_kl_logged", "sdpo_jsd_logged"),
    ("loss/trace_replay_dpo", "trace_replay_dpo"),
    ("reward", "reward"),
    ("eval_loss", "held-out loss"),
    ("eval_reward", "held-out reward"),
    ("grad_norm", "gradient"),
)


@contextlib.contextmanager
def byte_progress(what: str, *, quiet: bool) -> Generator[Callable[[int, int], None], None, None]:
    """A progress bar by bytes on stderr; nothing where stderr is no terminal."""
    if quiet or not is_terminal(sys.stderr):
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class CallBar:
    """What the bar says beside itself. Money is the store's: replies, failures and earlier replays are all in it."""

    def __init__(self, cap_usd: float, progress: Any = None, task: Any = None) -> None:
        self._cap_usd, self._progress, self._task = cap_usd, progress, task
        self._meter: Meter | None = None
        self._num_cached = self._num_errors = 0

    def on_meter(self, meter: Meter) -> None:
        self._meter = meter

    def on_call(self, result: TeacherCallResult) -> None:
        self._num_cached += bool(result.get("is_cached"))
        self._num_errors += result["error"] is not None
        if self._progress is not None:
            self._progress.update(self._task, advance=1, about=self.about)

    @property
    def about(self) -> str:
        """Spent is settled; held is reserved for requests under way, or may have been billed."""
        spent = self._meter.spent / 1e9 if self._meter else 0.0
        held = (self._meter.reserved + self._meter.unknown) / 1e9 if self._meter else 0.0
        money = f"${spent:.4f} spent and ${held:.4f} held of ${self._cap_usd:g}"
        return f"{money}, {self._num_cached:,} from the store, {self._num_errors:,} errors"


@contextlib.contextmanager
def call_progress(num_calls: int, cap_usd: float, *, quiet: bool) -> Generator[CallBar, None, None]:
    """A bar where stderr is a terminal; nothing otherwise."""
    if quiet or not is_terminal(sys.stderr):
        yield CallBar(cap_usd)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[about]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        yield CallBar(cap_usd, progress, progress.add_task("calls", total=num_calls, about=""))


@contextlib.contextmanager
def training_progress(total_steps: int) -> Generator[TrainingCallbacks, None, None]:
    """What `run_training` tells its progress to; warnings of this package come the same way, as plain text."""
    from composer_replication.cli.console import say
    from composer_replication.trainer.from_config.training import TrainingCallbacks

    if not is_terminal(sys.stderr):
        with _warnings_to(say):
            yield TrainingCallbacks(
                say=say,
                on_log=lambda step, total, figures: _say_line(say, step, total, figures),
                on_phase=PhaseLines(say),
            )
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from composer_replication.cli.console import plain

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[figures]}", markup=False), console=Console(stderr=True)) as bar:
        task = bar.add_task("steps", total=total_steps, figures="", visible=total_steps > 0)

        def talk(text: str) -> None:
            bar.console.print(plain(text), markup=False, highlight=False)

        phases: dict[str, TaskID] = {}

        def show_phase(phase: Phase) -> None:
            if phase.name not in phases:
                phases[phase.name] = bar.add_task(phase.name, total=phase.total, figures="")
            bar.update(phases[phase.name], completed=phase.done, total=phase.total, visible=not phase.is_over)

        with _warnings_to(talk):
            yield TrainingCallbacks(
                say=talk,
                on_phase=show_phase,
                on_step=lambda step, total: bar.update(task, completed=step, total=total),
                on_log=lambda _step, _total, figures: bar.update(task, **_beside_bar(figures)),
            )


class PhaseLines:
    """Lines about work before the first step: where it begins, every ten seconds with the time that is left, its end.

    Work that is found done is not spoken of.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._name, self._began, self._first, self._told = "", 0.0, 0, 0.0

    def __call__(self, phase: Phase) -> None:
        now = self._clock()
        if phase.name != self._name:
            if phase.is_over:
                return
            self._name, self._began, self._first, self._told = phase.name, now, phase.done, now
            self._say(f"{phase.name}: {phase.done:,} of {phase.total:,} {phase.items}")
        elif phase.is_over or now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            self._say(f"{phase.name}: {phase.done:,} of {phase.total:,} {phase.items}{self._left(phase, now)}")
        if phase.is_over:
            self._name = ""

    def _left(self, phase: Phase, now: float) -> str:
        num_done = phase.done - self._first
        if phase.is_over or not num_done:
            return ""
        seconds = (now - self._began) / num_done * (phase.total - phase.done)
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """In the unit that fits: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def as_shown(name: str) -> str:
    """A channel, or what was dropped of one, as it is called in print: metrics call sdpo_jsd by an older name."""
    return name.replace("sdpo_kl", "sdpo_jsd", 1) if name.startswith("sdpo_kl") else name


def figures_text(figures: Mapping[str, Any]) -> str:
    """The figures that somebody watches, in a fixed order; a loss that no step taught is marked."""
    return "  ".join(
        f"{name} {float(figures[key]):.4g}{_if_not_taught(key, figures)}"
        for key, name in _SHOWN
        if isinstance(figures.get(key), int | float)
    )


def _if_not_taught(key: str, figures: Mapping[str, Any]) -> str:
    return " (not taught)" if figures.get(key.replace("loss/", "ran/")) == 0 else ""


def _beside_bar(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The two that there is room for; a line that has neither leaves those of the line before."""
    text = figures_text({key: figures[key] for key in ("loss/total", "reward") if key in figures})
    return {"figures": text} if text else {}


def _say_line(say: Callable[[str], None], step: int, total: int, figures: Mapping[str, Any]) -> None:
    text = figures_text(figures)
    if text:
        say(f"step {step} of {total}: {text}")


@contextlib.contextmanager
def _warnings_to(say: Callable[[str], None]) -> Generator[None, None, None]:
    """Python would print them to stderr as they are, into the middle of a bar."""

    class Saying(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if not text.startswith("The whole run: "):  # part of the result
                say(text)

    ours, handler = logging.getLogger("composer_replication"), Saying(logging.WARNING)
    before, ours.propagate = ours.propagate, False
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.propagate = before
