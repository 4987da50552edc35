"""Would this call fail, and how: said before it runs, from what its session had shown. Each verdict names its rule.

It knows the session and, where they are given, earlier sessions of the project and a checkout. What a shell command
does is mostly unknown, and said to be. A verdict never uses what comes after the call.

verdict      what the judge says of one call
history      what all commits have done to a project's files, and where branches that are gone ended
checkout     a project's files at a date, out of git's objects
earlier      what earlier sessions of a project have shown
known        what a verdict may rest on
schemas      what the tools of an agent take
file_rules   tools that read, search and change files
shell_rules  shell commands
judge        one call against what is known
walk         a conversation's calls: what the judge said of each, and what happened
score        how often it was right
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
