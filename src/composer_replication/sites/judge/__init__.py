"""Predict before a call runs whether it fails, and how. Each verdict names its rule.

The judge knows what the session has shown so far and, optionally, earlier sessions of the project and a checkout. The
effect of most shell commands is unknown, and the verdict says so. A verdict never uses what comes after the call.

checkout  what a project's files were at a date: from git's objects, and from earlier sessions
judge     the verdict on one call
walk      the verdicts on all calls of a conversation, and how often they were right
"""

from composer_replication.sites.judge.checkout import (
    Checkout,
    EarlierSessions,
    PathKnowledge,
    Repository,
)
from composer_replication.sites.judge.judge import Judge, Judgement
from composer_replication.sites.judge.walk import (
    JudgedCall,
    KindScore,
    RuleScore,
    Score,
    judged_calls,
    state_at_end,
)

__all__ = [
    "Checkout",
    "EarlierSessions",
    "Judge",
    "JudgedCall",
    "Judgement",
    "KindScore",
    "PathKnowledge",
    "Repository",
    "RuleScore",
    "Score",
    "judged_calls",
    "state_at_end",
]
