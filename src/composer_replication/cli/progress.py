"""Progress on stderr: bytes read, teacher calls and their cost, training steps.

A terminal gets a bar. Otherwise training prints lines, so that a log file is readable, and the others print nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import is_terminal, log, plain

if TYPE_CHECKING:
    from composer_replication.teacher_replay.tables import Meter
    from composer_replication.trainer.from_config.training import TrainingCallbacks
    from composer_replication.trainer.sessions.phases import Phase
    from composer_replication.types import TeacherCallResult

_SECONDS_BETWEEN_LINES = 10.0
# Metrics that are printed, by their name in metrics.jsonl; the rest is only in that file.
_PRINTED_METRICS = (
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
    """Yield a function (bytes done, bytes in total) that moves a progress bar, if stderr is a terminal."""
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
    """A progress bar of teacher calls with what they cost.

    The amounts come from the cache's meter, which counts answers, failures and earlier replays of the run.
    """

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
        """The text next to the bar. "Held" is money reserved for requests under way or possibly billed."""
        spent_usd = self._meter.spent / 1e9 if self._meter else 0.0
        held_usd = (self._meter.reserved + self._meter.unknown) / 1e9 if self._meter else 0.0
        money = f"${spent_usd:.4f} spent and ${held_usd:.4f} held of ${self._cap_usd:g}"
        return f"{money}, {self._num_cached:,} from the cache, {self._num_errors:,} errors"


@contextlib.contextmanager
def call_progress(num_calls: int, cap_usd: float, *, quiet: bool) -> Generator[CallBar, None, None]:
    """Yield a `CallBar`, which is visible only if stderr is a terminal."""
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
    """Yield the callbacks that show a training's progress. Warnings of this package are printed the same way."""
    from composer_replication.trainer.from_config.training import TrainingCallbacks

    if not is_terminal(sys.stderr):
        with _warnings_to(log):
            yield TrainingCallbacks(say=log, on_log=_log_metrics, on_phase=PhaseLines(log))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, TextColumn("{task.fields[figures]}", markup=False), console=Console(stderr=True)) as bar:
        task = bar.add_task("steps", total=total_steps, figures="", visible=total_steps > 0)

        # Through the bar's console: plain `print` would break the line that the bar redraws.
        def log_above_bar(message: str) -> None:
            bar.console.print(plain(message), markup=False, highlight=False)

        phases: dict[str, TaskID] = {}

        def show_phase(phase: Phase) -> None:
            if phase.name not in phases:
                phases[phase.name] = bar.add_task(phase.name, total=phase.total, figures="")
            bar.update(phases[phase.name], completed=phase.done, total=phase.total, visible=not phase.is_over)

        with _warnings_to(log_above_bar):
            yield TrainingCallbacks(
                say=log_above_bar,
                on_phase=show_phase,
                on_step=lambda step, total: bar.update(task, completed=step, total=total),
                on_log=lambda _step, _total, metrics: bar.update(task, **_bar_postfix(metrics)),
            )


class PhaseLines:
    """Prints lines about the work before the first step: at its start, every ten seconds, and at its end.

    A phase that is already complete when it is first reported prints nothing.
    """

    def __init__(self, on_message: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_message, self._clock = on_message, clock
        self._name, self._started_s, self._first_done, self._last_line_s = "", 0.0, 0, 0.0

    def __call__(self, phase: Phase) -> None:
        now = self._clock()
        if phase.name != self._name:
            if phase.is_over:
                return
            self._name, self._started_s, self._first_done, self._last_line_s = phase.name, now, phase.done, now
            self._on_message(f"{phase.name}: {phase.done:,} of {phase.total:,} {phase.items}")
        elif phase.is_over or now - self._last_line_s >= _SECONDS_BETWEEN_LINES:
            self._last_line_s = now
            remaining = self._remaining_time(phase, now)
            self._on_message(f"{phase.name}: {phase.done:,} of {phase.total:,} {phase.items}{remaining}")
        if phase.is_over:
            self._name = ""

    def _remaining_time(self, phase: Phase, now: float) -> str:
        # A resumed phase starts at `first_done`: what an earlier process did says nothing about this one's speed.
        num_done = phase.done - self._first_done
        if phase.is_over or not num_done:
            return ""
        seconds = (now - self._started_s) / num_done * (phase.total - phase.done)
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """Return seconds in a readable unit: "40 s", "12 min", "3.5 h"."""
    # From 90 s on minutes, from 90 min on hours: "75 s" says more than "1 min".
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def as_shown(name: str) -> str:
    """Return the printed name of a channel or of one of its drop reasons."""
    # Metrics store the older name sdpo_kl: "sdpo_kl: longer_than_window" -> "sdpo_jsd: longer_than_window".
    return name.replace("sdpo_kl", "sdpo_jsd", 1) if name.startswith("sdpo_kl") else name


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return the printed metrics in a fixed order. A loss that no step of the interval trained on is marked."""
    return "  ".join(
        f"{name} {float(metrics[key]):.4g}{_inactive_mark(key, metrics)}"
        for key, name in _PRINTED_METRICS
        if isinstance(metrics.get(key), int | float)
    )


def _inactive_mark(key: str, metrics: Mapping[str, Any]) -> str:
    return " (not taught)" if metrics.get(key.replace("loss/", "ran/")) == 0 else ""


def _bar_postfix(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two metrics that fit next to the bar. Without any, the bar keeps those of the line before."""
    text = metrics_text({key: metrics[key] for key in ("loss/total", "reward") if key in metrics})
    return {"figures": text} if text else {}


def _log_metrics(step: int, total: int, metrics: Mapping[str, Any]) -> None:
    text = metrics_text(metrics)
    if text:
        log(f"step {step} of {total}: {text}")


@contextlib.contextmanager
def _warnings_to(on_message: Callable[[str], None]) -> Generator[None, None, None]:
    """Pass this package's warnings to a callback. Python would print them to stderr, into the middle of a bar."""

    class CallbackHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            on_message(record.getMessage())

    logger, handler = logging.getLogger("composer_replication"), CallbackHandler(logging.WARNING)
    old_propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = old_propagate
