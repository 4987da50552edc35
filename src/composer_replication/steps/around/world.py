"""`crf world`: sessions of scripted agents in the pocket workspace, as logs that `crf ingest` reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from composer_replication.atomic import atomic_write_text
from composer_replication.envs.logs import PROJECT, log_lines, session_id
from composer_replication.envs.policies import AGENTS, MISTAKES, Episode, FlawedAgent, RememberingRunner, play
from composer_replication.envs.workspace import Difficulty, generate_task
from composer_replication.errors import InputError, explain


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeCount:
    """How often a mistake could have been made, was made, and was put right; `rate` is the agent's setting."""

    mistake: str
    kind: str
    meaning: str
    could: int
    number: int
    corrected: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldLogs:
    sessions: int
    solved: int
    calls: int
    mistakes: list[MistakeCount]
    sandbox: str
    """The wall that the tests ran behind (`TestRunner.kind`)."""


def agent_named(name: str, rates: Sequence[str] = (), corrects: float | None = None) -> FlawedAgent:
    """A known agent, with other rates where they are given as NAME=RATE, and another share that it corrects."""
    if name not in AGENTS:
        raise InputError(explain("--agent", got=repr(name), expected=f"one of {', '.join(sorted(AGENTS))}"))
    agent = AGENTS[name]
    parts = [text.partition("=") for text in rates]
    try:
        changed = {mistake: float(rate) for mistake, _, rate in parts}
    except ValueError as error:
        fix = f"Mistakes have these names: {', '.join(MISTAKES)}."
        raise InputError(explain("--rate", got=", ".join(rates), expected="NAME=RATE", fix=fix)) from error
    corrects = agent.corrects if corrects is None else corrects
    return replace(agent, rates={**agent.rates, **changed}, corrects=corrects)


def play_one(*, seed: int, difficulty: Difficulty, agent: FlawedAgent) -> Episode:
    """The episode of a seed: its number is that of the task and that of the agent's luck."""
    return play(generate_task(seed, difficulty=difficulty), agent, seed)


def write_logs(
    folder: Path,
    *,
    number: int,
    seed: int,
    difficulty: Difficulty,
    agent: FlawedAgent,
    runner: RememberingRunner | None = None,
) -> WorldLogs:
    """One log per session, for the seeds from `seed` on, in a folder as Claude Code lays out its projects."""
    if number < 1:
        raise InputError(explain("number of sessions", got=number, expected="1 or more"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "Name a folder that is not there yet, or delete that one."
        got = "a file or a folder with files in it"
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
    rows = _counts(agent.rates, could, mistakes, corrected)
    return WorldLogs(sessions=number, solved=solved, calls=calls, mistakes=rows, sandbox=runner.kind)


def _counts(
    rates: Mapping[str, float], could: Counter[str], mistakes: Counter[str], corrected: Counter[str]
) -> list[MistakeCount]:
    return [
        MistakeCount(
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
