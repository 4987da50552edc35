"""`crf diloco`: one training by several replicas on rented machines that share a bucket, and nothing else."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.console import (
    add_config_arguments,
    add_gate_arguments,
    is_terminal,
    log,
    overrides_of,
    plain,
    print_json,
    refuse_unread,
    show,
    table,
)

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.cli.replicas.asking import LaunchRequest
    from composer_replication.cli.replicas.launches import LaunchFile
    from composer_replication.cli.replicas.looking import LaunchStatus
    from composer_replication.cli.replicas.tending import Collected
    from composer_replication.diloco.serverless.executor import Executor


WHEN_INTERRUPTED = "`crf diloco watch` shows the replicas that go on, `crf diloco cancel` ends them"
_LAUNCH = "start replicas that train one model on a run's sessions, and start those again that die"
_WATCH = "show how a launch is doing: rounds, members, bytes, who is waited for, the time that is left"
_CANCEL = "end the replicas of a launch"
_COLLECT = "bring the trained weights and the replicas' logs; exit status 3 while some still run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "each has a page of its own: -h behind it"
    verbs = parser.add_subparsers(dest="what", required=True, metavar="{launch,watch,cancel,collect}", help=text)
    launch = _verb(verbs, "launch", _LAUNCH)
    launch.add_argument("--replicas", type=int, required=True, metavar="N", help="how many")
    kinds = ("local", "modal", "hf_jobs", "ray")
    launch.add_argument("--executor", choices=kinds, default="local", help="where they run; default local: here")
    text = "an option of the executor, such as image or hardware; may be repeated"
    launch.add_argument("--option", action="append", default=[], type=_parse_option, metavar="NAME=VALUE", help=text)
    text = "hand a variable of this machine to the replicas as a secret: its value is shown nowhere; may be repeated"
    launch.add_argument("--secret", action="append", default=[], metavar="NAME", help=text)
    text = "a variable of the replicas that anybody may see; may be repeated"
    launch.add_argument("--env", action="append", default=[], type=_parse_variable, metavar="NAME=VALUE", help=text)
    launch.add_argument("--gpu", metavar="KIND", help="as the executor calls it")
    launch.add_argument("--timeout", type=float, metavar="S", help="after which a replica is ended; default: none")
    _add_training(launch)
    launch.add_argument("--detach", action="store_true", help="start them, and do not wait")
    text = "say what would be started and sent, or what is wrong with it, and do neither"
    launch.add_argument("--dry-run", action="store_true", help=text)
    text = "start it although another launch of this bucket runs; each has a number, and rounds of its own"
    launch.add_argument("--beside", action="store_true", help=text)
    _add_relaunch(launch, 3)
    watch = _verb(verbs, "watch", _WATCH)
    watch.add_argument("--once", action="store_true", help="show it once")
    _add_relaunch(watch, 0)
    _verb(verbs, "cancel", _CANCEL)
    collect = _verb(verbs, "collect", _COLLECT)
    collect.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write")
    collect.add_argument(
        "--timeout", type=float, metavar="S", help="how long to wait for replicas; default: to the end"
    )
    for verb in ("watch", "cancel", "collect"):
        text = "which launch of the bucket, by the number that `launch` printed; default: the last of this machine"
        verbs.choices[verb].add_argument("--launch", type=int, metavar="N", dest="number", help=text)


def _verb(verbs: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.add_argument("bucket", metavar="BUCKET", help="s3://, gs://, az://, hf://, file:// or a folder")
    text = "the launch's own file, which says who its replicas are; default: one of this user's state folder"
    parser.add_argument("--launch-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    from composer_replication.cli.replicas.asking import ROUND_KEYS

    add_config_arguments(parser, "train", "loss", "render", "split")
    add_gate_arguments(parser)
    parser.add_argument("--trainer-module", metavar="MODULE", help="a trainer of your own instead of `crf train`")
    parser.add_argument("--trainer-fn", default="train", metavar="NAME", help="its function; default train")
    parser.add_argument("--trainer-kwargs-json", type=json.loads, default={}, metavar="JSON", help="its arguments")
    keys = ", ".join(key.name if key.default is None else f"{key.name} ({key.default})" for key in ROUND_KEYS.values())
    text = f"of the outer loop or the rounds, which are, with their defaults: {keys}; may be repeated"
    parser.add_argument("--round", action="append", default=[], type=_parse_option, metavar="NAME=VALUE", help=text)


def _add_relaunch(parser: argparse.ArgumentParser, default: int) -> None:
    text = f"how often a replica that failed is started again; default {default}"
    parser.add_argument("--relaunch", type=int, default=default, metavar="K", help=text)


def _parse_option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parse_variable(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def run(args: argparse.Namespace) -> int:
    return {"launch": _launch, "watch": _watch, "cancel": _cancel, "collect": _collect}[args.what](args)


def _launch(args: argparse.Namespace) -> int:
    import sys

    from composer_replication.cli.replicas import looking
    from composer_replication.cli.replicas.asking import prepare_launch
    from composer_replication.cli.replicas.checking import check_launch
    from composer_replication.cli.replicas.launches import canonical_bucket, local_launch_numbers, next_number
    from composer_replication.cli.replicas.looking import read_launch_status
    from composer_replication.diloco.store import open_store

    if str(Path.cwd()) not in sys.path:  # where processes of this machine look for a trainer
        sys.path.insert(0, str(Path.cwd()))
    request = _build_request(args)
    executor = looking.make_executor(request.executor, request.options)
    looked_at = open_store(request.bucket, probes=False)  # what is refused has left nothing behind
    for line in check_launch(looked_at, request, executor, args.launch_file, beside=args.beside):
        log(line)
    if args.dry_run:
        above = max(local_launch_numbers(canonical_bucket(request.bucket)), default=-1)
        _show_request(request, next_number(looked_at, above=above), looked_at.uri, as_json=args.json)
        return 0
    store = open_store(request.bucket)
    file = prepare_launch(store, request, args.launch_file)
    log(f"launch file: {file.path}")  # before anything is started, so that whoever is interrupted knows it
    looking.start_replicas(file, executor, log)
    launch = file.read().launch
    log(f"launch {launch.number} at {store.uri}: {launch.replicas} replicas by {launch.executor}")
    if args.detach:
        arguments = f"{args.bucket} --launch {launch.number}"
        log(f"to see how they do: `crf diloco watch {arguments}`; to end them: `crf diloco cancel {arguments}`")
        return show_status(read_launch_status(store, file, executor), args.bucket, as_json=args.json)
    return _tend(args, store, file, executor)


def _build_request(args: argparse.Namespace) -> LaunchRequest:
    from composer_replication.cli.replicas import asking
    from composer_replication.cli.replicas.asking import split_round_settings

    outer, settings = split_round_settings(args.round)
    options = {**dict(args.option), "secrets": args.secret, "env": dict(args.env)}
    if args.detach:
        options |= {"local": {"tied": False}, "ray": {"detached": True}}.get(args.executor, {})
    if args.trainer_module is not None:
        entry_point = {"module": args.trainer_module, "function": args.trainer_fn}
        training: dict[str, Any] = {**entry_point, "arguments": {**args.trainer_kwargs_json, **outer}}
    else:
        refuse_unread(args)
        training = asking.training_request(
            args.config, overrides_of(args), outer, no_scrub=args.no_scrub, allowed=args.allow
        )
    return asking.LaunchRequest(
        bucket=asking.bucket_for_replicas(args.bucket, args.executor),
        executor=args.executor,
        replicas=args.replicas,
        settings=settings,
        options=options,
        gpu=args.gpu,
        timeout_s=args.timeout,
        **training,
    )


def _tend(args: argparse.Namespace, store: Any, file: LaunchFile, executor: Executor) -> int:
    import contextlib
    import sys

    from composer_replication.cli.replicas.tending import tend

    with contextlib.ExitStack() as shown:
        shown.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints to stdout when an actor dies
        if is_terminal(sys.stderr) and not args.json:
            from rich.console import Console
            from rich.live import Live

            live = shown.enter_context(Live(console=Console(file=sys.stderr), transient=True))
        else:
            live = None
        shown_before = set[int | str]()

        def on_status(sight: LaunchStatus) -> None:
            news = sight.trouble if sight.progress is None else sight.progress.step
            news = f"{news} stalled" if sight.stalled_s is not None else news
            if live is not None:
                live.update(launch_table(sight))
            elif news is not None and news not in shown_before:
                shown_before.add(news)
                log(round_line(sight))

        sight = tend(store, file, executor, relaunches=args.relaunch, on_status=on_status, on_message=log)
    return show_status(sight, args.bucket, as_json=args.json, is_said=True)


def _watch(args: argparse.Namespace) -> int:
    from composer_replication.cli.replicas.launches import (
        find_launch_file,
        list_launch_numbers,
        missing_file_error,
        read_notice,
    )
    from composer_replication.cli.replicas.looking import read_bucket_status, read_launch_status
    from composer_replication.diloco.store import open_store

    file, store = find_launch_file(args.bucket, args.number, args.launch_file), open_store(args.bucket, probes=False)
    if file is None:
        launch_numbers = list_launch_numbers(store)
        number = launch_numbers[-1] if args.number is None and launch_numbers else args.number
        notice = None if number is None or args.relaunch else read_notice(store, number)
        if notice is None:
            raise missing_file_error(args.bucket, args.number)
        log("no file of this launch is here: what follows is the bucket's word alone (--launch-file FILE)")
        return show_status(read_bucket_status(store, notice), args.bucket, as_json=args.json)
    executor = _executor_of(file, may_lack=not args.relaunch)
    if args.once or executor is None:
        return show_status(read_launch_status(store, file, executor), args.bucket, as_json=args.json)
    return _tend(args, store, file, executor)


def _cancel(args: argparse.Namespace) -> int:
    from composer_replication.cli.replicas.launches import find_launch_file, missing_file_error
    from composer_replication.cli.replicas.looking import cancel, describe_cancellation, read_launch_status

    # The bucket is not asked: machines are ended also when it is gone.
    if (file := find_launch_file(args.bucket, args.number, args.launch_file)) is None:
        raise missing_file_error(args.bucket, args.number)
    executor = _executor_of(file)
    assert executor is not None
    unended = cancel(file, executor)
    log(describe_cancellation(unended, file.read().launch, executor))
    show_status(read_launch_status(None, file, executor), args.bucket, as_json=args.json)
    return 1 if unended else 0


def _collect(args: argparse.Namespace) -> int:
    from composer_replication.cli.main import DONE, FAILED, NOT_YET
    from composer_replication.cli.replicas.launches import find_launch_file, missing_file_error
    from composer_replication.cli.replicas.tending import collect
    from composer_replication.diloco.store import open_store

    if (file := find_launch_file(args.bucket, args.number, args.launch_file)) is None:
        raise missing_file_error(args.bucket, args.number)
    store, number = open_store(args.bucket, probes=False), file.read().launch.number
    executor = _executor_of(file, may_lack=True)
    collected = collect(store, file, executor, args.output, timeout_s=args.timeout, on_message=log)
    _show_collected(collected, number, args.bucket, as_json=args.json)
    if any(outcome["status"] not in ("succeeded", "pending", "running") for outcome in collected.outcomes):
        return FAILED
    return NOT_YET if collected.running else DONE


def _executor_of(file: LaunchFile, *, may_lack: bool = False) -> Executor | None:
    """The executor of a launch; None where this machine has not what it needs, and that may be."""
    from composer_replication.cli.replicas.looking import make_executor
    from composer_replication.errors import MissingExtraError

    launch = file.read().launch
    try:
        return make_executor(launch.executor, launch.options)
    except MissingExtraError as error:
        if not may_lack:
            raise
        log(f"without the executor, by the bucket alone: {error}")
        return None


# A launch of replicas as a table and as lines: before it starts, while it runs, and when it has ended.

_MAX_RANKS_SHOWN, _MAX_SHOWN_S = 16, 1e9


def launch_table(sight: LaunchStatus) -> Table:
    """A row a replica; what the rounds are doing stands below."""
    from rich.markup import escape

    caption = escape(plain(round_line(sight)))
    rows = [
        (replica.rank, replica.status, _exit(replica.exit_code), replica.in_round, replica.attempt, replica.where)
        for replica in sight.replicas
    ]
    columns = ("rank", "status", "exit", "in the open round", "started again", "known as")
    return table(f"Launch {sight.launch.number}", columns, rows, caption=caption or None, shrinks="known as")


def round_line(sight: LaunchStatus) -> str:
    """Rounds, members, bytes, who is waited for, and how long it takes. Whoever may write to the bucket wrote it."""
    from composer_replication.cli.progress import duration

    progress = sight.progress
    if progress is None:
        return sight.trouble or ""
    total = "" if sight.launch.commits is None else f" of {sight.launch.commits}"
    parts = [f"round {progress.step}{total}"]
    if progress.rounds:
        last = progress.rounds[-1]
        seconds = duration(min(max(0.0, last.seconds), _MAX_SHOWN_S))
        parts += [f"last: rank {_ranks(sight, last.members)} in {seconds}, {_size(last.num_bytes)}"]
        if last.healed:
            parts.append(f"healed: {_ranks(sight, last.healed)}")
    if progress.stragglers:
        parts.append(f"waiting for rank {_ranks(sight, progress.stragglers)}")
    if sight.stalled_s is not None and sight.timing is not None:
        usual_s = sight.timing.usual_s
        usual = "below a second" if usual_s < 1 else f"about {duration(min(usual_s, _MAX_SHOWN_S))}"
        parts.append(f"stalled for {duration(sight.stalled_s)} (a round takes {usual})")
    if sight.eta_s is not None and not sight.is_over:
        parts.append(f"about {duration(sight.eta_s)} left")
    return "; ".join(parts)


def _failure_lines(sight: LaunchStatus, bucket: str, *, is_said: bool) -> list[str]:
    """Why replicas failed, a line each unless that `is_said` already, and how to see more."""
    from composer_replication.cli.replicas.tending import describe_failure

    failed = [replica for replica in sight.replicas if replica.error]
    lines = [] if is_said else [describe_failure(replica) for replica in failed]
    if failed:
        words = f"{bucket} --launch {sight.launch.number}"
        lines.append(f"all that they printed: `crf diloco collect {words} --timeout 0 -o DIR`, in DIR/logs")
    return lines


def show_status(sight: LaunchStatus, bucket: str, *, as_json: bool, is_said: bool = False) -> int:
    """0 unless a replica failed for good."""

    if as_json:
        commits = 0 if sight.progress is None else sight.progress.step
        counts = {"launch": sight.launch.number, "commits": commits, "of": sight.launch.commits}
        replicas = [replica._asdict() for replica in sight.replicas]
        timing = {"eta_s": sight.eta_s, "stalled_s": sight.stalled_s}
        print_json({**counts, **timing, "trouble": sight.trouble, "replicas": replicas})
    else:
        show(launch_table(sight))
        for line in _failure_lines(sight, bucket, is_said=is_said):
            log(line)
    return 1 if any(replica.status == "failed" for replica in sight.replicas) else 0


def _show_request(asked: LaunchRequest, number: int, uri: str, *, as_json: bool) -> None:
    """What a launch would send and start."""

    files = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in asked.files.items()}
    if as_json:
        print_json({"launch": number, "replicas": asked.replicas, "executor": asked.executor, "files": files})
        return
    rows = [*files.items(), ("all files", asked.num_bytes)]
    show(table("Into the bucket", ("file", "bytes"), rows, last_is_total=True))
    exchanges = "" if asked.commits is None else f", {asked.commits} exchanges"
    log(f"launch {number} at {uri}: {asked.replicas} replicas by {asked.executor}{exchanges}")
    log("nothing was sent, and nothing started; whether the bucket can be written was not tried")


def _show_collected(collected: Collected, number: int, bucket: str, *, as_json: bool) -> None:
    """What replicas ended with, and who has not ended."""

    outcomes, running = collected.outcomes, collected.running
    if as_json:
        weights = str(collected.weights or "")
        print_json({"launch": number, "weights": weights, "still_running": running, "outcomes": outcomes})
        return
    rows = [
        (outcome["rank"], outcome["status"], _exit(outcome["exit_code"]), outcome["error"] or "")
        for outcome in outcomes
    ]
    show(table(f"Launch {number}", ("rank", "status", "exit", "error"), rows, shrinks="error"))
    weights = collected.weights
    what = "no weights were left in the bucket" if weights is None else f"{weights}: the trained weights"
    log(f"{what}; {collected.folder / 'logs'}: what the replicas printed")
    if running:
        words = f"{bucket} --launch {number}"
        log(
            f"still running: rank {', '.join(map(str, running))}; wait (`crf diloco watch {words}`) and collect again, "
            f"or end them (`crf diloco cancel {words}`)"
        )


def _exit(code: int | None) -> str:
    """An exit status, and nothing where there is none."""
    return "" if code is None else str(code)


def _ranks(sight: LaunchStatus, ranks: Sequence[int]) -> str:
    """Ranks of this launch, as many as a line holds."""
    own_ranks = [rank for rank in ranks if rank in range(sight.launch.replicas)]
    more = f" and {len(own_ranks) - _MAX_RANKS_SHOWN} more" if len(own_ranks) > _MAX_RANKS_SHOWN else ""
    return ", ".join(map(str, own_ranks[:_MAX_RANKS_SHOWN])) + more


def _size(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number = number / 1000  # pyright: ignore[reportAssignmentType]
    return f"{number:.3g} GB"
