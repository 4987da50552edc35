"""Find the failed calls of a conversation, their kind, and who is to blame. Only the model's errors are trained on.

rule        a failure rule, the kinds of failures with their usual blame, and the verdict on a result
rules       the built-in rules, by groups
view        the text of a result as the rules see it, mapped back to the original
classify    the verdict on one result
user_words  words of users that correct a call or state a rule
course      verdicts revised by the rest of the session; checks that refuse the same again
retyped     failed commands that worked when they were typed differently
find        the error sites of a conversation
actions     what calls do: their commands, paths, edits and effects
judge       expected failures of calls, before they are run
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
