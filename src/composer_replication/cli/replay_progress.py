"""Live progress of a replay on stderr: calls, dollars of the cap, answers from the store, errors, time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_replication.types import TeacherCallResult


@contextlib.contextmanager
def call_progress(
    num_calls: int, cap_usd: float, *, quiet: bool
) -> Generator[Callable[[TeacherCallResult], None], None, None]:
    """A bar where stderr is a terminal; nothing otherwise."""
    if quiet or not sys.stderr.isatty():
        yield lambda _result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[about]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calls", total=num_calls, about="")
        spent, cached, errors = 0.0, 0, 0

        def on_call(result: TeacherCallResult) -> None:
            nonlocal spent, cached, errors
            is_cached = bool(result.get("is_cached"))
            spent += 0.0 if is_cached else result["cost_usd"]
            cached += is_cached
            errors += result["error"] is not None
            about = f"${spent:.4f} of ${cap_usd:g}, {cached:,} from the store, {errors:,} errors"
            progress.update(task, advance=1, about=about)

        yield on_call
