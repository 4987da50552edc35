"""Predict whether and how a call will fail, before it runs. Each verdict names its rule.

The judge knows what the session has shown so far and, optionally, earlier sessions in the project and a checkout. The
effect of most shell commands is unknown, and the verdict says so. A verdict never uses information from after the call.

checkout  the files of a project at a given date, from git objects and from earlier sessions
judge     the verdict on one call
walk      the verdicts on all calls in a conversation, and their accuracy
"""

from composer_replication.sites.judge.checkout import Checkout, EarlierSessions, PathKnowledge, Repository
from composer_replication.sites.judge.judge import Judge, Judgement
from composer_replication.sites.judge.walk import JudgedCall, KindScore, RuleScore, Score, judged_calls, state_at_end

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
