"""Agents that err at set rates, and put their mistakes right at a set rate; everything else they do as the expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple, Protocol

from composer_replication.envs.policies.expert import Style, expert_move
from composer_replication.envs.policies.mistakes import MISTAKES, REPEAT, opportunities
from composer_replication.envs.policies.situation import Move, Situation
from composer_replication.envs.workspace.files import ROOT, absolute
from composer_replication.errors import InputError, explain

_AGAIN = {
    "file_not_found": "That path is not there.",
    "is_directory": "That is a folder.",
    "edit_not_read": "It has to be read first.",
    "edit_no_match": "The text has to be exactly as it is in the file.",
    "edit_ambiguous": "The text has to be unique.",
    "edit_noop": "Nothing would have changed.",
    "input_validation": "The arguments were wrong.",
    "tool_not_found": "There is no such tool.",
}
_GIVES_UP = "I stop here."
_ROUNDING = 1e-9


class Choice(NamedTuple):
    """A move, with what is scripted about it: as in `PlayedTurn`."""

    move: Move
    mistake: str | None = None
    corrects: tuple[int, ...] = ()
    could: tuple[str, ...] = ()


class Player(Protocol):
    """A policy within one episode."""

    def choose(self, situation: Situation) -> Choice: ...


class Policy(Protocol):
    """Who plays. `force` maps turns to mistakes that are to be made there."""

    @property
    def name(self) -> str: ...

    def start(self, seed: str, force: Mapping[int, str]) -> Player: ...


@dataclass(frozen=True, kw_only=True)
class FlawedAgent:
    """`rates` are those of mistakes, each per opportunity of it; `corrects` is the share of mistakes put right.

    At most one mistake is made at a turn: the rates of those that can be made in place of one tool add up to at most 1.
    """

    name: str = "flawed"
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    corrects: float = 1.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.rates) - set(MISTAKES))
        if unknown:
            raise InputError(explain("rates", got=f"{unknown}", expected=f"names among {sorted(MISTAKES)}"))
        for name, rate in (*self.rates.items(), ("corrects", self.corrects)):
            if not 0 <= rate <= 1:
                raise InputError(explain(f"rate of {name}", got=f"{rate:g}", expected="from 0 to 1"))
        for tool in frozenset[str]().union(*(mistake.at for mistake in MISTAKES.values())):
            together = [name for name in self.rates if tool in MISTAKES[name].at]
            total = sum(self.rates[name] for name in together)
            if total > 1 + _ROUNDING:
                got = f"{total:g} for {', '.join(together)}, which can be made in place of {tool}"
                raise InputError(explain("rates", got=got, expected="at most 1 together"))

    def start(self, seed: str, force: Mapping[int, str]) -> FlawedPlayer:
        return FlawedPlayer(self, seed, force)


class FlawedPlayer:
    """One episode of an agent. What it draws at a turn depends on the seed and the turn alone."""

    def __init__(self, agent: FlawedAgent, seed: str, force: Mapping[int, str]) -> None:
        self._agent, self._seed, self._force = agent, seed, force
        self._style = Style.of(seed)
        self._open: list[int] = []  # mistakes that are not settled yet: one, and perhaps its repetition
        self._will_correct = True

    def choose(self, situation: Situation) -> Choice:
        number = len(situation.turns)
        random = Random(f"{self._seed}/{number}")  # noqa: S311 (an episode, not a secret)
        if self._open:
            return self._after_mistake(situation, random)
        right = expert_move(situation, self._style)
        moves = opportunities(situation, right, random)
        mistake = self._drawn(number, moves, random)
        if mistake is None:
            return Choice(right, could=tuple(moves))
        self._open = [number]
        self._will_correct = random.random() < self._agent.corrects
        return Choice(moves[mistake], mistake, could=tuple(moves))

    def _drawn(self, number: int, moves: Mapping[str, Move], random: Random) -> str | None:
        """One draw for all: each mistake comes at its own rate, whichever others could be made."""
        if number in self._force:
            return self._forced(number, moves)
        remaining = random.random()
        for name in moves:
            remaining -= self._agent.rates.get(name, 0.0)
            if remaining < 0:
                return name
        return None

    def _forced(self, number: int, moves: Mapping[str, Move]) -> str:
        name = self._force[number]
        if name not in moves:
            raise InputError(explain(f"force at turn {number}", got=name, expected=f"one of {sorted(moves)}"))
        return name

    def _after_mistake(self, situation: Situation, random: Random) -> Choice:
        number, last = len(situation.turns), situation.turns[-1]
        could = (REPEAT,) if len(self._open) == 1 else ()
        if could and self._drawn(number, {REPEAT: last.move}, random) == REPEAT:
            self._open.append(number)
            return Choice(last.move, REPEAT, could=could)
        corrected_turns, self._open = tuple(self._open), []
        if not self._will_correct:
            return Choice(Move(text=_GIVES_UP, tool="Finish", arguments={}), could=could)
        return Choice(self._remedy(situation, corrected_turns[0]), corrects=corrected_turns, could=could)

    def _remedy(self, situation: Situation, turn: int) -> Move:
        """What the expert does here; after a guess, where a file is sought or known, exactly what was missing."""
        failed = situation.turns[turn]
        right = expert_move(situation, self._style)
        edit = situation.next_edit()
        text = f"{_AGAIN[failed.outcome.kind or '']} {right.text}"
        if failed.mistake == "read_folder":
            return Move(text=text, tool="LS", arguments={"path": ROOT})
        if failed.mistake == "guessed_path" and edit is not None:
            if situation.has_shown(edit.path):
                return Move(text=text, tool="Read", arguments={"file_path": absolute(edit.path)})
            name = edit.path.rpartition("/")[2]
            return Move(text=text, tool="Glob", arguments={"pattern": f"**/{name}", "path": ROOT})
        return replace(right, text=text)


EXPERT = FlawedAgent(name="expert")
CARELESS = FlawedAgent(
    name="careless",
    rates={
        **{"guessed_path": 0.15, "read_folder": 0.05, "near_name": 0.04, "wrong_folder": 0.05, "edit_unread": 0.2},
        **{"whitespace": 0.07, "guessed_text": 0.08, "made_before": 0.03, "ambiguous": 0.1, "noop": 0.03},
        **{"argument_name": 0.05, "argument_missing": 0.02, "argument_type": 0.03, "unknown_tool": 0.04, REPEAT: 0.15},
    },
    corrects=0.8,
)
AGENTS: Mapping[str, FlawedAgent] = {agent.name: agent for agent in (EXPERT, CARELESS)}
