"""Which turn erred, how, and whose doing it was. Only what the model did wrong may be taught.

taxonomy       what can go wrong, whose doing it usually is, and a verdict on one result
view           a result's text as rules read it, every place traceable back
rule           how one kind of failure looks; rules of your own
harness_rules  what the agent refused, and calls that it could not even make
file_rules     failures of tools that read and change files
shell_rules    failures of commands that are the machine's or the model's slips
usage_rules    commands that could not work as they were typed
work_rules     failures that are the work: tests, checks, builds, programs
excuses        what the session had shown before, where that speaks for the model
classify       one result: did it fail, how, and whose doing was it
user_words     what a user said when refusing a call: does it correct the call, does it name a rule
find           a conversation's failing calls as sites
"""

from composer_replication.sites.classify import classify
from composer_replication.sites.find import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.rule import FailureRule, register_rule, rule, unregister_rule
from composer_replication.sites.taxonomy import BLAMES, KINDS, USUAL_BLAME, Verdict

__all__ = [
    "BLAMES",
    "KINDS",
    "MIN_CONFIDENCE",
    "USUAL_BLAME",
    "FailureRule",
    "Verdict",
    "classify",
    "find_error_sites",
    "register_rule",
    "rule",
    "unregister_rule",
]
