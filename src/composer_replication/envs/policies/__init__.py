"""Scripted agents that play the workspace: an expert, and agents that make and correct mistakes at set rates.

situation   what a transcript has shown so far; moves and played turns
flawed      the expert, the mistakes, and agents that make them
episode     `play`: one task, one policy, one seed; also the error sites and pairs to be found in the episode
"""

from composer_replication.envs.policies.episode import (
    Episode,
    Finding,
    RememberingRunner,
    Scripted,
    expected_findings,
    play,
    retrace,
)
from composer_replication.envs.policies.flawed import AGENTS, CARELESS, EXPERT, MISTAKES, FlawedAgent, Mistake, Policy
from composer_replication.envs.policies.situation import Move, PlayedTurn, Situation

__all__ = [
    "AGENTS",
    "CARELESS",
    "EXPERT",
    "MISTAKES",
    "Episode",
    "Finding",
    "FlawedAgent",
    "Mistake",
    "Move",
    "PlayedTurn",
    "Policy",
    "RememberingRunner",
    "Scripted",
    "Situation",
    "expected_findings",
    "play",
    "retrace",
]
