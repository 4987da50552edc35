"""`crf diloco`: train one model with several replicas on rented machines that share only a bucket.

    launch   check the request, upload the run's files, start the replicas, and watch them
    watch    show rounds, stragglers and the remaining time; optionally restart failed replicas
    cancel   stop the replicas
    collect  download the trained weights and the logs

The work is done in `replicas/`. Its modules are imported inside the functions that need them, so that `crf diloco
--help` does not load the clients of Modal, Ray or the hub.
"""

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
    overrides_from_args,
    plain,
    print_json,
    refuse_unread_options,
    show,
    table,
)

if TYPE_CHECKING:
    from rich.table import Table

    from composer_replication.cli.replicas.launch_status import LaunchStatus
    from composer_replication.cli.replicas.launches import LaunchFile
    from composer_replication.cli.replicas.request import LaunchRequest
    from composer_replication.cli.replicas.supervision import Collected
    from composer_replication.diloco.serverless.executor import Executor


WHEN_INTERRUPTED = "replicas keep running: `crf diloco watch` shows them, `crf diloco cancel` stops them"
_LAUNCH = "start replicas that train one model on a run's sessions, and restart those that fail"
_WATCH = "show the state of a launch: rounds, members, bytes, stragglers, remaining time"
_CANCEL = "stop the replicas of a launch"
_COLLECT = "download the trained weights and the replicas' logs; exit status 3 while some still run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "`crf diloco VERB -h` shows the options of each"
    verbs = parser.add_subparsers(dest="what", required=True, metavar="{launch,watch,cancel,collect}", help=text)
    launch = _add_verb(verbs, "launch", _LAUNCH)
    launch.add_argument("--replicas", type=int, required=True, metavar="N", help="number of replicas")
    kinds = ("local", "modal", "hf_jobs", "ray")
    launch.add_argument(
        "--executor", choices=kinds, default="local", help="where they run; default local: on this machine"
    )
    text = "an option of the executor, such as image or hardware; may be repeated"
    launch.add_argument("--option", action="append", default=[], type=_parse_option, metavar="NAME=VALUE", help=text)
    text = "pass an environment variable of this machine to the replicas as a secret; may be repeated"
    launch.add_argument("--secret", action="append", default=[], metavar="NAME", help=text)
    text = "an environment variable of the replicas, visible to anybody; may be repeated"
    launch.add_argument("--env", action="append", default=[], type=_parse_variable, metavar="NAME=VALUE", help=text)
    launch.add_argument("--gpu", metavar="KIND", help="the executor's name of the GPU")
    launch.add_argument("--timeout", type=float, metavar="S", help="seconds until a replica is stopped; default: none")
    _add_training_options(launch)
    launch.add_argument("--detach", action="store_true", help="start them and do not wait")
    text = "check the request, and print what would be uploaded and started"
    launch.add_argument("--dry-run", action="store_true", help=text)
    text = "start it although another launch of this bucket is running; the two do not share rounds"
    launch.add_argument("--beside", action="store_true", help=text)
    _add_relaunch_option(launch, 3)
    watch = _add_verb(verbs, "watch", _WATCH)
    watch.add_argument("--once", action="store_true", help="print the state once and exit")
    _add_relaunch_option(watch, 0)
    _add_verb(verbs, "cancel", _CANCEL)
    collect = _add_verb(verbs, "collect", _COLLECT)
    collect.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write")
    collect.add_argument(
        "--timeout", type=float, metavar="S", help="seconds to wait for replicas; default: until they end"
    )
    for verb in ("watch", "cancel", "collect"):
        text = "number of the launch, as `launch` printed it; default: the last one from this machine"
        verbs.choices[verb].add_argument("--launch", type=int, metavar="N", dest="number", help=text)


