"""`crf world`: run scripted agents that make mistakes on purpose, in a toy workspace.

play      show one session
logs      write many sessions as Claude Code logs, for `crf ingest`
advisers  serve scripted teachers of known skill at an OpenAI-compatible address, for `crf replay`
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from composer_replication.atomic import atomic_write_text
from composer_replication.cli.console import log, plain, print_json, show, table
from composer_replication.envs.logs import PROJECT, log_lines, session_id
from composer_replication.envs.policies import AGENTS, MISTAKES, Episode, FlawedAgent, RememberingRunner, play
from composer_replication.envs.workspace import Difficulty, generate_task
from composer_replication.errors import InputError, explain

WHEN_INTERRUPTED = "nothing is left running; run the same command again"
_PLAY = "show one session of an agent that makes mistakes on purpose"
_LOGS = "write sessions of such agents as Claude Code logs, for `crf ingest`"
_ADVISERS = "serve advisers of known skill at an OpenAI-compatible address, for `crf replay`; Ctrl-C stops it"
_INDENT, _MAX_PORT = "    ", 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "show one session, write many as logs, or serve advisers; `crf world VERB -h` shows the options of each"
    verbs = parser.add_subparsers(dest="what", required=True, metavar="{play,logs,advisers}", help=text)
    play = verbs.add_parser("play", help=_PLAY, description=_PLAY, allow_abbrev=False)
    _add_task_arguments(play, "seed of the task and of the agent's randomness")
    _add_agent_arguments(play)
    play.add_argument("--json", action="store_true", help="print the session as an ATIF document")
    logs = verbs.add_parser("logs", help=_LOGS, description=_LOGS, allow_abbrev=False)
    logs.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder for the logs")
    logs.add_argument("-n", "--number", type=int, default=80, metavar="N", help="number of sessions; default 80")
    _add_task_arguments(logs, "seed of the first session")
    _add_agent_arguments(logs)
    logs.add_argument("--json", action="store_true", help="print the counts as JSON")
    advisers = verbs.add_parser("advisers", help=_ADVISERS, description=_ADVISERS, allow_abbrev=False)
    advisers.add_argument("-n", "--number", type=int, default=80, metavar="N", help="number of tasks; default 80")
    _add_task_arguments(advisers, "seed of the first task")
    advisers.add_argument("--port", type=int, default=0, metavar="PORT", help="port; default 0: any free one")
    advisers.add_argument("--json", action="store_true", help="print address and models as JSON")


def _add_task_arguments(parser: argparse.ArgumentParser, of_what: str) -> None:
    text = f"{of_what}; default 10000 (0 to 999 are reserved for evaluation)"
    parser.add_argument("--seed", type=int, metavar="SEED", help=text)
    levels = ("easy", "medium", "hard")
    parser.add_argument("--difficulty", choices=levels, default="easy", help="difficulty of the tasks; default easy")


def _add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agent", default="careless", metavar="NAME", help="expert or careless; default careless")
    text = "probability of a mistake at each opportunity; may be repeated"
    parser.add_argument("--rate", action="append", default=[], metavar="NAME=RATE", help=text)
    parser.add_argument("--corrects", type=float, metavar="SHARE", help="share of its mistakes that it corrects")


def run(args: argparse.Namespace) -> int:
    from composer_replication.envs.workspace.generate import FIRST_TRAINING_SEED

    args.seed = FIRST_TRAINING_SEED if args.seed is None else args.seed
    return {"play": _run_play, "logs": _run_logs, "advisers": _run_advisers}[args.what](args)


def _run_play(args: argparse.Namespace) -> int:
    from composer_replication.envs.logs import to_atif
    from composer_replication.envs.workspace.sandbox import shared_runner

    agent = make_agent(args.agent, args.rate, args.corrects)
    episode = _play_one(seed=args.seed, difficulty=args.difficulty, agent=agent)
    _warn_about_isolation(shared_runner().kind)
    if args.json:
        print_json(to_atif(episode))
        return 0
    print(plain("\n".join(_episode_lines(episode))))
    return 0


def _warn_about_isolation(sandbox: str) -> None:
    from composer_replication.envs.workspace.sandbox import LIMITS_ONLY

    if sandbox == "rlimits":
        log(f"tests ran without isolation (rlimits): {LIMITS_ONLY}")


def _episode_lines(episode: Episode) -> list[str]:
    import json

    lines = [episode.task.prompt]
    for number, turn in enumerate(episode.turns):
        script = f"  [{turn.mistake}: {turn.outcome.kind}]" if turn.mistake else ""
        script += f"  [corrects turn {', '.join(map(str, turn.corrects))}]" if turn.corrects else ""
        lines += ["", f"{number}  {turn.move.text}{script}"]
        lines.append(f"{_INDENT}{turn.move.tool} {json.dumps(dict(turn.move.arguments), ensure_ascii=False)}")
        lines += [f"{_INDENT}| {line}" for line in turn.outcome.text.split("\n")]
    reward = episode.reward
    return [*lines, "", f"reward {reward.value:g}: {reward.passed} of {reward.total} checks pass"]


def _run_logs(args: argparse.Namespace) -> int:
    agent = make_agent(args.agent, args.rate, args.corrects)
    done = write_logs(args.output, number=args.number, seed=args.seed, difficulty=args.difficulty, agent=agent)
    _warn_about_isolation(done.sandbox)
    _show(done, args)
    return 0


def _show(done: _WorldLogs, args: argparse.Namespace) -> None:
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
            count.mistake,
            count.kind,
            count.meaning,
            count.could,
            count.number,
            f"{count.number / count.could:.2f}",
            f"{count.rate:.2f}",
            count.corrected,
        )
        for count in done.mistakes
    ]
    show(table("Mistakes", columns, rows, shrinks="what it is"))
    log(f"{done.sessions} sessions of {done.calls} calls in {args.output}; {done.solved} tasks solved")


def _run_advisers(args: argparse.Namespace) -> int:
    from composer_replication.envs.adviser_server import AdviserServer

    if args.number < 1:
        raise InputError(explain("-n", got=args.number, expected="1 or more tasks"))
    if not 0 <= args.port <= _MAX_PORT:
        fix = "Omit --port to use any free one."
        raise InputError(explain("--port", got=args.port, expected=f"0 to {_MAX_PORT}", fix=fix))
    seeds = range(args.seed, args.seed + args.number)
    try:
        server = AdviserServer(seeds, [args.difficulty], port=args.port)
    except OSError as error:
        fix = "Another program may be using it: omit --port to use any free one."
        raise InputError(explain(f"--port {args.port}", got=error, expected="a free port", fix=fix)) from error
    with server:
        if args.json:
            print_json({"base_url": server.base_url, "models": list(server.models)})
        else:
            print(server.base_url)
        sys.stdout.flush()  # a script may wait for the address
        log(f"models: {', '.join(server.models)}; Ctrl-C stops it")
        try:
            server.wait()
        except KeyboardInterrupt:  # the way to end it
            log("crf world advisers: stopped")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _MistakeCount:
    """How often an agent could have made a mistake, made it, and corrected it.

    The field names are those of `--json`.
    """

    mistake: str
    kind: str
    meaning: str
    could: int
    number: int
    corrected: int
    rate: float  # the agent's setting


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorldLogs:
    """Counts of the sessions, calls and mistakes in the logs that `write_logs` has written."""

    sessions: int
    solved: int
    calls: int
    mistakes: list[_MistakeCount]
    sandbox: str  # how the tests were isolated (`TestRunner.kind`)


def make_agent(name: str, rates: Sequence[str] = (), corrects: float | None = None) -> FlawedAgent:
    """Return the predefined agent `name` with some of its settings replaced.

    `rates` replaces rates of mistakes ("NAME=RATE"), and `corrects` replaces the share of mistakes that are corrected.
    """
    if name not in AGENTS:
        raise InputError(explain("--agent", got=repr(name), expected=f"one of {', '.join(sorted(AGENTS))}"))
    agent = AGENTS[name]
    parts = [text.partition("=") for text in rates]
    try:
        changed = {mistake: float(rate) for mistake, _, rate in parts}
    except ValueError as error:
        fix = f"The names are: {', '.join(MISTAKES)}."
        raise InputError(explain("--rate", got=", ".join(rates), expected="NAME=RATE", fix=fix)) from error
    corrects = agent.corrects if corrects is None else corrects
    return replace(agent, rates={**agent.rates, **changed}, corrects=corrects)


def _play_one(*, seed: int, difficulty: Difficulty, agent: FlawedAgent) -> Episode:
    """Play the episode of a seed. The seed determines both the task and the agent's random choices."""
    return play(generate_task(seed, difficulty=difficulty), agent, seed)


