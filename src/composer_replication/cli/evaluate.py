"""`crf evaluate RUN --before M --after ADAPTER`: compare models before and after training on held-out sessions.

The evaluation itself is in `evaluation.evaluate`, which is imported late because it loads torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.cli.console import (
    add_config_arguments,
    log,
    overrides_from_args,
    plain,
    print_json,
    quiet_libraries,
    refuse_unread_options,
    show,
    table,
)

WHEN_INTERRUPTED = "the scores so far are saved; run the same command to resume"
_MAX_CALLS_SHOWN = 12
_ARMS = {"after": "after", "control": "control", "difference": "after - control"}
_CAPTION = (
    "Change from before to after, with its 95% interval over {over}s. The first row is\n"
    "the primary metric, chosen {named} (evaluation.primary); the others are exploratory."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "evaluation", "render", "split", "train")
    parser.add_argument("run", metavar="RUN", help="run directory with sites (`crf sites`)")
    weights = "a folder, a hub name or an adapter; default: "
    parser.add_argument("--before", metavar="M", help=f"model to compare with: {weights}the initial model")
    parser.add_argument("--after", metavar="M", help=f"trained model: {weights}that of the run's training")
    text = f"control, trained on shuffled hints and pairs: {weights}those in RUN/control; repeat for other shuffles"
    parser.add_argument("--control", action="append", default=[], metavar="M", help=text)
    parser.add_argument("--json", action="store_true", help="print evaluation.json")


def run(args: argparse.Namespace) -> int:
    from composer_replication.config.presets import load_with_preset
    from composer_replication.evaluation.models import models_of, with_settings_of_training
    from composer_replication.runs import RunDir
    from composer_replication.runs.split import require_split_rows

    config = load_with_preset(args.config, overrides_from_args(args))
    refuse_unread_options(args)
    run_dir = RunDir.open(args.run)
    if args.config is None:
        config = with_settings_of_training(config, run_dir, args.after, overrides_from_args(args))
    models_of(config, run_dir, before=args.before, after=args.after, control=args.control)
    require_split_rows(run_dir)  # fail before torch is loaded, which takes seconds
    _show(_evaluate(config, run_dir, args), as_json=args.json)
    return 0


def _evaluate(config: Any, run_dir: Any, args: argparse.Namespace) -> dict[str, Any]:
    from composer_replication.cli.progress import training_progress

    with quiet_libraries():
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
        rows = [
            _result_row(figure) for figure in sorted(overall, key=lambda figure: figure["name"] != record["primary"])
        ]
        show(table("Held-out sessions", columns, rows, caption=_CAPTION.format(over=over, named=record["named"])))
    if record["sampled"] is not None:
        show(_mix_table(record["sampled"]))
    if record["drops"]:
        show(table("Left out", ("what", "number"), sorted(record["drops"].items())))
    if record["sampled"] is not None:
        print(
            f"sampled: {record['sampled']['n_samples']} actions of each model at {record['sampled']['n_states']} states"
        )
    for part, reason in record["not_run"].items():
        print(plain(f"not run: {part}: {reason}"))
    print(plain(_describe_split(record["split"])))
    for sentence in (*record["verdict"]["sentences"], *record["verdict"].get("remarks", ())):
        print(plain(sentence))
    log("All results are in evaluation.json; single rows in evaluated.jsonl, sampled.jsonl and token_gaps.jsonl")


def _is_shown(figure: Mapping[str, Any], primary: str) -> bool:
    """Return whether to print a result: any result of the trained model, but only the primary one of a control."""
    return figure["arm"] == "after" or figure["name"] == primary


def _mix_table(sampled: Mapping[str, Any]) -> Any:
    """Return a table of the calls sampled from each model. It reveals a model that only looks around and never acts."""

    arms = list(sampled["by_arm"])
    names = dict.fromkeys(name for arm in arms for name in sampled["by_arm"][arm]["calls"])
    rows = [
        (name, *(sampled["by_arm"][arm]["calls"].get(name, 0) for arm in arms))
        for name in list(names)[:_MAX_CALLS_SHOWN]
    ]
    return table("Sampled actions", ("call", *arms), rows)


def _describe_split(split: Mapping[str, Any]) -> str:
    sessions, sites = split["sessions"], split["sites"]
    return (
        f"{sessions['test']} of {sum(sessions.values())} sessions held out by {split['by']}, with {sites['test']} of "
        f"{sum(sites.values())} sites; {split['near_duplicates']} near duplicates of training states left out"
    )


def _result_row(figure: Mapping[str, Any]) -> Sequence[object]:
    has_no_interval = figure["low"] == figure["high"]  # both None, or all values are equal
    interval = "-" if has_no_interval else f"{figure['low']:+.3g} to {figure['high']:+.3g}"
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