def _add_verb(verbs: Any, name: str, about: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.add_argument("bucket", metavar="BUCKET", help="s3://, gs://, az://, hf://, file:// or a folder")
    text = "the launch file, which identifies the replicas; default: the one in this user's state folder"
    parser.add_argument("--launch-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    from composer_replication.cli.replicas.request import ROUND_KEYS

    add_config_arguments(parser, "train", "loss", "render", "split")
    add_gate_arguments(parser)
    parser.add_argument("--trainer-module", metavar="MODULE", help="a custom trainer instead of `crf train`")
    parser.add_argument("--trainer-fn", default="train", metavar="NAME", help="its function; default train")
    parser.add_argument("--trainer-kwargs-json", type=json.loads, default={}, metavar="JSON", help="its arguments")
    keys = ", ".join(key.name if key.default is None else f"{key.name} ({key.default})" for key in ROUND_KEYS.values())
    text = f"a setting of the outer loop or the rounds; may be repeated. With defaults: {keys}"
    parser.add_argument("--round", action="append", default=[], type=_parse_option, metavar="NAME=VALUE", help=text)


def _add_relaunch_option(parser: argparse.ArgumentParser, default: int) -> None:
    text = f"how often a failed replica is restarted; default {default}"
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

    from composer_replication.cli.replicas import launch_status
    from composer_replication.cli.replicas.launch_status import read_launch_status
    from composer_replication.cli.replicas.launches import canonical_bucket, local_launch_numbers, next_number
    from composer_replication.cli.replicas.preflight import check_launch
    from composer_replication.cli.replicas.request import prepare_launch
    from composer_replication.diloco.store import open_store

    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that --trainer-module is found, as with `python -m`
    request = _build_request(args)
    executor = launch_status.make_executor(request.executor, request.options)
    # Without probes, opening the store writes nothing: a refused launch leaves the bucket as it was.
    store = open_store(request.bucket, probes=False)
    for line in check_launch(store, request, executor, args.launch_file, beside=args.beside):
        log(line)
    if args.dry_run:
        above = max(local_launch_numbers(canonical_bucket(request.bucket)), default=-1)
        _show_request(request, next_number(store, above=above), store.uri, as_json=args.json)
        return 0
    store = open_store(request.bucket)
    file = prepare_launch(store, request, args.launch_file)
    log(f"launch file: {file.path}")  # before anything is started: after an interruption, `cancel` needs it
    launch_status.start_replicas(file, executor, log)
    launch = file.read().launch
    log(f"launch {launch.number} at {store.uri}: {launch.replicas} replicas by {launch.executor}")
    if args.detach:
        arguments = f"{args.bucket} --launch {launch.number}"
        log(f"Watch them with `crf diloco watch {arguments}`, stop them with `crf diloco cancel {arguments}`")
        return _show_status(read_launch_status(store, file, executor), args.bucket, as_json=args.json)
    return _supervise(args, store, file, executor)


def _build_request(args: argparse.Namespace) -> LaunchRequest:
    from composer_replication.cli.replicas import request
    from composer_replication.cli.replicas.request import split_round_settings

    outer, settings = split_round_settings(args.round)
    options = {**dict(args.option), "secrets": args.secret, "env": dict(args.env)}
    if args.detach:  # otherwise, replicas on this machine end with this process
        options |= {"local": {"tied": False}, "ray": {"detached": True}}.get(args.executor, {})
    if args.trainer_module is not None:
        entry_point = {"module": args.trainer_module, "function": args.trainer_fn}
        training: dict[str, Any] = {**entry_point, "arguments": {**args.trainer_kwargs_json, **outer}}
    else:
        refuse_unread_options(args)
        training = request.training_request(
            args.config, overrides_from_args(args), outer, no_scrub=args.no_scrub, allowed=args.allow
        )
    return request.LaunchRequest(
        bucket=request.bucket_for_replicas(args.bucket, args.executor),
        executor=args.executor,
        replicas=args.replicas,
        settings=settings,
        options=options,
        gpu=args.gpu,
        timeout_s=args.timeout,
        **training,
    )


def _supervise(args: argparse.Namespace, store: Any, file: LaunchFile, executor: Executor) -> int:
    import contextlib
    import sys

    from composer_replication.cli.replicas.supervision import supervise

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # Ray prints to stdout when an actor dies
        live = None
        if is_terminal(sys.stderr) and not args.json:
            from rich.console import Console
            from rich.live import Live

            live = stack.enter_context(Live(console=Console(file=sys.stderr), transient=True))
        logged = set[int | str]()

        def on_status(status: LaunchStatus) -> None:
            if live is not None:
                live.update(_launch_table(status))
                return
            # Without a terminal, one line per round, problem or stall: the status is read every two seconds.
            event = status.trouble if status.progress is None else status.progress.step
            event = f"{event} stalled" if status.stalled_s is not None else event
            if event is not None and event not in logged:
                logged.add(event)
                log(_round_line(status))

        status = supervise(store, file, executor, relaunches=args.relaunch, on_status=on_status, on_message=log)
    return _show_status(status, args.bucket, as_json=args.json, has_logged_failures=True)


def _watch(args: argparse.Namespace) -> int:
    from composer_replication.cli.replicas.launch_status import read_bucket_status, read_launch_status
    from composer_replication.cli.replicas.launches import (
        find_launch_file,
        list_launch_numbers,
        missing_file_error,
        read_notice,
    )
    from composer_replication.diloco.store import open_store

    file, store = find_launch_file(args.bucket, args.number, args.launch_file), open_store(args.bucket, probes=False)
    if file is None:
        numbers = list_launch_numbers(store)
        number = numbers[-1] if args.number is None and numbers else args.number
        notice = None if number is None or args.relaunch else read_notice(store, number)
        if notice is None:
            raise missing_file_error(args.bucket, args.number)
        log("There is no launch file here, so this is only what the bucket shows (add --launch-file FILE)")
        return _show_status(read_bucket_status(store, notice), args.bucket, as_json=args.json)
    executor = _make_executor(file, is_optional=not args.relaunch)
    if args.once or executor is None:
        return _show_status(read_launch_status(store, file, executor), args.bucket, as_json=args.json)
    return _supervise(args, store, file, executor)


def _cancel(args: argparse.Namespace) -> int:
    from composer_replication.cli.replicas.launch_status import cancel, describe_cancellation, read_launch_status
    from composer_replication.cli.replicas.launches import find_launch_file, missing_file_error

    # The bucket is not read, because machines must be stopped even if it no longer exists.
    if (file := find_launch_file(args.bucket, args.number, args.launch_file)) is None:
        raise missing_file_error(args.bucket, args.number)
    executor = _make_executor(file)
    assert executor is not None
    unended = cancel(file, executor)
    log(describe_cancellation(unended, file.read().launch, executor))
    _show_status(read_launch_status(None, file, executor), args.bucket, as_json=args.json)
    return 1 if unended else 0


def _collect(args: argparse.Namespace) -> int:
    from composer_replication.cli.main import DONE, FAILED, NOT_YET
    from composer_replication.cli.replicas.launches import find_launch_file, missing_file_error
    from composer_replication.cli.replicas.supervision import collect
    from composer_replication.diloco.store import open_store

    if (file := find_launch_file(args.bucket, args.number, args.launch_file)) is None:
        raise missing_file_error(args.bucket, args.number)
    store, number = open_store(args.bucket, probes=False), file.read().launch.number
    executor = _make_executor(file, is_optional=True)
    collected = collect(store, file, executor, args.output, timeout_s=args.timeout, on_message=log)
    _show_collected(collected, number, args.bucket, as_json=args.json)
    if any(outcome["status"] not in ("succeeded", "pending", "running") for outcome in collected.outcomes):
        return FAILED
    return NOT_YET if collected.running else DONE


def _make_executor(file: LaunchFile, *, is_optional: bool = False) -> Executor | None:
    """Return the executor of a launch.

    With `is_optional`, return None if a package that the executor needs is missing.
    """
    from composer_replication.cli.replicas.launch_status import make_executor
    from composer_replication.errors import MissingExtraError

    launch = file.read().launch
    try:
        return make_executor(launch.executor, launch.options)
    except MissingExtraError as error:
        if not is_optional:
            raise
        log(f"The executor is not available, so this is only what the bucket shows: {error}")
        return None


# Output: a row per replica, and the state of the rounds below. Numbers are bounded, because anybody who can write to
# the bucket could make them arbitrarily large.

_MAX_RANKS_SHOWN, _MAX_SHOWN_S = 16, 1e9


def _launch_table(launch_status: LaunchStatus) -> Table:
    """Return a table with one row per replica. Its caption is the state of the rounds."""
    from rich.markup import escape

    caption = escape(plain(_round_line(launch_status)))
    rows = [
        (
            replica.rank,
            replica.status,
            _format_exit_code(replica.exit_code),
            replica.in_round,
            replica.attempt,
            replica.where,
        )
        for replica in launch_status.replicas
    ]
    columns = ("rank", "status", "exit", "in the open round", "started again", "known as")
    return table(f"Launch {launch_status.launch.number}", columns, rows, caption=caption or None, shrinks="known as")


def _round_line(launch_status: LaunchStatus) -> str:
    """Describe the rounds in one line: their number, members, bytes and stragglers, and the remaining time."""
    from composer_replication.cli.progress import format_duration

    progress = launch_status.progress
    if progress is None:
        return launch_status.trouble or ""
    total = "" if launch_status.launch.commits is None else f" of {launch_status.launch.commits}"
    parts = [f"round {progress.step}{total}"]
    if progress.rounds:
        last = progress.rounds[-1]
        seconds = format_duration(min(max(0.0, last.seconds), _MAX_SHOWN_S))
        parts += [
            f"last: rank {_format_ranks(launch_status, last.members)} in {seconds}, {_format_size(last.num_bytes)}"
        ]
        if last.healed:
            parts.append(f"healed: {_format_ranks(launch_status, last.healed)}")
    if progress.stragglers:
        parts.append(f"waiting for rank {_format_ranks(launch_status, progress.stragglers)}")
    if launch_status.stalled_s is not None and launch_status.timing is not None:
        usual_s = launch_status.timing.usual_s
        usual = "below a second" if usual_s < 1 else f"about {format_duration(min(usual_s, _MAX_SHOWN_S))}"
        parts.append(f"stalled for {format_duration(launch_status.stalled_s)} (a round takes {usual})")
    if launch_status.eta_s is not None and not launch_status.is_over:
        parts.append(f"about {format_duration(launch_status.eta_s)} left")
    return "; ".join(parts)


def _failure_lines(launch_status: LaunchStatus, bucket: str, *, has_logged_failures: bool) -> list[str]:
    """Return lines that say why replicas failed (unless this was logged already), and how to see their full output."""
    from composer_replication.cli.replicas.supervision import describe_failure

    failed = [replica for replica in launch_status.replicas if replica.error]
    lines = [] if has_logged_failures else [describe_failure(replica) for replica in failed]
    if failed:
        arguments = f"{bucket} --launch {launch_status.launch.number}"
        lines.append(f"their full output: `crf diloco collect {arguments} --timeout 0 -o DIR`, then see DIR/logs")
    return lines


def _show_status(launch_status: LaunchStatus, bucket: str, *, as_json: bool, has_logged_failures: bool = False) -> int:
    """Print the state of a launch, and return the exit status: 1 if a replica has failed."""

    if as_json:
        commits = 0 if launch_status.progress is None else launch_status.progress.step
        counts = {"launch": launch_status.launch.number, "commits": commits, "of": launch_status.launch.commits}
        replicas = [replica._asdict() for replica in launch_status.replicas]
        timing = {"eta_s": launch_status.eta_s, "stalled_s": launch_status.stalled_s}
        print_json({**counts, **timing, "trouble": launch_status.trouble, "replicas": replicas})
    else:
        show(_launch_table(launch_status))
        for line in _failure_lines(launch_status, bucket, has_logged_failures=has_logged_failures):
            log(line)
    return 1 if any(replica.status == "failed" for replica in launch_status.replicas) else 0


def _show_request(request: LaunchRequest, number: int, uri: str, *, as_json: bool) -> None:
    """Print what a launch would upload and start."""

    files = {
        name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in request.files.items()
    }
    if as_json:
        print_json({"launch": number, "replicas": request.replicas, "executor": request.executor, "files": files})
        return
    rows = [*files.items(), ("all files", request.num_bytes)]
    show(table("Into the bucket", ("file", "bytes"), rows, last_is_total=True))
    exchanges = "" if request.commits is None else f", {request.commits} exchanges"
    log(f"launch {number} at {uri}: {request.replicas} replicas by {request.executor}{exchanges}")
    log("Dry run: nothing was uploaded or started, and write access to the bucket was not checked")


def _show_collected(collected: Collected, number: int, bucket: str, *, as_json: bool) -> None:
    """Print how the replicas ended, where the weights and logs are, and which replicas are still running."""

    outcomes, running = collected.outcomes, collected.running
    if as_json:
        weights = str(collected.weights or "")
        print_json({"launch": number, "weights": weights, "still_running": running, "outcomes": outcomes})
        return
    rows = [
        (outcome["rank"], outcome["status"], _format_exit_code(outcome["exit_code"]), outcome["error"] or "")
        for outcome in outcomes
    ]
    show(table(f"Launch {number}", ("rank", "status", "exit", "error"), rows, shrinks="error"))
    weights = collected.weights
    what = "there are no weights in the bucket" if weights is None else f"{weights}: the trained weights"
    log(f"{what}; {collected.folder / 'logs'}: the replicas' output")
    if running:
        arguments = f"{bucket} --launch {number}"
        log(
            f"Still running: rank {', '.join(map(str, running))}. Wait for them (`crf diloco watch {arguments}`) or "
            f"stop them (`crf diloco cancel {arguments}`), then collect again"
        )


def _format_exit_code(code: int | None) -> str:
    return "" if code is None else str(code)


def _format_ranks(launch_status: LaunchStatus, ranks: Sequence[int]) -> str:
    """Return the first `_MAX_RANKS_SHOWN` ranks as text. Ranks that the launch does not have are ignored."""
    valid_ranks = [rank for rank in ranks if rank in range(launch_status.launch.replicas)]
    more = f" and {len(valid_ranks) - _MAX_RANKS_SHOWN} more" if len(valid_ranks) > _MAX_RANKS_SHOWN else ""
    return ", ".join(map(str, valid_ranks[:_MAX_RANKS_SHOWN])) + more


def _format_size(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number = number / 1000  # pyright: ignore[reportAssignmentType]
    return f"{number:.3g} GB"
