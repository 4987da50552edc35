"""`crf evaluate RUN --before M --after ADAPTER`: are the trained weights better, on sessions they never saw?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.cli.console import (
    add_config_arguments,
    log,
    overrides_of,
    plain,
    print_json,
    refuse_unread,
    show,
    table,
)

WHEN_INTERRUPTED = "what was scored is kept, and the same command goes on from there"
_MOST_CALLS = 12
_ARMS = {"after": "after", "control": "control", "difference": "after - control"}
_CAPTION = (
    "A change from before to after, with its 95% interval over {over}s. The first\n"
    "figure was named {named} (evaluation.primary); all others are exploratory."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "evaluation", "render", "split", "train")
    parser.add_argument("run", metavar="RUN", help="a run directory with sites in it")
    weights = "a folder, a name on the hub, or an adapter; default: "
    parser.add_argument(
        "--before", metavar="M", help=f"the model to compare with: {weights}what the training began with"
    )
    parser.add_argument("--after", metavar="M", help=f"the model that is to be better: {weights}what the training left")
    text = f"one trained on shuffled hints and pairs, again for one of another shuffle: {weights}those in RUN/control"
    parser.add_argument("--control", action="append", default=[], metavar="M", help=text)
    parser.add_argument("--json", action="store_true", help="print evaluation.json")


def run(args: argparse.Namespace) -> int:
    from composer_replication.config.presets import load_with_preset
    from composer_replication.evaluation.evaluate import models_of, with_settings_of_training
    from composer_replication.runs import RunDir
    from composer_replication.runs.split import required_split

    config = load_with_preset(args.config, overrides_of(args))
    refuse_unread(args)
    run_dir = RunDir.open(args.run)
    if args.config is None:
        config = with_settings_of_training(config, run_dir, args.after, overrides_of(args))
    models_of(config, run_dir, before=args.before, after=args.after, control=args.control)
    required_split(run_dir)  # what is missing is said before the libraries that would not need it are loaded
    _show(_evaluate(config, run_dir, args), as_json=args.json)
    return 0


def _evaluate(config: Any, run_dir: Any, args: argparse.Namespace) -> dict[str, Any]:
    import contextlib
    import sys

    from composer_replication.cli.progress import training_progress
    from composer_replication.cli.train import quiet_libraries

    with contextlib.redirect_stdout(sys.stderr):  # what libraries say is not our output
        quiet_libraries()
        from composer_replication.evaluation.evaluate import evaluate

        arms = {"before": args.before, "after": args.after, "control": args.control}
        with training_progress(0) as progress:
            return evaluate(config, run_dir, **arms, progress=progress)


def _show(record: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(dict(record))
        return
    overall = [
        figure for figure in record["figures"] if figure["kind"] is None and _is_shown(figure, record["primary"])
    ]
    over = record["split"]["over"]
    if overall:
        columns = ("figure", "weights", "change", "95% interval", "unit", "better", "n", f"{over}s")
        rows = [_row(figure) for figure in sorted(overall, key=lambda figure: figure["name"] != record["primary"])]
        show(table("Held-out sessions", columns, rows, caption=_CAPTION.format(over=over, named=record["named"])))
    if record["sampled"] is not None:
        show(_mix_table(record["sampled"]))
    if record["drops"]:
        show(table("Left out", ("what", "number"), sorted(record["drops"].items())))
    if record["sampled"] is not None:
        print(
            f"drawn: {record['sampled']['n_samples']} actions of each model at {record['sampled']['n_states']} states"
        )
    for part, reason in record["not_run"].items():
        print(plain(f"not run: {part}: {reason}"))
    print(plain(_of_split(record["split"])))
    for sentence in (*record["verdict"]["sentences"], *record["verdict"].get("remarks", ())):
        print(plain(sentence))
    log("evaluation.json: all of it; evaluated.jsonl, sampled.jsonl and token_gaps.jsonl: the rows")


def _is_shown(figure: Mapping[str, Any], primary: str) -> bool:
    """What the control moved is shown beside the primary figure; the rest of it is in evaluation.json."""
    return figure["arm"] == "after" or figure["name"] == primary


def _mix_table(sampled: Mapping[str, Any]) -> Any:
    """Which calls each model drew: one that only looks, or says much and does nothing, shows here."""

    arms = list(sampled["by_arm"])
    names = dict.fromkeys(name for arm in arms for name in sampled["by_arm"][arm]["calls"])
    rows = [
        (name, *(sampled["by_arm"][arm]["calls"].get(name, 0) for arm in arms)) for name in list(names)[:_MOST_CALLS]
    ]
    return table("Drawn actions", ("call", *arms), rows)


def _of_split(split: Mapping[str, Any]) -> str:
    sessions, sites = split["sessions"], split["sites"]
    return (
        f"{sessions['test']} of {sum(sessions.values())} sessions held out by {split['by']}, with {sites['test']} of "
        f"{sum(sites.values())} sites; {split['near_duplicates']} states left out that learnt sessions hold too"
    )


def _row(figure: Mapping[str, Any]) -> Sequence[object]:
    has_none = figure["low"] == figure["high"]  # neither of them, or of values that are all the same
    interval = "-" if has_none else f"{figure['low']:+.3g} to {figure['high']:+.3g}"
    shuffles = figure.get("shuffles") or 1
    name, arm = figure["name"], _ARMS[figure["arm"]] + (f", {shuffles} shuffles" if shuffles > 1 else "")
    return (
        name,
        arm,
        f"{figure['estimate']:+.3g}",
        interval,
        figure["unit"],
        figure["better"],
        figure["n"],
        figure["sessions"],
    )
