"""`crf completion SHELL`: print a script that completes verbs, options and choices, made from the parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from composer_replication.cli.console import print_json


class _Option(NamedTuple):
    """An option of a verb, or an argument, which has no names."""

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    takes_value: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write for")
    parser.add_argument("--json", action="store_true", help="print verbs and options as JSON instead")


def run(args: argparse.Namespace) -> int:
    verbs = words_of_verbs()
    if args.json:
        options = {verb: [name for word in words for name in word.names] for verb, (_, words) in verbs.items()}
        print_json({"verbs": options})
        return 0
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](verbs), end="")
    return 0


def words_of_verbs() -> dict[str, tuple[str, list[_Option]]]:
    """Return the summary and the options of each verb. Hidden options stay hidden."""
    from composer_replication.cli.main import build_parser

    # argparse has no public way to list what was added to a parser.
    (verbs,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {name: (parser.description or "", list(_words(parser))) for name, parser in verbs.choices.items()}


def _words(parser: argparse.ArgumentParser) -> Iterator[_Option]:
    """Yield the options of a verb. For a verb with subcommands, these and all their options, each once."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield _word(action)
            inner = (
                word
                for subparser in action.choices.values()
                for word in _words(subparser)
                if "--help" not in word.names
            )
            yield from {word.names: word for word in inner}.values()
        elif action.help != argparse.SUPPRESS:
            yield _word(action)


def _word(action: argparse.Action) -> _Option:
    text = re.sub(r"\s+", " ", action.help or "").replace("%%", "%")
    choices = tuple(map(str, action.choices or ()))
    return _Option(tuple(action.option_strings), text, choices, action.nargs != 0)


def _bash(verbs: dict[str, tuple[str, list[_Option]]]) -> str:
    """Return the script for bash: options by verb, choices by option. Elsewhere bash completes file names."""
    cases, values = list[str](), list[str]()
    for verb, (_, words) in verbs.items():
        names = " ".join(name for word in words for name in word.names)
        here = " ".join(choice for word in words if not word.names for choice in word.choices)
        cases.append(f"        {verb}) options={shlex.quote(names)}; choices={shlex.quote(here)} ;;")
        for word in words:
            if word.names and word.takes_value:
                reply = f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(word.choices))} -- "$word"))'
                pattern = "|".join(f"{verb}:{name}" for name in word.names)
                values.append(f"        {pattern}) {reply if word.choices else 'COMPREPLY=()'}; return ;;")
    lines = [
        "# crf in bash: put `source <(crf completion bash)` into ~/.bashrc.",
        "_crf() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" verb="${COMP_WORDS[1]}"',
        "    local options='' choices=''",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W {shlex.quote(" ".join([*verbs, "--help", "--version"]))} -- "$word"))',
        "        return",
        "    fi",
        '    case "$verb" in',
        *cases,
        "    esac",
        '    case "$verb:$before" in',
        *values,
        "    esac",
        '    case "$word" in',
        '        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;',
        '        *) COMPREPLY=($(compgen -W "$choices" -- "$word")) ;;',
        "    esac",
        "}",
        "complete -o default -F _crf crf",
    ]
    return "\n".join(lines) + "\n"


def _zsh(verbs: dict[str, tuple[str, list[_Option]]]) -> str:
    cases = list[str]()
    for verb, (_, words) in verbs.items():
        specs = [spec for word in words for spec in _zsh_specs(word)]
        cases.append(f"        {verb}) _arguments {' '.join(map(shlex.quote, specs))} '*:file:_files' ;;")
    descriptions = " ".join(shlex.quote(f"{verb}:{_zsh_text(text)}") for verb, (text, _) in verbs.items())
    lines = [
        "#compdef crf",
        "# crf in zsh: put `source <(crf completion zsh)` after compinit in ~/.zshrc.",
        "_crf() {",
        "    local -a verbs",
        f"    verbs=({descriptions})",
        "    if (( CURRENT == 2 )); then",
        "        _describe 'verb' verbs",
        "        return",
        "    fi",
        "    local verb=$words[2]",
        "    shift words; (( CURRENT-- ))",
        "    case $verb in",
        *cases,
        "    esac",
        "}",
        "compdef _crf crf",
    ]
    return "\n".join(lines) + "\n"


def _zsh_specs(word: _Option) -> list[str]:
    value = "" if not word.takes_value else f":value:({' '.join(word.choices)})" if word.choices else ":value:_files"
    if not word.names:
        return [f"1:what:({' '.join(word.choices)})"] if word.choices else []
    return [f"*{name}[{_zsh_text(word.help)}]{value}" for name in word.names]


def _zsh_text(text: str) -> str:
    # These characters separate the parts of a spec such as "--set[help]:value:_files".
    return re.sub(r"[\[\]:\\]", " ", text)


def _fish(verbs: dict[str, tuple[str, list[_Option]]]) -> str:
    lines = ["# crf in fish: crf completion fish > ~/.config/fish/completions/crf.fish"]
    for verb, (text, _) in verbs.items():
        lines.append(f"complete -c crf -n __fish_use_subcommand -f -a {verb} -d {_fish_text(text)}")
    for verb, (_, words) in verbs.items():
        here = f"complete -c crf -n '__fish_seen_subcommand_from {verb}'"
        for word in words:
            choices = (
                f" -x -a {_fish_text(' '.join(word.choices))}" if word.choices else " -r" if word.takes_value else ""
            )
            flags = "".join(f" -l {n[2:]}" if n.startswith("--") else f" -s {n[1:]}" for n in word.names)
            if flags or word.choices:
                lines.append(
                    f"{here}{flags}{choices if flags else choices.replace(' -x', '')} -d {_fish_text(word.help)}"
                )
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
