"""Which turn erred, how, and whose doing it was. Only what the model did wrong may be taught.

taxonomy      what can go wrong, whose doing it usually is, and a verdict on one result
view          a result's text as rules read it, every place traceable back
rule          how one kind of failure looks; rules of your own
rules         how each kind looks, group by group
unflagged     what says that a call failed where the log has no flag
surroundings  what stands around a message in the same result
excuses       what the session had shown before, where that speaks for the model
classify      one result: did it fail, how, and whose doing was it
user_words    what a user said when refusing a call: does it correct the call, does it name a rule
gates         hooks that refuse the same again: conventions of a project
calls         the calls of a session: which were made when, which worked, who spoke in between
again         failures that were known, with nothing done about them
course        what the calls before a failure, and a file written after it, say about it
retyped       commands that were typed anew and then worked
find          a conversation's failing calls as sites
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
