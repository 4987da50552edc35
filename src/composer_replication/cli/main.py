"""`crf`: finds the verb, runs it, and turns what went wrong into a sentence and an exit status.

0: done. 1: it could not be done, and stderr says why. 2: the command was not understood. 130: interrupted.
What nobody foresaw is a sentence, too; with CRF_DEBUG=1 it is a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from composer_replication.cli.failures import in_words

# In the order of the pipeline. Each module has HELP, add_arguments(parser) and run(args) -> exit status.
VERBS = ("ingest", "sites", "inspect", "teachers", "replay", "pairs", "train", "export", "forget")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crf` with these arguments; the exit status is returned, not raised."""
    from composer_replication.cli.console import say
    from composer_replication.errors import ComposerError

    try:
        args = build_parser().parse_args(argv)
    except SystemExit:  # help was asked for, or the command was not understood
        _drop_output()
        raise
    try:
        status = import_module(f"composer_replication.cli.{args.verb}").run(args)
        _flush()  # here, where a reader that is gone or a disk that is full can be noticed
        return status
    except KeyboardInterrupt:
        say("crf: interrupted; nothing was half written, and the same command goes on from here")
        return 130
    except BrokenPipeError:  # the reader of our stdout has seen enough
        _drop_output()
        return 0
    except ComposerError as error:
        say(f"crf {args.verb}: {error}")
    except Exception as error:
        if os.environ.get("CRF_DEBUG") and not isinstance(error, OSError):
            raise
        say(f"crf {args.verb}: {in_words(error)}")
    _drop_output()
    return 1


def _flush() -> None:
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] (closed by whoever started us)
        sys.stdout.flush()


def _drop_output() -> None:
    """What is left to write goes nowhere: Python would try once more when it ends, and complain on its own."""
    try:
        _flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs. No abbreviations: `--no-scrub` has to be meant."""
    from composer_replication.version import __version__

    parser = argparse.ArgumentParser(
        prog="crf",
        description="From the session logs of coding agents to a better model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crf {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        module = import_module(f"composer_replication.cli.{verb}")
        sub = verbs.add_parser(verb, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(sub)
    return parser
