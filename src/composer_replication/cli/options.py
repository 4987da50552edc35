"""Options of the config on the command line: a file, `--set`, and flags that are short for a key.

A knob is declared once, in `config/`. A flag here only says which key it is short for; the loader checks the value.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.config import CrfConfig

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
    from composer_replication.config.writer import value_text

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
    from composer_replication.config.writer import value_text

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
