"""Live progress of a replay on stderr: calls, dollars of the cap, answers from the store, errors, time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import is_terminal

if TYPE_CHECKING:
    from composer_replication.teacher_replay.store_words import Meter
    from composer_replication.types import TeacherCallResult


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
