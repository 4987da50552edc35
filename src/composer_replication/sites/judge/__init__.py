"""Predict whether and how a call will fail, before it runs. Each verdict names its rule.

The judge knows what the session has shown so far and, optionally, earlier sessions in the project and a checkout. The
effect of most shell commands is unknown, and the verdict says so. A verdict never uses information from after the call.

judge          the verdict on one call
judged_calls   the verdicts on all calls in a conversation, and their accuracy
project_files  the files of a project at a given date, from git objects and from earlier sessions
"""

from composer_replication.sites.judge.judge import Judge, Judgement
from composer_replication.sites.judge.judged_calls import (
    JudgedCall,
    KindScore,
    RuleScore,
    Score,
    judged_calls,
    state_at_end,
)
from composer_replication.sites.judge.project_files import Checkout, EarlierSessions, PathKnowledge, Repository

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
