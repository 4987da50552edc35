"""`crf completion SHELL`: print a shell script that completes verbs, options, choices and file names.

The library shtab generates the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from composer_replication.cli.console import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write for")
    parser.add_argument("--json", action="store_true", help="print verbs and options as JSON instead")


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.main import build_parser

    parser = build_parser()
    if args.json:
        print_json({"verbs": _options_by_verb(parser)})
    else:
        print(_script(parser, args.shell), end="")
    return 0


def _options_by_verb(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the options of each verb, including those of its subcommands. Hidden options are left out."""
    # argparse has no public way to list what was added to a parser.
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {
        verb: list(dict.fromkeys(name for action in _actions(subparser) for name in action.option_strings))
        for verb, subparser in verbs.choices.items()
    }


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        elif action.help != argparse.SUPPRESS:
            yield action


def _script(parser: argparse.ArgumentParser, shell: str) -> str:
    import shtab

    for action in _actions(parser):
        # Most values that are neither numbers nor choices are paths. shtab reads this attribute.
        if action.choices is None and action.nargs != 0 and action.type not in (int, float):
            vars(action)["complete"] = shtab.FILE
    script = shtab.complete(parser, shell)
    # shtab's script registers itself when zsh evaluates it, but not when zsh sources it.
    return script.replace("$zsh_eval_context[-1] == eval ]]", "$zsh_eval_context[-1] == (eval|file) ]]") + "\n"
