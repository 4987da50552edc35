"""Tables and progress. Text from logs is shown as text: no markup in it is obeyed, no control character is sent."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def say(text: str) -> None:
    """Talk: to stderr."""
    print(plain(text), file=sys.stderr)


def plain(text: str) -> str:
    """The text without anything that a terminal would act upon."""
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    last_is_total: bool = False,
    caption: str | None = None,
) -> Table:
    """A table whose numbers stand right, and whose last row may be a sum; `caption` says what its words mean."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    made.caption, made.caption_justify = caption, "left"
    for index, name in enumerate(columns):
        numbers = bool(rows) and all(isinstance(row[index], int) for row in rows)
        made.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for number, row in enumerate(rows):
        if last_is_total and number == len(rows) - 1:
            made.add_section()
        made.add_row(*(Text(f"{each:,}" if isinstance(each, int) else plain(str(each))) for each in row))
    return made


def show(*tables: Table) -> None:
    """Tables to stdout, as wide as they need to be where nobody looks at a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=160)
    for each in tables:
        console.print(each)


@contextlib.contextmanager
def byte_progress(what: str, *, quiet: bool) -> Generator[Callable[[int, int], None], None, None]:
    """A progress bar by bytes on stderr; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
