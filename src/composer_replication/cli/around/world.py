"""`crf world`: agents that err on purpose in a pocket workspace: one session to read, many as logs, and advisers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_replication.envs.policies import Episode
    from composer_replication.steps.around.world import WorldLogs

HELP = "play scripted agents in a small world: show a session, write many as logs, or answer as advisers"
_INDENT = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("play", "logs", "advisers"),
        help="play: show one session; logs: write sessions as Claude Code logs; advisers: a server that answers",
    )
    parser.add_argument(
        "-n",
        "--number",
        type=int,
        default=80,
        metavar="N",
        help="how many sessions, or tasks that advisers know; default 80",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="where to write the logs: a new folder")
    parser.add_argument(
        "--seed", type=int, metavar="SEED", help="of the first; default 10000: 0 to 999 are kept for evaluation"
    )
    parser.add_argument(
        "--difficulty", choices=("easy", "medium", "hard"), default="easy", help="of the tasks; default easy"
    )
    parser.add_argument("--agent", default="careless", metavar="NAME", help="expert or careless, the default")
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="NAME=RATE",
        help="how often the agent makes this mistake where it can; may be repeated",
    )
    parser.add_argument("--corrects", type=float, metavar="SHARE", help="which share of its mistakes it puts right")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="of the advisers; default 0: any free one")
    parser.add_argument("--json", action="store_true", help="print counts, or the session, as JSON")


def run(args: argparse.Namespace) -> int:
    from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED

    args.seed = FIRST_TRAINING_SEED if args.seed is None else args.seed
    return {"play": _play, "logs": _logs, "advisers": _advisers}[args.what](args)


def _play(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import plain, print_json
    from composer_replication.envs.logs import to_atif
    from composer_replication.envs.workspace.sandbox import shared_runner
    from composer_replication.steps.around.world import agent_named, play_one

    agent = agent_named(args.agent, args.rate, args.corrects)
    episode = play_one(seed=args.seed, difficulty=args.difficulty, agent=agent)
    _warn(shared_runner().kind)
    if args.json:
        print_json(to_atif(episode))
        return 0
    print(plain("\n".join(_lines(episode))))
    return 0


def _warn(sandbox: str) -> None:
    from composer_replication.cli.console import say
    from composer_replication.envs.workspace.sandbox import NO_WALL

    if sandbox == "rlimits":
        say(f"tests ran behind no wall (rlimits): {NO_WALL}")


def _lines(episode: Episode) -> list[str]:
    import json

    lines = [episode.task.prompt]
    for number, turn in enumerate(episode.turns):
        script = f"  [{turn.mistake}: {turn.outcome.kind}]" if turn.mistake else ""
        script += f"  [puts right turn {', '.join(map(str, turn.corrects))}]" if turn.corrects else ""
        lines += ["", f"{number}  {turn.move.text}{script}"]
        lines.append(f"{_INDENT}{turn.move.tool} {json.dumps(dict(turn.move.arguments), ensure_ascii=False)}")
        lines += [f"{_INDENT}| {line}" for line in turn.outcome.text.split("\n")]
    reward = episode.reward
    return [*lines, "", f"reward {reward.value:g}: {reward.passed} of {reward.total} checks hold"]


def _logs(args: argparse.Namespace) -> int:
    from composer_replication.errors import InputError, explain
    from composer_replication.steps.around.world import agent_named, write_logs

    agent = agent_named(args.agent, args.rate, args.corrects)
    if args.output is None:
        raise InputError(explain("crf world logs", got="no folder", expected="-o DIR"))
    done = write_logs(args.output, number=args.number, seed=args.seed, difficulty=args.difficulty, agent=agent)
    _warn(done.sandbox)
    _show(done, args)
    return 0


def _show(done: WorldLogs, args: argparse.Namespace) -> None:
    from composer_replication.cli.console import print_json, say, show, table

    if args.json:
        print_json(
            {
                "folder": str(args.output),
                "sessions": done.sessions,
                "solved": done.solved,
                "calls": done.calls,
                "mistakes": done.mistakes,
                "sandbox": done.sandbox,
            }
        )
        return
    columns = ("mistake", "kind", "what it is", "could", "made", "rate", "set", "put right")
    rows = [
        (
            each.mistake,
            each.kind,
            each.meaning,
            each.could,
            each.number,
            f"{each.number / each.could:.2f}",
            f"{each.rate:.2f}",
            each.corrected,
        )
        for each in done.mistakes
    ]
    show(table("Mistakes", columns, rows, shrinks="what it is"))
    say(f"{done.sessions} sessions of {done.calls} calls in {args.output}; {done.solved} tasks solved")


def _advisers(args: argparse.Namespace) -> int:
    from composer_replication.cli.console import say
    from composer_replication.envs.adviser_server import AdviserServer

    seeds = range(args.seed, args.seed + args.number)
    with AdviserServer(seeds, [args.difficulty], port=args.port) as server:
        print(server.base_url, flush=True)
        say(f"models: {', '.join(server.models)}; Ctrl-C stops it")
        server.wait()
    return 0
