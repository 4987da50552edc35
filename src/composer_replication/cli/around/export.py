"""`crf export RUN`: weights for other programs to run, or sessions for other tools to read."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.cli.console import add_gate_arguments

if TYPE_CHECKING:
    from composer_replication.steps.around.export import ExportedWeights

HELP = "hand out a run's weights (merged, GGUF, Ollama, vLLM) with their card, or its sessions as a data set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory; with --to also a folder of trained weights")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", metavar="DIR", help="weights: merged, for vLLM and Ollama, with cards, in a new folder")
    what.add_argument("--atif", metavar="DIR", help="sessions as ATIF documents, one file per session, in a new folder")
    what.add_argument("--sft", metavar="DIR", help="good turns with what stood before them, for supervised training")
    what.add_argument("--sharegpt", metavar="DIR", help="conversations in ShareGPT's form")
    parser.add_argument("--adapter", metavar="DIR", help="with --to: these weights instead of the run's own")
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="with --to: of the merged weights; default auto: as the start weights, or float32 where that would lose",
    )
    parser.add_argument(
        "--push", metavar="REPO", help="with --to: send merged weights and card to OWNER/NAME on the hub"
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push: everybody may have it; else a public repository is refused"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_gate_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say

    _refuse_idle_options(args)
    if args.to is not None:
        return _weights(args)
    if args.no_scrub:
        say("crf export: --no-scrub: nothing is looked at, and what is written holds whatever the run holds")
    return _documents(args) if args.atif is not None else _data_set(args)


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """An option that does nothing here must not look as if it had been followed."""
    from composer_replication.errors import InputError, explain

    of_weights = {"--adapter": args.adapter, "--push": args.push, "--public": args.public}
    idle = [name for name, value in of_weights.items() if value and args.to is None]
    idle += ["--public"] if args.public and args.to is not None and args.push is None else []
    idle += ["--precision"] if args.precision != "auto" and args.to is None else []
    if idle:
        expected = "--to DIR, and --push REPO for --public"
        raise InputError(explain(", ".join(idle), got="nothing to use it for", expected=expected))


def _weights(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import print_json
    from composer_replication.cli.pipeline.run import quiet
    from composer_replication.steps.around.export import export_weights, refuse_used, trained_weights

    refuse_used(Path(args.to))
    trained_weights(args.run, args.adapter)
    with quiet():
        done = export_weights(
            args.run,
            Path(args.to),
            adapter=args.adapter,
            precision=args.precision,
            push=args.push,
            is_public=args.public,
        )
    if args.json:
        artefacts = {
            artefact.what: {"path": artefact.path and str(artefact.path), "about": artefact.sentence}
            for artefact in done.made
        }
        print_json({"folder": str(done.folder), "check": done.check, "made": artefacts, "pushed": done.pushed})
    else:
        _show_weights(done)
    return 0


def _show_weights(done: ExportedWeights) -> None:
    from composer_replication.cli.console import plain, say

    compared = (
        f"{done.check.num_tokens} tokens compared: {done.check}" if done.check.num_tokens else "copied as trained"
    )
    lines = [f"merged  {done.folder / 'merged'}: {compared}"]
    lines += [
        f"{artefact.what:<6}  {f'{artefact.path}: ' if artefact.path else ''}{artefact.sentence}"
        for artefact in done.made
    ]
    print(plain("\n".join(lines)))
    say(f"{done.folder}: weights and cards. `crf chat {done.folder / 'merged'} --once TEXT` talks to them")
    if done.pushed is not None:
        say(f"sent: {done.pushed}")


def _documents(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import plain, print_json, say
    from composer_replication.runs import RunDir
    from composer_replication.steps.around.export import export_atif

    written = export_atif(RunDir.open(args.run), Path(args.atif), no_scrub=args.no_scrub, allowed=args.allow)
    if args.json:
        print_json({"folder": args.atif, "documents": [str(path) for path in written]})
        return 0
    for path in written:
        print(plain(str(path)))
    say(f"{len(written)} ATIF documents in {args.atif}")
    return 0


def _data_set(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import print_json, say, show, table
    from composer_replication.runs import RunDir
    from composer_replication.steps.around.export import refuse_used
    from composer_replication.use.data_sets import export_data_set

    folder = Path(args.sft or args.sharegpt)
    refuse_used(folder)
    shape = "sft" if args.sft else "sharegpt"
    done = export_data_set(RunDir.open(args.run), folder, shape, no_scrub=args.no_scrub, allowed=args.allow)
    if args.json:
        print_json({"folder": str(folder), "rows": dict(done.rows)})
        return 0
    show(table("Rows", ("file", "rows"), [(f"{side}.jsonl", number) for side, number in done.rows.items()]))
    say(f"{folder}: README.md says what the fields are, and how to load them")
    return 0