def write_logs(
    folder: Path,
    *,
    number: int,
    seed: int,
    difficulty: Difficulty,
    agent: FlawedAgent,
    runner: RememberingRunner | None = None,
) -> _WorldLogs:
    """Write one log per session, in Claude Code's folder layout. Session number i is played with `seed + i`."""
    if number < 1:
        raise InputError(explain("number of sessions", got=number, expected="1 or more"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "Choose a new folder, or delete that one."
        got = "a file, or a folder that is not empty"
        raise InputError(explain(str(folder), got=got, expected="a new folder", fix=fix))
    runner = runner or RememberingRunner()
    could, mistakes, corrected, solved, calls = Counter[str](), Counter[str](), Counter[str](), 0, 0
    for session_seed in range(seed, seed + number):
        episode = play(generate_task(session_seed, difficulty=difficulty), agent, session_seed, runner=runner)
        path = folder / PROJECT / f"{session_id(episode)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, "".join(f"{line}\n" for line in log_lines(episode)))
        could.update(name for turn in episode.turns for name in turn.could)
        mistakes.update(scripted.mistake for scripted in episode.script)
        corrected.update(scripted.mistake for scripted in episode.script if scripted.corrected_at is not None)
        solved, calls = solved + episode.reward.solved, calls + episode.reward.effort.calls
    rows = _mistake_rows(agent.rates, could, mistakes, corrected)
    return _WorldLogs(sessions=number, solved=solved, calls=calls, mistakes=rows, sandbox=runner.kind)


def _mistake_rows(
    rates: Mapping[str, float], could: Counter[str], mistakes: Counter[str], corrected: Counter[str]
) -> list[_MistakeCount]:
    return [
        _MistakeCount(
            mistake=name,
            kind=mistake.kind,
            meaning=mistake.meaning,
            could=could[name],
            number=mistakes[name],
            corrected=corrected[name],
            rate=rates.get(name, 0.0),
        )
        for name, mistake in MISTAKES.items()
        if could[name]
    ]
