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

# In the order of the pipeline. Each module has HELP, add_arguments(parser) and run(args) -> exit status.
VERBS = ("ingest", "sites", "inspect", "teachers", "replay", "pairs", "train", "export", "forget")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `crf` with these arguments; the exit status is returned, not raised."""
    from composer_replication.cli.console import say
    from composer_replication.errors import ComposerError

    args = build_parser().parse_args(argv)
    try:
        status = import_module(f"composer_replication.cli.{args.verb}").run(args)
        sys.stdout.flush()  # here, where a reader that is gone can be noticed
        return status
    except KeyboardInterrupt:
        print("crf: interrupted; nothing was half written, and the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ComposerError, OSError) as error:
        say(f"crf {args.verb}: {error}")
        return 1
    except Exception as error:
        if os.environ.get("CRF_DEBUG"):
            raise
        what = str(error).strip().splitlines()
        say(
            f"crf {args.verb}: {type(error).__name__}{': ' + what[0] if what else ''}. This was not foreseen: please"
            " report it, with what CRF_DEBUG=1 in front of the same command prints. No artefact was left half written."
        )
        return 1


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
