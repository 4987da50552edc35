"""Show progress on stderr: bytes read, teacher calls and their cost, training steps.

On a terminal, progress is a bar. Elsewhere, for example in a log file, training prints lines, and nothing else is
shown.
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
    from rich.progress import Progress, ProgressColumn

    from composer_replication.teacher_replay.tables import Meter
    from composer_replication.trainer.sessions.phases import Phase, TrainingCallbacks
    from composer_replication.types import TeacherCallResult

_SECONDS_BETWEEN_LINES = 10.0
# The metrics that are printed: their names in metrics.jsonl, and in print.
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
    """Yield a function that is called with the number of bytes done and the total number of bytes.

    On a terminal, the function moves a progress bar. Elsewhere, it does nothing.
    """
    if quiet or not is_terminal(sys.stderr):
        yield lambda _done, _total: None
        return
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _bar(*columns: ProgressColumn, is_removed_at_end: bool = True) -> Progress:
    """Return a progress bar on stderr with a description, the bar and these columns."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    first_columns = (TextColumn("{task.description}"), BarColumn())
    return Progress(*first_columns, *columns, console=Console(stderr=True), transient=is_removed_at_end)


class _CallBar:
    """A progress bar of teacher calls and their cost.

    The amounts come from the cache's spending meter, which includes failed calls and earlier replays of the run.
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
        """The text next to the bar. "Held" is money reserved for requests that are in progress or may still be
        billed.
        """
        spent_usd = self._meter.spent / 1e9 if self._meter else 0.0
        held_usd = (self._meter.reserved + self._meter.unknown) / 1e9 if self._meter else 0.0
        money = f"${spent_usd:.4f} spent and ${held_usd:.4f} held of ${self._cap_usd:g}"
        return f"{money}, {self._num_cached:,} from the cache, {self._num_errors:,} errors"


@contextlib.contextmanager
def call_progress(num_calls: int, cap_usd: float, *, quiet: bool) -> Generator[_CallBar, None, None]:
    """Yield a progress bar for teacher calls. The bar is visible only if stderr is a terminal."""
    if quiet or not is_terminal(sys.stderr):
        yield _CallBar(cap_usd)
        return
    from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn

    with _bar(MofNCompleteColumn(), TextColumn("{task.fields[about]}"), TimeRemainingColumn()) as progress:
        yield _CallBar(cap_usd, progress, progress.add_task("calls", total=num_calls, about=""))


@contextlib.contextmanager
def training_progress(total_steps: int) -> Generator[TrainingCallbacks, None, None]:
    """Yield callbacks that show the progress of a training run. This package's warnings are printed above the bar."""
    from composer_replication.trainer.sessions.phases import TrainingCallbacks

    if not is_terminal(sys.stderr):
        with _warnings_to(log):
            yield TrainingCallbacks(say=log, on_log=_log_metrics, on_phase=_PhaseLines(log))
        return
    from rich.progress import MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn

    metrics_column = TextColumn("{task.fields[figures]}", markup=False)
    with _bar(MofNCompleteColumn(), TimeRemainingColumn(), metrics_column, is_removed_at_end=False) as bar:
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


class _PhaseLines:
    """A callback that prints progress lines for the phases before the first training step.

    It prints a line at the start of a phase, every ten seconds, and at the end. It prints nothing for a phase that is
    already complete when it is first reported.
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
        # A resumed phase starts at `first_done`. Earlier work says nothing about the speed of this process.
        num_done = phase.done - self._first_done
        if phase.is_over or not num_done:
            return ""
        seconds = (now - self._started_s) / num_done * (phase.total - phase.done)
        return f", about {format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text in a suitable unit, such as "40 s", "12 min" or "3.5 h"."""
    # Minutes from 90 s on, hours from 90 min on, because "75 s" says more than "1 min".
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return the metrics as text in a fixed order. A loss is marked if no step since the last line trained on it."""
    return "  ".join(
        f"{name} {float(metrics[key]):.4g}{_inactive_mark(key, metrics)}"
        for key, name in _PRINTED_METRICS
        if isinstance(metrics.get(key), int | float)
    )


def _inactive_mark(key: str, metrics: Mapping[str, Any]) -> str:
    return " (not taught)" if metrics.get(key.replace("loss/", "ran/")) == 0 else ""


def _bar_postfix(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that fit next to the bar: the total loss and the reward.

    If neither is in `metrics`, the result is empty, and the bar keeps its last text.
    """
    text = _metrics_text({key: metrics[key] for key in ("loss/total", "reward") if key in metrics})
    return {"figures": text} if text else {}


def _log_metrics(step: int, total: int, metrics: Mapping[str, Any]) -> None:
    text = _metrics_text(metrics)
    if text:
        log(f"step {step} of {total}: {text}")


@contextlib.contextmanager
def _warnings_to(on_message: Callable[[str], None]) -> Generator[None, None, None]:
    """Pass this package's warnings to a callback.

    Otherwise Python would print them to stderr, in the middle of the bar.
    """

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
