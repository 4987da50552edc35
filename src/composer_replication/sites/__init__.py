"""Find the failed calls in a conversation, classify them, and decide who is to blame. Only failures that the model
caused are used for training.

find              the error sites in a conversation
classify          the verdict on one result
rule              failure rules, the kinds of failure with their usual blame, and the verdict type
rules             the built-in rules, in groups
cleaned_text      the text of a result without terminal codes, with positions mapped back to the original
verdict_revision  revision of verdicts by the rest of the session; repeated refusals by checks
retyped_commands  failed commands that worked after they were retyped differently
user_corrections  user messages that correct a call or state a rule
actions           the effect of calls: their commands, paths and edits
judge             prediction of failures before a call runs
"""

from composer_replication.sites.classify import classify
from composer_replication.sites.find import MIN_CONFIDENCE, find_error_sites
from composer_replication.sites.rule import (
    BLAMES,
    KINDS,
    USUAL_BLAME,
    FailureRule,
    Verdict,
    register_rule,
    rule,
    unregister_rule,
)

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
