"""Tables and progress. Text from logs is shown as text: no markup in it is obeyed, no control character is sent."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import argparse

    from rich.table import Table


def add_gate_arguments(parser: argparse.ArgumentParser) -> None:
    """What every verb takes that sends or hands out text: the last look at it, and how to get past it."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="ID",
        help="let a text through that the last look before it goes out has named; may be repeated",
    )
    parser.add_argument(
        "--no-scrub", action="store_true", help="let everything go out as it is, also of a run made with --no-scrub"
    )


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody looks at a stream; one that whoever started us has closed (`2>&-`) is None."""
    return stream is not None and not stream.closed and stream.isatty()


def say(text: str) -> None:
    """Talk: to stderr."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] (closed: print would take stdout instead)
        return
    with contextlib.suppress(OSError):  # a full disk behind stderr: nobody can be told, and the work is not lost for it
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
    shrinks: str | None = None,
) -> Table:
    """A table whose numbers stand right, and whose last row may be a sum; `caption` says what its words mean.

    Where the terminal is narrow, the columns move together, and `shrinks` is cut; numbers, kinds and ids stay whole.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[f"{each:,}" if isinstance(each, int) else plain(str(each)) for each in row] for row in rows]
    widths = [max(len(name), *(len(row[index]) for row in cells), 0) for index, name in enumerate(columns)]
    is_narrow = sum(widths) + 3 * len(widths) > terminal_width()
    padding = (0, 0) if is_narrow else (0, 1)
    overflow = sum(widths) + len(widths) - terminal_width() if is_narrow else 0
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=padding)
    made.show_edge, made.caption, made.caption_justify = False, caption, "left"
    for index, name in enumerate(columns):
        is_cut, numbers = name == shrinks, bool(rows) and all(isinstance(row[index], int) for row in rows)
        is_whole = numbers or (shrinks is not None and not is_cut)
        made.add_column(
            name,
            justify="right" if numbers else "left",
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_whole or is_cut,
            min_width=widths[index] if is_whole else min(widths[index], 10),
            max_width=max(10, widths[index] - overflow) if is_cut else None,
        )
    for number, row in enumerate(cells):
        if last_is_total and number == len(cells) - 1:
            made.add_section()
        made.add_row(*map(Text, row))
    return made


def terminal_width() -> int:
    """As wide as a table needs to be where nobody looks at a terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 160


def show(*tables: Table) -> None:
    """Tables to stdout, a blank line between them."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        return
    from rich.console import Console

    class PassingOn(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1; that the reader has seen enough is no failure
            raise BrokenPipeError

    console = PassingOn(file=sys.stdout, highlight=False, soft_wrap=False, width=terminal_width())
    for number, each in enumerate(tables):
        if number:
            console.print()
        console.print(each)


def print_json(value: dict[str, Any]) -> None:
    """A value with records in it, as one line on stdout."""
    from dataclasses import asdict, is_dataclass

    from composer_replication.canonical_json import encode

    def plain_data(each: Any) -> Any:
        if isinstance(each, list):
            return [plain_data(inner) for inner in each]
        return asdict(each) if is_dataclass(each) and not isinstance(each, type) else each

    data = {key: plain_data(each) for key, each in value.items()}
    write_json(encode(data, where="output").decode())


def write_json(text: str) -> None:
    """JSON to stdout; what a terminal would act upon, even inside a string, is spelled out."""
    import json

    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        return
    sys.stdout.write("".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text) + "\n")


def rank_of_process() -> int:
    """Return this process's number among those that a launcher such as torchrun has started; 0 without one."""
    return int(os.environ.get("RANK", "0")) if "LOCAL_RANK" in os.environ else 0


@contextlib.contextmanager
def only_rank_0_prints() -> Generator[None]:
    """Drop what the other ranks print, what compiled libraries write to their streams included.

    An error of another rank is printed with its number, unless rank 0 has failed with the same one. CRF_DEBUG=1 lets
    every rank print.
    """
    if "LOCAL_RANK" not in os.environ or os.environ.get("CRF_DEBUG"):
        yield
        return
    rank = rank_of_process()
    try:
        with contextlib.nullcontext() if rank == 0 else _streams_dropped():
            yield
    except Exception as error:
        shown = _error_of_rank(error, rank, _errors_of_ranks(error, rank))
        if shown is error:
            raise
        raise shown from error


@contextlib.contextmanager
def _streams_dropped() -> Generator[None]:
    """Point stdout and stderr of the process, file descriptors 1 and 2, nowhere."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, descriptor in zip((1, 2), before, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def _error_of_rank(error: Exception, rank: int, others: dict[int, str]) -> Exception:
    """Return what this rank raises: its own error, or SilentError where another rank prints the reason."""
    from composer_replication.errors import ComposerError

    if rank == 0:
        # What a rank sees of another one's end is a broken connection.
        return error if isinstance(error, ComposerError) or not others else SilentError()
    if others.get(0) == str(error) or (0 in others and not isinstance(error, ComposerError)):
        return SilentError()
    if isinstance(error, ComposerError):
        error.args = (f"rank {rank}: {error}",)
    return error


class SilentError(Exception):
    """The command failed, and another of its processes says why."""


_SECONDS_FOR_OTHERS = 3.0


def _errors_of_ranks(error: Exception, rank: int) -> dict[int, str]:
    """Tell the other ranks of this error, through the launcher's store, and return theirs by rank.

    A rank other than 0 waits a moment for rank 0; rank 0 waits where its own error may only be another one's echo.
    """
    from datetime import timedelta

    from composer_replication.errors import ComposerError

    found: dict[int, str] = {}
    is_own = isinstance(error, ComposerError)
    try:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        wait = timedelta(seconds=_SECONDS_FOR_OTHERS)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        prefix = f"composer_replication/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/error/"
        if is_own:
            store.set(f"{prefix}{rank}", str(error))
        awaited = [0] if rank else [] if is_own else range(1, int(os.environ["WORLD_SIZE"]))
        for other in awaited:
            with contextlib.suppress(RuntimeError):  # it did not fail, or not by an error of ours
                store.wait([f"{prefix}{other}"], wait)
                found[other] = store.get(f"{prefix}{other}").decode()
                break
    except (KeyError, ValueError, RuntimeError, OSError, ImportError):  # no store: every rank speaks for itself
        return {}
    return found
