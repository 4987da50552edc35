"""Find the failed calls in a conversation, classify them, and decide who is to blame. Only the model's are trained on.

rule        failure rules, the kinds of failure with their usual blame, and the verdict on a result
rules       the built-in rules, in groups
view        the cleaned text of a result for the rules, with positions mapped back to the original
classify    the verdict on one result
user_words  user messages that correct a call or state a rule
course      revision of verdicts by the rest of the session; repeated refusals by checks
retyped     failed commands that worked after they were retyped differently
find        the error sites in a conversation
actions     the effect of calls: their commands, paths and edits
judge       prediction of failures before a call runs
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
