"""Options of the config on the command line: a file, `--set`, and flags that are short for a key.

A knob is declared once, in `config/`. A flag here only says which key it is short for; the loader checks the value.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.config import CrfConfig

HIDDEN = argparse.SUPPRESS
"""Help of flags that were known before `--set`, and still work."""


def add_config_arguments(parser: argparse.ArgumentParser, *sections: str) -> None:
    """`--config` and `--set`, for options of these sections."""
    tables = " and ".join(f"[{each}]" for each in sections)
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
    parser: argparse.ArgumentParser,
    *names: str,
    key: str,
    value: object = None,
    is_list: bool = False,
    **options: Any,
) -> None:
    """A flag, or an argument, that sets `key`: to `value`, or to what is typed behind it."""
    action = _SetKey if value is None else _SetKeyToValue
    parser.add_argument(*names, action=action, key=key, value=value, is_list=is_list, **options)


def config_of(args: argparse.Namespace) -> CrfConfig:
    """The config that the arguments describe; `--set` of an option that this verb does not read is refused."""
    from composer_replication.config import CrfConfig, load

    config = load(CrfConfig, args.config, overrides_of(args))
    refuse_unread(args)
    return config


def overrides_of(args: argparse.Namespace) -> list[str]:
    """What flags and `--set` say, as overrides; of two that set one key the later in this list holds."""
    from composer_replication.config.writer import value_text

    return [*(f"{key}={value_text(value)}" for key, value in args.short.items()), *args.set]


def refuse_unread(args: argparse.Namespace) -> None:
    """An option that a verb does not read must not look as if it had been followed."""
    from composer_replication.errors import ConfigError, explain

    for text in args.set:
        section = text.partition("=")[0].partition(".")[0].strip()
        if section not in args.sections:
            expected = f"one of {', '.join(f'[{each}]' for each in args.sections)}, which `crf {args.verb}` reads"
            raise ConfigError(
                explain(f"--set {text.partition('=')[0]}", got=f"an option of [{section}]", expected=expected)
            )


class _SetKey(argparse.Action):
    """Keeps what was typed under the key that the flag is short for."""

    def __init__(self, *, key: str, value: object, is_list: bool, **options: Any) -> None:
        self.key, self.value, self.is_list = key, value, is_list
        super().__init__(**{"default": argparse.SUPPRESS, **options})

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        typed = self._typed(values)
        before = namespace.short.get(self.key, []) if self.is_list else []
        namespace.short = {**namespace.short, self.key: [*before, *typed] if self.is_list else typed[-1]}

    def _typed(self, values: Any) -> Sequence[object]:
        return values if isinstance(values, list) else [values]


class _SetKeyToValue(_SetKey):
    """Needs nothing behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def _typed(self, _values: Any) -> Sequence[object]:
        return [self.value]
