"""Who plays in the workspace: an expert, agents that err at set rates, and what sites and pairs have to find of them.

situation   what a transcript says so far, moves and played turns
expert      looks, reads, changes, tests, finishes, from any transcript
mistakes    mistakes as data, and what an opportunity is
flawed      agents that err and put it right at set rates
episode     `play`: one task, one policy, one seed
findings    what sites and pairs have to find in an episode
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
from composer_replication.envs.policies.flawed import (
    AGENTS,
    CARELESS,
    EXPERT,
    MISTAKES,
    FlawedAgent,
    Mistake,
    Policy,
)
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
