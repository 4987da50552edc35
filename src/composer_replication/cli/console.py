"""Console output of all verbs, and flags that set config keys.

Text from logs is printed literally: markup in it is not interpreted, and control characters are replaced, so that a log
cannot move the cursor or color the terminal.
"""

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
    """Add the options of the outgoing check for secrets, for verbs that send or export text."""
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="ID",
        help="allow a text that the outgoing check has reported; may be repeated",
    )
    parser.add_argument(
        "--no-scrub",
        action="store_true",
        help="skip the outgoing check; needed for a run that was ingested with --no-scrub",
    )


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. The stream is None if the caller has closed it (`2>&-`)."""
    return stream is not None and not stream.closed and stream.isatty()


def log(message: str) -> None:
    """Print a message to stderr."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] (closed: print would take stdout instead)
        return
    # stderr may be redirected to a full disk. Losing a message is better than losing the work.
    with contextlib.suppress(OSError):
        print(plain(message), file=sys.stderr)


def plain(text: str) -> str:
    """Return the text with every character replaced that a terminal would interpret as a control character."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 error" or "1,200 errors"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    last_is_total: bool = False,
    caption: str | None = None,
    shrinks: str | None = None,
) -> Table:
    """Return a table with right-aligned numbers.

    Args:
        title: Printed above the table.
        columns: The header.
        rows: The cells, row by row. If all cells of a column are integers, they get thousands separators.
        last_is_total: Draw a line above the last row.
        caption: An explanation of the table's terms, printed below it.
        shrinks: The column to truncate if the terminal is narrow; all other columns then keep their full width.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # The cells become `Text` below, so that rich does not read "[red]" in a cell as markup.
    cells = [[f"{cell:,}" if isinstance(cell, int) else plain(str(cell)) for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[index]) for row in cells), 0) for index, name in enumerate(columns)]
    # A cell takes three more columns for padding and rule; without padding, one more.
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
    """Return the width of the terminal, or 160 if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 160


def show(*tables: Table) -> None:
    """Print tables to stdout with a blank line between them."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        return
    from rich.console import Console

    class PipeConsole(Console):
        # rich would exit with status 1. `crf sites RUN | head` is not a failure: `main` handles BrokenPipeError.
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = PipeConsole(file=sys.stdout, highlight=False, soft_wrap=False, width=terminal_width())
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as one line of JSON on stdout. Dataclasses in the value become objects."""
    from dataclasses import asdict, is_dataclass

    from composer_replication.canonical_json import encode

    def plain_data(part: Any) -> Any:
        if isinstance(part, list):
            return [plain_data(inner) for inner in part]
        return asdict(part) if is_dataclass(part) and not isinstance(part, type) else part

    data = {key: plain_data(part) for key, part in value.items()}
    write_json(encode(data, where="output").decode())


def write_json(text: str) -> None:
    r"""Print JSON on stdout, with unprintable characters escaped (a BEL character in a string becomes \u0007)."""
    import json

    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        return
    sys.stdout.write("".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text) + "\n")


@contextlib.contextmanager
def quiet_libraries() -> Generator[None]:
    """Redirect the output of libraries to stderr, and hide their progress bars unless stderr is a terminal.

    TRL's warning about experimental features is silenced as well.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if not is_terminal(sys.stderr):
        # The second variable also hides the progress bars of transformers.
        for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
        if "huggingface_hub" in sys.modules:
            # It reads the variable at import, so setting the variable now has no effect.
            _hide_progress_bars()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _hide_progress_bars() -> None:
    """Switch off the progress bars of huggingface_hub and transformers."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    # transformers copies the hub's setting on import, so it needs a call only if it is imported already.
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()


def rank_of_process() -> int:
    """Return the rank of this process if a launcher such as torchrun started it, else 0."""
    # A cluster may set RANK for its own purposes; only together with LOCAL_RANK is it a launcher's.
    return int(os.environ.get("RANK", "0")) if "LOCAL_RANK" in os.environ else 0


# ---- Config options on the command line
# Every option is declared once, in `config/`. A flag such as --threshold only names the key that it sets: the option's
# declaration provides its help text, type and default, and the loader checks the value.

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def add_config_arguments(parser: argparse.ArgumentParser, *sections: str) -> None:
    """Add `--config` and `--set` for the options of the given config sections."""
    tables = " and ".join(f"[{section}]" for section in sections)
    parser.add_argument("--config", metavar="FILE", help=f"a TOML file, of which {tables} are read")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        help=f"set an option of {tables}, overriding the file (`crf train --options` lists all); may be repeated",
    )
    parser.set_defaults(short={}, sections=sections)


def add_config_flag(
    parser: argparse.ArgumentParser, *names: str, key: str, value: object = None, hidden: bool = False, **options: Any
) -> None:
    """Add a flag or argument that sets the config key `key`: to `value` if given, otherwise to what the user types.

    The help text is the key's description unless `options` contains a help text. `hidden` is for flags of earlier
    versions, which keep working but do not appear in the help.
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


def config_from_args(args: argparse.Namespace) -> CrfConfig:
    """Return the config that the arguments describe. Raises ConfigError for options that the verb does not use."""
    from composer_replication.config import CrfConfig, load

    config = load(CrfConfig, args.config, overrides_from_args(args))
    refuse_unread_options(args)
    return config


def overrides_from_args(args: argparse.Namespace) -> list[str]:
    """Return flags and `--set` options as overrides of config keys.

    If a key is overridden twice, the later override wins.
    """
    from composer_replication.config.values import value_text

    return [*(f"{key}={value_text(value)}" for key, value in args.short.items()), *args.set]


def refuse_unread_options(args: argparse.Namespace) -> None:
    """Raise ConfigError if `--set` names an option in a section that the verb does not read."""
    from composer_replication.errors import ConfigError, explain

    for text in args.set:
        section = text.partition("=")[0].partition(".")[0].strip()
        if section not in args.sections:
            # `crf sites --set train.model=x` is probably meant for another verb.
            expected = f"one of {', '.join(f'[{name}]' for name in args.sections)}, which `crf {args.verb}` reads"
            raise ConfigError(
                explain(f"--set {text.partition('=')[0]}", got=f"an option of [{section}]", expected=expected)
            )


class _SetKey(argparse.Action):
    """An argparse action that stores the flag's value in `args.short`, under the config key that the flag sets."""

    def __init__(self, *, key: str, value: object, is_list: bool, **options: Any) -> None:
        self._key, self._value, self._is_list = key, value, is_list
        super().__init__(**{"default": argparse.SUPPRESS, **options})

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        typed = values if isinstance(values, list) else [values]
        earlier = namespace.short.get(self._key, []) if self._is_list else []
        value = [*earlier, *typed] if self._is_list else typed[-1] if self._value is None else self._value
        # A new dict: the default one belongs to the parser and would be shared by all its calls.
        namespace.short = {**namespace.short, self._key: value}
