"""Tables and progress. Text from logs is shown as text: no markup in it is obeyed, no control character is sent."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import argparse

    from rich.table import Table

    from composer_replication.config import CrfConfig


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
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


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

    cells = [[f"{cell:,}" if isinstance(cell, int) else plain(str(cell)) for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[index]) for row in cells), 0) for index, name in enumerate(columns)]
    is_narrow = sum(widths) + 3 * len(widths) > terminal_width()
    padding = (0, 0) if is_narrow else (0, 1)
    overflow = sum(widths) + len(widths) - terminal_width() if is_narrow else 0
    rich_table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=padding)
    rich_table.show_edge, rich_table.caption, rich_table.caption_justify = False, caption, "left"
    for index, name in enumerate(columns):
        is_cut, numbers = name == shrinks, bool(rows) and all(isinstance(row[index], int) for row in rows)
        is_whole = numbers or (shrinks is not None and not is_cut)
        rich_table.add_column(
            name,
            justify="right" if numbers else "left",
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_whole or is_cut,
            min_width=widths[index] if is_whole else min(widths[index], 10),
            max_width=max(10, widths[index] - overflow) if is_cut else None,
        )
    for number, row in enumerate(cells):
        if last_is_total and number == len(cells) - 1:
            rich_table.add_section()
        rich_table.add_row(*map(Text, row))
    return rich_table


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
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)


def print_json(value: dict[str, Any]) -> None:
    """A value with records in it, as one line on stdout."""
    from dataclasses import asdict, is_dataclass

    from composer_replication.canonical_json import encode

    def plain_data(part: Any) -> Any:
        if isinstance(part, list):
            return [plain_data(inner) for inner in part]
        return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part

    data = {key: plain_data(part) for key, part in value.items()}
    write_json(encode(data, where="output").decode())


def write_json(text: str) -> None:
    """JSON to stdout; what a terminal would act upon, even inside a string, is spelled out."""
    import json

    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        return
    sys.stdout.write("".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text) + "\n")


def rank_of_process() -> int:
    """Return this process's number among those that a launcher such as torchrun has started; 0 without one."""
    return int(os.environ.get("RANK", "0")) if "LOCAL_RANK" in os.environ else 0


@contextlib.contextmanager
def only_rank_0_prints() -> Generator[None]:
    """Drop what the other ranks print, what compiled libraries write to their streams included.

    CRF_DEBUG=1 lets every rank print.
    """
    if rank_of_process() == 0 or os.environ.get("CRF_DEBUG"):
        yield
        return
    _flush_streams()
    before = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        _flush_streams()
        for number, descriptor in zip((1, 2), before, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
            stream.flush()


def say_error(verb: str, text: str, *, is_own: bool) -> None:
    """Print why a command failed: once where all ranks of a launcher fail alike, with its number for another rank.

    `is_own` is False for an error that nobody raised on purpose. It may only be a consequence of another rank's
    failure, such as a broken connection: then the rank that knows the reason prints.
    """
    if not {"LOCAL_RANK", "RANK", "WORLD_SIZE"} <= os.environ.keys() or os.environ.get("CRF_DEBUG"):
        say(f"crf {verb}: {text}")
        return
    from composer_replication.trainer.same_start import errors_of_ranks

    rank, errors = rank_of_process(), errors_of_ranks(text, is_own=is_own)
    if rank == 0 and (is_own or not errors):
        say(f"crf {verb}: {text}")
    elif rank and errors.get(0) != text and (is_own or 0 not in errors):
        say(f"crf {verb}: rank {rank}: {text}")


# Options of the config on the command line: a file, `--set`, and flags that are short for a key.
#
# A knob is declared once, in `config/`. A flag here only says which key it is short for; the loader checks the value.

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_config_arguments(parser: argparse.ArgumentParser, *sections: str) -> None:
    """`--config` and `--set`, for options of these sections."""
    tables = " and ".join(f"[{section}]" for section in sections)
    parser.add_argument("--config", metavar="FILE", help=f"a TOML file; {tables} of it are read")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help=f"an option over the file's, of {tables} (`crf train --options` lists them all); may be repeated",
    )
    parser.set_defaults(short={}, sections=sections)


def add_short(
    parser: argparse.ArgumentParser, *names: str, key: str, value: object = None, hidden: bool = False, **options: Any
) -> None:
    """A flag, or an argument, that sets `key`: to `value`, or to what is typed behind it.

    The key's own sentence is its help. Hidden are flags that were known before `--set`, and still work.
    """
    from composer_replication.config import CrfConfig
    from composer_replication.config.schema import option_at
    from composer_replication.config.values import value_text

    spec = option_at(CrfConfig, key)
    default = f"; default {value_text(spec.default)}" if spec.default and value is None else ""
    sentence = f"{spec.doc[0].lower()}{spec.doc[1:].rstrip('.')}{default}"
    about: dict[str, Any] = {"help": argparse.SUPPRESS if hidden else sentence}
    about |= {"nargs": 0} if value is not None else {"type": spec.scalar, "metavar": _METAVARS[spec.scalar]}
    parser.add_argument(*names, action=_SetKey, key=key, value=value, is_list=spec.is_list, **(about | options))


def config_of(args: argparse.Namespace) -> CrfConfig:
    """The config that the arguments describe; `--set` of an option that this verb does not read is refused."""
    from composer_replication.config import CrfConfig, load

    config = load(CrfConfig, args.config, overrides_of(args))
    refuse_unread(args)
    return config


def overrides_of(args: argparse.Namespace) -> list[str]:
    """What flags and `--set` say, as overrides; of two that set one key the later in this list holds."""
    from composer_replication.config.values import value_text

    return [*(f"{key}={value_text(value)}" for key, value in args.short.items()), *args.set]


def refuse_unread(args: argparse.Namespace) -> None:
    """An option that a verb does not read must not look as if it had been followed."""
    from composer_replication.errors import ConfigError, explain

    for text in args.set:
        section = text.partition("=")[0].partition(".")[0].strip()
        if section not in args.sections:
            expected = f"one of {', '.join(f'[{name}]' for name in args.sections)}, which `crf {args.verb}` reads"
            raise ConfigError(
                explain(f"--set {text.partition('=')[0]}", got=f"an option of [{section}]", expected=expected)
            )


class _SetKey(argparse.Action):
    """Keeps what was typed, or the flag's own value, under the key that it is short for."""

    def __init__(self, *, key: str, value: object, is_list: bool, **options: Any) -> None:
        self._key, self._value, self._is_list = key, value, is_list
        super().__init__(**{"default": argparse.SUPPRESS, **options})

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        typed = values if isinstance(values, list) else [values]
        before = namespace.short.get(self._key, []) if self._is_list else []
        value = [*before, *typed] if self._is_list else typed[-1] if self._value is None else self._value
        namespace.short = {**namespace.short, self._key: value}
